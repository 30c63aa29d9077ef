"""Hostile model folders: whatever is in one, it becomes a plan or is refused by name, within bounds, on either side."""

import gzip
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import pre_tokenizers

from lorica_coordinator.plans import model_source
from lorica_coordinator.plans.model_source import FolderModel, HubModel, write_model
from lorica_security.errors import ConfigurationError, LoricaError, MalformedMessage, StorageError
from silo_agent.training.data.tokenizer import SpecialTokens, TextTokenizer
from silo_agent.training.model.initial_model import compare
from silo_wire.model_folders import confined_child, folder_tokenizer, model_folder_read
from silo_wire.model_folders.confined import Limits, confined
from silo_wire.model_folders.model_folder import prepared
from silo_wire.model_folders.tokenizer_trial import PANIC, try_tokenizer
from silo_wire.plans.model_files import MOST_BYTES, parsed
from silo_wire.plans.plan import PlanBundle
from tests.fuzz.mutations import spoilt_json
from tests.support.tiny_t5 import (
    bundle_of,
    config_json,
    pieces_model,
    random_model,
    save_copy,
    tokenizer_json,
    vocabulary_size,
)

CASES = int(os.environ.get("FUZZ_CASES", "300"))
CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
WEIGHTS, INDEX, PIECES = "model.safetensors", "model.safetensors.index.json", "spiece.model"
NESTED = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 300,
}
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$(?=x)"}, "behavior": "Removed", "invert": False}
SPECIAL = SpecialTokens(pad=0, end=1, start=0)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "t5"
    save_copy(random_model(), folder)
    return folder


@pytest.fixture(scope="module")
def bundle() -> PlanBundle:
    return bundle_of(random_model(), source="hub:somebody/model")


@pytest.fixture
def folder(origin: Path, tmp_path: Path) -> Path:
    return filled(origin, tmp_path / "t5")


