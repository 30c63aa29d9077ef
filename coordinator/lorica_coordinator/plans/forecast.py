"""What a plan will cost and what it is worth: told when it is made, when it is started, and in the docs.

Noise that drowns what it covers is not a setting to be found out about after twenty rounds. At silo level it is told
how long the noise of a sum is beside the longest sum there could be, and a plan above its own `max_noise_to_signal` is
refused. At record level the noise of the gradients is not compared with anything, since what gradients have in common
only training shows; that of the weights is. Overrides under masks are told too, since silos refuse them until their
people have allowed them.
"""

from collections.abc import Iterator
from dataclasses import replace

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.privacy.accounting import epsilon_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.work import widest_gap
from silo_wire.weightings.weighting import THE_SAME

EXPECTED_LOSS_REDUCTION = 0.2
"""Of a record's loss in one round, while a model still learns: what the demo's silos have after some rounds, in
nats."""
MOST_OF_A_WEIGHT = 0.5
"""Noise whose standard deviation is a greater part of the expected weight drowns it."""


def forecast(plan: Plan) -> tuple[str, ...]:
    """In lines for people; none for a plan that promises no differential privacy, has no robust reducer and under masks
    has nothing that is unlike."""
    of_sums = (*_of_overrides(plan), *_of_the_weighting(plan), *_of_the_reducer(plan))
    if plan.privacy.level == "none":
        return of_sums
    lines = _of_silos(plan) if plan.privacy.level == "silo" else _of_records(plan)
    return (*of_sums, *_promise(plan), *lines)


def require_worth(plan: Plan, where: str) -> None:
    """Raise ConfigurationError where the noise of a sum is longer than the plan itself allows; `where` names the
    plan."""
    privacy, parameters = plan.privacy, plan.model.parameters
    if plan.noise_at == "silos":
        _require_masks_that_hold(plan, where)
    if privacy.level != "silo":
        return
    ratio = privacy.noise_to_signal(parameters, privacy.nominal_silos)
    if ratio > privacy.max_noise_to_signal:
        raise ConfigurationError(
            f"{where}: the noise on a sum of {parameters:,} parameters is {ratio:.3g} times as long as "
            f"{privacy.nominal_silos} silos could make the sum, [privacy] max_noise_to_signal is "
            f"{privacy.max_noise_to_signal:g}: {privacy.silos_for(parameters):,} silos (nominal_silos) would do, or a "
            f"smaller model, fewer rounds, a larger target_epsilon"
        )


def _require_masks_that_hold(plan: Plan, where: str) -> None:
    """What a cohort can be at most, and that 32-bit words hold sum and noise of the smallest and, at silo level, of the
    expected one."""
    # Here, not above: numpy, which these bring, is for plans with masks alone.
    from lorica_security.identifiers import FederationName, SiloName
    from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
    from lorica_security.secure_aggregation.masked_vectors.fixed_point import Ranges, TensorRange
    from lorica_security.secure_aggregation.parameters import Terms
    from silo_wire.codecs.secure_codec import MAX_COHORT
    from silo_wire.plans.noised_masks import noise_terms

    privacy, aggregation, least = plan.privacy, plan.aggregation, plan.schedule.min_silos
    expected = least if plan.joint else max(least, privacy.nominal_silos)
    if expected > MAX_COHORT and not plan.joint:
        raise ConfigurationError(
            f"{where}: [privacy] nominal_silos = {privacy.nominal_silos}, and secure aggregation takes cohorts of "
            f"at most {MAX_COHORT} silos: set it to no more, or secure_aggregation to false, with which the "
            f"coordinator makes the noise"
        )
    # Who is with whom is not known here: without groups the fewest silos of a sum are the fewest that there can be.
    silos = tuple(SiloName(f"silo-{number:03}") for number in range(expected))
    terms = Terms(
        model=bytes(32),
        link=first_link(FederationName("forecast"), Partition.singletons(silos)),
        ranges=Ranges(weight_cap=1.0, tensors=(TensorRange(plan.model.parameters, 1.0),)),
        min_cohort=least,
        min_survivors=aggregation.min_survivors,
        colluders=aggregation.colluders,
        threshold=aggregation.threshold or None,
        noise=noise_terms(plan),
    )
    for cohort in sorted({least, expected}):
        try:
            terms.parameters(silos[:cohort])
        except MalformedMessage as error:
            raise ConfigurationError(f"{where}: a cohort of {cohort} silos cannot keep the promise: {error}") from error


