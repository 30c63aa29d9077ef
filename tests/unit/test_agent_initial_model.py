"""A plan's initial model, compared by the silo itself: made again from the seed, or read from a copy of its people's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from security.errors import ConfigurationError, IntegrityError
from silo_agent.training.initial_model import compare, is_from_seed
from silo_agent.training.model import bind, layout_of
from silo_wire.manifest import manifest_of
from silo_wire.plan import Plan, PlanBundle
from silo_wire.seeded_model import seeded_t5
from tests.support.tiny_t5 import bundle_of, config_json, random_model, v1_1

SEED = 7


def seeded(seed: int = SEED) -> T5ForConditionalGeneration:
    return seeded_t5(T5Config.from_dict(json.loads(config_json())), seed)


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
    bundle = bundle_of(seeded(), seed=SEED)
    assert is_from_seed(bundle)
    state = torch.get_rng_state()
    compare(bundle, None)
    assert torch.equal(torch.get_rng_state(), state), "the process's own draws are left alone"
    with pytest.raises(IntegrityError, match=r"the seed of plan test makes model .* here, the plan names"):
        compare(bundle_of(seeded(), seed=SEED + 1), None)


def test_attack_a_parameter_that_was_crafted_into_a_model_of_a_seed() -> None:
    crafted = seeded()
    with torch.no_grad():
        crafted.encoder.block[0].layer[0].SelfAttention.q.weight[0, 0] += 1e-6
    with pytest.raises(IntegrityError, match="Nothing was approved"):
        compare(bundle_of(crafted, seed=SEED), None)


def test_attack_a_configuration_that_scales_the_seeds_draws() -> None:
    config = json.loads(config_json()) | {"initializer_factor": 1e-4}
    model = seeded_t5(T5Config.from_dict(config), SEED)
    with pytest.raises(IntegrityError, match="initializer_factor"):
        compare(bundle_of(model, seed=SEED), None)


@pytest.mark.parametrize("make", [random_model, v1_1])
def test_a_copy_is_compared_bit_for_bit(tmp_path: Path, make: Any) -> None:
    model = make()
    bundle = changed(bundle_of(model), source="hub:somebody/model")
    assert not is_from_seed(bundle)
    for name, pieces in (("whole", "1GB"), ("pieces", "10KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=pieces)
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
    model.save_pretrained(tmp_path)
    bundle = bundle_of(model, wire={"model": "bfloat16"})
    compare(changed(bundle, initial_bfloat16=in_bfloat16(model)), tmp_path)
    with pytest.raises(IntegrityError, match="for its initial model in bfloat16"):
        compare(changed(bundle, initial_bfloat16=in_bfloat16(random_model(1))), tmp_path)


def test_a_folder_that_holds_no_such_model_is_refused_by_name(tmp_path: Path) -> None:
    model = random_model()
    bundle = bundle_of(model)
    with pytest.raises(ConfigurationError, match=r"has no model\.safetensors: give the folder"):
        compare(bundle, tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"no such thing")
    with pytest.raises(ConfigurationError, match="holds no model"):
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
    with pytest.raises(ConfigurationError, match="which is not in its folder"):
        compare(bundle, tmp_path)
    for names in ('{"weight_map": {"w": "../../etc/passwd"}}', "{}", "[]", '{"weight_map": {"w": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(names)
        with pytest.raises(ConfigurationError):
            compare(bundle, tmp_path)
