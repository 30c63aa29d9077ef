"""A model's parameters in one safetensors file whose data section is exactly the flat vector of its Layout.

safetensors is an 8-byte length, a JSON header and the data. For a Layout of one dtype, tensors in the layout's order
without gaps, that data is what travels in chunks and what a manifest digests: nothing is ever converted, a chunk is a
range of the file.

T5 shares one parameter between four modules. The layout has it once, under the first of its names in sorted order,
`decoder.embed_tokens.weight`; files have it once as well, under the name that Hugging Face gives it, `shared.weight`,
so that they are Hugging Face's files. A T5 v1.1 whose `lm_head.weight` is a parameter of its own has that beside it.

Two readers: `check` for a file from outside, which may be wrong in any way, and `blocks` for the data.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from lorica_coordinator.vectors.vector_file import VectorWriter
from lorica_security.errors import ConfigurationError, StorageError
from silo_wire.canonical import canonical_json
from silo_wire.manifest import Dtype, Layout, Manifest, manifest_of

MODEL_FILE = "model.safetensors"
"""What Hugging Face calls such a file in its folder."""
BASE_FILE = "base.safetensors"
"""In a plan folder with adapters: the parameters that stay."""
BLOCK_BYTES = 4 << 20
MAX_HEADER_BYTES = 32 << 20
_EMBEDDING, _EMBEDDING_IN_FILES = "decoder.embed_tokens.weight", "shared.weight"
_NAMES: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16"}


def header(layout: Layout) -> bytes:
    """What stands before the data: the length and the JSON, padded with spaces so that the data is 8-byte aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file that does not say "pt"
    for tensor, position in layout.placed():
        begin = position * layout.item_bytes
        entries[_name_in_files(tensor.name)] = {
            "dtype": _NAMES[layout.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.elements * layout.item_bytes],
        }
    if len(entries) != len(layout.tensors) + 1:
        raise ConfigurationError(
            f"the layout has {_EMBEDDING} and {_EMBEDDING_IN_FILES}: in a T5 they are one parameter"
        )
    text = canonical_json(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, layout: Layout, vector: Iterable[bytes | bytearray | memoryview]) -> Manifest:
    """Write a new file from the blocks of its vector, in one pass, and fsync it; returns the vector's manifest.

    What `path` holds is written over: callers write beside the final name and rename. Raises IntegrityError when the
    blocks are not the layout's length, StorageError naming the file.
    """
    with closing(VectorWriter(path, layout, head=header(layout))) as file:
        for block in vector:
            file.write(block)
        return file.finish()


def check(path: Path, layout: Layout) -> int:
    """The offset of the data in a file that must hold exactly `layout`.

    Raises ConfigurationError naming the file and the first tensor that is missing, too many, misshapen or of another
    type; StorageError when the file cannot be read.
    """
    entries, offset, size = _read_header(path)
    entries.pop("__metadata__", None)
    placed = [(_name_in_files(tensor.name), tensor, position) for tensor, position in layout.placed()]
    for name, tensor, _ in placed:
        entry = entries.get(name)
        if not isinstance(entry, dict):
            raise ConfigurationError(f"{path} has no tensor {name}: it is not a model of this plan's layout")
        if entry.get("dtype") != _NAMES[layout.dtype]:
            raise ConfigurationError(
                f"{path}: tensor {name} has type {entry.get('dtype')}, the plan's layout has {_NAMES[layout.dtype]}"
            )
        if entry.get("shape") != list(tensor.shape):
            raise ConfigurationError(
                f"{path}: tensor {name} has shape {entry.get('shape')}, the plan's layout has {list(tensor.shape)}"
            )
    extra = entries.keys() - {name for name, _, _ in placed}
    if extra:
        raise ConfigurationError(f"{path} has the tensor {min(extra)}, which the plan's layout does not have")
    for name, tensor, position in placed:
        begin = position * layout.item_bytes
        if entries[name].get("data_offsets") != [begin, begin + tensor.elements * layout.item_bytes]:
            raise ConfigurationError(
                f"{path}: tensor {name} is not where canonical order puts it: "
                "make the plan folder with coordinator plan new"
            )
    if size - offset != layout.total_bytes:
        raise ConfigurationError(f"{path} holds {size - offset} bytes of data, its tensors need {layout.total_bytes}")
    return offset


def manifest_of_file(path: Path, layout: Layout) -> Manifest:
    """The manifest of a file that must hold exactly `layout`; raises what `check` raises."""
    return manifest_of(layout, blocks(path, check(path, layout)))


def blocks(path: Path, offset: int) -> Iterator[memoryview]:
    """The data from `offset` to the end of the file, in blocks that are good until the next one is asked for.

    Raises StorageError naming the file.
    """
    block = memoryview(bytearray(BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while filled := file.readinto(block):
                yield block[:filled]
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def in_bfloat16(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    """float32 blocks rounded to bfloat16; each is good until the next one is asked for.

    Raises ConfigurationError for a number that bfloat16 cannot express.
    """
    # Here, not above: torch takes seconds to import, and commands that only look at the state never need it.
    import torch

    from silo_wire.server_step.rounding import round_to_bfloat16

    for block in blocks:
        values = torch.frombuffer(block, dtype=torch.float32)
        published = torch.empty(len(values), dtype=torch.bfloat16)
        round_to_bfloat16(values, published)
        yield published.view(torch.uint8).numpy().data


def _name_in_files(name: str) -> str:
    return _EMBEDDING_IN_FILES if name == _EMBEDDING else name


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Header entries, offset of the data, size of the file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ConfigurationError(f"{path} is not a safetensors file: its header says {length} bytes")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{path} is not a safetensors file: its header is not a JSON object")
    return entries, 8 + length, size