def _of_overrides(plan: Plan) -> Iterator[str]:
    gap = widest_gap(plan.training.works)
    if plan.aggregation.secure_aggregation and gap is not None and gap.ratio > 1:
        yield (
            f"overrides under masks: {gap.first} and {gap.second} differ {float(gap.ratio):.3g}-fold in learning "
            f"rate x optimizer steps; a silo refuses that unless its people set [policy] max_work_ratio to at least "
            f"as much"
        )


def _of_the_weighting(plan: Plan) -> Iterator[str]:
    weighting = plan.aggregation.weighs
    if plan.aggregation.secure_aggregation and weighting.masks != THE_SAME:
        yield f'weighting = "{weighting.name}" under masks: {weighting.masks}'


def _of_the_reducer(plan: Plan) -> Iterator[str]:
    rule, silos = plan.aggregation.robust, plan.schedule.min_silos
    drawn = " of those drawn" if plan.schedule.cohort_size else ""
    if rule is not None:
        yield f'reducer = "{rule.name}", in a round of {silos} silos{drawn}: {rule.withstood(plan.aggregation, silos)}'


def _promise(plan: Plan) -> Iterator[str]:
    privacy, rounds = plan.privacy, plan.schedule.rounds
    record = f"all records of one {privacy.unit_field!r}" if privacy.unit_field else "a record"
    unit = "a silo with all of its records" if privacy.level == "silo" else record
    cost = privacy.epsilon(rounds=rounds, weighted=plan.weighted)
    yield (
        f"privacy: epsilon {cost:.3g} of {privacy.target_epsilon:g} at dp_delta {privacy.dp_delta:g} for {rounds} "
        f"rounds; unit: {unit} ({privacy.neighbouring_relation}); noise multiplier {privacy.noise_multiplier:.4g}"
    )


def _of_silos(plan: Plan) -> Iterator[str]:
    privacy, aggregation = plan.privacy, plan.aggregation
    parameters, silos = plan.model.parameters, privacy.nominal_silos
    if plan.noise_at == "coordinator":
        yield (
            "the coordinator makes the noise: it sees every delta, and the promise is towards those who see its models"
        )
    else:
        yield "each silo makes a part of the noise before it masks: the promise is towards the coordinator, too"
    ratio = privacy.noise_to_signal(parameters, silos)
    yield (
        f"noise to signal: {ratio:.3g} with {silos} silos (at most {privacy.max_noise_to_signal:g}), "
        f"{privacy.noise_to_signal(parameters, plan.schedule.min_silos):.3g} with min_silos = "
        f"{plan.schedule.min_silos}; noise on one parameter of the mean: "
        f"{privacy.noise_multiplier * aggregation.max_delta_norm / silos:.3g}"
    )


def _of_records(plan: Plan) -> Iterator[str]:
    privacy = plan.privacy
    if plan.joint:
        yield from _of_joint_noise(plan)
    if not plan.weighted:
        return
    noise = privacy.loss_noise_multiplier * privacy.loss_bound
    expected = privacy.nominal_records * EXPECTED_LOSS_REDUCTION
    yield (
        f"noise on a silo's weight: {noise:.3g}, beside {expected:.3g} where {privacy.nominal_records} records each "
        f"lose {EXPECTED_LOSS_REDUCTION:g} of their loss, and a cap of {privacy.weight_cap:.3g}"
    )
    if noise > MOST_OF_A_WEIGHT * expected:
        yield (
            'noise drowns the weights: [aggregation] weighting = "equal" costs no epsilon and is likely to learn better'
        )


def _of_joint_noise(plan: Plan) -> Iterator[str]:
    privacy, makers = plan.privacy, plan.noise_makers
    ((_, release),) = plan.releases_of_round
    alone = epsilon_of([replace(release.alone, steps=release.steps * plan.schedule.rounds)], dp_delta=privacy.dp_delta)
    yield (
        f"the noise is made by {makers} silos together, and the promise is towards who sees sums alone: the "
        f"coordinator, those who get models, and at most {max(plan.aggregation.colluders, 1)} of a sum's silos with "
        f"them"
    )
    yield (
        f"if all other silos of a sum worked against one, epsilon for its records would be {alone:.3g}: a silo "
        "takes no such plan unless its people set [policy] max_epsilon_alone"
    )
