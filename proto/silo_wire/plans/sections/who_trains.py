"""Which silos train in which round, where some have no labels; the plan and the round's number alone say it.

Equation 4 of FedParsing makes of w_s, which those with labels trained, and w_1 to w_K, which K others trained from it,

    (w_s + w_1 + ... + w_K) / (K + 1)  =  w_s + K / (K + 1) x mean of (w_k - w_s)

These are two rounds, one after the other: in the first, of odd number, silos with labels train alone and their mean
delta is applied whole; in the second the K others train from what came of it, and K / (K + 1) of their mean delta is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from lorica_security.identifiers import SiloName
from silo_wire.plans.sections.named_silos import is_among

Alone = Literal["never", "in_turn", "always"]
"""Whether silos with labels train without the others: "in_turn" in rounds of odd numbers, and the others in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoTrains:
    """`unlabelled`: the silos without labels, by name or by how names begin."""

    unlabelled: tuple[str, ...] = ()
    labelled_alone: Alone = "never"

    def labelled_round(self, round_number: int) -> bool:
        """Whether silos with labels are alone in this round."""
        return self.labelled_alone == "always" or (self.labelled_alone == "in_turn" and round_number % 2 == 1)

    def unlabelled_round(self, round_number: int) -> bool:
        """Whether silos without labels are alone in this round."""
        return self.labelled_alone == "in_turn" and round_number % 2 == 0

    def trains(self, silo: str, round_number: int) -> bool:
        if self.labelled_round(round_number):
            return not is_among(silo, self.unlabelled)
        return not self.unlabelled_round(round_number) or is_among(silo, self.unlabelled)

    def kinds(self, silos: Iterable[SiloName]) -> tuple[tuple[SiloName, ...], ...]:
        """`silos` that are ever in a round, those that are in rounds together in one part; no part is empty."""
        there = tuple(silos)
        parts = {self._kind(silo): tuple(one for one in there if self._kind(one) == self._kind(silo)) for silo in there}
        return tuple(part for kind, part in sorted(parts.items()) if kind)

    def _kind(self, silo: str) -> str:
        rounds = [number for number in (1, 2) if self.trains(silo, number)]
        return "".join(map(str, rounds))

    def server_rate(self, round_number: int, silos: int) -> float:
        """What the mean delta of `silos` silos, all that are in the sum, is multiplied by."""
        return silos / (silos + 1) if self.unlabelled_round(round_number) else 1.0

    def not_its_turn(self, silo: str, round_number: int) -> str:
        """Why the silo has no part in this round's training, in a line; "" where it has one."""
        if self.trains(silo, round_number):
            return ""
        who = "with" if self.labelled_round(round_number) else "without"
        return f"round {round_number} was ordered, in which silos {who} labels train alone by the plan"


EVERYBODY: Final = WhoTrains()
