"""A silo's own models: what they are trained to, that each is made once, which one answers, and what is refused."""

import asyncio
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from prometheus_client import CollectorRegistry, generate_latest

from lorica_security.errors import ConfigurationError, Conflict, DataError, StateError
from lorica_security.host.process_lock import ProcessLock
from silo_agent.cli import main as agent_main
from silo_agent.composition import _is_loopback
from silo_agent.edges.console.metrics import MODEL_SCORES, PARTS, SiloMetrics
from silo_agent.edges.disk.answers_right import AnswersRight, answers_right
from silo_agent.edges.personal import personal_keeper
from silo_agent.edges.personal.own_models import OwnModels
from silo_agent.edges.personal.own_scores import OwnScores, Scored, own_scores
from silo_agent.edges.personal.shown import own_models_lines, own_models_page
from silo_agent.rounds.effects import Activity, JournalActivity
from silo_agent.service.ports import RoundModel
from silo_agent.settings import PersonalSection
from silo_agent.training.data.batches import Batch, collate, encode_examples
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.low_rank import low_rank_changes
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.personal_trainer import OwnSettings, PersonalTrainer, _seed
from silo_agent.training.tasks.task import Task
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation, RoundKey
from tests.support.checkpointed_training import dying_at
from tests.support.collected_silo import TRAINING, CollectedSilo
from tests.support.command_line import Done, run_command
from tests.support.federation_peer import FEDERATION
from tests.support.tiny_t5 import CORPUS, bundle_of, random_model, silo_data, v1_1, write_model

# --- what they are trained to -----------------------------------------------------------------------------------------

PAIRS = [(CORPUS[0], CORPUS[3]), (CORPUS[1], CORPUS[4]), (CORPUS[2], CORPUS[5])]
"""In one batch, so that an epoch is one step and no order matters."""
PLAN: dict[str, Any] = {
    "training": {"learning_rate": 3e-3, "epochs": 2, "batch_size": 8, "max_grad_norm": 0.0, "dropout": 0.0}
    | {"schema_in_input": False},
    "schedule": {"rounds": 4, "min_silos": 1},
}
PRIVATE: dict[str, Any] = {
    "privacy": {"level": "record", "nominal_records": 10, "expected_batch_size": 2, "steps": 5},
    "evaluation": {"every": 0, "initial": False, "last": False},
}
OWN = OwnSettings(method="ditto", epochs=3, learning_rate=0.0, ditto_lambda=0.25, adapter_rank=2)
CPU = DeviceSettings(device="cpu", threads=1)


def trainer(own: OwnSettings = OWN, **sections: Any) -> PersonalTrainer:
    bundle = bundle_of(random_model(0), **{**PLAN, **sections})
    return PersonalTrainer(bundle, silo_data(PAIRS, dev=PAIRS[:1]), "clinic", CPU, own)


def written(path: Path, seed: int) -> RoundModel:
    return RoundModel(file=path, manifest=write_model(random_model(seed), path))


def numbers(model: RoundModel) -> np.ndarray:
    return np.fromfile(model.file, dtype="<f4")


def batch_of_pairs(plan_model: PlanModel) -> Batch:
    section = plan_model.bundle.plan.training
    examples = encode_examples(
        plan_model.tokenizer,
        silo_data(PAIRS).train,
        schemas=None,
        max_input_tokens=section.max_input_tokens,
        max_output_tokens=section.max_output_tokens,
        other_views=(),
    )
    return collate(examples, [0, 1, 2], pad=plan_model.t5.config.pad_token_id, device=torch.device("cpu"))


def by_hand(start: RoundModel, towards: RoundModel, *, steps: int, rate: float, pull: float) -> np.ndarray:
    """AdamW on the mean loss of all tokens plus pull/2 ||v - w||^2, by transformers' own loss and torch's optimizer."""
    bundle = bundle_of(random_model(0), **PLAN)
    plan_model = PlanModel(bundle, CPU)
    plan_model.load(towards.file, towards.manifest)
    origin = [parameter.detach().clone() for parameter in plan_model.parameters.tensors]
    plan_model.load(start.file, start.manifest)
    model, parameters = plan_model.t5, plan_model.parameters.tensors
    batch = batch_of_pairs(plan_model)
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
        distance = sum(((v - w) ** 2).sum() for v, w in zip(parameters, origin, strict=True))
        (loss + pull / 2 * distance).backward()
        optimizer.step()
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in parameters])


