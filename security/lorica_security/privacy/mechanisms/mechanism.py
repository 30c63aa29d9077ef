"""A mechanism as a value: what was released with noise, and how a budget counts it.

A new one is a file beside this one, a line in named.py and a test. Its noise is Gaussian: an entry holds the numbers of
a GaussianRelease beside the mechanism's name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """`name` is the word in ledgers, which never changes; `meaning` is what was released, for people.

    `of_any_unit`: the noise covers all records of a silo together, so that a budget for any unit counts it.
    `joint`: several silos make the noise together; an entry says how many.
    """

    name: str
    meaning: str
    of_any_unit: bool = False
    joint: bool = False
