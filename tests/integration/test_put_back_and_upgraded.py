"""A database that was put back from a dump of an older release: it is upgraded before it is settled, since it is
settled in the tables of the release that settles it, and an upgrade of it writes nothing to a log that is not whole.

Commands as an operator types them, on a real PostgreSQL; the next release has one revision more.
"""

import shutil
from collections.abc import Iterator
from importlib.resources import files as resources
from pathlib import Path

import pytest

from lorica_coordinator.edges.database import tables_revision
from lorica_coordinator.edges.database.round_tables import TABLES_REVISION
from lorica_coordinator.edges.upkeep import upgrade
from lorica_security.audit.entry import Event
from lorica_security.errors import IntegrityError, StorageError
from tests.integration.test_postgresql_settled import Federation
from tests.support.coordinator import initialise
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.rounds import A, B, C

NEXT = f"{int(TABLES_REVISION) + 1:04}"
REVISION = f'''
import sqlalchemy as sa
from alembic import op

revision = "{NEXT}"
down_revision = "{TABLES_REVISION}"


def upgrade() -> None:
    op.add_column("silos", sa.Column("more", sa.Integer))
    op.execute("UPDATE schema SET version = {int(NEXT)}")


def downgrade() -> None:
    op.drop_column("silos", "more")
    op.execute("UPDATE schema SET version = {int(TABLES_REVISION)}")
'''


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


@pytest.fixture
def federation(
    server: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Federation:
    """Of the next release, with two silos; `older.dump` beside its folder is of the tables of this one."""
    scripts = tmp_path / "migrations"
    shutil.copytree(str(resources("lorica_coordinator.edges.database.migrations")), scripts)
    (scripts / "versions" / f"revision_{NEXT}.py").write_text(REVISION)
    found = Federation(server, initialise(tmp_path / "net"), f"u{abs(hash(request.node.name)) % 10**9}")
    found.enrol(A, B)
    found.release(1)
    monkeypatch.setattr(upgrade, "resources", lambda package: scripts)
    for module in (tables_revision, upgrade):
        monkeypatch.setattr(module, "TABLES_REVISION", NEXT)
    assert found.command("upgrade", "--to", NEXT).code == 0
    assert found.command("upgrade", "--to", TABLES_REVISION).code == 0
    found.dump(tmp_path / "older.dump")
    assert found.command("upgrade", "--to", NEXT).code == 0
    return found


def terms(federation: Federation) -> list[tuple[object, ...]]:
    return federation.server.rows("SELECT term, token FROM leadership WHERE id = 1", database=federation.name)


def entries(federation: Federation) -> list[tuple[object, ...]]:
    return federation.server.rows("SELECT line FROM audit_log ORDER BY sequence", database=federation.name)


def test_an_older_dump_of_an_older_release_is_upgraded_and_then_settled(federation: Federation, tmp_path: Path) -> None:
    assert federation.command("revoke", A).code == 0
    federation.enrol(C)
    federation.release(2)
    copy = tmp_path / "copy"
    assert federation.command("audit", "export", copy).code == 0
    federation.put_back(tmp_path / "older.dump")
    words = ("settle", "--log", copy, "--ledger", copy / "ledger")
    federation.command(*words).is_refusal(StorageError, "run `coordinator upgrade`")
    ((term, token),), before = terms(federation), entries(federation)
    for had in (f"it had {TABLES_REVISION}", "nothing was to be done"):
        done = federation.command("upgrade", "--to", NEXT)
        assert done.code == 0, done.err
        assert had in done.out
        assert "type coordinator settle now" in done.out
    assert entries(federation) == before, "a log that lacks entries is not gone on from"
    ((after, other),) = terms(federation)
    assert after == term, "the bucket's files are compared with it"
    assert other != token, "whoever led as the dump was made, and hangs, leads no more"
    federation.command("invite", B).is_refusal(IntegrityError, "`coordinator settle`")
    done = federation.command(*words)
    assert done.code == 0, done.err
    assert federation.silos() == {A: False, B: True, C: True}
    federation.release(3)
    assert federation.command("invite", B).code == 0


def test_an_upgrade_of_a_database_that_is_whole_is_told_to_the_log(federation: Federation) -> None:
    told = [
        one.text("to") for one in federation.reading().of(Event.OPERATOR_COMMAND) if one.text("command") == "upgrade"
    ]
    assert told == [NEXT, TABLES_REVISION, NEXT]
    ((term, _),) = terms(federation)
    done = federation.command("upgrade", "--to", NEXT)
    assert done.code == 0, done.err
    assert "settle" not in done.out
    assert terms(federation)[0][0] == term + 1  # type: ignore[operator]