def filled(origin: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in origin.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change(folder: Path, name: str, **values: Any) -> None:
    kept = {} if is_odd(folder / name) else json.loads((folder / name).read_text())
    in_place(folder / name, lambda path: path.write_text(json.dumps({**kept, **values})))


def is_odd(path: Path) -> bool:
    """Whether it is a link or a pipe, say: nothing is read or written through it here."""
    return path.is_symlink() or not path.is_file()


def in_place(path: Path, make: Callable[[Path], object]) -> None:
    """Make a new file of this name, whatever had it."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    make(path)


def by_index(folder: Path, name: str) -> None:
    """The parameters in a file of this name, which an index tells of."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}))


def sparse(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def pieces(folder: Path, raw: bytes) -> None:
    (folder / TOKENIZER).unlink()
    (folder / PIECES).write_bytes(raw)


def unigram(*texts: str, kind: int = 1, rules: bytes = b"", score: float = -1.0) -> bytes:
    model = sentencepiece_model_pb2.ModelProto()
    for text in texts:
        model.pieces.add(piece=text, score=score)
    model.trainer_spec.model_type = kind
    model.normalizer_spec.precompiled_charsmap = rules
    return bytes(model.SerializeToString())


def header(folder: Path, **changes: Any) -> None:
    """The weights file with another header, its data as it was."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    name = next(it for it in entries if it != "__metadata__")
    entries[name] = {**entries[name], **changes}
    told = json.dumps(entries).encode()
    (folder / WEIGHTS).write_bytes(len(told).to_bytes(8, "little") + told + raw[8 + length :])


TWICE = b'{"model_type": "bert", "model_type": "t5"}'
ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "replacements that grow": (lambda it: change(it, TOKENIZER, normalizer=NESTED), r'normalizer has "Replace" twice'),
    "a regular expression": (lambda it: change(it, TOKENIZER, pre_tokenizer=BACKTRACKS), 'pre_tokenizer has "Split"'),
    "no pieces": (
        lambda it: change(it, TOKENIZER, model={"type": "Unigram", "unk_id": None, "vocab": []}),
        "makes no tokenizer",
    ),
    "an empty piece": (
        lambda it: change(it, TOKENIZER, model={"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0]]}),
        "has the empty text for a piece",
    ),
    "a tokenizer of another type": (lambda it: (it / TOKENIZER).write_text("[]"), "not a JSON object"),
    "a tokenizer's class": (
        lambda it: change(it, TOKENIZER_CONFIG, tokenizer_class="BertJapaneseTokenizer"),
        "tokenizer_class 'BertJapaneseTokenizer': none of T5's family",
    ),
    "a class in config.json": (lambda it: change(it, CONFIG, tokenizer_class="LlamaTokenizer"), "'LlamaTokenizer'"),
    "extra ids": (lambda it: change(it, TOKENIZER_CONFIG, extra_ids=10**9), "extra_ids 1000000000: it must be 0 to"),
    "no tokenizer": (lambda it: (it / TOKENIZER).unlink(), r"has no tokenizer\.json and no spiece\.model"),
    "many pieces": (lambda it: pieces(it, b"\x0a\x00" * 600_000), "600,000 pieces: it must have 1 to"),
    "too large pieces": (lambda it: pieces(it, b"\x0a\x00" * (9 << 20)), "bytes: more than 16,777,216"),
    "pieces that do not parse": (lambda it: pieces(it, b"x"), r"spiece\.model is no model of sentencepiece"),
    "pieces without text": (lambda it: pieces(it, unigram("a", "")), "a piece of no characters"),
    "pieces of another kind": (lambda it: pieces(it, unigram("a", kind=2)), "no unigram model"),
    "a score that is none": (lambda it: pieces(it, unigram("a", score=math.nan)), "whose score is no number"),
    "a map among pieces": (lambda it: pieces(it, unigram("a", rules=b"\xff" * 99)), "that is no character map"),
    "pickle by an index": (lambda it: by_index(it, "x.bin"), r"names 'x\.bin': only \*\.safetensors of the folder"),
    "elsewhere by an index": (lambda it: by_index(it, "../e.safetensors"), r"names '\.\./e\.safetensors': only"),
    "an index without a map": (lambda it: in_place(it / WEIGHTS, lambda _: (it / INDEX).write_text("{}")), "no weight_map"),
    "a lost file of an index": (
        lambda it: (by_index(it, "m.safetensors"), (it / "m.safetensors").unlink()),
        r"it has no m\.safetensors, which",
    ),
    "a width in words": (lambda it: change(it, CONFIG, d_model="wide"), "d_model 'wide': it must be a whole number"),
    "a width that is true": (lambda it: change(it, CONFIG, d_model=True), "d_model True: it must be"),
    "a million layers": (lambda it: change(it, CONFIG, num_layers=10**6), "num_layers 1000000: it must be"),
    "by another name": (lambda it: change(it, CONFIG, num_hidden_layers=10**6), "num_hidden_layers 1000000"),
    "50,000 keys": (lambda it: change(it, CONFIG, **{f"k{at}": 0 for at in range(50_000)}), "bytes: more than 262,144"),
    "2,000 keys": (lambda it: change(it, CONFIG, **{f"k{at}": 0 for at in range(2000)}), "keys: more than 1,000"),
    "no vocabulary": (lambda it: change(it, CONFIG, vocab_size=0), "vocab_size 0: it must be"),
    "a vocabulary of terabytes": (lambda it: change(it, CONFIG, vocab_size=1 << 22, d_model=1 << 20), "does not fit config"),
    "a thousand layers": (lambda it: change(it, CONFIG, num_layers=900), "has 9\\d\\d layers, more than"),
    "a key twice": (lambda it: (it / CONFIG).write_bytes(TWICE), "the key 'model_type' stands twice"),
    "no number": (lambda it: (it / CONFIG).write_text('{"model_type": "t5", "x": NaN}'), "NaN is no number in JSON"),
    "deep lists": (lambda it: (it / CONFIG).write_text("[" * 100_000), "is not JSON"),
    "code": (lambda it: change(it, CONFIG, task={"deep": [{"auto_map": {}}]}), "has auto_map, which names code"),
    "a sparse file": (lambda it: sparse(it / CONFIG, 8 << 30), "bytes: more than 262,144"),
    "sparse parameters": (lambda it: sparse(it / WEIGHTS, 8 << 40), "does not hold what its header says"),
    "a pipe": (lambda it: in_place(it / CONFIG, os.mkfifo), r"config\.json is no ordinary file"),
    "a pipe of parameters": (lambda it: in_place(it / WEIGHTS, os.mkfifo), r"model\.safetensors is no ordinary file"),
    "a folder": (lambda it: in_place(it / TOKENIZER, Path.mkdir), r"tokenizer\.json is no ordinary file"),
    "a device": (lambda it: in_place(it / CONFIG, lambda path: path.symlink_to("/dev/zero")), "leads out of the folder"),
    "a link that leads out": (
        lambda it: in_place(it / TOKENIZER_CONFIG, lambda path: path.symlink_to("/etc/passwd")),
        "is a link that leads out of the folder",
    ),
    "a link to nothing": (lambda it: in_place(it / CONFIG, lambda path: path.symlink_to("gone")), "cannot be read"),
    "a link to itself": (lambda it: in_place(it / CONFIG, lambda path: path.symlink_to(path.name)), "cannot be read"),
    "a long header": (lambda it: (it / WEIGHTS).write_bytes(b"\xff" * 100), "is not a safetensors file"),
    "a header of something else": (lambda it: header(it, dtype="I64"), "which parameters do not have"),
    "a tensor of another length": (lambda it: header(it, shape=[1 << 40, 1 << 40]), "not as long as its shape"),
    "a tensor from the end on": (lambda it: header(it, data_offsets=[8, 4]), "not as long as its shape"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_a_hostile_folder_is_refused_by_name(folder: Path, tmp_path: Path, attack: str) -> None:
    spoil, says = ATTACKS[attack]
    spoil(folder)
    with pytest.raises(ConfigurationError, match=says):
        write_model(FolderModel(folder), tmp_path, seed=1)


@pytest.mark.parametrize(
    "attack",
    ["replacements that grow", "many pieces", "elsewhere by an index", "a pipe", "a link that leads out"],
)
def test_attack_a_hostile_copy_is_refused_by_the_silo_as_well(folder: Path, bundle: PlanBundle, attack: str) -> None:
    spoil, says = ATTACKS[attack]
    spoil(folder)
    with pytest.raises(ConfigurationError, match=says):
        compare(bundle, folder)


def test_pickle_of_an_index_is_not_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_index(folder, "x.bin")
    monkeypatch.setattr(torch, "load", lambda *_args, **_more: pytest.fail("pickle was opened"))
    with pytest.raises(ConfigurationError):
        write_model(FolderModel(folder), tmp_path, seed=1)


@pytest.mark.parametrize("side", ["coordinator", "silo"])
def test_a_panic_in_this_very_process_is_a_refusal(
    origin: Path, bundle: PlanBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """What a folder without tokenizer.json makes is built here, after its files were looked at."""

    class Panics:
        @staticmethod
        def from_pretrained(*_args: object, **_more: object) -> None:
            raise type(PANIC, (BaseException,), {})("deep inside")

    monkeypatch.setattr(folder_tokenizer, "AutoTokenizer", Panics)
    sides: dict[str, Callable[[], object]] = {
        "coordinator": lambda: write_model(FolderModel(origin), tmp_path, seed=1),
        "silo": lambda: compare(bundle, origin),
    }
    with pytest.raises(ConfigurationError, match="the tokenizers library panicked: deep inside"):
        sides[side]()


def test_a_folder_in_pieces_and_a_snapshot_of_the_hubs_cache_are_taken(origin: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    filled(origin, blobs)
    by_index(blobs, "model-00001-of-00001.safetensors")
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    taken = prepared(snapshot)
    assert taken.shapes == prepared(origin).shapes
    assert taken.parameters == sum(it.numel() for it in random_model().parameters())
    out = tmp_path / "out"
    out.mkdir()
    written = write_model(FolderModel(snapshot), out, seed=1)
    assert list(written.weights) == ["model-00001-of-00001.safetensors"]


def test_a_folder_with_pieces_of_sentencepiece_as_the_first_t5s_have_them_is_taken(tmp_path: Path) -> None:
    folder, out = tmp_path / "t5", tmp_path / "out"
    out.mkdir()
    random_model(vocab_size=vocabulary_size() + 10).save_pretrained(folder)
    (folder / PIECES).write_bytes(pieces_model())
    extra = [f"<extra_id_{at}>" for at in range(10)]
    (folder / TOKENIZER_CONFIG).write_text(
        json.dumps({"extra_ids": 10, "additional_special_tokens": extra, "sp_model_kwargs": {}})
    )
    assert TOKENIZER in write_model(FolderModel(folder), out, seed=1).files
    made = json.loads((out / TOKENIZER).read_text())
    assert made["normalizer"]["type"] == "Precompiled"
    assert {it["content"] for it in made["added_tokens"]} >= set(extra)


def test_a_folder_with_a_vocabulary_and_merges_as_codet5_has_them_is_taken(tmp_path: Path) -> None:
    folder, out = tmp_path / "t5", tmp_path / "out"
    out.mkdir()
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "se"]
    random_model(vocab_size=len(tokens)).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: at for at, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\ns e\n")
    (folder / TOKENIZER_CONFIG).write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    assert TOKENIZER in write_model(FolderModel(folder), out, seed=1).files
    made = json.loads((out / TOKENIZER).read_text())
    assert (made["model"]["type"], made["pre_tokenizer"]["type"]) == ("BPE", "ByteLevel")
    assert made["model"]["vocab"]["se"] == tokens.index("se")


def test_what_the_libraries_are_given_names_no_file_and_no_template(folder: Path) -> None:
    change(folder, TOKENIZER_CONFIG, vocab_file="/etc/passwd", chat_template="{{ 1 }}", model_max_length=512)
    (folder / "chat_template.jinja").write_text("{{ 1 }}")
    (folder / "modeling_t5.py").write_text("raise SystemExit")
    with prepared(folder).laid_out() as copy:
        names = sorted(it.name for it in copy.iterdir())
        kept = json.loads((copy / TOKENIZER_CONFIG).read_text())
    assert names == [CONFIG, "generation_config.json", WEIGHTS, TOKENIZER, TOKENIZER_CONFIG]
    assert kept["model_max_length"] == 512
    assert not {"vocab_file", "chat_template"} & kept.keys()
    assert not copy.exists()


# --- the agent, and the plan that it is offered


def of_plan(**parts: Any) -> bytes:
    return json.dumps({**json.loads(tokenizer_json()), **parts}).encode()


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"normalizer": NESTED}, r'none of T5\'s family: normalizer has "Replace" twice'),
        ({"pre_tokenizer": BACKTRACKS}, 'none of T5\'s family: pre_tokenizer has "Split"'),
        ({"added_tokens": [{"content": ""}]}, "added_tokens has the empty text"),
        ({"added_tokens": [{"content": "x"}] * 10_001}, "added_tokens has more than 10,000"),
    ],
    ids=["replacements", "regular expression", "empty token", "tokens"],
)
def test_attack_a_plan_in_the_clear_has_a_tokenizer_that_ends_the_agent(parts: dict[str, Any], says: str) -> None:
    files = {TOKENIZER: of_plan(**parts)}
    with pytest.raises(MalformedMessage, match=says):
        TextTokenizer(files, special=SPECIAL, vocabulary=vocabulary_size())


def test_attack_a_plan_whose_files_take_gigabytes_to_parse() -> None:
    """Each list takes 30 times its bytes; an agent parses what it is offered before anybody looks at it."""
    with pytest.raises(MalformedMessage, match=r"tokenizer\.json has 1,048,578 lists and objects: more than"):
        bundle_of(random_model(), tokenizer=b"[" + b"[]," * (1 << 20) + b"[]]")
    with pytest.raises(MalformedMessage, match=r"config\.json has 524,288 bytes: more than 262,144"):
        bundle_of(random_model(), config=b" " * (1 << 19))


def test_a_tokenizer_that_needs_more_than_it_may_is_refused_with_the_reason() -> None:
    long = "b" * (24 << 20)
    raw = of_plan(added_tokens=[])
    try_tokenizer(raw)
    with pytest.raises(MalformedMessage, match=r"tokenizer\.json of the plan needed more than 1 MiB"):
        try_tokenizer(of_plan(version=long), Limits(memory_bytes=1 << 20))


# --- the process


def test_a_job_that_runs_for_ever_is_ended_and_said_so(tmp_path: Path) -> None:
    with pytest.raises(MalformedMessage, match=r"^model x: took longer than 0\.01 s$"):
        confined("folder", os.fsencode(tmp_path), "model x:", Limits(seconds=0.01))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("b''.join([b'x' * (1 << 30)])", "needed more than 64 MiB"),
        ("__import__('os').abort()", "ended the process that looked at it, by SIGABRT"),
        ("__import__('os').kill(__import__('os').getpid(), 24)", "took longer than 60 s"),
        ("open('/proc/self/cmdline', 'rb').read() * 9999", "Errno 27|ended the process"),
        ("__import__('threading').Thread(target=print).start() or b''", "."),
        ("exec('raise ValueError(1)')", r"cannot be read \(ValueError: 1\)"),
        (
            'exec(\'raise type("PanicException", (BaseException,), {})("deep inside")\')',
            r"cannot be read \(PanicException: deep inside\)",
        ),
        ("exec('raise SystemExit(3)')", "ended the process that looked at it: it said nothing"),
    ],
    ids=["memory", "abort", "processor", "a long answer", "threads", "an error", "a panic", "an exit"],
)
def test_however_a_job_ends_it_is_a_refusal_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    if code.startswith("__import__('threading')") and os.geteuid() == 0:
        pytest.skip("root may make threads beyond any limit")
    start = (
        "import sys; sys.path[:0] = sys.argv[4:]; from silo_wire.model_folders import confined_child as child; "
        f"child.JOBS['folder'] = lambda request: {code}; child.main(*sys.argv[1:4])"
    )
    monkeypatch.setattr("silo_wire.model_folders.confined._START", start)
    limits = Limits(memory_bytes=64 << 20, seconds=60, answer_bytes=1 << 16)
    with pytest.raises(MalformedMessage, match=says):
        confined("folder", b"/", "model x:", limits)


def test_the_process_has_no_environment_and_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setenv("SECRET_TOKEN", "not for it")
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **more: begun.append((popen(*args, **more), more)) or begun[-1][0]
    )
    prepared(folder)
    ((process, more),) = begun
    assert process.returncode == 0
    assert "SECRET_TOKEN" not in more["env"]
    assert more["start_new_session"]
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, signal.SIG_DFL)


def test_an_answer_that_no_folder_gives_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes over the process that reads hostile files can answer what they like."""

    def told(value: object, rest: bytes = b"") -> bytes:
        raw = json.dumps(value).encode()
        return len(raw).to_bytes(8, "little") + raw + rest

    weights = {"model.safetensors": {"a": [1]}}
    for answer in (
        b"",
        b"\xff" * 100,
        told([]),
        told({"files": {}, "weights": {}}),
        told({"files": {"../x": 1}, "weights": weights}, b"x"),
        told({"files": {CONFIG: 2}, "weights": weights}, b"x"),
        told({"files": {CONFIG: -1}, "weights": weights}, b"x"),
        told({"files": {CONFIG: True}, "weights": weights}, b"x"),
        told({"files": {}, "weights": {"../m.safetensors": {"a": [1]}}}),
        told({"files": {}, "weights": {"model.safetensors": {"a": [-1]}}}),
        told({"files": {}, "weights": {"model.safetensors": {"a": "1"}}}),
        told({"files": {}, "weights": {"model.safetensors": []}}),
    ):
        monkeypatch.setattr("silo_wire.model_folders.model_folder.confined", lambda *_args, answer=answer: answer)
        with pytest.raises(ConfigurationError):
            prepared(folder)


# --- the Hub


def test_attack_files_of_the_hub_that_are_larger_than_they_can_be_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {CONFIG: 10, "model.safetensors": 100, "pytorch_model.bin": 10**15, "../evil.safetensors": 1, "code.py": 1}
    assert model_source._wanted(sizes, "hub:x/y", tmp_path) == [CONFIG, "model.safetensors"]
    with pytest.raises(ConfigurationError, match=r"config\.json has 1000000000 bytes on the Hub, allowed are 262144"):
        model_source._wanted({**sizes, CONFIG: 10**9}, "hub:x/y", tmp_path)
    with pytest.raises(ConfigurationError, match=r"hub:x/y has 953,674,316 MiB, .* free: make room"):
        model_source._wanted({**sizes, "model.safetensors": 10**15}, "hub:x/y", tmp_path)
    assert HubModel("x/y").described == "hub:x/y"


# --- whatever a folder holds


NAMES = (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    "generation_config.json",
    WEIGHTS,
    INDEX,
    PIECES,
    "special_tokens_map.json",
)
KEYS = (
    "d_model",
    "num_layers",
    "vocab_size",
    "num_heads",
    "feed_forward_proj",
    "eos_token_id",
    "model_type",
    "task_specific_params",
)
VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 33, 10**6, 10**19, 1.5, 1e308, "", "wide", "t5", "x" * 5000, [], {}, [[]], {"a": {"b": 1}}]
)
PARTS = (
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
    "added_tokens",
    "padding",
    "truncation",
    "version",
)


