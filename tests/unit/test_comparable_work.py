"""Overrides under masks: no table that a silo accepts lets one silo work further beyond another than its policy says,
by the steps that the real trainer makes; and what is refused, by which side, with which remedy.
"""

import json
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.plans.forecast import forecast
from lorica_coordinator.plans.presets import preset
from lorica_security.errors import ConfigurationError, MalformedMessage, PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link, successor
from silo_agent.commands.plan_review import unusual
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.masking import check_work_of_groups
from silo_agent.training.local_optimizer import learning_rate_factor
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.training import SiloTraining, TrainingSection
from silo_wire.plans.work import COMMON, MOST_SETTINGS, Work, optimizer_steps, widest_gap
from tests.support.federation_peer import SILO, small_bundle
from tests.support.secagg_federation import FEDERATION, silo_names

MOST_EXAMPLES = 100_000
WORK_KEYS = {"learning_rate", "epochs", "batch_size", "gradient_accumulation"}


def masked_plan(training: dict[str, Any]) -> Any:
    return small_bundle(
        schedule={"rounds": 3, "min_silos": 3},
        aggregation={"secure_aggregation": True, "max_weight": 100.0},
        training=training,
    )


def policy(ratio: float = 1.0) -> SiloPolicy:
    return SiloPolicy(rules=PolicyRules(max_work_ratio=ratio), silo=SILO)


def refusals(training: dict[str, Any], ratio: float = 1.0) -> list[PolicyRefusal]:
    return list(policy(ratio).objections(masked_plan(training)))


def true_work(section: TrainingSection, examples: int) -> Fraction:
    """The sum of the rates of all steps, as the trainer makes them."""
    steps, rate = optimizer_steps(examples, section), Fraction(repr(section.learning_rate))
    return rate * (steps if section.learning_rate_schedule == "constant" else Fraction(steps + 1, 2))


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_true_work_is_the_sum_of_the_rates_of_all_steps(schedule: Any) -> None:
    section = TrainingSection(learning_rate=0.5, epochs=3, batch_size=2, learning_rate_schedule=schedule)
    steps = optimizer_steps(7, section)
    rates = [0.5 * learning_rate_factor(schedule, step, steps) for step in range(steps)]
    assert float(true_work(section, 7)) == pytest.approx(sum(rates))


# --- the search

