"""Plans that name a robust reducer: what they say, what they refuse by name, and that others are as before."""

import json
import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from lorica_coordinator.edges.models.plan_disk import plan_disk
from lorica_coordinator.edges.sums.reducers.chosen import REDUCERS
from lorica_coordinator.plans.forecast import forecast
from lorica_coordinator.plans.plan_text import plan_text
from lorica_security.errors import MalformedMessage
from silo_wire.canonical import canonical_json
from silo_wire.plans.plan import Plan
from silo_wire.plans.robust import ROBUST_RULES
from tests.support.federation_peer import small_bundle
from tests.support.robust_rounds import SETTINGS

NAMES = [rule.name for rule in ROBUST_RULES]


def plan(aggregation: dict[str, Any], min_silos: int = 7, **sections: Any) -> Plan:
    schedule = {"rounds": 3, "min_silos": min_silos}
    return small_bundle(aggregation=aggregation, schedule=schedule, **sections).plan


def robust(reducer: str, **changes: Any) -> dict[str, Any]:
    return {"weighting": "equal", "reducer": reducer, **SETTINGS[reducer], **changes}


def refusal(aggregation: dict[str, Any], **others: Any) -> str:
    with pytest.raises(ValidationError) as found:
        plan(aggregation, **others)
    return str(found.value)


# --- what goes


@pytest.mark.parametrize("reducer", NAMES)
def test_a_plan_names_a_rule_and_comes_back_the_same(reducer: str) -> None:
    made = plan(robust(reducer))
    assert Plan.from_json(made.to_json()) == made
    assert made.aggregation.robust is not None
    assert made.aggregation.robust.name == reducer
    assert Plan.from_toml(plan_text(made), "plan.toml") == made


@pytest.mark.parametrize("reducer", NAMES)
def test_noise_of_each_record_is_no_hindrance(reducer: str) -> None:
    """What leaves a silo is private already; whatever is made of it stays so."""
    private = {"level": "record", "noise_multiplier": 1.0, "target_epsilon": 8.0, "nominal_records": 1000}
    training = {"max_grad_norm": 1.0, "dropout": 0.0}
    scores = {"every": 0, "initial": False, "last": False}
    made = plan(robust(reducer), privacy=private, training=training, evaluation=scores)
    assert made.aggregation.reducer == reducer


def test_a_plan_without_one_has_the_digest_that_it_had() -> None:
    """Neither key is in its canonical form, and one that spells a default out is not canonical."""
    made = plan({"weighting": "equal"})
    assert not {"reducer", *(rule.key for rule in ROBUST_RULES)} & set(json.loads(made.to_json())["aggregation"])
    assert made.digest == plan({"weighting": "equal", "reducer": "mean"}).digest
    assert made.digest != plan(robust("median")).digest
    values = json.loads(made.to_json())
    values["aggregation"]["reducer"] = "mean"
    with pytest.raises(MalformedMessage, match="not in canonical form"):
        Plan.from_json(canonical_json(values))


def test_the_template_names_every_rule_and_its_key() -> None:
    text = plan_text(plan({"weighting": "equal"}))
    assert {
        key: tomllib.loads(text)["aggregation"][key]
        for key in ("reducer", "trimmed_share", "hostile_silos", "clipping_radius")
    } == {
        "reducer": "mean",
        "trimmed_share": 0.0,
        "hostile_silos": 0,
        "clipping_radius": 0.0,
    }
    assert all(f'"{name}" (' in text for name in NAMES)


def test_every_rule_has_a_reducer() -> None:
    assert set(NAMES) == {it.name for it in REDUCERS} - {"plain", "reproject", "masked", "noised"}


def test_a_centre_takes_the_room_of_one_more_vector_beside_each_model() -> None:
    """Of 4 models, and of 4 bytes for each of 1000 parameters; momentum has one as well."""
    schedule = {"rounds": 3, "min_silos": 5}
    centred = small_bundle(aggregation=robust("centred_clipping"), schedule=schedule)
    median = small_bundle(aggregation=robust("median"), schedule=schedule)
    assert plan_disk(centred, 5) - plan_disk(median, 5) == 4 * 4 * 1000


# --- what does not