def test_finetuning_goes_on_from_the_global_model_with_the_loss_alone(tmp_path: Path) -> None:
    newest = written(tmp_path / "global", 7)
    personal = trainer(replace(OWN, method="finetune", learning_rate=1e-3))
    goal = personal.personal(newest.manifest.digest)
    out = tmp_path / "v"
    personal.train(goal, start=newest, towards=newest, out=out, checkpoint=tmp_path / "c")
    expected = by_hand(newest, newest, steps=3, rate=1e-3, pull=0.0)
    np.testing.assert_allclose(np.fromfile(out, dtype="<f4"), expected, atol=2e-5)
    assert not np.allclose(expected, numbers(newest), atol=1e-4)


def test_ditto_goes_on_from_its_own_model_and_is_pulled_to_the_global_one(tmp_path: Path) -> None:
    first, second = written(tmp_path / "first", 7), written(tmp_path / "second", 8)
    personal, outs = trainer(), [tmp_path / "v1", tmp_path / "v2"]
    goal = personal.personal(first.manifest.digest)
    made = personal.train(goal, start=first, towards=first, out=outs[0], checkpoint=tmp_path / "c")
    own = RoundModel(file=outs[0], manifest=made)
    goal = personal.personal(second.manifest.digest)
    personal.train(goal, start=own, towards=second, out=outs[1], checkpoint=tmp_path / "c")
    expected = by_hand(own, second, steps=3, rate=3e-3, pull=0.25)  # the plan's rate
    np.testing.assert_allclose(np.fromfile(outs[1], dtype="<f4"), expected, atol=2e-5)
    unpulled = by_hand(own, second, steps=3, rate=3e-3, pull=0.0)
    assert np.abs(expected - unpulled).max() > 1e-3


def test_heads_trains_the_output_layer_alone(tmp_path: Path) -> None:
    start = RoundModel(file=tmp_path / "w", manifest=write_model(v1_1(7), tmp_path / "w"))
    bundle = bundle_of(v1_1(0), **PLAN)
    own = replace(OWN, method="heads")
    personal = PersonalTrainer(bundle, silo_data(PAIRS, dev=PAIRS[:1]), "clinic", CPU, own)
    for goal in (personal.personal(start.manifest.digest), personal.local()):  # which is trained whole again
        out = tmp_path / goal.method
        personal.train(goal, start=start, towards=start, out=out, checkpoint=tmp_path / "c")
        moved = np.fromfile(out, dtype="<f4") != numbers(start)
        named = {spec.name for spec, begin in bundle.layout.placed() if moved[begin : begin + spec.elements].any()}
        assert named == ({"lm_head.weight"} if goal.method == "heads" else {it.name for it in bundle.layout.tensors})
    with pytest.raises(ConfigurationError, match=r'"heads" trains lm_head.weight.*plan test does not have.*"ditto"'):
        trainer(own).personal(start.manifest.digest)


def test_adapters_train_a_low_rank_change_of_the_projections_alone(tmp_path: Path) -> None:
    """Held against the adapters of PEFT that begin alike, trained by torch's own AdamW and merged by PEFT."""
    start = written(tmp_path / "global", 7)
    personal = trainer(replace(OWN, method="adapters", learning_rate=1e-2))
    layout, goal = personal._bundle.layout, personal.personal(start.manifest.digest)
    outs = [tmp_path / "v", tmp_path / "again"]
    for out in outs:  # the second time in a model that has had changes
        personal.train(goal, start=start, towards=start, out=out, checkpoint=tmp_path / "c")
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert all(parameter.requires_grad for parameter in personal._model.t5.parameters()), "nothing stays frozen"
    before, after = numbers(start), np.fromfile(outs[0], dtype="<f4")
    changes = {
        spec.name: (after[begin : begin + spec.elements] - before[begin : begin + spec.elements]).reshape(spec.shape)
        for spec, begin in layout.placed()
    }
    expected = by_peft(start, seed=_seed(goal), steps=3, rate=1e-2)
    for name, change in changes.items():
        if name not in expected:
            assert not change.any(), name
            continue
        np.testing.assert_allclose(change, expected[name], atol=2e-5)
        sizes = np.linalg.svd(change.astype(np.float64), compute_uv=False)
        assert sizes[0] > 1e-3
        assert sizes[2] < 1e-4 * sizes[0], "rank 2"


