"""Both audit logs of a federation that ran, with real certificates and signatures, in the hands of people who would
rather have others.

Whoever has a log's key can write it anew so that it verifies by itself; what the other side holds is what the attacks
run into.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.server.audited import RefusalLog
from lorica_coordinator.edges.server.gate import Refusal
from lorica_coordinator.opened import Coordinator
from lorica_security.audit.chain import Head
from lorica_security.audit.entry import Entry, Event
from lorica_security.audit.repeats import Repeats
from lorica_security.audit.signed_head import SignedHead
from lorica_security.audit.verification import Position, seal_particulars
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StateError, StorageError
from lorica_security.host.files import write_private
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes
from lorica_security.identity.key_text import key_text
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.on_disk.log_file import AuditLog, segment
from lorica_security.on_disk.reading import read_log
from lorica_security.privacy.ledger import head_of
from silo_agent.cli import main as silo_main
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, store_credentials
from silo_agent.policy.rules import PolicyRules
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.messages import Train
from silo_wire.transport import error_of
from silo_wire.v1 import operator_pb2
from tests.integration.test_attacks_on_the_privacy_ledger import SmallSteps, played
from tests.support.command_line import Done, run_command
from tests.support.coordinator import BANK, FEDERATION, HOSPITAL, PLAN, FederationTemplate, running
from tests.support.coordinator import Silo as Caller
from tests.support.coordinator import federation_template as federation_template
from tests.support.federation_peer import FederationPeer
from tests.unit.test_agent_service import BUNDLE, DATA, NET, Silo, train_order

COORDINATOR = f"spiffe://{FEDERATION}/coordinator"
SILO = f"spiffe://{FEDERATION}/silo/{HOSPITAL}"
ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side's folder, and what its owner has."""

    root: Path
    writer: str
    key: Ed25519PrivateKey
    main: Callable[[], None]

    @property
    def log(self) -> Path:
        return self.root / "audit"

    def audit(self, *arguments: str | Path) -> Done:
        return run_command(self.main, "audit", arguments[0], "--dir", self.root, *arguments[1:])

    def entries(self) -> tuple[Entry, ...]:
        return read_log(self.log).entries

    def copied(self, to: Path) -> "Side":
        shutil.copytree(self.root, to)
        return replace(self, root=to)

    def write_anew(self, entries: Iterable[Entry], key: Ed25519PrivateKey | None = None) -> None:
        """As its owner can: every digest and every seal fits what now stands before it."""
        position, out = Position(), []
        for entry in entries:
            head = position.head
            details = dict(entry.details)
            if entry.event is Event.SEALED:
                details = seal_particulars(SignedHead.sign(key or self.key, writer=self.writer, head=head))
            again = replace(entry, sequence=head.sequence + 1, previous=head.digest, details=details)
            out.append(again.line())
            position = position.after(again)
        segment(self.log, 1).write_bytes(b"".join(out))

    def heads_of_the_other(self, to: Path) -> Path:
        done = self.audit("show", "--heads")
        assert done.code == 0, done.err
        to.write_text(done.out)
        return to


@dataclass(frozen=True, kw_only=True)
class Story:
    """What two rounds left on both sides; `silos_heads` is the operator's to give, `coordinators_heads` the silo's."""

    coordinator: Side
    silo: Side
    silos_heads: Path
    coordinators_heads: Path


@pytest.fixture(scope="module")
def story(federation_template: FederationTemplate, tmp_path_factory: pytest.TempPathFactory) -> Story:
    root = tmp_path_factory.mktemp("story")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
            patched.delenv(name, raising=False)
        credentials = asyncio.run(_run(federation_template, root))
    silo = SiloFolder(root / "silo")
    store_credentials(silo, credentials)
    folder = CoordinatorFolder(root / "coordinator")
    sides = {
        "coordinator": Side(
            root=folder.root, writer=COORDINATOR, key=Coordinator.load(folder).keys.identity, main=coordinator_main
        ),
        "silo": Side(root=silo.root, writer=SILO, key=credentials.identity_key, main=silo_main),
    }
    return Story(
        **sides,
        silos_heads=sides["coordinator"].heads_of_the_other(root / "silos.heads"),
        coordinators_heads=sides["silo"].heads_of_the_other(root / "coordinator.heads"),
    )


