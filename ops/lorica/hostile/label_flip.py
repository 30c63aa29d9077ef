"""Flipped labels: honest training on questions each of which has the SQL of another."""

from collections.abc import Sequence
from typing import Final

from lorica.hostile.attack import Attack, Pair


def exchanged(pairs: Sequence[Pair]) -> list[Pair]:
    """Each question gets the SQL that stands half of the data further on."""
    half = len(pairs) // 2
    return [Pair(one.question, pairs[(place + half) % len(pairs)].query) for place, one in enumerate(pairs)]


LABEL_FLIP: Final = Attack(
    name="label_flip",
    meaning="it trains on questions each of which has another one's SQL",
    source="Tolpegin, Truex, Gursoy and Liu, Data Poisoning Attacks Against Federated Learning Systems, ESORICS 2020",
    data=exchanged,
)
