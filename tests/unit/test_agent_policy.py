"""What this silo refuses about masks, tensors and plans that nobody approved; the limits are in
test_agent_settings.py."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from lorica_security.errors import PolicyRefusal
from lorica_security.privacy.accounting import GaussianRelease, gaussian_epsilon
from lorica_security.privacy.renyi_filter import favoured_order, filtered_epsilon
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint, Ranges
from lorica_security.secure_aggregation.parameters import LEAST_COHORT, Parameters, default_threshold
from lorica_security.secure_aggregation.silo.party import Demands
from silo_agent.policy.loosenings import loosened
from silo_agent.policy.record import Lineage, Record, beginnings
from silo_agent.policy.rules import LEAST_SILOS, PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.canonical import Digest, digest_of
from silo_wire.manifest import Layout, TensorSpec, manifest_of
from silo_wire.plans.adapters import AdaptersSection, adapter_layout
from silo_wire.plans.plan import Plan, PlanBundle
from tests.support.federation_peer import SILO, small_bundle, vector_of

PLAIN = small_bundle()


def masked(*, min_silos: int = 3, **aggregation: Any) -> PlanBundle:
    return small_bundle(
        schedule={"rounds": 3, "min_silos": min_silos},
        aggregation={"secure_aggregation": True, "max_weight": 100.0, **aggregation},
    )


def policy(*, approvals: tuple[str, ...] = (), **rules: object) -> SiloPolicy:
    return SiloPolicy(rules=PolicyRules.model_validate(rules), silo=SILO, record=lambda: Record(approved=approvals))


def refusal_of(policy: SiloPolicy, bundle: PlanBundle) -> PolicyRefusal:
    with pytest.raises(PolicyRefusal) as refusal:
        policy.check_plan(bundle)
    return refusal.value


# --- scores
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [True, False])
def test_attack_plan_whose_scores_are_of_single_records(masks: bool) -> None:
    aggregation = {"secure_aggregation": masks, "max_weight": 100.0}
    schedule = {"rounds": 3, "min_silos": 3}

    def limited(most: int, **evaluation: Any) -> PlanBundle:
        section = {"max_examples": most, **evaluation}
        return small_bundle(schedule=schedule, aggregation=aggregation, evaluation=section)

    refusal = refusal_of(policy(), limited(1))
    assert refusal.rule == "smallest_evaluation"
    assert "raise [evaluation] max_examples" in str(refusal)
    policy().check_plan(limited(2))
    policy().check_plan(limited(0))  # the whole of what is held out, which the silo looks at itself
    assert refusal_of(policy(smallest_evaluation=50), limited(49)).rule == "smallest_evaluation"
    policy(smallest_evaluation=50).check_plan(limited(50))
    policy().check_plan(limited(1, every=0, initial=False, last=False))
    policy(tell_scores=False).check_plan(limited(1))


@pytest.mark.parametrize(("questions", "leave"), [(0, False), (1, False), (2, True), (1000, True)])
def test_attack_scores_of_a_single_record_whatever_the_plan(questions: int, leave: bool) -> None:
    if leave:
        policy().check_evaluation(questions)
        return
    with pytest.raises(PolicyRefusal, match="smallest_evaluation = 2") as refusal:
        policy().check_evaluation(questions)
    assert not re.search(rf"\b{questions} (held|questions)", str(refusal.value)), "how many there are stays here"
    with pytest.raises(ValidationError):
        policy(smallest_evaluation=1)


def test_what_people_ask_for_of_held_out_questions_holds_for_their_number_here_too() -> None:
    policy(smallest_evaluation=50).check_evaluation(50)
    with pytest.raises(PolicyRefusal, match="smallest_evaluation = 50"):
        policy(smallest_evaluation=50).check_evaluation(49)


# --- masks
# -------------------------------------------------------------------------------------------------------------


def test_a_plan_with_masks_is_allowed_by_default_and_where_masks_are_required() -> None:
    policy().check_plan(masked())
    policy(require_secure_aggregation=True, approvals=(masked().plan.digest,)).check_plan(masked())


def test_attack_plan_that_would_show_the_update_to_a_coordinator_where_masks_are_required() -> None:
    refusal = refusal_of(policy(require_secure_aggregation=True), PLAIN)
    assert refusal.rule == "require_secure_aggregation"
    assert "secure_aggregation = true in the plan" in str(refusal)


def test_attack_plain_upload_is_asked_for_under_whatever_plan_where_masks_are_required() -> None:
    manifest = manifest_of(PLAIN.layout, [vector_of(PLAIN.layout, 1)])
    demanding = policy(require_secure_aggregation=True)
    for call in (lambda: demanding.check_upload(manifest), lambda: demanding.check_upload(manifest, masked=False)):
        with pytest.raises(PolicyRefusal, match="without masks") as refusal:
            call()
        assert refusal.value.rule == "require_secure_aggregation"
    demanding.check_upload(manifest, masked=True)
    policy().check_upload(manifest)


@pytest.mark.parametrize("masks", [True, False])
def test_attack_upload_larger_than_may_leave_with_or_without_a_mask(masks: bool) -> None:
    manifest = manifest_of(PLAIN.layout, [vector_of(PLAIN.layout, 1)])
    policy(max_upload_bytes=4000).check_upload(manifest, masked=masks)
    with pytest.raises(PolicyRefusal, match=r"4000 bytes .* allows 3999") as refusal:
        policy(max_upload_bytes=3999).check_upload(manifest, masked=masks)
    assert refusal.value.rule == "max_upload_bytes"


def test_what_leaves_under_masks_is_the_words_of_fixed_point() -> None:
    bundle = masked()
    ranges = Ranges.of(sizes=(1000,), largest_delta=(1.0,), largest_weight=1.0)
    words = FixedPoint.of(cohort=3, ranges=ranges).words
    assert bundle.update_bytes == 4 * words
    assert PLAIN.update_bytes == 4000
    assert small_bundle(wire={"update": "bfloat16"}).update_bytes == 2000
    policy(max_upload_bytes=4 * words).check_plan(bundle)
    assert refusal_of(policy(max_upload_bytes=4 * words - 1), bundle).rule == "max_upload_bytes"


@pytest.mark.parametrize(
    ("rule", "least", "plan", "offers"),
    [
        ("min_cohort", 4, {}, 3),
        ("min_cohort", 6, {"min_silos": 5}, 5),
        ("min_threshold", 4, {}, 3),
        ("min_threshold", default_threshold(9) + 1, {"min_silos": 9}, default_threshold(9)),
        ("min_threshold", 6, {"min_silos": 9, "threshold": 5}, 5),
        ("min_survivors", 5, {"min_silos": 5, "min_survivors": 4}, 4),
        ("colluders", 1, {"min_silos": 9}, 0),
        ("colluders", 3, {"min_silos": 9, "colluders": 2, "min_survivors": 4}, 2),
    ],
)
def test_attack_plan_that_promises_less_than_this_silo_demands(
    rule: str, least: int, plan: dict[str, Any], offers: int
) -> None:
    refusal = refusal_of(policy(**{rule: least}), masked(**plan))
    assert refusal.rule == rule
    assert f"comes to {offers} in its smallest cohort" in str(refusal)
    assert f"wants at least {least}" in str(refusal)
    policy(**{rule: offers}).check_plan(masked(**plan))
    policy(**{rule: least}).check_plan(small_bundle())  # of masks alone


@pytest.mark.parametrize("cohort", range(9, 40))
def test_a_threshold_left_to_the_cohort_is_never_below_that_of_the_smallest(cohort: int) -> None:
    """Why the worst case of a plan may be taken at min_silos."""
    assert default_threshold(cohort) >= default_threshold(9)


@pytest.mark.parametrize("rule", ["min_cohort", "min_threshold", "min_survivors"])
def test_no_policy_goes_below_three(rule: str) -> None:
    assert LEAST_SILOS == LEAST_COHORT
    for value in (2, 0, -1, True, "3"):
        with pytest.raises(ValidationError):
            policy(**{rule: value})


def test_the_rules_go_into_every_roster() -> None:
    demands = policy(min_cohort=4, min_threshold=5, min_survivors=6, colluders=1, smallest_group=7).demands()
    assert demands == Demands(min_cohort=4, min_threshold=5, min_survivors=6, colluders=1, smallest_group=7)
    ranges = Ranges.of(sizes=(1,), largest_delta=(1.0,), largest_weight=1.0)
    offered = Parameters(
        cohort=6,
        threshold=5,
        colluders=1,
        min_survivors=5,
        least_sum=6,
        fixed_point=FixedPoint.of(cohort=6, ranges=ranges),
    )
    with pytest.raises(PolicyRefusal, match="min_survivors of this silo is 6"):
        demands.check(offered)
    assert policy().demands() == Demands()


# --- tensors
# -----------------------------------------------------------------------------------------------------------


def adapters() -> PlanBundle:
    """A plan that trains adapters and, less in sight, the embedding and a head."""
    layout = Layout(
        "float32",
        tuple(
            TensorSpec(name, (4,)) for name in ("block.0.lora_a", "block.0.lora_b", "lm_head.weight", "shared.weight")
        ),
    )
    files = {"config.json": b"{}", "layout.json": layout.to_json()}
    values = PLAIN.plan.model_dump(mode="json")
    values["model"] |= {
        "parameters": layout.parameters,
        "layout": layout.digest,
        "files": {name: digest_of(content) for name, content in files.items()},
    }
    return PlanBundle(Plan.model_validate(values), files)


@pytest.mark.parametrize(
    "allowed",
    [
        ["block.*", "shared.weight", "lm_head.weight"],
        ["*"],
        ["block.0.lora_a", "block.0.lora_b", "l*", "shared.weight*"],
    ],
)
def test_tensors_that_are_named_or_begin_as_allowed_may_be_trained(allowed: list[str]) -> None:
    policy(allowed_tensors=allowed).check_plan(adapters())


@pytest.mark.parametrize(
    ("allowed", "others"),
    [
        (["block.*"], "trains lm_head.weight, shared.weight, which"),
        (["block.*", "shared.weight"], "trains lm_head.weight, which"),
        (["block.*", "shared.weights", "hared.weight", "lm_head.w"], "trains lm_head.weight, shared.weight, which"),
        (["block.*", "shared.w*", "lm_head.weightx*"], "trains lm_head.weight, which"),
        (["w"], "trains block.0.lora_a, block.0.lora_b, lm_head.weight and 1 more, which"),
    ],
)
def test_attack_plan_that_takes_tensors_beside_the_allowed_ones(allowed: list[str], others: str) -> None:
    refusal = refusal_of(policy(allowed_tensors=allowed), adapters())
    assert refusal.rule == "allowed_tensors"
    assert others in str(refusal)


@pytest.mark.parametrize("pattern", ["", "a*b", "**", "*a", "a\n", "a" * 501, 7])
def test_a_pattern_that_would_not_mean_what_it_says_is_refused(pattern: object) -> None:
    with pytest.raises(ValidationError):
        policy(allowed_tensors=[pattern])
    with pytest.raises(ValidationError):
        policy(allowed_tensors=[])


# --- approval
# ----------------------------------------------------------------------------------------------------------


def test_a_plan_waits_for_approval_where_the_silo_asks_for_it() -> None:
    refusal = refusal_of(policy(approved_plans="ask"), PLAIN)
    assert refusal.rule == "approved_plans"
    assert f"`silo-agent plan approve {PLAIN.plan.digest}`" in str(refusal)
    sized = refusal_of(policy(approved_plans="ask"), masked())
    assert str(sized).endswith(f"`silo-agent plan approve {masked().plan.digest}`"), (
        "it is made again: nobody has a copy"
    )


@pytest.mark.parametrize("at", [0, 63])
def test_attack_a_digest_that_differs_in_one_character_is_not_the_approved_one(at: int) -> None:
    digest = PLAIN.plan.digest
    other = digest[:at] + ("1" if digest[at] == "0" else "0") + digest[at + 1 :]
    for waiting in (policy(approved_plans="ask", approvals=(other,)), policy(approved_plans=[other])):
        assert refusal_of(waiting, PLAIN).rule == "approved_plans"


def test_an_approval_holds_as_soon_as_it_is_given() -> None:
    given: list[str] = []
    asking = SiloPolicy(rules=PolicyRules(approved_plans="ask"), silo=SILO, record=lambda: Record(approved=given))
    assert refusal_of(asking, PLAIN).rule == "approved_plans"
    given.append(PLAIN.plan.digest)
    asking.check_plan(PLAIN)


def test_attack_changed_plan_under_the_name_of_an_approved_one_waits_for_approval() -> None:
    asking = policy(approved_plans="ask", approvals=(PLAIN.plan.digest,))
    asking.check_plan(PLAIN)
    changed = small_bundle(training={"epochs": 2})
    assert changed.plan.name == PLAIN.plan.name
    refusal = refusal_of(asking, changed)
    assert refusal.rule == "approved_plans"
    assert changed.plan.digest in str(refusal)


def test_a_list_in_silo_toml_is_the_whole_list() -> None:
    listed = policy(approved_plans=["00" * 32], approvals=(PLAIN.plan.digest,))
    assert refusal_of(listed, PLAIN).rule == "approved_plans"


def test_attack_approval_does_not_lift_any_other_rule() -> None:
    asking = policy(approved_plans="ask", approvals=(PLAIN.plan.digest,), max_rounds=2, require_secure_aggregation=True)
    assert [refusal.rule for refusal in asking.objections(PLAIN)] == ["max_rounds", "require_secure_aggregation"]


def test_all_that_is_wrong_with_a_plan_is_told_and_approval_last() -> None:
    strict = policy(
        approved_plans="ask", max_parameters=999, allowed_tensors=["x"], max_upload_bytes=1, max_rounds=2, max_epochs=1
    )
    bundle = small_bundle(training={"epochs": 2})
    assert [refusal.rule for refusal in strict.objections(bundle)] == [
        *("max_parameters", "allowed_tensors", "max_upload_bytes", "max_rounds", "max_epochs", "approved_plans")
    ]
    assert refusal_of(strict, bundle).rule == "max_parameters"


# --- differential privacy
# ------------------------------------------------------------------------------------------------


def private(**privacy: Any) -> PlanBundle:
    return small_bundle(
        training={"max_grad_norm": 1.0, "dropout": 0.0},
        evaluation={"every": 0, "initial": False, "last": False},
        privacy={"level": "record", "noise_multiplier": 3.0, "steps": 4, **privacy},
    )


def test_attack_plan_without_privacy_where_it_is_required() -> None:
    assert refusal_of(policy(require_privacy="record"), PLAIN).rule == "require_privacy"
    policy(require_privacy="record").check_plan(private())


def test_attack_plan_that_costs_more_than_the_silo_ever_allows() -> None:
    refusal = refusal_of(policy(max_epsilon=0.5), private())
    assert refusal.rule == "max_epsilon"
    assert "cost epsilon" in str(refusal)
    policy(max_epsilon=5.0).check_plan(private())


def test_a_plan_for_patients_costs_more_where_the_budget_is_for_lines() -> None:
    """A line more or less turns what its patient adds into something else."""
    bundle = private(unit_field="patient")
    for rules in ({}, {"unit_field": "patient"}):
        policy(max_epsilon=3.0, **rules).check_plan(private() if not rules else bundle)
    refusal = refusal_of(policy(max_epsilon=3.0), bundle)
    assert refusal.rule == "max_epsilon"
    assert "set [policy] unit_field = 'patient' where epsilon is meant for each 'patient'" in str(refusal)


def test_attack_plan_whose_clipping_norm_leaves_nothing_to_learn() -> None:
    def clipped(norm: float) -> PlanBundle:
        return small_bundle(
            training={"max_grad_norm": norm, "dropout": 0.0},
            evaluation={"every": 0, "initial": False, "last": False},
            privacy={"level": "record", "noise_multiplier": 3.0, "steps": 4},
        )

    for norm in (1e-12, 9.9e-5):
        refusal = refusal_of(policy(), clipped(norm))
        assert refusal.rule == "min_grad_norm"
        assert "raise [training] max_grad_norm" in str(refusal)
    policy().check_plan(clipped(1e-4))
    assert refusal_of(policy(min_grad_norm=0.5), clipped(0.4)).rule == "min_grad_norm"
    policy(min_grad_norm=0.0).check_plan(clipped(1e-12))


@pytest.mark.parametrize("largest", [1.1e5, 1e18, math.inf, math.nan])
def test_attack_model_of_numbers_that_no_trained_model_has(largest: float) -> None:
    with pytest.raises(PolicyRefusal, match="restore the model") as refusal:
        policy().check_private_model(private(), largest)
    assert refusal.value.rule == "max_model_value"
    policy().check_private_model(private(), 1e5)
    policy().check_private_model(PLAIN, largest)  # where nothing is promised to records
    policy(max_model_value=2e18).check_private_model(private(), min(1e18, largest))


def test_attack_plan_that_hides_a_patient_by_the_line_where_patients_are_to_be_hidden() -> None:
    patients = policy(unit_field="patient")
    assert refusal_of(patients, private()).rule == "unit_field"
    assert "for each 'line'" in str(refusal_of(patients, private()))
    patients.check_plan(private(unit_field="patient"))
    policy().check_plan(private(unit_field="patient"))


@pytest.mark.parametrize("dropout", [0.1, None], ids=["some", "the model's own"])
def test_attack_dropout_whose_masks_for_one_record_depend_on_the_others(dropout: float | None) -> None:
    with pytest.raises(ValidationError, match=r"\[training\] dropout = .* does not go with"):
        small_bundle(
            training={"max_grad_norm": 1.0, "dropout": dropout},
            evaluation={"every": 0, "initial": False, "last": False},
            privacy={"level": "record", "noise_multiplier": 3.0},
        )


@pytest.mark.parametrize("bound", [1e-42, 1e7])
def test_attack_clipping_norm_that_float32_cannot_keep(bound: float) -> None:
    with pytest.raises(ValidationError, match=r"\[training\] max_grad_norm"):
        small_bundle(
            training={"max_grad_norm": bound, "dropout": 0.0},
            evaluation={"every": 0, "initial": False, "last": False},
            privacy={"level": "record", "noise_multiplier": 3.0},
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("noise_multiplier", 1e200),
        ("loss_noise_multiplier", 1e200),
        ("loss_bound", 1e308),
        ("loss_bound", 1e-300),
        ("dp_delta", 1e-300),
        ("target_epsilon", 1e300),
    ],
)
def test_attack_numbers_that_would_end_the_agent(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        private(**{key: value})


def test_attack_numbers_that_are_allowed_and_promise_nothing_are_refused_by_rule() -> None:
    """Not by an error of arithmetic, and without the accountant's taking minutes."""
    for privacy in (
        {"noise_multiplier": 1e-200},
        {"noise_multiplier": 1e-200, "nominal_records": 128},
        {"noise_multiplier": 1.0, "nominal_records": 1 << 20, "expected_batch_size": 1 << 10, "steps": 1_000_000},
        {"noise_multiplier": 0.3, "nominal_records": 128, "expected_batch_size": 64, "steps": 10_000},
    ):
        assert refusal_of(policy(max_epsilon=5.0), private(**privacy)).rule == "max_epsilon"


