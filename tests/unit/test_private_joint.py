"""Joint noise: one step of a masked sum of gradients, whose noise several silos make together."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, PolicyRefusal, StateError
from lorica_security.host.files import overwrite
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.noise.random_words import RandomWords
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.accounting import Budget, GaussianRelease, epsilon_of
from lorica_security.privacy.ledger import head_of, read_ledger
from lorica_security.privacy.renyi_filter import ORDERS, filtered_epsilon
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys.key_agreement import noise_key
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, SIGNED_MAX, Ranges
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.masked_vectors.noise_shares import LEAST_BITS, TAIL, NoiseShares
from lorica_security.secure_aggregation.parameters import NoiseTerms, Terms, threshold_for
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.policy.privacy_rules import filtered_cost
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import Batch, EncodedExamples
from silo_agent.training.device import DeviceSettings
from silo_agent.training.private.clipping import MARGIN
from silo_agent.training.private.joint_gradient import sum_gradients, take_sums, write_sum
from silo_agent.training.private.private_trainer import PrivateSchedule, drawn_examples
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.masked_vector import BLOCK_ELEMENTS, KeptDelta, write_masked_vector
from silo_wire.codecs.secure_journals_codec import _terms_from_stored, _terms_to_stored
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.noised_masks import GRADIENT_STEPS, check_noise_fits, noise_terms
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.schedule import ScheduleSection
from silo_wire.plans.sections.training import TrainingSection
from tests.support.coordinator_edges import make_plan
from tests.support.secagg_federation import ALONE, MODEL, attempt, entropy, silo_names
from tests.support.tiny_t5 import bundle_of, random_model, silo_data, write_model
from tests.unit.test_agent_policy import policy
from tests.unit.test_agent_privacy import Heads, guard, key
from tests.unit.test_training_private_gradients import gradients_one_by_one, parameters_of, t5
from tests.unit.test_training_private_trainer import KEY, examples_of

VALUES: Mapping[str, object] = {
    "schedule.min_silos": 3,
    "schedule.training_deadline_s": 60.0,
    "aggregation.secure_aggregation": True,
    "aggregation.weighting": "equal",
    "aggregation.max_delta_norm": 0.0,
    "aggregation.delta_bound": 0.5,
    "training.dropout": 0.0,
    "training.epochs": 1,
    "training.precision": "float32",
    "training.max_grad_norm": 0.5,
    "evaluation.every": 0,
    "evaluation.initial": False,
    "evaluation.last": False,
    "privacy.level": "record",
    "privacy.noise": "joint",
    "privacy.steps": 1,
    "privacy.nominal_records": 400,
    "privacy.expected_batch_size": 100,
    "privacy.answer_after_s": 1.0,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> PlanBundle:
    return make_plan(tmp_path_factory.mktemp("plan"), overrides=VALUES)


def planned(tmp_path: Path, **changes: object) -> Plan:
    """Without a model: what a plan of these settings says, or why there is none."""
    return make_plan(tmp_path, overrides={**VALUES, **changes}).plan


# --- the plan


def test_a_round_is_one_joint_release_that_is_affordable_together_and_dear_alone(bundle: PlanBundle) -> None:
    plan = bundle.plan
    assert (plan.joint, plan.noise_at, plan.noise_makers) == (True, "silos", 2)
    ((mechanism, release),) = plan.releases_of_round
    assert mechanism == "joint_gradients"
    assert release == GaussianRelease(plan.privacy.noise_multiplier, 0.25, 1, makers=2)
    together = epsilon_of([replace(release, steps=plan.schedule.rounds)], dp_delta=plan.privacy.dp_delta)
    assert 0.99 * plan.privacy.target_epsilon < together <= plan.privacy.target_epsilon
    alone = epsilon_of([replace(release.alone, steps=plan.schedule.rounds)], dp_delta=plan.privacy.dp_delta)
    assert alone > 1.3 * together


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy.level": "none"}, r'noise = "joint" does not go with level = "none"'),
        ({"aggregation.secure_aggregation": False}, r"secure_aggregation = false does not go with .*noise = \"joint\""),
        ({"aggregation.weighting": "lorar"}, r"weighting = \"lorar\" does not go with .*noise = \"joint\""),
        ({"aggregation.max_delta_norm": 5.0}, r"max_delta_norm = 5 does not go with .*cuts coordinates to delta_bound"),
        ({"aggregation.delta_bound": 0.004}, r"delta_bound = 0.004 .*set it to at least .* = 0.005"),
        ({"privacy.steps": 2}, r"steps = 2 does not go with .*a round is one step"),
        ({"privacy.average_decay": 0.9}, r"average_decay = 0.9 does not go with .*no iterates"),
        ({"privacy.neighbouring_relation": "replace_one"}, r"neighbouring_relation = \"replace_one\" does not go with"),
        ({"training.optimizer": "adam_corrected"}, r"adam_corrected\" does not go with .*no silo has an optimizer"),
        ({"privacy.answer_after_s": 0.0}, r"answer_after_s = 0 does not go with .*how many records it drew"),
        ({"privacy.answer_after_s": 60.0}, r"answer_after_s = 60 .*less than \[schedule\] training_deadline_s = 60"),
        ({"training.overrides.bank-b.learning_rate": 0.1}, r"overrides.bank-b\] = learning_rate .*the server steps"),
        ({"aggregation.min_survivors": 3, "aggregation.colluders": 2}, r"min_survivors = 3 does not hold"),
        ({"schedule.min_silos": 2}, r"min_silos = 2 is too few for secure aggregation"),
        (
            {"schedule.min_silos": 5, "aggregation.threshold": 3},
            r"threshold = 3 does not go with .*works with the coordinator: set it to 0, or colluders to at least 1",
        ),
        ({"privacy.noise": "own"}, r'answer_after_s = 1 does not go with noise = "own"'),
    ],
)
def test_what_does_not_go_with_joint_noise_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        planned(tmp_path, **changes)


@pytest.mark.parametrize(("silos", "makers"), [(3, 2), (4, 2), (5, 3), (8, 5), (12, 8)])
def test_how_many_make_it_counts_one_curious_member(tmp_path: Path, silos: int, makers: int) -> None:
    assert planned(tmp_path, **{"schedule.min_silos": silos}).noise_makers == makers


@pytest.mark.parametrize("silos", [3, 4, 5, 8])
@pytest.mark.parametrize("asked", [0, 3, 5])
@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_one_silo_that_signs_for_two_sums_of_an_attempt_makes_no_second_sum(
    bundle: PlanBundle, silos: int, asked: int, colluders: int
) -> None:
    """Their difference would be one silo's vector, with the noise of that silo alone: fewer makers than are counted."""
    values = bundle.plan.model_dump()
    values["schedule"] |= {"min_silos": silos}
    values["aggregation"] |= {"threshold": asked, "colluders": colluders, "min_survivors": min(silos, 4)}
    try:
        section = Plan.model_validate(values).aggregation
    except ValidationError:
        assert (asked and not colluders) or asked > silos or min(silos, 4) < colluders + 2
        return
    for cohort in range(silos, 60):
        threshold = threshold_for(cohort, colluders=section.colluders, asked=section.threshold or None)
        signatures = (cohort - 1) + 2  # each signs for one sum, but for one that signs for both
        assert 2 * threshold > signatures


