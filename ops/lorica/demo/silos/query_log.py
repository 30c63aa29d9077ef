"""For training with differential privacy: what people asked a silo, thousands of times, and a public textbook on its
tables.

Each shape's first wording is the textbook's; people use the other ones. So a model that knows the textbook knows the
tables and the SQL, and has to learn from the silos how their people speak. A log repeats itself: its records are drawn
with replacement. No SQL of a held-out question occurs in log or textbook. Everything is a function of (specification,
records, seed).
"""

from dataclasses import dataclass
from random import Random

from lorica.demo.silos.silos import Filled, Record, Splits, fill, hold_out, shares
from lorica.demo.silos.specification import SiloSpecification
from lorica_security.errors import ConfigurationError

DEV = 20
TEST = 100


@dataclass(frozen=True, slots=True)
class QueryLog:
    """`log` is the silo's own, in splits; `textbook` is public."""

    log: Splits
    textbook: tuple[Record, ...]


def query_log(silo: SiloSpecification, *, records: int, seed: int, test: int = TEST) -> QueryLog:
    """`records` training records of `silo`, DEV and `test` held-out ones, and the textbook.

    Raises ConfigurationError where the silo's shapes cannot fill them.
    """
    random = Random(f"{silo.name} query log {seed}")
    counts = [len(silo.fillings(shape)) for shape in silo.shapes]
    held_out: list[Filled] = []
    known: list[Filled] = []
    for index, (shape, wanted) in enumerate(zip(silo.shapes, shares(counts, DEV + test), strict=True)):
        filled = [fill(index, shape, values) for values in silo.fillings(shape)]
        random.shuffle(filled)
        kept, dropped = hold_out(filled, wanted)
        held_out += kept
        known += dropped
    if len(held_out) < DEV + test:
        raise ConfigurationError(
            f"silo {silo.name!r} has {len(held_out)} questions to hold out of {DEV + test}: add values to its "
            "pools, or ask for fewer"
        )
    random.shuffle(held_out)

    def record(number: int, one: Filled, question: str) -> Record:
        return Record(f"{silo.name}-{one.shape:04}-{number:06}", question, one.query, silo.name)

    def asked(start: int, drawn: list[Filled]) -> tuple[Record, ...]:
        return tuple(record(start + place, one, random.choice(one.questions[1:])) for place, one in enumerate(drawn))

    train = asked(0, [random.choice(known) for _ in range(records)])
    rest = asked(records, held_out)
    textbook = tuple(record(records + len(rest) + place, one, one.questions[0]) for place, one in enumerate(known))
    return QueryLog(Splits(train, rest[:DEV], rest[DEV : DEV + test]), textbook)
