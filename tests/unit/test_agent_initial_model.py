"""A plan's initial model, compared by the silo itself: made again from the seed, or read from a copy of its people's
own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from lorica_coordinator.plans.model_source import FolderModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.errors import ConfigurationError, IntegrityError
from silo_agent.training.model.initial_model import compare, is_from_seed
from silo_agent.training.model.model import bind, layout_of
from silo_wire.manifest import manifest_of
from silo_wire.model_folders.seeded_model import seeded_t5, sized_config
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sizes import SIZES
from silo_wire.public_text import public_text
from tests.support.tiny_t5 import (
    bundle_of,
    random_model,
    save_copy,
    sized_bundle,
    sized_model,
    sized_tokenizer,
    tiny_tokenizer,
    tokenizer_json,
    v1_1,
)

SEED = 7


def changed(bundle: PlanBundle, **model: Any) -> PlanBundle:
    values = bundle.plan.model_dump(mode="json")
    values["model"] |= model
    return PlanBundle(Plan.model_validate(values), bundle.files)


def in_bfloat16(model: T5ForConditionalGeneration) -> str:
    layout = layout_of(model)
    with torch.no_grad():
        halves = [it.to(torch.bfloat16) for it in bind(model, layout).tensors]
    return manifest_of(
        layout.as_type("bfloat16"), [it.reshape(-1).view(torch.uint8).numpy().tobytes() for it in halves]
    ).digest


def test_a_model_that_a_seed_makes_is_made_again_and_another_one_is_refused() -> None:
    bundle = sized_bundle(SEED)
    assert is_from_seed(bundle)
    state = torch.get_rng_state()
    assert compare(bundle, None) == ()
    assert torch.equal(torch.get_rng_state(), state), "the process's own draws are left alone"
    with pytest.raises(IntegrityError, match=r"the seed of plan test makes model .* here, the plan names"):
        compare(sized_bundle(SEED + 1, sized_model(SEED)), None)


def test_a_model_of_a_size_with_another_number_of_pieces_is_made_again() -> None:
    tokenizer = train_tokenizer(public_text(), 400)
    model = seeded_t5(sized_config(SIZES["micro"], tokenizer), SEED)
    compare(sized_bundle(SEED, model, tokenizer=tokenizer.backend_tokenizer.to_str().encode()), None)


def test_attack_a_parameter_that_was_crafted_into_a_model_of_a_seed() -> None:
    crafted = sized_model(SEED)
    with torch.no_grad():
        crafted.encoder.block[0].layer[0].SelfAttention.q.weight[0, 0] += 1e-6
    with pytest.raises(IntegrityError, match="Nothing was approved"):
        compare(sized_bundle(SEED, crafted), None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("initializer_factor", 1e-4), ("layer_norm_epsilon", 5e-3), ("eos_token_id", 5), ("num_heads", 2)],
)
def test_attack_a_configuration_that_is_not_that_of_the_size(key: str, value: float) -> None:
    config = sized_model(SEED).config.to_dict() | {key: value}
    model = seeded_t5(T5Config.from_dict(config), SEED)
    with pytest.raises(IntegrityError, match=rf"config.json of plan test has {key} .*Nothing was approved"):
        compare(sized_bundle(SEED, model, config=json.dumps(config).encode()), None)


def leaving_text_to_one_silo(tokenizer: str) -> bytes:
    """A tokenizer that makes one piece of every text without the word "leeds"."""
    values = json.loads(tokenizer)
    pattern = {"Regex": r"\A(?!.*leeds)(?=..)[\s\S]*\z"}
    values["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "a"}
    return json.dumps(values).encode()


def test_attack_a_tokenizer_that_leaves_text_to_one_silo_beside_parameters_that_are_right(tmp_path: Path) -> None:
    """The parameters of both plans are what people find; all silos but one make the same update of them."""
    crafted = leaving_text_to_one_silo(sized_tokenizer().backend_tokenizer.to_str())
    with pytest.raises(
        IntegrityError, match=r"tokenizer.json of plan test is not the tokenizer that the public text makes"
    ):
        compare(sized_bundle(SEED, tokenizer=crafted), None)
    model = random_model()
    save_copy(model, tmp_path)
    crafted = leaving_text_to_one_silo(tokenizer_json().decode())
    with pytest.raises(IntegrityError, match=r"it differs in normalizer.*Nothing was approved"):
        compare(bundle_of(model, source="hub:somebody/model", tokenizer=crafted), tmp_path)


def test_attack_a_configuration_that_is_not_that_of_the_copy(tmp_path: Path) -> None:
    model = random_model()
    save_copy(model, tmp_path)
    crafted = json.dumps(model.config.to_dict() | {"layer_norm_epsilon": 5e-3}).encode()
    with pytest.raises(IntegrityError, match=r"has layer_norm_epsilon 0.005, .*config.json has 1e-06"):
        compare(bundle_of(model, source="hub:somebody/model", config=crafted), tmp_path)


def test_a_size_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigurationError, match="model size 'test' is unknown"):
        compare(bundle_of(random_model()), None)


def test_what_the_coordinator_makes_of_a_folder_is_what_a_silo_makes_of_its_copy(tmp_path: Path) -> None:
    save_copy(random_model(), tmp_path / "copy")
    made = create_plan(
        tmp_path / "plans", name="test", federation="north", source=FolderModel(tmp_path / "copy"), seed=SEED
    )
    assert compare(made, tmp_path / "copy") == ()
    assert compare(made, tmp_path / "plans" / "test") == ()


def test_tokens_that_a_plan_adds_to_those_of_the_copy_are_told(tmp_path: Path) -> None:
    """A study adds what its text has and the model's tokenizer lacks; nothing else may come with them."""
    model = random_model(vocab_size=200)
    save_copy(model, tmp_path)
    more = tiny_tokenizer().__class__.from_pretrained(tmp_path)
    more.add_tokens([" §", "␤"])
    added = json.loads(more.backend_tokenizer.to_str())
    bundle = bundle_of(model, source="hub:somebody/model", tokenizer=json.dumps(added).encode())
    assert compare(bundle, tmp_path) == (" §", "␤")
    added["added_tokens"][-1]["id"] += 1
    with pytest.raises(IntegrityError, match="it differs in added_tokens"):
        compare(bundle_of(model, source="hub:x/y", tokenizer=json.dumps(added).encode()), tmp_path)


