"""The memory of loss reductions: what a silo tells of several rounds, worked by hand, and what its journal keeps for
that."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lorica_security.identifiers import SiloName
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.rounds.effects import JournalUpdate
from silo_agent.rounds.events import SavedUpdate
from silo_agent.training import silo_trainer
from silo_agent.training.device import DeviceSettings
from silo_agent.training.loss_reduction import averaged
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.masked_vector import own_weight
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey, TrainingSummary
from silo_wire.plans.plan import Plan
from tests.support.federation_peer import FEDERATION, SILO, small_bundle, vector_of
from tests.support.tiny_t5 import CORPUS, bundle_of, random_model, silo_data, write_model

BUNDLE = small_bundle()
KEY = RoundKey(federation=FEDERATION, plan=BUNDLE.plan.digest, round=1, attempt=1)
MASKS = {"secure_aggregation": True, "max_weight": 100.0}


def told(fell: float, *, last: float = 0.5) -> TrainingSummary:
    return TrainingSummary(
        examples=10,
        loss_max=last + fell,
        loss_min=last,
        loss_first=last + fell,
        loss_last=last,
        optimizer_steps=1,
        seconds=0.0,
    )


# --- by hand


def test_what_is_told_over_rounds_by_hand() -> None:
    """Reductions of 4, 2, 0 and 1 with a memory of a half: 4, then 3, 1.5 and 1.25."""
    before, over_rounds = None, []
    for fell in (4.0, 2.0, 0.0, 1.0):
        before = averaged(told(fell), memory=0.5, told_before=before).loss_reduction
        over_rounds.append(before)
    assert over_rounds == [4.0, 3.0, 1.5, 1.25]


def test_a_memory_of_four_fifths_by_hand() -> None:
    """A fifth of 1 and four fifths of 2: 1.8. The losses at the two models stay what they were."""
    summary = averaged(told(1.0), memory=0.8, told_before=2.0)
    assert summary.loss_reduction == pytest.approx(1.8)
    assert replace(summary, loss_max=1.5) == told(1.0)


reductions = st.floats(0.0, 20.0)


@given(fell=reductions, before=reductions, memory=st.floats(0.0, 0.99), last=st.floats(0.0, 20.0))
def test_it_is_between_this_rounds_and_the_one_before(fell: float, before: float, memory: float, last: float) -> None:
    summary = averaged(told(fell, last=last), memory=memory, told_before=before)
    now = told(fell, last=last).loss_reduction
    assert min(now, before) - 1e-9 <= summary.loss_reduction <= max(now, before) + 1e-9
    assert averaged(told(fell), memory=0.0, told_before=before) == told(fell)
    assert averaged(told(fell), memory=memory, told_before=None) == told(fell)


# --- what the journal keeps


def recorded(journal: RoundJournal, key: RoundKey, fell: float) -> None:
    summary = told(fell, last=0.0)
    manifest = manifest_of(BUNDLE.layout, [vector_of(BUNDLE.layout, 1)], 1024)
    journal.record(JournalUpdate(SavedUpdate(key=key, model=Digest("ab" * 32), manifest=manifest, summary=summary)))


def before(journal: RoundJournal, number: int, **changes: Any) -> float | None:
    return journal.told_before(replace(KEY, round=number, **changes))


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    (tmp_path / "updates").mkdir()
    opened = RoundJournal(tmp_path / "journal.sqlite", updates=tmp_path / "updates", silo=SILO)
    yield opened
    opened.close()


def test_the_latest_earlier_round_of_the_plan_is_kept_and_no_attempt_at_the_round_itself(
    journal: RoundJournal, tmp_path: Path
) -> None:
    recorded(journal, KEY, 4.0)
    recorded(journal, replace(KEY, round=3), 3.0)
    recorded(journal, replace(KEY, round=3, attempt=2), 2.0)
    expected = [(1, None), (2, 4.0), (3, 4.0), (4, 2.0), (9, 2.0)]
    assert [(number, before(journal, number)) for number, _ in expected] == expected
    assert before(journal, 3, attempt=7) == 4.0
    assert before(journal, 4, plan=Digest("cd" * 32)) is None, "another plan begins afresh"
    journal.new_update_file(replace(KEY, round=4))
    again = RoundJournal(tmp_path / "journal.sqlite", updates=tmp_path / "updates", silo=SILO)
    assert before(again, 4) == 2.0, "what a kill during the next training leaves"
    again.close()


def test_rounds_that_the_coordinator_went_back_from_are_forgotten(journal: RoundJournal) -> None:
    for number, fell in ((1, 4.0), (2, 3.0), (3, 2.0)):
        recorded(journal, replace(KEY, round=number), fell)
    recorded(journal, replace(KEY, round=2, attempt=5), 1.0)
    assert [before(journal, number) for number in (2, 3, 4)] == [4.0, 1.0, 1.0]


# --- at a silo


@pytest.mark.parametrize("masks", [{}, MASKS], ids=["clear", "masks"])
@pytest.mark.parametrize(("before_it", "expected"), [(None, 1.0), (3.0, 2.5)])
def test_a_silo_weighs_by_the_average_also_under_masks(
    masks: dict[str, Any], before_it: float | None, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of 1 and three quarters of 3. The share that spreads a masked delta is of the same weight."""
    made = random_model()
    shares = list[float]()
    monkeypatch.setattr(silo_trainer, "train_locally", lambda *_, **__: told(1.0))
    monkeypatch.setattr(silo_trainer, "Spread", lambda _key, share: shares.append(share))
    quorum = {"rounds": 3, "min_silos": 3 if masks else 1}
    bundle = bundle_of(made, schedule=quorum, aggregation={"reduction_memory": 0.75, **masks})
    data = silo_data([(CORPUS[0], CORPUS[3])])
    trainer = SiloTrainer(bundle, data, SiloName("clinic"), DeviceSettings(device="cpu", threads=1))
    update = trainer.train(
        round_number=2,
        model_path=tmp_path / "model",
        model=write_model(made, tmp_path / "model"),
        update_path=tmp_path / "update",
        told_before=before_it,
    )
    assert update.summary.loss_reduction == expected
    assert own_weight(bundle.plan.aggregation, update.summary) == 10 * expected
    assert shares == ([expected / 10] if masks else [])


