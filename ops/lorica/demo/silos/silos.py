"""Generate the demo's silos: questions with SQL in three splits, a schema file and an SQLite database.

Two rules make a held-out question worth asking. No SQL statement of dev or test occurs in training, so that copying the
SQL of any training question scores nothing; and every question template and every value of a held-out question is seen
in training, in other combinations. Everything is a function of (specification, seed).
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from lorica.demo.silos.bank import BANK
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.specification import SQL_TYPE_KINDS, Column, Shape, SiloSpecification, Value
from lorica_security.errors import ConfigurationError
from lorica_security.host import files
from lorica_security.identifiers import SiloName, silo_name

SILOS = (HOSPITAL, CLINIC, BANK, INSURER)


@dataclass(frozen=True, slots=True)
class Record:
    """One question and its gold SQL; `id` is `<silo>-<shape index>-<sentence index within the shape>`."""

    id: str
    question: str
    query: str
    db_id: str


@dataclass(frozen=True, slots=True)
class Splits:
    train: tuple[Record, ...]
    dev: tuple[Record, ...]
    test: tuple[Record, ...]

    def __iter__(self) -> Iterator[tuple[str, tuple[Record, ...]]]:
        return iter((("train", self.train), ("dev", self.dev), ("test", self.test)))


@dataclass(frozen=True, slots=True)
class Filled:
    """A shape with values: one SQL statement, and the questions that ask for it."""

    shape: int
    values: tuple[tuple[str, Value], ...]
    query: str
    questions: tuple[str, ...]


def keep_first(file: Path, lines: int) -> None:
    """Cut one of a silo's files of examples to its first `lines`: all of them take minutes to train on."""
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))


def questions(silo: SiloSpecification, *, seed: int) -> Splits:
    """The splits of `silo`, sizes as specified; raises ConfigurationError where the shapes cannot fill them."""
    random = Random(f"{silo.name} questions {seed}")
    held_out: list[Filled] = []
    for_training: list[Filled] = []
    counts = [len(silo.fillings(shape)) for shape in silo.shapes]
    wanted = shares(counts, silo.dev + silo.test)
    for index, (shape, n) in enumerate(zip(silo.shapes, wanted, strict=True)):
        filled = [fill(index, shape, values) for values in silo.fillings(shape)]
        random.shuffle(filled)
        kept, dropped = hold_out(filled, n)
        held_out += kept
        for_training += dropped
    random.shuffle(held_out)
    pairs = [(filled, random.choice(filled.questions)) for filled in held_out]
    train_pairs = _training_pairs(for_training, random)
    if len(pairs) < silo.dev + silo.test or len(train_pairs) < silo.train:
        raise ConfigurationError(
            f"silo {silo.name!r}: the shapes give {len(train_pairs)} training and {len(pairs)} held-out questions of"
            f" {silo.train} and {silo.dev + silo.test}: add shapes or values, or ask for fewer"
        )
    train_pairs = random.sample(train_pairs[: silo.train], silo.train)
    sentence: Counter[int] = Counter()

    def record(filled: Filled, question: str) -> Record:
        number = sentence[filled.shape]
        sentence[filled.shape] += 1
        return Record(f"{silo.name}-{filled.shape:04}-{number:04}", question, filled.query, silo.name)

    train = tuple(record(*pair) for pair in train_pairs)
    rest = [record(*pair) for pair in pairs]
    return Splits(train, tuple(rest[: silo.dev]), tuple(rest[silo.dev : silo.dev + silo.test]))


def fill(index: int, shape: Shape, values: dict[str, Value]) -> Filled:
    texts = tuple(question.format(**values) for question in shape.questions)
    return Filled(index, tuple(values.items()), shape.sql.format(**values), texts)


def shares(counts: Sequence[int], total: int) -> list[int]:
    """`total` divided in proportion to `counts`, by largest remainder."""
    exact = [total * count / sum(counts) for count in counts]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def hold_out(filled: Sequence[Filled], n: int) -> tuple[list[Filled], list[Filled]]:
    """Up to `n` fillings of one shape to hold out, such that each of their values stays with this shape in training."""
    left = Counter(value for one in filled for value in one.values)
    kept: list[Filled] = []
    dropped: list[Filled] = []
    for one in filled:
        if len(kept) < n and all(left[value] > 1 for value in one.values):
            kept.append(one)
            left.subtract(one.values)
        else:
            dropped.append(one)
    return kept, dropped


