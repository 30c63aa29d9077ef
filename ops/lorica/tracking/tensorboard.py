"""Points as TensorBoard's event files: a folder for each run, a curve for each value, rounds as steps."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from lorica.tracking.json_lines import JsonLines
from lorica.tracking.point import Point, Run
from lorica_security.errors import ConfigurationError, StorageError

LEDGER: Final = "rounds.jsonl"
"""In each run's folder: what its event files have. A point is entered after its events are on the disk, so that a
tracker that is killed between the two writes them again, with the same step and instant."""


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError where the writer of event files is not installed."""
        try:
            import tensorboardX  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "TensorBoard's event files need tensorboardX: install the extra `tracking` (ops/docs/deployment.md)"
            ) from error
        self._folder = folder
        self._ledgers: dict[Run, JsonLines] = {}

    @property
    def where(self) -> str:
        return str(self._folder)

    def take(self, points: Sequence[Point]) -> int:
        """Raises StorageError, Conflict where another tracker writes the run."""
        return sum(self._of_run(run, list(of_run)) for run, of_run in groupby(points, lambda point: point.run))

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()

    def _of_run(self, run: Run, points: Sequence[Point]) -> int:
        folder = self._folder / run.title
        if run not in self._ledgers:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{folder} cannot be made: {error.strerror}") from error
            self._ledgers[run] = JsonLines(folder / LEDGER)
        ledger = self._ledgers[run]
        new = [point for point in points if point.key not in ledger.known]
        if new:
            try:
                _write(folder, new)
            except OSError as error:
                raise StorageError(f"{folder} cannot be written: {error.strerror}; free some space") from error
            ledger.take(new)
        return len(new)


def _write(folder: Path, points: Sequence[Point]) -> None:
    """A file of its own each time: TensorBoard reads all that are there, and none is held open between rounds."""
    from tensorboardX import SummaryWriter

    writer: SummaryWriter
    with SummaryWriter(logdir=str(folder), write_to_disk=True) as writer:
        for point in points:
            for name, value in point.values.items():
                writer.add_scalar(f"{point.what}/{name}", value, point.round, walltime=point.unix_s)
        writer.flush()
