"""What a silo's budget makes of all that was released of its records, as it stood when the ledgers were read.

Plans are offered by who has seen what earlier ones released, so the budget is held by a filter
(security/lorica_security/privacy/renyi_filter.py), whose favoured order the ledger's first entry has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lorica_security.privacy.accounting import (
    UNLIMITED,
    Budget,
    GaussianRelease,
    NeighbouringRelation,
    epsilon_of,
)
from lorica_security.privacy.ledger import Entry, releases_of
from lorica_security.privacy.renyi_filter import favoured_order, filtered_epsilon
from silo_wire.plans.privacy import Release


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedReleases:
    """`own` are the entries of this silo's ledger, `others` those of folders that
    share some of its records, and are not among `own`.
    """

    own: tuple[Entry, ...]
    others: tuple[Entry, ...]
    budget: Budget

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (*self.own, *self.others)

    def epsilon(self, more: Sequence[Release] = (), unit: str = "") -> float:
        """By the filter, whatever the plans were chosen by; of these releases
        and of `more`, of a plan with this unit_field.

        Unlimited where the budget is for patients, say, and something was released that is private for each line alone.
        """
        return self._filtered([*releases_of(self.entries), *(release for _, release in more)], more, unit)

    def epsilon_alone(self, more: Sequence[Release] = (), unit: str = "") -> float:
        """The same towards all others who make noise together with this silo, if they worked against it."""
        releases = [*releases_of(self.entries), *(release for _, release in more)]
        return self._filtered([release.alone for release in releases], more, unit)

    def joint(self, more: Sequence[Release] = ()) -> bool:
        """Whether others made a part of the noise of any of these, so that two numbers are counted."""
        return any(release.makers > 1 for release in [*releases_of(self.entries), *(release for _, release in more)])

    def affords(self, more: Sequence[Release], unit: str) -> bool:
        """Whether the budget has room for `more`, either way."""
        if self.epsilon(more, unit) > self.budget.epsilon:
            return False
        return not self.joint(more) or self.epsilon_alone(more, unit) <= self.budget.alone

    def _filtered(self, releases: Sequence[GaussianRelease], more: Sequence[Release], unit: str) -> float:
        relation = self.relation(more, unit)
        if relation is None:
            return UNLIMITED
        return max(
            filtered_epsilon(releases, favoured=order, dp_delta=self.budget.dp_delta, relation=relation)
            for order in self.orders(more, unit)
        )

    def as_one_schedule(self) -> float:
        """What they come to if they had been fixed before the first: as exact
        as it gets for one plan, a forecast for several.
        """
        relation = self.relation()
        if relation is None:
            return UNLIMITED
        return epsilon_of(releases_of(self.entries), dp_delta=self.budget.dp_delta, relation=relation)

    def relation(self, more: Sequence[Release] = (), unit: str = "") -> NeighbouringRelation | None:
        """How the neighbours differ that `epsilon` is for; None where something says nothing of the budget's unit."""
        return self.budget.relation_over([*_kinds(self.entries), *((mechanism, unit) for mechanism, _ in more)])

    def orders(self, more: Sequence[Release] = (), unit: str = "") -> list[int]:
        """What the filters of these ledgers favour, the own ledger's first; nothing goes beyond any of them.

        That of the ledger which was opened first is among them, and was chosen before anything
        was released of a record in both. Where no entry has one yet, it follows from the first
        round and the budget, which nothing released tells of.
        """
        orders = list(dict.fromkeys(entry.order for entry in self.entries if entry.order))
        if orders:
            return orders
        first = [entry for entry in self.entries if entry.key == self.entries[0].key]
        kinds = _kinds(first) or [(mechanism, unit) for mechanism, _ in more]
        budget = self.budget
        return [
            favoured_order(
                releases_of(first) or [release for _, release in more],
                epsilon=budget.epsilon,
                dp_delta=budget.dp_delta,
                relation=budget.relation_or_own(kinds),
            )
        ]


def _kinds(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    return [(entry.mechanism, entry.unit) for entry in entries]
