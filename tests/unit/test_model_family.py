"""Every member of T5's family: made a plan of, accepted at a silo, trained plainly, privately and by adapters, summed
under masks, exported, loaded again and asked; and those that are not taken, which are refused by name on both sides."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, ByT5Tokenizer
from transformers.modeling_outputs import BaseModelOutput

from lorica.secure_aggregation.in_memory import FEDERATION, AttemptInMemory, masked
from lorica_coordinator.edges.models.export import export_model
from lorica_coordinator.plans.model_source import FolderModel, write_model
from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.parameters import Terms
from silo_agent.service.ports import RoundModel
from silo_agent.training.data.batches import Batch, EncodedExamples
from silo_agent.training.device import DeviceSettings
from silo_agent.training.generation import generated
from silo_agent.training.model.initial_model import compare
from silo_agent.training.model.model import add_adapters, build_model, layout_of
from silo_agent.training.private.per_example.batched_bias import batched_bias
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.per_example.ghost_norms import check_covered
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.task_loss import summed_loss
from silo_wire.model_folders.folder_tokenizer import byte_tokenizer
from silo_wire.model_folders.model_folder import prepared
from silo_wire.model_folders.t5_config import FAMILY, NO_CONFIGURATION, model_class, scales_output, t5_config
from silo_wire.model_folders.t5_form import MODEL_TYPES, NOT_TAKEN, t5_values
from silo_wire.model_folders.tokenizer_parts import odd_parts
from silo_wire.plans.adapters import AdaptersSection, adapter_layout
from silo_wire.plans.masked_ranges import plan_ranges
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection
from tests.support.coordinator_edges import A, B, C, Workplace, content_of, make_plan, stored_vector
from tests.support.family import MEMBERS, Member
from tests.support.tiny_t5 import pieces_model, silo_data
from tests.unit.test_training_private_gradients import batch_of, check_beside_the_loop

CPU = DeviceSettings(device="cpu", threads=1)
SILOS = (A, B, C)
PAIRS = (
    ("how many people live in paris ?", 'SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = "paris" ;'),
    ("which rivers are longer than 300 miles ?", "SELECT NAME FROM RIVER WHERE LENGTH > 300 ;"),
)
PRIVATE = {
    "level": "record", "noise_multiplier": 1.0, "steps": 1, "expected_batch_size": 2, "nominal_records": 2,
    "max_noise_to_signal": 1e6, "target_epsilon": 1000.0,
}  # fmt: skip
each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


@dataclass(frozen=True)
class Made:
    """A member's folder, and a plan of it."""

    member: Member
    folder: Path
    place: Workplace

    def handed_out(self, model: Any, file: Path) -> RoundModel:
        vector = self.place.models.vector(model)
        file.write_bytes(content_of(vector))
        return RoundModel(file=file, manifest=vector.manifest)


@pytest.fixture(scope="module", params=MEMBERS, ids=lambda member: member.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    member, state = request.param, tmp_path_factory.mktemp("state")
    member.write(state / "model")
    training = {"training.epochs": 1, "training.dropout": 0.0, "training.max_input_tokens": 64}
    bundle = make_plan(state, source=FolderModel(state / "model"), overrides=training)
    return Made(member, state / "model", Workplace.at(state, bundle))


# --- plain, masked, exported, asked


def test_a_silo_finds_the_plans_model_in_its_own_copy(made: Made) -> None:
    assert compare(made.place.bundle, made.folder) == ()
    files = made.place.bundle.files
    assert list(odd_parts(files)) == [], "its tokenizer goes with masks"
    assert json.loads(files["config.json"])["model_type"] == made.member.model_type
    assert ("lm_head.weight" in {it.name for it in made.place.layout.tensors}) == made.member.untied


def test_a_round_in_the_clear_and_under_masks_then_exported_and_asked(made: Made, tmp_path: Path) -> None:
    place, deltas, updates = made.place, {}, []
    begun = made.handed_out(place.models.initial(), tmp_path / "begun")
    for at, silo in enumerate(SILOS):
        trainer = SiloTrainer(place.bundle, silo_data(PAIRS[at % 2 :], PAIRS), silo, CPU)
        trained = trainer.train(
            round_number=1, model_path=begun.file, model=begun.manifest, update_path=tmp_path / "update"
        )
        assert trained.delta_norm > 0
        deltas[silo] = np.fromfile(tmp_path / "update", dtype="<f4")
        updates.append(place.send(place.key(), silo, deltas[silo]))
    plain = np.mean(list(deltas.values()), axis=0, dtype=np.float64)

    section = AggregationSection.model_validate({"secure_aggregation": True, "weighting": "equal", "momentum": 0.0})
    ranges, link = plan_ranges(section, place.layout), first_link(FEDERATION, Partition.singletons(SILOS))
    attempt = AttemptInMemory(SILOS, Terms(model=bytes(32), ranges=ranges, link=link))
    mean = attempt.mean({silo: masked(attempt.works[silo], delta, weight=1.0) for silo, delta in deltas.items()})
    assert mean.saturated == 0
    assert np.abs(mean.vector - plain).max() < 1e-8, "rounded to whole numbers, and nothing else"

    model = (
        place.aggregator({"momentum": 0.0, "weighting": "equal"})
        .aggregate(place.key(), begun.manifest.digest, updates)
        .model
    )
    moved = stored_vector(place.models, model) - stored_vector(place.models, place.models.initial())
    assert np.allclose(moved, plain, rtol=1e-3, atol=1e-6)

    export_model(place.bundle, place.models, model, tmp_path / "out", base=None, round_number=1)
    exported: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert type(exported) is FAMILY[made.member.model_type][1]
    newest = made.handed_out(model, tmp_path / "newest")
    answer = trainer.answer(PAIRS[0][0], model_path=newest.file, model=newest.manifest)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(PAIRS[0][0], return_tensors="pt").input_ids
    assert ids[0].tolist() == trainer._model.tokenizer.encode([PAIRS[0][0]])[0]
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[5, 9, 1]]), 3)
    with torch.no_grad():
        theirs = exported(input_ids=ids, labels=batch.labels).loss
        ours = summed_loss(trainer._model.t5.eval(), batch) / 3
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert isinstance(answer, str)


