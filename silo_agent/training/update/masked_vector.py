"""The delta on disk, encoded and masked into the file that leaves (DESIGN section 4): two passes over blocks that stay
in cache.

The first pass checks the delta's bytes and takes its norm and the peak of each tensor, since clipping and scaling need
them before the first byte. In the second each core has a chunk of its own, from the delta to the file: reads, scales,
encodes, masks, digests and writes it while it is in the core's cache. Every stream is addressable, so the same delta,
keys and weight give the same bytes, however often and on however many cores it is done.

Memory is a few chunks for each core, whatever the size of the model; none of it is left as it was.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from lorica_security.errors import IntegrityError, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from lorica_security.noise.noise_streams import BLOCK_ELEMENTS as NOISE_ELEMENTS
from lorica_security.noise.noise_streams import NoiseStream
from lorica_security.secure_aggregation.masked_vectors import fixed_point, mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, Encoder, Ranges, WholeBlock
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Words
from lorica_security.secure_aggregation.masked_vectors.noise_shares import CLIPPED_TO, NoiseShares
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.rounds.update import FloatBlock, TrainingDiverged, TrainingStopped, clip_factor, squared_norm
from silo_agent.training.model.vector_file import ChunkWriter, new_chunk_file
from silo_agent.training.update.within_range import WithinRange, peaks
from silo_wire.manifest import CHUNK_BYTES, Manifest, masked_layout
from silo_wire.messages import TrainingSummary
from silo_wire.plans.sections.aggregation import AggregationSection

_ITEM = 4  # bytes of a float32 and of a word
BLOCK_ELEMENTS = CHUNK_BYTES // _ITEM
"""A chunk: many enough that opening a mask stream hardly shows, few enough for the second-level cache."""
MOST_THREADS = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDelta:
    """A delta as training left it: a flat vector on disk, of float32, or of int32 where a number stands for `unit`
    each.

    `mark` is of the file when this process knew it to be right.
    """

    file: Path
    manifest: Manifest
    mark: FileMark | None = None
    unit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedVector:
    """`manifest` describes the file, which is on disk. `saturated` coordinates were beyond their range; it stays in
    this silo."""

    manifest: Manifest
    mark: FileMark
    saturated: int


def own_weight(section: AggregationSection, summary: TrainingSummary) -> float:
    """What this silo's delta counts in the sum: the plan's weighting, at least the plan's least weight. The encoding
    caps it, and counts that.

    Both bounds are the same in every round. So whatever model a silo was handed, nobody's delta counts more than
    max_weight_ratio times another's.
    """
    return max(section.weighs.raw_weight(summary), section.least_weight)


def own_share(section: AggregationSection, summary: TrainingSummary) -> float:
    """What the sum has of this silo's delta, where it is within its range: its weight over the plan's cap, above 0 and
    at most 1."""
    return min(own_weight(section, summary) / section.weight_cap, 1.0)


def write_masked_vector(
    path: Path,
    work: MaskVector,
    delta: KeptDelta,
    *,
    weight: float,
    scores: Scores = NO_SCORES,
    clipping_norm: float = 0.0,
    noise: NoiseShares | None = None,
    threads: int | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> MaskedVector:
    """Write the encoded and masked `delta` to `path`: the words of `work`'s fixed point, little-endian.

    A delta longer than `clipping_norm` is scaled down to it; 0: not. A tensor that is beyond its range then is scaled
    down into it. One of whole numbers is never scaled, by which a record would move it further than by what it adds:
    what is beyond the range is cut. With `noise` every coordinate has that much of it, drawn from `work`'s key, and the
    words behind the delta are the same for every silo, without `scores`. `threads` is as many as there are cores,
    unless given. The masks, the rounding and the noise of `work` are erased in the end, whatever happened, and after an
    error there is no file. Raises TrainingDiverged for a delta that is not finite, TrainingStopped, IntegrityError for
    one that was changed or does not fit the fixed point, StorageError naming the file.
    """
    cores = len(os.sched_getaffinity(0)) if threads is None else threads
    workers = max(1, min(cores, MOST_THREADS))
    elements = work.fixed_point.ranges.elements
    benches: list[_Bench] = []
    try:
        with (
            closing(_DeltaFile(delta, work.fixed_point.ranges)) as source,
            ThreadPoolExecutor(workers, thread_name_prefix="masking") as pool,
        ):
            benches += (_Bench(delta.manifest.chunk_bytes) for _ in range(workers))
            hands = _Hands(pool, benches, should_stop)
            encoder = Encoder(
                fixed_point=work.fixed_point,
                weight=weight,
                rounding=work.rounding,
                scores=scores,
                unit=1.0 if delta.unit is None else delta.unit,
            )
            squares, largest = list[float](), list[tuple[int, float]]()
            with closing(hands.in_order(source.measured, source.chunks)) as chunks:
                for square, peaks_there in chunks:
                    squares.append(square)
                    largest += peaks_there
            norm = math.sqrt(math.fsum(squares))
            within: WithinRange | None = None
            if delta.unit is None:
                factor = clip_factor(norm, clipping_norm if noise is None else clipping_norm * CLIPPED_TO)
                within = WithinRange(encoder, largest, factor=factor)
            with new_chunk_file(path, masked_layout(work.fixed_point.words)) as file:
                task = _Task(work, source, file, encoder=encoder, within=within, noise=noise)
                saturated = 0
                with closing(hands.in_order(task.mask, task.chunks)) as masked:
                    for chunk, count in enumerate(masked, 1):
                        saturated += count
                        progress(chunk * BLOCK_ELEMENTS / elements)
                saturated = task.mask_end(benches[0], saturated)
                source.require_unchanged()
                mark = file.sync()
                files.sync_folder(path.parent)
        progress(1.0)
        return MaskedVector(manifest=file.manifest(), mark=mark, saturated=saturated)
    finally:
        for bench in benches:
            bench.erase()
        work.erase()


class _Bench:
    """What one thread works in at a time."""

    def __init__(self, chunk_bytes: int) -> None:
        self.delta: FloatBlock = np.zeros(max(BLOCK_ELEMENTS, chunk_bytes // _ITEM), dtype="<f4")
        self.words: Words = np.zeros(BLOCK_ELEMENTS + EXTRA_WORDS, dtype="<u4")
        self.encoding = fixed_point.Workspace()
        self.masking = mask_stream.Workspace()

    def erase(self) -> None:
        self.delta.fill(0)
        self.words.fill(0)
        self.encoding.erase()
        self.masking.erase()


class _Hands:
    """Threads, and a bench for each. Raises TrainingStopped between two items."""

    def __init__(self, pool: ThreadPoolExecutor, benches: Sequence[_Bench], should_stop: Callable[[], bool]) -> None:
        self._pool = pool
        self._free: SimpleQueue[_Bench] = SimpleQueue()
        for bench in benches:
            self._free.put(bench)
        self._ahead = 2 * len(benches)
        self._should_stop = should_stop

    def in_order(self, work: Callable[[_Bench, Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
        """What `work` gives for each item, in order. Close it: nothing is under way any more after that."""
        begun: deque[Future[Result]] = deque()
        try:
            for item in items:
                if self._should_stop():
                    raise TrainingStopped
                if len(begun) == self._ahead:
                    yield begun.popleft().result()
                begun.append(self._pool.submit(self._at_a_bench, work, item))
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
            wait(begun)

    def _at_a_bench(self, work: Callable[[_Bench, Item], Result], item: Item) -> Result:
        bench = self._free.get_nowait()  # there are as many as threads
        try:
            return work(bench, item)
        finally:
            self._free.put(bench)


class _DeltaFile:
    """The delta's file, to be read in any order by any thread. `close` it."""

    def __init__(self, delta: KeptDelta, ranges: Ranges) -> None:
        self._path, self._manifest, self._ranges = delta.file, delta.manifest, ranges
        self._whole = delta.unit is not None
        elements = ranges.elements
        if self._manifest.total_bytes != elements * _ITEM or self._manifest.chunk_bytes % _ITEM:
            raise IntegrityError(
                f"delta {self._path} has {self._manifest.total_bytes} bytes in chunks of "
                f"{self._manifest.chunk_bytes}, the roster is for {elements} parameters: it is of another model"
            )
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        self._mark = FileMark.of(self._descriptor)
        self._known = self._mark == delta.mark

    @property
    def chunks(self) -> range:
        return range(self._manifest.chunks)

    def measured(self, bench: _Bench, chunk: int) -> tuple[float, list[tuple[int, float]]]:
        """The sum of squares of one chunk and its tensors' `peaks`, neither of whole numbers. Its digest is checked
        unless the file is known."""
        at = chunk * self._manifest.chunk_bytes // _ITEM
        values = bench.delta[: self._manifest.chunk_size(chunk) // _ITEM]
        self.read(values, at)
        if not self._known:
            try:
                self._manifest.check_chunk(chunk, values.data.cast("B"))
            except IntegrityError as error:
                raise IntegrityError(
                    f"delta {self._path} was damaged: chunk {chunk} is not what training wrote; this round is lost for "
                    "this silo"
                ) from error
        if self._whole:
            return 0.0, []
        square = squared_norm(values)
        if not math.isfinite(square):
            raise TrainingDiverged("the delta has values that are not finite: lower learning_rate in the plan")
        return square, list(peaks(self._ranges, values, at))

    def read(self, values: FloatBlock, first: int) -> None:
        """Fill `values` with what begins at element `first`."""
        left, at = values.data.cast("B"), first * _ITEM
        try:
            while left:
                count = os.preadv(self._descriptor, [left], at)
                if not count:
                    raise IntegrityError(
                        f"delta {self._path} was cut off at byte {at}: this round is lost for this silo"
                    )
                left, at = left[count:], at + count
        except OSError as error:
            raise self._unreadable(error) from error

    def require_unchanged(self) -> None:
        """Raise IntegrityError if the file was written to since it was opened."""
        if FileMark.of(self._descriptor) != self._mark:
            raise IntegrityError(
                f"delta {self._path} was written to while it was masked: this round is lost for this silo"
            )

    def close(self) -> None:
        os.close(self._descriptor)

    def _unreadable(self, error: OSError) -> StorageError:
        return StorageError(f"delta {self._path} cannot be read ({error.strerror})")


class _Task:
    """Encoding and masking, chunk by chunk of the file."""

    def __init__(
        self,
        work: MaskVector,
        source: _DeltaFile,
        file: ChunkWriter,
        *,
        encoder: Encoder,
        within: WithinRange | None,
        noise: NoiseShares | None,
    ) -> None:
        self._noise = None if noise is None else NoiseStream(bytes(work.noise.buffer), sigma_bits=noise.sigma_bits)
        self._encoder, self._within = encoder, within
        self._masks = work.masks
        self._elements = work.fixed_point.ranges.elements
        self._source = source
        self._file = file

    @property
    def chunks(self) -> range:
        """Those of coordinates alone, which need to know of no other."""
        return range(self._elements // BLOCK_ELEMENTS)

    def mask(self, bench: _Bench, chunk: int) -> int:
        """Write one of `chunks`; how many coordinates were beyond their range."""
        words, first = bench.words[:BLOCK_ELEMENTS], chunk * BLOCK_ELEMENTS
        saturated = self._encode(bench, words, first)
        self._masks.apply(words, first, bench.masking)
        self._file.write(chunk, words)
        return saturated

    def mask_end(self, bench: _Bench, saturated: int) -> int:
        """Write what comes after `chunks`, in which `saturated` coordinates were beyond their range; how many were in
        all."""
        chunk = len(self.chunks)
        first = chunk * BLOCK_ELEMENTS
        left = self._elements - first
        words = bench.words[: left + EXTRA_WORDS]
        saturated += self._encode(bench, words[:left], first)
        if self._noise is None:
            words[left:] = self._encoder.encode_tail(saturated, bench.encoding)
        else:
            words[left:] = self._encoder.public_tail()
        self._masks.apply(words, first, bench.masking)
        for begin in range(0, len(words), BLOCK_ELEMENTS):  # its last words may be in a chunk of their own
            self._file.write(chunk + begin // BLOCK_ELEMENTS, words[begin : begin + BLOCK_ELEMENTS])
        return saturated

    def _encode(self, bench: _Bench, words: Words, first: int) -> int:
        values = bench.delta[: len(words)]
        self._source.read(values, first)
        if self._within is None:
            whole: WholeBlock = values.view("<i4")
            saturated = self._encoder.encode(words, whole, first, bench.encoding)
        else:
            saturated = self._within.scale(values, first, bench.encoding)
            saturated += self._encoder.encode(words, values, first, bench.encoding)
        if self._noise is not None:
            for begin in range(0, len(words), NOISE_ELEMENTS):  # chunks begin where blocks of noise do
                piece = words[begin : begin + NOISE_ELEMENTS]
                drawn = self._noise.block((first + begin) // NOISE_ELEMENTS, len(piece))
                np.add(piece, drawn.astype(np.uint32), out=piece)  # mod 2^32, as everything in it
        return saturated
