"""A bank: its branches, customers, accounts, loans and payments."""

from lorica.demo.silos.specification import (
    PEOPLE,
    Shape,
    SiloSpecification,
    Table,
    Value,
    date,
    each_text,
    key,
    link,
    number,
    text,
)

CITIES: tuple[Value, ...] = ("boston", "denver", "dallas", "chicago", "seattle", "austin", "miami")
ACCOUNT_TYPES: tuple[Value, ...] = ("savings", "checking", "business", "student", "joint")
PURPOSES: tuple[Value, ...] = ("house", "car", "education", "travel", "business", "renovation")
CATEGORIES: tuple[Value, ...] = ("rent", "groceries", "salary", "utilities", "insurance", "travel")
YEARS = range(2017, 2024)

BANK = SiloSpecification(
    name="bank",
    train=500,
    dev=50,
    test=80,
    tables=(
        Table(
            name="branch",
            rows=len(CITIES),
            columns=(key(), each_text("city", CITIES), number("employees", range(10, 90))),
        ),
        Table(
            name="customer",
            rows=400,
            columns=(key(), text("name", PEOPLE), text("city", CITIES), number("income", range(15_000, 150_000, 250))),
        ),
        Table(
            name="account",
            rows=900,
            columns=(
                key(),
                link("customer"),
                link("branch"),
                text("type", ACCOUNT_TYPES),
                number("balance", range(0, 60_000, 7)),
                date("opened", tuple(f"{y}-{m:02}-15" for y in YEARS for m in range(1, 13))),
            ),
        ),
        Table(
            name="loan",
            rows=900,
            columns=(
                key(),
                link("customer"),
                text("purpose", PURPOSES),
                number("amount", range(1_000, 90_000, 50)),
                number("year", YEARS),
            ),
        ),
        Table(
            name="payment",
            rows=2500,
            columns=(
                key(),
                link("account"),
                text("category", CATEGORIES),
                number("amount", range(5, 5_000)),
                number("year", YEARS),
            ),
        ),
    ),
    pools={
        "city": CITIES,
        "type": ACCOUNT_TYPES,
        "purpose": PURPOSES,
        "category": CATEGORIES,
        "year": tuple(YEARS),
        "amount": (1000, 5000, 10_000, 20_000, 50_000),
        "top": (3, 5, 10),
    },
    shapes=(
        Shape(
            "SELECT COUNT(*) FROM customer WHERE city = '{city}' AND income > {amount}",
            (
                "how many customers from {city} earn more than {amount}",
                "count the {city} customers with an income above {amount}",
            ),
        ),
        Shape(
            "SELECT name FROM customer WHERE city = '{city}' ORDER BY income DESC LIMIT {top}",
            (
                "who are the {top} customers from {city} with the highest income",
                "list the {top} richest customers in {city}",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM account WHERE type = '{type}' AND balance > {amount}",
            (
                "how many {type} accounts hold more than {amount}",
                "count the {type} accounts with a balance above {amount}",
                "number of {type} accounts over {amount}",
            ),
        ),
        Shape(
            "SELECT AVG(account.balance) FROM account JOIN branch ON account.branch_id = branch.id"
            " WHERE branch.city = '{city}' AND account.type = '{type}'",
            (
                "what is the average balance of {type} accounts at the {city} branch",
                "mean balance of {type} accounts in the {city} branch",
            ),
        ),
        Shape(
            "SELECT customer.name FROM customer JOIN account ON account.customer_id = customer.id"
            " WHERE account.type = '{type}' AND customer.city = '{city}'",
            (
                "which customers from {city} have a {type} account",
                "list the {city} customers with {type} accounts",
            ),
        ),
        Shape(
            "SELECT COUNT(*) FROM loan WHERE purpose = '{purpose}' AND year = {year}",
            (
                "how many {purpose} loans were given in {year}",
                "count the {purpose} loans of {year}",
                "number of {year} loans for {purpose}",
            ),
        ),
        Shape(
            "SELECT SUM(amount) FROM loan WHERE purpose = '{purpose}' AND year = {year}",
            (
                "what was the total amount of {purpose} loans in {year}",
                "total amount of the {year} loans for {purpose}",
            ),
        ),
        Shape(
            "SELECT customer.name FROM customer JOIN loan ON loan.customer_id = customer.id"
            " WHERE loan.purpose = '{purpose}' AND loan.amount > {amount}",
            (
                "which customers have a {purpose} loan above {amount}",
                "list the customers who borrowed more than {amount} for {purpose}",
            ),
        ),
        Shape(
            "SELECT AVG(amount) FROM payment WHERE category = '{category}' AND year = {year}",
            (
                "what was the average {category} payment in {year}",
                "mean amount of {category} payments in {year}",
            ),
        ),
        Shape(
            "SELECT MAX(amount) FROM payment WHERE category = '{category}' AND year = {year}",
            (
                "what was the largest {category} payment in {year}",
                "largest payment for {category} in {year}",
            ),
        ),
        Shape(
            "SELECT SUM(payment.amount) FROM payment JOIN account ON payment.account_id = account.id"
            " WHERE account.type = '{type}' AND payment.category = '{category}'",
            (
                "how much was paid for {category} from {type} accounts",
                "total of {category} payments from {type} accounts",
            ),
        ),
        Shape(
            "SELECT purpose, COUNT(*) FROM loan WHERE year = {year} AND amount > {amount} GROUP BY purpose",
            (
                "how many loans above {amount} were given in {year} for each purpose",
                "for each purpose count the {year} loans over {amount}",
            ),
        ),
    ),
)
