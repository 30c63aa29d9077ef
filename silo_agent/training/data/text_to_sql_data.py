"""A silo's data set: train, dev and test JSONL with one question and its SQL a line, schema.json, maybe a database.

Lines are parsed once, strictly, here. A bad line is left out and reported with file, line number and reason; a split
with too many of them is refused, because then the file is most likely not what its owner thinks it is.

Files may be larger than memory: what was parsed goes to a spool (spool.py), and nobody looks into them again. So a
nightly export may replace them at any time but while they are read, and is refused then.
"""

import gzip
import json
import os
import stat
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import IO, Final, Literal

import numpy as np

from lorica_security.errors import DataError
from lorica_security.host.file_mark import FileMark
from silo_agent.training.data.repeats import Names, UnitKeys, repeats, whole_numbers
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.spool import Spool, SpoolPlace
from silo_agent.training.data.stored import Stored

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")
SCHEMA_FILE = "schema.json"
KEPT_BAD_LINES: Final = 1000
"""Of each file: more are counted, and not told one by one."""
_SHOWN = 60


class UnitOwnsHalf(DataError):
    """One unit has half of the training lines or more."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question; `query` is empty where the silo has no labels. `unit` is whom it belongs to, where a plan groups
    lines; keys beyond these are not read.

    `counted`: where in `query` the characters begin and end that count in the loss; None: all do.
    """

    id: str
    question: str
    query: str
    db_id: str
    unit: str = ""
    counted: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLimits:
    """`max_bad_fraction` holds for each file by itself; the byte and line bounds keep a wrong or hostile file from
    filling memory. `spool` is where what was parsed goes."""

    max_bad_fraction: float = 0.01
    max_line_bytes: int = 1 << 18
    max_lines: int = 1 << 28
    max_schema_bytes: int = 16 << 20
    spool: SpoolPlace = field(default_factory=SpoolPlace)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloData:
    """`test` is empty where there is no such file. `database` is db.sqlite or db.sqlite.gz (to be unpacked before use),
    of `schema`. Of `bad_lines` each file has KEPT_BAD_LINES at most, and `more_bad_lines` are not among them. `spool`
    is where what is made of the examples goes.

    `further_schemas` are those of other databases that questions are asked of. `task` is the one that they were read
    for (silo_agent.training.tasks). Without labels every `query` is empty, and there is nothing but `train`.
    """

    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    schema: Schema
    database: Path | None
    bad_lines: tuple[BadLine, ...]
    more_bad_lines: int = 0
    further_schemas: tuple[Schema, ...] = ()
    task: str = "sql"
    labelled: bool = True
    spool: SpoolPlace = field(default_factory=SpoolPlace)

    @property
    def schemas(self) -> tuple[Schema, ...]:
        return (self.schema, *self.further_schemas)

    def split(self, name: Split) -> Sequence[Example]:
        match name:
            case "train":
                return self.train
            case "dev":
                return self.dev
            case "test":
                return self.test


def load_silo_data(
    folder: Path,
    limits: DataLimits | None = None,
    *,
    unit_field: str = "",
    private: bool = False,
    labelled: bool = True,
) -> SiloData:
    """Read the folder; raises DataError naming the file where one is missing, unreadable, empty, bad beyond the
    limit, or written to meanwhile, and StorageError where the lines fit neither into memory nor onto the disk.

    With `unit_field`, the key of a training line that says whom it belongs to; a line without it is a bad one. For
    `private` training no line keeps another one out: a repeated id is a bad line everywhere else. Raises UnitOwnsHalf
    for `private` training on lines of which one unit has half or more. Without labels, `query` of a line is not
    looked at, whatever it is, and neither are the files of dev and test.
    """
    limits = limits or DataLimits()
    require_folder(folder, SCHEMA_FILE)
    schema, *further = _schemas(folder / SCHEMA_FILE, limits)
    databases = {schema.db_id, *(other.db_id for other in further)}
    splits = read_splits(
        folder,
        limits,
        lambda value, grouped_by: _example(value, databases, grouped_by, labelled=labelled),
        unit_field=unit_field,
        private=private,
        labelled=labelled,
    )
    return splits.data(
        schema, *further, database=_one_of(folder, "db.sqlite", "db.sqlite.gz"), task="sql", labelled=labelled
    )


