"""A base and its adapters as one model: W + alpha / rank x B A for each weight that has them
(silo_wire/plans/adapters.py)."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorica_coordinator.vectors.stored_vector import StoredVector, VectorReader
from lorica_security.errors import IntegrityError
from silo_wire.manifest import Layout, TensorSpec, manifest_of
from silo_wire.plans.adapters import AdaptersSection, adapter_names

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedHalves:
    """The A that nobody trains, tensor by tensor; `digest` is that of their manifest."""

    layout: Layout
    blocks: Iterable[memoryview]
    digest: str

    def checked(self) -> dict[str, Values]:
        """By name. Raises IntegrityError where they are not those that the plan names."""
        pairs = zip(self.layout.tensors, self.blocks, strict=True)
        values = {tensor.name: np.frombuffer(block, dtype=np.float32).reshape(tensor.shape) for tensor, block in pairs}
        if manifest_of(self.layout, (one.reshape(-1).data.cast("B") for one in values.values())).digest != self.digest:
            raise IntegrityError(
                "the seed of this plan makes other A of its adapters here than where the plan was made: export it with "
                "the release of torch, and on a processor like the one, that made it"
            )
        return values


def merged_blocks(
    base: StoredVector,
    base_layout: Layout,
    adapters: StoredVector,
    adapters_layout: Layout,
    section: AdaptersSection,
    fixed: FixedHalves | None = None,
) -> Iterator[memoryview]:
    """The merged parameters in float32, one block a tensor of `base_layout`; every chunk of both is checked on the way,
    and so is `fixed`.

    The adapters are in memory, and of the base one tensor at a time.
    """
    with closing(VectorReader(adapters)) as reader:
        parts = {tensor.name: _read(reader, tensor, adapters_layout) for tensor in adapters_layout.tensors}
    if fixed is not None:
        parts |= fixed.checked()
    with closing(VectorReader(base)) as reader:
        for tensor in base_layout.tensors:
            values = _read(reader, tensor, base_layout)
            a, b = adapter_names(tensor.name)
            if a in parts:
                values += np.float32(section.scale) * (parts[b] @ parts[a])
            yield values.reshape(-1).data.cast("B")


def _read(reader: VectorReader, tensor: TensorSpec, layout: Layout) -> Values:
    """The tensor that comes next, as float32."""
    if layout.dtype == "bfloat16":
        halves = np.empty(tensor.shape, dtype=np.uint16)
        reader.read_into(halves.reshape(-1).data.cast("B"))
        return (halves.astype(np.uint32) << 16).view(np.float32)
    values = np.empty(tensor.shape, dtype=np.float32)
    reader.read_into(values.reshape(-1).data.cast("B"))
    return values