async def _run(template: FederationTemplate, root: Path) -> SiloCredentials:
    async with played(template, root / "coordinator") as play:
        play.silo.trainer = SmallSteps()
        await play.rounds_go_on(ROUNDS)
        async with play.at.operator() as operator:
            await operator.Invite(operator_pb2.InviteRequest(silo="clinic-c", valid_seconds=600))
            with pytest.raises(grpc.aio.AioRpcError):
                await operator.StartPlan(operator_pb2.StartPlanRequest(plan="nowhere"))
        play.silo.log.seal()
        return play.silo.credentials


@pytest.fixture(params=["coordinator", "silo"])
def side(request: pytest.FixtureRequest, story: Story, tmp_path: Path) -> Side:
    """A copy that a test may harm, of each side in turn."""
    chosen: Side = getattr(story, request.param)
    return chosen.copied(tmp_path / "side")


def known_of(side: Side, story: Story) -> Path:
    return story.coordinators_heads if side.writer == COORDINATOR else story.silos_heads


# --- an honest federation


def test_both_logs_are_whole_and_agree_with_what_the_other_side_holds(story: Story) -> None:
    for side in (story.coordinator, story.silo):
        done = side.audit("verify", "--receipts", known_of(side, story))
        assert (done.code, done.err) == (0, "")
        assert f"signed by {side.writer}" in done.out
        assert f"{ROUNDS} heads that the other side holds agree with the log" in done.out
        alone = json.loads(side.audit("verify", "--json").out)
        assert alone["whole"]
        assert alone["entries"] == len(side.entries())
        assert any(line.startswith("not checked") for line in alone["found"])


def test_what_left_the_silo_stands_in_both_logs(story: Story) -> None:
    left = [entry for entry in story.silo.entries() if entry.event is Event.UPDATE_LEAVES]
    came = [entry for entry in story.coordinator.entries() if entry.event is Event.UPDATE_RECEIVED]
    assert len(left) == len(came) == ROUNDS
    for sent, received in zip(left, came, strict=True):
        for name in ("plan", "round", "attempt", "update", "bytes"):
            assert sent.details[name] == received.details[name], name
        assert received.number("head_sequence") == sent.sequence  # the log that came with it says so already
    ledger = PrivacyLedgerFile(SiloFolder(story.silo.root).privacy_ledger).entries()
    assert [entry.number("ledger_entry") for entry in left] == [2, 4]
    assert left[-1].text("ledger_digest") == head_of(ledger[:4]).digest
    assert left[0].text("covered_by").startswith("in the clear, noised: epsilon 8 for a record at dp_delta 1e-05")
    (plan,) = {entry.text("tensor_names") for entry in story.silo.entries() if entry.event is Event.PLAN_RECEIVED}
    assert "encoder.final_layer_norm.weight" in plan.split()


def test_what_the_operator_did_is_in_the_log_and_no_secret_of_it(story: Story) -> None:
    commands = [entry for entry in story.coordinator.entries() if entry.event is Event.OPERATOR_COMMAND]
    assert [(entry.who, entry.text("command")) for entry in commands] == [
        (f"spiffe://{FEDERATION}/operator/operator", "Invite"),
        (f"spiffe://{FEDERATION}/operator/operator", "StartPlan"),
    ]
    assert commands[0].details == {"command": "Invite", "asked_silo": "clinic-c", "asked_valid_seconds": 600}
    refused = [entry for entry in story.coordinator.entries() if entry.event is Event.REFUSED]
    assert refused[-1].text("method").endswith("/StartPlan")
    events = [entry.event for entry in story.coordinator.entries()]
    assert events[0] is Event.STARTED
    assert events.count(Event.ENROLLED) == 2  # in the template, by the enrolment listener
    assert {Event.PLAN_OFFERED, Event.ROUND_OPENED, Event.ROUND_CLOSED, Event.STOPPED} <= set(events)
    assert "lorica1-" not in segment(story.coordinator.log, 1).read_text()