# --- private


@each_member
def test_clipped_gradients_are_those_of_one_example_at_a_time(member: Member) -> None:
    model = member.model().train()
    check_covered(model)
    check_beside_the_loop(model, batch_of(4, 9, 6), "ghost")


@each_member
def test_rows_of_a_chunk_keep_their_bits_or_are_computed_alone(member: Member) -> None:
    model = member.model().train()
    rows = batch_of(4, 16, 8, ragged=False)
    ids, labels = (tuple(row.numpy().astype(np.int32) for row in part) for part in (rows.input_ids, rows.labels))
    examples = EncodedExamples(inputs=ids, targets=labels, inputs_cut=0, targets_cut=0, targets_with_unknown=0)
    chunks, seen = Chunks(model, most=4), 0
    for indices, batch in chunks.of(examples, range(4)):
        with torch.no_grad(), batched_bias(model, len(indices)):
            together = example_losses(model, batch)
        for at, one in enumerate(together):
            with torch.no_grad(), batched_bias(model, 1):
                assert torch.equal(example_losses(model, batch.rows_of(at, at + 1))[0], one)
            seen += 1
    assert seen == 4
    assert type(chunks._trials._model()) is FAMILY[member.model_type][1]


def test_a_private_round_is_trained(made: Made, tmp_path: Path) -> None:
    values = made.place.bundle.plan.model_dump(mode="json")
    values["training"] |= {"max_grad_norm": 1.0}
    values["evaluation"] |= {"every": 0, "initial": False, "last": False}
    values["privacy"] |= PRIVATE
    bundle = PlanBundle(Plan.model_validate(values), made.place.bundle.files)
    begun = made.handed_out(made.place.models.initial(), tmp_path / "begun")
    trained = SiloTrainer(bundle, silo_data(PAIRS, PAIRS), A, CPU).train(
        round_number=1, model_path=begun.file, model=begun.manifest, update_path=tmp_path / "update"
    )
    assert trained.delta_norm > 0


# --- adapters


@each_member
def test_adapters_compute_what_they_do_merged(member: Member) -> None:
    section = AdaptersSection.model_validate({"rank": 2, "alpha": 4, "layers": member.layers})
    model, merged = member.model(), member.model()
    adapters, _ = add_adapters(model, section, adapter_layout(layout_of(merged), section))
    generator = torch.Generator().manual_seed(1)
    added = {}
    with torch.no_grad():
        for spec, parameter in zip(adapters.specs, adapters.tensors, strict=True):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            added[spec.name] = parameter
        for name, weight in merged.named_parameters():
            one = name.removesuffix(".weight")
            if f"{one}.lora_A.weight" in added:
                weight += 2.0 * added[f"{one}.lora_B.weight"] @ added[f"{one}.lora_A.weight"]
        batch = batch_of(3, 9, 6)
        ours, theirs, plain = (summed_loss(one.eval(), batch) for one in (model, merged, member.model()))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert abs(float(ours) - float(plain)) > 1e-3


# --- answers


