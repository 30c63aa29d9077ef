"""Silos without labels beside what else a plan may have: adapters, bfloat16 on the wire, turns; and what their people
are shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_t5 import bundle_of, random_model, write_model
from unit.test_semi_supervised_training import plan, written
from unit.test_training_adapters import LORA, base_of, data, handed_out

from lorica_security.console.preflight import Misconfigured
from silo_agent.commands.plan_review import part, scores_leave
from silo_agent.edges.check.machine_checks import check_free_memory
from silo_agent.training.data.text_to_sql_data import load_silo_data
from silo_agent.training.device import DeviceSettings
from silo_agent.training.silo_trainer import SiloTrainer
from tests.support.coordinator_edges import A, Workplace, make_plan

IN_TURN: dict[str, Any] = {
    "schedule.rounds": 4,
    "aggregation.weighting": "equal",
    "aggregation.momentum": 0.0,
    "training.max_output_tokens": 8,
    "semi_supervised.unlabelled": [str(A)],
    "semi_supervised.loss": "answer",
}


@pytest.mark.parametrize(("train", "teacher"), [("b", "ema"), ("both", "mlm")])
def test_adapters_alone_are_trained_without_labels_and_sent(tmp_path: Path, train: str, teacher: str) -> None:
    """In a round of even number, which under turns is such a silo's."""
    loss = {} if teacher == "ema" else {"semi_supervised.loss": "probabilities"}
    overrides = {**LORA, **IN_TURN, **loss, "adapters.train": train, "semi_supervised.teacher": teacher}
    place = Workplace.at(tmp_path / "state", make_plan(tmp_path / "state", overrides=overrides))
    model = handed_out(place, place.models.initial(), tmp_path / "model")
    labelled = data()
    without = replace(labelled, train=tuple(replace(it, query="") for it in labelled.train), dev=(), labelled=False)
    device = DeviceSettings(device="cpu", threads=1)
    trainer = SiloTrainer(place.bundle, without, A, device, base=base_of(place, tmp_path))
    update = trainer.train(round_number=2, model_path=model.file, model=model.manifest, update_path=tmp_path / "update")
    assert update.manifest.total_bytes == place.bundle.layout.parameters * 4
    assert update.delta_norm > 0
    of_teacher = place.bundle.layout.total_bytes if teacher == "ema" else 0
    assert place.bundle.teacher_bytes(A) == of_teacher, "the base is shared"


def test_what_rounding_cut_off_is_in_the_next_update_whatever_rounds_lay_between(tmp_path: Path) -> None:
    """A silo that is drawn for rounds 2 and 6: bfloat16 of the delta and of what it kept."""
    model = random_model(3)
    bundle = plan(model, wire={"update": "bfloat16"})
    silo = load_silo_data(written(tmp_path / "data"), labelled=False)
    trainer = SiloTrainer(bundle, silo, "lab", DeviceSettings(device="cpu", threads=1))
    manifest = write_model(model, tmp_path / "model")

    def sent(number: int, included: Any = None) -> tuple[Any, torch.Tensor]:
        update = trainer.train(
            round_number=number,
            model_path=tmp_path / "model",
            model=manifest,
            update_path=tmp_path / "update",
            included_update=included,
        )
        content = bytearray((tmp_path / "update").read_bytes())
        return update.manifest.digest, torch.frombuffer(content, dtype=torch.bfloat16).float()

    _, without = sent(6)
    digest, first = sent(2)
    _, with_it = sent(6, digest)
    moved = (with_it - without).abs()
    assert moved.any()
    assert moved.max() <= 2**-7 * max(first.abs().max(), without.abs().max()), "no more than rounding"


@pytest.mark.parametrize(
    ("changes", "silo", "says", "teacher"),
    [
        ({}, "lab", "trains without labels, in each round: a teacher, a moving average of what it trains", True),
        ({"teacher": "round"}, "lab", "a teacher, the round model, answers its questions and never leaves", True),
        ({"teacher": "mlm"}, "lab", "in each round: it fills in spans of its questions; answers in its lines", False),
        ({"teacher": "none", "order": "alternate"}, "lab", "trains in no round, since it has no labels", False),
        ({}, "clinic", "trains with labels, in each round", False),
    ],
)
def test_people_see_what_their_silo_does_and_what_memory_a_teacher_takes(
    changes: dict[str, Any], silo: str, says: str, teacher: bool
) -> None:
    bundle = plan(random_model(3), **changes)
    shown = part(bundle, silo)
    assert says in shown
    assert (f"{4 * bundle.plan.model.parameters:,} bytes of memory more" in shown) == teacher
    assert ("of it for a teacher" in check_free_memory(bundle, 1 << 40, silo=silo)) == teacher
    with pytest.raises(Misconfigured):
        check_free_memory(bundle, 24 * bundle.plan.model.parameters + bundle.teacher_bytes(silo) - 1, silo=silo)
    left = scores_leave(bundle.plan, tells_scores=True, silo=silo)
    assert left.startswith("no scores: it has no labels") == (silo == "lab")
    assert part(bundle_of(random_model(3)), silo) == ""
