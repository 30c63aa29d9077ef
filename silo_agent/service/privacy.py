"""What this silo has released of its records, and whether a round more is within what its people allow.

The ledger is the silo's own and covers every plan, since all of them train on the same records. An entry is written before
anything that it stands for leaves: a crash may leave an entry for what was never sent, and never the other way round. The
journal remembers the ledger's head, so that a ledger that was cut or put back from a backup is noticed. A machine that is put
back from a snapshot forgets both: so the coordinator remembers the head, too, and signs that it does. It can stop this silo
with what it says, and never make it release more than the ledger allows.

Plans are offered by who has seen what earlier ones released, so the budget is held by a filter (security/privacy/renyi_filter.py),
whose favoured order the ledger's first entry has.
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from security.chain import Head
from security.errors import IntegrityError, PolicyRefusal
from security.privacy.accounting import UNLIMITED, Budget, NeighbouringRelation, epsilon_of
from security.privacy.ledger import Entry, check_head, head_of, releases_of
from security.privacy.renyi_filter import favoured_order, filtered_epsilon
from silo_wire.ledger_receipt import LedgerReceipt
from silo_wire.messages import RoundKey
from silo_wire.privacy import Release

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
    """Other silo folders that train on some of the same records. Raises SharedRecords where it cannot tell what they spent."""

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
        """Have the coordinator remember the ledger as it is, and keep its receipt. Before a private round, and before release.

        A coordinator that knows a newer head, or another, shows that the ledger went back. One that knows an older entry of this
        ledger, since it was restored or its answer was lost, is told from there; one that knows none takes this for the first.
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

    def spent(self) -> float:
        """By the filter, whatever the plans were chosen by.

        Unlimited where the budget is for patients, say, and something was released that is private for each line alone."""
        return self._epsilon(self.counted())

    def spent_after(self, releases: Sequence[Release], *, unit: str) -> float:
        """What `spent` would be with `releases` more, of a plan with this unit_field."""
        return self._epsilon(self.counted(), releases, unit)

    def spent_alone(self) -> float:
        """What `spent` is towards all others who make noise together with this silo, if they work against it."""
        return self._epsilon(self.counted(), alone=True)

    def relation(self) -> NeighbouringRelation | None:
        """How the neighbours differ that `spent` is for; None where something was released that says nothing of the budget's unit."""
        return self._relation(self.counted())

    def counted(self) -> tuple[Entry, ...]:
        """All that was ever released of these records: by this silo, then by others that share some of them."""
        own = self.entries()
        return (*own, *self.sharing.others(own))

    def as_one_schedule(self) -> float:
        """What all releases come to if they had been fixed before the first: as exact as it gets for one plan, a forecast for several."""
        entries = self.counted()
        relation = self._relation(entries)
        if relation is None:
            return UNLIMITED
        return epsilon_of(releases_of(entries), dp_delta=self.budget.dp_delta, relation=relation)

    def order(self) -> int:
        """What the filter favours; 0 where nothing was released yet."""
        entries = self.counted()
        return self._orders(entries)[0] if entries else 0

    def check(self, releases: Sequence[Release], *, unit: str) -> None:
        """Raise BudgetSpent where `releases` more, of a plan with this unit_field, would cost more than the budget.

        Noise that others make, too, counts twice: as they promise it, and as if all of them told it.
        """
        entries = self.counted()
        after = self._epsilon(entries, releases, unit)
        if after > self.budget.epsilon:
            raise BudgetSpent(
                "max_epsilon",
                f"this round would take the silo's releases to epsilon {after:.3g} at dp_delta "
                f"{self.budget.dp_delta:g}, its people allow {self.budget.epsilon:g}; "
                f"{self._epsilon(entries):.3g} are spent{self._by_others(entries)}{self._by_replacing(entries, releases, unit)}",
            )

        if not any(entry.release.makers > 1 for entry in entries) and all(one.makers == 1 for _, one in releases):
            return
        alone = self._epsilon(entries, releases, unit, alone=True)
        if alone > self.budget.alone:
            raise BudgetSpent(
                "max_epsilon_alone",
                f"if all silos that make noise together with this one worked against it, this round would take its releases to epsilon "
                f"{alone:.3g} at dp_delta {self.budget.dp_delta:g}, its people allow {self.budget.alone:g}",
            )

    def _by_others(self, entries: Sequence[Entry]) -> str:
        others = len(entries) - len(self.entries())
        return f", also by {others} releases of other silo folders with some of the same records" if others else ""

    def _by_replacing(self, entries: Sequence[Entry], releases: Sequence[Release], unit: str) -> str:
        if unit and not self.budget.unit and self._relation(entries, releases, unit) == "replace_one":
            return (
                f"; a line more or less replaces what its {unit!r} adds, which costs more: set [policy] unit_field = {unit!r} "
                f"where epsilon is meant for each {unit!r}"
            )
        return ""

    def admit(self, releases: Sequence[Release], *, unit: str) -> None:
        """Have others that share some of these records count what this silo spent, and `check`."""
        with self.sharing.held():
            self.sharing.enter(self.entries())
            self.check(releases, unit=unit)

    def spend(self, key: RoundKey, releases: Sequence[Release], *, unit: str) -> None:
        """Enter `releases` of an attempt, of a plan with this unit_field. When this returns they may leave; call it before anything does."""
        with self.sharing.held():
            self.check(releases, unit=unit)
            entries = list(self.entries())
            has_order = any(entry.order for entry in entries)
            order = 0 if has_order else self._orders(self.counted(), releases, unit)[0]
            fresh: list[Entry] = []
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
                    unit=unit,
                    order=0 if fresh else order,
                    nonce=secrets.token_hex(_NONCE_BYTES),
                )
                entries.append(entry)
                fresh.append(entry)
            self.sharing.enter(entries)  # before its own ledger: after a crash others count what was never released
        self._ledger.append(fresh)
        self._heads.record_ledger_head(head_of(entries))

    def _epsilon(
        self, entries: Sequence[Entry], more: Sequence[Release] = (), unit: str = "", *, alone: bool = False
    ) -> float:
        relation = self._relation(entries, more, unit)
        if relation is None:
            return UNLIMITED
        releases = [*releases_of(entries), *(release for _, release in more)]
        if alone:
            releases = [release.alone for release in releases]
        return max(
            filtered_epsilon(releases, favoured=order, dp_delta=self.budget.dp_delta, relation=relation)
            for order in self._orders(entries, more, unit)
        )

    def _orders(self, entries: Sequence[Entry], more: Sequence[Release] = (), unit: str = "") -> list[int]:
        """What the filters of these ledgers favour, the own ledger's first; nothing goes beyond any of them.

        That of the ledger which was opened first is among them, and was chosen before anything was released of a record in both. Where
        no entry has one yet, it follows from the first round and the budget, which nothing released tells of.
        """
        orders = list(dict.fromkeys(entry.order for entry in entries if entry.order))
        if orders:
            return orders
        first = [entry for entry in entries if entry.key == entries[0].key]
        relation = self._relation(first) if first else self._relation((), more, unit)
        budget = self.budget
        return [
            favoured_order(
                releases_of(first) or [release for _, release in more],
                epsilon=budget.epsilon,
                dp_delta=budget.dp_delta,
                relation=relation or budget.relation,
            )
        ]

    def _relation(
        self, entries: Sequence[Entry], more: Sequence[Release] = (), unit: str = ""
    ) -> NeighbouringRelation | None:
        kinds = [(entry.mechanism, entry.unit) for entry in entries]
        return self.budget.relation_over([*kinds, *((mechanism, unit) for mechanism, _ in more)])
