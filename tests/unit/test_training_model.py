import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_t5 import bundle_of, config_json, random_model, tokenizer_json, v1_1, vocabulary_size
from transformers import T5ForConditionalGeneration

from security.errors import IntegrityError, MalformedMessage
from silo_agent.training.batches import Batch
from silo_agent.training.model import bind, build_model, delta_blocks, layout_of, load_vector, vector_blocks
from silo_agent.training.task_loss import summed_loss
from silo_agent.training.tokenizer import SpecialTokens, TextTokenizer
from silo_wire.manifest import Layout, TensorSpec

CPU = torch.device("cpu")
SPECIAL = SpecialTokens(pad=0, end=1, start=0)


def vector(model: torch.nn.Module) -> bytes:
    return b"".join(vector_blocks(bind(model, layout_of(model))))


def test_tied_parameters_are_counted_and_sent_once_under_the_first_of_their_names() -> None:
    model = random_model()
    layout = layout_of(model)
    names = [tensor.name for tensor in layout.tensors]
    assert "decoder.embed_tokens.weight" in names
    assert not {"encoder.embed_tokens.weight", "lm_head.weight", "shared.weight"} & set(names)
    assert layout.parameters == sum(p.numel() for p in model.parameters())
    assert len(vector(model)) == 4 * layout.parameters


def test_an_output_layer_of_its_own_is_a_tensor_of_its_own() -> None:
    untied, tied = layout_of(v1_1()), layout_of(random_model(feed_forward_proj="gated-gelu"))
    assert {t.name for t in untied.tensors} - {t.name for t in tied.tensors} == {"lm_head.weight"}
    assert untied.parameters - tied.parameters == 32 * vocabulary_size()


@pytest.mark.parametrize("make", [random_model, v1_1])
def test_a_built_model_computes_what_the_original_does(make: Callable[..., T5ForConditionalGeneration]) -> None:
    """Also v1.1: transformers ties whatever config.json says, so the layout alone tells that the output layer is apart."""
    original = make()
    bundle = bundle_of(original)
    model = build_model(bundle.files, bundle.layout, device=CPU).eval()
    load_vector(bind(model, bundle.layout), vector_blocks(bind(original, bundle.layout)))
    assert (model.lm_head.weight is model.shared.weight) == (original.lm_head.weight is original.shared.weight)
    ids, labels = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[8, 9, 1]])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, labels=labels) for m in (model, original))
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), labels, 3)
        summed = summed_loss(model, batch)
    assert torch.equal(ours.logits, theirs.logits)
    assert float(summed) == pytest.approx(3 * float(theirs.loss), rel=1e-6)


def test_padding_changes_no_loss() -> None:
    model = random_model()
    ids, labels = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[8, 9, 1]])
    padded = Batch(
        torch.tensor([[5, 6, 7, 1, 0, 0]]),
        torch.tensor([[True] * 4 + [False] * 2]),
        torch.tensor([[8, 9, 1, -100]]),
        3,
    )
    with torch.no_grad():
        bare = summed_loss(model, Batch(ids, torch.ones_like(ids, dtype=torch.bool), labels, 3))
        assert float(summed_loss(model, padded)) == pytest.approx(float(bare), rel=1e-5)


@pytest.mark.parametrize("make", [random_model, v1_1])
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 200_000), max_size=8))
def test_load_and_read_are_bit_exact_however_the_blocks_are_cut(
    make: Callable[..., T5ForConditionalGeneration], cuts: list[int]
) -> None:
    target = make(2)
    raw = vector(make(1))
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    load_vector(bind(target, layout_of(target)), (raw[a:b] for a, b in pairwise(edges)))
    assert vector(target) == raw


def test_delta_is_local_minus_round_model() -> None:
    base, local = random_model(1), random_model(2)
    blocks = list(delta_blocks(bind(local, layout_of(local)), [vector(base)]))
    assert [len(block) for block in blocks] == [t.elements for t in layout_of(base).tensors]
    ours, theirs = (np.frombuffer(vector(m), dtype="<f4") for m in (local, base))
    assert np.array_equal(np.concatenate(blocks), ours - theirs)


@pytest.mark.parametrize(("cut", "reason"), [(slice(None, -4), "ends within tensor"), (slice(None), "is longer")])
def test_a_vector_of_wrong_length_is_refused(cut: slice, reason: str) -> None:
    model = random_model()
    raw = vector(model)[cut] + (b"" if reason != "is longer" else b"\0\0\0\0")
    with pytest.raises(IntegrityError, match=reason):
        load_vector(bind(model, layout_of(model)), [raw])
    with pytest.raises(IntegrityError, match=reason):
        list(delta_blocks(bind(model, layout_of(model)), [raw]))


