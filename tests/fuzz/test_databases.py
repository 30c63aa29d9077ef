"""Whatever a database file holds, a statement has an answer or is refused; the agent lives, and nothing is written.

A fixed number of files, the same in every run; `make database-fuzz` goes on from there for as long as it is given.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorica_security.errors import DataError, UnsafeSql
from silo_agent.sql_sandbox import Limits, Sandbox, SqliteTarget
from tests.fuzz import databases

CASES = int(os.environ.get("DATABASE_CASES", "25"))
FIRST = int(os.environ.get("DATABASE_FIRST", "0"))
LIMITS = Limits(seconds=0.2, rows=200, result_bytes=2**20, memory_bytes=64 * 2**20)
STATEMENTS = (
    "SELECT * FROM trap",
    "SELECT * FROM patient ORDER BY name",
    "SELECT count(*), max(length(picture)) FROM patient WHERE abs(age) / 2 > 5",
    "SELECT v.day, p.initial FROM visit v JOIN patient p ON p.id = v.patient JOIN adult a ON a.name = p.name",
    "SELECT body FROM note WHERE note MATCH 'cough OR nam*' ORDER BY rank",
    "SELECT snippet(letter) FROM letter WHERE letter MATCH 'fever'",
    "SELECT id FROM place WHERE x0 > 3 AND y1 < 20",
    "SELECT * FROM sqlite_master",
)
ENDINGS = {"database": "", "log": "-wal", "shared": "-shm", "journal": "-journal"}


@dataclass(frozen=True)
class Silo:
    """One sandbox over one database whose bytes change; the names stay, so that its worker does."""

    path: Path
    box: Sandbox

    def put(self, files: databases.Files) -> None:
        for name, ending in ENDINGS.items():
            self.path.with_name(self.path.name + ending).write_bytes(getattr(files, name))

    def answers(self, case: str) -> int:
        """How many statements had rows; whatever else became of them is one of the sandbox's own errors."""
        answers = 0
        for statement in STATEMENTS:
            try:
                answers += len(self.box.run(statement).rows) > 0
            except (DataError, UnsafeSql) as refusal:
                if any(words in str(refusal) for words in ("limit seconds", "was not opened", "cannot be opened")):
                    break  # its other statements would end alike, and as late
            except Exception as error:
                raise AssertionError(f"{case}: {statement}") from error
        return answers

    def found(self) -> databases.Files:
        return databases.Files(
            **{name: self.path.with_name(self.path.name + ending).read_bytes() for name, ending in ENDINGS.items()}
        )


@pytest.fixture(scope="module")
def silo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Silo]:
    path = tmp_path_factory.mktemp("silo") / "db.sqlite"
    silo = Silo(path, Sandbox(SqliteTarget(path), LIMITS))
    silo.put(databases.Files(databases.whole(4096)))
    with silo.box:
        yield silo


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", databases.KINDS)
def test_an_answer_or_a_refusal_and_the_agent_lives(silo: Silo, kind: str) -> None:
    answers = 0
    # A log that never settles is waited for, each time.
    for number in range(FIRST, FIRST + (CASES // 5 if kind == "logged" else CASES)):
        files = databases.files(kind, number)
        silo.put(files)
        answers += silo.answers(f"{kind} {number}")
        assert silo.found() == files, f"{kind} {number}: a file was written to"
        assert {path.name for path in silo.path.parent.iterdir()} == {silo.path.name + it for it in ENDINGS.values()}
    assert answers, "not one file was read: they are too broken to find anything"
    silo.put(databases.Files(databases.whole(4096)))
    assert silo.box.run("SELECT count(*) FROM patient").rows == ((160,),)