def by_peft(start: RoundModel, *, seed: int, steps: int, rate: float) -> dict[str, np.ndarray]:
    """What each projection's weight has gained."""
    bundle = bundle_of(random_model(0), **PLAN)
    plan_model = PlanModel(bundle, CPU)
    plan_model.load(start.file, start.manifest)
    model = plan_model.t5
    with low_rank_changes(model, rank=2, seed=seed) as changes:
        first = [change.detach().clone() for change in changes]
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=["q", "v"], bias="none"), model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    trained = []
    for layer, right in zip(layers.values(), first[::2], strict=True):
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(right)
        trained += [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    batch = batch_of_pairs(plan_model)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss.backward()
        optimizer.step()
    return {f"{name}.weight": layer.get_delta_weight("default").numpy(force=True) for name, layer in layers.items()}


def test_adapters_are_refused_where_there_is_no_room_for_them(tmp_path: Path) -> None:
    start = written(tmp_path / "global", 7)
    personal = trainer(replace(OWN, method="adapters", adapter_rank=200))
    goal = personal.personal(start.manifest.digest)
    with pytest.raises(ConfigurationError, match=r"adapter_rank is 200, and the smallest projection .* or less"):
        personal.train(goal, start=start, towards=start, out=tmp_path / "v", checkpoint=tmp_path / "c")
    whole = [parameter.requires_grad for parameter in personal._model.t5.parameters()]
    assert all(whole), "nothing stays frozen"


def test_without_labels_there_are_no_own_models() -> None:
    without = replace(silo_data([(question, "") for question, _ in PAIRS]), labelled=False)
    with pytest.raises(DataError, match=r'has no labels in plan test.*\[personal\] method = "none"'):
        PersonalTrainer(bundle_of(random_model(0), **PLAN), without, "clinic", CPU, OWN)


def test_the_local_model_makes_as_many_steps_as_the_whole_plan_at_a_rate_for_whole_models(tmp_path: Path) -> None:
    own = trainer()
    assert (own.local().section.epochs, own.local().section.fedprox_mu) == (4 * 2, 0.0)
    overridden = {**PLAN["training"], "overrides": {"clinic": {"epochs": 5}}}
    assert trainer(training=overridden).local().section.epochs == 4 * 5
    noisy = {**PLAN["training"], "epochs": 1, "max_grad_norm": 1.0, "optimizer": "adam_corrected"}
    assert trainer(replace(OWN, learning_rate=0.5)).local().section.learning_rate == 0.5
    of_adapters = trainer(replace(OWN, method="adapters", learning_rate=0.5))
    assert of_adapters.local().section.learning_rate == 3e-3, "the plan's: it is trained whole"
    assert of_adapters.personal(written(tmp_path / "global", 7).manifest.digest).section.learning_rate == 0.5
    private = trainer(**{**PRIVATE, "training": noisy}).local().section
    assert private.epochs == 14  # 4 rounds of 5 steps of 2 records: 40 draws of 3 records
    assert private.optimizer == "adamw"


def test_a_goal_is_another_one_with_everything_that_it_depends_on(tmp_path: Path) -> None:
    model = written(tmp_path / "a", 7).manifest.digest
    goals = [trainer(replace(OWN, **changes)).personal(model) for changes in (
        {}, {"epochs": 4}, {"learning_rate": 0.5}, {"ditto_lambda": 0.5}, {"method": "finetune"},
    )]  # fmt: skip
    goals += [trainer().local(), trainer().personal(written(tmp_path / "b", 8).manifest.digest)]
    goals += [
        PersonalTrainer(bundle_of(random_model(0), **PLAN), silo_data(PAIRS[:2]), "clinic", CPU, OWN).personal(model)
    ]
    assert len({goal.digest for goal in goals}) == len(goals)
    assert trainer().personal(model).digest == goals[0].digest


# --- which one answers ------------------------------------------------------------------------------------------------


def scored(exact: int = 0, executed: int = 0, matches: int = 0, loss: float = 1.0) -> Scored:
    return Scored(
        model="a" * 64,
        examples=10,
        exact_matches=exact,
        executed=executed,
        execution_matches=matches,
        loss_per_token=loss,
    )


@pytest.mark.parametrize(
    ("local", "of_global", "personal", "best"),
    [
        (scored(loss=3.0), scored(loss=2.0), scored(loss=1.5), "personal"),
        (scored(loss=1.0), scored(loss=2.0), scored(loss=1.5), "local"),
        (scored(exact=1, loss=3.0), scored(loss=1.0), scored(loss=1.0), "local"),
        (scored(exact=9), scored(executed=4, matches=1), scored(executed=8, matches=3), "personal"),
        (scored(loss=1.0), scored(loss=1.0), scored(loss=1.0), "global"),
        (scored(loss=1.0), scored(loss=2.0), scored(loss=1.0), "personal"),
    ],
)
def test_results_count_before_texts_and_texts_before_the_loss(
    local: Scored, of_global: Scored, personal: Scored, best: str
) -> None:
    assert OwnScores(scores={"local": local, "global": of_global, "personal": personal}).best == best


def test_without_scores_the_global_model_is_taken() -> None:
    assert OwnScores().best == "global"


SCORED = st.builds(
    scored,
    exact=st.integers(0, 10),
    executed=st.integers(5, 10),
    matches=st.integers(0, 5),
    loss=st.floats(0, 100),
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["local", "global", "personal"]), SCORED, min_size=1))
def test_no_model_is_better_than_the_best(models: Any) -> None:
    best = models[OwnScores(scores=models).best].rank
    assert all(model.rank <= best for model in models.values())


