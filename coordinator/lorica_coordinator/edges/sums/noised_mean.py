"""The mean delta under silo-level privacy: committed deltas clipped, weighed and added up with noise, piece by piece.

The arithmetic is coordinator/lorica_coordinator/aggregation/noised_sum.py, the same on every device; its noise takes
longer than all else, so threads draw it ahead of where it is needed. Nothing depends on how many of them there are, or
on the size of a slab.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np

from lorica_coordinator.aggregation.noised_sum import NoisedSum
from lorica_coordinator.edges.sums.masked_sum import Spooled, SpoolReader
from lorica_security.noise.discrete_gaussian import Integers
from lorica_security.noise.noise_streams import BLOCK_ELEMENTS, NoiseStream

MOST_THREADS = 4


class NoisedMeanReader:
    """The mean delta in float32, from its first element to its last. `close` it.

    `factors` belong to `spools`, in their order. Raises UnusableUpdate naming the silo.
    """

    def __init__(
        self,
        spools: Sequence[Spooled],
        factors: Sequence[float],
        *,
        arithmetic: NoisedSum,
        noise: NoiseStream,
        threads: int | None = None,
    ) -> None:
        self._arithmetic = arithmetic
        self._factors = factors
        self._memory = np.empty(BLOCK_ELEMENTS, dtype="<f4")
        self._left: Integers = np.empty(0, dtype=np.int64)
        cores = len(os.sched_getaffinity(0)) if threads is None else threads
        with ExitStack() as opened:
            self._readers = [opened.enter_context(closing(SpoolReader(*spool))) for spool in spools]
            pool = ThreadPoolExecutor(min(cores, MOST_THREADS), thread_name_prefix="noise")
            opened.callback(pool.shutdown, cancel_futures=True)
            self._noise = self._drawn(pool, noise, 2 * min(cores, MOST_THREADS))
            self._opened = opened.pop_all()

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the elements that come next."""
        out = np.frombuffer(buffer, dtype="<f4")
        while len(out):
            if not len(self._left):
                self._left = next(self._noise)
            count = min(len(out), len(self._left))
            total, self._left = self._left[:count], self._left[count:]
            delta = self._memory[:count]
            for reader, factor in zip(self._readers, self._factors, strict=True):
                reader.read_into(delta.view(np.uint8).data)
                total += self._arithmetic.part(delta, factor)
            self._arithmetic.mean(total, out[:count])
            out = out[count:]

    def close(self) -> None:
        """May be repeated."""
        self._opened.close()

    def _drawn(self, pool: ThreadPoolExecutor, noise: NoiseStream, ahead: int) -> Iterator[Integers]:
        """The noise of each block of the vector, in order."""
        begun: deque[Future[Integers]] = deque()
        elements = self._arithmetic.parameters
        for index, first in enumerate(range(0, elements, BLOCK_ELEMENTS)):
            if len(begun) == ahead:
                yield begun.popleft().result()
            begun.append(pool.submit(noise.block, index, min(BLOCK_ELEMENTS, elements - first)))
        while begun:
            yield begun.popleft().result()