def _training_pairs(filled: Sequence[Filled], random: Random) -> list[tuple[Filled, str]]:
    """Every (filling, question) pair, the ones that training needs most first.

    First come fillings that bring a shape a value it has not met, then the other fillings, then fillings again in other
    words; the wordings of a shape are taken in turn.
    """
    met: set[tuple[int, str, Value]] = set()
    new: list[Filled] = []
    known: list[Filled] = []
    for one in random.sample(filled, len(filled)):
        values = {(one.shape, *value) for value in one.values}
        (known if values <= met else new).append(one)
        met |= values
    turns: Counter[int] = Counter()
    passes: list[list[tuple[Filled, str]]] = []
    for one in new + known:
        start = turns[one.shape]
        turns[one.shape] += 1
        for way in range(len(one.questions)):
            if way == len(passes):
                passes.append([])
            passes[way].append((one, one.questions[(start + way) % len(one.questions)]))
    return [pair for one_pass in passes for pair in one_pass]


def schema(silo: SiloSpecification) -> dict[str, object]:
    """The content of `schema.json`, in the format of the benchmark's silos."""

    def column(column: Column) -> dict[str, object]:
        return {
            "name": column.name,
            "sql_type": column.sql_type,
            "type": SQL_TYPE_KINDS[column.sql_type],
            "primary_key": column.primary_key,
            "foreign_key": column.references is not None,
        }

    tables = [{"name": table.name, "columns": [column(c) for c in table.columns]} for table in silo.tables]
    return {"db_id": silo.name, "source": "generated for the Lorica demo", "tables": tables}


def fill_database(silo: SiloSpecification, connection: sqlite3.Connection, *, seed: int) -> None:
    """Create the tables of `silo` with their rows; foreign keys hold."""
    random = Random(f"{silo.name} rows {seed}")
    rows = {table.name: table.rows for table in silo.tables}
    connection.execute("PRAGMA foreign_keys = ON")
    for table in silo.tables:
        columns = ", ".join(_declaration(column) for column in table.columns)
        connection.execute(f"CREATE TABLE {table.name} ({columns})")
        marks = ", ".join("?" for _ in table.columns)
        cells = [[_cell(column, i, rows, random) for column in table.columns] for i in range(table.rows)]
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", cells)
    connection.commit()


def _declaration(column: Column) -> str:
    constraint = " PRIMARY KEY" if column.primary_key else ""
    if column.references is not None:
        constraint = f" REFERENCES {column.references}(id)"
    return f"{column.name} {column.sql_type}{constraint}"


def _cell(column: Column, row: int, rows: dict[str, int], random: Random) -> Value:
    if column.primary_key:
        return row + 1
    if column.references is not None:
        return random.randint(1, rows[column.references])
    return column.values[row] if column.each else random.choice(column.values)


def write_silo(folder: Path, silo: SiloSpecification, *, seed: int, splits: Splits | None = None) -> None:
    """Write train, dev and test `.jsonl`, `schema.json` and `db.sqlite` into `folder`, which must not hold them yet.

    `splits` are the silo's `questions` unless they are given.
    """
    splits = splits or questions(silo, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    database = folder / "db.sqlite"
    if database.exists():
        raise ConfigurationError(f"{database} exists already: choose an empty folder for silo {silo.name!r}")
    for name, records in splits:
        lines = (json.dumps({"id": r.id, "question": r.question, "query": r.query, "db_id": r.db_id}) for r in records)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "schema.json").write_text(json.dumps(schema(silo), indent=1) + "\n", encoding="utf-8")
    with closing(sqlite3.connect(database)) as connection:
        fill_database(silo, connection, seed=seed)


def write_silos(folder: Path, *, seed: int = 1) -> dict[SiloName, Path]:
    """All of SILOS, each in a folder of its name below `folder`; by name, as a simulation takes them.

    Raises ConfigurationError where one is there already, or everybody may write to `folder`.
    """
    files.require_not_everybodys(folder)
    places = {silo_name(silo.name): folder / silo.name for silo in SILOS}
    for silo in SILOS:
        write_silo(places[silo_name(silo.name)], silo, seed=seed)
    return places
