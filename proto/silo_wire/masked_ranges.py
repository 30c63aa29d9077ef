"""The ranges of masked sums that follow from a plan, here because both sides must agree on them.

A coordinator begins with `first_ranges`; a silo holds every roster to them and to the ranges that it saw last.
"""

from security.secure_aggregation.fixed_point import Ranges
from security.secure_aggregation.range_rule import RangeRule, SeenRanges
from silo_wire.manifest import Layout
from silo_wire.plan import AggregationSection, PlanBundle


def first_ranges(section: AggregationSection, layout: Layout) -> Ranges:
    """What the first round of secure aggregation can express: the plan's bounds, for every tensor of `layout` alike."""
    sizes = [tensor.elements for tensor in layout.tensors]
    return Ranges.conservative(
        sizes=sizes,
        largest_delta=[section.first_delta_bound] * len(sizes),
        largest_weight=section.largest_first_weight,
    )


def check_ranges(bundle: PlanBundle, offered: Ranges, *, round_number: int, seen: SeenRanges | None) -> None:
    """Raise PolicyRefusal for ranges of a roster that no sums of this plan can have led to.

    Not for plans whose silos make noise: the ranges of those are constants (`noised_masks.check_noise_fits`).
    """
    section = bundle.plan.aggregation
    rule = RangeRule(first=first_ranges(section, bundle.layout), weight_ratio=section.max_weight_ratio)
    rule.check(offered, round_number=round_number, seen=seen)