@settings(max_examples=80, deadline=None)
@given(
    silos=st.integers(3, 12),
    more=st.integers(0, 8),
    colluders=st.integers(0, 3),
    survivors=st.integers(3, 8),
    asked=st.one_of(st.none(), st.integers(3, 10)),
    sizes=st.lists(st.integers(1, 4), max_size=4),
)
def test_no_attempt_begins_with_fewer_makers_than_the_plan_counts_on(
    silos: int,
    more: int,
    colluders: int,
    survivors: int,
    asked: int | None,
    sizes: list[int],
) -> None:
    plan = Plan.model_construct(
        schedule=ScheduleSection.model_construct(min_silos=silos),
        aggregation=AggregationSection.model_construct(
            colluders=colluders, min_survivors=survivors, threshold=asked or 0
        ),
    )
    names = silo_names(silos + more)
    groups, at = list[tuple[SiloName, ...]](), 0
    for size in sizes:
        if at + size <= len(names):
            groups.append(names[at : at + size])
            at += size
    link = first_link(FederationName("north"), Partition.of([*groups, *((name,) for name in names[at:])]))
    plain = Terms(
        model=MODEL,
        link=link,
        ranges=ranges_over(0.5),
        min_cohort=silos,
        min_survivors=survivors,
        colluders=colluders,
        threshold=asked,
    )
    noised = replace(plain, noise=NoiseTerms(noise_multiplier=1.0, makers=plan.noise_makers))
    for cohort in range(silos, len(names) + 1):
        try:
            honest = plain.parameters(names[:cohort]).honest
        except MalformedMessage:
            continue
        assert plan.noise_makers >= 2
        if honest < plan.noise_makers:
            assert any(len(group) > 1 for group in groups)
            with pytest.raises(MalformedMessage, match=rf"raise min_survivors by {plan.noise_makers - honest}"):
                noised.parameters(names[:cohort])
        else:
            noised.parameters(names[:cohort])