NEAR, FAR = (
    st.sampled_from([Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3)]),
    st.sampled_from([5, 7, 8, 16, 100]),
)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A base, and overrides: of a key or two by a little, which may well be accepted; of any keys by much; or of
    anything at all."""
    base: dict[str, Any] = {
        "learning_rate": draw(st.sampled_from([1e-7, 1e-4, 1e-3, 3e-3, 0.1, 10.0])),
        "epochs": draw(st.integers(1, 12)),
        "batch_size": draw(st.integers(1, 64)),
        "gradient_accumulation": draw(st.integers(1, 8)),
    }
    kind = draw(st.sampled_from(["near", "near", "far", "any"]))

    def changed(key: str) -> Any:
        factor = draw(NEAR if kind == "near" else FAR)
        value = base[key] * float(factor) if draw(st.booleans()) else base[key] / float(factor)
        if key == "learning_rate":
            return min(max(draw(st.floats(1e-7, 10)) if kind == "any" else value, 1e-7), 10.0)
        return (
            draw(st.integers(1, 1_000_000))
            if kind == "any"
            else max(1, round(value) + draw(st.sampled_from([0, 0, 1])))
        )

    few = st.sets(st.sampled_from(sorted(WORK_KEYS)), max_size=2 if kind == "near" else 4)
    overrides = {
        name: {key: changed(key) for key in draw(few)} for name in ("bank-a", "bank-b")[: draw(st.integers(1, 2))]
    }
    schedule = draw(st.sampled_from(["constant", "linear"]))
    return {**base, "learning_rate_schedule": schedule, "overrides": overrides}


@settings(max_examples=200, deadline=None)
@given(
    table=tables(),
    ratio=st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0]),
    examples=st.lists(st.integers(1, MOST_EXAMPLES), max_size=5),
)
def test_no_table_that_is_accepted_lets_work_differ_further_than_the_policy_says(
    table: dict[str, Any], ratio: float, examples: list[int]
) -> None:
    section = TrainingSection.model_validate(table)
    sections = [section, *(section.for_silo(silo) for silo in section.overrides)]
    if refused := refusals(table, ratio):
        assert [one.rule for one in refused] == ["max_work_ratio"]
        return
    batches = {one.batch_size * one.gradient_accumulation for one in sections}
    edges = {batch * times + by for batch in batches for times in (1, 2, 3) for by in (-1, 0, 1)}
    for count in {1, 2, MOST_EXAMPLES, *examples, *(edge for edge in edges if 1 <= edge <= MOST_EXAMPLES)}:
        works = [true_work(one, count) for one in sections]
        assert max(works) <= min(works) * Fraction(repr(ratio)), (count, works)


@settings(max_examples=120, deadline=None)
@given(table=tables())
def test_what_is_refused_does_differ_by_that_much(table: dict[str, Any]) -> None:
    """The ratio that is told is that of some number of examples, or of the rates: nobody is refused for nothing."""
    section = TrainingSection.model_validate({**table, "learning_rate_schedule": "constant"})
    gap = widest_gap(section.works)
    assert gap is not None
    names = {COMMON: section} | {f"[training.overrides.{it}]": section.for_silo(it) for it in section.overrides}
    first, second = names[gap.first], names[gap.second]
    counts = {1} | {one.batch_size * one.gradient_accumulation for one in (first, second)}
    found = {
        Fraction(1),
        *(true_work(a, count) / true_work(b, count) for count in counts for a, b in ((first, second), (second, first))),
        *(Work.of(a).rate / Work.of(b).rate for a, b in ((first, second), (second, first))),
    }
    assert gap.ratio == max(found)


# --- what is refused

ATTACKS: dict[str, dict[str, Any]] = {
    "the least rate there is, for all but one": {
        "learning_rate": 1e-3,
        "overrides": {silo: {"learning_rate": 1e-7} for silo in ("bank-a", "bank-b")},
    },
    "as the common rate, for one above it": {"learning_rate": 1e-7, "overrides": {"bank-a": {"learning_rate": 1e-3}}},
    "each key within bounds, the product not": {
        "learning_rate": 1e-3,
        "epochs": 4,
        "batch_size": 8,
        "overrides": {"bank-a": {"learning_rate": 5e-4, "epochs": 2, "batch_size": 16, "gradient_accumulation": 2}},
    },
    "between two silos, each within bounds of the plan": {
        "learning_rate": 1e-3,
        "overrides": {"bank-a": {"learning_rate": 4e-3}, "bank-b": {"learning_rate": 2.5e-4}},
    },
    "accumulation so long that there is one step": {
        "batch_size": 1,
        "overrides": {"bank-a": {"gradient_accumulation": 1_000_000}},
    },
    "rates apart, with steps that make up for it": {
        "learning_rate": 1e-3,
        "overrides": {"bank-a": {"learning_rate": 1e-5, "epochs": 100}},
    },
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_work_that_differs_is_refused_at_any_policy_and_by_the_operators_own_side(name: str) -> None:
    for ratio in (1.0, 4.0):
        (refusal,) = refusals(ATTACKS[name], ratio)
        assert refusal.rule == "max_work_ratio"
        assert f"max_work_ratio of this silo allows {ratio:g} under secure_aggregation" in str(refusal)
        assert "have the operator bring the overrides together" in str(refusal)
        assert "or set [policy]" not in str(refusal), "more than anybody may allow"
    plan = masked_plan(ATTACKS[name]).plan
    with pytest.raises(ConfigurationError, match=r"plan.toml: .*training\.overrides.*secure_aggregation = true"):
        plan.require_comparable_work("plan.toml")


def test_what_people_may_allow_is_refused_until_they_do() -> None:
    table = {"epochs": 2, "overrides": {"bank-a": {"epochs": 6}}}
    (refusal,) = refusals(table)
    assert "[training] and [training.overrides.bank-a] of plan small differ 3-fold" in str(refusal)
    assert "or set [policy] max_work_ratio = 3" in str(refusal)
    (refusal,) = refusals(table, 2.99)
    assert refusal.rule == "max_work_ratio"
    assert refusals(table, 3.0) == []
    plan = masked_plan(table).plan
    plan.require_comparable_work("plan.toml")
    (line,) = forecast(plan)
    assert "differ 3-fold" in line
    assert "max_work_ratio" in line


# --- by release group

MEMBERS = silo_names(9)


@given(
    cut=st.integers(3, 6),
    faster=st.sets(st.sampled_from(MEMBERS)),
    came_of=st.booleans(),
)
def test_silos_that_no_groups_told_apart_train_alike(cut: int, faster: set[SiloName], came_of: bool) -> None:
    """`came_of`: the groups followed one group of all, so that atoms are the groups; else a division that told others
    apart."""
    groups = Partition.of([MEMBERS[:cut], MEMBERS[cut:]])
    before = Partition.of([MEMBERS]) if came_of else Partition.of([MEMBERS[::2], MEMBERS[1::2]])
    link = successor(first_link(FEDERATION, before), groups)
    plan = masked_plan({"overrides": {silo: {"learning_rate": 2e-3} for silo in faster}, "learning_rate": 1e-3}).plan
    mixed = [atom for atom in link.atoms if 0 < len(faster & set(atom)) < len(atom)]
    if not mixed:
        check_work_of_groups(plan, link)
        return
    with pytest.raises(PolicyRefusal, match="never told them apart") as refused:
        check_work_of_groups(plan, link)
    assert refused.value.rule == "max_work_ratio"


def test_rates_are_compared_as_they_are_written() -> None:
    """3e-3 / 1e-3 is above 3 in doubles."""
    assert 3e-4 / 1e-4 != 3.0 or 0.3 / 0.1 != 3.0
    assert refusals({"learning_rate": 0.1, "overrides": {"bank-a": {"learning_rate": 0.3}}}, 3.0) == []


def test_batches_that_are_cut_otherwise_are_the_same_work() -> None:
    table = {"batch_size": 16, "overrides": {SILO: {"batch_size": 4, "gradient_accumulation": 4}}}
    assert refusals(table) == []
    assert refusals({"overrides": {SILO: {}}}) == []
    (refusal,) = refusals({"batch_size": 16, "overrides": {SILO: {"batch_size": 8}}})
    assert "2-fold" in str(refusal)


def test_more_settings_than_are_compared_are_refused() -> None:
    """Each within a hair of the others: comparing each with each must not take this silo's day."""
    many = {f"silo-{index}": {"batch_size": 100_000 + index} for index in range(MOST_SETTINGS)}
    (refusal,) = refusals({"batch_size": 100_000 - 1, "overrides": many}, 4.0)
    assert f"more than {MOST_SETTINGS} different settings" in str(refusal)
    with pytest.raises(ConfigurationError, match="more than 256 different settings"):
        masked_plan({"batch_size": 99_999, "overrides": many}).plan.require_comparable_work("plan.toml")
    alike = {f"silo-{index}": {"batch_size": 99_999} for index in range(3000)}
    assert refusals({"batch_size": 99_999, "overrides": alike}) == []
    with pytest.raises(ValueError, match="at most 10000"):
        TrainingSection.model_validate({"overrides": {f"silo-{index}": {} for index in range(10_001)}})


