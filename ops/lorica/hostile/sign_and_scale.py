"""The delta that a silo trained, turned round or stretched."""

from typing import Final

import numpy as np

from lorica.hostile.attack import Attack, Exact, Known

TIMES: Final = 10.0


def flipped(known: Known) -> Exact:
    """Minus the silo's own delta, as long as it is."""
    return -known.own.astype(np.float64)


def scaled(known: Known) -> Exact:
    """The silo's own delta, ten times as long."""
    return TIMES * known.own.astype(np.float64)


SIGN_FLIP: Final = Attack(
    name="sign_flip",
    meaning="minus its own delta",
    source="Li, Xu, Chen, Giannakis and Ling, RSA, AAAI 2019",
    delta=flipped,
)
SCALING: Final = Attack(
    name="scaling",
    meaning="its own delta, ten times as long",
    source="Bagdasaryan, Veit, Hua, Estrin and Shmatikov, How To Backdoor Federated Learning, AISTATS 2020",
    delta=scaled,
)