def test_the_report_says_what_left_and_under_which_promise(story: Story) -> None:
    done = story.silo.audit("report")
    assert f"{ROUNDS} updates, " in done.out
    assert "noised: epsilon 8 for a record" in done.out
    assert "refused: nothing" in done.out
    report = json.loads(story.silo.audit("report", "--json").out)
    parts = [part for part in report["parts"] if part["updates"]]
    assert [(part["round"], part["outcome"], part["receipt"], part["ledger_entry"]) for part in parts] == [
        (1, "uploaded", True, 2),
        (2, "uploaded", True, 4),
    ]
    assert report["bytes"] == sum(part["bytes"] for part in parts) > 0
    later = json.loads(story.silo.audit("report", "--since", "2999-01-01", "--json").out)
    assert (later["entries"], later["bytes"]) == (0, 0)
    story.silo.audit("report", "--since", "yesterday").is_refusal(ConfigurationError, "write it as 2026-11-30")


def test_entries_are_shown_to_people_and_to_programs(side: Side) -> None:
    last = side.audit("show", "--last", "2").out.splitlines()
    assert len(last) == 2
    shown = [json.loads(line) for line in side.audit("show", "--json").out.splitlines()]
    assert [entry["digest"] for entry in shown] == [entry.digest for entry in side.entries()]


def test_an_outsider_checks_a_copy_with_public_keys_alone(side: Side, story: Story, tmp_path: Path) -> None:
    key = public_key_bytes(side.key.public_key()).hex()
    log = shutil.copytree(side.log, tmp_path / "copy")
    extra = ["--receipts", known_of(side, story)]
    if side.writer == SILO:
        extra += ["--coordinator-key", public_key_bytes(story.coordinator.key.public_key()).hex()]
    done = run_command(side.main, "audit", "verify", "--log", log, "--key", key, *extra)
    assert (done.code, done.err) == (0, "")
    other = public_key_bytes(new_identity_key().public_key()).hex()
    run_command(side.main, "audit", "verify", "--log", log, "--key", other).is_refusal(IntegrityError, "is no seal of")
    run_command(side.main, "audit", "verify", "--log", log, "--key", "x").is_refusal(
        ConfigurationError, "64 hexadecimal"
    )
    run_command(side.main, "audit", "verify", "--log", tmp_path, "--key", key).is_refusal(StateError, "no audit log")


# --- who edits a log without its key