def test_overrides_are_of_keys_that_are_counted_and_of_no_other() -> None:
    """A key that comes to SiloTraining must come to Work, or be refused under masks."""
    assert set(SiloTraining.model_fields) == WORK_KEYS < set(TrainingSection.model_fields)
    common = Work.of(TrainingSection())
    for key in WORK_KEYS:
        value = 0.5 if key == "learning_rate" else 77
        section = TrainingSection.model_validate({"overrides": {"bank-a": {key: value}}})
        assert Work.of(section.for_silo("bank-a")) != common


@pytest.mark.parametrize("key", sorted(set(TrainingSection.model_fields) - WORK_KEYS))
def test_attack_override_of_anything_else_is_no_plan(key: str) -> None:
    value = masked_plan({}).plan.model_dump(mode="json")
    value["training"]["overrides"] = {"bank-a": {key: value["training"][key]}}
    with pytest.raises(MalformedMessage, match=rf"unknown key training\.overrides\.bank-a\.{key}"):
        Plan.from_json(json.dumps(value).encode())


# --- the papers' presets


@pytest.mark.parametrize("name", ["paper-text", "paper-code"])
def test_the_papers_presets_stay_possible_in_plain_plans_and_are_refused_under_masks(name: str) -> None:
    training = preset(name)["training"]
    section = TrainingSection.model_validate(training)
    rates = {section.for_silo(silo).learning_rate for silo in section.overrides}
    epochs = {section.epochs} | {section.for_silo(silo).epochs for silo in section.overrides}
    assert max(rates) / min(rates) == pytest.approx(10)
    assert {6, 12} <= epochs
    plain = small_bundle(training=training)
    policy().check_plan(plain)
    plain.plan.require_comparable_work("plan.toml")
    (refusal,) = refusals(training, 4.0)
    assert refusal.rule == "max_work_ratio"
    with pytest.raises(ConfigurationError, match=r"overrides.* secure_aggregation"):
        masked_plan(training).plan.require_comparable_work("plan.toml")


# --- values that no plan has, with masks or without

NEAR_NOTHING = [0.0, -1e-3, 5e-324, 1e-310, 1e-30, 9.9e-8, math.nan, -math.inf]
TOO_MUCH = [10.01, 1e30, math.inf]