@st.composite
def spoiling(draw: st.DrawFn) -> Callable[[Path], object]:
    """One thing that is wrong with a folder."""
    name = draw(st.sampled_from(NAMES))
    match draw(
        st.sampled_from(["lost", "pipe", "folder", "out", "within", "sparse", "bytes", "json", "key", "part", "index"])
    ):
        case "lost":
            return lambda it: (it / name).unlink(missing_ok=True)
        case "pipe":
            return lambda it: in_place(it / name, os.mkfifo)
        case "folder":
            return lambda it: in_place(it / name, Path.mkdir)
        case "out":
            where = draw(st.sampled_from(["/etc/passwd", "/dev/zero", "/proc/self/mem", "../..", "gone"]))
            return lambda it: in_place(it / name, lambda path: path.symlink_to(where))
        case "within":
            other = draw(st.sampled_from(NAMES))
            return lambda it: in_place(it / name, lambda path: path.symlink_to(other))
        case "sparse":
            size = draw(st.sampled_from([1, 1 << 10, 1 << 19, 1 << 34]))
            return lambda it: in_place(it / name, lambda path: sparse(path, size))
        case "bytes":
            raw = draw(
                st.one_of(
                    st.binary(max_size=200), st.sampled_from([b"[" * 10_000, b'{"a":' * 10_000, b"{}", b"[]", b"0"])
                )
            )
            return lambda it: in_place(it / name, lambda path: path.write_bytes(raw))
        case "json":
            file = draw(st.sampled_from([CONFIG, TOKENIZER]))
            valid = json.loads({CONFIG: config_json(), TOKENIZER: tokenizer_json()}[file])
            raw = draw(spoilt_json(valid, lambda value: json.dumps(value).encode()))
            return lambda it: in_place(it / file, lambda path: path.write_bytes(raw))
        case "key":
            key, value = draw(st.sampled_from(KEYS)), draw(VALUES)
            return lambda it: change(it, CONFIG, **{key: value})
        case "part":
            file = draw(st.sampled_from([TOKENIZER, TOKENIZER_CONFIG]))
            key = draw(
                st.sampled_from(
                    PARTS
                    if file == TOKENIZER
                    else ("extra_ids", "tokenizer_class", "eos_token", "additional_special_tokens")
                )
            )
            value = draw(VALUES)
            return lambda it: change(it, file, **{key: value})
    target = draw(st.sampled_from(["x.bin", "../e.safetensors", "m.safetensors", "", "/etc/passwd"]))
    told = json.dumps({"weight_map": {"a": target}})
    return lambda it: in_place(it / WEIGHTS, lambda _: in_place(it / INDEX, lambda path: path.write_text(told)))


