"""What a silo has of its own: the data folder and the database that a model's SQL may be tried on."""

import gzip
import os
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from lorica_security.errors import DataError, StorageError
from lorica_security.host.files import make_private_folder
from lorica_security.identifiers import SiloName
from silo_agent.policy.plan_limits import task_refusals
from silo_agent.service.ports import DataSummary
from silo_agent.settings import Settings
from silo_agent.sql_sandbox import DatabaseTarget, Limits, SqliteTarget, parse_database, run_select
from silo_agent.training.data.spool import SpoolPlace
from silo_agent.training.data.text_to_sql_data import DataLimits, SiloData, first_keys
from silo_agent.training.tasks.named import section_of, task_marked_by, task_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.task import TaskSection

SHOWN_BAD_LINES = 20
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """How a plan has a silo's lines read."""

    unit_field: str = ""
    private: bool = False
    task: TaskSection = field(default_factory=TaskSection)
    labelled: bool = True

    @classmethod
    def of(cls, plan: Plan, silo: SiloName) -> "Reading":
        return cls(
            unit_field=plan.privacy.unit_field,
            private=plan.privacy.level == "record",
            task=plan.task,
            labelled=not plan.semi_supervised.without_labels(silo),
        )


class SiloSources:
    """`scratch` is a private folder for a database that comes compressed, and for lines that memory does not hold."""

    def __init__(self, settings: Settings, scratch: Path) -> None:
        self._settings = settings
        self._scratch = scratch
        self._data: SiloData | None = None
        self._read_for: Reading | None = None

    @property
    def reading(self) -> Reading:
        """How the data were read last, or are read at first."""
        return self._read_for or self._at_first()

    def data(self) -> SiloData:
        """As it was read last, at first for what its first line is; raises DataError, also for more bad lines than
        [data] max_bad_lines_share."""
        return self.data_for(self.reading)

    def data_for(self, reading: Reading) -> SiloData:
        """Read once for plans that have it read alike; raises what `data` raises, and PolicyRefusal for an installed
        task that this silo's people did not allow, before any of its code runs."""
        if self._data is None or reading != self._read_for:
            for refusal in task_refusals(self._settings.policy, reading.task):
                raise refusal
            self._data = task_of(reading.task).data(
                self._folder(),
                DataLimits(
                    max_bad_fraction=self._settings.data.max_bad_lines_share,
                    spool=SpoolPlace(self._scratch),
                ),
                unit_field=reading.unit_field,
                private=reading.private,
                labelled=reading.labelled,
            )
            self._read_for = reading
        return self._data

    def _at_first(self) -> Reading:
        """Without a plan: a folder whose first line has no answer, and that has no dev split, is one without labels."""
        keys = first_keys(self._folder())
        task = task_marked_by(keys, self._settings.policy.tasks)
        held_out = any((self._folder() / name).exists() for name in ("dev.jsonl", "dev.jsonl.gz"))
        return Reading(task=section_of(task), labelled=held_out or not keys or task.label in keys)

    def _folder(self) -> Path:
        if not self._settings.data.folder:
            raise DataError("no data folder is given: use --data DIR, or set [data] folder in silo.toml")
        return Path(self._settings.data.folder)

    def summary(self) -> DataSummary:
        data = self.data()
        return DataSummary(
            train_examples=len(data.train),
            dev_examples=len(data.dev),
            test_examples=len(data.test),
            bad_lines=len(data.bad_lines) + data.more_bad_lines,
            problems=[str(line) for line in data.bad_lines[:SHOWN_BAD_LINES]],
        )

    def database(self) -> DatabaseTarget | None:
        """[database] url, else the database that lies beside the data."""
        if self._settings.database.url:
            return parse_database(self._settings.database.url)
        beside = self.data().database
        if beside is None:
            return None
        return SqliteTarget((self._unpacked(beside) if beside.suffix == ".gz" else beside).absolute())

    def check_database(self) -> str:
        """How the database is called, if it answers; empty without one. Raises DataError."""
        target = self.database()
        if target is None:
            return ""
        run_select(target, "SELECT 1", self.limits())
        return target.shown

    def limits(self) -> Limits:
        return Limits(**self._settings.sql.model_dump(exclude={"question_seconds", "round_seconds"}))

    def filter_limits(self) -> tuple[Limits, float, float]:
        """Of a statement that is tried in training, and seconds of one question's and of a round's."""
        sql, limits = self._settings.sql, self.limits()
        return (
            replace(limits, seconds=min(limits.seconds, sql.question_seconds)),
            sql.question_seconds,
            sql.round_seconds,
        )

    def _unpacked(self, packed: Path) -> Path:
        if not packed.is_file():
            raise DataError(f"{packed} is no ordinary file: put the packed database there")
        facts = packed.stat()
        target = self._scratch / f"database-{facts.st_mtime_ns}-{facts.st_size}.sqlite"
        if target.exists():
            return target
        make_private_folder(self._scratch)
        for old in self._scratch.glob("database-*"):
            old.unlink()
        part = target.with_suffix(".part")
        try:
            with gzip.open(packed) as source, part.open("wb") as file:
                self._unpack(source, file, packed)
            os.replace(part, target)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(f"{packed} is not a whole gzip file ({error}): copy it again") from error
        except OSError as error:
            raise StorageError(f"{packed} cannot be unpacked to {self._scratch}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        return target

    def _unpack(self, source: gzip.GzipFile, target: IO[bytes], packed: Path) -> None:
        left = most = self._settings.database.max_unpacked_bytes
        while block := source.read(_BLOCK_BYTES):
            left -= len(block)
            if left < 0:
                raise DataError(
                    f"{packed} holds more than {most} bytes: put the database itself there, or raise [database] "
                    "max_unpacked_bytes"
                )
            target.write(block)
