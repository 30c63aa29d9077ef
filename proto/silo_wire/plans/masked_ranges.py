"""The ranges of masked sums: constants of a plan, in every round. Both sides must agree on them; a silo takes no
others.

What a silo puts into a sum is then a function of its delta and its weight alone. Ranges that moved from round to round
would scale the same deltas, and cut the same weights, at different places, and the differences of such sums are those
of single silos.
"""

from typing import Final

from lorica_security.errors import PolicyRefusal
from lorica_security.secure_aggregation.masked_vectors.fixed_point import Ranges
from silo_wire.manifest import SCORES_ALONE, Layout
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection

RANGES: Final = "ranges"
CLOSING_RANGES: Final = Ranges.of(sizes=(SCORES_ALONE.parameters,), largest_delta=(1.0,), largest_weight=1.0)
"""Of the closing round, in which nobody trains and the one coordinate is 0."""


def plan_ranges(section: AggregationSection, layout: Layout, *, noised: bool = False) -> Ranges:
    """What a round of the plan can express, for every tensor of `layout` alike.

    `noised` is whether the silos make noise for whole deltas, which is sized for a delta that is clipped and not scaled
    further: no coordinate of it is larger than it is long. Else the smaller of both bounds stands.
    """
    bounds = [section.max_delta_norm] if section.max_delta_norm else []
    if not noised:
        bounds.append(section.delta_bound)
    sizes = [tensor.elements for tensor in layout.tensors]
    return Ranges.of(sizes=sizes, largest_delta=[min(bounds)] * len(sizes), largest_weight=section.weight_cap)


def ranges_of(bundle: PlanBundle) -> Ranges:
    plan = bundle.plan
    return plan_ranges(plan.aggregation, bundle.layout, noised=plan.noise_at == "silos" and not plan.joint)


def check_ranges(bundle: PlanBundle, offered: Ranges, *, closing: bool) -> None:
    """Raise PolicyRefusal for ranges of a roster that are not the plan's, or not those of a closing round."""
    if offered != (CLOSING_RANGES if closing else ranges_of(bundle)):
        raise PolicyRefusal(
            RANGES,
            f"the roster's ranges are not those that follow from plan {bundle.plan.name}, which are the same in "
            "every round: this silo masks nothing by them; have the operator look at the coordinator",
        )