# --- the command ------------------------------------------------------------------------------------------------------


def run(silo: CollectedSilo, *arguments: str) -> Done:
    return run_command(agent_main, *arguments, "--dir", silo.folder.root)


def train(silo: CollectedSilo) -> tuple[dict[str, Any], set[str]]:
    """What the command tells of the models, and which of them it trained."""
    done = run(silo, "personal", "train", "--json")
    assert done.code == 0, done.err
    facts: dict[str, Any] = json.loads(done.out)
    words = (line.split() for line in done.err.splitlines())
    return facts["models"], {line[2] for line in words if line[0] == "training:"}


@pytest.fixture
def silo(tmp_path: Path) -> CollectedSilo:
    made = CollectedSilo(tmp_path)
    made.keep(random_model(7))
    return made


def test_each_model_is_made_once_and_the_three_stand_side_by_side(silo: CollectedSilo) -> None:
    models, made = train(silo)
    assert made == {"personal", "local"}
    assert list(models) == ["local", "global", "personal"]
    assert models["global"]["model"] == silo.newest
    assert {model["questions"] for model in models.values()} == {2}
    assert models["personal"]["loss_per_token"] < models["global"]["loss_per_token"]
    assert train(silo) == (models, set())

    facts = json.loads(run(silo, "status", "--json").out)["own_models"]
    assert (facts["best"], facts["models"]) == ("personal", models)
    status = run(silo, "status").out
    assert f"personal model by finetune: loss per token {models['personal']['loss_per_token']:.4f}" in status

    newest = silo.keep(random_model(8))  # the next round's
    after, made = train(silo)
    assert made == {"personal"}
    assert after["global"]["model"] == newest
    assert after["local"] == models["local"]
    assert after["personal"]["model"] != models["personal"]["model"]
    kept = {path.stem for path in silo.folder.personal.glob("*.model")}
    assert kept == {after["local"]["model"], after["personal"]["model"]}