# --- what a silo's people allow


def test_nothing_joint_is_taken_unless_people_allow_what_it_costs_alone(bundle: PlanBundle) -> None:
    refused = [it for it in policy().objections(bundle) if it.rule == "max_epsilon_alone"]
    assert len(refused) == 1
    assert "made by 2 silos together" in str(refused[0])
    ((_, release),) = bundle.plan.releases_of_round
    rounds = bundle.plan.schedule.rounds
    lavish = policy(max_epsilon=1e3, max_epsilon_alone=1e3)
    assert list(lavish.objections(bundle)) == []
    together = filtered_cost(lavish.rules, [replace(release, steps=rounds)], [release], bundle.plan)
    alone = filtered_cost(lavish.rules, [replace(release.alone, steps=rounds)], [release], bundle.plan)
    assert together < alone
    between = policy(max_epsilon=1e3, max_epsilon_alone=(together + alone) / 2)
    assert [it.rule for it in between.objections(bundle)] == ["max_epsilon_alone"]
    assert list(policy(max_epsilon=1e3, max_epsilon_alone=1.001 * alone).objections(bundle)) == []


def test_attack_plan_that_costs_nothing_alone_where_people_never_allowed_joint_noise(bundle: PlanBundle) -> None:
    """At a max_dp_delta that promises next to nothing."""
    values = bundle.plan.model_dump()
    values["privacy"] |= {"noise_multiplier": 1000.0}
    noisy = PlanBundle(Plan.model_validate(values), bundle.files)
    assert [it.rule for it in policy(max_dp_delta=0.999).objections(noisy)] == ["max_epsilon_alone"]


def test_silos_that_nobody_pinned_are_not_counted_on(bundle: PlanBundle) -> None:
    refused = policy(max_epsilon=1e3, max_epsilon_alone=1e3, trust_on_first_use=True).objections(bundle)
    assert "trust_on_first_use" in [it.rule for it in refused]


JOINT = GaussianRelease(5.0, 0.2, 1, makers=4)


def test_the_ledger_counts_a_joint_release_twice(tmp_path: Path) -> None:
    budget = Budget(epsilon=50.0, dp_delta=1e-5, alone=50.0)
    file, heads = PrivacyLedgerFile(tmp_path / "privacy" / "ledger"), Heads()
    spending = guard(file, heads, budget)
    for number in (1, 2, 3):
        spending.spend(key(number), [("joint_gradients", JOINT)], unit="")
    (first, *_) = entries = spending.entries()
    assert [entry.release for entry in entries] == [JOINT] * 3
    order = first.order
    assert order in ORDERS
    assert spending.spent() == filtered_epsilon([JOINT] * 3, favoured=order, dp_delta=1e-5)
    assert spending.counted().epsilon_alone() == filtered_epsilon(
        [GaussianRelease(2.5, 0.2, 3)], favoured=order, dp_delta=1e-5
    )
    assert spending.counted().epsilon_alone() > spending.spent()