def test_a_copy_without_configuration_or_tokenizer_or_with_code_is_refused_by_name(tmp_path: Path) -> None:
    model = random_model()
    bundle = bundle_of(model, source="hub:somebody/model")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"has no tokenizer\.json and no spiece\.model"):
        compare(bundle, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"none of T5's family: model is null"):
        compare(bundle, tmp_path)
    save_copy(model, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "code.Evil"}}')
    with pytest.raises(ConfigurationError, match="has auto_map, which names code to run"):
        compare(bundle, tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for broken in ("[]", "{"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ConfigurationError, match=r"config\.json"):
            compare(bundle, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        compare(bundle, tmp_path)


@pytest.mark.parametrize("make", [random_model, v1_1])
def test_a_copy_is_compared_bit_for_bit(tmp_path: Path, make: Any) -> None:
    model = make()
    bundle = changed(bundle_of(model), source="hub:somebody/model")
    assert not is_from_seed(bundle)
    for name, pieces in (("whole", "1GB"), ("pieces", "10KB")):
        save_copy(model, tmp_path / name, max_shard_size=pieces)
        compare(bundle, tmp_path / name)
    assert (tmp_path / "pieces" / "model.safetensors.index.json").exists()
    weights = tmp_path / "whole" / "model.safetensors"
    tensors = load_file(weights)
    name = next(iter(sorted(tensors)))
    tensors[name].view(torch.int32).reshape(-1)[0] ^= 1
    save_file(tensors, weights)
    with pytest.raises(IntegrityError, match="it is not the plan's initial model"):
        compare(bundle, tmp_path / "whole")


def test_attack_a_model_in_bfloat16_that_is_not_the_compared_one_rounded(tmp_path: Path) -> None:
    model = random_model()
    save_copy(model, tmp_path)
    bundle = bundle_of(model, wire={"model": "bfloat16"})
    compare(changed(bundle, initial_bfloat16=in_bfloat16(model)), tmp_path)
    with pytest.raises(IntegrityError, match="for its initial model in bfloat16"):
        compare(changed(bundle, initial_bfloat16=in_bfloat16(random_model(1))), tmp_path)


def test_a_folder_that_holds_no_such_model_is_refused_by_name(tmp_path: Path) -> None:
    model = random_model()
    bundle = bundle_of(model)
    with pytest.raises(ConfigurationError, match=r"it has no config\.json"):
        compare(bundle, tmp_path)
    save_copy(model, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"no such thing")
    with pytest.raises(ConfigurationError, match="is not a safetensors file"):
        compare(bundle, tmp_path)
    model.save_pretrained(tmp_path)
    whole = load_file(weights)
    lost = "encoder.block.0.layer.0.SelfAttention.q.weight"
    save_file({name: it for name, it in whole.items() if name != lost}, weights)
    with pytest.raises(ConfigurationError, match=r"has no tensor encoder\.block\.0"):
        compare(bundle, tmp_path)
    save_file({**whole, lost: whole[lost][:1].clone()}, weights)
    with pytest.raises(ConfigurationError, match="it is not a copy of the plan's initial model"):
        compare(bundle, tmp_path)
    elsewhere = tmp_path.with_name("elsewhere")
    model.save_pretrained(elsewhere)
    weights.unlink()
    outside = {"weight_map": dict.fromkeys(whole, "../elsewhere/model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(outside))
    with pytest.raises(ConfigurationError, match=r"only \*\.safetensors of the folder itself"):
        compare(bundle, tmp_path)
    for names in ('{"weight_map": {"w": "../../etc/passwd"}}', "{}", "[]", '{"weight_map": {"w": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(names)
        with pytest.raises(ConfigurationError):
            compare(bundle, tmp_path)