def test_an_entry_is_edited(side: Side) -> None:
    path = segment(side.log, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(index for index, line in enumerate(lines) if b'"round":1' in line)
    lines[number] = lines[number].replace(b'"round":1', b'"round":7')
    path.write_bytes(b"".join(lines))
    side.audit("verify").is_refusal(IntegrityError, f"{path} line {number + 1}: entry {number + 1} ", "edited")
    shown = side.audit("show")  # what comes before it is shown all the same
    assert (shown.code, len(shown.out.splitlines())) == (5, number)


def test_a_log_is_written_anew_without_its_key(side: Side) -> None:
    side.write_anew([entry for entry in side.entries() if entry.sequence != 3], new_identity_key())
    side.audit("verify").is_refusal(IntegrityError, "is no seal of", side.writer)


# --- who has the key


def test_an_owner_leaves_an_update_out_and_signs_anew(side: Side, story: Story) -> None:
    """The silo's own log convicts its owner by itself: the coordinator countersigned another history."""
    gone = Event.UPDATE_RECEIVED if side.writer == COORDINATOR else Event.UPDATE_LEAVES
    entries = side.entries()
    first = next(entry for entry in entries if entry.event is gone)
    side.write_anew(entry for entry in entries if entry is not first)
    if side.writer == COORDINATOR:
        assert side.audit("verify").code == 0  # nobody else's word stands in it
    else:
        side.audit("verify").is_refusal(IntegrityError, "another entry", "than the coordinator's receipt in entry")
    against = side.audit("verify", "--receipts", known_of(side, story))
    against.is_refusal(
        IntegrityError, f"has another entry {first.sequence}" if side.writer == SILO else "has another entry"
    )


def test_a_silos_owner_throws_the_receipts_away_as_well(story: Story, tmp_path: Path) -> None:
    side = story.silo.copied(tmp_path / "side")
    side.write_anew(entry for entry in side.entries() if entry.event not in (Event.UPDATE_LEAVES, Event.RECEIPT))
    assert side.audit("verify").code == 0
    side.audit("verify", "--receipts", story.silos_heads).is_refusal(
        IntegrityError, "another entry", "silos.heads line 1"
    )


def test_a_silos_owner_keeps_the_receipt_of_an_update_that_is_to_be_forgotten(story: Story, tmp_path: Path) -> None:
    """Edited so that the heads still fit: the receipt alone says that the update left."""
    side = story.silo.copied(tmp_path / "side")
    entries = side.entries()
    receipt = next(entry for entry in entries if entry.event is Event.RECEIPT)
    foreign = replace(receipt, details={**receipt.details, "update": "ab" * 32})
    side.write_anew(foreign if entry is receipt else entry for entry in entries)
    side.audit("verify").is_refusal(IntegrityError, f"entry {receipt.sequence} is no receipt of the coordinator")


def test_an_owner_cuts_the_end_off(side: Side, story: Story) -> None:
    entries = side.entries()
    shown = max(json.loads(line)["sequence"] for line in known_of(side, story).read_text().splitlines())
    side.write_anew(entries[: shown - 1])
    found = side.audit("verify", "--receipts", known_of(side, story))
    found.is_refusal(IntegrityError, f"ends with entry {shown - 1}", f"entry {shown} and what followed was cut off")


def test_an_owner_deletes_the_log(side: Side, story: Story) -> None:
    shutil.rmtree(side.log)
    side.audit("verify", "--receipts", known_of(side, story)).is_refusal(StateError, "holds no audit log")


def test_a_silo_whose_disk_went_back_proves_it_in_the_coordinators_log(story: Story, tmp_path: Path) -> None:
    side = story.coordinator.copied(tmp_path / "side")
    entries = list(side.entries())
    (first, second) = [index for index, entry in enumerate(entries) if entry.event is Event.UPDATE_RECEIVED]
    swapped = {name: entries[first].details[name] for name in entries[first].details if name.startswith("head_")}
    back = {name: entries[second].details[name] for name in swapped}
    entries[first] = replace(entries[first], details={**entries[first].details, **back})
    entries[second] = replace(entries[second], details={**entries[second].details, **swapped})
    side.write_anew(entries)
    side.audit("verify").is_refusal(IntegrityError, f"{SILO} showed entry", "put back from a backup")


def test_the_operator_puts_words_into_a_silos_mouth(story: Story, tmp_path: Path) -> None:
    side = story.coordinator.copied(tmp_path / "side")
    forged = SignedHead.sign(side.key, writer=SILO, head=Head(99, "ab" * 32)).particulars()
    side.write_anew(
        replace(entry, details={**entry.details, **forged}) if entry.event is Event.UPDATE_RECEIVED else entry
        for entry in side.entries()
    )
    side.audit("verify").is_refusal(IntegrityError, "holds what no silo signed")


def test_false_evidence_against_a_log(side: Side, story: Story, tmp_path: Path) -> None:
    """A head that the log's key did not sign accuses nobody; one of another log says nothing."""
    forged = tmp_path / "forged.heads"
    forged.write_bytes(SignedHead.sign(new_identity_key(), writer=side.writer, head=Head(3, "ab" * 32)).line())
    side.audit("verify", "--receipts", forged).is_refusal(
        IntegrityError, "forged.heads line 1", "it says nothing of the log"
    )
    other = story.silos_heads if side.writer == COORDINATOR else story.coordinators_heads
    side.audit("verify", "--receipts", other).is_refusal(StateError, "holds no head of the log of")
    side.audit("verify", "--receipts", tmp_path / "nowhere").is_refusal(StorageError, "nowhere cannot be read")


# --- a coordinator with false receipts, and a silo without evidence


def _other_update(peer: FederationPeer, receipt: UpdateReceipt) -> UpdateReceipt:
    return peer.signed_receipt(replace(receipt, update="ab" * 32))  # type: ignore[arg-type]


def _fewer_bytes(peer: FederationPeer, receipt: UpdateReceipt) -> UpdateReceipt:
    return peer.signed_receipt(replace(receipt, total_bytes=1))


def _other_head_of_the_silo(peer: FederationPeer, receipt: UpdateReceipt) -> UpdateReceipt:
    return peer.signed_receipt(replace(receipt, shown=Head(1, "ab" * 32)))


def _unsigned(peer: FederationPeer, receipt: UpdateReceipt) -> UpdateReceipt:
    return replace(receipt, signature=bytes(64))


def _head_of_nobody(peer: FederationPeer, receipt: UpdateReceipt) -> UpdateReceipt:
    head = SignedHead.sign(new_identity_key(), writer=receipt.head.writer, head=receipt.head.head)
    return peer.signed_receipt(replace(receipt, head=head))


def _of_another_round(peer: FederationPeer, receipt: UpdateReceipt) -> UpdateReceipt:
    other = peer.signed_receipt(replace(receipt, key=replace(receipt.key, round=9)))
    return replace(receipt, signature=other.signature)


@pytest.fixture
async def peer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FederationPeer]:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with FederationPeer(NET) as listening:
        yield listening


