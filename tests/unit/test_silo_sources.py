"""A database that comes compressed: unpacked within bounds, once, and nothing half of it is left."""

import gzip
import os
from pathlib import Path

import pytest

from lorica_security.errors import DataError, StorageError
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.settings import Settings
from silo_agent.sql_sandbox import SqliteTarget
from tests.support.tiny_t5 import SCHEMA

LINE = b'{"id": "1", "question": "how many ?", "query": "SELECT 1", "db_id": "places"}\n'
DATABASE = b"x" * 100_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        (folder / name).write_bytes(LINE.replace(b'"1"', f'"{name}"'.encode()))
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    (folder / "db.sqlite.gz").write_bytes(gzip.compress(DATABASE))
    return folder


def sources(data: Path, most: int = 1 << 20) -> SiloSources:
    settings = Settings.model_validate({"data": {"folder": str(data)}, "database": {"max_unpacked_bytes": most}})
    return SiloSources(settings, scratch=data.parent / "scratch")


def left_behind(data: Path) -> list[Path]:
    return list((data.parent / "scratch").iterdir())


def test_a_packed_database_is_unpacked_once(data: Path) -> None:
    target = sources(data, len(DATABASE)).database()
    assert isinstance(target, SqliteTarget)
    assert target.path.read_bytes() == DATABASE
    made = target.path.stat().st_ino
    assert sources(data).database() == target
    assert target.path.stat().st_ino == made
    assert left_behind(data) == [target.path]


def test_attack_a_packed_database_without_end_is_stopped_and_removed(data: Path) -> None:
    with pytest.raises(DataError, match=r"holds more than 99999 bytes: .* raise \[database\] max_unpacked_bytes"):
        sources(data, len(DATABASE) - 1).database()
    assert left_behind(data) == []


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(DATABASE)[:-9]], ids=["no gzip", "cut off"])
def test_half_a_database_is_removed(data: Path, content: bytes) -> None:
    (data / "db.sqlite.gz").write_bytes(content)
    with pytest.raises(DataError, match="is not a whole gzip file"):
        sources(data).database()
    assert left_behind(data) == []


def test_what_a_full_disk_took_is_removed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"cannot be unpacked to .*No space left on device"):
        sources(data).database()
    assert left_behind(data) == []


def test_a_pipe_in_place_of_a_database_is_refused(data: Path) -> None:
    found = sources(data)
    found.data()
    (data / "db.sqlite.gz").unlink()
    os.mkfifo(data / "db.sqlite.gz")
    with pytest.raises(DataError, match=r"db\.sqlite\.gz is no ordinary file"):
        found.database()
