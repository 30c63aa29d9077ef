"""Adapters of which one half is trained: the mean of silos is that of their merged models, and what rests does not
move."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from lorica_coordinator.edges.models.export import export_model
from lorica_coordinator.edges.sums.plan_parts import base_store
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.text_to_sql_data import SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.initial_model import compare
from silo_agent.training.silo_trainer import LocalUpdate, SiloTrainer
from silo_wire.canonical import Digest, canonical_json
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.plans.adapters import AdaptersSection, Turns, adapter_names
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.server_step.resting import at_rest
from tests.support import int8_by_hand
from tests.support.coordinator_edges import A, B, Workplace, make_plan, random_vector, stored_vector
from tests.unit.test_training_adapters import base_of, data, handed_out

CPU = DeviceSettings(device="cpu", threads=1)
HALVES = {"both": "lora_A lora_B", "b": "lora_B", "alternate": "lora_A lora_B"}
SMALL: dict[str, Any] = {
    "adapters.rank": 2,
    "adapters.layers": ["q", "wo"],
    "training.epochs": 2,
    "training.batch_size": 1,
    "training.learning_rate": 3e-2,
    "training.max_input_tokens": 32,
    "training.max_output_tokens": 16,
}
EXACT = 1e-6
Values = NDArray[np.float64]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A plan folder for each way to train."""
    folders = {train: tmp_path_factory.mktemp(train) for train in HALVES}
    for train, folder in folders.items():
        make_plan(folder, overrides={**SMALL, "adapters.train": train})
    return folders


def place_of(made: Mapping[str, Path], train: str, tmp_path: Path, **changed: str) -> Workplace:
    """The plan, with lines of plan.toml changed: those of keys that are for good are not."""
    state = tmp_path / "state"
    shutil.copytree(made[train] / "plans", state / "plans")
    toml = state / "plans" / "first" / "plan.toml"
    text = toml.read_text()
    for old, new in changed.items():
        assert old in text, old
        text = text.replace(old, new)
    toml.write_text(text)
    return Workplace.at(state, compile_plan(state / "plans" / "first"))


def trainer_of(place: Workplace, silo: str, tmp_path: Path, own: SiloData | None = None) -> SiloTrainer:
    return SiloTrainer(place.bundle, own or data(), silo, CPU, base=base_of(place, tmp_path))


def trained(
    trainer: SiloTrainer, place: Workplace, model: Digest, round_number: int, tmp_path: Path, **arguments: Any
) -> tuple[LocalUpdate, NDArray[np.float32]]:
    handed = handed_out(place, model, tmp_path / "model")
    update = trainer.train(
        round_number=round_number,
        model_path=handed.file,
        model=handed.manifest,
        update_path=tmp_path / "update",
        **arguments,
    )
    raw = (tmp_path / "update").read_bytes()
    kind = place.bundle.update_layout.dtype
    if kind == "float32":
        return update, np.frombuffer(raw, dtype="<f4")
    if kind == "int8":
        return update, int8_by_hand.read(raw)
    return update, torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float().numpy()