SILO_LEVEL: dict[str, Any] = {
    "evaluation": {"every": 0, "initial": False, "last": False},
    "privacy": {"level": "silo", "noise_multiplier": 10.0, "nominal_silos": 5},
}
RECORD_LEVEL: dict[str, Any] = {
    **SILO_LEVEL,
    "training": {"dropout": 0.0},
    "privacy": {"level": "record", "noise_multiplier": 10.0},
}
CAPPED = {"max_weight": 10.0}


def noised_by_silos() -> PlanBundle:
    return small_bundle(
        **SILO_LEVEL, aggregation={**CAPPED, "secure_aggregation": True}, schedule={"rounds": 3, "min_silos": 3}
    )


def test_a_silo_that_requires_one_level_of_privacy_is_offered_another() -> None:
    record, silo = small_bundle(**RECORD_LEVEL), small_bundle(**SILO_LEVEL, aggregation=CAPPED)
    policy(require_privacy="record").check_plan(record)
    policy(require_privacy="silo").check_plan(silo)
    for wanted, offered, level in (("record", silo, "silo"), ("silo", record, "record"), ("silo", PLAIN, "none")):
        refusal = refusal_of(policy(require_privacy=wanted), offered)
        assert refusal.rule == "require_privacy"
        assert f"has [privacy] level '{level}'" in str(refusal)
        assert f"wants '{wanted}'" in str(refusal)


