"""Adapters: what PEFT adds is what the layout says, alone trained and sent, and merged it computes the same."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

from lorica_coordinator.edges.models.export import export_model
from lorica_coordinator.edges.sums.plan_parts import base_store
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.vectors.model_file import BASE_FILE, MODEL_FILE
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StateError
from silo_agent.service.ports import RoundModel
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.model import add_adapters, bind, build_model, layout_of
from silo_agent.training.personal_trainer import OwnSettings, PersonalTrainer
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.plans.adapters import AdaptersSection, adapted, adapter_layout, adapter_names
from silo_wire.plans.plan import Plan, PlanBundle
from tests.support.coordinator_edges import A, B, Workplace, content_of, make_plan, random_vector, stored_vector
from tests.support.tiny_t5 import SCHEMA, random_model, v1_1

CPU = torch.device("cpu")
RANK = 4
LORA: dict[str, Any] = {"adapters.rank": RANK, "adapters.alpha": 8, "adapters.layers": ["q", "v", "wo"]}
PAIRS = (
    ("how many people live in paris ?", 'SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = "paris" ;'),
    ("which rivers are longer than 300 miles ?", "SELECT NAME FROM RIVER WHERE LENGTH > 300 ;"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanBundle]:
    state = tmp_path_factory.mktemp("state")
    return state, make_plan(state, overrides=LORA)


@pytest.fixture
def place(made: tuple[Path, PlanBundle], tmp_path: Path) -> Workplace:
    shutil.copytree(made[0] / "plans", tmp_path / "state" / "plans")
    return Workplace.at(tmp_path / "state", made[1])


def data() -> SiloData:
    def examples(split: str) -> tuple[Example, ...]:
        return tuple(Example(f"{split}-{i}", question, query, "places") for i, (question, query) in enumerate(PAIRS))

    return SiloData(train=examples("train"), dev=examples("dev"), test=(), schema=SCHEMA, database=None, bad_lines=())


def base_of(place: Workplace, tmp_path: Path) -> RoundModel:
    """The base as an agent has it on disk."""
    store = base_store(place.state, place.bundle)
    assert store is not None
    vector = store.vector(store.initial())
    file = tmp_path / "base.model"
    file.write_bytes(content_of(vector))
    return RoundModel(file=file, manifest=vector.manifest)


def handed_out(place: Workplace, model: Digest, file: Path) -> RoundModel:
    vector = place.models.vector(model)
    file.write_bytes(content_of(vector))
    return RoundModel(file=file, manifest=vector.manifest)


def trained_into(place: Workplace) -> Digest:
    updates = [
        place.send(place.key(), silo, random_vector(place.layout, seed, scale=0.05)) for seed, silo in enumerate((A, B))
    ]
    return place.aggregator().aggregate(place.key(), place.models.initial(), updates).model


# --- layouts


@pytest.mark.parametrize("source", [random_model, v1_1])
def test_what_peft_adds_is_what_the_layout_says(source: Any) -> None:
    bundle_model = source()
    layers = ["q", "k", "v", "o", "wo", *(["wi_0", "wi_1"] if source is v1_1 else ["wi"])]
    section = AdaptersSection.model_validate({"rank": RANK, "layers": layers})
    layout = adapter_layout(layout_of(bundle_model), section)
    adapters, frozen = add_adapters(bundle_model, section, layout)
    assert adapters.specs == layout.tensors
    assert frozen.tensors == ()
    trained = [parameter for parameter in bundle_model.parameters() if parameter.requires_grad]
    assert {id(one) for one in trained} == {id(one) for one in adapters.tensors}
    assert layout.parameters == sum(parameter.numel() for parameter in trained)


def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"layers names 'wi_0'.*T5 has wi"):
        make_plan(tmp_path, overrides={"adapters.rank": 2, "adapters.layers": ["wi_0"]})
    assert not list((tmp_path / "plans").iterdir())


def test_a_rank_that_a_layer_has_no_room_for_is_refused(tmp_path: Path) -> None:
    section = AdaptersSection(layers=["q", "wo"])
    smallest = min(adapted(make_plan(tmp_path).layout, section), key=lambda weight: min(weight.shape))
    most, layers = min(smallest.shape), {"adapters.layers": section.layers}
    said = re.escape(f"rank = {most + 1} is more than {smallest.name} of shape {smallest.shape} has") + ".* at most "
    with pytest.raises(ConfigurationError, match=f"{said}{most}, or leave that layer out"):
        make_plan(tmp_path, "second", overrides={"adapters.rank": most + 1, **layers})
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["first"]
    make_plan(tmp_path, "second", overrides={"adapters.rank": most, **layers})


@pytest.mark.parametrize("train", ["b", "alternate", "reproject"])
def test_a_way_to_train_adapters_that_there_are_not_is_refused(train: str, tmp_path: Path) -> None:
    said = rf'\[adapters\] train = "{train}" .* rank = 0 the plan has none: set rank above 0, or leave train out'
    with pytest.raises(ConfigurationError, match=said):
        make_plan(tmp_path, overrides={"adapters.train": train})
    make_plan(tmp_path, overrides={"adapters.train": "both"})


@pytest.mark.parametrize(("key", "value"), [("alpha", 8), ("layers", ["q"])])
def test_what_says_how_adapters_are_made_is_refused_without_a_rank(key: str, value: object, tmp_path: Path) -> None:
    """When a plan is made; one that was made before there was this refusal stays valid, with its digest."""
    said = rf"plan first: \[adapters\] {key} = .* rank = 0 the plan has none: set rank above 0, or leave {key} out"
    with pytest.raises(ConfigurationError, match=said):
        make_plan(tmp_path, overrides={f"adapters.{key}": value})
    bundle = make_plan(tmp_path, overrides={"adapters.alpha": 16, "adapters.layers": ["q", "v"]})
    file = tmp_path / "plans" / "first" / "plan.toml"
    text = file.read_text()
    before = {"alpha": "alpha = 16", "layers": 'layers = ["q", "v"]'}[key]
    assert before in text
    file.write_text(text.replace(before, f"{key} = {json.dumps(value)}"))
    again = compile_plan(file.parent)
    assert again.plan.digest != bundle.plan.digest
    assert getattr(again.plan.adapters, key) == value


def test_a_layer_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="names a layer twice"):
        make_plan(tmp_path, overrides={"adapters.rank": 2, "adapters.layers": ["q", "q"]})


def test_a_layout_that_is_not_that_of_the_adapters_is_refused(made: tuple[Path, PlanBundle]) -> None:
    bundle = made[1]
    other = bundle.plan.model_copy(update={"adapters": AdaptersSection(rank=RANK + 1, layers=["q", "v", "wo"])})
    with pytest.raises(MalformedMessage, match="not that of the"):
        PlanBundle(other, bundle.files)


def test_a_rank_without_a_base_is_refused(made: tuple[Path, PlanBundle], tmp_path: Path) -> None:
    plain = make_plan(tmp_path)
    text = (tmp_path / "plans" / "first" / "plan.toml").read_text()
    (tmp_path / "plans" / "first" / "plan.toml").write_text(text.replace("rank = 0", "rank = 4"))
    assert plain.base_layout is None
    with pytest.raises(ConfigurationError, match=r"lacks base.*rank = 4"):
        compile_plan(tmp_path / "plans" / "first")


def test_a_base_that_was_changed_is_refused(place: Workplace) -> None:
    file = place.state / "plans" / "first" / BASE_FILE
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(IntegrityError, match=BASE_FILE):
        compile_plan(file.parent)


def test_adapters_begin_as_no_change_at_all(place: Workplace, tmp_path: Path) -> None:
    model = handed_out(place, place.models.initial(), tmp_path / "model")
    bundle, base = place.bundle, base_of(place, tmp_path)
    trainer = SiloTrainer(bundle, data(), A, DeviceSettings(device="cpu"), base=base)
    folder = place.state / "plans" / "first"
    plain_folder = tmp_path / "plain"
    shutil.copytree(folder, plain_folder)
    (plain_folder / BASE_FILE).rename(plain_folder / MODEL_FILE)
    plain = T5ForConditionalGeneration.from_pretrained(plain_folder).eval()
    trainer._model.load(model.file, model.manifest)
    trainer._model.t5.eval()
    ids = torch.arange(3, 12)[None]
    labels = torch.arange(5, 9)[None]
    with torch.no_grad():
        logits = [one(input_ids=ids, labels=labels).logits for one in (trainer._model.t5, plain)]
    assert torch.equal(*logits)


# --- training and what travels


def test_a_personal_model_under_adapters_is_adapters_of_the_same_base(place: Workplace, tmp_path: Path) -> None:
    newest = handed_out(place, place.models.initial(), tmp_path / "model")
    own = OwnSettings(method="ditto", epochs=2, learning_rate=1e-2, ditto_lambda=0.1, adapter_rank=8)
    base, device = base_of(place, tmp_path), DeviceSettings(device="cpu", threads=1)
    personal = PersonalTrainer(place.bundle, data(), A, device, own, base=base)
    goal = personal.personal(newest.manifest.digest)
    out = tmp_path / "own"
    manifest = personal.train(goal, start=newest, towards=newest, out=out, checkpoint=tmp_path / "checkpoint")
    manifest.check_layout(place.bundle.layout)  # of the adapters
    scores = [
        personal.evaluate(model, same_result=None).loss_per_token
        for model in (newest, RoundModel(file=out, manifest=manifest))
    ]
    assert scores[1] < scores[0]
    second = PersonalTrainer(place.bundle, data(), A, device, replace(own, method="adapters"), base=base)
    with pytest.raises(ConfigurationError, match=r'"adapters" and plan .* trains adapters itself.*"finetune"'):
        second.personal(newest.manifest.digest)


def test_ditto_is_refused_where_each_round_has_axes_of_its_own(place: Workplace, tmp_path: Path) -> None:
    """`"finetune"`, which begins anew with each global model, goes on."""
    values = place.bundle.plan.model_dump(mode="json")
    values["adapters"] = {**values["adapters"], "train": "reproject"}
    values["aggregation"] = {**values["aggregation"], "momentum": 0.0}
    bundle = PlanBundle(Plan.model_validate(values), place.bundle.files)
    newest = handed_out(place, place.models.initial(), tmp_path / "model")
    own = OwnSettings(method="ditto", epochs=2, learning_rate=1e-2, ditto_lambda=0.1, adapter_rank=8)
    base, device = base_of(place, tmp_path), DeviceSettings(device="cpu", threads=1)
    with pytest.raises(
        ConfigurationError, match=r'"ditto" .* train = "reproject".* axes in each round: take "finetune"'
    ):
        PersonalTrainer(bundle, data(), A, device, own, base=base).personal(newest.manifest.digest)
    personal = PersonalTrainer(bundle, data(), A, device, replace(own, method="finetune"), base=base)
    goal, out = personal.personal(newest.manifest.digest), tmp_path / "own"
    made = personal.train(goal, start=newest, towards=newest, out=out, checkpoint=tmp_path / "checkpoint")
    scores = [
        personal.evaluate(model, same_result=None).loss_per_token
        for model in (newest, RoundModel(file=out, manifest=made))
    ]
    assert scores[1] < scores[0]


def test_adapters_alone_are_trained_and_sent(place: Workplace, tmp_path: Path) -> None:
    model = handed_out(place, place.models.initial(), tmp_path / "model")
    trainer = SiloTrainer(
        place.bundle, data(), A, DeviceSettings(device="cpu", threads=1), base=base_of(place, tmp_path)
    )
    frozen = {
        name: parameter.clone()
        for name, parameter in trainer._model.t5.named_parameters()
        if not parameter.requires_grad
    }
    update = trainer.train(round_number=1, model_path=model.file, model=model.manifest, update_path=tmp_path / "update")
    assert update.manifest.total_bytes == place.bundle.layout.parameters * 4
    delta = np.fromfile(tmp_path / "update", dtype="<f4")
    assert len(delta) == place.bundle.plan.model.parameters
    assert update.delta_norm > 0
    after = dict(trainer._model.t5.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert place.bundle.layout.parameters * 10 < place.bundle.whole_layout.parameters * 3


def test_a_plan_with_adapters_and_no_base_is_not_trained(place: Workplace) -> None:
    with pytest.raises(StateError, match="not here"):
        SiloTrainer(place.bundle, data(), A, DeviceSettings(device="cpu"))


def test_a_damaged_base_is_not_trained_on(place: Workplace, tmp_path: Path) -> None:
    base = base_of(place, tmp_path)
    raw = bytearray(base.file.read_bytes())
    raw[100] ^= 1
    base.file.write_bytes(raw)
    with pytest.raises(IntegrityError):
        SiloTrainer(place.bundle, data(), A, DeviceSettings(device="cpu"), base=base)


# --- the merged export


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_the_merged_export_computes_what_base_and_adapters_do(wire: str, tmp_path: Path) -> None:
    bundle = make_plan(tmp_path / "state", overrides={**LORA, "wire.model": wire, "wire.update": wire})
    place = Workplace.at(tmp_path / "state", bundle)
    model = trained_into(place)
    assert np.abs(stored_vector(place.models, model)).max() > 0
    base = base_store(place.state, bundle)
    assert base is not None
    base.initial()
    export_model(bundle, place.models, model, tmp_path / "out", base=base, round_number=1)
    merged, report = T5ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trainer = SiloTrainer(bundle, data(), A, DeviceSettings(device="cpu"), base=base_of(place, tmp_path))
    round_model = handed_out(place, model, tmp_path / "model")
    trainer._model.load(round_model.file, round_model.manifest)
    ids, labels = torch.arange(3, 12)[None], torch.arange(5, 9)[None]
    with torch.no_grad():
        both = [one.eval()(input_ids=ids, labels=labels).logits for one in (merged, trainer._model.t5)]
        first = SiloTrainer(bundle, data(), A, DeviceSettings(device="cpu"), base=base_of(place, tmp_path))
        begun = handed_out(place, place.models.initial(), tmp_path / "begun")
        first._model.load(begun.file, begun.manifest)
        unchanged = first._model.t5.eval()(input_ids=ids, labels=labels).logits
    assert torch.allclose(both[0], both[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(both[0], unchanged, rtol=1e-2, atol=1e-2)
    assert {path.name for path in (tmp_path / "out").iterdir()}.isdisjoint({"layout.json", "base_layout.json"})
    assert "adapters of rank 4" in (tmp_path / "out" / "README.md").read_text()


def test_the_base_survives_when_old_models_are_let_go(place: Workplace, tmp_path: Path) -> None:
    model = trained_into(place)
    base = base_store(place.state, place.bundle)
    assert base is not None
    digest = base.initial()
    place.models.retain({model})
    shutil.rmtree(place.state / "plans")
    again = base_store(place.state, place.bundle)
    assert again is not None
    assert again.manifest(digest).digest == place.bundle.plan.model.base


def test_names_of_adapters() -> None:
    assert adapter_names("encoder.block.0.layer.0.SelfAttention.q.weight") == (
        "encoder.block.0.layer.0.SelfAttention.q.lora_A.weight",
        "encoder.block.0.layer.0.SelfAttention.q.lora_B.weight",
    )


def test_base_and_adapters_have_digests_of_their_own(made: tuple[Path, PlanBundle]) -> None:
    bundle = made[1]
    assert bundle.base_layout is not None
    model = build_model(bundle.files, bundle.base_layout, device=CPU)
    assert bind(model, bundle.base_layout).elements == bundle.base_layout.parameters
    zeros = manifest_of(bundle.layout, iter([bytes(bundle.layout.total_bytes)]))
    assert bundle.plan.model.initial != zeros.digest
    assert bundle.plan.model.base != bundle.plan.model.initial