def test_ditto_is_kept_over_rounds(silo: CollectedSilo) -> None:
    silo.settings('[personal]\nmethod = "ditto"\nepochs = 1\n')
    train(silo)
    silo.keep(random_model(8))
    over_two, _ = train(silo)
    own_scores(silo.folder.personal).change(lambda now: OwnScores())  # as if the first round had never been
    from_second_alone, _ = train(silo)
    assert over_two["personal"]["model"] != from_second_alone["personal"]["model"]


def test_other_questions_and_all_models_are_scored_anew(silo: CollectedSilo) -> None:
    before, _ = train(silo)
    line = (silo.data / "dev.jsonl").read_text().splitlines()[0]
    (silo.data / "dev.jsonl").write_text(f"{line}\n")
    after, made = train(silo)
    assert made == set()
    assert [model["questions"] for model in after.values()] == [1, 1, 1]
    assert [model["model"] for model in after.values()] == [model["model"] for model in before.values()]


def test_a_model_that_was_damaged_is_made_again_the_same(silo: CollectedSilo) -> None:
    before, _ = train(silo)
    (silo.folder.personal / f"{before['local']['model']}.model").write_bytes(b"x")
    (silo.folder.personal / f"{before['personal']['model']}.model").unlink()
    after, made = train(silo)
    assert made == {"local", "personal"}
    assert after == before


def test_without_the_initial_model_there_is_no_local_one(tmp_path: Path) -> None:
    silo = CollectedSilo(tmp_path, initial=5, database=True)  # which the plan's seed does not make
    silo.keep(random_model(7))
    done = run(silo, "personal", "train")
    assert done.code == 0
    assert "no local model: the plan's initial model is not here" in done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ["model", "global", "personal"]
    assert done.out.count(" 0 of 2 ") == 2  # both were asked on the database
    assert "no local model: the plan's initial model is not here" in run(silo, "status").out


def test_the_initial_model_is_kept_when_the_cache_drops_it(tmp_path: Path) -> None:
    silo = CollectedSilo(tmp_path, initial=5)
    own, initial = OwnModels(silo.folder.personal), silo.bundle.plan.initial_model
    assert not own.keep_initial(silo.folder.models, initial)
    assert silo.keep(random_model(5)) == initial
    content = silo.cache.file(initial).read_bytes()
    assert own.keep_initial(silo.folder.models, initial)
    newest = silo.keep(random_model(7))
    silo.keep(random_model(8))
    silo.cache.prune(newest)
    silo.keep(random_model(9))  # would be written over a file that was dropped
    assert not silo.cache.file(initial).exists()
    kept = own.initial(initial, silo.bundle.model_layout)
    assert kept is not None
    assert kept.file.read_bytes() == content
    _, made = train(silo)
    assert made == {"personal", "local"}
    kept.file.write_bytes(bytes(len(content)))
    assert own.initial(initial, silo.bundle.model_layout) is None


def test_under_bfloat16_own_models_are_float32_all_the_same(tmp_path: Path) -> None:
    silo = CollectedSilo(tmp_path, wire={"model": "bfloat16"})
    silo.keep(random_model(7))
    models, made = train(silo)
    assert made == {"personal"}  # the tiny plan's initial model in bfloat16 is nobody's
    assert len(silo.file(models["personal"]["model"])) == silo.bundle.layout.total_bytes  # float32
    again, made = train(silo)
    assert (again, made) == (models, set())


# --- who answers, who asks --------------------------------------------------------------------------------------------


def asked(silo: CollectedSilo, *more: str) -> tuple[str, str]:
    """Which model answered, and what was said beside the answer."""
    done = run(silo, "ask", "how many people live in city 6 ?", "--json", *more)
    return json.loads(done.out)["model"], done.err


