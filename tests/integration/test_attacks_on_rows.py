"""Who administers the database writes it at will, and has neither the coordinator's keys nor `attempt_keys`; an
operator types commands twice, and puts back what was copied at an unlucky instant.

Commands as an operator types them, on a real PostgreSQL.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.server.audited import AuditedStore
from lorica_coordinator.edges.upkeep.newest_in_log import newest_groups, newest_told
from lorica_coordinator.opened import Coordinator, leading
from lorica_coordinator.service.issued import Certificate
from lorica_security.audit.entry import Event
from lorica_security.audit.verification import Verification
from lorica_security.errors import IntegrityError
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.reading import entries_of, read_log
from lorica_security.privacy.ledger import Entry as Release
from lorica_security.privacy.ledger import next_entry, read_ledger
from silo_wire.canonical import digest_of
from tests.integration.test_postgresql_settled import PLAN, PRIVATE, Federation
from tests.support.coordinator import initialise
from tests.support.coordinator_edges import round_key
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.rounds import A, B, C
from tests.unit.test_rounds_store import enrolled_silo, invitation

((_, RELEASE),) = PRIVATE.releases_of_round(weighted=False)
BY_ITS_OWNER = "SET session_replication_role = replica; "


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


@pytest.fixture
def federation(server: PostgresqlServer, tmp_path: Path, request: pytest.FixtureRequest) -> Federation:
    found = Federation(server, initialise(tmp_path / "net"), f"a{abs(hash(request.node.name)) % 10**9}")
    found.enrol(A, B)
    found.release(1)
    return found


def written(federation: Federation, statement: str) -> None:
    federation.server.execute(BY_ITS_OWNER + statement, database=federation.name)


@pytest.mark.parametrize("how", ["deleted", "of another kind"])
def test_a_closing_that_is_taken_out_of_the_middle_of_the_log_opens_no_plan(federation: Federation, how: str) -> None:
    with leading(Coordinator.load(federation.folder)) as leader:
        leader.releases.close([PLAN])
    federation.enrol(C)  # which tells of it first, and adds to the log behind it
    told = f"line LIKE '%\"{Event.PLAN_CLOSED.value}\"%'"
    if how == "deleted":
        written(federation, f"DELETE FROM audit_log WHERE {told}")
    else:
        other = f"replace(line, '{Event.PLAN_CLOSED.value}', '{Event.PLAN_OFFERED.value}')"
        written(federation, f"UPDATE audit_log SET line = {other} WHERE {told}")
    written(federation, "DELETE FROM closed_plans")
    with pytest.raises(IntegrityError, match=r"entries were left out|it was edited"):
        federation.release(2)


def put_into_the_ledger(federation: Federation, leader: Coordinator) -> Release:
    """The second sum, by somebody who knows what it will be of."""
    forged = next_entry(
        leader.releases.kept.entries(), round_key(PLAN, 2), "delta", RELEASE, at=1, subject=digest_of(b"sum 2")
    )
    line = forged.line().decode().removesuffix("\n").replace("'", "''")
    written(federation, f"INSERT INTO release_ledger VALUES ({forged.sequence}, '{forged.previous}', '{line}')")
    return forged


def test_a_sum_that_was_put_into_the_ledger_before_it_was_made_is_not_made(federation: Federation) -> None:
    """It would be told of nowhere: once the row is taken out again, nobody knows that epsilon was spent."""
    with leading(Coordinator.load(federation.folder)) as leader:
        put_into_the_ledger(federation, leader)
    with pytest.raises(IntegrityError, match="has this sum as entry 2, and the audit log does not tell of it"):
        federation.release(2)
    written(federation, "DELETE FROM release_ledger WHERE sequence = 2")


def test_a_sum_that_another_entry_of_the_log_was_made_to_tell_of_is_not_made(federation: Federation) -> None:
    """For as long as it takes: both rows are what they were when the next coordinator looks."""
    with leading(Coordinator.load(federation.folder)) as leader:
        audit = leader.audit()
        releases = leader.releases_told(audit)
        releases.noise_key(b"")
        forged = put_into_the_ledger(federation, leader)
        first = next(entries_of(audit.place, Verification()))
        told = {"plan": PLAN, "ledger_entry": forged.sequence, "ledger_digest": forged.digest}
        line = replace(first, event=Event.SUM_RELEASED, details=told).line().decode().removesuffix("\n")
        written(federation, f"UPDATE audit_log SET line = '{line}' WHERE sequence = 1")
        with pytest.raises(IntegrityError, match="entry 1 was edited or replaced"):
            releases.enter(round_key(PLAN, 2), b"sum 2", PRIVATE)


@pytest.mark.parametrize("whole", [True, False])
def test_a_closing_that_is_hidden_from_whoever_looks_for_it_opens_no_plan(federation: Federation, whole: bool) -> None:
    """A table may be a view, which answers each question otherwise: not `whole`, the walk ends before the closing."""
    with leading(Coordinator.load(federation.folder)) as leader:
        leader.releases.close([PLAN])
    federation.enrol(C)
    (closing,) = (one.sequence for one in federation.reading().of(Event.PLAN_CLOSED))
    written(federation, "ALTER TABLE audit_log RENAME TO audit_log_behind")
    hidden = f"current_query() LIKE '%strpos%' AND line LIKE '%{Event.PLAN_CLOSED.value}%'"
    if not whole:
        oldest_first = "current_query() LIKE '%LIMIT%' AND current_query() NOT LIKE '%DESC%'"
        hidden += f" OR {oldest_first} AND sequence >= {closing}"
    written(federation, f"CREATE VIEW audit_log AS SELECT * FROM audit_log_behind WHERE NOT ({hidden})")
    written(federation, "DELETE FROM closed_plans")
    with pytest.raises(IntegrityError, match=r"is not closed any more|ends with entry .* its last seal knows"):
        federation.release(2)


@pytest.mark.parametrize("when", ["before the term", "after it"])
def test_a_closing_that_is_taken_out_once_the_coordinator_has_looked_opens_no_plan(
    federation: Federation, when: str
) -> None:
    """A trigger acts as the term begins: between the look at the whole log and whatever is done in the term."""
    with leading(Coordinator.load(federation.folder)) as leader:
        leader.releases.close([PLAN])
    federation.enrol(C)
    taken_out = f"DELETE FROM closed_plans; DELETE FROM audit_log WHERE line LIKE '%\"{Event.PLAN_CLOSED.value}\"%'"
    if when == "before the term":
        own = f"BEGIN {BY_ITS_OWNER} {taken_out}; SET session_replication_role = origin; RETURN NEW; END"
        written(federation, f"CREATE FUNCTION take_out() RETURNS trigger LANGUAGE plpgsql AS $$ {own} $$")
        written(federation, "CREATE TRIGGER t AFTER UPDATE ON leadership FOR EACH ROW EXECUTE FUNCTION take_out()")
        with pytest.raises(IntegrityError, match="was closed: rows were deleted"):
            federation.release(2)
        return
    with leading(Coordinator.load(federation.folder)) as leader:
        written(federation, taken_out)
        releases = leader.releases_told(leader.audit())
        with pytest.raises(IntegrityError, match="was closed: rows were deleted"):
            releases.enter(round_key(PLAN, 2), b"sum 2", PRIVATE)


SWALLOWED = {
    "before it is put in": "TRIGGER s BEFORE INSERT ON release_ledger FOR EACH ROW",
    "as it is committed": "CONSTRAINT TRIGGER s AFTER INSERT ON release_ledger DEFERRABLE INITIALLY DEFERRED FOR EACH ROW",
}


@pytest.mark.parametrize("when", SWALLOWED)
def test_a_sum_whose_entry_the_database_swallows_is_not_made(federation: Federation, when: str) -> None:
    """Nobody would count its epsilon."""
    own = f"BEGIN {BY_ITS_OWNER} DELETE FROM release_ledger WHERE sequence = NEW.sequence; RETURN NULL; END"
    with leading(Coordinator.load(federation.folder)) as leader:
        releases = leader.releases_told(leader.audit())
        releases.noise_key(b"")
        written(federation, f"CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ {own} $$")
        written(federation, f"CREATE {SWALLOWED[when]} EXECUTE FUNCTION swallow()")
        with pytest.raises(IntegrityError, match="has no entry 2, which this process has"):
            releases.enter(round_key(PLAN, 2), b"sum 2", PRIVATE)


def test_a_closing_that_the_database_swallows_is_no_settling(federation: Federation) -> None:
    """Nothing would be told: neither to the log, nor to who types the command."""
    written(federation, "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
    written(federation, "CREATE TRIGGER s BEFORE INSERT ON closed_plans FOR EACH ROW EXECUTE FUNCTION swallow()")
    refused = federation.command("settle", "--without-log")
    refused.is_refusal(IntegrityError, f"has not the plan {PLAN[:16]} any more, which was closed")
    written(federation, "DROP TRIGGER s ON closed_plans")
    done = federation.command("settle", "--without-log")
    assert done.code == 0, done.err
    assert f"closed: plan {PLAN[:16]}" in done.out


def test_a_root_that_is_taken_out_with_the_ledger_for_an_instant_is_not_made_anew(federation: Federation) -> None:
    """A sum that is made again would have two noises, and together they hide less."""
    rows = federation.server.rows("SELECT * FROM release_ledger", database=federation.name)
    with leading(Coordinator.load(federation.folder)) as leader:
        releases = leader.releases_told(leader.audit())
        written(federation, "DELETE FROM release_root; DELETE FROM release_ledger")
        with pytest.raises(IntegrityError, match=r"rows were deleted|is missing beside a ledger"):
            releases.noise_key(b"")
    assert rows
    assert not federation.server.rows("SELECT * FROM release_root", database=federation.name)


def test_a_sum_that_is_made_again_is_one_that_the_log_tells_of(federation: Federation) -> None:
    federation.release(1, 1)
    with leading(Coordinator.load(federation.folder)) as leader:
        assert len(leader.releases.kept.entries()) == 1


def test_silos_that_a_cut_off_settling_had_let_in_are_in_when_it_is_typed_again(
    federation: Federation, tmp_path: Path
) -> None:
    """A wrong --ledger is refused when the records have what the log says."""
    dump = federation.dump(tmp_path / "old.dump")
    federation.enrol(C)
    federation.release(2)
    copy = tmp_path / "copy"
    assert federation.command("audit", "export", copy).code == 0
    federation.put_back(dump)
    wrong = federation.command("settle", "--log", copy, "--ledger", tmp_path / "missing")
    assert "is missing" in wrong.err
    done = federation.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    good = "SELECT uri FROM certificates WHERE revoked_at IS NULL AND uri LIKE '%/silo/%' ORDER BY uri"
    names = [str(uri).rpartition("/")[2] for (uri,) in federation.server.rows(good, database=federation.name)]
    assert names == [A, B, C], "who is registered is let in"


@pytest.mark.parametrize("back", [False, True])
def test_who_was_revoked_while_the_dump_was_made_stays_out(federation: Federation, tmp_path: Path, back: bool) -> None:
    """The log hears of it first. Who was let in again stays in."""
    with leading(Coordinator.load(federation.folder)) as leader:
        store, audit = leader.open_store(), leader.audit()
        audit.append(Event.OPERATOR_COMMAND, command="Revoke", asked_role="silo", asked_name=A)
        if back:
            offered = invitation(A, b"again")
            store.invite(offered)
            AuditedStore(store, audit).enrol(enrolled_silo(A, 9.0), secret_digest=offered.secret_digest)
        dump = federation.dump(tmp_path / "right then.dump")
        if not back:
            store.revoke(Identity(leader.federation, Role.SILO, A), 1.0)
        store.close()
    federation.release(2)
    copy = tmp_path / "copy"
    assert federation.command("audit", "export", copy).code == 0
    federation.put_back(dump)
    done = federation.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    assert federation.silos() == {A: back, B: True}


@pytest.mark.parametrize("told", ["before the dump", "since"])
def test_who_was_revoked_while_it_renewed_its_access_stays_out(
    federation: Federation, tmp_path: Path, told: str
) -> None:
    """The log hears of a revocation before it is made, and of a renewal after: what was renewed in between was revoked,
    and is told of last. Who is granted access by somebody else is in."""
    coordinator = Coordinator.load(federation.folder)
    anna, bob = (Identity(coordinator.federation, Role.OPERATOR, name) for name in ("anna", "bob"))

    def certificate(identity: Identity, serial: str) -> Certificate:
        return Certificate(serial=serial, digest="", identity=identity, issued_unix_s=1.0, expires_unix_s=4e9)

    def tell(audit: AuditLog) -> None:
        for one in (anna, bob):
            audit.append(Event.OPERATOR_COMMAND, command="Revoke", asked_role="operator", asked_name=one.name)
        new = {"certificate_digest": "cd" * 32, "expires": 4 * 10**9}
        audit.append(Event.ACCESS_GRANTED, who=anna.uri, to=anna.uri, certificate="a2", **new)
        audit.append(Event.ACCESS_GRANTED, to=bob.uri, certificate="b2", **new)

    with leading(coordinator) as leader:
        store, audit = leader.open_store(), leader.audit()
        for one, serial in ((anna, "a1"), (bob, "b1")):
            store.register(certificate(one, serial))
        if told == "before the dump":
            store.register(certificate(anna, "a2"))
            store.register(certificate(bob, "b2"))
            tell(audit)
        dump = federation.dump(tmp_path / "right then.dump")
        if told == "since":
            tell(audit)
        store.close()
    federation.release(2)
    copy = tmp_path / "copy"
    assert federation.command("audit", "export", copy).code == 0
    federation.put_back(dump)
    done = federation.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    good = "SELECT serial FROM certificates WHERE revoked_at IS NULL AND serial IN ('a1', 'a2', 'b2')"
    assert federation.server.rows(good, database=federation.name) == [("b2",)]


def test_release_groups_that_somebody_put_into_the_copy_are_not_waited_for(
    federation: Federation, tmp_path: Path
) -> None:
    """No silo has them, and with so high a number nothing can be proposed in their place."""
    dump = federation.dump(tmp_path / "old.dump")
    with leading(Coordinator.load(federation.folder)) as leader:
        leader.audit().append(Event.GROUPS_STAND, number=1, digest="b" * 64, groups=f"{A}, {B}")
    copy = tmp_path / "copy"
    assert federation.command("audit", "export", copy).code == 0
    forging = AuditLog(copy, writer=read_log(copy).writer, key=new_identity_key(), clock=lambda: 4e9)
    forging.append(Event.GROUPS_STAND, number=999, digest="c" * 64, groups="clinic-z")
    federation.put_back(dump)
    done = federation.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    stood = newest_groups(newest_told(Coordinator.load(federation.folder).audit().place))
    assert stood is not None
    assert stood.number == 1


def test_a_settling_that_somebody_put_into_the_copy_leaves_signed_what_was_signed(
    federation: Federation, tmp_path: Path
) -> None:
    """It says that nobody signed what is before it: then a ledger of theirs, in which sums cost nothing, is as good as
    the log's own word."""
    dump = federation.dump(tmp_path / "old.dump")
    federation.enrol(C)
    federation.release(2, 3)
    copy = tmp_path / "copy"
    assert federation.command("audit", "export", copy).code == 0
    entries, _ = read_ledger((copy / "ledger").read_bytes(), "copy")
    cheap = replace(entries[1], release=replace(entries[1].release, noise_multiplier=1e9))
    forged = [entries[0], cheap, replace(entries[2], previous=cheap.digest)]
    other = tmp_path / "forged"
    other.write_bytes(b"".join(entry.line() for entry in forged))
    other.chmod(0o600)
    true = shutil.copytree(copy, tmp_path / "true")
    forging = AuditLog(copy, writer=read_log(copy).writer, key=new_identity_key(), clock=lambda: 4e9)
    said = {"newer_log": "yes", "newer_ledger": "yes", "unsigned_from": "1", "unsigned_to": "999"}
    forging.append(Event.OPERATOR_COMMAND, command="settle", **said)
    told = {"ledger_entry": 3, "ledger_digest": forged[2].digest, "ledger_subject": forged[2].subject}
    forging.append(Event.IDENTITY_SUCCEEDED, silo=A, predecessor="no digits", identity_key="no digits")
    forging.append(Event.SUM_RELEASED, plan=PLAN, round=3, attempt=1, **told)
    federation.put_back(dump)
    refused = federation.command("settle", "--log", copy, "--ledger", other)
    refused.is_refusal(IntegrityError, "has another entry 2 than the audit log tells of")
    federation.put_back(dump)
    done = federation.command("settle", "--log", copy, "--ledger", true / "ledger")
    assert done.code == 0, done.err
    assert federation.silos() == {A: True, B: True, C: True}, "who was let in by what was signed is in"
    assert Coordinator.load(federation.folder).releases.kept.entries() == entries


def test_another_folder_that_knew_what_is_lost_leads_once_it_is_told(federation: Federation, tmp_path: Path) -> None:
    """It was led from before; the database is settled where the other one is."""
    dump = federation.dump(tmp_path / "old.dump")
    federation.release(2)
    other = CoordinatorFolder(Path(shutil.copytree(federation.folder.root, tmp_path / "other")))
    federation.put_back(dump)
    assert federation.command("settle", "--without-log").code == 0
    with pytest.raises(IntegrityError, match="has another entry"), leading(Coordinator.load(other)):
        pass
    for newest in (other.audit / "newest", other.root / "state" / "privacy" / "newest"):
        newest.unlink()
    with leading(Coordinator.load(other)) as leader:
        assert PLAN in leader.releases.closed()
