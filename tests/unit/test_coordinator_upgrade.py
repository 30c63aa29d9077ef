"""Databases of other releases: brought to this one's tables and back without loss, or refused with the remedy.

tests/vectors/state/version-4.sql is what a release without revisions left of a whole round, with rows in each of its
tables.
"""

import json
import shutil
import sqlite3
import stat
from base64 import b64encode
from contextlib import closing
from datetime import UTC, datetime
from importlib.resources import files as resources
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

import lorica_coordinator.edges.upkeep.upgrade as upgrading
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import FIRST_REVISION, TABLES_REVISION, metadata
from lorica_coordinator.edges.database.state_json import STATE_VERSION, journal_of
from lorica_coordinator.edges.upkeep.upgrade import upgrade
from lorica_coordinator.rounds.states import Finished, State, with_deadline
from lorica_security.audit.chain import Head
from lorica_security.errors import ConfigurationError, StorageError
from tests.support.masked_rounds import MaskedRounds
from tests.support.rounds import COLLECTING, EVALUATING, FEDERATION, GATHERING, MASKING, PLAN, T0, A, B, C

OLD = Path(__file__).resolve().parents[1] / "vectors" / "state" / "version-4.sql"
NOW = datetime(2026, 11, 22, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "state.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(OLD.read_text())
    return path


def rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """All that the tables of the old release hold, its version apart."""
    with closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: sorted(database.execute(f"SELECT * FROM {name}").fetchall())
            for name in sorted(tables)
            if name not in ("alembic_version", "schema")
        }


def one(path: Path, query: str) -> object:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchone()[0]


LATER = {"release_groups", "masked_events", "leadership", "audit_log", "release_ledger", "closed_plans", "release_root"}


def test_the_old_database_has_rows_in_every_table(old: Path) -> None:
    found = rows(old)
    assert set(found) == set(metadata.tables) - {"alembic_version", "schema"} - LATER
    assert all(found.values())


def test_an_old_database_is_refused_until_it_is_upgraded_and_nothing_of_it_is_lost(old: Path) -> None:
    before = rows(old)
    with pytest.raises(StorageError, match=r"has tables of revision 0004.*run `coordinator upgrade`"):
        SqlRoundStore(old, FEDERATION)
    assert rows(old) == before, "a refusal changes nothing"

    done = upgrade(old, now=NOW)

    assert (done.before, done.after) == (FIRST_REVISION, TABLES_REVISION)
    assert done.copy == old.with_name("state.sqlite.0004-20261122T030405Z")
    assert rows(done.copy) == before
    assert stat.S_IMODE(done.copy.stat().st_mode) == 0o600
    after = rows(old)
    assert after.pop("silos") == [(*row, "", "", None) for row in before["silos"]]
    assert [after.pop(name) for name in sorted(LATER)] == [[]] * len(LATER)
    assert after.pop("plans") == [(*row, 0) for row in before.pop("plans")]
    assert after.pop("rounds") == [(*row, len(before["evaluations"])) for row in before.pop("rounds")]
    assert after.pop("machine") == [(1, STATE_VERSION, *row[2:], 0, *[None] * 4) for row in before.pop("machine")]
    assert after == {name: content for name, content in before.items() if name != "silos"}
    with closing(SqlRoundStore(old, FEDERATION)) as store:
        assert isinstance(store.load(), Finished)
        assert [silo.silo for silo in store.silos()] == [A, B, C]
        assert [row.outcome for row in store.rounds(PLAN, 0)] == ["applied"]
        assert len(store.successions(A)) == 1
    assert upgrade(old, now=NOW).copy is None, "there is nothing more to do"


def test_an_old_database_that_lacks_a_table_gets_it(old: Path) -> None:
    """Releases of version 4 made tables as they first opened the database."""
    with closing(sqlite3.connect(old)) as database:
        database.execute("DROP TABLE ledger_heads")
    upgrade(old, now=NOW)
    with closing(SqlRoundStore(old, FEDERATION)) as store:
        assert store.countersign_ledger(A, Head(1, "0a" * 32), after=Head(), at=1.0) == Head(1, "0a" * 32)


def test_up_and_down_and_up_again(old: Path) -> None:
    before = rows(old)
    upgrade(old, now=NOW)
    with closing(sqlite3.connect(old)) as database:
        database.execute("UPDATE silos SET agent_version = '0.2.0', agent_wire = '1.2'")
        database.commit()

    down = upgrade(old, now=NOW.replace(hour=4), to="0004")

    assert down.copy is not None
    assert one(down.copy, "SELECT agent_version FROM silos") == "0.2.0", "what the way down forgets is in the copy"
    assert rows(old) == before
    assert one(old, "SELECT version FROM schema") == 4, "the release without revisions works with it again"
    upgrade(old, now=NOW.replace(hour=5))
    SqlRoundStore(old, FEDERATION).close()


@pytest.mark.parametrize("state", [GATHERING, COLLECTING, MASKING, EVALUATING], ids=lambda state: state.phase)
def test_a_phase_under_way_has_its_whole_deadline_after_the_upgrade(tmp_path: Path, state: State) -> None:
    """As the release before gave it when it started, which stored the date when a deadline ends."""
    path = tmp_path / "state.sqlite"
    with closing(SqlRoundStore(path, FEDERATION)) as store:
        store.transition(state, [], at=T0, now=0.0)  # so that the instant itself is what is stored
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE machine SET version = 3")
        database.commit()
    upgrade(path, now=NOW, to="0007")

    upgrade(path, now=NOW.replace(hour=4))

    whole = {"gathering": 60.0, "collecting": 600.0, "masking": 30.0, "evaluating": 120.0}[state.phase]
    with closing(SqlRoundStore(path, FEDERATION)) as store:
        assert store.load(1000.0) == with_deadline(state, 1000.0 + whole)