@pytest.mark.parametrize(
    "lie", [_other_update, _fewer_bytes, _other_head_of_the_silo, _unsigned, _head_of_nobody, _of_another_round]
)
async def test_a_coordinator_gives_a_false_receipt(
    peer: FederationPeer, tmp_path: Path, lie: Callable[[FederationPeer, UpdateReceipt], UpdateReceipt]
) -> None:
    """The update has left; the log says so, has no receipt for it, and says that the coordinator's was refused."""
    silo = Silo(tmp_path / "silo", NET.credentials(peer.address))
    peer.change_update_receipt = lambda receipt: lie(peer, receipt)
    await peer.order(train_order(peer.offer(BUNDLE, DATA)))
    async with silo.running():
        await silo.notes.outcomes(1)
    events = [entry.event for entry in read_log(silo.folder.audit).entries]
    assert Event.UPDATE_LEAVES in events
    assert Event.RECEIPT not in events
    assert silo.refusals() == ["IntegrityError"]
    assert [entry.text("rule") for entry in read_log(silo.folder.audit).of(Event.REFUSED)] == ["IntegrityError"]


async def test_what_a_silo_refuses_and_declines_is_in_its_log_and_a_flood_of_it_is_counted(
    peer: FederationPeer, tmp_path: Path
) -> None:
    silo = Silo(tmp_path / "silo", NET.credentials(peer.address))
    silo.rules = PolicyRules(approved_plans=["ab" * 32])
    await peer.order(train_order(peer.offer(BUNDLE, DATA)))
    async with silo.running():
        await peer.until(lambda: bool(peer.declined))
        for attempt in range(2, 150):
            await peer.order(train_order(peer.offer(BUNDLE, DATA), attempt=attempt))
            await peer.until(lambda attempt=attempt: len(peer.declined) == attempt)  # type: ignore[misc]
    log = read_log(silo.folder.audit, keys=[silo.credentials.identity_key.public_key()])
    told = list(log.of(Event.PLAN_RECEIVED, Event.PLAN_ALLOWED, Event.REFUSED, Event.DECLINED))
    assert [entry.event for entry in told[:3]] == [Event.PLAN_RECEIVED, Event.REFUSED, Event.DECLINED]
    assert (told[1].text("rule"), told[2].text("reason")) == ("approved_plans", "policy")
    assert len(list(log.of(Event.DECLINED))) == 100
    assert not list(log.of(Event.UPDATE_LEAVES, Event.PLAN_ALLOWED))


def test_what_people_do_by_command_is_in_the_log(story: Story, tmp_path: Path) -> None:
    side = story.silo.copied(tmp_path / "side")
    bank = Identity(FEDERATION, Role.SILO, "bank-b")
    commands = [
        ("trust", "add", "bank-b", key_text(bank, new_identity_key().public_key())),
        ("trust", "remove", "bank-b"),
        ("pause",),
        ("resume",),
        ("plan", "approve", "ab" * 32, "--without-comparing-the-model", "--config", side.root / "ask.toml"),
    ]
    write_private(side.root / "ask.toml", b'[policy]\napproved_plans = "ask"\n')
    for command in commands:
        done = run_command(side.main, *command, "--dir", side.root)
        assert done.code == 0, done.err
    by_people = [Event.PIN_ADDED, Event.PIN_REMOVED, Event.PAUSED, Event.RESUMED, Event.PLAN_APPROVED]
    told = [entry for entry in side.entries() if entry.event in by_people]
    assert [(entry.event, entry.who) for entry in told] == [(event, "local") for event in by_people]
    assert side.entries()[-1].event is Event.SEALED  # each command seals what it added
    assert side.audit("verify").code == 0
    report = side.audit("report").out
    assert "pin added: bank-b (pinned), by local" in report
    assert "pin removed: bank-b, by local" in report


