"""What this silo has released of its records, and whether a round more is within what its people allow.

The ledger is the silo's own and covers every plan, since all of them train on the same records. An entry is written
before anything that it stands for leaves: a crash may leave an entry for what was never sent, and never the other way
round. The journal remembers the ledger's head, so that a ledger that was cut or put back from a backup is noticed. A
machine that is put back from a snapshot forgets both: so the coordinator remembers the head, too, and signs that it
does. It can stop this silo with what it says, and never make it release more than the ledger allows.

What the entries come to is in counted_releases.py.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from lorica_security.audit.chain import Head
from lorica_security.errors import IntegrityError, PolicyRefusal
from lorica_security.privacy.accounting import Budget
from lorica_security.privacy.ledger import Entry, check_head, head_of, next_entry
from silo_agent.service.counted_releases import CountedReleases
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.messages import RoundKey
from silo_wire.plans.privacy import Release

if TYPE_CHECKING:  # it brings numpy, which commands that only look can do without
    from silo_agent.service.ports import CountersignPort


_NONCE_BYTES = 16


class BudgetSpent(PolicyRefusal):
    """What is asked would cost more than this silo's people allow for all plans together."""


class SharedRecords(BudgetSpent):
    """What others spent of the same records cannot be told, and could be all of it."""


class LedgerPort(Protocol):
    def entries(self) -> tuple[Entry, ...]: ...

    def append(self, entries: Sequence[Entry], /) -> None: ...


class HeadPort(Protocol):
    """Where the ledger's head is remembered apart from it; durable when a call returns."""

    def ledger_head(self) -> Head: ...

    def record_ledger_head(self, head: Head, /) -> None: ...


class ReceiptPort(Protocol):
    """The newest receipt of the coordinator, beside the journal; durable when a call returns."""

    def newest(self) -> LedgerReceipt | None:
        """Raises IntegrityError for one that the coordinator did not sign for this silo."""

    def keep(self, receipt: LedgerReceipt, /) -> None: ...


class SharingPort(Protocol):
    """Other silo folders that train on some of the same records. Raises
    SharedRecords where it cannot tell what they spent.
    """

    @property
    def shown(self) -> str:
        """Where it is, for people; empty where nothing is shared."""

    def others(self, own: Sequence[Entry], /) -> tuple[Entry, ...]:
        """What was released of records that this folder trains on, and is not among `own`."""

    def held(self) -> AbstractContextManager[None]:
        """Nobody else spends meanwhile."""

    def enter(self, entries: Sequence[Entry], /) -> None:
        """Have others count `entries`, those that they know already once; durable when a call returns."""


class NotShared:
    """Each folder for itself."""

    shown = ""

    def others(self, own: Sequence[Entry], /) -> tuple[Entry, ...]:
        return ()

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self, entries: Sequence[Entry], /) -> None:
        return

    def register(self, data: object, unit_field: str, /) -> None:
        return