def spoilt(origin: Path, folder: Path, spoilings: list[Callable[[Path], object]]) -> Path:
    filled(origin, folder)
    for spoil in spoilings:
        try:
            spoil(folder)
        except (OSError, ValueError, TypeError):
            continue  # an earlier one left nothing for it to spoil
    return folder


fuzz = settings(
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@settings(fuzz, max_examples=CASES)
@given(spoilings=st.lists(spoiling(), min_size=1, max_size=3))
def test_whatever_a_folder_holds_it_is_read_or_refused(
    origin: Path, tmp_path_factory: pytest.TempPathFactory, spoilings: list[Callable[[Path], object]]
) -> None:
    folder = spoilt(origin, tmp_path_factory.mktemp("fuzz") / "t5", spoilings)
    answer = confined_child.answered(model_folder_read.read_folder, os.fsencode(folder))
    assert answer[:1] in (b"+", b"-")
    if answer[:1] == b"-":
        assert PANIC.encode() not in answer
        assert answer[1:].decode().isprintable() or b"JSON" in answer
    assert len(answer) < sum(MOST_BYTES.values())


@settings(fuzz, max_examples=CASES // 12)
@given(spoilings=st.lists(spoiling(), min_size=1, max_size=2))
def test_whatever_a_folder_holds_it_becomes_a_plans_model_or_is_refused(
    origin: Path, tmp_path_factory: pytest.TempPathFactory, spoilings: list[Callable[[Path], object]]
) -> None:
    work = tmp_path_factory.mktemp("fuzz")
    folder, out = spoilt(origin, work / "t5", spoilings), work / "out"
    out.mkdir()
    try:
        written = write_model(FolderModel(folder), out, seed=1)
    except LoricaError:
        return
    assert parsed((out / CONFIG).read_bytes(), CONFIG, MOST_BYTES[CONFIG])["model_type"] == "t5"
    assert written.layout.parameters


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("generation_config.json", {"temperature": 0.5, "do_sample": False}),
        ("generation_config.json", {"length_penalty": 2.0}),
        (CONFIG, {"output_attentions": True}),
    ],
)
def test_values_that_the_library_reads_and_does_not_write_are_refused(
    folder: Path, tmp_path: Path, name: str, values: dict[str, Any]
) -> None:
    change(folder, name, **values)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigurationError, match="cannot be written again"):
        write_model(FolderModel(folder=folder), tmp_path / "out", 1)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"pad_token_id": 10**9}, "config.json has pad_token_id 1000000000: it must be a token below"),
        ({"decoder_start_token_id": -1}, "config.json has decoder_start_token_id -1: it must be a token below"),
        ({"from_pretrained": 1}, "config.json has from_pretrained, which is no value of a T5"),
        ({"save_pretrained": 3}, "config.json has save_pretrained, which is no value of a T5"),
        ({"layer_norm_epsilon": 1.0}, "config.json has layer_norm_epsilon 1.0: it must be"),
        ({"dropout_rate": 0.99}, "config.json has dropout_rate 0.99: it must be"),
    ],
)
def test_what_every_silo_would_refuse_makes_no_plan(
    folder: Path, tmp_path: Path, values: dict[str, Any], problem: str
) -> None:
    change(folder, CONFIG, **values)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigurationError, match=problem):
        write_model(FolderModel(folder=folder), tmp_path / "out", 1)


def test_a_machine_without_room_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._get_default_tempdir", nowhere)
    with pytest.raises(StorageError, match="no process can be begun"):
        confined("tokenizer", b"{}", "it")


def test_gzip_is_not_among_what_a_folder_may_have() -> None:
    """Nothing is unpacked: what a name's bytes are is what is read."""
    with pytest.raises(MalformedMessage, match="is not JSON"):
        parsed(gzip.compress(b"{}"), CONFIG, 100)