def test_the_best_model_answers_and_says_so(silo: CollectedSilo) -> None:
    assert asked(silo)[0] == "global"
    done = run(silo, "ask", "who ?", "--model", "personal")
    done.is_refusal(StateError, "no personal model", "silo-agent personal train")
    train(silo)
    which, said = asked(silo)
    assert which == "personal"
    assert "the personal model answered: the best of local, global, personal on 2 held-out questions" in said
    assert "privacy" not in said
    assert asked(silo, "--model", "global")[0] == "global"
    assert asked(silo, "--model", "local")[0] == "local"
    silo.keep(random_model(8))
    which, said = asked(silo)
    assert which == "global"
    assert "it is newer than the scores" in said
    silo.settings("")
    which, said = asked(silo)
    assert which == "global"
    assert "model answered" not in said


def test_under_privacy_an_answer_of_an_own_model_is_not_to_be_published(tmp_path: Path) -> None:
    silo = CollectedSilo(tmp_path, **{**PRIVATE, "training": {**TRAINING, "dropout": 0.0}})
    silo.keep(random_model(7))
    train(silo)
    _, said = asked(silo, "--model", "personal")
    assert said.count("differential privacy does not cover the personal model") == 1
    assert "publish neither" in said
    assert "differential privacy" not in asked(silo, "--model", "global")[1]


def test_scores_are_metrics_on_loopback_alone() -> None:
    registry = CollectorRegistry()
    metrics = SiloMetrics(registry)
    assert b"lorica_silo_model_score{" not in generate_latest(registry)
    metrics.model_scores(lambda: OwnScores(scores={"local": scored(exact=3, loss=2.5)}).numbers)
    value = registry.get_sample_value
    assert value("lorica_silo_model_score", {"model": "local", "score": "exact_match"}) == 0.3
    assert value("lorica_silo_model_score", {"model": "local", "score": "loss_per_token"}) == 2.5
    parts = scored(exact=3).model_copy(update={"right": {"aggregate": 7, "values": 10}})
    metrics.model_scores(lambda: OwnScores(scores={"local": parts}).numbers)
    assert value("lorica_silo_model_score", {"model": "local", "score": "aggregate"}) == 0.7
    assert "exact match 3 of 10 (aggregate 7, values 10)" in own_models_lines(OwnScores(scores={"local": parts}))[0]
    of_summaries = OwnScores(scores={"local": parts}, score="rouge_l")
    assert "ROUGE-L 3 of 10" in own_models_lines(of_summaries)[0]
    assert "ROUGE-L" in own_models_page(of_summaries).columns
    missing = value("lorica_silo_model_score", {"model": "global", "score": "exact_match"})
    assert missing is not None
    assert math.isnan(missing)
    places = ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "", "0.0.0.0:1", "[::]:1", "10.0.0.1:1", "silo:1"]
    assert [_is_loopback(place) for place in places] == [True] * 4 + [False] * 5


# --- what is refused --------------------------------------------------------------------------------------------------


def test_it_is_refused_by_name(silo: CollectedSilo, tmp_path: Path) -> None:
    with ProcessLock(OwnModels(_made(silo)).lock, "test"):
        run(silo, "personal", "train").is_refusal(Conflict, "training of this silo's own models")
    (silo.data / "dev.jsonl").unlink()
    run(silo, "personal", "train").is_refusal(DataError, "dev.jsonl is missing", "put the dev split there")
    silo.settings("")
    run(silo, "personal", "train").is_refusal(ConfigurationError, '[personal] method is "none"', '"ditto"')
    for text in (
        'method = "lora"',
        "adapter_rank = 0",
        "epochs = 0",
        "ditto_lambda = 0.0",
        "learning_rate = -1.0",
        "lamda = 1.0",
    ):
        silo.settings(f"[personal]\n{text}\n")
        key = text.partition(" ")[0]
        run(silo, "personal", "train").is_refusal(ConfigurationError, f"personal.{key}")
    (tmp_path / "new").mkdir()
    empty = CollectedSilo(tmp_path / "new")
    run(empty, "personal", "train").is_refusal(StateError, "no global model is here yet", "silo-agent start")
    assert not empty.folder.personal.exists()


def _made(silo: CollectedSilo) -> Path:
    OwnModels(silo.folder.personal).make()
    return silo.folder.personal