def halves(layout: Layout, vector: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    return {
        tensor.name: vector[start : start + tensor.elements].reshape(tensor.shape) for tensor, start in layout.placed()
    }


def merged(trainer: SiloTrainer, vector: NDArray[np.float32]) -> dict[str, Values]:
    """alpha / rank x B A by weight, of this vector and what is fixed."""
    model = trainer._model
    named = {
        name.replace(".default.", "."): parameter.detach().numpy() for name, parameter in model.t5.named_parameters()
    }
    parts = {**named, **halves(model.bundle.layout, vector)}
    products = {}
    for tensor in model.bundle.whole_layout.tensors:
        a, b = adapter_names(tensor.name)
        if a in parts:
            products[tensor.name] = (
                model.bundle.plan.adapters.scale * parts[b].astype(np.float64) @ parts[a].astype(np.float64)
            )
    assert products
    return products


def two_silos(place: Workplace, tmp_path: Path) -> dict[str, SiloTrainer]:
    """With data of their own."""
    examples = data().train
    return {
        silo: trainer_of(place, silo, tmp_path, own=replace(data(), train=(examples[at],)))
        for at, silo in enumerate((A, B))
    }


def error_of_a_round(
    place: Workplace, silos: Mapping[str, SiloTrainer], model: Digest, number: int, tmp_path: Path
) -> tuple[float, Digest]:
    """How far the merged mean is from the mean of the merged local models, at most; and the next model. Of two silos,
    one of which weighs three times as much as the other."""
    before = stored_vector(place.models, model)
    deltas = {silo: trained(trainer, place, model, number, tmp_path)[1] for silo, trainer in silos.items()}
    assert np.abs(deltas[A] - deltas[B]).max() > 1e-2
    updates = [place.send(place.key(number), it, deltas[it], examples=many) for it, many in ((A, 30), (B, 10))]
    made = place.aggregator({"momentum": 0.9}, slab_bytes=1 << 10).aggregate(place.key(number), model, updates).model
    first, second, found = (
        merged(silos[A], vector)
        for vector in (before + deltas[A], before + deltas[B], stored_vector(place.models, made))
    )
    return max(float(np.abs(found[it] - 0.75 * first[it] - 0.25 * second[it]).max()) for it in found), made


# --- the mean


@pytest.mark.parametrize(("train", "rounds"), [("b", 1), ("alternate", 2)])
def test_the_merged_mean_is_the_mean_of_the_merged_models(
    train: str, rounds: int, made: Mapping[str, Path], tmp_path: Path
) -> None:
    place = place_of(made, train, tmp_path)
    silos, model = two_silos(place, tmp_path), place.models.initial()
    for number in range(1, rounds + 1):
        error, model = error_of_a_round(place, silos, model, number, tmp_path)
        assert error < EXACT, f"round {number}"


def test_the_merged_mean_of_both_halves_is_another_one(made: Mapping[str, Path], tmp_path: Path) -> None:
    """What the exact ones are measured with finds the error where there is one."""
    place = place_of(made, "both", tmp_path)
    error, _ = error_of_a_round(place, two_silos(place, tmp_path), place.models.initial(), 1, tmp_path)
    assert error > 1000 * EXACT


def test_by_hand_the_mean_of_products_and_the_product_of_means() -> None:
    """Rank 1, shares 3/4 and 1/4. Silos leave (B, A) = (1, 2) and (3, 6): B A is 2 and 18, whose mean is 6; the means
    are 1.5 and 3, whose product is 4.5. What is missing is 3/16 x (3 - 1) x (6 - 2)."""
    share, (b, a), (other_b, other_a) = 0.75, (1.0, 2.0), (3.0, 6.0)
    of_products = share * b * a + (1 - share) * other_b * other_a
    of_means = (share * b + (1 - share) * other_b) * (share * a + (1 - share) * other_a)
    assert (of_products, of_means) == (6.0, 4.5)
    assert of_products - of_means == share * (1 - share) * (other_b - b) * (other_a - a)


# --- what is trained and what rests


@pytest.mark.parametrize("train", HALVES)
def test_what_travels_are_the_halves_that_are_ever_trained(
    train: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    bundle = place_of(made, train, tmp_path).bundle
    assert {tensor.name.split(".")[-2] for tensor in bundle.layout.tensors} == set(HALVES[train].split())
    assert (bundle.fixed_layout is None) == (train != "b")
    assert (bundle.plan.model.fixed is None) == (train != "b")
    if bundle.fixed_layout is not None:
        assert all(".lora_A." in tensor.name for tensor in bundle.fixed_layout.tensors)


def test_every_silo_has_the_a_that_the_other_ways_begin_with(made: Mapping[str, Path], tmp_path: Path) -> None:
    """One seed makes one A, whether it is trained or not."""
    fixed, begun = (place_of(made, train, tmp_path / train) for train in ("b", "both"))
    trainer = trainer_of(fixed, A, tmp_path)
    first = halves(begun.layout, stored_vector(begun.models, begun.models.initial()))
    found = {
        name.replace(".default.", "."): it for name, it in trainer._model.t5.named_parameters() if "lora_A" in name
    }
    assert found.keys() == {name for name in first if ".lora_A." in name}
    for name, parameter in found.items():
        assert np.array_equal(parameter.detach().numpy(), first[name])
        assert not parameter.requires_grad


ROUNDS = ((1, "lora_A"), (2, "lora_B"), (3, "lora_A"))


def model_of_any_b(place: Workplace) -> Digest:
    """A round model whose B is not zero, as A has no gradient before."""
    update = place.send(place.key(), A, random_vector(place.layout, 5, scale=0.05))
    return place.aggregator().aggregate(place.key(), place.models.initial(), [update]).model


def rests_alone(place: Workplace, delta: NDArray[np.float32], rests: str) -> None:
    """`delta` is zero where it rests, to the last bit, and has no tensor of zeros elsewhere."""
    for name, part in halves(place.layout, delta).items():
        assert np.any(part) == (rests not in name), name


MASKED = {
    "secure_aggregation = false": "secure_aggregation = true",
    "max_weight = 0.0": "max_weight = 100.0",
    "min_silos = 2": "min_silos = 3",
}


@pytest.mark.parametrize(
    "changed", [{}, MASKED, {"fedprox_mu = 0.0": "fedprox_mu = 0.1"}], ids=["plain", "masked", "fedprox"]
)
def test_of_an_alternating_plan_one_half_moves_in_a_round(
    changed: Mapping[str, str], made: Mapping[str, Path], tmp_path: Path
) -> None:
    """Under masks neither what spreads deltas nor noise of float32's steps reaches what rests."""
    place = place_of(made, "alternate", tmp_path, **changed)
    trainer, model = trainer_of(place, A, tmp_path), model_of_any_b(place)
    for number, rests in ROUNDS:
        update, delta = trained(trainer, place, model, number, tmp_path)
        rests_alone(place, delta, rests)
        assert update.delta_norm == pytest.approx(float(np.linalg.norm(delta)), rel=1e-5)


def test_training_that_goes_on_after_a_kill_sends_what_it_had_sent(made: Mapping[str, Path], tmp_path: Path) -> None:
    place = place_of(made, "alternate", tmp_path)
    model, checkpoint = model_of_any_b(place), tmp_path / "checkpoint"
    _, whole = trained(trainer_of(place, A, tmp_path), place, model, 2, tmp_path)
    with pytest.raises(TrainingStopped):
        trained(
            trainer_of(place, A, tmp_path), place, model, 2, tmp_path,
            checkpoint_path=checkpoint, should_stop=checkpoint.exists,
        )  # fmt: skip
    steps: list[float] = []
    _, again = trained(
        trainer_of(place, A, tmp_path), place, model, 2, tmp_path,
        checkpoint_path=checkpoint, on_progress=lambda fraction, loss: steps.append(fraction),
    )  # fmt: skip
    assert steps == [0.75, 1.0], "the first epoch was done again"
    assert np.array_equal(again, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_rounding_cuts_off_a_half_waits_for_the_round_that_trains_it_again(
    made: Mapping[str, Path], tmp_path: Path, dtype: str
) -> None:
    place = place_of(made, "alternate", tmp_path, **{'update = "float32"': f'update = "{dtype}"'})
    trainer, model = trainer_of(place, A, tmp_path), model_of_any_b(place)
    included, held = None, dict[int, NDArray[np.float32]]()
    for number, rests in ROUNDS:
        update, delta = trained(trainer, place, model, number, tmp_path, included_update=included)
        rests_alone(place, delta, rests)
        included = update.manifest.digest
        (file,) = tmp_path.glob(f"*-{included}.residual")
        held[number] = np.fromfile(file, dtype="<f4", count=place.layout.parameters)
    first, second, third = (halves(place.layout, held[number]) for number, _ in ROUNDS)
    for name in first:
        if ".lora_B." in name:
            assert np.array_equal(second[name], first[name])
            assert np.any(first[name])
        else:
            assert not np.any(first[name])
            assert np.array_equal(third[name], second[name])


CORRECTED: dict[str, dict[str, Any]] = {
    "training": {
        "drift_correction": "scaffold", "optimizer": "sgd", "steps": 2, "epochs": 1, "learning_rate": 0.1,
        "learning_rate_schedule": "constant", "dropout": 0.0, "loss_reduction": "evaluated",
    },
    "aggregation": {"weighting": "equal", "momentum": 0.0, "max_delta_norm": 0.0},
}  # fmt: skip


def test_a_correction_of_a_half_waits_for_the_round_that_trains_it_again(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    """A silo's own deltas lead where the round trains, and what rests of them stays as it was."""
    place = place_of(made, "alternate", tmp_path)
    values = place.bundle.plan.model_dump(mode="json")
    for section, changes in CORRECTED.items():
        values[section] |= changes
    bundle = PlanBundle(Plan.model_validate(values), place.bundle.files)
    place = Workplace(place.state, bundle, place.models, place.spools)
    trainer, model, included = trainer_of(place, A, tmp_path), model_of_any_b(place), None
    states = list[dict[str, NDArray[np.float32]]]()
    for number, rests in ROUNDS:
        update, delta = trained(trainer, place, model, number, tmp_path, included_update=included)
        rests_alone(place, delta, rests)
        included = update.manifest.digest
        (file,) = tmp_path.glob(f"*-{included}.control")
        states.append(halves(place.layout, np.fromfile(file, dtype="<f4", count=place.layout.parameters)))
    for (before, after), (_, rests) in zip(pairwise(states), ROUNDS[1:], strict=True):
        assert {name for name in before if np.array_equal(before[name], after[name])} == {
            name for name in before if rests in name
        }
    _, without = trained(trainer, place, model, 3, tmp_path, included_update=None)
    assert not np.array_equal(without, delta), "the model has not moved, and the silo's deltas have"


JOINT: dict[str, dict[str, Any]] = {
    "schedule": {"min_silos": 3},
    "aggregation": {
        "secure_aggregation": True, "weighting": "equal", "max_weight": 1.0, "max_delta_norm": 0.0, "delta_bound": 1.0,
    },
    "privacy": {"noise": "joint", "answer_after_s": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("train", ["b", "alternate"])
@pytest.mark.parametrize("noise", ["own", "joint"])
def test_private_training_moves_what_the_round_trains(
    train: str, noise: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    """By noise of the silo's own, which is on all that is trained, or by a sum of gradients in whole numbers."""
    place = place_of(made, train, tmp_path)
    values = place.bundle.plan.model_dump(mode="json")
    values["training"] |= {"epochs": 1, "dropout": 0.0, "max_grad_norm": 1.0}
    values["evaluation"] |= {"every": 0, "initial": False, "last": False}
    values["privacy"] |= {
        "level": "record", "noise_multiplier": 1.0, "steps": 1, "expected_batch_size": 2, "nominal_records": 2,
        "max_noise_to_signal": 1e6, "target_epsilon": 1000.0,
    }  # fmt: skip
    for section, changes in (JOINT if noise == "joint" else {}).items():
        values[section] |= changes
    bundle = PlanBundle(Plan.model_validate(values), place.bundle.files)
    private = Workplace(place.state, bundle, place.models, place.spools)
    trainer = trainer_of(private, A, tmp_path)
    for number, rests in ROUNDS[:2]:
        _, delta = trained(trainer, private, model_of_any_b(place), number, tmp_path)
        rests_alone(private, delta, rests if train == "alternate" else "nothing")


# --- the server's step


@pytest.mark.parametrize(
    "server",
    [
        {"server_optimizer": "sgd", "momentum": 0.9},
        {"server_optimizer": "yogi", "server_learning_rate": 0.1},
        {"server_optimizer": "adagrad", "server_learning_rate": 0.1},
    ],
    ids=lambda it: it["server_optimizer"],
)
def test_attack_a_delta_in_the_half_that_rests_moves_neither_it_nor_its_moments(
    server: dict[str, Any], made: Mapping[str, Path], tmp_path: Path
) -> None:
    """Silos send what they like. And what momentum holds of a half is held for the next round that trains it."""
    place = place_of(made, "alternate", tmp_path)
    model, states = place.models.initial(), list[Mapping[str, NDArray[np.float32]]]()
    for number, rests in ROUNDS:
        update = place.send(place.key(number), A, random_vector(place.layout, number, scale=0.1))
        before = halves(place.layout, stored_vector(place.models, model))
        model = place.aggregator(server, slab_bytes=1 << 10).aggregate(place.key(number), model, [update]).model
        after = halves(place.layout, stored_vector(place.models, model))
        state = place.models.state(model)
        assert state.steps == number
        slots = {
            f"{slot} {name}": part
            for slot, vector in state.slots.items()
            for name, part in halves(
                place.layout, np.frombuffer(b"".join(map(vector.chunk, range(vector.manifest.chunks))), dtype="<f4")
            ).items()
        }
        for name in after:
            assert np.array_equal(after[name], before[name]) == (rests in name), f"round {number}, {name}"
        for name, slot in slots.items():
            if states:
                assert np.array_equal(slot, states[-1][name]) == (rests in name), f"round {number}, {name}"
        states.append(slots)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    number=st.integers(1, 5),
    begin=st.integers(0, 20),
    elements=st.integers(1, 30),
)
def test_a_stretch_rests_where_its_elements_do(sizes: list[int], number: int, begin: int, elements: int) -> None:
    tensors = (TensorSpec(f"{at:02}.lora_{'BA'[at % 2]}.weight", (size,)) for at, size in enumerate(sizes))
    layout, section = Layout("float32", tuple(tensors)), AdaptersSection(rank=1, train="alternate")
    one_by_one = [section.rests(tensor.name, number) for tensor in layout.tensors for _ in range(tensor.elements)]
    stretch = one_by_one[begin : begin + elements]
    found = [False] * elements
    for part in Turns.of(layout, section).resting(number, begin, elements):
        assert 0 <= part.start < part.stop <= elements
        found[part] = [True] * (part.stop - part.start)
    assert found[: len(stretch)] == stretch
    assert not any(found[len(stretch) :])


def test_what_is_at_rest_is_held_in_each_slab() -> None:
    model, moment = torch.arange(6.0), -torch.arange(6.0)
    with at_rest((model, moment), [slice(0, 2), slice(5, 6)]):
        model += 10
        moment *= 2
    assert model.tolist() == [0, 1, 12, 13, 14, 5]
    assert moment.tolist() == [0, -1, -4, -6, -8, -5]


# --- what is refused


def test_another_a_than_the_plan_names_is_refused_by_silo_export_and_approval(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    place = place_of(made, "b", tmp_path)
    values = place.bundle.plan.model_dump(mode="json")
    values["model"]["fixed"] = "ab" * 32
    bundle = PlanBundle(Plan.model_validate(values), place.bundle.files)
    other = Workplace(place.state, bundle, place.models, place.spools)
    with pytest.raises(IntegrityError, match=r"fixed halves of its adapters .* the plan names abab"):
        trainer_of(other, A, tmp_path)
    with pytest.raises(IntegrityError, match="other A of its adapters"):
        export_model(
            bundle, place.models, place.models.initial(), tmp_path / "out",
            base=base_store(place.state, place.bundle), round_number=0,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
    with pytest.raises(IntegrityError, match="are not those that its seed makes"):
        compare(bundle, None)
    compare(place.bundle, None)


def test_an_export_has_the_fixed_halves(made: Mapping[str, Path], tmp_path: Path) -> None:
    place = place_of(made, "b", tmp_path)
    model, base = model_of_any_b(place), base_store(place.state, place.bundle)
    assert base is not None
    export_model(place.bundle, place.models, model, tmp_path / "out", base=base, round_number=1)
    from safetensors.numpy import load_file

    whole, start = load_file(tmp_path / "out" / "model.safetensors"), stored_vector(base, base.initial())
    first = halves(place.bundle.whole_layout, start)
    products = merged(trainer_of(place, A, tmp_path), stored_vector(place.models, model))
    for name, product in products.items():
        assert np.abs(whole[name] - first[name] - product).max() < EXACT
        assert np.abs(product).max() > 1e-3


@pytest.mark.parametrize(("of", "to"), [("both", "b"), ("b", "alternate")])
def test_what_is_for_good_is_not_changed_in_a_plan_folder(
    of: str, to: str, made: Mapping[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=rf'fixed, .* train = "{to}": make a new plan'):
        place_of(made, of, tmp_path, **{f'train = "{of}"': f'train = "{to}"'})


def test_both_and_alternate_are_plans_of_the_same_files(made: Mapping[str, Path], tmp_path: Path) -> None:
    place = place_of(made, "both", tmp_path, **{'train = "both"': 'train = "alternate"'})
    assert place.bundle.plan.adapters.train == "alternate"


def test_adam_is_refused_where_halves_take_turns(made: Mapping[str, Path], tmp_path: Path) -> None:
    adam = {'server_optimizer = "sgd"': 'server_optimizer = "adam"'}
    with pytest.raises(ConfigurationError, match=r'"adam" does not go with .* "alternate".*"yogi"'):
        place_of(made, "alternate", tmp_path, **adam)
    place_of(made, "b", tmp_path / "b", **adam)


def test_a_length_that_the_resting_half_would_count_in_is_refused(made: Mapping[str, Path], tmp_path: Path) -> None:
    longer = {'step_length = "fixed"': 'step_length = "fedexp"'}
    with pytest.raises(ConfigurationError, match=r'train = "alternate" does not go with .*"fedexp"'):
        place_of(made, "alternate", tmp_path, **longer)


def test_a_centre_of_the_other_half_is_refused(made: Mapping[str, Path], tmp_path: Path) -> None:
    centred = {
        "min_silos = 2": "min_silos = 5",
        'reducer = "mean"': 'reducer = "centred_clipping"',
        "clipping_radius = 0.0": "clipping_radius = 1.0",
        'weighting = "lorar"': 'weighting = "equal"',
    }
    with pytest.raises(ConfigurationError, match=r'"centred_clipping" does not go with .* "alternate": its centre'):
        place_of(made, "alternate", tmp_path, **centred)
    place_of(made, "b", tmp_path / "b", **centred)


def test_a_layout_with_halves_that_stay_is_refused(made: Mapping[str, Path], tmp_path: Path) -> None:
    """What nobody trains does not travel either."""
    fixed, both = (place_of(made, train, tmp_path / train).bundle for train in ("b", "both"))
    values = both.plan.model_dump(mode="json")
    values["adapters"]["train"], values["model"]["fixed"] = "b", fixed.plan.model.fixed
    with pytest.raises(MalformedMessage, match=r"not that of the \[adapters\]"):
        PlanBundle(Plan.model_validate(values), both.files)


# --- digests


def test_a_plan_that_trains_both_halves_is_spelled_as_it_was_before_there_was_a_choice(
    made: Mapping[str, Path], tmp_path: Path
) -> None:
    plan = place_of(made, "both", tmp_path).bundle.plan
    raw = plan.to_json()
    assert b'"adapters":{"alpha":16,"layers":["q","wo"],"rank":2}' in raw
    assert b"fixed" not in raw
    assert Plan.from_json(raw) == plan
    values = plan.model_dump(mode="json")
    for section, said in (("adapters", {"train": "both"}), ("model", {"fixed": None})):
        with pytest.raises(MalformedMessage, match="canonical"):
            Plan.from_json(canonical_json({**values, section: values[section] | said}))
    digests = {place_of(made, train, tmp_path / train).bundle.plan.digest for train in HALVES}
    assert len(digests) == 3


def test_no_other_way_to_train_is_known() -> None:
    with pytest.raises(ValidationError, match="'both', 'b', 'alternate' or 'reproject'"):
        AdaptersSection.model_validate({"rank": 2, "train": "a"})
