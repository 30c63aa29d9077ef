"""What a silo remembers across attempts, so that it is never in two sums over the same delta.

Rules, per plan: a silo takes no lower round than it took before; in one round, each attempt number once and ascending;
and once it has answered an unmask request, no further attempt of that round.

Why that is enough: let the attempts of a round be 1..k, with survivor sets S_1..S_k of which sums came out, and A_i the
honest silos that answered in attempt i: at least t - c of them, which is 2 or more (2t > n + c gives t - c > n - t; for
t = n, c + 2 <= min_survivors <= n). They join nothing later, so every member of A_1 is in no sum but S_1; a combination
of sums with S_1 in it contains all of A_1. Leave S_1 out, and the same holds of A_2 and S_2, and so on. Every
combination of sums thus contains all honest answerers of the first sum in it: one silo is never left alone.

The memory is on the silo's disk, numbered by its changes, so that whoever noted the number elsewhere sees that it was
lost or went back. A disk that is restored as a whole, with that number, is found out by others: a silo remembers every
advertisement that it made, keys fresh from OS entropy in each, and the silos of its release group say in theirs which
one they last saw it deal by. One that it does not remember was made after its memory. It deals by none while it is
behind, so that no newer one takes that one's place. One silo of the group that works with nobody, and kept its own
memory, is enough; the coordinator, which says the same before anything leaves, covers that all were restored together.
What is not found out is a return to within the very attempt that the others saw last: that silo may answer twice in one
round, which the parameter `colluders` covers (2t > n + c), the others' memories being whole.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt

MASKING_MEMORY: Final = "masking_memory"
"""The rule by which a silo whose memory is not whole takes no masked round."""
MAX_ANNOUNCED: Final = 1000
"""Of its own advertisements a silo remembers so many, the newest, and apart from these two for each other silo of its
group.
"""
MAX_PLANS: Final = 100_000
"""Of which a silo remembers how far it came."""
Seen = tuple[tuple[SiloName, bytes], ...]
"""Digests of advertisements, by the names of their silos, ascending."""
COORDINATOR: Final = "the coordinator"
_FROM_A_BACKUP: Final = (
    "Where the coordinator came from a backup its operator exports the model and begins another plan with it: "
    "`coordinator plan new NAME "
    "--model DIR`, `coordinator plan start NAME --leave OLD`"
)


class Forgotten(PolicyRefusal):
    """Others saw advertisements of this silo that it does not remember: `witnesses` by their digests."""

    def __init__(self, witnesses: Mapping[bytes, str]) -> None:
        self.witnesses = dict(witnesses)
        super().__init__(
            MASKING_MEMORY,
            f"{' and '.join(sorted(set(witnesses.values())))} saw keys of this silo that its memory of masked rounds "
            "does not have: "
            "the memory was lost or comes from a backup",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory:
    """`round` and `number` of the last attempt that was joined; `answered` is whether that round was unmasked."""

    plan: bytes
    round: int
    number: int
    answered: bool

    @property
    def place(self) -> tuple[int, int, bool]:
        """Ascends with what a silo does under a plan."""
        return self.round, self.number, self.answered


@dataclass(frozen=True, slots=True)
class SiloMemory:
    """`sequence` counts the changes since the first.

    `announced` are the digests of this silo's own advertisements, the newest last; `seen` those of the last ones that
    others of its release group dealt by, by name. Of each of those, `acknowledged` is the one of this silo's own that
    it said last that it saw, and `dealt` the last one that this silo dealt by beside it: it knows of one of these two,
    for however long it stays away.
    """

    plans: tuple[PlanMemory, ...] = ()
    sequence: int = 0
    announced: tuple[bytes, ...] = ()
    seen: Seen = ()
    acknowledged: Seen = ()
    dealt: Seen = ()

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
                f"round {attempt.round} was offered after round {last.round}: secure aggregation takes no lower round. "
                f"{_FROM_A_BACKUP}",
            )
        if last.answered:
            raise PolicyRefusal(
                "one_sum_per_round",
                f"round {attempt.round} was unmasked with this silo's help: it joins no further attempt of it. "
                f"{_FROM_A_BACKUP}",
            )
        if attempt.number <= last.number:
            raise PolicyRefusal(
                "one_sum_per_round",
                f"attempt {attempt.number} of round {attempt.round} was offered after attempt {last.number}: "
                "each number is used once",
            )

    def check_remembers(self, told: Mapping[str, bytes]) -> None:
        """Raise Forgotten unless every advertisement that witnesses were `told` of, by their names, is one that this
        silo knows of.
        """
        forgotten: dict[bytes, str] = {}
        known = {*self.announced, *dict(self.acknowledged).values(), *dict(self.dealt).values()}
        for witness, digest in told.items():
            if digest not in known:
                forgotten[digest] = f"{forgotten[digest]} and {witness}" if digest in forgotten else witness
        if forgotten:
            raise Forgotten(forgotten)

    def with_announced(self, *digests: bytes) -> "SiloMemory":
        return self._with(announced=self._announced(digests))

    def with_dealt(
        self, advertisement: bytes, others: Mapping[SiloName, bytes | None], *, members: Collection[SiloName]
    ) -> "SiloMemory":
        """About to deal by `advertisement` beside these `others`, each with what it says that it saw of this silo.

        Of `members` of the release groups alone.
        """
        said = {silo: digest for silo, digest in others.items() if digest is not None}
        return self._with(
            acknowledged=_of(members, {**dict(self.acknowledged), **said}),
            dealt=_of(members, {**dict(self.dealt), **dict.fromkeys(others, advertisement)}),
        )

    def with_seen(self, others: Mapping[SiloName, bytes], *, members: Collection[SiloName]) -> "SiloMemory":
        """Of `members` of the release groups alone."""
        return self._with(seen=_of(members, {**dict(self.seen), **others}))

    def joined(self, attempt: Attempt, *advertisements: bytes) -> "SiloMemory":
        """Having made these advertisements for it, in the same change.

        Raises PolicyRefusal for an attempt before the last one.
        """
        return self._with(plans=self._plans_at(attempt, answered=False), announced=self._announced(advertisements))

    def answered(self, attempt: Attempt) -> "SiloMemory":
        """Raises PolicyRefusal for any attempt before the last one."""
        return self._with(plans=self._plans_at(attempt, answered=True))

    def _plans_at(self, attempt: Attempt, *, answered: bool) -> tuple[PlanMemory, ...]:
        memory = PlanMemory(plan=attempt.plan, round=attempt.round, number=attempt.number, answered=answered)
        last = self.of(memory.plan)
        if last == memory:
            return self.plans
        if last is not None and memory.place < last.place:
            raise PolicyRefusal(
                MASKING_MEMORY,
                f"attempt {memory.number} of round {memory.round} is no place to go back to: this silo has come to "
                "attempt "
                f"{last.number} of round {last.round}{' and answered it' if last.answered else ''}; forfeit the "
                "attempt",
            )
        return (*(held for held in self.plans if held.plan != memory.plan), memory)

    def _announced(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        return (*self.announced, *(digest for digest in digests if digest not in self.announced))[-MAX_ANNOUNCED:]

    def _with(self, **changes: Any) -> "SiloMemory":
        """One change, however much of the memory it is of; none where all is as it was."""
        after = replace(self, **changes)
        return self if after == self else replace(after, sequence=self.sequence + 1)


def _of(members: Collection[SiloName], seen: Mapping[SiloName, bytes]) -> Seen:
    return tuple(sorted((silo, digest) for silo, digest in seen.items() if silo in members))
