"""`[semi_supervised]` of a plan: which silos it names, and what is refused by name."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from support.tiny_t5 import bundle_of, random_model
from unit.test_wire_plan import plan_value

from lorica_coordinator.plans.plan_text import plan_text
from lorica_coordinator.service.plan_desk import terms_of
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from silo_agent.commands.plan_review import settings
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection

TOGETHER = {"unlabelled": ["ward-*", "lab"], "order": "together"}

ALTERNATE = {"unlabelled": ["ward-*", "lab"]}
"""The default order, whose two rounds have a length of their own."""
IN_TURN: dict[str, dict[str, Any]] = {
    "aggregation": {"weighting": "equal", "momentum": 0.0},
    "schedule": {"rounds": 2, "min_silos": 2},
}


def changed(key: str, value: Any, **more: Any) -> dict[str, Any]:
    """Sections that go with ALTERNATE, but for what is changed in them."""
    sections = {name: dict(section) for name, section in IN_TURN.items()}
    for path, one in {key: value, **more}.items():
        section, name = path.split(".")
        sections.setdefault(section, {})[name] = one
    return sections


MASKED_KEYS = {"aggregation.secure_aggregation": True, "schedule.min_silos": 5}
MASKED = changed("aggregation.momentum", 0.0, **MASKED_KEYS)


def plan(section: dict[str, Any] | None = None, **more: Any) -> Plan:
    value = plan_value()
    sections = {"aggregation": {**value.get("aggregation", {}), "weighting": "equal"}, **more}
    return Plan.model_validate({**value, **sections, "semi_supervised": TOGETHER if section is None else section})


def refusal(section: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        plan(section, **more)
    return str(caught.value)


def test_silos_are_named_by_name_or_by_how_they_begin() -> None:
    section = plan().semi_supervised
    assert [
        name for name in ("ward-1", "ward-", "ward", "lab", "lab-2", "my-ward-1") if section.without_labels(name)
    ] == [
        "ward-1",
        "ward-",
        "lab",
    ]
    assert not SemiSupervisedSection().without_labels("lab")


@pytest.mark.parametrize("name", ["", "Ward", "ward-**", "w*rd", "ward 1", "../x", "-*"])
def test_what_is_no_silo_name_is_refused(name: str) -> None:
    assert "is neither a silo name nor the beginning of one" in refusal({**TOGETHER, "unlabelled": [name]})


@pytest.mark.parametrize(
    ("section", "more", "said"),
    [
        *(
            (ALTERNATE, changed(key, value, **more), f'does not go with [semi_supervised] order = "alternate"{why}')
            for key, value, more, why in (
                ("aggregation.server_optimizer", "adam", {}, ", which has another length of step"),
                ("aggregation.server_learning_rate", 0.5, {}, ", where the kind of round says how far"),
                ("aggregation.server_rate_at_end", 0.5, {}, ", where the kind of round says how far"),
                ("aggregation.momentum", 0.9, {}, ", where a step would go on with that of other silos"),
                ("aggregation.reducer", "median", {}, ", whose rounds are not all of silos enough"),
                ("aggregation.step_length", "fedexp", {}, ", where the kind of round says how far"),
                ("aggregation.max_weight_share", 0.5, {}, ", which cannot hold in a round of min_labelled = 1"),
                ("privacy.level", "silo", {"privacy.noise_multiplier": 1.0}, ", whose noise is for sums of the same"),
                ("adapters.train", "alternate", {"adapters.rank": 2}, ", where one half would be trained with labels"),
                ("adapters.train", "reproject", {"adapters.rank": 2}, ", whose step is no mean"),
                ("schedule.rounds", 3, {}, ", where two rounds are one of the paper's"),
            )
        ),
        (
            {**TOGETHER, "teacher": "none"},
            {},
            "[semi_supervised] order = together is read by silos without labels alone, and teacher",
        ),
        ({**ALTERNATE, "teacher": "none", "min_labelled": 2}, {}, "min_labelled = 2 is read by silos without labels"),
        ({**TOGETHER, "min_labelled": 2}, {}, 'min_labelled = 2 is read with order = "alternate" alone'),
        ({**ALTERNATE, "min_labelled": 0}, {}, "greater than or equal to 1"),
        (
            {**TOGETHER, "teacher": "mlm", "loss": "answer"},
            {},
            'loss = answer is read with teacher = "ema" or "round" alone, and teacher is "mlm"',
        ),
        ({**TOGETHER, "teacher": "mlm", "min_confidence": 0.5}, {}, "min_confidence = 0.5 is read with teacher"),
        ({**TOGETHER, "unlabelled": ["*"]}, {}, "leaves no silo with labels"),
        ({**TOGETHER, "unlabelled": ["lab", "lab"]}, {}, "one stands there twice"),
        ({**TOGETHER, "teacher": "round", "ema_decay": 0.9}, {}, 'ema_decay = 0.9 is read with teacher = "ema" alone'),
        ({**TOGETHER, "student_dropout": 0}, {}, 'student_dropout = 0 does not go with loss = "probabilities"'),
        ({"ema_decay": 0.9}, {}, "[semi_supervised] ema_decay = 0.9 is read by silos without labels alone"),
        ({"order": "together"}, {}, "[semi_supervised] order = together is read by silos without labels alone"),
        (TOGETHER, {"privacy": {"level": "record", "noise_multiplier": 1.0}}, '[privacy] level = "record" does not go'),
        (
            TOGETHER,
            {"training": {"drift_correction": "scaffold", "optimizer": "sgd", "steps": 4}},
            '[training] drift_correction = "scaffold" does not go with [semi_supervised] unlabelled',
        ),
        ({**TOGETHER, "ema_decay": 1.1}, {}, "less than or equal to 1"),
        ({**TOGETHER, "min_confidence": 1.0}, {}, "less than 1"),
        ({**TOGETHER, "student_dropout": 0.95}, {}, "less than or equal to 0.9"),
        *(
            (
                TOGETHER,
                {"aggregation": {"weighting": name, **more}},
                f'[aggregation] weighting = "{name}" does not go with',
            )
            for name, more in (
                ("lorar", {}),
                ("loss_reduction", {}),
                ("fednova", {}),
                ("q_fedavg", {"fairness": 0.5}),
            )
        ),
        *(
            (
                {**TOGETHER, "teacher": teacher},
                MASKED,
                '[semi_supervised] order = "together" does not go with [semi_supervised] unlabelled, of whom under '
                "masks two plans that differ in one silo's labels would show that silo's part of a sum",
            )
            for teacher in ("ema", "round", "mlm")
        ),
        *(
            (
                {**ALTERNATE, "teacher": teacher, "min_labelled": 3},
                MASKED,
                "[aggregation] secure_aggregation = true does not go with [semi_supervised] unlabelled, whose rounds "
                "have nobody with labels",
            )
            for teacher in ("ema", "round")
        ),
        *(
            (
                {**ALTERNATE, "teacher": "mlm", "min_labelled": few},
                MASKED,
                f"min_labelled = {few} is too few for secure",
            )
            for few in (1, 2)
        ),
        (
            {**ALTERNATE, "teacher": "mlm", "min_labelled": 3},
            changed("aggregation.min_survivors", 4, **MASKED_KEYS),
            "min_survivors = 4 does not hold with min_labelled = 3",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(section: dict[str, Any], more: dict[str, Any], said: str) -> None:
    assert said in refusal(section, **more)


def test_masks_go_with_rounds_that_nobody_is_alone_in() -> None:
    made = plan({**ALTERNATE, "teacher": "mlm", "min_labelled": 3}, **MASKED)
    assert made.smallest_cohort == 3
    assert plan({**ALTERNATE, "teacher": "none"}, **MASKED).smallest_cohort == 5


def test_silos_of_one_kind_are_a_group() -> None:
    silos = [SiloName(name) for name in ("clinic", "lab", "bank", "ward-1")]
    kinds = [
        plan(section, **IN_TURN).semi_supervised.who_trains.kinds(silos)
        for section in (TOGETHER, ALTERNATE, {**ALTERNATE, "teacher": "none"})
    ]
    assert kinds == [
        (("clinic", "lab", "bank", "ward-1"),),
        (("clinic", "bank"), ("lab", "ward-1")),
        (("clinic", "bank"),),
    ]


@pytest.mark.parametrize("weighting", ["equal", "size"])
def test_silo_level_privacy_and_both_weightings_go_with_it(weighting: str) -> None:
    assert plan(aggregation={"weighting": weighting}).semi_supervised.unlabelled


def test_rounds_in_turn_go_with_what_makes_them_equation_4() -> None:
    made = plan(ALTERNATE, **IN_TURN)
    terms = terms_of(made)
    assert (terms.takes_turns, terms.min_labelled, terms.min_silos) == (True, 1, 2)
    assert terms_of(plan()).labelled_alone == "never"
    assert terms_of(plan({**ALTERNATE, "teacher": "none"})).labelled_alone == "always"


@pytest.mark.parametrize(
    ("section", "silos", "said"),
    [
        (ALTERNATE, ["clinic", "lab", "ward-1"], ""),
        (ALTERNATE, ["clinic"], "min_silos = 2 and 1 silos are enrolled"),
        (ALTERNATE, ["lab", "ward-1"], "which names all 2 enrolled silos, so that nobody has labels"),
        (ALTERNATE, ["clinic", "bank", "lab"], "min_silos = 2 for rounds of silos without labels, and 1 of 3 enrolled"),
        ({**ALTERNATE, "min_labelled": 2}, ["clinic", "lab", "ward-1"], "min_labelled = 2 and 1 of 3 enrolled silos"),
        ({**ALTERNATE, "teacher": "none"}, ["clinic", "lab", "ward-1"], "min_silos = 2 and 1 of 3 enrolled silos have"),
        ({**ALTERNATE, "teacher": "none"}, ["clinic", "bank"], ""),
        (TOGETHER, ["clinic", "lab"], ""),
    ],
)
def test_no_plan_starts_whose_kinds_of_rounds_cannot_begin(
    section: dict[str, Any], silos: list[str], said: str
) -> None:
    why = plan(section, **IN_TURN).too_few(silos)
    assert said in why
    assert bool(said) == bool(why)


def test_plans_without_it_keep_their_digests_and_with_it_travel() -> None:
    written = json.loads(Plan.model_validate(plan_value()).to_json())
    assert "semi_supervised" not in written
    made = plan()
    assert Plan.from_json(made.to_json()) == made
    section = SemiSupervisedSection().model_dump(mode="json")
    raw = json.dumps({**written, "semi_supervised": section}, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(MalformedMessage, match="not in canonical form"):
        Plan.from_json(raw)


def test_the_plans_file_says_it() -> None:
    made = plan({**TOGETHER, "loss": "answer"})
    assert Plan.from_toml(plan_text(made), "plan.toml") == made


def test_people_who_approve_the_plan_see_it() -> None:
    assert settings(plan())["semi_supervised"]["unlabelled"] == ["ward-*", "lab"]
    assert settings(bundle_of(random_model()).plan)["semi_supervised"] == {"unlabelled": []}


def test_models_are_compared_by_the_scores_of_one_silo_with_labels() -> None:
    terms, of_all = terms_of(plan()), terms_of(Plan.model_validate(plan_value()))
    silos = [SiloName(name) for name in ("clinic", "lab", "ward-1")]
    assert (terms.least_scores, terms.scored(silos)) == (1, ("clinic",))
    assert (of_all.least_scores, of_all.scored(silos)) == (of_all.min_silos, ("clinic", "lab", "ward-1"))
