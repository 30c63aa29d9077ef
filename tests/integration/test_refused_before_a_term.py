"""What can be refused is refused before a term begins: a coordinator with the wrong keys, settings or files that is
started again and again neither counts terms up nor ends the one that leads."""

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from lorica_coordinator.composition import require_servable
from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.keys.authorities import Authorities
from lorica_coordinator.edges.upkeep.authorities_in_log import in_entry
from lorica_coordinator.opened import Coordinator, leading
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_security.audit.entry import Event
from lorica_security.daemon.listen_address import address
from lorica_security.errors import ConfigurationError, IntegrityError, LoricaError, StateError, StorageError
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle, PlanOfAnotherRelease
from tests.integration.test_postgresql_check import begun
from tests.integration.test_postgresql_settled import Federation
from tests.support.coordinator import initialise
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.rounds import STOPPED, T0
from tests.unit.test_kept_files import MemoryBucket


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


@pytest.fixture
def federation(server: PostgresqlServer, tmp_path: Path, request: pytest.FixtureRequest) -> Federation:
    """That was led once, in term 1."""
    found = Federation(server, initialise(tmp_path / "net"), f"d{abs(hash(request.node.name)) % 10**9}")
    found.enrol()
    return found


def terms(federation: Federation) -> list[tuple[object, ...]]:
    return list(federation.server.rows("SELECT term, token FROM leadership WHERE id = 1", database=federation.name))


def write(federation: Federation, before: str, after: str) -> None:
    file = federation.folder.settings
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))


def older_authorities(federation: Federation) -> None:
    """Another coordinator of this database has made one."""
    with leading(Coordinator.load(federation.folder)) as leader:
        elsewhere = Path(shutil.copytree(federation.folder.keys, federation.folder.root.parent / "elsewhere"))
        for day in (1, 2):
            authorities = Authorities.load(elsewhere)
            authorities.rotate(datetime.now(UTC) + timedelta(days=day)) if day == 1 else authorities.activate()
        audit = leader.audit()
        audit.append(Event.AUTHORITY_CHANGED, **in_entry(Authorities.load(elsewhere).standings()))
        audit.seal()


def older_log(federation: Federation) -> None:
    """The database is of before what the folder knows."""
    dump = federation.dump(federation.folder.root.parent / "old.dump")
    federation.enrol("clinic-a")
    federation.put_back(dump)


def no_bundle(federation: Federation) -> None:
    """The plan under way has no copy in the folder."""
    with leading(Coordinator.load(federation.folder)) as leader:
        store = leader.open_store()
        store.transition(STOPPED, [], at=T0, now=T0)
        store.close()


