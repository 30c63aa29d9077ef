"""What a plan whose silos make the noise asks of a masked sum, here because both sides must agree on it."""

from typing import Final

from lorica_security.errors import MalformedMessage, PolicyRefusal
from lorica_security.secure_aggregation.masked_vectors.noise_shares import NoiseShares
from lorica_security.secure_aggregation.parameters import NoiseTerms, Parameters
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.plan import Plan, PlanBundle

GRADIENT_STEPS: Final = 2**31 - 1
"""A silo keeps each coordinate of a gradient sum as so many parts of its range, until it is masked: as whole numbers of
32 bits."""


def noise_terms(plan: Plan) -> NoiseTerms | None:
    """What its silos make before they mask; None: nothing."""
    noise = plan.privacy.noise_multiplier
    if plan.joint:
        return NoiseTerms(
            noise_multiplier=noise, makers=plan.noise_makers, reach=plan.gradient_reach, grain=1 / GRADIENT_STEPS
        )
    return NoiseTerms(noise_multiplier=noise) if plan.noise_at == "silos" else None


def noise_shares(bundle: PlanBundle, parameters: Parameters) -> NoiseShares | None:
    """What each silo of a cohort with these parameters adds. Raises MalformedMessage where that does not hold for
    it."""
    terms = noise_terms(bundle.plan)
    if terms is None:
        return None
    return terms.shares(cohort=parameters.cohort, honest=parameters.honest, elements=bundle.layout.parameters)


def check_noise_fits(bundle: PlanBundle, parameters: Parameters) -> None:
    """Raise PolicyRefusal unless `parameters` encode as the plan says, so that its noise keeps its promise."""
    try:
        shares = noise_shares(bundle, parameters)
    except MalformedMessage as error:
        raise PolicyRefusal(
            "require_privacy", f"the roster does not go with plan {bundle.plan.name}: {error}"
        ) from error
    assert shares is not None, "asked of plans whose silos make noise"
    expected = shares.fixed_point(ranges_of(bundle))
    if parameters.fixed_point != expected:
        raise PolicyRefusal(
            "require_privacy",
            f"the roster's ranges or levels ({parameters.fixed_point.levels}) are not those that follow from plan "
            f"{bundle.plan.name} ({expected.levels}): its noise would not cover what this silo adds",
        )