@pytest.mark.parametrize("value", [*NEAR_NOTHING, *TOO_MUCH])
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        ("training", "learning_rate"),
        ("training", "overrides", "bank-a", "learning_rate"),
        ("aggregation", "server_learning_rate"),
    ],
    ids=lambda path: ".".join(path),
)
def test_attack_rates_near_zero_or_beyond_measure(path: tuple[str, ...], masks: bool, value: float) -> None:
    plan = (masked_plan({}) if masks else small_bundle()).plan.model_dump(mode="json")
    plan["training"]["overrides"] = {"bank-a": dict.fromkeys(WORK_KEYS)}
    at = plan
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(MalformedMessage, match=rf"plan: {'.'.join(path)} = .*: input should be .*") as refusal:
        Plan.from_json(json.dumps(plan).encode())
    assert "finite" in str(refusal.value) or "or equal to" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"server_learning_rate": 0.009}, "leaves the model almost as it was: set at least 0.01"),
        ({"server_optimizer": "adam", "server_learning_rate": 9e-5}, "server_learning_rate = 9e-05"),
        ({"server_optimizer": "adam", "tau": 1e30}, "tau = 1e\\+30: input should be less than or equal to 1"),
        ({"server_optimizer": "yogi", "beta1": 1 - 2**-50}, "beta1 = .*less than or equal to 0.99"),
        ({"max_delta_norm": 1e-30}, "max_delta_norm = 1e-30 is next to nothing: set 0 for none, or at least 0.001"),
        ({"max_weight": 1e-300}, "max_weight = 1e-300 is next to nothing: set 0 for none, or at least 1e-09"),
        ({"delta_bound": 2.0**-200}, "delta_bound"),
        ({"delta_bound": 2.0**100}, "delta_bound"),
        ({"max_weight_ratio": 901.0}, "max_weight_ratio"),
        ({"max_weight_ratio": math.nan}, "max_weight_ratio"),
    ],
)
def test_attack_a_server_that_leaves_the_model_as_it_was(changes: dict[str, Any], says: str) -> None:
    plan = small_bundle().plan.model_dump(mode="json")
    plan["aggregation"] |= changes
    with pytest.raises(MalformedMessage, match=says):
        Plan.from_json(json.dumps(plan).encode())


@pytest.mark.parametrize("value", [0.5, 4.01, 100.0, math.nan, math.inf])
def test_no_silo_allows_more_than_four_fold_or_less_than_none(value: float) -> None:
    with pytest.raises(ValueError, match="max_work_ratio"):
        PolicyRules(max_work_ratio=value)


# --- what is marked for people


def test_a_plan_like_most_has_nothing_unusual() -> None:
    assert list(unusual(small_bundle())) == []
    assert list(unusual(small_bundle(training=preset("default")["training"]))) == []


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"training": {"learning_rate": 1e-7}}, "[training] learning_rate = 1e-07 is outside the usual 1e-06 to 0.03"),
        ({"training": {"learning_rate": 1.0}}, "[training] learning_rate = 1 is outside"),
        (
            {"training": {"learning_rate": 0.03, "overrides": {"bank-a": {"learning_rate": 0.05}}}},
            "[training.overrides.bank-a] learning_rate = 0.05 is outside the usual",
        ),
        ({"training": {"epochs": 101}}, "[training] epochs = 101"),
        ({"training": {"max_grad_norm": 0.0}}, "gradients are not clipped"),
        ({"training": {"max_grad_norm": 1e-6}}, "[training] max_grad_norm = 1e-06"),
        ({"training": {"weight_decay": 1000.0}}, "weight_decay = 1000 takes 1 of every parameter in each step"),
        ({"training": {"fedprox_mu": 11.0}}, "[training] fedprox_mu = 11"),
        ({"training": {"dropout": 0.9}}, "[training] dropout = 0.9"),
        ({"training": {"max_input_tokens": 1}}, "[training] max_input_tokens = 1"),
        ({"training": {"max_output_tokens": 1}}, "[training] max_output_tokens = 1"),
        (
            {"training": {"loss_log_steps": 101, "loss_reduction": "logged"}},
            "loss_log_steps = 101: a silo of as few optimizer steps logs fewer than three losses",
        ),
        (
            {"training": {"loss_reduction": "as_published"}},
            '[training] loss_reduction = "as_published": weights follow',
        ),
        (
            {"aggregation": {"server_learning_rate": 0.01}},
            "server_learning_rate of sgd = 0.01 is outside the usual 0.1 to 2",
        ),
        (
            {"aggregation": {"server_optimizer": "adam", "server_learning_rate": 1e-4}},
            "server_learning_rate of adam = 0.0001 is outside",
        ),
        ({"aggregation": {"momentum": 0.99}}, "[aggregation] momentum = 0.99"),
        (
            {"aggregation": {"server_optimizer": "yogi", "server_learning_rate": 0.2, "tau": 0.5}},
            "[aggregation] tau = 0.5",
        ),
        ({"aggregation": {"max_delta_norm": 0.001}}, "[aggregation] max_delta_norm = 0.001"),
        (
            {"evaluation": {"max_examples": 1}},
            "[evaluation] max_examples = 1: scores of so few tell of single examples",
        ),
    ],
)
def test_whatever_is_unusual_has_a_line(sections: dict[str, Any], says: str) -> None:
    (line,) = [line for line in unusual(small_bundle(**sections)) if says in line]
    assert "\n" not in line


