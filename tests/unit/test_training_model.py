import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.tiny_t5 import bundle_of, config_json, random_model, tokenizer_json, v1_1, vocabulary_size
from transformers import T5ForConditionalGeneration

from lorica_security.errors import IntegrityError, MalformedMessage, StorageError
from lorica_security.host.file_mark import FileMark
from silo_agent.rounds.update import BLOCK_ELEMENTS
from silo_agent.training.data.batches import Batch
from silo_agent.training.data.tokenizer import SpecialTokens, TextTokenizer
from silo_agent.training.model.model import BoundParameters, bind, build_model, layout_of, load_vector, vector_blocks
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.task_loss import summed_loss
from silo_wire.manifest import Dtype, Layout, TensorSpec, manifest_of

CPU = torch.device("cpu")
SPECIAL = SpecialTokens(pad=0, end=1, start=0)


def vector(model: torch.nn.Module) -> bytes:
    return b"".join(vector_blocks(bind(model, layout_of(model))))


def load(model: torch.nn.Module, path: Path, raw: bytes, *, chunk_bytes: int = 4096, dtype: Dtype = "float32") -> None:
    """Read `raw`, kept in `path`, into `model`."""
    layout = layout_of(model)
    path.write_bytes(raw)
    vector_layout = layout.as_type(dtype)
    with VectorReader(path, manifest_of(vector_layout, [raw], chunk_bytes), vector_layout, None) as reader:
        load_vector(bind(model, layout), reader)
        reader.checked()


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
def test_a_built_model_computes_what_the_original_does(
    make: Callable[..., T5ForConditionalGeneration], tmp_path: Path
) -> None:
    """Also v1.1: transformers ties whatever config.json says, so the layout alone tells that the output layer is
    apart."""
    original = make()
    bundle = bundle_of(original)
    model = build_model(bundle.files, bundle.layout, device=CPU).eval()
    load(model, tmp_path / "vector", vector(original))
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


def several_blocks(seed: int = 0) -> T5ForConditionalGeneration:
    """A T5 whose vector takes more than one block, the last of them short."""
    model = random_model(seed, d_ff=3000)
    assert BLOCK_ELEMENTS < layout_of(model).parameters % (2 * BLOCK_ELEMENTS) != 0
    return model


@pytest.mark.parametrize("make", [random_model, v1_1, several_blocks])
@pytest.mark.parametrize("chunk_bytes", [999, 4096, 100_001, 4 * BLOCK_ELEMENTS, 4 << 20])
def test_load_and_read_are_bit_exact_however_the_vector_is_cut(
    make: Callable[..., T5ForConditionalGeneration], chunk_bytes: int, tmp_path: Path
) -> None:
    target, raw = make(2), vector(make(1))
    load(target, tmp_path / "vector", raw, chunk_bytes=chunk_bytes)
    assert vector(target) == raw