def test_attack_round_model_with_nan_is_refused() -> None:
    model = random_model()
    raw = bytearray(vector(model))
    raw[-4:] = np.float32("nan").tobytes()
    with pytest.raises(
        MalformedMessage, match=r"tensor encoder\.final_layer_norm\.weight has values that are not finite"
    ):
        load_vector(bind(model, layout_of(model)), [raw])


def test_a_layout_of_another_shape_is_named_before_memory_is_taken() -> None:
    layout = layout_of(random_model())
    huge = config_json(d_model=1 << 20)  # terabytes, if it were allocated
    with pytest.raises(MalformedMessage, match=r"disagree: tensor decoder\.block\.0.* is \("):
        build_model({"config.json": huge}, layout, device=CPU)


def test_a_layout_with_a_tensor_too_many_is_refused() -> None:
    layout = layout_of(random_model())
    more = Layout("float32", tuple(sorted([*layout.tensors, TensorSpec("zz.weight", (2,))], key=lambda t: t.name)))
    with pytest.raises(MalformedMessage, match=r"tensor zz\.weight is absent by the former"):
        build_model({"config.json": config_json()}, more, device=CPU)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (b'{"model_type": "bert"}', "model_type 'bert': only t5"),
        (b"[]", "only t5"),
        (b"{", "not JSON"),
        (config_json(decoder_start_token_id=None), "decoder_start_token_id None"),
        (config_json(eos_token_id=[1, 2]), "eos_token_id"),
        (config_json(pad_token_id=100_000), "pad_token_id 100000"),
        (config_json(d_model="wide"), "makes no T5"),
        (config_json(feed_forward_proj="gated-nonsense-x"), "makes no T5"),
        (config_json(feed_forward_proj="nonsense"), "makes no T5"),
        (config_json(d_kv=-1), "makes no T5"),
        (config_json(num_layers=10**9), "more layers than layout"),
        (config_json(quantization_config={"load_in_8bit": True}), "quantisation"),
    ],
)
def test_a_config_that_is_no_plain_t5_is_refused(config: bytes, reason: str) -> None:
    with pytest.raises(MalformedMessage, match=reason):
        build_model({"config.json": config}, layout_of(random_model()), device=CPU)


def test_the_plans_dropout_overrides_the_models() -> None:
    bundle = bundle_of(random_model())
    model = build_model(bundle.files, bundle.layout, device=CPU, dropout=0.4)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.4}
    assert model.decoder.block[0].layer[0].SelfAttention.dropout == 0.4


def tokenizer(**files: bytes) -> TextTokenizer:
    return TextTokenizer({"tokenizer.json": tokenizer_json(), **files}, special=SPECIAL, vocabulary=vocabulary_size())


def test_tokenizer_round_trip_keeps_sql_as_it_is() -> None:
    text = 'SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = "paris" ;'
    (ids,) = tokenizer().encode([text])
    assert ids[-1] == SPECIAL.end
    assert tokenizer().decode([ids]) == [text]


def test_a_cut_encoding_still_ends() -> None:
    (ids,) = tokenizer().encode(["how many people live in paris ?"])
    assert tokenizer().cut(ids, 4) == [*ids[:3], SPECIAL.end]
    assert tokenizer().cut(ids, len(ids)) == ids


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"tokenizer\.json has \d+ tokens, the model's vocabulary has 10"):
        TextTokenizer({"tokenizer.json": tokenizer_json()}, special=SPECIAL, vocabulary=10)
    with pytest.raises(MalformedMessage, match="does not parse"):
        TextTokenizer({"tokenizer.json": b"{}"}, special=SPECIAL, vocabulary=1000)
    with pytest.raises(MalformedMessage, match=r"has no tokenizer\.json"):
        TextTokenizer({}, special=SPECIAL, vocabulary=1000)
    without_end = json.loads(tokenizer_json()) | {"post_processor": None}
    with pytest.raises(MalformedMessage, match="does not end a text"):
        tokenizer(**{"tokenizer.json": json.dumps(without_end).encode()})


def test_bundle_files_are_read_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no network, no class that a file names: the working directory could hold anything."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    bundle = bundle_of(random_model())
    assert layout_of(build_model(bundle.files, bundle.layout, device=CPU)) == bundle.layout