def test_either_budget_ends_it(tmp_path: Path) -> None:
    one, alone = ([GaussianRelease(5.0, 0.2, 1)], [JOINT.alone])
    of_one, of_alone = (filtered_epsilon(it, favoured=6, dp_delta=1e-5) for it in (one, alone))
    heads, file = Heads(), PrivacyLedgerFile(tmp_path / "privacy" / "ledger")
    with pytest.raises(PolicyRefusal, match="worked against it") as refused:
        guard(file, heads, Budget(epsilon=50.0, dp_delta=1e-5, alone=of_alone / 3)).check(
            [("joint_gradients", JOINT)], unit=""
        )
    assert refused.value.rule == "max_epsilon_alone"
    with pytest.raises(PolicyRefusal, match="its people allow") as refused:
        guard(file, heads, Budget(epsilon=of_one / 3, dp_delta=1e-5, alone=50.0)).check(
            [("joint_gradients", JOINT)], unit=""
        )
    assert refused.value.rule == "max_epsilon"
    # What was joint once is counted alone for good, also beside noise of one's own.
    guard(file, heads, Budget(epsilon=50.0, dp_delta=1e-5, alone=50.0)).spend(
        key(1), [("joint_gradients", JOINT)], unit=""
    )
    with pytest.raises(PolicyRefusal) as refused:
        guard(file, heads, Budget(epsilon=50.0, dp_delta=1e-5, alone=of_alone)).check(
            [("gradients", GaussianRelease(2.0, 0.2, 5))], unit=""
        )
    assert refused.value.rule == "max_epsilon_alone"


def test_a_line_whose_makers_were_edited_or_do_not_fit_is_no_entry(tmp_path: Path) -> None:
    file = PrivacyLedgerFile(tmp_path / "privacy" / "ledger")
    guard(file, Heads(), Budget(epsilon=50.0, dp_delta=1e-5, alone=50.0)).spend(
        key(1), [("joint_gradients", JOINT)], unit=""
    )
    raw = (tmp_path / "privacy" / "ledger").read_bytes()
    (entry,), _ = read_ledger(raw, "it")
    assert entry.release == JOINT
    for edited in (
        raw.replace(b'"makers":4', b'"makers":9'),
        replace(entry, mechanism="gradients").line(),
        replace(entry, release=replace(JOINT, makers=1)).line(),
    ):
        assert edited != raw
        with pytest.raises(IntegrityError):
            read_ledger(edited, "it")
    assert head_of((entry,)).sequence == 1


# --- how much noise, and how fine


@settings(max_examples=200, deadline=None)
@given(
    cohort=st.integers(3, 60),
    of_cohort=st.floats(0.1, 1),
    noise=st.floats(0.3, 30),
    elements=st.integers(1, 3_000_000_000),
    reach=st.floats(1, 1e5),
)
def test_shares_of_gradients_keep_the_promise_without_overflow(
    cohort: int, of_cohort: float, noise: float, elements: int, reach: float
) -> None:
    honest = max(2, round(cohort * of_cohort))
    room = SIGNED_MAX / cohort / reach  # for what one record adds, in steps
    if room * math.sqrt(honest) / noise < 4 * math.sqrt(elements) or room * noise < 2**LEAST_BITS * math.sqrt(honest):
        return  # too much for 32-bit words
    shares = NoiseShares(
        cohort=cohort,
        honest=honest,
        noise_multiplier=noise,
        elements=elements,
        reach=reach,
        grain=1 / GRADIENT_STEPS,
    )
    root, deviation = math.sqrt(elements), 2.0**shares.sigma_bits
    moved = shares.levels / reach + root * (1 + shares.levels / GRADIENT_STEPS)
    assert shares.sensitivity == pytest.approx(moved)
    assert noise * moved <= math.sqrt(honest) * deviation
    assert shares.effective_multiplier >= noise
    assert cohort * (shares.levels + 1) + TAIL * deviation * math.sqrt(cohort) <= SIGNED_MAX
    assert shares.sigma_bits >= LEAST_BITS