@each_member
def test_greedy_answers_are_those_of_transformers(member: Member) -> None:
    model = member.model()
    batch = batch_of(5, 9, 6)
    with torch.inference_mode():
        mask = batch.attention_mask.long()
        hidden = model.get_encoder()(input_ids=batch.input_ids, attention_mask=mask)[0]
        ours = generated(model, hidden, mask, beams=1, max_new_tokens=8)
        theirs = model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden), attention_mask=mask, do_sample=False,
            max_new_tokens=8, pad_token_id=0, eos_token_id=model.config.eos_token_id, decoder_start_token_id=0,
        )[:, 1:].tolist()  # fmt: skip
    end = model.config.eos_token_id
    assert ours == [row[: row.index(end)] if end in row else row for row in theirs]


@each_member
def test_the_output_is_scaled_as_the_class_does(member: Member) -> None:
    model = member.model()
    batch = batch_of(3, 9, 6, ragged=False)
    with torch.no_grad():
        theirs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
    assert float(summed_loss(model, batch)) / batch.target_tokens == pytest.approx(float(theirs), rel=1e-5)
    assert isinstance(scales_output(model.config), bool)


# --- ByT5's tokenizer


SPELLED = st.sampled_from(["</s>", "<pad>", "<unk>", "<extra_id_0>", "<extra_id_9>", " ", "▁", "\n"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=8) | SPELLED, max_size=6).map("".join))
def test_bytes_have_the_ids_that_byt5_gives_them(text: str) -> None:
    ours, theirs = _bytes()
    expected = theirs(text).input_ids
    found = ours(text).input_ids
    assert found == expected or found == [*expected, 1], "a text that ends with </s> ends twice"
    assert ours.decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False) == theirs.decode(
        expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


_MADE: list[Any] = []


def _bytes() -> tuple[Any, Any]:
    if not _MADE:
        _MADE.append((byte_tokenizer(3), ByT5Tokenizer(extra_ids=3)))
    ours, theirs = _MADE[0]
    return ours, theirs


def test_every_byte_has_a_token_and_each_sentinel() -> None:
    vocabulary = byte_tokenizer(125).get_vocab()
    assert sorted(vocabulary.values()) == list(range(3 + 256 + 125))
    assert vocabulary["<extra_id_0>"] == 259


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"extra_ids": 20_000}, "extra_ids 20000"),
        ({"extra_ids": True}, "extra_ids True"),
        ({"extra_ids": 1, "additional_special_tokens": ["a"]}, "additional_special_tokens that are not <extra_id_0>"),
        (
            {"extra_ids": 2, "extra_special_tokens": ["<extra_id_1>", "<extra_id_0>"]},
            "extra_special_tokens that are not",
        ),
    ],
)
def test_attack_tokens_of_bytes_and_others_are_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    folder = tmp_path / "model"
    next(member for member in MEMBERS if member.name == "ByT5").write(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer", **values}))
    with pytest.raises(ConfigurationError, match=said):
        prepared(folder)


@pytest.mark.parametrize(
    ("config", "tokenizer_config"),
    [
        ({"tokenizer_class": "ByT5Tokenizer"}, None),
        ({"tokenizer_class": "ByT5Tokenizer"}, {"extra_ids": 3}),
        ({}, {"tokenizer_class": "ByT5Tokenizer", "additional_special_tokens": [{"content": f"<extra_id_{at}>"} for at in range(125)]}),
    ],
    ids=["config.json alone", "a class there, sentinels here", "tokens as objects"],
)  # fmt: skip
def test_a_tokenizer_of_bytes_is_named_as_hugging_face_does(
    tmp_path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any] | None
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    bytes_of_it = next(member for member in MEMBERS if member.name == "ByT5")
    bytes_of_it.write(folder)
    bytes_of_it.model(384).save_pretrained(folder)
    (folder / "tokenizer_config.json").unlink()
    if tokenizer_config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    assert "tokenizer.json" in write_model(FolderModel(folder), out, seed=1).files
    sentinels = 3 if tokenizer_config == {"extra_ids": 3} else 125
    assert len(AutoTokenizer.from_pretrained(out)) == 259 + sentinels


@pytest.mark.parametrize(("kind", "named"), [("mt5", "MT5Tokenizer"), ("umt5", "T5Tokenizer")])
def test_pieces_alone_make_a_tokenizer_of_each_type(tmp_path: Path, kind: str, named: str) -> None:
    """As Hugging Face has mT5: without tokenizer.json."""
    folder, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    member = next(member for member in MEMBERS if member.model_type == kind)
    member.model().save_pretrained(folder)
    (folder / "spiece.model").write_bytes(pieces_model())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "extra_ids": 0}))
    written = write_model(FolderModel(folder), out, seed=1)
    made = json.loads((out / "tokenizer.json").read_text())
    assert "tokenizer.json" in written.files
    assert made["model"]["type"] == "Unigram"
    assert list(odd_parts({"tokenizer.json": (out / "tokenizer.json").read_bytes()})) == []