def require_folder(folder: Path, *beside: str) -> None:
    """Raise DataError where there is no such folder; `beside` are the files that it has beside its splits."""
    if not folder.is_dir():
        *first, last = ("train.jsonl", "dev.jsonl", *beside)
        raise DataError(f"{folder} is not a folder: give the one that holds {', '.join(first)} and {last}")


LineForm = Callable[[Mapping[str, object], str], Example]
"""(a line's object, the key that says whose it is or "") -> its example; raises LineFault."""


class LineFault(ValueError):
    """What is wrong with a line, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The examples of a folder's files, and the lines that were left out of all of them, as SiloData has them."""

    train: Sequence[Example]
    dev: Sequence[Example]
    test: Sequence[Example]
    bad_lines: tuple[BadLine, ...]
    more_bad_lines: int
    spool: SpoolPlace

    def data(
        self, schema: Schema, *further: Schema, database: Path | None = None, task: str, labelled: bool
    ) -> SiloData:
        """With the schemas that its questions are asked of."""
        return SiloData(
            train=self.train,
            dev=self.dev,
            test=self.test,
            schema=schema,
            database=database,
            bad_lines=self.bad_lines,
            more_bad_lines=self.more_bad_lines,
            further_schemas=further,
            task=task,
            labelled=labelled,
            spool=self.spool,
        )


def require_no_schema(folder: Path, task: str, *, lines: str) -> None:
    """Raise DataError where there is no such folder, or where it is one of questions to a database; `lines` says what
    those of `task` have in its place."""
    require_folder(folder)
    if (folder / SCHEMA_FILE).exists():
        raise DataError(
            f"{folder} holds {SCHEMA_FILE}, and a plan with [task] kind = {task!r} was to be trained on it: its lines "
            f"have {lines}; give the folder of such lines"
        )


def read_splits(
    folder: Path, limits: DataLimits, form: LineForm, *, unit_field: str, private: bool, labelled: bool
) -> Splits:
    """Every line of train, and with labels of dev and test, as `form` has it; keywords and errors as of
    `load_silo_data`."""
    before: list[_SplitFile] = []
    read: list[_SplitFile] = []
    for name in SPLITS:
        if name != "train" and not labelled:
            continue
        path = _one_of(folder, f"{name}.jsonl", f"{name}.jsonl.gz")
        if path is None:
            if name == "test":
                continue
            raise DataError(f"{folder / f'{name}.jsonl'} is missing: put the {name} split there (or {name}.jsonl.gz)")
        alone = private and name == "train"
        split = _SplitFile(name, path, limits)
        split.read(form, unit_field if name == "train" else "")
        if not alone:
            split.leave_repeats_out(before)
            before.append(split)
        split.require_good()
        if alone and unit_field:
            split.require_units(unit_field)
        read.append(split)
    of: dict[Split, Sequence[Example]] = {split.name: split.examples for split in read}
    bad = tuple(line for split in read for line in split.bad)
    return Splits(
        train=of["train"],
        dev=of.get("dev", ()),
        test=of.get("test", ()),
        bad_lines=bad,
        more_bad_lines=sum(split.bad_count for split in read) - len(bad),
        spool=limits.spool,
    )


def split_paths(folder: Path) -> tuple[Path, ...]:
    """The files of the splits that are there, packed or not."""
    names = [f"{split}.jsonl{packed}" for split in SPLITS for packed in ("", ".gz")]
    return tuple(path for path in (folder / name for name in names) if path.is_file())


