"""An insurer: its agents, members, policies and claims."""

from lorica.demo.silos.specification import (
    PEOPLE,
    Shape,
    SiloSpecification,
    Table,
    Value,
    each_text,
    key,
    link,
    number,
    text,
)

CITIES: tuple[Value, ...] = ("boston", "denver", "dallas", "chicago", "seattle", "austin")
AGENTS: tuple[Value, ...] = ("morgan", "parker", "reed", "stone", "turner")
PRODUCTS: tuple[Value, ...] = ("home", "auto", "life", "health", "travel")
CAUSES: tuple[Value, ...] = ("fire", "flood", "theft", "storm", "accident")
YEARS = range(2018, 2024)

INSURER = SiloSpecification(
    name="insurer",
    train=250,
    dev=36,
    test=60,
    tables=(
        Table(
            name="agent",
            rows=len(AGENTS),
            columns=(key(), each_text("name", AGENTS), text("city", CITIES)),
        ),
        Table(
            name="member",
            rows=300,
            columns=(key(), text("name", PEOPLE), text("city", CITIES), number("age", range(18, 90))),
        ),
        Table(
            name="policy",
            rows=900,
            columns=(
                key(),
                link("member"),
                link("agent"),
                text("product", PRODUCTS),
                number("premium", range(80, 4_000, 3)),
                number("year", YEARS),
            ),
        ),
        Table(
            name="claim",
            rows=1200,
            columns=(
                key(),
                link("policy"),
                text("cause", CAUSES),
                number("amount", range(100, 40_000, 9)),
                number("year", YEARS),
            ),
        ),
    ),
    pools={
        "city": CITIES,
        "agent": AGENTS,
        "product": PRODUCTS,
        "cause": CAUSES,
        "year": tuple(YEARS),
        "age": (30, 40, 50, 60),
        "amount": (500, 1000, 2000, 3000),
        "top": (3, 5, 10),
    },
    shapes=(
        Shape(
            "SELECT COUNT(*) FROM member WHERE city = '{city}' AND age > {age}",
            (
                "how many members from {city} are older than {age}",
                "count the members over {age} in {city}",
            ),
        ),
        Shape(
            "SELECT name FROM member WHERE city = '{city}' ORDER BY age DESC LIMIT {top}",
            (
                "who are the {top} oldest members from {city}",
                "list the {top} oldest members in {city}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM policy WHERE product = '{product}' AND premium > {amount}",
            (
                "how many {product} policies have a premium above {amount}",
                "count the {product} policies with premiums over {amount}",
            ),
        ),
        Shape(
            "SELECT AVG(premium) FROM policy WHERE product = '{product}' AND year = {year}",
            (
                "what was the average premium of {product} policies in {year}",
                "mean premium of the {year} {product} policies",
            ),
        ),
        Shape(
            "SELECT member.name FROM member JOIN policy ON policy.member_id = member.id"
            " WHERE policy.product = '{product}' AND member.city = '{city}'",
            (
                "which members from {city} have {product} insurance",
                "list the members in {city} with a {product} policy",
                "names of {city} members insured for {product}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM policy JOIN agent ON policy.agent_id = agent.id"
            " WHERE agent.name = '{agent}' AND policy.product = '{product}'",
            (
                "how many {product} policies did agent {agent} sell",
                "count the {product} policies of agent {agent}",
                "number of {product} policies sold by agent {agent}",
            ),
        ),
        Shape(
            "SELECT SUM(policy.premium) FROM policy JOIN agent ON policy.agent_id = agent.id"
            " WHERE agent.name = '{agent}' AND policy.year = {year}",
            (
                "what was the total premium of agent {agent} in {year}",
                "total premium sold by agent {agent} in {year}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM claim WHERE cause = '{cause}' AND year = {year}",
            (
                "how many claims for {cause} were filed in {year}",
                "count the {cause} claims of {year}",
                "number of {year} claims caused by {cause}",
            ),
        ),
        Shape(
            "SELECT MAX(amount) FROM claim WHERE cause = '{cause}' AND year = {year}",
            (
                "what was the largest claim for {cause} in {year}",
                "largest {cause} claim of {year}",
            ),
        ),
        Shape(
            "SELECT SUM(claim.amount) FROM claim JOIN policy ON claim.policy_id = policy.id"
            " WHERE policy.product = '{product}' AND claim.cause = '{cause}'",
            (
                "how much was claimed for {cause} on {product} policies",
                "total of {cause} claims on {product} policies",
            ),
        ),
        Shape(
            "SELECT cause, AVG(amount) FROM claim WHERE year = {year} AND amount > {amount} GROUP BY cause",
            (
                "what was the average claim above {amount} for each cause in {year}",
                "for each cause the mean of {year} claims over {amount}",
            ),
        ),
    ),
)
