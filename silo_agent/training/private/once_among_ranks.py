"""What ranks that train privately together do once among them, as one process does it, and how they find out if not.

The promise of privacy is of one sum: each record of one Poisson sample adds to it at most once, clipped, and each
element of it has the whole noise, once. So ranks draw one sample from one secret, for all of the data; each record of
it is clipped by one rank; sums are added up in float64, as one process adds them; and each element gets its noise from
one rank, the very noise that one process would add. What has no noise yet stays in `summed_grad`: a gradient begins as
zeros, and only what a rank noised is added to it.

All of it is compared before anything is made of a step's sum. A comparison depends on ranks, and not on records: two
that run one program on one data folder pass it whatever is in the data.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from lorica_security.errors import StateError
from lorica_security.noise.random_words import KEY_BYTES, RandomWords
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.private.per_example.chunks import shape_of
from silo_agent.training.ranks.ranks import Ranks

T = TypeVar("T")

BETWEEN_MEETINGS: Final = 4
"""Chunks that a rank computes: a meeting takes some milliseconds, and a chunk of T5-base on one core half a minute."""
_SECRET = b"lorica/v1/ranks/private/"
_ONE_PROGRAM = "end whatever else starts ranks of this silo, and install one version of Lorica for all"


def agreed_words(words: RandomWords, own_entropy: bytes, ranks: Ranks) -> RandomWords:
    """The words that all `ranks` draw from, of this training alone: `words` themselves where there is one process.

    They follow from what each rank draws of its own `words`, which the others hear, and from `own_entropy`, 32 bytes of
    the silo that no rank tells another. So he who hears ranks meet does not know them, nor does he who learns the
    silo's entropy later. Raises StateError where a rank has another one.
    """
    if ranks.world == 1:
        return words
    heard = ranks.gathered(_bytes(words.words32(KEY_BYTES // 4).tobytes()))
    secret = agreed_secret([bytes(each.tolist()) for each in heard], own_entropy)
    ranks.require_same(
        "the secret that samples and noise come from", [_bytes(secret)], "have all ranks read one training.entropy"
    )
    return RandomWords(secret)


def agreed_secret(heard: Sequence[bytes], own_entropy: bytes) -> bytes:
    """Of what each rank drew, in their order."""
    return blake3(_SECRET + b"".join(heard), key=own_entropy).digest()


def require_one_sample(drawn: Sequence[int], key: bytes, ranks: Ranks) -> None:
    """Raise StateError where a rank has drawn another sample than rank 0, or another `key` for the step's noise."""
    if ranks.world == 1:
        return
    sample = torch.tensor([len(drawn), *drawn], dtype=torch.int64)
    ranks.require_same("the sample of a step, or the key of its noise,", [_bytes(key), sample], _ONE_PROGRAM)


def share_of(examples: EncodedExamples, indices: Sequence[int], ranks: Ranks) -> Sequence[int]:
    """Those of `indices` that this rank computes: of the examples in order of their padded lengths each `world`-th, so
    that no rank has all the long ones. It depends on lengths alone, and not on what ranks find of their processors."""
    if ranks.world == 1:
        return indices
    shapes = [shape_of(examples, index) for index in indices]
    order = np.lexsort(([shape.source for shape in shapes], [shape.target for shape in shapes]))
    own: list[int] = np.asarray(indices, dtype=np.int64)[order][ranks.rank :: ranks.world].tolist()
    return own


def side_by_side(items: Iterable[T], ranks: Ranks, should_stop: Callable[[], bool] = lambda: False) -> Iterator[T]:
    """This rank's `items`, however many. Ranks meet before every few of them, one that is alone in its group as well:
    so one that has more of them, or longer ones, does not count as one that hangs, and all stop where one is told to.

    Raises TrainingStopped soon after `should_stop()` turns true.
    """
    own = iter(items)
    while True:
        some = list(islice(own, BETWEEN_MEETINGS if ranks.backend else 1))
        left = bool(some)
        if ranks.backend:
            told = torch.tensor([should_stop(), left], dtype=torch.int32)
            ranks.sum_on_host(told)
            stopped, left = (bool(number) for number in told.tolist())
        else:
            stopped = left and should_stop()
        if stopped:
            raise TrainingStopped
        if not left:
            return
        yield from some


def require_each_once(what: str, wanted: Sequence[int], done: Sequence[int], ranks: Ranks) -> None:
    """Raise StateError, naming the ranks, unless all that ranks have `done` is what is `wanted`, each as often as it is
    there: an example that two ranks add counts for twice what it may. Which one it is is not told."""
    if ranks.world == 1:
        return
    places = np.sort(np.asarray(wanted, dtype=np.int64))
    table = _table(_counts(places, np.asarray(done, dtype=np.int64)), ranks)
    wrong = np.flatnonzero(table.sum(axis=0) != _counts(places, places))
    if len(wrong):
        raise StateError(
            f"{what} of one example were added by ranks {_named(table[:, wrong[0]])}, and one rank alone has to add "
            f"them, once: {_ONE_PROGRAM}"
        )


def part_of_noise(blocks: int, ranks: Ranks) -> range:
    """Which of so many blocks of a step's noise this rank draws and adds."""
    return range(blocks * ranks.rank // ranks.world, blocks * (ranks.rank + 1) // ranks.world)


def require_noise_once(added: NDArray[np.uint8], ranks: Ranks) -> None:
    """Raise StateError, naming a block, unless each has noise of one rank, once. `added` is how often by this one."""
    table = _table(added, ranks)
    wrong = np.flatnonzero(table.sum(axis=0) != 1)
    if len(wrong):
        raise StateError(
            f"noise of block {wrong[0]} of {len(added)} was added by ranks {_named(table[:, wrong[0]])}, and one rank "
            f"alone has to add it, once: {_ONE_PROGRAM}"
        )


def _counts(places: NDArray[np.int64], done: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each of the sorted `places` is in `done`, and at the end how often anything else is."""
    known = np.isin(done, places)
    counts = np.bincount(np.searchsorted(places, done[known]), minlength=len(places) + 1)
    counts[-1] += np.count_nonzero(~known)
    return counts


def _table(own: NDArray[Any], ranks: Ranks) -> NDArray[np.int64]:
    """`own` of every rank, a row each; raises StateError where one is longer than another, which gloo dies of."""
    ranks.require_same("the number of examples, or of blocks of noise,", [torch.tensor([len(own)])], _ONE_PROGRAM)
    return np.stack([each.numpy() for each in ranks.gathered(torch.from_numpy(own))]).astype(np.int64)


def _named(column: NDArray[np.int64]) -> str:
    return ", ".join(str(rank) for rank in np.flatnonzero(column)) or "none"


def _bytes(secret: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(secret), dtype=torch.uint8)
