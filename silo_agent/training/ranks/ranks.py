"""One process of a training's several: which batches it takes, and the sums in which it meets the others.

Ranks that hold a part of the model each are sharded_ranks.py's. Else every rank has the whole model, the whole data and
the same order of batches, and takes each `world`-th batch of an effective batch. Gradients and losses are summed, so
that all ranks make the same optimizer step and hold the same parameters: what one rank writes is what any other would.
With two ranks, at most two batches a step and dropout 0 the parameters are those of one process, bit for bit. With more
batches a step one process sums ((a + b) + c) + d and two ranks (a + c) + (b + d); with more ranks the order is gloo's
own. Either is the same each time.

What they meet in is a process group of torch.distributed, whose messages have neither TLS nor authentication
(ops/docs/adr/0030-a-silo-over-several-processes.md).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import torch
from blake3 import blake3
from torch import distributed, nn
from torch._C._distributed_c10d import FileStore

from lorica_security.errors import LoricaError, StateError
from silo_agent.training.draws import Seed

T = TypeVar("T")

ONE_KIND: Final = "run all ranks of a silo on machines of one kind, with the same data folder"
"""What to do where ranks come to other numbers."""
MEET_S: Final = 300.0
"""For all ranks of a training to come to the first meeting: one may read its data for longer than another."""


class Ranks(Protocol):
    """Every method but `rows` and `seed` is a meeting: all ranks call it, one after the other in the same order.

    Raises RanksParted where another rank does not come in time, or its process has ended.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def backend(self) -> str: ...

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the model, which is whole only while it is computed with."""

    def rows(self, items: Sequence[T]) -> Iterator[T | None]:
        """Of each `world` items, one after the other, this rank's; None where there are fewer of the last."""

    def computed(self, model: Any, work: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """What `work` makes of `model`."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` to those that are there."""

    def seed(self, seed: Seed) -> Seed:
        """What this rank draws its dropout from, where all draw the order of their data from `seed`."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Have the sum over ranks in each parameter's gradient; None stays None where no rank has one."""

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        """Of what all ranks hold of a gradient; that which this one holds has the norm `own`."""

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        """`number` summed over ranks, in its own memory."""

    def sum_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """As `sum`, of each."""

    def gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        """`own` of every rank, of one shape and type, on the CPU and in the order of ranks."""

    def sum_on_host(self, numbers: torch.Tensor) -> None:
        """As `sum`, of what is in the memory of the CPU whatever the model is in."""

    def any(self, told: bool) -> bool:
        """Whether one rank was told so."""

    def all_or_none(self) -> AbstractContextManager[None]:
        """Work that is of no use unless every rank does its part: raises AnotherRankFailed where another could not."""

    def require_same(self, what: str, parts: Sequence[torch.Tensor], remedy: str = ONE_KIND) -> None:
        """Raise StateError, naming the ranks that have other bytes in `parts` than rank 0. Ranks tell each other a
        digest of them, which tells nothing of secret `parts` where one of them is a key."""

    def require_same_model(self, parameters: Sequence[nn.Parameter]) -> None:
        """As `require_same`, after training."""

    def states(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`own` of every rank, uint8 and of one shape by name: rank 0's by their names, another's as NAME-RANK."""

    def own_states(self, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's, of what `states` made."""


class AnotherRankFailed(StateError):
    """This rank did its part; why another did not, that one says."""


class RanksParted(StateError):
    """A meeting did not take place: another rank hangs, or is gone. Nothing of this training may leave."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A training in one process."""

    rank: int = 0
    world: int = 1
    backend: str = ""
    sharded: bool = False

    def rows(self, items: Sequence[T]) -> Iterator[T | None]:
        return iter(items)

    def computed(self, model: Any, work: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return work(model)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def seed(self, seed: Seed) -> Seed:
        return seed

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        return number

    def sum_all(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own.cpu()]

    def sum_on_host(self, numbers: torch.Tensor) -> None:
        pass

    def any(self, told: bool) -> bool:
        return told

    def all_or_none(self) -> AbstractContextManager[None]:
        return nullcontext()

    def require_same(self, what: str, parts: Sequence[torch.Tensor], remedy: str = ONE_KIND) -> None:
        pass

    def require_same_model(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def states(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(own)

    def own_states(self, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(states)


ALONE: Final = Alone()


class Together:
    """A training in `world` processes, which meet in `group`. `met` is called after each meeting."""

    sharded = False

    def __init__(
        self,
        group: distributed.ProcessGroup,
        device: torch.device,
        backend: str,
        met: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world, self.backend = group.rank(), group.size(), backend
        self._group, self._device, self._met = group, device, met

    def rows(self, items: Sequence[T]) -> Iterator[T | None]:
        for begin in range(0, len(items), self.world):
            yield items[begin + self.rank] if begin + self.rank < len(items) else None

    def computed(self, model: Any, work: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        return work(model)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def seed(self, seed: Seed) -> Seed:
        if self.rank == 0:
            return seed
        if isinstance(seed, int):
            source = blake3(seed.to_bytes(8, "little") + self.rank.to_bytes(8, "little"))
            return int.from_bytes(source.digest(length=8), "little") >> 1
        return blake3(b"rank" + self.rank.to_bytes(8, "little"), key=seed).digest()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        there = torch.tensor(
            [0 if parameter.grad is None else 1 for parameter in parameters], dtype=torch.int32, device=self._device
        )
        self.sum(there)
        gradients = []
        for parameter, ranks in zip(parameters, there.tolist(), strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        self.sum_all(gradients)

    def norm(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def sum(self, number: torch.Tensor) -> torch.Tensor:
        self.sum_all([number])
        return number

    def sum_all(self, tensors: Sequence[torch.Tensor]) -> None:
        # All are on their way before the first is waited for.
        self._wait([self._begin(tensor) for tensor in tensors])

    def sum_on_host(self, numbers: torch.Tensor) -> None:
        numbers.copy_(self.sum(numbers.to(self._device)))

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        try:
            yield
        except (LoricaError, OSError):
            self.any(True)
            raise
        if self.any(False):
            raise AnotherRankFailed("another rank of this silo could not do its part: see what that rank says")

    def any(self, told: bool) -> bool:
        return bool(self.sum(torch.tensor([int(told)], dtype=torch.int32, device=self._device)))

    def require_same(self, what: str, parts: Sequence[torch.Tensor], remedy: str = ONE_KIND) -> None:
        hasher = blake3()
        for part in parts:
            hasher.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        digests = self.gathered(torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8))
        others = [str(rank) for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]
        if others:
            raise StateError(
                f"{what} of ranks {', '.join(others)} {'is' if len(others) == 1 else 'are'} not that of rank 0: "
                f"{remedy}, or set [training] processes to 0"
            )

    def require_same_model(self, parameters: Sequence[nn.Parameter]) -> None:
        self.require_same("the model after training", parameters)

    def states(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name in sorted(own):
            for rank, state in enumerate(self.gathered(own[name])):
                made[name if rank == 0 else f"{name}-{rank}"] = state
        return made

    def own_states(self, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {name for name in states if "-" not in name}
        return {name: states[name if self.rank == 0 else f"{name}-{self.rank}"] for name in names}

    def gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        own = own.to(self._device)
        into = [torch.empty_like(own) for _ in range(self.world)]
        try:
            work = self._group.allgather([into], [own])
        except RuntimeError as error:
            raise self._parted(error) from error
        self._wait([work])
        return [each.cpu() for each in into]

    def _begin(self, summed: torch.Tensor) -> distributed.Work:
        try:
            return self._group.allreduce([summed])
        except RuntimeError as error:
            raise self._parted(error) from error

    def _wait(self, works: Sequence[distributed.Work]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._parted(error) from error
        self._met()

    def _parted(self, error: RuntimeError) -> RanksParted:
        return RanksParted(f"rank {self.rank} of {self.world} lost the others ({' '.join(str(error).split())[:300]})")


def met_over(
    folder: str, rank: int, world: int, device: torch.device, *, timeout_s: float
) -> tuple[distributed.ProcessGroup, str]:
    """A process group that its ranks find each other for by a file in `folder`: no port is opened for that.

    Ranks on CPUs meet by gloo, whose sockets listen on the interface that GLOO_SOCKET_IFNAME names; those on GPUs by
    NCCL. Raises RanksParted where not all come within MEET_S, and later where a meeting takes longer than `timeout_s`.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store = FileStore(f"{folder}/meeting", world)
        store.set(f"here-{rank}", "")
        store.wait([f"here-{each}" for each in range(world)], timedelta(seconds=MEET_S))
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise RanksParted(f"rank {rank} of {world} did not meet the others: {error}") from error
    group = distributed.group.WORLD
    assert group is not None
    return group, backend