def test_noise_of_the_silos_counts_half_in_a_silos_own_budget() -> None:
    """For a record: 3 rounds at a multiplier of 10 / 2."""
    bundle, once = noised_by_silos(), GaussianRelease(10.0 / 2)

    def cost(allowed: float, dp_delta: float) -> float:
        favoured = favoured_order([once], epsilon=allowed, dp_delta=dp_delta)
        return filtered_epsilon([once] * 3, favoured=favoured, dp_delta=dp_delta)

    assert gaussian_epsilon(3**0.5 / 5, 1e-5) < cost(1.6, 1e-5) < 1.6 < cost(1.6, 1e-6)
    policy(max_epsilon=1.6).check_plan(bundle)
    assert f"cost epsilon {cost(1.2, 1e-5):.3g} " in str(refusal_of(policy(max_epsilon=1.2), bundle))
    smaller = policy(max_epsilon=1.6, max_dp_delta=1e-6)
    assert refusal_of(smaller, bundle).rule == "max_epsilon", "it is counted at this silo's own max_dp_delta"


def test_noise_of_the_coordinators_is_not_this_silos_and_costs_nothing_of_its_budget() -> None:
    policy(max_epsilon=1e-6).check_plan(small_bundle(**SILO_LEVEL, aggregation=CAPPED))