@pytest.mark.parametrize(("cohort", "honest"), [(3, 2), (8, 5), (12, 9), (60, 40)])
def test_a_larger_cohort_makes_no_less_noise_each(cohort: int, honest: int) -> None:
    """So each silo's part is, whatever the cohort, what the ledger counts as if all others worked against it."""
    counted = GaussianRelease(3.0, 0.1, makers=2).alone.noise_multiplier
    terms = NoiseTerms(noise_multiplier=3.0, makers=2, reach=10.0, grain=1 / GRADIENT_STEPS)
    shares = terms.shares(cohort=cohort, honest=honest, elements=10_000)
    assert 2.0**shares.sigma_bits / shares.sensitivity >= counted


@pytest.mark.parametrize("reach", [0.5, math.nan, math.inf, 0.0])
def test_a_range_without_room_for_one_record(reach: float) -> None:
    with pytest.raises(MalformedMessage, match="1 or more"):
        NoiseShares(cohort=5, honest=3, noise_multiplier=1.0, elements=10, reach=reach)


def test_terms_are_stored_whole(bundle: PlanBundle) -> None:
    terms = Terms(model=MODEL, link=ALONE, ranges=ranges_of(bundle), noise=noise_terms(bundle.plan))
    assert terms.noise == NoiseTerms(
        noise_multiplier=bundle.plan.privacy.noise_multiplier, makers=2, reach=100.0, grain=1 / GRADIENT_STEPS
    )
    assert _terms_from_stored(_terms_to_stored(terms), ALONE.federation) == terms


def test_a_roster_for_other_noise_is_refused(bundle: PlanBundle) -> None:
    noise = noise_terms(bundle.plan)
    assert noise is not None
    good = Terms(model=MODEL, link=ALONE, ranges=ranges_of(bundle), noise=noise)
    check_noise_fits(bundle, good.parameters(silo_names(4)))
    for changes in (
        {"makers": 3},
        {"reach": 50.0},
        {"noise_multiplier": noise.noise_multiplier / 1.5},
        {"grain": 1e-3},
    ):
        bad = replace(good, noise=replace(noise, **changes), min_survivors=4)  # type: ignore[arg-type]
        with pytest.raises(PolicyRefusal, match="would not cover"):
            check_noise_fits(bundle, bad.parameters(silo_names(4)))


def test_a_roster_of_too_few_makers_is_refused(bundle: PlanBundle) -> None:
    """One that a coordinator made up: three of four are a sum, two of which may work together."""
    few = Terms(model=MODEL, link=ALONE, ranges=ranges_of(bundle)).parameters(silo_names(4))
    alone = replace(few, threshold=4, min_survivors=4, least_sum=4, colluders=2)
    check = replace(alone, colluders=2)
    assert check.honest == 2
    crowded = bundle.plan.model_copy(update={"schedule": bundle.plan.schedule.model_copy(update={"min_silos": 5})})
    made = PlanBundle.__new__(PlanBundle)
    object.__setattr__(made, "plan", crowded)
    object.__setattr__(made, "files", bundle.files)
    with pytest.raises(PolicyRefusal, match="counts on noise of 3 silos"):
        check_noise_fits(made, check)


# --- the vector that a silo keeps


LAYOUT = Layout("float32", (TensorSpec("a", (7,)), TensorSpec("b", (300, 5)), TensorSpec("c", (1,))))
ELEMENTS = LAYOUT.parameters


def sums_of(flat: np.ndarray) -> list[torch.Tensor | None]:
    parts, at = [], 0
    for spec in LAYOUT.tensors:
        parts.append(torch.from_numpy(flat[at : at + spec.elements].reshape(spec.shape).copy()))
        at += spec.elements
    return list(parts)


def written(path: Path, flat: np.ndarray, *, divisor: float, bound: float) -> np.ndarray:
    write_sum(path, LAYOUT, sums_of(flat), divisor=divisor, bound=bound)
    return np.fromfile(path, dtype="<i4").astype(np.int64)


