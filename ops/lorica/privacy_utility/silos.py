"""The study's silos: two of the demo's, with more values to ask for.

The demo's hospital has 684 SQL queries that people ask for and its bank 414, which is too few to hold HELD_OUT of them
back and to leave as many to learn from. Tables, questions and SQL are the demo's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lorica.demo.silos.silos import SILOS
from lorica.demo.silos.specification import SiloSpecification, Value

HELD_OUT: Final = 500
"""Questions of each silo whose SQL is in no training data."""

_MORE: Final[Mapping[str, Mapping[str, tuple[Value, ...]]]] = {
    "hospital": {
        "year": tuple(range(2012, 2016)),
        "age": (25, 35, 45, 55, 65),
        "top": (8, 15, 20),
    },
    "bank": {
        "city": ("houston", "phoenix", "tampa", "memphis", "detroit"),
        "type": ("corporate", "premium", "trust"),
        "year": tuple(range(2010, 2017)),
        "amount": (2000, 4000, 8000, 15_000, 30_000),
        "top": (8, 12, 15, 20),
    },
}
NAMES: Final = tuple(_MORE)


def study_silos() -> Sequence[SiloSpecification]:
    return [replace(silo, pools=_with_more(silo)) for silo in SILOS if silo.name in _MORE]


def _with_more(silo: SiloSpecification) -> Mapping[str, tuple[Value, ...]]:
    more = _MORE[silo.name]
    return {name: (*values, *more.get(name, ())) for name, values in silo.pools.items()}