@pytest.mark.parametrize("reducer", NAMES)
@pytest.mark.parametrize(
    ("changes", "sections", "said"),
    [
        (
            {"weighting": "lorar"},
            {},
            '[aggregation] weighting = "lorar" does not go with [aggregation] reducer = "REDUCER", which ignores the '
            "numbers that silos tell of themselves, since a hostile silo tells what it likes: set it to "
            '"equal", or reducer to "mean"',
        ),
        ({"max_weight": 3.0}, {}, '[aggregation] max_weight = 3 does not go with [aggregation] reducer = "REDUCER"'),
        ({"max_weight_share": 0.5}, {}, "max_weight_share = 0.5 does not go with"),
        (
            {"max_delta_norm": 1.0},
            {"privacy": {"level": "silo", "noise_multiplier": 1.0, "nominal_silos": 7}},
            'level = "silo" does not go with [aggregation] reducer = "REDUCER", whose result one silo can move further '
            'than noise for a clipped sum covers: set it to "none" or "record"',
        ),
    ],
)
def test_what_does_not_compose_is_refused_by_name(
    reducer: str, changes: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    assert said.replace("REDUCER", reducer) in refusal(robust(reducer, **changes), **sections)


MOVES = (
    "whose centre is another one in each round: were silos to cut their own deltas around it, two sums would show the "
    "delta of one that is cut in one of them alone, where max_delta_norm has silos cut around 0 in every round"
)


@pytest.mark.parametrize("reducer", NAMES)
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"adapters": {"rank": 2, "train": "b"}},
        {"privacy": {"level": "record", "noise_multiplier": 1.0, "target_epsilon": 8.0, "nominal_records": 1000}},
        {"privacy": {"level": "silo", "noise_multiplier": 1.0, "nominal_silos": 7}},
    ],
    ids=["plain", "adapters", "record", "silo"],
)
def test_masks_are_refused_by_name_whatever_else_the_plan_says(reducer: str, sections: dict[str, Any]) -> None:
    """At the silo as well: an agent takes no plan that does not parse."""
    why = MOVES if reducer == "centred_clipping" else "which compares single deltas, where masks show their sum alone"
    said = (
        f'[aggregation] secure_aggregation = true does not go with [aggregation] reducer = "{reducer}", {why}: set it '
        'to false, or reducer to "mean"'
    )
    assert said in refusal(robust(reducer, secure_aggregation=True, max_delta_norm=1.0), **sections)
    values = json.loads(plan(robust(reducer)).to_json())
    values["aggregation"]["secure_aggregation"] = True
    with pytest.raises(MalformedMessage) as offered:
        Plan.from_json(canonical_json(values))
    assert said in str(offered.value)


@pytest.mark.parametrize(
    ("aggregation", "min_silos", "said"),
    [
        (
            robust("trimmed_mean", trimmed_share=0.3),
            3,
            '[schedule] min_silos = 3 is too few for [aggregation] reducer = "trimmed_mean", which needs 4: with fewer '
            "it leaves out nobody; raise min_silos, or change trimmed_share = 0.3",
        ),
        (
            robust("multi_krum", hostile_silos=2),
            6,
            'min_silos = 6 is too few for [aggregation] reducer = "multi_krum", which needs 7: so that honest '
            "neighbours of a delta outnumber hostile ones; raise min_silos, or change hostile_silos = 2",
        ),
        (
            robust("centred_clipping", clipping_radius=0.5),
            2,
            'min_silos = 2 is too few for [aggregation] reducer = "centred_clipping", which needs 3: so that one '
            "hostile silo is fewer than half; raise min_silos",
        ),
        (
            robust("nearest_neighbour_mixing", hostile_silos=2),
            4,
            'min_silos = 4 is too few for [aggregation] reducer = "nearest_neighbour_mixing", which needs 5: so that '
            "more than half are honest; raise min_silos, or change hostile_silos = 2",
        ),
        (
            robust("geometric_median"),
            2,
            'min_silos = 2 is too few for [aggregation] reducer = "geometric_median", which needs 3',
        ),
        (
            robust("median"),
            2,
            'min_silos = 2 is too few for [aggregation] reducer = "median", which needs 3: the median of fewer is '
            "their mean; raise min_silos",
        ),
    ],
)
def test_too_small_a_quorum_is_refused(aggregation: dict[str, Any], min_silos: int, said: str) -> None:
    assert said in refusal(aggregation, min_silos=min_silos)
    needed = plan(aggregation, min_silos + 1)
    assert needed.schedule.min_silos == min_silos + 1


