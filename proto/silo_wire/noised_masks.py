"""What a plan whose silos make the noise asks of a masked sum, here because both sides must agree on it."""

from security.errors import PolicyRefusal
from security.secure_aggregation.noise_shares import NoiseShares
from security.secure_aggregation.parameters import Parameters
from silo_wire.masked_ranges import ranges_of
from silo_wire.plan import PlanBundle


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
    expected = noise_shares(bundle, parameters).fixed_point(ranges_of(bundle))
    if parameters.fixed_point != expected:
        raise PolicyRefusal(
            "require_privacy",
            f"the roster's ranges or levels ({parameters.fixed_point.levels}) are not those that follow from plan "
            f"{bundle.plan.name} ({expected.levels}): its noise would not cover what this silo adds",
        )