# --- plans


def plan(memory: float, weighting: str = "lorar", **sections: Any) -> Plan:
    return small_bundle(aggregation={"weighting": weighting, "reduction_memory": memory}, **sections).plan


def test_a_plan_without_a_memory_has_the_digest_that_it_had() -> None:
    assert "reduction_memory" not in json.loads(plan(0.0).to_json())["aggregation"]
    assert plan(0.0).digest == small_bundle(aggregation={"weighting": "lorar"}).plan.digest != plan(0.5).digest
    assert Plan.from_json(plan(0.5).to_json()).aggregation.reduction_memory == 0.5


RECORD: dict[str, Any] = {
    "training": {"max_grad_norm": 1.0, "dropout": 0.0, "epochs": 1},
    "privacy": {"level": "record", "expected_batch_size": 8, "nominal_records": 100, "noise_multiplier": 2.0},
    "evaluation": {"every": 0, "initial": False, "last": False},
}


@pytest.mark.parametrize("weighting", ["size", "equal", "fednova", "q_fedavg"])
def test_it_is_refused_where_no_reduction_counts(weighting: str) -> None:
    said = (
        rf'\[aggregation\] reduction_memory = 0.5 does not go with weighting = "{weighting}", which needs no loss '
        'reduction: set it to 0, or weighting to "lorar"'
    )
    with pytest.raises(ValidationError, match=said):
        plan(0.5, weighting)


def test_it_is_refused_where_a_reduction_is_released_with_noise() -> None:
    assert plan(0.0, **RECORD).weighted, "the same plan without it is one"
    said = (
        r'\[aggregation\] reduction_memory = 0.5 does not go with \[privacy\] level = "record", under which a '
        "reduction is told as it was released, of its round alone: set it to 0"
    )
    with pytest.raises(ValidationError, match=said):
        plan(0.5, **RECORD)


@pytest.mark.parametrize("memory", [-0.1, 0.995, 1.0, float("nan")])
def test_what_is_no_memory_is_refused(memory: float) -> None:
    with pytest.raises(ValidationError, match="reduction_memory"):
        plan(memory)
