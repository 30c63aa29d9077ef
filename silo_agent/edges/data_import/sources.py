"""What an import reads: one file, or the files of a folder with the split that each is of.

A folder may be of any of these layouts; no program that lies in one is ever run, and nothing is fetched.

    Spider          tables.json, train_spider.json, train_others.json, dev.json, test.json
    BIRD            train_tables.json and train.json, dev_tables.json and dev.json, in the folder or in folders of it
    datasets        what Hugging Face datasets writes with save_to_disk: state.json names the files of a folder
    anything else   files of one format, each named for its split or in a folder that is, as in repositories of data
                    sets
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from lorica_security.errors import ConfigurationError, DataError
from lorica_security.visible_text import visible
from silo_agent.edges.data_import.arrow_files import arrow_rows
from silo_agent.edges.data_import.findings import shortened
from silo_agent.edges.data_import.tables import Reading, Row, delimited, json_rows
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, SPLITS, Split

MAX_FILES = 1000
MAX_DEPTH = 4
_MAX_STATE_BYTES = 1 << 20


class Format(Enum):
    """A file's, or the layout of a folder."""

    CSV = "csv"
    TSV = "tsv"
    JSONL = "jsonl"
    JSON = "json"
    PARQUET = "parquet"
    ARROW = "arrow"
    SPIDER = "spider"
    BIRD = "bird"


