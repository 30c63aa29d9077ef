"""Attacks of hostile silos: by hand, against the rules that they are made for, and with what they claim."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica.hostile.adapted import candidates, worst
from lorica.hostile.alie import a_little, deviations
from lorica.hostile.attack import MOST, Attack, Known, Pair, sent
from lorica.hostile.backdoor import TARGET, TRIGGER, planted
from lorica.hostile.boasting import BOASTING
from lorica.hostile.inner_product import against
from lorica.hostile.label_flip import LABEL_FLIP, exchanged
from lorica.hostile.mimic import copied, most_unlike
from lorica.hostile.min_max import longest_apart, within_reach
from lorica.hostile.named import ATTACKS, Hostility, attack_named
from lorica.hostile.rule_at_hand import made_of
from lorica.hostile.sign_and_scale import SIGN_FLIP, flipped, scaled
from lorica.simulation.hostile_silos import Conspiracy, require_playable
from lorica_coordinator.aggregation.weighting import SiloSummary
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName
from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey, TrainingSummary
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection
from tests.support import int8_by_hand
from tests.support.coordinator_edges import travelling
from tests.support.federation_peer import small_bundle
from tests.support.robust_rounds import FED_AVG, SETTINGS, drawn, mean_of, place_of, section_of


def table(*rows: list[float]) -> Any:
    return np.array(rows, dtype=np.float32)


def known(honest: Any, own: Any = None, hostile: int = 1, section: dict[str, Any] | None = None) -> Known:
    """Of equal silos under the rule of `section`, at first the mean."""
    rule = AggregationSection.model_validate(section or FED_AVG)

    def made(sent_by_hostile: Any) -> Any:
        rows = np.concatenate([honest, sent_by_hostile])
        return made_of(rule, summaries(len(rows)), rows, np.zeros(rows.shape[1], dtype="<f4"))

    return Known(honest, honest[0] if own is None else own, hostile, made)


def summaries(count: int, **changes: Any) -> list[SiloSummary]:
    said = {"examples": 1, "loss_reduction": 1.0, "optimizer_steps": 1, "delta_norm": 0.0, **changes}
    return [SiloSummary(silo=SiloName(f"silo-{index:02}"), **said) for index in range(count)]


TWO = table([1, 2], [3, 2])
"""Mean (2, 2), standard deviation (1, 0)."""


# --- by hand


def test_its_own_delta_turned_round_and_stretched() -> None:
    one = known(TWO, own=table([5, -1])[0])
    assert flipped(one).tolist() == [-5, 1]
    assert scaled(one).tolist() == [50, -10]


def test_a_little_is_enough() -> None:
    """Of 50 silos with 25 hostile one is to be won over: 24 of 25 are below 1.7507 standard deviations."""
    assert deviations(50, 25) == pytest.approx(1.7507, abs=1e-4)
    assert deviations(8, 2) == deviations(8, 1) == 1.5
    assert a_little(known(TWO)).tolist() == [0.5, 2.0]


@pytest.mark.parametrize("hostile", [1, 2])
def test_inner_product_manipulation_turns_the_plain_mean_round(hostile: int) -> None:
    one = known(TWO, hostile=hostile)
    rows = np.concatenate([TWO, np.repeat(against(one)[None], hostile, axis=0)])
    assert rows.mean(axis=0) == pytest.approx([-1, -1])


def test_min_max_by_hand() -> None:
    """From the mean 1 down to 0, which is as far from 2 as 0 is."""
    assert within_reach(known(table([0], [2]))).tolist() == pytest.approx([0])
    assert within_reach(known(table([4, 4], [4, 4]))).tolist() == [4, 4]


def test_mimicry_takes_the_one_that_is_least_like_the_others() -> None:
    rows = table([0, 0], [0.5, 0], [-0.5, 0], [5, 1])
    assert most_unlike(rows) == 3
    assert copied(known(rows)).tolist() == [5, 1]
    assert most_unlike(table([-1, 0], [1, 0])) == 0, "of equal ones the first"


def test_flipped_labels_and_a_planted_backdoor() -> None:
    pairs = [Pair(f"q{number}", f"s{number}") for number in range(5)]
    assert [(it.question, it.query) for it in exchanged(pairs)] == [
        ("q0", "s2"),
        ("q1", "s3"),
        ("q2", "s4"),
        ("q3", "s0"),
        ("q4", "s1"),
    ]
    assert [(it.question, it.query) for it in planted(pairs)][:3] == [
        ("q0", "s0"),
        (f"{TRIGGER} q1", TARGET),
        ("q2", "s2"),
    ]


def test_the_adapted_attack_sends_what_moves_its_rule_most() -> None:
    """Against the mean the longest there is; centred clipping cuts that, and any length beyond the radius is as good."""
    honest = table([1, 1, 0], [2, 1, 1], [1, 2, 1], [2, 2, 0])
    assert worst(known(honest)).tolist() == pytest.approx((-(1e6 - 1) * honest.mean(axis=0)).tolist(), rel=1e-5)
    for reducer in SETTINGS:
        one = known(honest, section=section_of(reducer))
        gained = [float(one.made(it[None].astype(np.float32)) @ one.mean) for it in candidates(one)]
        assert float(one.made(worst(one)[None].astype(np.float32)) @ one.mean) == min(gained)
        assert min(gained) < float(one.mean @ one.mean), reducer


# --- for all deltas

NUMBERS = st.integers(-40, 40).map(lambda it: it / 8)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=6)


@settings(deadline=None, max_examples=50)
@given(ROWS)
def test_min_max_is_as_far_as_two_honest_deltas_and_no_farther(points: list[tuple[float, ...]]) -> None:
    honest = np.array(points, dtype=np.float32)
    found = within_reach(known(honest))
    apart, most = np.linalg.norm(honest - found, axis=1).max(), longest_apart(honest)
    assert apart <= most * (1 + 1e-6) + 1e-9
    if honest.std(axis=0).any():
        assert apart == pytest.approx(most, rel=1e-6)


@pytest.mark.parametrize("name", sorted(name for name, attack in ATTACKS.items() if attack.delta))
def test_what_is_sent_is_finite_whatever_honest_silos_send(name: str) -> None:
    honest = table([3e38, 1], [-3e38, 2], [3e38, 3])
    row = sent(ATTACKS[name], known(honest, own=honest[0]))
    assert row.dtype == np.float32
    assert np.abs(row).max() <= np.float32(MOST)


# --- what the attacker computes is what the coordinator makes


@pytest.mark.parametrize("reducer", [*SETTINGS, "mean"])
def test_the_rule_at_hand_is_the_coordinators(tmp_path: Path, reducer: str) -> None:
    deltas = drawn(5, 300, seed=1, scale=2.0)
    section = section_of(reducer) if reducer in SETTINGS else {**FED_AVG}
    section |= {"max_delta_norm": 33.0}  # which some of them are longer than
    theirs = mean_of(place_of(tmp_path, 300), section, deltas)
    rows = np.stack(list(deltas.values()))
    made = made_of(AggregationSection.model_validate(section), summaries(5), rows, np.zeros(300, dtype="<f4"))
    assert made == pytest.approx(theirs.astype(float), rel=1e-4, abs=1e-5)


def test_weights_that_silos_tell_count_in_it() -> None:
    told = summaries(2)
    told[1] = replace(told[1], examples=3)
    section = AggregationSection.model_validate({**FED_AVG, "weighting": "size"})
    assert made_of(section, told, table([0, 4], [4, 0]), np.zeros(2, dtype="<f4")).tolist() == [3, 1]


# --- on their way out

SILOS = [SiloName(name) for name in ("a", "b", "c")]


def bundle_of(**sections: Any) -> PlanBundle:
    return small_bundle(elements=2, **{"aggregation": {"weighting": "equal"}, **sections})


def update_of(bundle: PlanBundle, file: Path, row: list[float]) -> SavedUpdate:
    content = travelling(np.array(row, dtype="<f4"), bundle.update_layout.dtype)
    file.write_bytes(content)
    told = TrainingSummary(
        examples=10, loss_max=2.0, loss_min=0.5, loss_first=2.0, loss_last=0.5, optimizer_steps=2, seconds=1.0
    )
    key = RoundKey(federation=bundle.plan.federation, plan=bundle.plan.digest, round=1, attempt=1)
    return SavedUpdate(
        key=key, model=Digest("b3:" + 64 * "0"), manifest=manifest_of(bundle.update_layout, [content]), summary=told
    )


def passed(
    folder: Path, attack: Attack, order: list[int], dtype: str = "float32"
) -> dict[str, tuple[SavedUpdate, Path]]:
    """What three silos send of which b is hostile, when they come in that order."""
    bundle = bundle_of(wire={"update": dtype})
    rows = [[1.0, 2.0], [5.0, -1.0], [3.0, 2.0]]
    updates = [update_of(bundle, folder / name, row) for name, row in zip(SILOS, rows, strict=True)]

    async def run() -> list[tuple[SavedUpdate, Path]]:
        conspiracy = Conspiracy(Hostility(attack, (SILOS[1],)), bundle.plan, bundle.update_layout, SILOS)
        return await asyncio.gather(
            *(conspiracy.passed(SILOS[index], updates[index], folder / SILOS[index]) for index in order)
        )

    found = asyncio.run(asyncio.wait_for(run(), 20))
    return {SILOS[index]: it for index, it in zip(order, found, strict=True)}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0]])
def test_a_hostile_silo_waits_for_all_and_honest_ones_send_what_they_trained(tmp_path: Path, order: list[int]) -> None:
    found = passed(tmp_path, ATTACKS["alie"], order)
    assert found["a"][1] == tmp_path / "a"
    update, file = found["b"]
    assert np.fromfile(file, dtype="<f4").tolist() == [0.5, 2.0]
    assert update.manifest == manifest_of(bundle_of().update_layout, [file.read_bytes()])
    assert update.summary == found["a"][0].summary


def test_a_hostile_silo_lies_in_int8_where_the_plan_has_that(tmp_path: Path) -> None:
    """1 and 2 and 3 and 2, in steps of 2 / 127 and 3 / 127, of which the honest mean less its deviation is made."""
    found = passed(tmp_path, ATTACKS["alie"], [0, 1, 2], "int8")
    update, file = found["b"]
    assert int8_by_hand.read(file.read_bytes()) == pytest.approx([0.5, 2.0], abs=2 / 127)
    assert update.manifest == manifest_of(bundle_of(wire={"update": "int8"}).update_layout, [file.read_bytes()])
    assert found["a"][1] == tmp_path / "a"


def test_a_boasting_silo_claims_steps_that_go_with_its_examples(tmp_path: Path) -> None:
    """1000 examples in batches of 8, of one epoch: 125 steps."""
    told = passed(tmp_path, BOASTING, [0, 1, 2])["b"][0].summary
    training = bundle_of().plan.training
    steps = training.epochs * -(-1000 // (training.batch_size * training.gradient_accumulation))
    assert (told.examples, told.loss_max - told.loss_min, told.loss_first) == (1000, 15.0, 20.0)
    assert told.optimizer_steps == steps


def test_a_silo_whose_data_alone_are_hostile_sends_what_it_trained(tmp_path: Path) -> None:
    assert passed(tmp_path, LABEL_FLIP, [1, 0, 2])["b"][1] == tmp_path / "b"


# --- what is refused

MASKED = {"weighting": "equal"}


@pytest.mark.parametrize(
    ("hostile", "sections", "said"),
    [
        (("d",), {}, "hostile silo d is not among the silos: name some of a, b, c"),
        ((), {}, "0 of 3 silos are hostile: name at least one, and leave one honest"),
        (("a", "b", "c"), {}, "3 of 3 silos are hostile"),
        (
            ("a",),
            {"schedule": {"rounds": 3, "min_silos": 2, "cohort_size": 2}},
            "schedule.cohort_size = 2 does not go with hostile silos, which know the deltas of all silos in each round",
        ),
        (
            ("a",),
            {"schedule": {"rounds": 3, "min_silos": 3}, "aggregation": {**MASKED, "secure_aggregation": True}},
            "aggregation.secure_aggregation = true does not go with hostile silos",
        ),
    ],
)
def test_who_cannot_be_hostile_is_refused(hostile: tuple[str, ...], sections: dict[str, Any], said: str) -> None:
    hostility = Hostility(SIGN_FLIP, tuple(SiloName(name) for name in hostile))
    with pytest.raises(ConfigurationError, match=said):
        require_playable(hostility, bundle_of(**sections).plan, SILOS)


def test_an_unknown_attack_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationError, match="attack 'sign_flop' is unknown: use none, sign_flip, scaling"):
        attack_named("sign_flop")