async def test_nothing_leaves_that_the_log_cannot_tell_of(peer: FederationPeer, tmp_path: Path) -> None:
    silo = Silo(tmp_path / "silo", NET.credentials(peer.address))
    silo.trainer.hold = True
    await peer.order(train_order(peer.offer(BUNDLE, DATA)))
    async with silo.running():
        await silo.training_began()
        newest = segment(silo.folder.audit, 1)
        newest.write_bytes(newest.read_bytes() + b"{}\n")  # somebody else's hand
        silo.trainer.go.set()
        await asyncio.wait([silo.run])
        with pytest.raises(IntegrityError, match="is no entry of an audit log"):
            silo.run.result()
    assert peer.updates == {}


async def test_a_silo_sends_an_update_without_evidence_or_with_somebody_elses(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    async with (
        running(federation_template.copy(tmp_path / "coordinator"), offer=PLAN) as at,
        Caller(at, federation_template.silos[HOSPITAL]) as hospital,
        Caller(at, federation_template.silos[BANK]) as bank,
    ):
        bundle = at.coordinator.shelf.compile(PLAN)
        for silo in (hospital, bank):
            await silo.join(bundle.plan.digest)
        update = hospital.update(await hospital.order(Train), bundle.layout)
        logs: list[tuple[SignedHead | None, type[Exception]]] = [
            (None, MalformedMessage),
            (SignedHead.sign(new_identity_key(), writer=SILO, head=Head()), IntegrityError),
            (SignedHead.sign(hospital.credentials.identity_key, writer=COORDINATOR, head=Head()), IntegrityError),
        ]
        for log, kind in logs:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await hospital.upload(replace(update, header=replace(update.header, log=log)))
            assert type(error_of(refused.value)) is kind
        assert not list(read_log(at.coordinator.folder.audit).of(Event.UPDATE_RECEIVED))
        newest = segment(at.coordinator.folder.audit, 1)
        whole = newest.read_bytes()
        newest.write_bytes(whole + b"{}\n")
        with pytest.raises(grpc.aio.AioRpcError):  # what the log cannot tell of does not count
            await hospital.upload(update)
        newest.write_bytes(whole)
        rest = replace(update, header=replace(update.header, first_chunk=update.header.manifest.chunks))
        await hospital.upload(rest, [])
        assert len(list(read_log(at.coordinator.folder.audit).of(Event.UPDATE_RECEIVED))) == 1


# --- floods


def test_a_flood_of_refusals_fills_no_disk(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    log = AuditLog(tmp_path / "audit", writer=COORDINATOR, key=new_identity_key(), clock=lambda: now)
    refusals = RefusalLog(log, lambda: now, Repeats(period_s=60, each=3, kinds=2))
    for number in range(500):
        refusals.refused(
            Refusal(kind="AuthenticationError", method="/m", peer=f"ipv4:10.0.0.{number % 5}", detail="no")
        )
    refusals.tell_counts(stopping=True)
    entries = read_log(log.place).entries
    counted = [entry for entry in entries if entry.event is Event.REPEATED]
    written = [entry for entry in entries if entry.event is Event.REFUSED]
    assert len(written) == 9
    assert sum(entry.number("times") for entry in counted) + len(written) == 500


def test_a_refusal_is_told_though_the_log_cannot_be_written(tmp_path: Path) -> None:
    write_private(tmp_path / "file", b"")
    log = AuditLog(tmp_path / "file" / "audit", writer=COORDINATOR, key=new_identity_key(), clock=lambda: 0.0)
    RefusalLog(log, lambda: 0.0).refused(Refusal(kind="Conflict", method="/m", peer="local", detail="no"))
    with pytest.raises(StorageError):
        log.append(Event.STARTED)