def test_a_round_comes_first(silo: CollectedSilo) -> None:
    key = RoundKey(federation=FEDERATION, plan=silo.bundle.plan.digest, round=3, attempt=1)
    with silo.journal_open() as journal:
        for activity in Activity:
            journal.record(JournalActivity(activity, key))
            refused = None
            with ProcessLock(silo.folder.lock, "silo agent"):
                done = run(silo, "personal", "train")
                if done.code:
                    done.is_refusal(StateError, f"the agent is at work ({activity.value} round 3", "when it waits")
                    refused = True
            at_rest = activity in (Activity.WAITING, Activity.REFUSING, Activity.FINISHED, Activity.STOPPED)
            assert at_rest is (refused is None)
        journal.record(JournalActivity(Activity.MASKING, key))
    assert run(silo, "personal", "train").code == 0  # the agent was killed then, and is not there


def test_training_gives_way_to_a_round_and_goes_on_after_its_last_epoch(
    silo: CollectedSilo, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, _ = train(silo)
    own_scores(silo.folder.personal).change(lambda now: OwnScores())
    for path in silo.folder.personal.glob("*.model"):
        path.unlink()
    key = RoundKey(federation=FEDERATION, plan=silo.bundle.plan.digest, round=3, attempt=1)
    monkeypatch.setattr("silo_agent.edges.personal.rounds_first.LOOK_EVERY_S", 0.0)
    with silo.journal_open() as journal, ProcessLock(silo.folder.lock, "silo agent"):
        checkpoint = OwnModels(silo.folder.personal).checkpoint("personal")
        fact = journal.fact

        def begins_after_an_epoch(self: object, name: str) -> str | None:
            if name == "activity" and checkpoint.exists():
                return f"training round {key.round}"
            return fact(name)

        monkeypatch.setattr("silo_agent.edges.disk.round_journal.RoundJournal.fact", begins_after_an_epoch)
        done = run(silo, "personal", "train")
        assert "the agent began to work (training round 3)" in done.err
        monkeypatch.undo()
    done = run(silo, "personal", "train", "--json")
    assert "training-resumed: after epoch" in done.err
    assert json.loads(done.out)["models"] == undisturbed


# --- killed, and begun by the agent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ditto", "adapters"])
def test_killed_again_and_again_it_comes_to_the_same_models(silo: CollectedSilo, method: str) -> None:
    silo.settings(f'[personal]\nmethod = "{method}"\nepochs = 3\nadapter_rank = 2\n')
    shutil.copytree(silo.folder.root, silo.folder.root.with_name("undisturbed"))
    done = run_command(agent_main, "personal", "train", "--json", "--dir", silo.folder.root.with_name("undisturbed"))
    undisturbed = json.loads(done.out)["models"]
    kills = 0
    while _killed_at_its_third_replacement(silo):
        kills += 1
        assert kills < 20
    assert kills >= 3
    assert train(silo) == (undisturbed, set())
    assert not [*silo.folder.personal.glob("*.part"), *silo.folder.personal.glob("*.checkpoint")]


def _killed_at_its_third_replacement(silo: CollectedSilo) -> bool:
    """Whether a process that trains was killed before it replaced a third file; otherwise it went to its end."""
    process = os.fork()
    if process == 0:
        os.replace = dying_at(3, os.replace)
        os._exit(run(silo, "personal", "train").code)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


_WAITS = """
import os, pathlib, signal, sys, time
last = pathlib.Path("/proc/self/oom_score_adj")
while os.nice(0) < 19 or last.read_text().strip() != "1000":  # whoever began it makes it the last of all
    time.sleep(0.01)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""


class Kept:
    """What a keeper tells, and its processes, which say that they are there and then wait to be killed."""

    def __init__(self, begun: Path) -> None:
        os.mkfifo(begun)
        self._begun = begun
        self.told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def begun(self) -> psutil.Process:
        async with asyncio.timeout(30):
            return psutil.Process(int(await asyncio.to_thread(self._begun.read_text)))


@asynccontextmanager
async def keeping(
    silo: CollectedSilo, monkeypatch: pytest.MonkeyPatch, method: Any
) -> AsyncIterator[tuple[Kept, Callable[[Activity], None]]]:
    """With what an agent says that it is at."""
    begun = silo.folder.root / "begun"
    kept = Kept(begun)
    command = [sys.executable, "-I", "-c", _WAITS, str(begun)]
    monkeypatch.setattr(personal_keeper, "training_command", lambda folder: command)
    with silo.journal_open() as journal:
        keeper = personal_keeper.PersonalKeeper(
            silo.folder,
            journal,
            settings=PersonalSection(method=method),
            told=lambda event, detail: kept.told.put_nowait((event, detail)),
            quiet_s=0.0,
        )
        running = asyncio.create_task(keeper.run())
        yield kept, lambda activity: keeper.activity(JournalActivity(activity))
        running.cancel()
        await asyncio.wait([running])


async def test_training_begins_when_the_agent_rests_and_is_killed_when_it_works(
    silo: CollectedSilo, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keeping(silo, monkeypatch, "ditto") as (kept, at):
        at(Activity.WAITING)
        first = await kept.begun()
        assert first.nice() == 19
        at(Activity.FETCHING)
        await asyncio.to_thread(first.wait, 30)
        at(Activity.TRAINING)
        at(Activity.FINISHED)
        second = await kept.begun()
        assert second.pid != first.pid
    await asyncio.to_thread(second.wait, 30)  # it ends with the agent
    assert kept.told.empty()


async def test_what_ends_by_itself_is_told(silo: CollectedSilo, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(silo, monkeypatch, "finetune") as (kept, at):
        at(Activity.FINISHED)
        (await kept.begun()).terminate()
        async with asyncio.timeout(30):
            assert await kept.told.get() == ("own-models-not-trained", "exit code -15")


def test_what_is_complete_is_not_begun_again_and_finetuning_waits_for_the_end_of_a_plan(silo: CollectedSilo) -> None:
    def begins(activity: Activity, **settings: Any) -> bool:
        with silo.journal_open() as journal:
            keeper = personal_keeper.PersonalKeeper(
                silo.folder,
                journal,
                settings=PersonalSection(**settings),
                told=lambda event, detail: None,
                quiet_s=0.0,
            )
            keeper.activity(JournalActivity(activity))
            return keeper.may_train

    for method, rests in (
        ("finetune", {Activity.FINISHED}),
        ("ditto", {Activity.FINISHED, Activity.WAITING}),
    ):
        assert {activity for activity in Activity if begins(activity, method=method)} == rests
    train(silo)
    assert not begins(Activity.FINISHED, method="finetune")
    assert begins(Activity.FINISHED, method="finetune", epochs=4)  # as its people said since
    silo.keep(random_model(8))
    assert begins(Activity.FINISHED, method="finetune")


@pytest.mark.parametrize("task", [WIKISQL, TEXT_TO_TEXT.by("bleu")], ids=["wikisql", "text-to-text"])
def test_the_parts_of_every_task_can_be_kept_and_shown(task: Task, tmp_path: Path) -> None:
    right = dict.fromkeys(task.metrics, 2.5)
    record = answers_right(tmp_path / "answers-right.json")
    record.change(lambda _: AnswersRight(plan="a" * 64, model="b" * 64, questions=10, right=right))
    known = record.read().of_plan("a" * 64)
    assert known.shares == dict.fromkeys(task.metrics, 0.25)
    assert known.line.startswith(f"right of 10 answers: {task.metrics[0]} 2.5, ")
    assert record.read().of_plan("c" * 64) == AnswersRight()
    assert set(task.metrics) <= set(PARTS)
    evaluation = Evaluation(
        split="dev", examples=10, exact_matches=2, executed=0, execution_matches=0, loss_per_token=1.0, seconds=0.0
    )
    kept = Scored.of(Digest("a" * 64), evaluation, right, method="", goal=None)
    assert kept.numbers.items() >= dict.fromkeys(task.metrics, 0.25).items()
    assert set(kept.numbers) <= set(MODEL_SCORES)
