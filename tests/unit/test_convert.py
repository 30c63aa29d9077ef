"""`lorica convert`: each member of the family answers in CTranslate2 as in PyTorch, and what does not is not written."""

import json
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lorica import convert as module
from lorica.cli import app
from lorica.convert import convert
from lorica_security.errors import ConfigurationError, IntegrityError
from silo_wire.model_folders.t5_config import model_class, t5_config
from tests.support.family import MEMBERS, Member

QUESTION = "which rivers are longer than 300 miles ?"
PARTS = {
    "config.json": ("model_type", "fish_omni"),
    "tokenizer_config.json": ("auto_map", {"AutoTokenizer": ["evil.Tokenizer", None]}),
}
"""The library has a way of its own for the first, and Transformers runs the second's code if it is told to."""
each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


def loaded(folder: Path) -> Any:
    config = t5_config((folder / "config.json").read_bytes())
    return model_class(config).from_pretrained(folder, config=config).eval()


def written(member: Member, folder: Path) -> Path:
    member.write(folder / "exported")
    return folder / "exported"


@each_member
def test_a_converted_model_answers_a_question_that_was_not_tried(member: Member, tmp_path: Path) -> None:
    done = convert(written(member, tmp_path), tmp_path / "new")
    assert done.apart < module.MOST_APART
    assert done.kept_apart == done.apart
    assert done.same == done.tried > 0, "greedy answers are those of PyTorch"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    translator = ctranslate2.Translator(str(tmp_path / "new"), device="cpu")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(QUESTION).input_ids)
    beams = translator.translate_batch([tokens], beam_size=3, max_decoding_length=10, length_penalty=0.0)
    with torch.inference_mode():
        theirs = loaded(tmp_path / "exported").generate(
            torch.tensor([tokenizer(QUESTION).input_ids]), num_beams=3, max_new_tokens=10, length_penalty=0.0
        )
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(beams[0].hypotheses[0])) == tokenizer.decode(
        theirs[0][1:], skip_special_tokens=False
    ).removesuffix("</s>"), "by beams, where the scale of logits counts"


def test_whole_numbers_are_told_with_what_they_cost(tmp_path: Path) -> None:
    exported = written(MEMBERS[0], tmp_path)
    ran = CliRunner().invoke(app, ["convert", str(exported), str(tmp_path / "new"), "--numbers", "int8"])
    assert ran.exit_code == 0, ran.output
    assert "parameters in int8" in ran.output
    assert "tokens of greedy answers are the same" in ran.output
    small = (tmp_path / "new" / "model.bin").stat().st_size
    convert(exported, tmp_path / "float32")
    assert small < (tmp_path / "float32" / "model.bin").stat().st_size / 2
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        convert(exported, tmp_path / "new")
    with pytest.raises(ConfigurationError, match="use float32, float16, bfloat16, int8, int16"):
        CliRunner().invoke(
            app, ["convert", str(exported), str(tmp_path / "b"), "--numbers", "int4"], catch_exceptions=False
        )


@pytest.mark.parametrize("name", PARTS)
def test_attack_a_folder_that_is_no_plain_t5_is_refused_before_a_library_sees_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = written(MEMBERS[0], tmp_path)
    key, value = PARTS[name]
    (exported / name).write_text(json.dumps({**json.loads((exported / name).read_text()), key: value}))
    monkeypatch.setattr(module, "_loaded", lambda *_: pytest.fail("it was handed to a library"))
    with pytest.raises(ConfigurationError, match=key):
        convert(exported, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_that_answers_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library's own converter is with what Transformers 5 says of v1.1."""
    exported = written(next(it for it in MEMBERS if it.name == "T5 v1.1"), tmp_path)
    monkeypatch.setattr(module, "scales_output", lambda _config: True)
    with pytest.raises(IntegrityError, match="nats away from PyTorch's"):
        convert(exported, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported"], "no half of it stays"


def test_attack_parameters_that_are_others_once_they_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below float32 the library reads them a second time, and what it made of them cannot be held against PyTorch's."""
    exported = written(MEMBERS[0], tmp_path)
    weights, made = exported / "model.safetensors", module._write

    def swapped(safe: Path, folder: Path, model: Any, numbers: module.Numbers) -> None:
        if numbers is module.Numbers.INT8:
            save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, tmp_path / "other")
            (tmp_path / "other").replace(weights)
        made(safe, folder, model, numbers)

    monkeypatch.setattr(module, "_write", swapped)
    with pytest.raises(IntegrityError, match="was changed while it was converted"):
        convert(exported, tmp_path / "new", module.Numbers.INT8)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attack_a_model_whose_answers_are_no_numbers_is_not_written(value: float, tmp_path: Path) -> None:
    exported = written(MEMBERS[0], tmp_path)
    weights = load_file(exported / "model.safetensors")
    weights["shared.weight"][5] = value
    save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match="inf nats away"):
        convert(exported, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_that_answers_with_nothing_is_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = written(MEMBERS[0], tmp_path)
    monkeypatch.setattr(module, "TRIED_TOKENS", 1)
    weights = load_file(exported / "model.safetensors")
    weights["shared.weight"][1] = 100 * weights["shared.weight"].abs().max()
    weights["decoder.final_layer_norm.weight"] = weights["decoder.final_layer_norm.weight"].abs()
    save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
    assert 0 < convert(exported, tmp_path / "new").apart < module.MOST_APART