def test_it_is_minus_the_mean_in_steps_of_the_range(tmp_path: Path) -> None:
    flat = np.random.default_rng(1).normal(size=ELEMENTS)
    found = written(tmp_path / "sum", flat, divisor=40.0, bound=0.2)
    assert found == pytest.approx(-flat / 40 / 0.2 * GRADIENT_STEPS, abs=0.51)
    flat[3], flat[4] = 1e9, -1e9
    found = written(tmp_path / "sum", flat, divisor=40.0, bound=0.2)
    assert found[3:5].tolist() == [-GRADIENT_STEPS, GRADIENT_STEPS]


def test_an_empty_sample_is_zeros(tmp_path: Path) -> None:
    write_sum(tmp_path / "sum", LAYOUT, [None] * 3, divisor=4.0, bound=1.0)
    assert not np.fromfile(tmp_path / "sum", dtype="<i4").any()


def encoded(tmp_path: Path, flat: np.ndarray, shares: NoiseShares | None, terms: Terms, bound: float) -> np.ndarray:
    """As it leaves, less the masks: with the same keys whatever the sum is."""
    manifest = write_sum(tmp_path / "sum", LAYOUT, sums_of(flat), divisor=DIVISOR, bound=bound).manifest
    write_masked_vector(
        tmp_path / "masked",
        MaskVector(
            parameters=terms.parameters(silo_names(4)),
            rounding=KeyStream(Secret(entropy("rounding"))),
            noise=noise_key(Secret(entropy("root")), attempt(), b"r" * 32),
            masks=MaskSum((), ()),
        ),
        KeptDelta(file=tmp_path / "sum", manifest=manifest, unit=bound / GRADIENT_STEPS),
        weight=1.0,
        noise=shares,
        threads=1,
    )
    return np.fromfile(tmp_path / "masked", dtype="<u4")[:-EXTRA_WORDS]


DIVISOR, NORM = 50.0, 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sums")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    others=st.floats(1e-6, 1e3),
    bound=st.sampled_from([0.01, 0.011, 0.1, 3.0]),
    spread=st.sampled_from(["one", "all", "beyond"]),
)
def test_one_record_moves_the_vector_by_at_most_the_sensitivity(
    folder: Path, seed: int, others: float, bound: float, spread: str
) -> None:
    """Whatever the others are, also where they are far beyond the range, and whichever way the record pushes."""
    generator = np.random.default_rng(seed)
    flat = generator.normal(size=ELEMENTS) * others
    record = generator.normal(size=ELEMENTS)
    if spread == "one":
        record = np.zeros(ELEMENTS)
        record[generator.integers(ELEMENTS)] = 1.0
    if spread == "beyond":
        flat = np.sign(record) * (bound * DIVISOR - generator.uniform(0, 2 * NORM, ELEMENTS) / math.sqrt(ELEMENTS))
    record *= NORM / np.linalg.norm(record)
    noise = NoiseTerms(noise_multiplier=1.0, makers=2, reach=bound * DIVISOR / NORM, grain=1 / GRADIENT_STEPS)
    ranges = ranges_over(bound)
    terms = Terms(model=MODEL, link=ALONE, ranges=ranges, noise=noise)
    shares = noise.shares(cohort=4, honest=2, elements=ELEMENTS)
    one = encoded(folder, flat, shares, terms, bound)
    other = encoded(folder, flat + record, shares, terms, bound)
    moved = (other - one).view("<i4").astype(np.int64)
    assert math.isqrt(int((moved**2).sum())) <= shares.sensitivity


def ranges_over(bound: float) -> Ranges:
    sizes = [tensor.elements for tensor in LAYOUT.tensors]
    return Ranges.of(sizes=sizes, largest_delta=[bound] * len(sizes), largest_weight=1.0)