# --- what required masks bring with them
# -------------------------------------------------------------------------------


def lineage(bundle: PlanBundle, *models: str, round: int = 1) -> Lineage:
    return Lineage(
        plan=bundle.plan.digest,
        name="before",
        layout=bundle.whole_layout.digest,
        begins=beginnings(bundle.plan),
        round=round,
        models=frozenset(models or (bundle.plan.initial_model,)),
    )


def remembering(
    *lineages: Lineage, compared: tuple[str, ...] = (), pairs: tuple[frozenset[str], ...] = ()
) -> SiloPolicy:
    record = Record(compared=compared, pairs=pairs, lineages=lineages)
    return SiloPolicy(rules=PolicyRules(), silo=SILO, record=lambda: record)


def test_required_masks_have_people_approve_plans_without_a_key_and_a_key_still_says_otherwise() -> None:
    assert PolicyRules().approved_plans == "any"
    assert PolicyRules(require_secure_aggregation=False).approved_plans == "any"
    assert PolicyRules(require_secure_aggregation=True).approved_plans == "ask"
    assert refusal_of(policy(require_secure_aggregation=True), masked()).rule == "approved_plans"
    for chosen in ("any", [masked().plan.digest]):
        policy(require_secure_aggregation=True, approved_plans=chosen).check_plan(masked())


