"""A Hugging Face folder that was looked at before it is used: by the coordinator for a new plan, by a silo to compare
its own copy.

`prepared` has a process of its own read the folder (model_folder_read.py), and parses its answer once. What the
libraries are given is `laid_out`: a folder with these files alone, beside links to the files of parameters.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

from lorica_security.errors import ConfigurationError, MalformedMessage, StorageError
from silo_wire.model_folders.confined import USUAL, Limits, confined
from silo_wire.model_folders.model_folder_read import WEIGHTS_NAME
from silo_wire.plans.model_files import INDEX_FILE, MOST_BYTES, TOKENIZER_CONFIG_FILE, WEIGHTS_FILE, parsed

_MOST_TOLD_BYTES: Final = 32 << 20
_TOKENIZER_KEYS: Final = frozenset(
    (
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "backend",
        "bos_token",
        "clean_up_tokenization_spaces",
        "cls_token",
        "eos_token",
        "errors",
        "extra_ids",
        "extra_special_tokens",
        "legacy",
        "mask_token",
        "model_max_length",
        "pad_token",
        "padding_side",
        "sep_token",
        "split_special_tokens",
        "tokenizer_class",
        "trim_offsets",
        "truncation_side",
        "unk_token",
    )
)
"""What of tokenizer_config.json reaches the library; it names files and classes in others, and has a language of
templates."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file with the shapes of its tensors."""

    path: Path
    tensors: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`files` are the small ones, by name, each in its form."""

    folder: Path
    files: Mapping[str, bytes]
    weights: tuple[WeightsFile, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for file in self.weights for name, shape in file.tensors.items()}

    @property
    def parameters(self) -> int:
        """Of all files together."""
        return sum(prod(shape) for shape in self.shapes.values())

    @contextmanager
    def laid_out(self) -> Iterator[Path]:
        """A folder for the length of the block with nothing but what is here; raises StorageError where it cannot be
        made."""
        with TemporaryDirectory(prefix="lorica-model-") as temporary:
            copy = Path(temporary)
            try:
                for name, raw in self.files.items():
                    (copy / name).write_bytes(_without_names(raw) if name == TOKENIZER_CONFIG_FILE else raw)
                for at, file in enumerate(self.weights):
                    (copy / self._called(at)).symlink_to(file.path)
                if len(self.weights) > 1:
                    places = {name: self._called(at) for at, file in enumerate(self.weights) for name in file.tensors}
                    (copy / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
            except OSError as error:
                raise StorageError(f"{copy} cannot be written: {error.strerror or error}") from error
            yield copy

    def _called(self, at: int) -> str:
        return WEIGHTS_FILE if len(self.weights) == 1 else f"model-{at:05}.safetensors"


def prepared(folder: Path, shown: str = "", limits: Limits = USUAL) -> ModelFolder:
    """What is in `folder`; raises ConfigurationError, naming it as `shown`, where that is no T5 in the closed form."""
    shown = f"model {shown or folder}:"
    try:
        answer = confined("folder", os.fsencode(folder.absolute()), shown, limits)
        return _told(folder.absolute(), answer)
    except MalformedMessage as error:
        raise ConfigurationError(str(error)) from error


def _told(folder: Path, answer: bytes) -> ModelFolder:
    """The answer of a process that hostile files may have taken over: it can say nothing but what a folder could."""
    length = int.from_bytes(answer[:8], "little")
    told = parsed(answer[8 : 8 + length], "what was read of the folder", _MOST_TOLD_BYTES)
    lengths, weights = told.get("files"), told.get("weights")
    if not isinstance(lengths, dict) or not isinstance(weights, dict) or not weights:
        raise MalformedMessage("what was read of the folder names no files")
    files, at = {}, 8 + length
    for name, size in lengths.items():
        if name not in MOST_BYTES or type(size) is not int or not 0 <= size <= min(MOST_BYTES[name], len(answer) - at):
            raise MalformedMessage(
                f"what was read of the folder has no file {str(name)[:60]!r} of {str(size)[:20]} bytes"
            )
        files[name] = answer[at : at + size]
        at += size
    return ModelFolder(folder, MappingProxyType(files), tuple(_weights(folder, *it) for it in weights.items()))


def _weights(folder: Path, name: str, tensors: object) -> WeightsFile:
    if not WEIGHTS_NAME.fullmatch(name) or not isinstance(tensors, dict):
        raise MalformedMessage(f"what was read of the folder has no parameters {name[:60]!r}")
    return WeightsFile(folder / name, MappingProxyType({tensor: _shape(shape) for tensor, shape in tensors.items()}))


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(it) is int and it >= 0 for it in value):
        raise MalformedMessage("what was read of the folder has a tensor without a shape")
    return tuple(value)


def _without_names(raw: bytes) -> bytes:
    values = parsed(raw, TOKENIZER_CONFIG_FILE, MOST_BYTES[TOKENIZER_CONFIG_FILE])
    return json.dumps({key: value for key, value in values.items() if key in _TOKENIZER_KEYS}).encode()