@pytest.mark.parametrize(
    ("training", "aggregation", "says"),
    [
        ({"overrides": {SILO: {}}}, {}, "there are overrides under masks"),
        (
            {"overrides": {"bank-a": {"epochs": 2}}},
            {},
            "differ 2-fold in learning rate x optimizer steps: under masks a silo that trains far more than the "
            "others is alone",
        ),
        ({}, {"max_weight_ratio": 300.0}, "[aggregation] max_weight_ratio = 300"),
        ({}, {"delta_bound": 1e-9}, "[aggregation] delta_bound = 1e-09"),
        (
            {},
            {"max_weight": 1e-9},
            "[aggregation] max_weight = 1e-09 is less than almost any weight: a silo that reduces its loss",
        ),
        ({}, {"max_weight": 5e-3, "weighting": "loss_reduction"}, "[aggregation] max_weight = 0.005 is less"),
    ],
)
def test_whatever_is_unusual_under_masks_has_a_line(
    training: dict[str, Any], aggregation: dict[str, Any], says: str
) -> None:
    bundle = small_bundle(
        schedule={"rounds": 3, "min_silos": 3},
        aggregation={"secure_aggregation": True, "max_weight": 100.0, **aggregation},
        training=training,
    )
    assert len([line for line in unusual(bundle) if says in line]) == 1


# --- plain SGD, and steps that are the same for all


@pytest.mark.parametrize("training", [{}, {"learning_rate": 0.1, "max_grad_norm": 1.0}])
def test_attack_sgd_that_leaves_a_silo_alone_in_the_sum(training: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="with a model under which one silo alone has any the sum is that silo's delta"
    ):
        masked_plan({"optimizer": "sgd", **training})
    masked_plan({**training, "optimizer": "adamw"})


def test_steps_make_the_work_of_all_silos_equal_but_for_their_rates() -> None:
    for override in (SiloTraining(batch_size=1), SiloTraining(gradient_accumulation=8)):
        assert widest_gap(TrainingSection(steps=5, overrides={"bank-b": override}).works).ratio == 1  # type: ignore[union-attr]
    faster = TrainingSection(steps=5, overrides={"bank-b": SiloTraining(learning_rate=3e-3)})
    assert widest_gap(faster.works).ratio == 3  # type: ignore[union-attr]
    assert {optimizer_steps(examples, faster) for examples in (1, 7, 1000)} == {5}


@pytest.mark.parametrize(
    ("training", "refused"),
    [
        ({"epochs": 2}, r"\[training\] epochs = 2 does not go with \[training\] steps = 5"),
        ({"overrides": {"bank-b": {"epochs": 1}}}, r"\[training.overrides.bank-b\] epochs = 1"),
        ({"loss_reduction": "as_published"}, "logs whole epochs"),
    ],
)
def test_steps_take_the_place_of_epochs(training: dict[str, Any], refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        small_bundle(training={"steps": 5, **training})


def test_steps_that_go_over_few_examples_too_often_are_refused_without_telling_how_many() -> None:
    plan = small_bundle(training={"steps": 40, "batch_size": 2}).plan
    rules = SiloPolicy(rules=PolicyRules(max_epochs=10), silo=SILO)
    rules.check_epochs(plan, 8)  # 4 steps an epoch
    with pytest.raises(PolicyRefusal, match="more often in a round than") as refusal:
        rules.check_epochs(plan, 6)  # 3 steps an epoch: begun 14 times
    assert refusal.value.rule == "max_epochs"
    assert "6 " not in str(refusal.value)


def test_a_plan_without_steps_is_spelled_as_before_there_were_any() -> None:
    assert b'"steps"' not in json.dumps(json.loads(small_bundle().plan.to_json())["training"]).encode()
    assert small_bundle(training={"steps": 1}).plan.digest != small_bundle().plan.digest