def test_what_a_silo_loosened_of_required_masks_is_named_by_its_key() -> None:
    def keys(*, pinned: int = 3, on_first_use: int = 0, record: Record = Record(), **rules: object) -> list[str]:  # noqa: B008
        said = PolicyRules.model_validate({"require_secure_aggregation": True, **rules})
        return [key for key, _ in loosened(said, pinned=pinned, on_first_use=on_first_use, record=record)]

    assert keys() == []
    assert keys(require_secure_aggregation=False, approved_plans="any", trust_on_first_use=True) == []
    assert keys(approved_plans="any") == ["approved_plans"]
    assert keys(approved_plans=["ab" * 32]) == ["approved_plans"]
    assert keys(trust_on_first_use=True) == keys(on_first_use=1) == ["trust_on_first_use"]
    assert keys(pinned=4) == ["colluders"]
    assert keys(pinned=4, colluders=1) == []
    assert keys(record=Record(approved=["ab"])) == ["--without-comparing-the-model"]
    assert keys(record=Record(approved=["ab"], compared=["ab"])) == []
    assert keys(record=Record(pairs=[frozenset({"ab", "cd"})])) == ["--although"]


LOOSER: dict[str, object] = {
    "max_parameters": 1_000_000_001,
    "max_upload_bytes": (4 << 30) + 1,
    "max_rounds": 10_001,
    "max_epochs": 1_001,
    "require_secure_aggregation": False,
    "approved_plans": "any",
    "verify": "spot",
    "max_work_ratio": 1.01,
    "max_epsilon": 10.1,
    "max_dp_delta": 2e-5,
    "min_grad_norm": 1e-5,
    "max_model_value": 1e6,
    "max_epsilon_alone": 1.0,
    "shared_budget": "none",
    "trust_on_first_use": True,
    "tasks": ["ward-notes"],
}
"""More than `require_secure_aggregation = true` allows by itself."""
LOOSEST: dict[str, object] = {
    "allowed_tensors": "any",
    **dict.fromkeys(("min_cohort", "min_threshold", "min_survivors", "smallest_group"), LEAST_SILOS),
    "colluders": 0,
    "require_privacy": "none",
    "unit_field": "",
    "allow_execution": True,
    "database_in_training": False,
    "tell_scores": True,
    "smallest_evaluation": 2,
}
"""Keys that allow the most that there is by themselves."""