def test_a_bfloat16_vector_is_loaded_as_the_very_same_numbers(tmp_path: Path) -> None:
    source, target = several_blocks(1).to(torch.bfloat16), several_blocks(2)
    raw = b"".join(t.detach().view(torch.int16).numpy().tobytes() for t in bind_any(source))
    load(target, tmp_path / "vector", raw, dtype="bfloat16")
    for theirs, ours in zip(bind_any(source), bind_any(target), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(theirs.float(), ours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cuda", "cpu by way of the host's memory"])
def test_a_model_elsewhere_is_loaded_block_by_block(
    device: str, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does is done without one as well, all but the last copy."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA GPU")
    source, target = several_blocks(1).to(getattr(torch, dtype)), several_blocks(2)
    bits = torch.int32 if dtype == "float32" else torch.int16
    raw = b"".join(tensor.detach().view(bits).numpy().tobytes() for tensor in bind_any(source))
    if device == "cuda":
        target.to("cuda")
    else:
        monkeypatch.setattr(BoundParameters, "device", torch.device("cuda"))
    load(target, tmp_path / "vector", raw, dtype=dtype)
    for theirs, ours in zip(bind_any(source), bind_any(target), strict=True):
        assert torch.equal(theirs.float(), ours.cpu())


def bind_any(model: T5ForConditionalGeneration) -> list[torch.nn.Parameter]:
    """Its parameters in layout order, whatever their type."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return [named[tensor.name] for tensor in layout_of(model).tensors]


def test_slices_cover_the_vector_in_order_and_are_the_parameters_own_memory() -> None:
    model = several_blocks()
    parameters: BoundParameters = bind(model, layout_of(model))
    for step in (1000, 7919, parameters.elements):
        pieces = []
        for begin in range(0, parameters.elements, step):
            end = min(begin + step, parameters.elements)
            slices = [tensor for _, tensor in parameters.slices(begin, end)]
            assert sum(len(tensor) for tensor in slices) == end - begin
            pieces += [tensor.numpy().tobytes() for tensor in slices]
        assert b"".join(pieces) == vector(model)
    for _, tensor in parameters.slices(0, parameters.elements):
        tensor.zero_()
    assert not any(vector(model))


@pytest.mark.parametrize("change", [-4, 4])
def test_a_vector_of_wrong_length_is_refused(change: int, tmp_path: Path) -> None:
    model = random_model()
    layout, raw = layout_of(model), vector(model)
    path = tmp_path / "vector"
    path.write_bytes(raw[:change] if change < 0 else raw + bytes(change))
    reason = f"has {len(raw) + change} bytes, its manifest says {len(raw)}"
    with pytest.raises(IntegrityError, match=reason), VectorReader(path, manifest_of(layout, [raw]), layout, None):
        pass


def test_a_chunk_that_changed_is_refused_unless_the_mark_says_that_nothing_did(tmp_path: Path) -> None:
    model = random_model()
    layout, raw, path = layout_of(model), vector(model), tmp_path / "vector"
    load(model, path, raw)
    manifest = manifest_of(layout, [raw], 4096)
    with path.open("rb") as file:
        mark = FileMark.of(file.fileno())
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")
    os.utime(path, (0, 0))  # a clock of some milliseconds would show no change so soon
    with (
        pytest.raises(IntegrityError, match="chunk 1 does not have the digest"),
        VectorReader(path, manifest, layout, mark) as reader,
    ):
        load_vector(bind(model, layout), reader)
    with path.open("rb") as file:
        mark = FileMark.of(file.fileno())
    with VectorReader(path, manifest, layout, mark) as reader:
        load_vector(bind(model, layout), reader)
        assert reader.checked() == mark
    assert vector(model) != raw


def test_a_vector_that_was_not_read_to_its_end_is_not_checked(tmp_path: Path) -> None:
    model = random_model()
    layout, raw, path = layout_of(model), vector(model), tmp_path / "vector"
    path.write_bytes(raw)
    with (
        VectorReader(path, manifest_of(layout, [raw], 4096), layout, None) as reader,
        pytest.raises(IntegrityError, match=f"0 of {len(raw)} bytes"),
    ):
        reader.checked()


def test_a_vector_that_is_gone_is_named(tmp_path: Path) -> None:
    layout = layout_of(random_model())
    manifest = manifest_of(layout, [vector(random_model())])
    with (
        pytest.raises(StorageError, match="absent cannot be read"),
        VectorReader(tmp_path / "absent", manifest, layout, None),
    ):
        pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attack_round_model_with_nan_is_refused(tmp_path: Path, dtype: Dtype) -> None:
    model = random_model()
    raw = bytearray(layout_of(model).as_type(dtype).total_bytes)
    raw[-2:] = b"\xc0\x7f"
    with pytest.raises(
        MalformedMessage, match=r"tensor encoder\.final_layer_norm\.weight has values that are not finite"
    ):
        load(model, tmp_path / "vector", bytes(raw), dtype=dtype)


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
        (b'{"model_type": "bert"}', "model_type 'bert': only those of T5"),
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (config_json(decoder_start_token_id=None), "decoder_start_token_id None"),
        (config_json(eos_token_id=[1, 2]), "eos_token_id"),
        (config_json(pad_token_id=100_000), "pad_token_id 100000"),
        (config_json(dropout_rate=0.97), "dropout_rate 0.97: it must be 0 to 0.9"),
        (config_json(dropout_rate=-0.1), "dropout_rate -0.1"),
        (config_json(layer_norm_epsilon=0.0), "layer_norm_epsilon 0.0: it must be 1e-12 to 0.01"),
        (config_json(layer_norm_epsilon=1e12), "layer_norm_epsilon 1"),
        (config_json(attn_implementation="somebody/kernels"), "has attn_implementation"),
        (config_json(_attn_implementation="flex_attention"), "has _attn_implementation"),
        (config_json(layer_norm_epsilon=-1e-6), "layer_norm_epsilon -1e-06"),
        (config_json(layer_norm_epsilon="none"), "config.json"),
        (config_json(d_model="wide"), "d_model 'wide': it must be"),
        (config_json(feed_forward_proj="gated-nonsense-x"), "makes no T5"),
        (config_json(feed_forward_proj="nonsense"), "makes no T5"),
        (config_json(d_kv=-1), "d_kv -1: it must be"),
        (config_json(num_layers=10**9), "num_layers 1000000000"),
        (config_json(num_layers=1000), "more layers than layout"),
        (config_json(hidden_size=10**9), "hidden_size 1000000000"),
        (config_json(num_labels=10**9), "num_labels 1000000000"),
        (config_json(to_dict=1), "has to_dict, which is no value"),
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


def of_words(*, unknown: str = "<unk>", ends_with: Sequence[int] = (1,), **words: int) -> bytes:
    """A tokenizer of whole words, with these ids."""
    ends = {"id": "</s>", "ids": list(ends_with), "tokens": ["</s>"] * len(ends_with)}
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": ends},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "merges": [],
            "vocab": {"<pad>": 0, "</s>": 1, "<unk>": 2, **words},
            "unk_token": unknown,
        },
    }
    return json.dumps(value).encode()


def test_a_tokenizer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"tokenizer\.json has \d+ tokens, the model's vocabulary has 10"):
        TextTokenizer({"tokenizer.json": tokenizer_json()}, special=SPECIAL, vocabulary=10)
    with pytest.raises(MalformedMessage, match="none of T5's family: model is null"):
        TextTokenizer({"tokenizer.json": b"{}"}, special=SPECIAL, vocabulary=1000)
    with pytest.raises(MalformedMessage, match=r"has no tokenizer\.json"):
        TextTokenizer({}, special=SPECIAL, vocabulary=1000)
    for one_word in (99_999, vocabulary_size()):
        with pytest.raises(MalformedMessage, match=f"has token id {one_word}, the model's vocabulary has"):
            tokenizer(**{"tokenizer.json": of_words(kowalski=one_word)})
    with pytest.raises(MalformedMessage, match="has token id 99999"):
        tokenizer(**{"tokenizer.json": of_words(ends_with=[99_999])})
    with pytest.raises(MalformedMessage, match="cannot be read"):
        tokenizer(**{"tokenizer.json": of_words(unknown="none")})
    tokenizer(**{"tokenizer.json": of_words(kowalski=vocabulary_size() - 1)})
    without_end = json.loads(tokenizer_json()) | {"post_processor": None}
    with pytest.raises(MalformedMessage, match="does not end a text"):
        tokenizer(**{"tokenizer.json": json.dumps(without_end).encode()})


def test_bundle_files_are_read_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no network, no class that a file names: the working directory could hold anything."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    bundle = bundle_of(random_model())
    assert layout_of(build_model(bundle.files, bundle.layout, device=CPU)) == bundle.layout