@pytest.mark.parametrize("ended", [False, True], ids=["while it masks", "unmasked"])
def test_a_masked_attempt_under_way_goes_on_after_the_upgrade_and_on_the_way_back(tmp_path: Path, ended: bool) -> None:
    """Its events were base64 in the text of the state, which had them all at every message."""
    rounds = MaskedRounds()
    rounds.train()
    rounds.open()
    rounds.run() if ended else rounds.until("unmasking")
    path, journal = tmp_path / "state.sqlite", journal_of(rounds.state)
    with closing(SqlRoundStore(path, FEDERATION)) as store:
        store.transition(rounds.state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:  # as the release before wrote it
        text = json.loads(one(path, "SELECT state FROM machine"))  # type: ignore[arg-type]
        (text["masked"]["attempt"] if ended else text["secure"])["journal"] = [b64encode(it).decode() for it in journal]
        database.execute("UPDATE machine SET version = 4, state = ?", (json.dumps(text),))
        for column in ("events", "sealed", "asked", "saved_as", "sealed_under"):
            database.execute(f"ALTER TABLE machine DROP COLUMN {column}")
        for table in LATER - {"release_groups"}:
            database.execute(f"DROP TABLE {table}")
        database.execute("ALTER TABLE rounds DROP COLUMN scored")
        database.execute("ALTER TABLE plans DROP COLUMN deletions")
        database.execute("UPDATE alembic_version SET version_num = '0008'")
        database.execute("UPDATE schema SET version = 8")
        database.commit()
    before = rows(path)

    upgrade(path, now=NOW)

    with closing(SqlRoundStore(path, FEDERATION)) as store:
        assert store.load(T0) == rounds.state
        assert journal_of(store.load(T0)) == journal
    assert not any(b64encode(event) in path.read_bytes() for event in journal), "what was replaced is overwritten"
    damaged = tmp_path / "damaged" / "state.sqlite"
    damaged.parent.mkdir()
    shutil.copy(path, damaged)
    with closing(sqlite3.connect(damaged)) as database:
        database.execute("DELETE FROM masked_events WHERE position = (SELECT max(position) FROM masked_events)")
        database.commit()
    with pytest.raises(StorageError, match=rf"has {len(journal) - 1} events .* not {len(journal)}: restore"):
        upgrade(damaged, now=NOW.replace(hour=4), to="0008")
    upgrade(path, now=NOW.replace(hour=4), to="0008")
    assert rows(path) == before
    assert not any(event in path.read_bytes() for event in journal)
    upgrade(path, now=NOW.replace(hour=5))
    with closing(SqlRoundStore(path, FEDERATION)) as store:
        assert store.load(T0) == rounds.state


def test_revisions_lead_to_the_tables_that_a_new_database_has(old: Path, tmp_path: Path) -> None:
    upgrade(old, now=NOW)
    for path in (old, tmp_path / "new.sqlite"):
        SqlRoundStore(path, FEDERATION).close()
        engine = create_engine(f"sqlite:///{path}")
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            differences = [
                found for found in compare_metadata(context, metadata) if "alembic_version" not in str(found)
            ]
        engine.dispose()
        assert differences == []


def test_from_nothing_up_and_down_through_every_revision(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(resources("lorica_coordinator.edges.database.migrations")))
    config.set_main_option("path_separator", "os")
    steps = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][::-1]
    assert (steps[0], steps[-1]) == (FIRST_REVISION, TABLES_REVISION)
    assert steps == sorted(steps)
    path = tmp_path / "state.sqlite"
    for step in (*steps, *steps[-2::-1], *steps):
        with upgrading.in_transaction(path) as connection:
            upgrading.migrate(connection, step)
        assert one(path, "SELECT version_num FROM alembic_version") == step
        assert one(path, "SELECT version FROM schema") == int(step)


def test_an_upgrade_that_fails_leaves_the_tables_as_they_were(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(old)) as database:  # a row that refers to a round that is not there
        database.execute("UPDATE updates SET round = 77 WHERE silo = ?", (A,))
        database.commit()
    before = rows(old)
    with pytest.raises(StorageError, match="rows that refer to nothing"):
        upgrade(old, now=NOW)
    assert rows(old) == before
    assert one(old, "SELECT version FROM schema") == 4


@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("0099", "install the release that wrote it"),
        ("a1b2", "no release that can be upgraded"),
        ("0001", "no release"),
    ],
)
def test_tables_that_nobody_knows_are_refused(old: Path, revision: str, words: str) -> None:
    upgrade(old, now=NOW)
    with closing(sqlite3.connect(old)) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        database.commit()
    for attempt in (lambda: SqlRoundStore(old, FEDERATION), lambda: upgrade(old, now=NOW.replace(hour=9))):
        with pytest.raises(StorageError, match=words):
            attempt()


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE customers (name TEXT)")
    with pytest.raises(StorageError, match="tables of revision none"):
        SqlRoundStore(path, FEDERATION)
    assert one(path, "SELECT count(*) FROM sqlite_master") == 1


@pytest.mark.parametrize("to", ["0003", "0999", "5", "head", "", "+1"])
def test_a_revision_that_is_none_is_refused(old: Path, to: str) -> None:
    with pytest.raises(ConfigurationError, match="is no revision from 0004 to"):
        upgrade(old, now=NOW, to=to)
