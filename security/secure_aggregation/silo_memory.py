"""What a silo remembers across attempts, so that it is never in two sums over the same delta.

Rules, per plan: a silo takes no lower round than it took before; in one round, each attempt number once and ascending; and
once it has answered an unmask request, no further attempt of that round.

Why that is enough: let the attempts of a round be 1..k, with survivor sets S_1..S_k of which sums came out, and A_i the
honest silos that answered in attempt i: at least t - c of them, which is 2 or more (2t > n + c gives t - c > n - t; for
t = n, c + 2 <= min_survivors <= n). They join nothing later, so every member of A_1 is in no sum but S_1; a combination of
sums with S_1 in it contains all of A_1. Leave S_1 out, and the same holds of A_2 and S_2, and so on. Every combination of
sums thus contains all honest answerers of the first sum in it: one silo is never left alone.

The memory is on the silo's disk, numbered by its changes, so that whoever noted the number elsewhere sees that it was lost or
went back. A disk that is restored from a snapshot as a whole makes the silo one that may answer twice, which the parameter
`colluders` covers (2t > n + c): the others' memories still hold.
"""

from dataclasses import dataclass, replace

from security.errors import PolicyRefusal
from security.secure_aggregation.attempt import Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory:
    """`round` and `number` of the last attempt that was joined; `answered` is whether that round was unmasked."""

    plan: bytes
    round: int
    number: int
    answered: bool


@dataclass(frozen=True, slots=True)
class SiloMemory:
    """`sequence` counts the changes since the first."""

    plans: tuple[PlanMemory, ...] = ()
    sequence: int = 0

    def of(self, plan: bytes) -> PlanMemory | None:
        return next((memory for memory in self.plans if memory.plan == plan), None)

    def check_may_join(self, attempt: Attempt) -> None:
        """Raises PolicyRefusal for an attempt that could put one delta into two sums."""
        last = self.of(attempt.plan)
        if last is None or attempt.round > last.round:
            return
        if attempt.round < last.round:
            raise PolicyRefusal(
                "one_sum_per_round",
                f"round {attempt.round} was offered after round {last.round}: secure aggregation takes no lower round",
            )
        if last.answered:
            raise PolicyRefusal(
                "one_sum_per_round",
                f"round {attempt.round} was unmasked with this silo's help: it joins no further attempt of it",
            )
        if attempt.number <= last.number:
            raise PolicyRefusal(
                "one_sum_per_round",
                f"attempt {attempt.number} of round {attempt.round} was offered after attempt {last.number}: "
                "each number is used once",
            )

    def joined(self, attempt: Attempt) -> "SiloMemory":
        return self._at(attempt, answered=False)

    def answered(self, attempt: Attempt) -> "SiloMemory":
        return self._at(attempt, answered=True)

    def _at(self, attempt: Attempt, *, answered: bool) -> "SiloMemory":
        memory = PlanMemory(plan=attempt.plan, round=attempt.round, number=attempt.number, answered=answered)
        if self.of(memory.plan) == memory:
            return self
        others = (held for held in self.plans if held.plan != memory.plan)
        return replace(self, plans=(*others, memory), sequence=self.sequence + 1)