def test_what_is_in_it_is_the_sum_and_noise_of_its_share(tmp_path: Path) -> None:
    bound = 0.1
    noise = NoiseTerms(noise_multiplier=2.0, makers=2, reach=bound * DIVISOR / NORM, grain=1 / GRADIENT_STEPS)
    terms = Terms(model=MODEL, link=ALONE, ranges=ranges_over(bound), noise=noise)
    shares = noise.shares(cohort=4, honest=2, elements=ELEMENTS)
    flat = np.random.default_rng(3).normal(size=ELEMENTS)
    whole = encoded(tmp_path, flat, shares, terms, bound).view("<i4").astype(float)
    exact = np.clip(-flat / DIVISOR / bound, -1, 1) * shares.levels
    left = whole - exact
    assert left.std() == pytest.approx(2.0**shares.sigma_bits, rel=5 / math.sqrt(2 * ELEMENTS))
    # In the gradients' own unit: a share of the noise over the clipping norm.
    of_norm = left.std() * bound / shares.levels * DIVISOR / NORM
    assert of_norm == pytest.approx(2.0 / math.sqrt(2), rel=0.1)
    without = encoded(tmp_path, flat, None, terms, bound).view("<i4").astype(float)
    assert np.abs(without - exact).max() <= 1.5


def test_chunks_of_the_file_are_read_as_whole_numbers_too(tmp_path: Path) -> None:
    """Of more than one chunk, on several threads."""
    layout = Layout("float32", (TensorSpec("a", (2 * BLOCK_ELEMENTS + 9,)),))
    flat = torch.from_numpy(np.random.default_rng(5).normal(size=layout.parameters))
    manifest = write_sum(tmp_path / "sum", layout, [flat], divisor=1.0, bound=8.0).manifest
    ranges = Ranges.of(sizes=[layout.parameters], largest_delta=[8.0], largest_weight=1.0)
    parameters = Terms(model=MODEL, link=ALONE, ranges=ranges).parameters(silo_names(4))
    write_masked_vector(
        tmp_path / "masked",
        MaskVector(
            parameters=parameters,
            rounding=KeyStream(Secret(entropy("rounding"))),
            noise=noise_key(Secret(entropy("root")), attempt(), b"r" * 32),
            masks=MaskSum((), ()),
        ),
        KeptDelta(file=tmp_path / "sum", manifest=manifest, unit=8.0 / GRADIENT_STEPS),
        weight=1.0,
        threads=3,
    )
    words = np.fromfile(tmp_path / "masked", dtype="<u4")[:-EXTRA_WORDS].view("<i4")
    exact = -flat.numpy() / 8 * parameters.fixed_point.levels
    assert np.abs(words - exact).max() <= 1.5


# --- the gradients themselves


SCHEDULE = PrivateSchedule(
    sampling_rate=0.5,
    steps=1,
    expected_batch_size=4,
    noise_multiplier=1.0,
    max_grad_norm=0.3,
    loss_bound=4.0,
    loss_noise_multiplier=None,
    weight_cap=1.0,
)


SECTION = TrainingSection(batch_size=3)


def summed(
    model: Any, examples: EncodedExamples, schedule: PrivateSchedule = SCHEDULE, key: bytes = KEY
) -> torch.Tensor:
    parameters = parameters_of(model)
    sum_gradients(
        model,
        parameters,
        examples,
        schedule,
        SECTION,
        backend="ghost",
        words=RandomWords(key),
        should_stop=lambda: False,
    )
    found = take_sums(parameters)
    assert take_sums(parameters) == [None] * len(parameters)
    zeros = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    return torch.cat([(zero if one is None else one).flatten() for one, zero in zip(found, zeros, strict=True)])


