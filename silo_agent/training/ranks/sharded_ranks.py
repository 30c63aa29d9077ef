"""Ranks that hold a part of the model each: parameters, gradients and the optimizer's state are dealt out by rows.

FSDP2 of PyTorch gathers a block's parameters before the block is computed with, drops them afterwards, and has each
rank the sum of its own part of the gradient. Units are the blocks; what is left is one of its own: the embedding, which
T5 uses in three places, and the last layers' norms. Every rank therefore computes as often as every other, also where
there is no batch for it.

A part is rows of a tensor, so a range of the flat vector. Outside of the computation parts are ordinary parameters
which share the memory of FSDP2's: optimizer, clipping, checkpoint and update do not know of it.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import distributed, nn

from lorica_security.errors import StateError
from silo_agent.training.ranks.ranks import RanksParted, Together

_BY_RANKS: Final = ("gloo", "nccl")
"""Whose names are in what PyTorch says of a rank that is gone."""


class ShardedRanks(Together):
    """`shard` comes before all else; of one model."""

    sharded = True
    _root: nn.Module
    _broken = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parts: dict[Any, nn.Parameter] = {}
        self._wholes: dict[nn.Parameter, Any] = {}

    def shard(self, model: Any) -> None:
        """Have `model`, a T5 on meta, with this rank's rows of each parameter in uninitialised memory.

        Raises StateError where PyTorch deals rows out otherwise than `own_rows`.
        """
        # Here, not above: they take a second to load, which ranks of whole models need not wait for.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        # T5 adds to what its blocks return out of place, which is what PyTorch warns of.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        mesh = DeviceMesh.from_group(self._group, self._device.type)
        self._root = _Root(model)
        for unit in (*model.encoder.block, *model.decoder.block, self._root):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        for unit in self._root.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)  # a sum and no mean: losses are divided by all ranks' tokens
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no other way to it
        self._root.to_empty(device=self._device)
        for name, whole in model.named_parameters():
            part = nn.Parameter(whole.to_local().detach())
            if part.shape != (len(self.own_rows(whole.shape[0])), *whole.shape[1:]):
                raise StateError(
                    f"torch {torch.__version__} gives rank {self.rank} {tuple(part.shape)} of {name}, which has "
                    f"{tuple(whole.shape)}: set [training] sharded = false"
                )
            self._parts[whole], self._wholes[part] = part, whole

    def part(self, whole: Any) -> nn.Parameter:
        """This rank's rows of a parameter of the model."""
        return self._parts[whole]

    def own_rows(self, rows: int) -> range:
        """This rank's, of a tensor that has so many."""
        most = -(-rows // self.world)
        return range(min(self.rank * most, rows), min((self.rank + 1) * most, rows))

    def computed(self, model: Any, work: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        with self._meeting():
            made: torch.Tensor = self._root(work)
        return made

    def backward(self, loss: torch.Tensor) -> None:
        with self._meeting():
            torch.autograd.backward(loss)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """They are summed: FSDP2 has done so."""
        for part in parameters:
            whole = self._wholes[part]
            part.grad, whole.grad = None if whole.grad is None else whole.grad.to_local(), None

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        every = self.gathered(own.double())
        return torch.tensor(
            math.sqrt(math.fsum(float(each) ** 2 for each in every)), dtype=own.dtype, device=own.device
        )

    def require_same_model(self, parameters: Sequence[nn.Parameter]) -> None:
        """No two ranks hold the same of it."""

    def states(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each rank has a checkpoint of its own part, and in it its own states."""
        return dict(own)

    def own_states(self, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(states)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        if self._broken:
            raise RanksParted(f"rank {self.rank} of {self.world} holds layers that were left half gathered")
        try:
            yield
        except BaseException as error:
            self._broken = True
            if isinstance(error, distributed.DistError) or (
                isinstance(error, RuntimeError) and any(name in str(error).lower() for name in _BY_RANKS)
            ):
                raise self._parted(error) from error
            raise
        self._met()


class _Root(nn.Module):
    """Whose forward pass is whatever is to be computed: FSDP2 gathers what no block has before, and drops it after."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
        return work(self.model)