def test_each_key_that_is_looser_than_required_masks_have_it_is_named() -> None:
    """A key that is new has to stand in one of the two tables."""
    assert LOOSER.keys() | LOOSEST.keys() == set(PolicyRules.model_fields)
    record = Record(
        lineages=[Lineage(plan=Digest("ab" * 32), name="a", layout=None, begins=None, round=1, models=frozenset())]
    )
    for key, value in LOOSER.items():
        said = PolicyRules.model_validate({"require_secure_aggregation": True, key: value})
        assert [named for named, _ in loosened(said, pinned=3, on_first_use=0, record=record)] == [key]
    strict = PolicyRules(require_secure_aggregation=True)
    assert {key: getattr(strict, key) for key in LOOSEST} == LOOSEST
    for key in ("min_cohort", "min_threshold", "min_survivors", "smallest_group", "colluders", "smallest_evaluation"):
        with pytest.raises(ValidationError):
            PolicyRules.model_validate({key: getattr(strict, key) - 1})


# --- models and lineages
# -----------------------------------------------------------------------------------------------

OTHER_MODEL = digest_of(b"another model")


def test_attack_another_model_than_the_plans_in_the_first_round() -> None:
    bundle = masked()
    own = Digest(bundle.plan.model.initial)
    policy().check_model(bundle, own, latest_round=0)
    with pytest.raises(
        PolicyRefusal, match=f"begins from model {own}, the coordinator hands out {OTHER_MODEL}"
    ) as refusal:
        policy().check_model(bundle, OTHER_MODEL, latest_round=0)
    assert refusal.value.rule == "initial_model"
    policy().check_model(bundle, OTHER_MODEL, latest_round=1)  # what the first sum made, for all that is known here
    policy().check_model(PLAIN, OTHER_MODEL, latest_round=0)  # the coordinator sees each update anyhow