@pytest.mark.parametrize(
    ("aggregation", "said"),
    [
        (
            {"weighting": "equal", "reducer": "trimmed_mean"},
            'reducer = "trimmed_mean" needs trimmed_share: set the share of silos left out on each side, above 0 and '
            "below 0.5",
        ),
        (robust("trimmed_mean", trimmed_share=0.5), "trimmed_share"),
        (robust("trimmed_mean", trimmed_share=float("nan")), "trimmed_share"),
        (robust("trimmed_mean", trimmed_share=-0.1), "trimmed_share"),
        (
            robust("median", trimmed_share=0.2),
            'trimmed_share = 0.2 is read by reducer = "trimmed_mean" alone, and reducer is "median": set '
            'trimmed_share to 0, or reducer to "trimmed_mean"',
        ),
        ({"trimmed_share": 0.2}, 'and reducer is "mean"'),
        (
            {"weighting": "equal", "reducer": "multi_krum"},
            'reducer = "multi_krum" needs hostile_silos: set how many silos may be hostile, at least 1',
        ),
        (
            {"hostile_silos": 2},
            'hostile_silos = 2 is read by reducer = "multi_krum" or "nearest_neighbour_mixing" alone, and reducer is '
            '"mean": set hostile_silos to 0, or reducer to "multi_krum" or "nearest_neighbour_mixing"',
        ),
        (robust("multi_krum", hostile_silos=-1), "hostile_silos"),
        (
            {"weighting": "equal", "reducer": "nearest_neighbour_mixing"},
            'reducer = "nearest_neighbour_mixing" needs hostile_silos: set how many silos may be hostile, at least 1',
        ),
        (robust("geometric_median", hostile_silos=2), 'and reducer is "geometric_median": set hostile_silos to 0'),
        (
            {"weighting": "equal", "reducer": "centred_clipping"},
            'reducer = "centred_clipping" needs clipping_radius: set the L2 norm that deltas may be from the last '
            "round's mean",
        ),
        (
            robust("centred_clipping", clipping_radius=1e-4),
            "clipping_radius = 0.0001 is next to nothing: set 0 for none, or at least 0.001",
        ),
        (robust("centred_clipping", clipping_radius=float("inf")), "clipping_radius"),
        ({"reducer": "krum"}, "Input should be 'mean'"),
    ],
)
def test_keys_that_say_nothing_or_something_else_are_refused(aggregation: dict[str, Any], said: str) -> None:
    assert said in refusal(aggregation)


# --- what people are told


@pytest.mark.parametrize(
    ("reducer", "said"),
    [
        ("trimmed_mean", "with at most 1 of them hostile, each parameter's change stays within what honest ones sent"),
        (
            "multi_krum",
            "with at most 1 of them hostile, the mean is at most 0.17 times as far from one of honest deltas as two of "
            "these are apart",
        ),
        ("centred_clipping", "each hostile one moves the mean by an L2 norm of at most 0.429"),
        ("median", "with at most 3 of them hostile, each parameter's change stays within what honest ones sent"),
        # n = 7, f = 1: 6/5 x 6/5 = 1.44 is the trimmed mean's constant, and the root of 8/6 x 2.44 is 1.80.
        (
            "nearest_neighbour_mixing",
            "with at most 1 of them hostile, the mean is at most 1.8 times as far from one of honest deltas as these "
            "are from their mean, as a root of mean squares",
        ),
        # f = 3: 4 / the root of 7.
        (
            "geometric_median",
            "with at most 3 of them hostile, it is at most 1.5 times as far from the mean of honest deltas as the "
            "farthest honest one is",
        ),
    ],
)
def test_the_forecast_says_what_it_withstands(reducer: str, said: str) -> None:
    assert forecast(plan(robust(reducer))) == (f'reducer = "{reducer}", in a round of 7 silos: {said}',)
    assert forecast(plan({"weighting": "equal"})) == ()


def test_the_forecast_of_a_drawn_round_speaks_of_those_drawn() -> None:
    schedule = {"rounds": 3, "min_silos": 7, "cohort_size": 8}
    (said,) = forecast(small_bundle(aggregation=robust("median"), schedule=schedule).plan)
    assert "in a round of 7 silos of those drawn: " in said
