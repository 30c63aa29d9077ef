"""What releases cost together where later ones are chosen by what earlier
ones told: a Renyi filter (Feldman and Zrnic 2021).

Totals by convolution hold for a schedule that was fixed beforehand. A budget over several plans is not one: who offers
the next plan has seen the models of the last. The filter of an order that is fixed beforehand adds up Renyi divergences
of that order, and as long as no release goes beyond its limit, all of them together have that divergence (their theorem
4.3; Haney et al. 2023 for releases that run beside each other).

Here are several such filters, one for each of ORDERS, and what remains within any of them is allowed. Each has
its own share of dp_delta, and the shares add up to dp_delta: a sequence that ends within filter i is one that
filter i alone would have let through, so its outcomes are e^epsilon times as likely with one unit as with
another, but for share i; outcomes within some filter are the union. One favoured order has most of dp_delta. It
is chosen by public numbers before the first release, the mechanism of the first round and the budget; the others
are there for a later plan whose noise or sampling is of another kind.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from lorica_security.errors import ConfigurationError
from lorica_security.privacy.accounting import (
    GaussianRelease,
    NeighbouringRelation,
    check_dp_delta,
    merged,
    renyi_divergences,
    renyi_epsilon,
)

ORDERS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20, 24, 28, 34, 48, 64, 96, 128)
FAVOURED: Final = 0.9
"""The favoured order's share of dp_delta; the others have equal parts of the rest."""


def favoured_order(
    first: Sequence[GaussianRelease],
    *,
    epsilon: float,
    dp_delta: float,
    relation: NeighbouringRelation = "add_or_remove_one",
) -> int:
    """The order at which `first`, what one round releases, can be repeated most often within `epsilon`.

    Where no order has room for anything, the one at which `first` costs least.
    """
    check_dp_delta(dp_delta)
    costs = _divergences(first, relation)
    if not any(costs):
        return ORDERS[0]
    room = [epsilon - renyi_epsilon(order, 0.0, FAVOURED * dp_delta) for order in ORDERS]
    if any(left > 0 for left in room):
        most = max(range(len(ORDERS)), key=lambda i: room[i] / costs[i])
        return ORDERS[most]
    return min(zip(ORDERS, costs, strict=True), key=lambda of: renyi_epsilon(of[0], of[1], FAVOURED * dp_delta))[0]


def filtered_epsilon(
    releases: Iterable[GaussianRelease],
    *,
    favoured: int,
    dp_delta: float,
    relation: NeighbouringRelation = "add_or_remove_one",
) -> float:
    """The least epsilon whose filter lets all of `releases` through, in whatever
    order; 0 without releases, else infinite without noise.
    """
    check_dp_delta(dp_delta)
    check_order(favoured)
    made = merged(releases)
    if not made:
        return 0.0
    return min(
        renyi_epsilon(order, cost, share * dp_delta)
        for order, share, cost in zip(ORDERS, _shares(favoured), _divergences(made, relation), strict=True)
    )


def check_order(favoured: int) -> None:
    """Raise ConfigurationError unless the filter has this order."""
    if favoured not in ORDERS:
        raise ConfigurationError(
            f"{favoured} is no order of the privacy filter: it has {', '.join(str(order) for order in ORDERS)}"
        )


def _shares(favoured: int) -> list[float]:
    rest = (1 - FAVOURED) / (len(ORDERS) - 1)
    return [FAVOURED if order == favoured else rest for order in ORDERS]


def _divergences(releases: Iterable[GaussianRelease], relation: NeighbouringRelation) -> list[float]:
    """Of all `releases` together, at each of ORDERS."""
    sums = [0.0] * len(ORDERS)
    for release in merged(releases):
        once = renyi_divergences(release, ORDERS, relation)
        sums = [total + release.steps * cost for total, cost in zip(sums, once, strict=True)]
    return sums