def test_the_model_of_the_first_round_is_the_one_in_the_type_that_silos_are_handed() -> None:
    bundle = masked()
    values = bundle.plan.model_dump(mode="json")
    values["wire"] |= {"model": "bfloat16"}
    halved = PlanBundle(Plan.model_validate(values), bundle.files)
    policy().check_model(halved, Digest(str(bundle.plan.model.initial_bfloat16)), latest_round=0)
    with pytest.raises(PolicyRefusal, match="begins from model"):
        policy().check_model(halved, Digest(bundle.plan.model.initial), latest_round=0)
    del values["model"]["initial_bfloat16"]
    with pytest.raises(ValidationError, match="initial_bfloat16"):
        Plan.model_validate(values)


def test_attack_second_plan_from_a_model_that_this_silo_masked_under_another() -> None:
    """One silo late in one of the two, and the difference of the sums is its delta."""
    first, second = masked(), masked(max_weight=7.0)
    assert first.plan.digest != second.plan.digest
    refusal = refusal_of(remembering(lineage(first)), second)
    assert refusal.rule == "one_lineage"
    assert f"--although {first.plan.digest}" in str(refusal)
    assert "both have the same model" in str(refusal)
    remembering(lineage(first)).check_plan(first)  # going on with its own
    remembering(lineage(first, round=0)).check_plan(second)  # nothing was masked under it
    pair = frozenset({first.plan.digest, second.plan.digest})
    remembering(lineage(first), pairs=(pair,)).check_plan(second)
    third = masked(max_weight=8.0)
    assert refusal_of(remembering(lineage(first), pairs=(pair,)), third).rule == "one_lineage"
    others = frozenset({second.plan.digest, third.plan.digest})
    assert refusal_of(remembering(lineage(first), pairs=(others,)), second).rule == "one_lineage"


def of(bundle: PlanBundle, *, wire: str = "float32", **model: str | None) -> PlanBundle:
    """The plan with other digests of what it begins from, or in another wire type."""
    values = bundle.plan.model_dump(mode="json")
    values["model"] |= model
    values["wire"]["model"] = wire
    return PlanBundle(Plan.model_validate(values), bundle.files)


def of_another_model(bundle: PlanBundle) -> PlanBundle:
    return of(bundle, initial="1a" * 32, initial_bfloat16="1b" * 32)


def test_a_plan_that_goes_on_where_another_ended_is_asked_about_in_words_of_its_own() -> None:
    first, second = masked(), of_another_model(masked(max_weight=7.0))
    initial = first.plan.initial_model
    refusal = refusal_of(remembering(lineage(first, initial, second.plan.initial_model)), second)
    assert refusal.rule == "one_lineage"
    assert "begins from a model that this silo had under that one, which is so of each plan that goes on" in str(
        refusal
    )
    assert f"--although {first.plan.digest}" in str(refusal)


def test_attack_second_plan_whose_model_people_compared_and_that_could_be_all_but_the_same_one() -> None:
    """Another digest says that one number differs; so may the two folders that people were handed to compare with."""
    first, second = masked(), of_another_model(masked(max_weight=7.0))
    both = (first.plan.digest, second.plan.digest)
    for compared in ((), both[:1], both):
        refusal = refusal_of(remembering(lineage(first), compared=compared), second)
        assert refusal.rule == "one_lineage"
        assert "could be all but the same" in str(refusal)
    remembering(lineage(first), pairs=(frozenset(both),)).check_plan(second)
    other = replace(lineage(first), layout="ab" * 32)  # of another shape
    remembering(other).check_plan(second)


def test_attack_second_plan_beside_one_that_an_earlier_release_noted() -> None:
    first, second = masked(), of_another_model(masked(max_weight=7.0))
    for layout in (first.layout.digest, "ab" * 32, None):
        old = replace(lineage(first, OTHER_MODEL), layout=layout, begins=None)
        assert refusal_of(remembering(old), second).rule == "one_lineage"


def test_attack_second_plan_that_hands_out_the_very_numbers_in_another_wire_type() -> None:
    first = masked()
    halved = of(masked(max_weight=7.0), wire="bfloat16")
    assert halved.plan.initial_model != first.plan.initial_model
    for before, after in ((first, halved), (halved, first)):
        assert "both have the same model" in str(refusal_of(remembering(lineage(before)), after))
    rounded = of(masked(max_weight=7.0), initial="1a" * 32)  # the float32 numbers are those of the other's bfloat16
    assert "both have the same model" in str(refusal_of(remembering(lineage(first)), rounded))


