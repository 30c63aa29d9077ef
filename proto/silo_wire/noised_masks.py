"""What a plan whose silos make the noise asks of a masked sum: ranges and noise shares, here because both sides must agree on them.

Ranges are the plan's public constants in every round: no coordinate of a delta is longer than the delta, which is clipped, and no
weight is above its cap. So nothing is taken from the sum before.
"""

from security.errors import PolicyRefusal
from security.secure_aggregation.fixed_point import Ranges
from security.secure_aggregation.noise_shares import NoiseShares
from security.secure_aggregation.parameters import Parameters
from silo_wire.manifest import Layout
from silo_wire.plan import AggregationSection, PlanBundle


def noised_ranges(section: AggregationSection, layout: Layout) -> Ranges:
    sizes = [tensor.elements for tensor in layout.tensors]
    return Ranges.conservative(
        sizes=sizes, largest_delta=[section.max_delta_norm] * len(sizes), largest_weight=section.weight_cap
    )


def noise_shares(bundle: PlanBundle, parameters: Parameters) -> NoiseShares:
    """What each silo of a cohort with these parameters adds."""
    return NoiseShares(
        cohort=parameters.cohort,
        honest=parameters.honest,
        noise_multiplier=bundle.plan.privacy.noise_multiplier,
        elements=bundle.layout.parameters,
    )


def check_noise_fits(bundle: PlanBundle, parameters: Parameters) -> None:
    """Raise PolicyRefusal unless `parameters` encode as the plan says, so that its noise keeps its promise."""
    expected = noise_shares(bundle, parameters).fixed_point(noised_ranges(bundle.plan.aggregation, bundle.layout))
    if parameters.fixed_point != expected:
        raise PolicyRefusal(
            "require_privacy",
            f"the roster's ranges or levels ({parameters.fixed_point.levels}) are not those that follow from plan "
            f"{bundle.plan.name} ({expected.levels}): its noise would not cover what this silo adds",
        )