def first_keys(folder: Path) -> Set[str]:
    """The keys of the first line of train that is not blank; none where there is no such line."""
    path = _one_of(folder, "train.jsonl", "train.jsonl.gz")
    if path is None:
        return frozenset()
    limits = DataLimits()
    try:
        return next((_object(raw, limits).keys() for _, raw in _lines(path, limits)), frozenset())
    except LineFault:
        return frozenset()


def _schemas(path: Path, limits: DataLimits) -> tuple[Schema, ...]:
    try:
        with path.open("rb") as file:
            raw = file.read(limits.max_schema_bytes + 1)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: make it with 'silo-agent schema URL'") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct its permissions") from error
    if len(raw) > limits.max_schema_bytes:
        raise DataError(f"{path} has more than {limits.max_schema_bytes} bytes: it is not a schema")
    return Schema.all_from_json(raw, path)


def _one_of(folder: Path, plain: str, packed: str) -> Path | None:
    there = [path for path in (folder / plain, folder / packed) if path.exists()]
    if len(there) == 2:
        raise DataError(f"{folder} holds both {plain} and {packed}: remove the one that is out of date")
    return there[0] if there else None


class _SplitFile:
    """One file: its good lines, and its bad ones."""

    def __init__(self, name: Split, path: Path, limits: DataLimits) -> None:
        self.name, self._path, self._limits = name, path, limits
        self._hashes, self._units = array("q"), UnitKeys()
        self.bad: list[BadLine] = []
        self.bad_count = 0

    def read(self, form: LineForm, unit_field: str) -> None:
        spool = Spool(self._limits.spool, f"the lines of {self._path}")
        for number, raw in _lines(self._path, self._limits):
            try:
                example = form(_object(raw, self._limits), unit_field)
            except LineFault as error:
                self.bad_count += 1
                if self.bad_count <= KEPT_BAD_LINES:
                    self.bad.append(BadLine(self._path, number, str(error)))
                continue
            self._hashes.append(hash(example.id))
            if unit_field:
                self._units.append(example.unit)
            spool.append(_packed(number, example))
        self._records = spool.finish()
        self.examples = Stored(self._records, _example_of)

    def leave_repeats_out(self, before: "Sequence[_SplitFile]") -> None:
        """Lines whose id stands earlier in this file or in one `before` are bad ones."""
        files = (*before, self)
        found = array("q")  # three numbers of each
        for one in repeats(self._names, [file._names for file in before]):
            found.extend((one.number, one.among, one.first))
        if not found:
            return
        left_out = whole_numbers(found).reshape(-1, 3)
        for number, among, first in left_out[np.argsort(left_out[:, 0])[:KEPT_BAD_LINES]].tolist():
            line, example = _unpacked(self._records[number])
            place = f"{files[among]._path.name}:{_unpacked(files[among]._records[first])[0]}"
            self.bad.append(BadLine(self._path, line, f"id {_short(example.id)} stands already at {place}"))
        self.bad = sorted(self.bad, key=attrgetter("line"))[:KEPT_BAD_LINES]
        self.bad_count += len(left_out)
        kept = np.delete(np.arange(len(self._records)), left_out[:, 0])
        self.examples = Stored(self._records, _example_of, kept)

    @property
    def _names(self) -> Names:
        return Names(whole_numbers(self._hashes), lambda number: _example_of(self._records[number]).id)

    def require_good(self) -> None:
        lines = len(self.examples) + self.bad_count
        if lines and self.bad_count > self._limits.max_bad_fraction * lines:
            raise DataError(
                f"{self._path} has {self.bad_count} bad lines of {lines}, allowed is a share of "
                f"{self._limits.max_bad_fraction:g} ([data] max_bad_lines_share); the first: line {self.bad[0].line}: "
                f"{self.bad[0].reason}"
            )
        if not self.examples:
            raise DataError(f"{self._path} holds no example: put one JSON object a line there, or remove the file")

    def require_units(self, unit_field: str) -> None:
        """A step sees one line of each unit: of such data next to nothing would be learnt, or the key does not say
        whose lines are."""
        units = self._units.units()
        assert units is not None, "a line without its unit is a bad one"
        largest = units[units.largest()]
        if 2 * len(largest) >= len(self.examples):
            raise UnitOwnsHalf(
                f"{self._path}: {unit_field} {_short(self.examples[largest[0]].unit)} has {len(largest)} of "
                f"{len(self.examples)} training lines, half or more: nothing is trained; correct the key "
                f"{unit_field!r} of the lines, or leave lines of this {unit_field} out"
            )


