"""Points as TensorBoard's event files: a folder for each run, a curve for each value, rounds as steps."""

import os
import secrets
import time
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
        for gone in self._ledgers.keys() - {point.run for point in points}:
            self._ledgers.pop(gone).close()
        return sum(self._of_run(run, list(of_run)) for run, of_run in groupby(points, lambda point: point.run))

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()

    def _of_run(self, run: Run, points: Sequence[Point]) -> int:
        folder = self._folder / run.title
        if run not in self._ledgers:
            _make(self._folder)
            _make(folder)
            self._ledgers[run] = JsonLines(folder / LEDGER)
        ledger = self._ledgers[run]
        new = [point for point in points if point.key not in ledger.known]
        if new:
            _write(folder, new)
            ledger.take(new)
        return len(new)


def _make(folder: Path) -> None:
    """Raises StorageError for a link, whoever may have put it there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from error
    if folder.is_symlink():
        raise StorageError(f"{folder} is a link: choose another folder, or take it away")


def _write(folder: Path, points: Sequence[Point]) -> None:
    """A file of its own each time, whole and on the disk or not there: TensorBoard reads all that are, and none is held
    open between rounds. Raises StorageError."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    path = folder / f"events.out.tfevents.{time.time_ns() // 1_000_000_000:010}.{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            writer = RecordWriter(str(path))
            writer.write(Event(wall_time=points[0].unix_s, file_version="brain.Event:2").SerializeToString())
            for point in points:
                values = [
                    Summary.Value(tag=f"{point.what}/{name}", simple_value=value)
                    for name, value in point.values.items()
                ]
                event = Event(wall_time=point.unix_s, step=point.round, summary=Summary(value=values))
                writer.write(event.SerializeToString())
            writer.close()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"{folder} cannot be written: {error.strerror}; free some space") from error
