"""A Hugging Face folder as data in a closed form, read by a process of its own (`confined`) and handed over as bytes.

Taken are ordinary files of the folder itself, by name: its small files, each in its form, and parameters in
safetensors, of which the headers alone are read here. A link must lead to a file of the folder, or to one of the Hub's
cache that the folder is a snapshot of.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from itertools import pairwise
from math import isfinite, prod
from pathlib import Path
from typing import IO, Any, Final, TypeGuard

from lorica_security.errors import MalformedMessage
from silo_wire.model_folders.t5_form import t5_values
from silo_wire.model_folders.tokenizer_parts import map_problem
from silo_wire.model_folders.tokenizer_trial import require_family, tried
from silo_wire.plans.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MOST_BYTES,
    PIECES_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    parsed,
    parsed_file,
)

WEIGHTS_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.safetensors")
MOST_TENSORS: Final = 100_000
_MOST_FILES: Final = 1000
_MOST_HEADER_BYTES: Final = 32 << 20
_ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MOST_DIMENSIONS: Final = 16
_MOST_PIECES: Final = 1 << 19
_LONGEST_PIECE: Final = 1000
_MOST_EXTRA_IDS: Final = 10_000
_UNIGRAM: Final = 1
OF_BYTES: Final = "ByT5Tokenizer"
"""It has no file: what it makes of a text follows from how many sentinels there are."""
_OF_BYTES_SENTINELS: Final = 125
_CLASSES: Final = frozenset(
    name + fast
    for name in ("T5Tokenizer", "MT5Tokenizer", "RobertaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
    for fast in ("", "Fast")
) | {OF_BYTES}
"""What the tokenizers of T5's family are called; any other name is another class of the library's, with code of its
own."""


def read_folder(request: bytes) -> bytes:
    """Of the folder with this path: the lengths of its small files and the shapes of its tensors in JSON, then these
    files.

    Raises MalformedMessage, with "it" for the folder, for what is missing or not in the form.
    """
    folder = Path(os.fsdecode(request))
    files = {name: raw for name in MOST_BYTES if (raw := _small(folder, name, MOST_BYTES[name])) is not None}
    if CONFIG_FILE not in files:
        raise MalformedMessage(f"it has no {CONFIG_FILE}: give a Hugging Face folder")
    _require_class(CONFIG_FILE, t5_values(files[CONFIG_FILE]))
    for name in files:
        if name.endswith(".json") and name not in (CONFIG_FILE, TOKENIZER_FILE):
            value = parsed_file(name, files[name])
            if name == TOKENIZER_CONFIG_FILE:
                _require_class(name, value)
    weights = {name: _tensors(folder, name) for name in _weights(folder)}
    _try_tokenizer(files)
    told = json.dumps(
        {"files": {name: len(raw) for name, raw in files.items()}, "weights": weights}, separators=(",", ":")
    ).encode()
    return b"".join((len(told).to_bytes(8, "little"), told, *files.values()))


def _require_class(name: str, values: Mapping[str, Any]) -> None:
    kind = values.get("tokenizer_class")
    if kind is not None and kind not in _CLASSES:
        raise MalformedMessage(
            f"{name} has tokenizer_class {str(kind)[:60]!r}: none of T5's family; use one of "
            f"{', '.join(sorted(_CLASSES))}"
        )
    extra = values.get("extra_ids", 0)
    if type(extra) is not int or not 0 <= extra <= _MOST_EXTRA_IDS:
        raise MalformedMessage(f"{name} has extra_ids {str(extra)[:60]}: it must be 0 to {_MOST_EXTRA_IDS:,}")


def sentinels_of_bytes(files: Mapping[str, bytes]) -> int | None:
    """How many sentinels the ByT5Tokenizer of a folder's small files has, each in its form; None where they name
    another tokenizer. Raises MalformedMessage for tokens of other names, or in another order."""
    values = parsed_file(TOKENIZER_CONFIG_FILE, files.get(TOKENIZER_CONFIG_FILE, b"{}"))
    named = values.get("tokenizer_class") or parsed_file(CONFIG_FILE, files[CONFIG_FILE]).get("tokenizer_class")
    if named != OF_BYTES:
        return None
    sentinels: int = values.get("extra_ids", _OF_BYTES_SENTINELS)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = values.get(key)
        tokens = listed if isinstance(listed, list) else [listed] if listed else []
        named = [it.get("content") if isinstance(it, dict) else it for it in tokens]
        if named and named != [f"<extra_id_{at}>" for at in range(sentinels)]:
            raise MalformedMessage(
                f"{TOKENIZER_CONFIG_FILE} has {key} that are not <extra_id_0> to <extra_id_{sentinels - 1}>, in this "
                "order: no ByT5 of Google's has others; leave them out"
            )
    return sentinels


def _try_tokenizer(files: Mapping[str, bytes]) -> None:
    if sentinels_of_bytes(files) is not None:
        if two := sorted(files.keys() & {TOKENIZER_FILE, PIECES_FILE, VOCABULARY_FILE}):
            raise MalformedMessage(
                f"{TOKENIZER_CONFIG_FILE} has tokenizer_class {OF_BYTES}, which has no {two[0]}: remove one of the two"
            )
        return
    if TOKENIZER_FILE in files:
        require_family(files[TOKENIZER_FILE], TOKENIZER_FILE)
        try:
            tried(files[TOKENIZER_FILE])
        except MalformedMessage as error:
            raise MalformedMessage(f"{TOKENIZER_FILE} {error}") from error
        except MemoryError:
            raise
        except Exception as error:  # the library raises bare Exception for much that does not parse
            raise MalformedMessage(
                f"{TOKENIZER_FILE} makes no tokenizer: {' '.join(str(error).split())[:200]}"
            ) from error
    if PIECES_FILE in files:
        _require_pieces(files[PIECES_FILE])
    if not files.keys() & {TOKENIZER_FILE, PIECES_FILE, VOCABULARY_FILE}:
        raise MalformedMessage(f"it has no {TOKENIZER_FILE} and no {PIECES_FILE}: copy the model's tokenizer too")


def _require_pieces(raw: bytes) -> None:
    """That this is a Unigram model of sentencepiece with pieces, of some size at most."""
    # Here, not above: few folders have such a file.
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    try:
        model = ModelProto.FromString(raw)
    except DecodeError as error:
        raise MalformedMessage(f"{PIECES_FILE} is no model of sentencepiece: copy it again") from error
    if not 1 <= len(model.pieces) <= _MOST_PIECES:
        raise MalformedMessage(f"{PIECES_FILE} has {len(model.pieces):,} pieces: it must have 1 to {_MOST_PIECES:,}")
    if model.trainer_spec.model_type != _UNIGRAM:
        raise MalformedMessage(f"{PIECES_FILE} is no unigram model, as those of T5's family are")
    if not all(1 <= len(it.piece) <= _LONGEST_PIECE for it in model.pieces):
        raise MalformedMessage(f"{PIECES_FILE} has a piece of no characters, or of more than {_LONGEST_PIECE}")
    if not all(isfinite(it.score) for it in model.pieces):
        raise MalformedMessage(f"{PIECES_FILE} has a piece whose score is no number")
    if (rules := model.normalizer_spec.precompiled_charsmap) and (problem := map_problem(rules)):
        raise MalformedMessage(f"{PIECES_FILE} has a character map {problem}")


def _weights(folder: Path) -> list[str]:
    """The files of parameters: one whole, or those that an index names."""
    if os.path.lexists(folder / WEIGHTS_FILE):
        return [WEIGHTS_FILE]
    raw = _small(folder, INDEX_FILE, _MOST_HEADER_BYTES)
    if raw is None:
        pickled = sorted(it.name for it in folder.iterdir() if it.suffix == ".bin" or it.suffix.startswith(".pt"))
        held = f"only {pickled[0]}, which is pickle and could run code" if pickled else "no parameters"
        raise MalformedMessage(
            f"it has {held}: give a folder with {WEIGHTS_FILE}; convert it where you trust it, with "
            "save_pretrained(DIR) of transformers"
        )
    places = parsed(raw, INDEX_FILE, _MOST_HEADER_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise MalformedMessage(f"{INDEX_FILE} has no weight_map: copy the model again")
    names = set()
    for name in places.values():
        if not isinstance(name, str) or not WEIGHTS_NAME.fullmatch(name):
            raise MalformedMessage(
                f"{INDEX_FILE} names {str(name)[:80]!r}: only *.safetensors of the folder itself are read"
            )
        names.add(name)
    if len(names) > _MOST_FILES:
        raise MalformedMessage(f"{INDEX_FILE} names {len(names):,} files: more than {_MOST_FILES:,}")
    return sorted(names)


def _tensors(folder: Path, name: str) -> dict[str, list[int]]:
    """The shapes of a safetensors file's tensors, which must fill the file from the first byte of its data to the
    last."""
    opened = _opened(folder, name)
    if opened is None:
        raise MalformedMessage(f"it has no {name}, which {INDEX_FILE} names: copy the model again")
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise MalformedMessage(f"{name} is not a safetensors file: its header says {length} bytes")
        entries = parsed(file.read(length), f"the header of {name}", _MOST_HEADER_BYTES)
    entries.pop("__metadata__", None)
    if not 1 <= len(entries) <= MOST_TENSORS:
        raise MalformedMessage(f"{name} has {len(entries):,} tensors: it must have 1 to {MOST_TENSORS:,}")
    spans = sorted(_span(name, tensor, entry) for tensor, entry in entries.items())
    if spans[0][0] != 0 or spans[-1][1] != size - 8 - length or any(it[1] != after[0] for it, after in pairwise(spans)):
        raise MalformedMessage(f"{name} does not hold what its header says: copy it again")
    return {tensor: entry["shape"] for tensor, entry in entries.items()}


def _span(name: str, tensor: str, entry: object) -> tuple[int, int]:
    if not isinstance(entry, dict):
        raise MalformedMessage(f"{name} says nothing of tensor {tensor[:80]!r}: copy it again")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise MalformedMessage(
            f"{name}: tensor {tensor[:80]!r} has the type {str(dtype)[:20]!r}, which parameters do not have"
        )
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS or not _are_sizes(span) or len(span) != 2:
        raise MalformedMessage(f"{name}: tensor {tensor[:80]!r} has no shape or no place: copy it again")
    begin, end = span
    if end - begin != prod(shape) * _ITEM_BYTES[dtype] or not end > begin:
        raise MalformedMessage(f"{name}: tensor {tensor[:80]!r} is not as long as its shape: copy it again")
    return begin, end


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(it) is int and 0 <= it < 1 << 62 for it in value)


def _small(folder: Path, name: str, most: int) -> bytes | None:
    opened = _opened(folder, name)
    if opened is None:
        return None
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(most + 1) if size <= most else b""
    if max(size, len(raw)) > most:
        raise MalformedMessage(f"{name} has {max(size, len(raw)):,} bytes: more than {most:,}")
    return raw


def _opened(folder: Path, name: str) -> IO[bytes] | None:
    """An ordinary file of the folder; None where there is none of this name."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        real, home = Path(os.path.realpath(path, strict=True)), Path(os.path.realpath(folder, strict=True))
        allowed = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
        if real.parent not in allowed:
            raise MalformedMessage(f"{name} is a link that leads out of the folder: put the file itself there")
        if not stat.S_ISREG(real.stat().st_mode):
            raise MalformedMessage(f"{name} is no ordinary file: put a file there")
        # Should it be another one by now: no wait for a pipe's other end.
        return os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise MalformedMessage(f"{name} cannot be read: {error.strerror or error}") from error
