"""Generation against transformers' own, scores with a memorised set, and the silo trainer from file to file."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_t5 import (
    CORPUS,
    bundle_of,
    random_model,
    silo_data,
    v1_1,
    vocabulary_size,
    write_model,
)
from transformers import T5ForConditionalGeneration

from lorica_security.errors import ConfigurationError, DataError, IntegrityError, MalformedMessage, StorageError
from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.sql_sandbox import Limits, Sandbox, parse_database
from silo_agent.training import silo_trainer
from silo_agent.training.data.batches import encode_examples
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.tokenizer import SpecialTokens, TextTokenizer
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import in_sandbox
from silo_agent.training.generation import generated
from silo_agent.training.model.model import add_adapters, layout_of
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.spread import MOST_ALIKE, alike
from silo_wire.manifest import Manifest, manifest_of
from silo_wire.plans.adapters import AdaptersSection, adapter_layout
from silo_wire.plans.plan import PlanBundle

CPU = DeviceSettings(device="cpu", threads=1)
PAIRS = [(CORPUS[0], CORPUS[3]), (CORPUS[1], CORPUS[4]), (CORPUS[2], CORPUS[5])]
LEARNING = {"learning_rate": 5e-3, "epochs": 8, "batch_size": 3, "dropout": 0.0, "max_output_tokens": 64}
MEMORISING = {**LEARNING, "learning_rate": 1e-2, "epochs": 80, "learning_rate_schedule": "linear"}


def questions(rows: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary_size(), (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths[:, None]
    return ids.masked_fill(~mask, 0), mask


def by_transformers(model: T5ForConditionalGeneration, ids: torch.Tensor, mask: torch.Tensor, **how: Any) -> list[Any]:
    rows = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **how)[:, 1:].tolist()
    return [row[: row.index(1)] if 1 in row else row for row in rows]


@pytest.fixture(scope="module")
def models() -> dict[str, T5ForConditionalGeneration]:
    """Random T5s, with the end token made so likely that some answers end early and others do not."""
    made = {"v1.0": (random_model(7), 8.0), "v1.1": (v1_1(8), 3.0), "one layer": (random_model(8, num_layers=1), 5.0)}
    for model, factor in made.values():
        with torch.no_grad():
            model.lm_head.weight[1] *= factor
    return {"adapters": adapted_model(), **{name: model for name, (model, _) in made.items()}}


def adapted_model() -> T5ForConditionalGeneration:
    """With adapters at every layer that can have one, which change what it writes."""
    model = random_model(9)
    section = AdaptersSection(rank=2, alpha=16, layers=["q", "k", "v", "o", "wi", "wo"])
    adapters = add_adapters(model, section, adapter_layout(layout_of(model), section))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters[0].tensors:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.lm_head.weight[1] *= 5
    return model.eval()


@pytest.mark.parametrize("name", ["v1.0", "v1.1", "one layer", "adapters"])
@settings(max_examples=10)
@given(rows=st.integers(1, 7), length=st.integers(1, 20), limit=st.integers(1, 70), seed=st.integers(0, 10_000))
def test_lean_greedy_equals_generate(
    models: dict[str, T5ForConditionalGeneration], name: str, rows: int, length: int, limit: int, seed: int
) -> None:
    model = models[name]
    ids, mask = questions(rows, length, seed)
    with torch.inference_mode():
        hidden = model.get_encoder()(input_ids=ids, attention_mask=mask)[0]
        ours = generated(model, hidden, mask, beams=1, max_new_tokens=limit)
    assert ours == by_transformers(model, ids, mask, num_beams=1, max_new_tokens=limit)


def test_some_answers_end_early_and_some_do_not(models: dict[str, T5ForConditionalGeneration]) -> None:
    """Keeps the equality above from holding for want of cases."""
    ids, mask = questions(40, 12, 0)
    for model in models.values():
        lengths = {len(row) for row in by_transformers(model, ids, mask, num_beams=1, max_new_tokens=20)}
        assert len(lengths) > 2


def test_beams_are_transformers_own(models: dict[str, T5ForConditionalGeneration]) -> None:
    ids, mask = questions(3, 8, 1)
    model = models["v1.0"]
    with torch.inference_mode():
        hidden = model.get_encoder()(input_ids=ids, attention_mask=mask)[0]
        ours = generated(model, hidden, mask, beams=3, max_new_tokens=12)
    assert ours == by_transformers(model, ids, mask, num_beams=3, max_new_tokens=12)


@pytest.mark.parametrize("beams", [1, 2])
def test_generation_can_be_stopped(models: dict[str, T5ForConditionalGeneration], beams: int) -> None:
    ids, mask = questions(2, 4, 1)
    hidden = models["v1.0"].get_encoder()(input_ids=ids, attention_mask=mask)[0].detach()
    with pytest.raises(TrainingStopped):
        generated(models["v1.0"], hidden, mask, beams=beams, max_new_tokens=5, should_stop=lambda: True)


def test_truncation_keeps_the_question_and_cuts_the_schema() -> None:
    files = bundle_of(random_model()).files
    tokenizer = TextTokenizer(files, special=SpecialTokens(pad=0, end=1, start=0), vocabulary=vocabulary_size())
    question = "how many people live in paris ?"
    (alone,) = tokenizer.encode([question])
    limit = len(alone) + 6
    encoded = encode_examples(
        tokenizer,
        [Example("1", question, "SELECT NAME ;", "places")],
        schemas={"places": "| people : name , city " * 50},
        max_input_tokens=limit,
        max_output_tokens=3,
    )
    ids = encoded.inputs[0].tolist()
    assert len(ids) == limit
    assert ids[: len(alone) - 1] == alone[:-1]
    assert ids[-1] == 1
    assert tokenizer.decode([ids])[0].startswith(f"{question} ; ")
    assert (encoded.inputs_cut, encoded.targets_cut) == (1, 1)
    assert len(encoded.targets[0]) == 3


def test_outputs_that_the_vocabulary_cannot_spell_are_counted() -> None:
    files = bundle_of(random_model()).files
    tokenizer = TextTokenizer(files, special=SpecialTokens(pad=0, end=1, start=0), vocabulary=vocabulary_size())
    encoded = encode_examples(
        tokenizer,
        [Example("1", "q", "SELECT 'ß漢' ;", "p"), Example("2", "q", "SELECT NAME ;", "p")],
        schemas=None,
        max_input_tokens=99,
        max_output_tokens=99,
    )
    assert encoded.targets_with_unknown == 1


class Silo:
    """A trainer with its round model on disk."""

    def __init__(
        self, folder: Path, make: Callable[..., T5ForConditionalGeneration] = random_model, **sections: Any
    ) -> None:
        model = make()
        self.folder = folder
        self.bundle: PlanBundle = bundle_of(
            model, **{"training": LEARNING, "evaluation": {"batch_size": 2}, **sections}
        )
        self.path = folder / "round-model"
        self.manifest: Manifest = write_model(model, self.path)

    def trainer(self, name: str = "clinic") -> SiloTrainer:
        return SiloTrainer(self.bundle, silo_data(PAIRS, PAIRS), name, CPU)

    def train(self, trainer: SiloTrainer, *, round_number: int = 1, into: str = "update", **how: Any) -> Any:
        return trainer.train(
            round_number=round_number,
            model_path=self.path,
            model=self.manifest,
            update_path=self.folder / into,
            **how,
        )

    def updated(self, update: str = "update") -> tuple[Path, Manifest]:
        """Round model plus update, as the coordinator makes it of one silo."""
        total = np.fromfile(self.path, dtype="<f4") + np.fromfile(self.folder / update, dtype="<f4")
        path = self.folder / "next-model"
        path.write_bytes(total.tobytes())
        return path, manifest_of(self.bundle.layout, [total.tobytes()])


@pytest.fixture(scope="module")
def memorised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Silo, SiloTrainer]:
    """A silo whose update, added to its round model, knows the three questions by heart."""
    silo = Silo(tmp_path_factory.mktemp("memorised"), v1_1, training=MEMORISING)
    trainer = silo.trainer()
    silo.train(trainer)
    return silo, trainer


def test_a_memorised_set_is_scored_exactly(memorised: tuple[Silo, SiloTrainer]) -> None:
    silo, trainer = memorised
    before = trainer.evaluate(model_path=silo.path, model=silo.manifest)
    assert (before.examples, before.exact_matches) == (3, 0)
    path, manifest = silo.updated()
    fractions: list[float] = []
    after = trainer.evaluate(model_path=path, model=manifest, on_progress=fractions.append)
    assert (after.split, after.examples, after.exact_matches, after.executed) == ("dev", 3, 3, 0)
    assert after.loss_per_token < before.loss_per_token / 10
    assert fractions == [pytest.approx(2 / 3), 1.0]
    for question, query in PAIRS:
        assert trainer.answer(question, model_path=path, model=manifest) == query


@pytest.mark.parametrize("make", [random_model, v1_1])
def test_the_update_is_what_its_manifest_and_summary_say(
    tmp_path: Path, make: Callable[..., T5ForConditionalGeneration]
) -> None:
    silo = Silo(tmp_path, make)
    update = silo.train(silo.trainer())
    assert update.manifest == manifest_of(silo.bundle.layout, [(tmp_path / "update").read_bytes()])
    assert update.delta_norm == pytest.approx(np.linalg.norm(np.fromfile(tmp_path / "update", "<f4")), rel=1e-5)
    assert (update.summary.examples, update.summary.optimizer_steps) == (3, 8)


def test_execution_is_counted_where_the_gold_query_runs(memorised: tuple[Silo, SiloTrainer], tmp_path: Path) -> None:
    silo, trainer = memorised
    path, manifest = silo.updated()
    seen: list[tuple[str, str]] = []

    def same_result(gold: str, predicted: str) -> bool | None:
        seen.append((gold, predicted))
        return {PAIRS[0][1]: True, PAIRS[1][1]: False, PAIRS[2][1]: None}[gold]

    score = trainer.evaluate(model_path=path, model=manifest, same_result=same_result)
    assert (score.executed, score.execution_matches) == (2, 1)
    assert sorted(seen) == sorted((query, query) for _, query in PAIRS)
    other = Silo(tmp_path, v1_1, evaluation={"execution": False})
    assert other.trainer().evaluate(model_path=path, model=manifest, same_result=same_result).executed == 0
    assert len(seen) == 3


def test_execution_runs_in_the_sandbox(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db.sqlite") as database:
        database.executescript("CREATE TABLE people (name, city); INSERT INTO people VALUES ('ann', 'paris')")
    database.close()
    with Sandbox(parse_database(f"sqlite:///{tmp_path / 'db.sqlite'}"), Limits(seconds=5)) as box:
        same = in_sandbox(box)
        assert same("SELECT name FROM people", "SELECT 'ann'") is True
        assert same("SELECT name FROM people", "SELECT city FROM people") is False
        assert same("SELECT name FROM people", "DROP TABLE people") is False
        assert same("SELECT name FROM people", "not sql") is False
        assert same("SELECT nothing FROM people", "SELECT 1") is None


def test_two_runs_give_the_same_bytes_and_other_rounds_silos_and_seeds_others(tmp_path: Path) -> None:
    short = {**LEARNING, "epochs": 2, "batch_size": 1, "dropout": 0.1}
    silo = Silo(tmp_path, training=short)
    first = silo.trainer()
    silo.train(first, into="a")
    first.evaluate(model_path=silo.path, model=silo.manifest)
    silo.train(first, into="b")
    silo.train(silo.trainer(), into="c")
    same = [(tmp_path / name).read_bytes() for name in "abc"]
    assert same[0] == same[1] == same[2]
    silo.train(first, round_number=2, into="d")
    silo.train(silo.trainer("bank"), into="e")
    Silo(tmp_path, training=short, seed=7).train(Silo(tmp_path, training=short, seed=7).trainer(), into="f")
    assert len({(tmp_path / name).read_bytes() for name in "adef"}) == 4


def test_a_silos_override_is_applied_to_it_alone(tmp_path: Path) -> None:
    plan = {**LEARNING, "epochs": 1, "batch_size": 3, "overrides": {"bank": {"epochs": 4, "batch_size": 1}}}
    silo = Silo(tmp_path, training=plan)
    assert silo.train(silo.trainer("clinic")).summary.optimizer_steps == 1
    assert silo.train(silo.trainer("bank")).summary.optimizer_steps == 12


def test_fedprox_reads_the_round_model_from_its_file(tmp_path: Path) -> None:
    free = Silo(tmp_path)
    norm = free.train(free.trainer()).delta_norm
    held = Silo(tmp_path, training={**LEARNING, "fedprox_mu": 10.0})
    before = held.path.read_bytes()
    assert held.train(held.trainer()).delta_norm < norm / 2
    assert held.path.read_bytes() == before


def test_attack_round_model_damaged_or_replaced_on_disk_is_refused(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    raw = bytearray(silo.path.read_bytes())
    raw[5000] ^= 1
    silo.path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="chunk 1 does not have the digest"):
        silo.train(silo.trainer())
    assert not (tmp_path / "update").exists()


def test_a_round_model_that_is_gone_or_of_another_shape_is_named(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    trainer = silo.trainer()
    other = write_model(v1_1(), tmp_path / "other")
    with pytest.raises(MalformedMessage, match="another layout"):
        trainer.evaluate(model_path=tmp_path / "other", model=other)
    silo.path.unlink()
    with pytest.raises(StorageError, match="round-model cannot be read"):
        silo.train(trainer)


def test_an_update_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    silo = Silo(tmp_path, training={**LEARNING, "epochs": 1})
    with pytest.raises(StorageError, match="absent/update cannot be written"):
        silo.train(silo.trainer(), into="absent/update")


def test_after_a_stopped_training_the_model_is_loaded_anew(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    trainer = silo.trainer()
    before = trainer.evaluate(model_path=silo.path, model=silo.manifest)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 5

    with pytest.raises(TrainingStopped):
        silo.train(trainer, should_stop=stop)
    assert not (tmp_path / "update").exists()
    after = trainer.evaluate(model_path=silo.path, model=silo.manifest)
    assert after.loss_per_token == before.loss_per_token


def test_a_diverged_training_leaves_no_update(tmp_path: Path) -> None:
    silo = Silo(tmp_path, training={**LEARNING, "learning_rate": 10.0, "weight_decay": 1e30})
    with pytest.raises(TrainingDiverged):
        silo.train(silo.trainer())
    assert not (tmp_path / "update").exists()


def test_part_of_a_split_is_the_same_part_each_time(tmp_path: Path) -> None:
    silo = Silo(tmp_path, evaluation={"max_examples": 2})
    scores = [silo.trainer().evaluate(model_path=silo.path, model=silo.manifest) for _ in range(2)]
    assert scores[0].examples == 2
    assert scores[0].loss_per_token == scores[1].loss_per_token


def test_an_empty_split_cannot_be_scored(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    with pytest.raises(DataError, match=r"silo clinic has no test examples: add test\.jsonl"):
        silo.trainer().evaluate(model_path=silo.path, model=silo.manifest, split="test")


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99", "nonsense!"])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    silo = Silo(tmp_path)
    with pytest.raises(ConfigurationError, match=f"device = '{device}'"):
        SiloTrainer(silo.bundle, silo_data(PAIRS), "clinic", DeviceSettings(device=device))


MASKED = {"aggregation": {"secure_aggregation": True, "max_weight": 100.0}, "schedule": {"rounds": 3, "min_silos": 3}}


def masked_update(folder: Path, entropy: bytes | None, **sections: Any) -> bytes:
    """Of one training with dropout, by a trainer of its own."""
    folder.mkdir()
    silo = Silo(folder, **sections)
    trainer = SiloTrainer(silo.bundle, silo_data(PAIRS, PAIRS), "clinic", CPU, own_entropy=entropy)
    silo.train(trainer)
    return (folder / "update").read_bytes()


def test_attack_the_plans_seed_tells_nothing_of_order_and_dropout_under_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows plan, round and silo could else try out what a guessed record does to the delta."""
    monkeypatch.setattr(
        silo_trainer, "Spread", lambda key, share: None
    )  # which comes of the silo's own entropy as well
    mine, again, other = (bytes([number]) * 32 for number in (1, 1, 2))
    first = masked_update(tmp_path / "first", mine, **MASKED)
    assert masked_update(tmp_path / "again", again, **MASKED) == first, "a killed training comes to the same bits"
    assert masked_update(tmp_path / "other", other, **MASKED) != first
    drawn = {masked_update(tmp_path / f"drawn-{number}", None, **MASKED) for number in range(2)}
    assert len({first, *drawn}) == 3, "without a word it is drawn"


