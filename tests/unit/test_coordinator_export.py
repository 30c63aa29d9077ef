"""An exported model is a Hugging Face folder that gives the same answers."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from lorica_coordinator.edges.models.export import export_model
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from silo_wire.canonical import digest_of
from silo_wire.plans.plan import PlanBundle
from tests.support.coordinator_edges import A, B, Workplace, make_plan, random_vector, stored_vector


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanBundle]:
    state = tmp_path_factory.mktemp("state")
    return state, make_plan(state)


@pytest.fixture
def place(made: tuple[Path, PlanBundle], tmp_path: Path) -> Workplace:
    shutil.copytree(made[0] / "plans", tmp_path / "state" / "plans")
    return Workplace.at(tmp_path / "state", made[1])


def global_model(place: Workplace) -> str:
    updates = [
        place.send(place.key(), silo, random_vector(place.layout, seed, scale=0.05)) for seed, silo in enumerate((A, B))
    ]
    return place.aggregator().aggregate(place.key(), place.models.initial(), updates).model


def test_exported_folder_gives_the_same_answers(place: Workplace, tmp_path: Path) -> None:
    model = global_model(place)
    export_model(place.bundle, place.models, model, tmp_path / "out" / "model", round_number=1)
    folder = tmp_path / "out" / "model"
    loaded, report = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    # The same model put together by hand: parameters straight from the flat vector into transformers' own class.
    by_hand = T5ForConditionalGeneration(T5Config.from_json_file(place.state / "plans" / "first" / "config.json"))
    named = dict(by_hand.named_parameters(remove_duplicate=False))
    vector = torch.from_numpy(stored_vector(place.models, model).copy())
    with torch.no_grad():
        for tensor, begin in place.layout.placed():
            named[tensor.name].copy_(vector[begin : begin + tensor.elements].view(tensor.shape))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["how many patients are there ?", "list all"], return_tensors="pt", padding=True)
    answers = [one.eval().generate(**batch, max_new_tokens=20, num_beams=2) for one in (loaded, by_hand)]
    assert torch.equal(*answers)
    assert sum(parameter.numel() for parameter in loaded.parameters()) == place.layout.parameters


def test_model_in_bfloat16_is_exported_as_it_was_handed_out(tmp_path: Path) -> None:
    bundle = make_plan(tmp_path / "state", overrides={"wire.model": "bfloat16", "wire.update": "bfloat16"})
    place = Workplace.at(tmp_path / "state", bundle)
    model = global_model(place)
    export_model(bundle, place.models, model, tmp_path / "out", round_number=1)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto")
    named = dict(loaded.named_parameters(remove_duplicate=False))
    vector = torch.from_numpy(stored_vector(place.models, model))
    for tensor, begin in place.layout.placed():
        parameter = named[tensor.name]
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.float().reshape(-1), vector[begin : begin + tensor.elements])


def test_exported_folder_holds_data_and_a_card(place: Workplace, tmp_path: Path) -> None:
    model = global_model(place)
    (tmp_path / "out").mkdir()
    export_model(place.bundle, place.models, model, tmp_path / "out", round_number=3)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert model in card
    assert place.bundle.plan.digest in card
    assert "| round | 3 of 30 |" in card
    assert "{question} ; structured knowledge: {schema}" in card
    assert {path.name for path in tmp_path.iterdir()} == {"out", "state"}


def test_folder_that_holds_anything_is_refused(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for target in ("out", "file"):
        with pytest.raises(ConfigurationError, match="is not an empty folder"):
            export_model(place.bundle, place.models, place.models.initial(), tmp_path / target, round_number=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_damaged_model_is_not_exported(place: Workplace, tmp_path: Path) -> None:
    model = place.models.initial()
    path = next((place.state / "models").rglob(f"{model}.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match=re.escape(str(path))):
        export_model(place.bundle, place.models, model, tmp_path / "out", round_number=0)
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


def test_unknown_model_is_not_exported(place: Workplace, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not stored"):
        export_model(place.bundle, place.models, digest_of(b"another"), tmp_path / "out", round_number=0)
