"""Mimicry: all hostile silos send what one honest silo sends, so that the others count less."""

from typing import Final

import numpy as np

from lorica.hostile.attack import Attack, Exact, Known, Rows


def most_unlike(honest: Rows) -> int:
    """The honest silo farthest along the direction in which honest deltas differ most; the first of equal ones.

    The paper finds that direction over the first rounds and keeps to one silo; here each round is looked at anew.
    """
    apart = honest.astype(np.float64) - honest.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(apart @ apart.T)
    along = np.abs(vectors[:, int(values.argmax())])
    return int(np.flatnonzero(along >= along.max() * (1 - 1e-9))[0])


def copied(known: Known) -> Exact:
    one: Exact = known.honest[most_unlike(known.honest)].astype(np.float64)
    return one


MIMIC: Final = Attack(
    name="mimic",
    meaning="the delta of that honest silo which differs most from the others",
    source="Karimireddy, He and Jaggi, Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022",
    delta=copied,
)