def test_each_round_has_keys_of_its_own_for_order_and_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two rounds were spread by the same factors, their sums would tell these."""
    keys: list[Any] = []
    spread_by, train = silo_trainer.Spread, silo_trainer.train_locally

    def trained(*args: Any, **more: Any) -> Any:
        keys.append(more["seed"])
        return train(*args, **more)

    def spread(key: bytes, share: float) -> Any:
        keys.append(key)
        return spread_by(key, share)

    monkeypatch.setattr(silo_trainer, "train_locally", trained)
    monkeypatch.setattr(silo_trainer, "Spread", spread)
    silo = Silo(tmp_path, training={"epochs": 1, "batch_size": 64, "dropout": 0.0}, **MASKED)
    trainer = SiloTrainer(silo.bundle, silo_data(PAIRS, PAIRS), "clinic", CPU, own_entropy=bytes(32))
    for round_number in (1, 2):
        silo.train(trainer, round_number=round_number)
    assert [len(key) for key in keys] == 4 * [32]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("masked", [True, False])
def test_attack_deltas_that_are_to_be_masked_are_not_all_of_one_size(tmp_path: Path, masked: bool) -> None:
    """One step of AdamW moves each parameter by as much: of a weighted sum of such deltas each could be told."""
    sections = {**(MASKED if masked else {}), "training": {"epochs": 1, "batch_size": 64, "dropout": 0.0}}
    update = masked_update(tmp_path / "one", bytes(32), **sections)
    assert masked_update(tmp_path / "again", bytes(32), **sections) == update, (
        "a killed training comes to the same bits"
    )
    assert (masked_update(tmp_path / "other", bytes([1]) * 32, **sections) != update) == masked
    assert (alike(np.frombuffer(update, dtype="<f4")) < MOST_ALIKE) == masked


def test_without_masks_the_plans_seed_decides_as_ever(tmp_path: Path) -> None:
    assert masked_update(tmp_path / "one", bytes(32)) == masked_update(tmp_path / "other", bytes([1]) * 32)