_encoded: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _packed(line: int, example: Example) -> bytes:
    one = example
    values = [line, one.id, one.question, one.query, one.db_id, one.unit, one.counted]
    return _encoded(values).encode("utf-8", "surrogatepass")


def _unpacked(record: bytes) -> tuple[int, Example]:
    """The line that it stood at, and the example."""
    line, id_, question, query, db_id, unit, counted = json.loads(record.decode("utf-8", "surrogatepass"))
    spans = None if counted is None else tuple((begin, end) for begin, end in counted)
    return line, Example(id_, question, query, db_id, unit, spans)


def _example_of(record: bytes) -> Example:
    return _unpacked(record)[1]


def _lines(path: Path, limits: DataLimits) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that are not blank; None for one longer than the limit, whose rest is skipped."""
    with _opened(path) as file:
        number = 0
        while raw := file.readline(limits.max_line_bytes + 1):
            number += 1
            if number > limits.max_lines:
                raise DataError(f"{path} has more than {limits.max_lines} lines: split the data set")
            if len(raw) > limits.max_line_bytes:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(limits.max_line_bytes)
                yield number, None
            elif raw.strip():
                yield number, raw


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Of one that is written to meanwhile nobody knows what was read."""
    try:
        # Not to wait for whoever would write into a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise DataError(f"{path} is no ordinary file: put the lines themselves there")
        with open(descriptor, "rb") as plain:
            before = FileMark.of(plain.fileno())
            with gzip.open(plain) if path.suffix == ".gz" else nullcontext(plain) as file:
                yield file  # type: ignore[misc]  # gzip.GzipFile reads as IO[bytes] does, but is declared apart
            if FileMark.of(plain.fileno()) != before:
                raise DataError(
                    f"{path} was written to while it was read: start again when that is done, and have exports put a "
                    "whole new file in the place of the old one"
                )
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{path} cannot be read ({error}): correct or replace it") from error


def _object(raw: bytes | None, limits: DataLimits) -> Mapping[str, object]:
    if raw is None:
        raise LineFault(f"longer than {limits.max_line_bytes} bytes")
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise LineFault(f"not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise LineFault(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineFault(f"a {type(value).__name__}, expected an object")
    return value


def _example(value: Mapping[str, object], databases: Set[str], unit_field: str, *, labelled: bool) -> Example:
    id_, question, named = (text_of(value, key) for key in ("id", "question", "db_id"))
    query = text_of(value, "query") if labelled else ""
    example = Example(id_, question, query, named, unit_of(value, unit_field))
    if example.db_id not in databases:
        known = _short(", ".join(sorted(databases)))
        raise LineFault(f"db_id {_short(example.db_id)} is not the {known} of {SCHEMA_FILE}")
    return example


def unit_of(value: Mapping[str, object], key: str) -> str:
    """Whom a line belongs to, by its key; empty where `key` is. A number stands for itself: patients often have one."""
    if not key:
        return ""
    number = value.get(key)
    return str(number) if type(number) is int else text_of(value, key)


def text_of(value: Mapping[str, object], key: str) -> str:
    """Text that is not empty; raises LineFault."""
    if key not in value:
        raise LineFault(f"key {key} is missing")
    text = value[key]
    if not isinstance(text, str):
        raise LineFault(f"{key} is a {type(text).__name__}, expected text")
    if not text.strip():
        raise LineFault(f"{key} is empty")
    require_characters(text, key)
    return text


def require_characters(text: str, key: str) -> None:
    """Raise LineFault for text that UTF-8 has no bytes for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LineFault(f"{key} holds half of a surrogate pair") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")