def adapted(rank: int, *, seed: int = 0, base: str = "ba" * 32, width: int = 4) -> PlanBundle:
    """A masked plan that trains adapters of a model, `base`."""
    whole = Layout("float32", (TensorSpec("block.0.q.weight", (4, width)),))
    section = AdaptersSection(rank=rank, layers=["q"])
    layout = adapter_layout(whole, section)
    files = {"config.json": b"{}", "layout.json": layout.to_json(), "base_layout.json": whole.to_json()}
    values = masked().plan.model_dump(mode="json")
    values["adapters"] = section.model_dump(mode="json")
    values["training"]["epochs"] = 2
    values["model"] |= {
        "parameters": layout.parameters,
        "layout": layout.digest,
        "initial": digest_of(b"%d of rank %d" % (seed, rank)),
        "initial_bfloat16": digest_of(b"%d of rank %d as bfloat16" % (seed, rank)),
        "base": base,
        "files": {name: digest_of(content) for name, content in files.items()},
    }
    return PlanBundle(Plan.model_validate(values), files)


def test_the_parameters_of_a_model_count_with_those_that_adapters_leave_as_they_are() -> None:
    """It is what a silo holds in memory, and what can hold of its records."""
    bundle = adapted(2)
    assert (bundle.layout.parameters, bundle.whole_layout.parameters) == (16, 16)
    policy(max_parameters=32).check_plan(bundle)
    refusal = refusal_of(policy(max_parameters=31), bundle)
    assert refusal.rule == "max_parameters"
    assert "asks for 32 parameters" in str(refusal)


@pytest.mark.parametrize(("rank", "seed"), [(2, 1), (3, 0), (3, 1)], ids=["another seed", "another rank", "both"])
def test_attack_second_plan_with_adapters_of_one_base_that_begin_as_one_function(rank: int, seed: int) -> None:
    """Additions begin as no change at all: whatever their own numbers are, the model is the base."""
    first, second = adapted(2), adapted(rank, seed=seed)
    both = (first.plan.digest, second.plan.digest)
    refusal = refusal_of(remembering(lineage(first), compared=both), second)
    assert refusal.rule == "one_lineage"
    assert "one base of adapters" in str(refusal)
    all_but_one = adapted(rank, seed=seed, base="bb" * 32)
    assert "could be all but the same" in str(refusal_of(remembering(lineage(first), compared=both), all_but_one))
    remembering(lineage(first)).check_plan(adapted(rank, seed=seed, base="bb" * 32, width=5))


def test_attack_second_plan_that_trains_the_base_of_the_other_ones_adapters_or_the_other_way_round() -> None:
    whole = Layout("float32", (TensorSpec("block.0.q.weight", (4, 4)),))
    files = {"config.json": b"{}", "layout.json": whole.to_json()}
    values = masked().plan.model_dump(mode="json")
    values["model"] |= {
        "parameters": whole.parameters,
        "layout": whole.digest,
        "initial": "ba" * 32,
        "files": {name: digest_of(content) for name, content in files.items()},
    }
    full = PlanBundle(Plan.model_validate(values), files)
    for before, after in ((adapted(2), full), (full, adapted(2))):
        assert "both have the same model, or one base" in str(refusal_of(remembering(lineage(before)), after))


def test_attack_second_plan_beside_one_whose_models_are_not_known_any_more() -> None:
    """Each of its models may have been the second one's: that people compared where both begin says nothing."""
    first, second = masked(), of_another_model(masked(max_weight=7.0))
    both = (first.plan.digest, second.plan.digest)
    for before in (replace(lineage(first, OTHER_MODEL), layout=None), replace(lineage(first), models=frozenset())):
        refusal = refusal_of(remembering(before, compared=both), second)
        assert refusal.rule == "one_lineage"
        assert "does not know of which models" in str(refusal)
        remembering(before, pairs=(frozenset(both),)).check_plan(second)


def test_attack_model_of_another_plans_in_a_later_round() -> None:
    first, second = masked(), masked(max_weight=7.0)
    before = lineage(first, first.plan.initial_model, OTHER_MODEL)
    both = (first.plan.digest, second.plan.digest)
    with pytest.raises(PolicyRefusal, match="is of both") as refusal:
        remembering(before, compared=both).check_model(second, OTHER_MODEL, latest_round=5)
    assert refusal.value.rule == "one_lineage"
    remembering(before, pairs=(frozenset(both),)).check_model(second, OTHER_MODEL, latest_round=5)
    with pytest.raises(PolicyRefusal, match="is of both"):
        remembering(before, pairs=(frozenset({second.plan.digest, masked(max_weight=8.0).plan.digest}),)).check_model(
            second, OTHER_MODEL, latest_round=5
        )
    remembering(before).check_model(first, OTHER_MODEL, latest_round=5)
    remembering(replace(before, round=0)).check_model(second, OTHER_MODEL, latest_round=5)
    halved = lineage(of(first, wire="bfloat16"))  # never handed out as float32
    with pytest.raises(PolicyRefusal, match="is of both"):
        remembering(halved).check_model(second, Digest(first.plan.model.initial), latest_round=5)
