"""What this silo has released of its records, and whether a round more is within what its people allow.

The ledger is the silo's own and covers every plan, since all of them train on the same records. An entry is written before
anything that it stands for leaves: a crash may leave an entry for what was never sent, and never the other way round. The
journal remembers the ledger's head, so that a ledger that was cut or put back from a backup is noticed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from security.errors import PolicyRefusal
from security.privacy.accounting import Budget, GaussianRelease, epsilon_of
from security.privacy.ledger import Entry, Head, check_head, head_of, releases_of
from silo_wire.messages import RoundKey
from silo_wire.privacy import Release


class LedgerPort(Protocol):
    def entries(self) -> tuple[Entry, ...]: ...

    def append(self, entries: Sequence[Entry], /) -> None: ...


class HeadPort(Protocol):
    """Where the ledger's head is remembered apart from it; durable when a call returns."""

    def ledger_head(self) -> Head: ...

    def record_ledger_head(self, head: Head, /) -> None: ...


class PrivacyGuard:
    """Raises IntegrityError for a ledger that is not the one that this silo wrote, StorageError."""

    def __init__(
        self, *, ledger: LedgerPort, heads: HeadPort, budget: Budget, clock: Callable[[], float], where: str
    ) -> None:
        """`clock` gives seconds since 1970; `where` names the ledger to people."""
        self._ledger, self._heads, self._budget, self._clock, self._where = ledger, heads, budget, clock, where

    def entries(self) -> tuple[Entry, ...]:
        """All that was ever released, checked against what the journal knows."""
        entries = self._ledger.entries()
        check_head(entries, self._heads.ledger_head(), where=self._where, by="the round journal")
        return entries

    def spent(self) -> float:
        return self._epsilon(releases_of(self.entries()))

    def check(self, releases: Sequence[Release]) -> None:
        """Raise PolicyRefusal where `releases` more would cost more than the budget."""
        entries = self.entries()
        after = self._epsilon([*releases_of(entries), *(release for _, release in releases)])
        if after > self._budget.epsilon:
            raise PolicyRefusal(
                "max_epsilon",
                f"this round would take the silo's releases to epsilon {after:.3g} at dp_delta "
                f"{self._budget.dp_delta:g}, its people allow {self._budget.epsilon:g}; "
                f"{self._epsilon(releases_of(entries)):.3g} are spent",
            )

    def spend(self, key: RoundKey, releases: Sequence[Release]) -> None:
        """Enter `releases` of an attempt. When this returns they may leave; call it before anything does."""
        self.check(releases)
        entries = list(self.entries())
        fresh = []
        for mechanism, release in releases:
            head = head_of(entries)
            entry = Entry(
                sequence=head.sequence + 1,
                previous=head.digest,
                federation=key.federation,
                plan=key.plan,
                round=key.round,
                attempt=key.attempt,
                mechanism=mechanism,
                release=release,
                at=int(self._clock()),
            )
            entries.append(entry)
            fresh.append(entry)
        self._ledger.append(fresh)
        self._heads.record_ledger_head(head_of(entries))

    def _epsilon(self, releases: Iterable[GaussianRelease]) -> float:
        return epsilon_of(merged(releases), dp_delta=self._budget.dp_delta, relation=self._budget.relation)


def merged(releases: Iterable[GaussianRelease]) -> list[GaussianRelease]:
    """The same with equal mechanisms as one of more steps, which is what an accountant is quick with."""
    steps: Counter[tuple[float, float]] = Counter()
    for release in releases:
        steps[release.noise_multiplier, release.sampling_rate] += release.steps
    return [GaussianRelease(noise, rate, count) for (noise, rate), count in steps.items()]