_SUFFIXES = {
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".tab": Format.TSV,
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".json": Format.JSON,
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
}
_PACKABLE = (Format.CSV, Format.TSV, Format.JSONL, Format.JSON)
_WORDS: Mapping[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("dev", "development", "valid", "validation", "val"), "dev"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_NO_DATA = re.compile(r"(schema|dataset_infos?|dataset_dict|state|(.*_)?tables|package|config)\.json")
_SPIDER: Mapping[str, Split] = {"train_spider": "train", "train_others": "train", "dev": "dev", "test": "test"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """`shown` is its path within what is imported; `split` is None where its name says none."""

    path: Path
    shown: str
    format: Format
    split: Split | None = None

    def rows(self, reading: Reading) -> Iterator[Row]:
        match self.format:
            case Format.CSV:
                return delimited(self.path, self.shown, reading)
            case Format.TSV:
                return delimited(self.path, self.shown, reading, delimiter="\t")
            case Format.PARQUET:
                return arrow_rows(self.path, self.shown, "parquet", reading)
            case Format.ARROW:
                return arrow_rows(self.path, self.shown, "arrow", reading)
            case _:
                return json_rows(self.path, self.shown, reading)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`columns` are those that the layout has its keys in; `tables` and `schema` are files that schemas are in."""

    files: tuple[SourceFile, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    tables: tuple[Path, ...] = ()
    schema: Path | None = None


def find_source(path: Path, given: Format | None) -> Source:
    """The files at `path`; raises ConfigurationError or DataError where they are none that can be read."""
    if path.is_file():
        return Source(files=(_single(path, given),))
    if not path.is_dir():
        raise ConfigurationError(f"{path} is neither a file nor a folder: name what is to be imported")
    if given is Format.SPIDER or (given is None and (path / "tables.json").is_file()):
        return _spider(path)
    if given is Format.BIRD or (given is None and any(_bird_tables(path))):
        return _bird(path)
    schema = path / SCHEMA_FILE
    return Source(files=_of_folder(path, given), schema=schema if schema.is_file() else None)


def _single(path: Path, given: Format | None) -> SourceFile:
    if given in (Format.SPIDER, Format.BIRD):
        raise ConfigurationError(
            f"{path} is a file, and --format {given.value} is the layout of a folder: name the folder"
        )
    found = given or _format(path)
    if found is None:
        raise ConfigurationError(f"{path} has none of the suffixes {' '.join(_SUFFIXES)}: give --format")
    return SourceFile(path, path.name, found)


def _format(path: Path) -> Format | None:
    packed = path.suffix == ".gz"
    found = _SUFFIXES.get((Path(path.stem) if packed else path).suffix.lower())
    return None if packed and found not in _PACKABLE else found


def _spider(folder: Path) -> Source:
    tables = tuple(path for name in ("tables.json", "test_tables.json") if (path := folder / name).is_file())
    files = [
        SourceFile(path, path.name, Format.JSON, split)
        for stem, split in _SPIDER.items()
        if (path := folder / f"{stem}.json").is_file()
    ]
    if not tables or not files:
        raise DataError(
            f"{folder} is not laid out as Spider is: it needs tables.json and "
            f"{', '.join(f'{stem}.json' for stem in _SPIDER)}"
        )
    return Source(files=tuple(files), tables=tables)


def _bird_tables(folder: Path) -> Iterator[tuple[Path, Path, Split]]:
    """Each file of schemas beside its file of questions."""
    for split in SPLITS:
        for tables in sorted((*folder.glob(f"{split}_tables.json"), *folder.glob(f"*/{split}_tables.json"))):
            if tables.is_file() and (questions := tables.with_name(f"{split}.json")).is_file():
                yield tables, questions, split


def _bird(folder: Path) -> Source:
    found = list(_bird_tables(folder))
    if not found:
        raise DataError(
            f"{folder} is not laid out as BIRD is: it needs train.json beside train_tables.json, or dev.json beside "
            "dev_tables.json"
        )
    files = (SourceFile(path, _shown(path, folder), Format.JSON, split) for _, path, split in found)
    return Source(files=tuple(files), tables=tuple(tables for tables, *_ in found), columns={"query": "SQL"})


def _of_folder(folder: Path, given: Format | None) -> tuple[SourceFile, ...]:
    paths = [path for path in _paths(folder) if not _NO_DATA.fullmatch(path.name)]
    formats = {path: found for path in paths if (found := _format(path)) and given in (None, found)}
    for path in formats:
        _regular(path)
    if not formats:
        kind = given.value if given else " ".join(_SUFFIXES)
        raise DataError(f"{folder} holds no file of data ({kind}): name the file or the folder that does")
    if len(set(formats.values())) > 1:
        several = ", ".join(sorted({found.value for found in formats.values()}))
        raise ConfigurationError(
            f"{folder} holds files of several formats ({several}): say with --format which to take"
        )
    files = tuple(
        SourceFile(path, _shown(path, folder), found, _split(path, folder)) for path, found in formats.items()
    )
    unsaid = [file for file in files if file.split is None]
    if unsaid and len(unsaid) < len(files):
        raise DataError(
            f"{folder}: the name of {visible(unsaid[0].shown)} says not whether it is train, dev or test, as others "
            "here do: rename it, or import the files that belong together from a folder of their own"
        )
    return files


def _paths(folder: Path) -> list[Path]:
    """All files below, without hidden ones; of a folder that datasets wrote those that its state.json names."""
    paths: list[Path] = []
    for at, folders, names in os.walk(folder):
        here = Path(at)
        deep = len(here.relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if deep < MAX_DEPTH else []
        chosen: Collection[str] = _of_state(here / "state.json") if "state.json" in names else names
        paths += [here / name for name in sorted(chosen) if not name.startswith(".")]
        if len(paths) > MAX_FILES:
            raise DataError(f"{folder} holds more than {MAX_FILES} files: name a folder with the data alone")
    return paths


def _regular(path: Path) -> None:
    """Raises DataError for what cannot be read to its end; to open a pipe waits for who writes into it."""
    if not path.is_file():
        raise DataError(
            f"{visible(str(path))} is no file, but a pipe, a socket, a device or a link that leads nowhere: move it "
            "away"
        )


def _of_state(path: Path) -> list[str]:
    """The files of one split; what else lies there are the caches of earlier calls."""
    _regular(path)
    try:
        with path.open("rb") as file:
            state = json.loads(file.read(_MAX_STATE_BYTES))
        names = [entry["filename"] for entry in state["_data_files"]]
        remapped = state.get("_indices_files")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not as save_to_disk of datasets writes it: save the data set again") from error
    if remapped:
        raise DataError(
            f"{path} keeps the order of rows in another file: save the data set again after flatten_indices()"
        )
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or not (path.parent / name).is_file():
            raise DataError(
                f"{path} names a file {shortened(str(name))} that is not beside it: save the data set again"
            )
    return names


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))


def _split(path: Path, folder: Path) -> Split | None:
    """By the words of its name, else by those of the folder that it lies in."""
    for name in (path.name.partition(".")[0], *reversed(path.relative_to(folder).parent.parts)):
        found = {_WORDS[word] for word in re.split("[^a-z]+", name.lower()) if word in _WORDS}
        if found:
            return found.pop() if len(found) == 1 else None
    return None