def test_attack_bytes_beside_a_file_of_pieces_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    next(member for member in MEMBERS if member.name == "T5").write(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(ConfigurationError, match=r"ByT5Tokenizer, which has no tokenizer\.json: remove one"):
        prepared(folder)


# --- what is not taken


@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_a_member_that_is_not_covered_is_refused_by_name_on_both_sides(kind: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    out.mkdir()
    MEMBERS[0].write(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    said = f"model_type '{kind}': .*take a T5"
    with pytest.raises(ConfigurationError, match=said):
        write_model(FolderModel(folder), out, seed=1)
    files = {"config.json": json.dumps(config).encode()}
    with pytest.raises(MalformedMessage, match=said):
        build_model(files, layout_of(MEMBERS[0].model()), device=torch.device("cpu"))


def test_every_type_that_is_taken_has_a_class_and_a_member() -> None:
    assert FAMILY.keys() == MODEL_TYPES.keys() == {member.model_type for member in MEMBERS}
    assert not NOT_TAKEN.keys() & MODEL_TYPES.keys()
    assert {name for names in MODEL_TYPES.values() for name in names.split(", ")} == {it.name for it in MEMBERS}


# --- hostile configurations: the other side chooses the type, every size, buckets and how far they go, activations,
# what is tied and scaled, keys of other models, and the values' types; of ByT5's tokenizer its class, its number of
# sentinels, their names, and which files lie beside it


SIZES = st.one_of(st.integers(-1, 40), st.sampled_from([0, 1 << 20, 1 << 40, True, None, 1.5, "8", [8], {}]))
CHOSEN = st.fixed_dictionaries(
    {"model_type": st.sampled_from([*MODEL_TYPES, *NOT_TAKEN, "", None, ["t5"]])},
    optional={
        **dict.fromkeys(
            ("relative_attention_num_buckets", "relative_attention_max_distance", "num_decoder_layers", "vocab_size"),
            SIZES,
        ),
        "feed_forward_proj": st.sampled_from(["relu", "gated-gelu", "gated-silu", "gelu", "gated", "", "x" * 200, 1]),
        "is_gated_act": st.sampled_from([True, False, None, 3, "yes"]),
        "dense_act_fn": st.sampled_from(["relu", "quick_gelu", "exec", 7]),
        "tie_word_embeddings": st.sampled_from([True, False, None, "no", [1]]),
        "scale_decoder_outputs": st.sampled_from([True, False, None, [1]]),
        "local_radius": SIZES,
        "global_block_size": SIZES,
        "encoder_attention_type": st.sampled_from(["local", "transient-global"]),
        "is_decoder": st.sampled_from([True, False]),
    },
)


@settings(max_examples=80, deadline=None)
@given(CHOSEN)
def test_attack_whatever_a_configuration_says_it_is_refused_or_makes_numbers(values: dict[str, Any]) -> None:
    """No other error than a refusal comes of it, neither when the model is made nor when it is used."""
    small = {"vocab_size": 12, "d_model": 4, "d_kv": 2, "d_ff": 4, "num_layers": 1, "num_heads": 2}
    raw = json.dumps({**small, "decoder_start_token_id": 0, **values}).encode()
    try:
        config = t5_config(raw)
        if config.vocab_size > 1000 or config.num_layers + (config.num_decoder_layers or 0) > 50:
            return  # `build_model` compares them with the plan's layout before memory is taken
    except MalformedMessage:
        return
    try:
        model = model_class(config)(config)
    except NO_CONFIGURATION:
        with pytest.raises(MalformedMessage, match="makes no T5"):
            build_model({"config.json": raw}, layout_of(MEMBERS[0].model()), device=torch.device("cpu"))
        return
    build_model({"config.json": raw}, layout_of(model), device=torch.device("cpu"))
    ids = torch.randint(0, config.vocab_size, (1, 70))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids[:, :40], 40)
    with torch.no_grad():
        assert bool(torch.isfinite(summed_loss(model.eval(), batch)))


@pytest.mark.parametrize(
    ("buckets", "furthest", "taken"),
    [(32, 128, True), (4, 3, True), (32, 17, True), (32, 16, False), (4, 2, False), (3, 128, False), (1, 128, False)],
)
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_attack_buckets_that_the_library_divides_by_zero_for(
    kind: str, buckets: int, furthest: int, taken: bool
) -> None:
    values = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": furthest}
    raw = json.dumps({"model_type": kind, **values}).encode()
    if taken:
        assert t5_values(raw)["relative_attention_num_buckets"] == buckets
        return
    with pytest.raises(MalformedMessage, match=r"relative_attention_(num_buckets|max_distance) \d+: it must be"):
        t5_values(raw)