def damaged_bundle(federation: Federation) -> None:
    """Of the plan under way."""
    bundle = federation.folder.root / f"state/bundles/{begun(federation).plan.digest}.bundle"
    content = bytearray(bundle.read_bytes())
    content[len(content) // 2] ^= 1
    bundle.write_bytes(content)


def older_ledger(federation: Federation) -> None:
    federation.release(1)
    federation.server.execute(
        "ALTER TABLE release_ledger DISABLE TRIGGER ALL", "DELETE FROM release_ledger", database=federation.name
    )


AT_A_START: dict[str, tuple[Callable[[Federation], None], type[LoricaError], str]] = {
    "authorities": (older_authorities, ConfigurationError, "has other authorities than entry"),
    "log": (older_log, IntegrityError, "has no entry .* put back to an earlier instant"),
    "ledger": (older_ledger, IntegrityError, "release_ledger has no entry 1"),
    "bundle": (no_bundle, StateError, "is not in state/bundles of this folder"),
    "whole bundle": (damaged_bundle, IntegrityError, r"\.bundle was damaged .*restore it from a backup"),
}


@pytest.mark.parametrize("what", AT_A_START)
def test_what_the_folder_lacks_is_refused_before_a_term_begins(federation: Federation, what: str) -> None:
    prepare, kind, said = AT_A_START[what]
    prepare(federation)
    before = terms(federation)
    for _ in range(2):
        with pytest.raises(kind, match=said), leading(Coordinator.load(federation.folder)):
            pass
    assert terms(federation) == before


def test_a_bucket_that_takes_nothing_is_refused_before_a_term_begins(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = MemoryBucket("s3://lorica/north/", "north/", MemoryStore())
    monkeypatch.setattr(Bucket, "at", lambda place: bucket)
    write(federation, 'blobs = ""', 'blobs = "s3://lorica/north?region=eu-central-1"')

    def refuse(name: str, content: bytes | memoryview) -> None:
        raise StorageError("the bucket takes nothing")

    before = terms(federation)
    bucket.put = refuse  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="takes nothing"), leading(Coordinator.load(federation.folder)):
        pass
    assert terms(federation) == before


def test_a_plan_that_the_bucket_has_is_no_reason_to_refuse(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = begun(federation).plan.digest
    bucket = MemoryBucket("s3://lorica/north/", "north/", MemoryStore())
    monkeypatch.setattr(Bucket, "at", lambda place: bucket)
    write(federation, 'blobs = ""', 'blobs = "s3://lorica/north?region=eu-central-1"')
    bundle = federation.folder.root / f"state/bundles/{digest}.bundle"
    content = bundle.read_bytes()
    with leading(Coordinator.load(federation.folder)):
        pass
    for lose in (bundle.unlink, lambda: bundle.write_bytes(content[:-1])):
        lose()
        with leading(Coordinator.load(federation.folder)):
            assert bundle.read_bytes() == content


def test_a_plan_of_another_release_is_refused_before_a_term_begins_unless_it_is_over(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next plan is started beside one that is over."""
    digest = begun(federation).plan.digest
    before = terms(federation)

    def of_another(shelf: PlanShelf, plan: Digest) -> PlanBundle:
        raise PlanOfAnotherRelease(f"plan {plan} was made by another release")

    with monkeypatch.context() as older:
        older.setattr(PlanShelf, "bundle", of_another)
        with (
            pytest.raises(PlanOfAnotherRelease, match=f"plan {digest} was made"),
            leading(Coordinator.load(federation.folder)),
        ):
            pass
    assert terms(federation) == before
    no_bundle(federation)
    monkeypatch.setattr(PlanShelf, "bundle", of_another)
    with leading(Coordinator.load(federation.folder)):
        pass


def test_an_address_that_is_taken_is_refused_before_a_term_begins(federation: Federation) -> None:
    at = address(Coordinator.load(federation.folder).settings.listen.silos)
    before = terms(federation)
    with socket.socket() as other:
        other.bind(at)
        other.listen()
        with (
            pytest.raises(ConfigurationError, match=rf"cannot listen on {at} .*change \[listen\] silos"),
            leading(Coordinator.load(federation.folder), require_able=require_servable),
        ):
            pass
    assert terms(federation) == before


def other_name(folder: Path) -> None:
    file = folder / "federation.toml"
    file.write_text(file.read_text().replace('federation = "', 'federation = "other-'))


def no_key(folder: Path) -> None:
    next((folder / "keys").glob("*identity*")).unlink()


@pytest.mark.parametrize("meanwhile", [other_name, no_key])
def test_what_became_of_a_folder_that_stood_by_is_refused_before_a_term_begins(
    federation: Federation, meanwhile: Callable[[Path], None]
) -> None:
    second = type(federation.folder)(shutil.copytree(federation.folder.root, federation.folder.root.parent / "second"))
    with ExitStack() as first:
        first.enter_context(leading(Coordinator.load(federation.folder)))
        before = terms(federation)

        def waiting() -> None:
            meanwhile(second.root)
            first.close()

        with pytest.raises(ConfigurationError), leading(Coordinator.load(second), waiting=waiting):
            pass
    assert terms(federation) == before
    federation.enrol()
    assert terms(federation)[0][0] == 3