class PrivacyGuard:
    """Raises IntegrityError for a ledger that is not the one that this silo wrote, StorageError."""

    def __init__(
        self,
        *,
        ledger: LedgerPort,
        heads: HeadPort,
        receipts: ReceiptPort,
        budget: Budget,
        clock: Callable[[], float],
        where: str,
        sharing: SharingPort | None = None,
    ) -> None:
        """`clock` gives seconds since 1970; `where` names the ledger to people."""
        self._ledger, self._heads, self._receipts = ledger, heads, receipts
        self._clock, self._where = clock, where
        self.budget = budget
        self.sharing: SharingPort = sharing or NotShared()

    def entries(self) -> tuple[Entry, ...]:
        """All that was ever released, checked against what the journal knows and what the coordinator signed."""
        entries = self._ledger.entries()
        check_head(entries, self._heads.ledger_head(), where=self._where, by="the round journal")
        check_head(entries, self._countersigned(), where=self._where, by="the coordinator's receipt")
        return entries

    def receipt(self) -> LedgerReceipt | None:
        """The newest, checked."""
        return self._receipts.newest()

    def _countersigned(self) -> Head:
        receipt = self._receipts.newest()
        return Head() if receipt is None else receipt.newest

    async def countersign(self, coordinator: "CountersignPort") -> None:
        """Have the coordinator remember the ledger as it is, and keep its
        receipt. Before a private round, and before release.

        A coordinator that knows a newer head, or another, shows that the ledger went back. One that
        knows an older entry of this ledger, since it was restored or its answer was lost, is told
        from there; one that knows none takes this for the first.
        """
        entries = self.entries()
        head, after = head_of(entries), self._countersigned()
        for _ in range(2):
            receipt = await coordinator.countersign_ledger(head, after=after)
            check_head(entries, receipt.newest, where=self._where, by="the coordinator")
            if receipt.newest == head:
                self._receipts.keep(receipt)
                return
            after = receipt.newest
        raise IntegrityError(
            f"the coordinator does not countersign entry {head.sequence} of {self._where}, it stays with entry "
            f"{after.sequence}: nothing more is released; have its operator look at its log"
        )

    def counted(self) -> CountedReleases:
        """All that was ever released of these records, as the budget counts it:
        the ledger, and what others share of it, read once.
        """
        own = self.entries()
        return CountedReleases(own=own, others=self.sharing.others(own), budget=self.budget)

    def spent(self) -> float:
        """By the filter, whatever the plans were chosen by; unlimited where
        something says nothing of the budget's unit.
        """
        return self.counted().epsilon()

    def check(self, releases: Sequence[Release], *, unit: str) -> None:
        """Raise BudgetSpent where `releases` more, of a plan with this unit_field, would cost more than the budget.

        Noise that others make, too, counts twice: as they promise it, and as if all of them told it.
        """
        self._check(self.counted(), releases, unit)

    def _check(self, counted: CountedReleases, releases: Sequence[Release], unit: str) -> None:
        after = counted.epsilon(releases, unit)
        if after > self.budget.epsilon:
            raise BudgetSpent(
                "max_epsilon",
                f"this round would take the silo's releases to epsilon {after:.3g} at dp_delta "
                f"{self.budget.dp_delta:g}, its people allow {self.budget.epsilon:g}; "
                f"{counted.epsilon():.3g} are spent{_by_others(counted)}{_by_replacing(counted, releases, unit)}",
            )
        if counted.joint(releases) and (alone := counted.epsilon_alone(releases, unit)) > self.budget.alone:
            raise BudgetSpent(
                "max_epsilon_alone",
                "if all silos that make noise together with this one worked against it, this round would take its "
                f"releases to epsilon {alone:.3g} at dp_delta {self.budget.dp_delta:g}, its people allow "
                f"{self.budget.alone:g}",
            )

    def admit(self, releases: Sequence[Release], *, unit: str) -> None:
        """Have others that share some of these records count what this silo spent, and `check`."""
        with self.sharing.held():
            self.sharing.enter(self.entries())
            self.check(releases, unit=unit)

    def spend(self, key: RoundKey, releases: Sequence[Release], *, unit: str) -> None:
        """Enter `releases` of an attempt, of a plan with this unit_field. When this
        returns they may leave; call it before anything does.
        """
        with self.sharing.held():
            counted = self.counted()
            self._check(counted, releases, unit)
            entries = list(counted.own)
            order = 0 if any(entry.order for entry in entries) else counted.orders(releases, unit)[0]
            fresh: list[Entry] = []
            for mechanism, release in releases:
                entry = next_entry(
                    entries,
                    key,
                    mechanism,
                    release,
                    at=int(self._clock()),
                    unit=unit,
                    order=0 if fresh else order,
                    nonce=secrets.token_hex(_NONCE_BYTES),
                )
                entries.append(entry)
                fresh.append(entry)
            self.sharing.enter(entries)  # before its own ledger: after a crash others count what was never released
        self._ledger.append(fresh)
        self._heads.record_ledger_head(head_of(entries))


def _by_others(counted: CountedReleases) -> str:
    others = len(counted.others)
    return f", also by {others} releases of other silo folders with some of the same records" if others else ""


def _by_replacing(counted: CountedReleases, releases: Sequence[Release], unit: str) -> str:
    if unit and not counted.budget.unit and counted.relation(releases, unit) == "replace_one":
        return (
            f"; a line more or less replaces what its {unit!r} adds, which costs more: set [policy] unit_field = "
            f"{unit!r} where epsilon is meant for each {unit!r}"
        )
    return ""
