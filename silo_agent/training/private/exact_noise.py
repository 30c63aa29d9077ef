"""Gaussian noise on a clipped sum, from the operating system's randomness and without floating point's gaps.

The sum is rounded to a grid of which the noise's standard deviation is SIGMA = 2^30 steps, discrete Gaussian noise is
added as integers, and only the result becomes a float again, which is post-processing. torch.randn would neither be
secret nor safe: the floats that it can give differ from place to place, and tell what it was added to.

A step has one key. Its noise is drawn block by block (noise_streams.py), by as many threads as there are: which thread
draws a block changes nothing, nor does which rank of a training draws it. Where the gradients are made on a GPU, the
processor draws while they are.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lorica_security.noise.discrete_gaussian import SIGMA, Integers
from lorica_security.noise.noise_streams import BLOCK_ELEMENTS, NoiseStream

FloatBlock = NDArray[np.float32]
DoubleBlock = NDArray[np.float64]


class StepNoise:
    """The noise of one step for tensors of so many `elements` each, in this order, each used once.

    `added` counts, block by block, how often its noise was added here.
    """

    def __init__(
        self,
        key: bytes,
        elements: Sequence[int],
        threads: ThreadPoolExecutor,
        *,
        ahead: int,
        part_of: Callable[[int], range] = range,
    ) -> None:
        """`key` is used for nothing else. At most `ahead` blocks, of half a
        megabyte, are drawn before they are asked for. `part_of` so many blocks are those that are drawn here, in a row.
        """
        self._stream = NoiseStream(key)
        self._threads = threads
        counts = [min(BLOCK_ELEMENTS, count - start) for count in elements for start in range(0, count, BLOCK_ELEMENTS)]
        self._part = part_of(len(counts))
        self.added = np.zeros(len(counts), dtype=np.uint8)
        self._at = 0
        self._left = ((number, counts[number]) for number in self._part)
        self._drawn: deque[Future[Integers]] = deque()
        self._draw(ahead)

    def add(self, values: DoubleBlock, *, deviation: float) -> FloatBlock:
        """The next tensor's `values` (flat) with noise of standard deviation `deviation`, above 0; 0 in the place of
        those whose noise is drawn elsewhere: nothing comes out without noise.

        What is not finite counts as 0: no noise would hide it.
        """
        step = deviation / SIGMA
        noised = np.zeros(len(values), dtype=np.float32)
        for start, noise in self._blocks(len(values)):
            block = values[start : start + len(noise)]
            steps = np.nan_to_num(np.rint(block / step), copy=False, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int64)
            noised[start : start + len(noise)] = (steps + noise) * step
        return noised

    def _blocks(self, elements: int) -> Iterator[tuple[int, Integers]]:
        for start in range(0, elements, BLOCK_ELEMENTS):
            number, self._at = self._at, self._at + 1
            if number not in self._part:
                continue
            if not self._drawn:
                self._draw(1)
            noise = self._drawn.popleft().result()
            self._draw(1)
            self.added[number] += 1
            yield start, noise

    def _draw(self, blocks: int) -> None:
        """So many more, or those that are left."""
        self._drawn.extend(self._threads.submit(self._stream.block, *each) for each in islice(self._left, blocks))