def test_it_is_the_sum_of_clipped_gradients_of_who_was_drawn() -> None:
    model, examples = t5(), examples_of(12)
    drawn = drawn_examples(examples, SCHEDULE.sampling_rate, RandomWords(KEY))
    assert 0 < len(drawn) < 12
    expected = torch.zeros(0)
    for index in drawn:
        batch = batch_of_one(examples, index)
        (gradient,) = gradients_one_by_one(model, batch)
        clipped = gradient.double() * min(1.0, SCHEDULE.max_grad_norm * (1 - MARGIN) / float(gradient.double().norm()))
        expected = expected + clipped if len(expected) else clipped
    found = summed(model, examples)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_one_record_more_moves_the_sum_by_at_most_the_norm_and_steps_nothing() -> None:
    model, examples = t5(), examples_of(9)
    everybody = replace(SCHEDULE, sampling_rate=1.0)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    less = replace(examples, inputs=examples.inputs[:-1], targets=examples.targets[:-1])
    moved = float((summed(model, examples, everybody) - summed(model, less, everybody)).norm())
    assert 0.9 * SCHEDULE.max_grad_norm < moved <= SCHEDULE.max_grad_norm
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert torch.equal(before, after)


def test_nobody_drawn_is_zero_and_dropout_is_refused() -> None:
    rare = replace(SCHEDULE, sampling_rate=1e-12)
    assert not summed(t5(), examples_of(5), rare).any()
    with pytest.raises(StateError, match="dropout"):
        summed(t5(dropout=0.1), examples_of(5))


def test_it_stops_when_asked() -> None:
    with pytest.raises(TrainingStopped):
        sum_gradients(
            t5(),
            parameters_of(t5()),
            examples_of(5),
            replace(SCHEDULE, sampling_rate=1.0),
            SECTION,
            backend="ghost",
            words=RandomWords(KEY),
            should_stop=lambda: True,
        )


def batch_of_one(examples: EncodedExamples, index: int) -> Batch:
    inputs = torch.from_numpy(np.array(examples.inputs[index], dtype=np.int64))[None]
    labels = torch.from_numpy(np.array(examples.targets[index], dtype=np.int64))[None]
    return Batch(inputs, torch.ones_like(inputs, dtype=torch.bool), labels, labels.numel())


def test_a_silo_draws_a_fresh_sample_each_time_it_trains(tmp_path: Path) -> None:
    """Through the silo's trainer: two trainings of one round at one model, and no two alike."""
    model = random_model()
    bundle = bundle_of(model, **sections_of({**VALUES, "privacy.noise_multiplier": 1.0}))
    manifest = write_model(model, tmp_path / "model")
    pairs = [
        (f"how many people live in {place} ?", "SELECT NAME FROM PEOPLE ;") for place in "abcdefghijklmnopqrstuvwxyz"
    ]
    trainer = SiloTrainer(bundle, silo_data(pairs), "bank", DeviceSettings(device="cpu"))
    vectors = []
    for number in range(3):
        update = trainer.train(
            round_number=1, model_path=tmp_path / "model", model=manifest, update_path=tmp_path / f"update-{number}"
        )
        assert update.summary == bundle.plan.privacy.summary(None)
        vectors.append((tmp_path / f"update-{number}").read_bytes())
    assert len(set(vectors)) == 3


def sections_of(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    sections: dict[str, dict[str, object]] = {"schedule": {"rounds": 3}}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return sections


def test_a_sum_that_was_erased_is_masked_by_nobody(tmp_path: Path) -> None:
    flat = np.random.default_rng(1).normal(size=ELEMENTS)
    manifest = write_sum(tmp_path / "sum", LAYOUT, sums_of(flat), divisor=1.0, bound=8.0).manifest
    with (tmp_path / "sum").open("r+b") as file:
        overwrite(file.fileno())
    work = MaskVector(
        parameters=Terms(model=MODEL, link=ALONE, ranges=ranges_over(8.0)).parameters(silo_names(4)),
        rounding=KeyStream(Secret(entropy("rounding"))),
        noise=noise_key(Secret(entropy("root")), attempt(), b"r" * 32),
        masks=MaskSum((), ()),
    )
    with pytest.raises(IntegrityError, match="was damaged"):
        write_masked_vector(
            tmp_path / "masked",
            work,
            KeptDelta(file=tmp_path / "sum", manifest=manifest, unit=8.0 / GRADIENT_STEPS),
            weight=1.0,
        )
    assert not (tmp_path / "masked").exists()
