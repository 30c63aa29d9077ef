"""The benchmark of an entry of the audit log: the same entries in files and in a real PostgreSQL, by turns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from lorica.bench.audit_log.run import Choice, run_bench_log
from lorica.bench.elsewhere.storage import Storage
from lorica.bench.figures import read_figures
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


def test_an_entry_is_timed_in_files_and_in_rows_beside_them(server: PostgresqlServer, tmp_path: Path) -> None:
    server.execute("CREATE DATABASE measured")
    url = server.url(user=SUPERUSER, database="measured").replace("postgresql://", "postgresql+psycopg://", 1)
    stored = Storage(database=url, attempt_keys=str(tmp_path / "keys"))
    choice = Choice(entries=3, storage=stored, work=tmp_path / "work", out=tmp_path / "log.json")
    in_files, in_rows = run_bench_log(choice, Console(quiet=True))
    assert [one["place"] for one in read_figures(tmp_path / "log.json")[1]] == ["files", "rows of PostgreSQL"]
    assert min(in_files.wall_ms, in_files.cpu_ms, in_rows.wall_ms, in_rows.cpu_ms) > 0.0
    entered = server.rows("SELECT count(*) FROM audit_log WHERE line LIKE '%update received%'", database="measured")
    assert entered == [(4,)]
    assert list((tmp_path / "work").iterdir()) == []
