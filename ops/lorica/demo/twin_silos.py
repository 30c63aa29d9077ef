"""Eight silos of the demo's four kinds: two of a kind have the same tables, and no record or held-out question in
common.

So where one of two is hostile, what it alone would know is known to an honest silo too. Everything is a function of the
arguments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import SILOS, Record, Splits, write_silo
from lorica.demo.silos.specification import SiloSpecification
from lorica.demo.warm_start import write_textbook_start

SIZE: Final = "mini"
TEST: Final = 50
"""Held-out questions of each silo."""
WARM_START: Final = "warm-start"
Textbook = tuple[Record, ...]


def twin_logs(silo: SiloSpecification, records: tuple[int, int], *, seed: int) -> tuple[Splits, Splits, Textbook]:
    """The query logs of two silos of a kind, with so many training records, and their textbook."""
    first, second = records
    made = query_log(silo, records=first + second, seed=seed, test=2 * TEST)
    train, dev, test = made.log.train, made.log.dev, made.log.test
    half = len(dev) // 2
    one, other = Splits(train[:first], dev[:half], test[:TEST]), Splits(train[first:], dev[half:], test[TEST:])
    return one, other, made.textbook


def write_twin_silos(folder: Path, records: Mapping[str, tuple[int, int]], *, seed: int) -> None:
    """The silos below `folder`/silos, NAME-1 and NAME-2 with as many training records as `records` has for NAME, of
    each kind that it names, and a public model trained on their textbooks beside them."""
    textbook: list[Record] = []
    for silo in (one for one in SILOS if one.name in records):
        first, second, book = twin_logs(silo, records[silo.name], seed=seed)
        for number, splits in ((1, first), (2, second)):
            write_silo(folder / "silos" / f"{silo.name}-{number}", silo, seed=seed, splits=splits)
        textbook += book
    write_textbook_start(folder / WARM_START, textbook, size=SIZE, seed=seed)
