"""`silo-agent check` finds each misconfiguration of its table when that really is there, and nothing where all is
well."""

import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.ports import free_ports
from lorica_security.console.preflight import Check, Misconfigured, Outcome
from lorica_security.host import key_file
from lorica_security.host.files import write_private
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import identity_key_to_pem, new_identity_key
from lorica_security.pki.trust_bundle import TrustBundle
from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.secure_aggregation.groups.release_groups import Partition, SignedLink, first_link, signature_of
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from silo_agent.cli import main
from silo_agent.commands.command_line import Choice
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.check.machine_checks import MOST_BYTE_TOKENS, check_spool_room, disk_need
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.check.preflight import Ground, preflight
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.group_chain import GroupChain
from silo_agent.edges.groups.release_groups import group_chain
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials, store_credentials
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.effects import JournalOutcome
from silo_agent.rounds.effects import Outcome as RoundOutcome
from silo_agent.sql_sandbox import Walls, landlock, probe_jail
from silo_wire.codecs.groups_codec import GroupsOffer
from silo_wire.messages import RoundKey
from silo_wire.plans.model_files import CONFIG_FILE
from silo_wire.plans.privacy import Release
from tests.integration.test_agent_process import data_folder
from tests.support.command_line import run_command
from tests.support.federation_peer import FEDERATION, SILO, FederationPeer, TestNet, small_bundle
from tests.support.postgresql import running_postgresql
from tests.support.release_groups import hold_groups
from tests.support.secagg_federation import attempt
from tests.support.tiny_t5 import bundle_of, random_model
from tests.unit.test_agent_private_rounds import BUNDLE as PRIVATE

NET, OTHER = TestNet.create(age=timedelta(days=30)), TestNet.create()
NOW = datetime.now(UTC)
PEERS = tuple(map(SiloName, ("bank-b", "clinic-c", "insurer-d")))
EVERYBODY = first_link(FEDERATION, Partition.of([[SILO, *PEERS]]))
PASSPHRASE = "a passphrase of thirty characters"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (key_file.PASSPHRASE, key_file.NEW_PASSPHRASE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
    for name in ("HTTPS_PROXY", "https_proxy", "LORICA_SILO_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def peer() -> AsyncIterator[FederationPeer]:
    async with FederationPeer(NET) as listening:
        yield listening


@dataclass
class Case:
    """A silo that is enrolled, with data, whose coordinator answers; what a function spoils of it."""

    folder: SiloFolder
    peer: FederationPeer
    data: Path
    patch: pytest.MonkeyPatch
    ground: dict[str, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def enrolled_anew(self, net: TestNet = NET, *, age: timedelta = timedelta(0), **changes: Any) -> None:
        for path in (self.folder.enrolment, *self.folder.private_keys):
            path.unlink(missing_ok=True)
        store_credentials(self.folder, replace(net.credentials(self.peer.address, age=age), **changes))

    def settings(self, text: str) -> None:
        self.folder.settings.write_text(text)

    def offered(self, **sections: Any) -> None:
        PlanStore(self.folder.plans).keep_refused(small_bundle(**sections))

    def spent(self, rounds: int) -> None:
        """So many rounds of the private plan are in the ledger."""
        self.spend(*([PRIVATE.plan.releases_of_round] * rounds))

    def spend(self, *rounds: Sequence[Release]) -> None:
        """What each of these rounds releases."""
        credentials = NET.credentials(self.peer.address)
        journal = RoundJournal(self.folder.journal, updates=self.folder.updates, silo=SILO)
        policy = SiloPolicy(rules=PolicyRules(max_epsilon_alone=100.0), silo=SILO)
        guard = guard_of(self.folder, credentials, policy, journal)
        for number, releases in enumerate(rounds, 1):
            key = RoundKey(federation=FEDERATION, plan=PRIVATE.plan.digest, round=number, attempt=1)
            guard.spend(key, releases, unit="")
        journal.close()

    async def checks(self) -> Sequence[Check]:
        ground = Ground(
            folder=self.folder,
            settings=lambda enrolled: Choice(data=str(self.data)).settings(self.folder),
            sources=lambda settings: SiloSources(settings, scratch=self.folder.root / "database"),
            now=lambda: datetime.now(UTC),
            walls=lambda: Walls(landlock=1, seccomp=True),
        )
        checks = await preflight(replace(ground, **self.ground))
        for check in checks:
            assert "\n" not in check.detail
        return checks

    async def wrong(self) -> list[tuple[str, str]]:
        """Check and name of everything that is wrong."""
        return [(it.name, it.misconfiguration) for it in await self.checks() if it.outcome is Outcome.FAILED]


@pytest.fixture
def case(peer: FederationPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    folder = SiloFolder(tmp_path / "silo")
    store_credentials(folder, NET.credentials(peer.address))
    folder.make()
    return Case(folder, peer, data_folder(tmp_path / "data"), monkeypatch)


Spoil = Callable[[Case], None]
SPOILS: list[tuple[Mistake, Spoil]] = []


def makes(mistake: Mistake) -> Callable[[Spoil], Spoil]:
    def noted(spoil: Spoil) -> Spoil:
        SPOILS.append((mistake, spoil))
        return spoil

    return noted


# --- files
# -------------------------------------------------------------------------------------------------------------------


@makes(Mistake.NOT_ENROLLED)
def nobody_enrolled(case: Case) -> None:
    case.folder.enrolment.unlink()


@makes(Mistake.FOLDER_OPEN)
def folder_that_others_may_list(case: Case) -> None:
    case.folder.updates.chmod(0o755)


@makes(Mistake.FOLDER_UNUSABLE)
def file_in_the_place_of_a_folder(case: Case) -> None:
    case.folder.models.rmdir()
    case.folder.models.write_text("")


@makes(Mistake.FILE_MISSING)
def key_that_is_gone(case: Case) -> None:
    case.folder.tls.unlink()


@makes(Mistake.FILE_OPEN)
def key_that_others_may_read(case: Case) -> None:
    case.folder.identity_key.chmod(0o604)


@makes(Mistake.KEY_CLEAR)
def key_in_clear_beside_a_passphrase(case: Case) -> None:
    case.patch.setenv(key_file.PASSPHRASE, PASSPHRASE)


@makes(Mistake.PASSPHRASE)
def wrong_passphrase(case: Case) -> None:
    key_file.protect(case.folder.private_keys, {key_file.NEW_PASSPHRASE: PASSPHRASE})
    case.patch.setenv(key_file.PASSPHRASE, PASSPHRASE[::-1])


@makes(Mistake.TOKEN)
def token_whose_library_is_gone(case: Case) -> None:
    uri = "pkcs11:token=hospital;object=identity?module-path=/usr/lib/no-library.so&pin-source=/etc/lorica/pin"
    write_private(case.folder.identity_key, f"{uri}\npublic 00\n".encode())


@makes(Mistake.ROTATION)
def half_a_rotation(case: Case) -> None:
    key_file.write_key(case.folder.next_identity_key, identity_key_to_pem(new_identity_key()), {})


@makes(Mistake.FILE_DAMAGED)
def certificate_of_another_key(case: Case) -> None:
    present, other = case.folder.tls.read_bytes(), NET.credentials(case.peer.address)
    key = present[: present.index(b"-----BEGIN CERTIFICATE")]
    write_private(case.folder.tls, key + other.certificate_pem + b"Trusted-Since: 0\n" + other.trust.to_pem())


@makes(Mistake.FILE_DAMAGED)
def enrolment_that_does_not_parse(case: Case) -> None:
    write_private(case.folder.enrolment, b"{")


@makes(Mistake.SETTINGS)
def misspelt_key(case: Case) -> None:
    case.settings("[policy]\nmax_epoch = 3\n")


# --- certificate and clock
# ---------------------------------------------------------------------------------------------------


@makes(Mistake.CERTIFICATE_ENDING)
def certificate_of_a_last_day(case: Case) -> None:
    case.enrolled_anew(age=timedelta(days=6, hours=12))


@makes(Mistake.CLOCK_BEHIND)
def record_of_tomorrow(case: Case) -> None:
    journal = RoundJournal(case.folder.journal, updates=case.folder.updates, silo=SILO)
    key = RoundKey(federation=FEDERATION, plan=PRIVATE.plan.digest, round=1, attempt=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: NOW.timestamp() + 86_400)
        journal.record(JournalOutcome(key=key, evaluation=False, outcome=RoundOutcome.UPLOADED))
    journal.close()


# --- the coordinator
# ---------------------------------------------------------------------------------------------------------


@makes(Mistake.PROXY)
def proxy_that_is_no_address(case: Case) -> None:
    case.patch.setenv("HTTPS_PROXY", "socks5://192.0.2.8:1080")
    case.enrolled_anew(address="192.0.2.7:7443")


@makes(Mistake.UNREACHABLE)
def nobody_at_the_address(case: Case) -> None:
    case.enrolled_anew(address=f"127.0.0.1:{free_ports(1)[0]}")


@makes(Mistake.REFUSED)
def certificate_that_the_coordinator_does_not_take(case: Case) -> None:
    both = TrustBundle((OTHER.authority.certificate, NET.authority.certificate))
    case.enrolled_anew(OTHER, trust=both)


# --- plan, policy, budget
# ----------------------------------------------------------------------------------------------------


@makes(Mistake.RECORD_DAMAGED)
def approvals_that_do_not_parse_and_no_plan(case: Case) -> None:
    write_private(case.folder.approvals, b"{")


@makes(Mistake.MASKS_UNSAID)
def rules_that_do_not_say_whether_a_silo_masks_on(case: Case) -> None:
    case.settings("[data]\n")
    masking_journal(case.folder, load_credentials(case.folder)).remember(SiloMemory().joined(attempt()))


@makes(Mistake.UNAPPROVED)
def plan_that_waits_for_approval(case: Case) -> None:
    case.settings('[policy]\napproved_plans = "ask"\n')
    case.offered()


@makes(Mistake.POLICY)
def plan_of_too_many_rounds(case: Case) -> None:
    case.settings("[policy]\nmax_rounds = 2\n")
    case.offered()


@makes(Mistake.PINS_DAMAGED)
def pins_that_do_not_parse(case: Case) -> None:
    case.settings("[policy]\nrequire_secure_aggregation = true\n")
    write_private(case.folder.peers, b"{")


@makes(Mistake.PINS_FEW)
def nobody_pinned(case: Case) -> None:
    case.settings("[policy]\nrequire_secure_aggregation = true\n")


@makes(Mistake.MASKING_MEMORY)
def memory_of_masked_rounds_that_was_deleted(case: Case) -> None:
    masked_and_pinned(case)
    masking_journal(case.folder, load_credentials(case.folder)).remember(SiloMemory().joined(attempt()))
    (case.folder.masking / "memory").unlink()


def masked_and_pinned(case: Case, peers: Sequence[SiloCredentials] = ()) -> GroupChain:
    """As the silo is before its first masked round, with all that this wants but release groups."""
    case.settings("[policy]\nrequire_secure_aggregation = true\nmin_cohort = 3\n")
    credentials = load_credentials(case.folder)
    for peer in peers or peers_of(case):
        trust_store(case.folder, credentials).add(peer.silo, peer.identity_key.public_key())
    return group_chain(case.folder, credentials, SiloPolicy(rules=PolicyRules(), silo=SILO))


def peers_of(case: Case) -> list[SiloCredentials]:
    return [NET.credentials(case.peer.address, name) for name in PEERS]


def holding(case: Case, *groups: Sequence[SiloName]) -> None:
    """Its people approved them."""
    peers = peers_of(case)
    masked_and_pinned(case, peers)
    hold_groups([(case.folder, load_credentials(case.folder))], groups, others=peers)


@makes(Mistake.GROUPS_PROMISE)
def groups_that_promise_less_than_policy(case: Case) -> None:
    holding(case, [SILO, *PEERS])
    case.settings("[policy]\nrequire_secure_aggregation = true\nmin_cohort = 3\nsmallest_group = 4\n")


@makes(Mistake.GROUPS_DAMAGED)
def groups_that_do_not_parse(case: Case) -> None:
    masked_and_pinned(case)
    write_private(case.folder.release_groups, b"{")


@makes(Mistake.GROUPS_DAMAGED)
def groups_that_were_lost(case: Case) -> None:
    """Not taken for a silo's that holds none yet."""
    chain = masked_and_pinned(case)
    chain.take(GroupsOffer(links=(), proposed=SignedLink(link=EVERYBODY), identities=()))
    case.folder.release_groups.unlink()


@makes(Mistake.GROUPS_DAMAGED)
def groups_that_were_put_back(case: Case) -> None:
    chain = masked_and_pinned(case)
    chain.take(GroupsOffer(links=(), proposed=SignedLink(link=EVERYBODY), identities=()))
    copy = case.folder.release_groups.read_bytes()
    chain.approve(EVERYBODY.digest.hex())
    write_private(case.folder.release_groups, copy)


@makes(Mistake.GROUPS_WAIT)
def groups_that_leave_out_a_pinned_silo(case: Case) -> None:
    chain = masked_and_pinned(case)
    few = first_link(FEDERATION, Partition.of([[SILO, *PEERS[:2]]]))
    chain.take(GroupsOffer(links=(), proposed=SignedLink(link=few), identities=()))


@makes(Mistake.BUDGET_UNSET)
def privacy_without_a_budget(case: Case) -> None:
    case.settings('[policy]\nrequire_privacy = "record"\n')


@makes(Mistake.LEDGER)
def ledger_that_was_cut(case: Case) -> None:
    case.spent(2)
    lines = case.folder.privacy_ledger.read_bytes().splitlines(keepends=True)
    write_private(case.folder.privacy_ledger, b"".join(lines[:-1]))


@makes(Mistake.BUDGET_SMALL)
def budget_for_a_part_of_the_schedule(case: Case) -> None:
    PlanStore(case.folder.plans).keep_refused(PRIVATE)
    case.spent(40)
    case.settings("[policy]\nmax_epsilon = 1.6\n")


@makes(Mistake.BUDGET_SMALL)
def budget_towards_others_that_an_earlier_plan_spent(case: Case) -> None:
    PlanStore(case.folder.plans).keep_refused(PRIVATE)
    case.spend([("joint_gradients", GaussianRelease(40.0, makers=2))])
    case.settings("[policy]\nmax_epsilon = 100.0\nmax_epsilon_alone = 0.5\n")


@makes(Mistake.BUDGET_SHARED)
def registry_of_shared_records_that_is_not_there(case: Case) -> None:
    case.settings('[policy]\nshared_budget = "/not/mounted"\n')


@makes(Mistake.BUDGET_SHARED)
def registry_of_shared_records_that_others_can_read(case: Case) -> None:
    registry = case.data.parent / "registry"
    registry.mkdir(mode=0o755)
    case.settings(f'[policy]\nshared_budget = "{registry}"\n')


# --- the machine
# -------------------------------------------------------------------------------------------------------------


@makes(Mistake.MEMORY)
def memory_that_others_have(case: Case) -> None:
    case.offered()
    case.ground["free_memory"] = lambda: 1 << 10


@makes(Mistake.DISK)
def disk_that_is_full(case: Case) -> None:
    case.ground["free_disk"] = lambda folder: 1 << 20


@makes(Mistake.SPOOL)
def disk_without_room_for_lines(case: Case) -> None:
    """Files with holes: their lines are not read for it. Enough for models alone."""
    for name, size in (("train.jsonl", 80 << 20), ("dev.jsonl", 60 << 20)):
        with (case.data / name).open("r+b") as file:
            file.truncate(size)
    case.ground["free_disk"] = lambda folder: (64 + 159) << 20


@makes(Mistake.LAUNCH)
def launch_command_that_is_not_there(case: Case) -> None:
    case.settings('[training]\nprocesses = 2\nlaunch = ["no-such-launcher"]\n')


@makes(Mistake.DEVICE)
def gpu_that_is_not_there(case: Case) -> None:
    case.settings('[training]\ndevice = "cuda:99"\n')


@makes(Mistake.METRICS_PORT)
def metrics_on_the_port_of_another_process(case: Case) -> None:
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    case.kept.append(other)
    case.settings(f'[metrics]\nlisten = "127.0.0.1:{other.getsockname()[1]}"\n')


# --- data and database
# -------------------------------------------------------------------------------------------------------


@makes(Mistake.DATA_MISSING)
def training_data_that_is_not_there(case: Case) -> None:
    (case.data / "train.jsonl").unlink()


@makes(Mistake.SCHEMA)
def schema_that_is_not_there(case: Case) -> None:
    (case.data / "schema.json").unlink()


@makes(Mistake.SCHEMA)
def schema_that_is_none(case: Case) -> None:
    (case.data / "schema.json").write_text("[]")


@makes(Mistake.DATA_BAD)
def lines_that_do_not_parse(case: Case) -> None:
    with (case.data / "train.jsonl").open("a") as file:
        file.write("{broken\n")


@makes(Mistake.FEW_LOSSES)
def examples_for_fewer_losses_than_three(case: Case) -> None:
    case.offered(training={"loss_reduction": "logged", "loss_log_steps": 1000})


@makes(Mistake.UNIT_FIELD)
def lines_that_do_not_say_whose_they_are(case: Case) -> None:
    values = PRIVATE.plan.model_dump(mode="json")
    values["privacy"]["unit_field"] = "patient"
    PlanStore(case.folder.plans).keep_refused(type(PRIVATE)(type(PRIVATE.plan).model_validate(values), PRIVATE.files))
    case.settings("[policy]\nmax_epsilon = 1000.0\n")


@makes(Mistake.UNIT_HALF)
def lines_half_of_which_are_one_patients(case: Case) -> None:
    lines_that_do_not_say_whose_they_are(case)
    train = case.data / "train.jsonl"
    lines = [json.loads(line) for line in train.read_text().splitlines()]
    owned = [{**line, "patient": "ann" if 2 * number < len(lines) else number} for number, line in enumerate(lines)]
    train.write_text("".join(json.dumps(line) + "\n" for line in owned))


@makes(Mistake.JAIL)
def kernel_without_landlock(case: Case) -> None:
    case.settings("[sql]\nrequire_jail = true\n")
    case.ground["walls"] = lambda: Walls(landlock=0, seccomp=True)


@makes(Mistake.DATABASE)
def database_that_is_none(case: Case) -> None:
    (case.data / "db.sqlite").write_bytes(b"this is no database" * 100)


@pytest.mark.parametrize(("mistake", "spoil"), SPOILS, ids=lambda value: getattr(value, "__name__", ""))
async def test_each_is_found_under_its_name_alone(case: Case, mistake: Mistake, spoil: Spoil) -> None:
    spoil(case)
    try:
        assert await case.wrong() == [(mistake.value.found_by, mistake.value.name)]
    finally:
        for kept in case.kept:
            kept.close()


async def test_the_clean_silo_that_all_of_these_spoil_has_nothing_wrong(case: Case) -> None:
    case.settings('[policy]\nrequire_privacy = "record"\nmax_epsilon = 12.0\n')
    PlanStore(case.folder.plans).keep_refused(PRIVATE)
    assert await case.wrong() == []


async def test_whether_other_folders_with_the_same_records_would_be_noticed_is_told(case: Case) -> None:
    """By whom privacy is wanted."""

    async def told() -> str:
        return next(it.detail for it in await case.checks() if it.name == "privacy budget")

    registry = case.data.parent / "registry"
    registry.mkdir(mode=0o700)
    required = '[policy]\nrequire_privacy = "record"\nmax_epsilon = 12.0\n'
    case.settings(required)
    assert "counted in this folder alone: nobody notices other folders with the same records" in await told()
    case.settings(f'{required}shared_budget = "{registry}"\n')
    assert f"together with other folders that count in {registry}" in await told()
    case.settings("")
    assert "alone" not in await told()


@pytest.mark.parametrize(
    ("groups", "shown", "cost"),
    [
        (([SILO, *PEERS],), f"not at all are {', '.join(sorted([SILO, *PEERS]))}", None),
        (([SILO], PEERS), "this silo is a group of its own", "two sums, subtracted, are of it alone"),
        (
            ([SILO, PEERS[0]], PEERS[1:]),
            "not at all are bank-b, hospital-a",
            "bank-b, hospital-a can be told apart from all others",
        ),
    ],
    ids=["large enough", "one", "two"],
)
async def test_a_group_that_is_smaller_than_policy_asks_for_is_noticed_with_what_it_costs(
    case: Case, groups: tuple[Sequence[SiloName], ...], shown: str, cost: str | None
) -> None:
    holding(case, *groups)
    checks = await case.checks()
    assert shown in next(it.detail for it in checks if it.name == "release groups")
    noticed = [it.detail for it in checks if it.name == "masks loosened" and it.detail.startswith("groups approve: ")]
    assert len(noticed) == (cost is not None)
    assert all(str(cost) in one and "silo-level privacy" in one for one in noticed)


async def test_the_room_for_lines_goes_by_the_files_and_by_what_tokens_take(case: Case) -> None:
    """Found out before anything is read: that takes the room itself."""

    async def told() -> Check:
        return next(it for it in await case.checks() if it.name == "disk for lines")

    assert (await told()).detail.startswith("none is needed: memory holds")
    with (case.data / "train.jsonl").open("r+b") as file:
        file.truncate(70 << 20)
    few_signs = bundle_of(random_model())
    assert json.loads(few_signs.files[CONFIG_FILE])["vocab_size"] <= MOST_BYTE_TOKENS
    for bundle, times in ((None, 2), (PRIVATE, 2), (few_signs, 5)):
        need = disk_need(case.folder, 2, bundle)
        least = need.bytes + times * (70 << 20)
        assert f"about {70 * times} MiB needed" in check_spool_room(case.folder, case.data, bundle, need, least)
        with pytest.raises(Misconfigured, match=f"about {70 * times} MiB there") as found:
            check_spool_room(case.folder, case.data, bundle, need, least - 1)
        assert found.value.name == Mistake.SPOOL.value.name
    (case.data / "train.jsonl").rename(case.data / "packed")
    (case.data / "train.jsonl.gz").write_bytes(bytes(20 << 20))
    with pytest.raises(Misconfigured, match="about 200 MiB there"):
        check_spool_room(case.folder, case.data, None, disk_need(case.folder, 2, None), 64 << 20)


async def test_the_data_card_is_shown_and_held_out_questions_that_training_has_are_a_notice(case: Case) -> None:
    shown = {it.name: it for it in await case.checks()}
    assert shown["train split"].outcome is Outcome.PASSED
    assert " words (longest " in shown["train split"].detail
    line = (case.data / "train.jsonl").read_text().splitlines()[0]
    with (case.data / "dev.jsonl").open("a") as file:
        file.write(json.dumps({**json.loads(line), "id": "asked-again"}) + "\n")
    noticed = [it.detail for it in await case.checks() if (it.name, it.outcome) == ("dev split", Outcome.NOTICE)]
    assert [it.partition(" of its ")[0] for it in noticed] == ["1"]


async def test_of_a_text_in_and_a_text_out_nothing_is_said_of_sql(case: Case) -> None:
    for path in case.data.iterdir():
        path.unlink()
    for split in ("train", "dev"):
        lines = [{"id": f"{split}-{number}", "input": f"note {number} of {split}", "target": "ok"} for number in (1, 2)]
        (case.data / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checks = await case.checks()
    assert [it.name for it in checks if it.outcome is Outcome.FAILED] == []
    shown = {it.name: it for it in checks}
    assert shown["train split"].detail.startswith("2 lines, inputs 4 words (longest 4), targets 1 words (longest 1)")
    skipped = [(shown[name].outcome, shown[name].detail) for name in ("jail of SQL", "database")]
    assert skipped == [(Outcome.SKIPPED, "the task is no SQL: its answers run nowhere")] * 2


async def test_lines_that_the_plan_cuts_are_counted(case: Case) -> None:
    async def told() -> str:
        return next(it.detail for it in await case.checks() if it.name == "what the plan cuts")

    training = {"max_input_tokens": 60, "max_output_tokens": 50, "schema_in_input": False}
    PlanStore(case.folder.plans).keep_refused(bundle_of(random_model(), training=training))
    lines = (case.data / "train.jsonl").read_text().splitlines()
    before = await told()
    with (case.data / "train.jsonl").open("a") as file:
        longer = {"id": "long", "question": "how many beds " * 60, "query": f"SELECT {', '.join(60 * ['a'])}"}
        file.write(json.dumps({**json.loads(lines[0]), **longer}) + "\n")
    assert before.startswith(f"of {len(lines)} inputs 0 are cut at 60 tokens; of answers 0 at 50, and ")
    assert (await told()).startswith(f"of {len(lines) + 1} inputs 1 are cut at 60 tokens; of answers 1 at 50, and ")
    case.offered()
    assert (await told()).startswith("the plan's files make no model: ")


async def test_what_a_plan_would_say_is_not_told_before_there_is_one(case: Case) -> None:
    shown = {it.name: it.detail for it in await case.checks()}
    of_a_plan = ("plan and policy", "what the plan cuts", "losses of a round", "unit of privacy")
    assert {shown[name] for name in of_a_plan} == {"no plan was offered yet"}


async def test_a_silo_that_the_plan_has_without_labels_is_checked_so(case: Case) -> None:
    """Whatever its lines have, and without a dev split."""
    (case.data / "dev.jsonl").unlink()
    assert await case.wrong() == [("data", "data-missing")]
    unlabelled = {"unlabelled": [SILO], "order": "together", "loss": "answer"}
    case.offered(semi_supervised=unlabelled, aggregation={"weighting": "equal"})
    shown = {it.name: it for it in await case.checks()}
    assert shown["data"].outcome is Outcome.PASSED
    assert ", no answers, " in shown["train split"].detail
    assert "dev split" not in shown


async def test_which_walls_hold_the_sql_is_tried_and_a_missing_one_is_noticed(case: Case) -> None:
    async def told() -> list[tuple[Outcome, str]]:
        return [(it.outcome, it.detail) for it in await case.checks() if "jail" in it.name]

    case.ground["walls"] = probe_jail
    ((outcome, detail),) = await told()
    assert outcome is Outcome.PASSED
    assert (
        detail
        == f"files by Landlock (version {landlock.version()}) and system calls by seccomp, each tried in a process "
        "of its own"
    )
    case.ground["walls"] = lambda: Walls(landlock=0, seccomp=True)
    (_, detail), notice = await told()
    assert detail == "system calls by seccomp, each tried in a process of its own"
    assert notice[0] is Outcome.NOTICE
    assert "no Landlock" in notice[1]
    assert await case.wrong() == []


async def test_a_certificate_of_another_authority(case: Case) -> None:
    """The coordinator does not take it either."""
    case.enrolled_anew(OTHER, trust=TrustBundle((NET.authority.certificate,)))
    assert await case.wrong() == [
        ("certificate", "certificate-foreign"),
        ("coordinator accepts this silo", "refused"),
    ]


async def test_a_certificate_that_has_ended(case: Case) -> None:
    """The coordinator does not take it either."""
    case.enrolled_anew(age=timedelta(days=8))
    assert await case.wrong() == [("certificate", "certificate-ended"), ("coordinator accepts this silo", "refused")]


async def test_a_clock_before_the_authority(case: Case) -> None:
    """By such a clock the coordinator's certificate does not hold yet."""
    case.ground["now"] = lambda: NOW - timedelta(days=31)
    assert await case.wrong() == [
        ("clock", "clock-early"),
        ("route and TLS interception", "coordinator-certificate"),
    ]


async def test_a_stranger_in_the_coordinators_place(case: Case) -> None:
    async with FederationPeer(OTHER) as stranger:
        case.enrolled_anew(address=stranger.address)
        assert await case.wrong() == [("route and TLS interception", "tls-intercepted")]


async def test_a_coordinator_whose_certificate_has_ended(case: Case) -> None:
    case.ground["now"] = lambda: NOW + timedelta(days=8)
    assert ("route and TLS interception", "coordinator-certificate") in await case.wrong()


async def test_a_role_that_may_write(case: Case) -> None:
    with running_postgresql() as server:
        server.execute("CREATE TABLE patient (name text)", "CREATE ROLE writer LOGIN")
        server.execute("GRANT SELECT, INSERT ON patient TO writer")
        case.settings(f'[database]\nurl = "{server.url(user="writer")}"\n')
        assert await case.wrong() == [("database", "database-writable")]


LOOSE = 'approved_plans = "any"\nverify = "off"\ntrust_on_first_use = true\nmax_work_ratio = 4\n'


async def notices(case: Case) -> list[str]:
    """What was loosened, by its key."""
    checks = await case.checks()
    found = [check.detail.partition(":")[0] for check in checks if check.outcome is Outcome.NOTICE]
    return [key for key in found if key != "agreed by"]


async def test_attack_a_damaged_file_does_not_silence_what_was_loosened(case: Case) -> None:
    case.settings(f"[policy]\nrequire_secure_aggregation = true\n{LOOSE}")
    all_of_them = ["approved_plans", "verify", "trust_on_first_use", "max_work_ratio"]
    assert set(all_of_them) <= set(await notices(case))
    for path in (case.folder.approvals, case.folder.peers):
        write_private(path, b"{")
        assert set(all_of_them) <= set(await notices(case))
    assert await case.wrong() == [("what people decided", "record-damaged"), ("pinned silos", "pins-damaged")]


async def test_masks_that_people_gave_up_are_a_notice(case: Case) -> None:
    case.settings("[policy]\nrequire_secure_aggregation = false\n")
    assert await notices(case) == []
    masking_journal(case.folder, load_credentials(case.folder)).remember(SiloMemory().joined(attempt()))
    assert await notices(case) == ["require_secure_aggregation"]
    assert await case.wrong() == []


async def test_a_release_group_of_fewer_than_the_rules_say_is_a_notice(case: Case) -> None:
    """Its people allowed it once; that it holds they see each time."""
    chain = masked_and_pinned(case)
    credentials = load_credentials(case.folder)
    keys = {name: new_identity_key() for name in PEERS}
    for name, key in keys.items():
        trust_store(case.folder, credentials).remove(name)
        trust_store(case.folder, credentials).add(name, key.public_key())
    alone = first_link(credentials.federation, Partition.of([[SILO], PEERS]))
    chain.take(GroupsOffer(links=(), proposed=SignedLink(link=alone), identities=()))
    chain.approve(alone.digest.hex())
    assert "groups approve" not in await notices(case)
    signed = {**keys, SILO: credentials.identity_key}
    signatures = tuple(sorted((name, signature_of(alone, key)) for name, key in signed.items()))
    chain.take(GroupsOffer(links=(SignedLink(link=alone, signatures=signatures),), proposed=None, identities=()))
    assert "groups approve" in await notices(case)


def test_every_misconfiguration_of_the_table_is_made_to_happen_here() -> None:
    by_themselves = {
        Mistake.CERTIFICATE_ENDED,
        Mistake.CERTIFICATE_FOREIGN,
        Mistake.CLOCK_EARLY,
        Mistake.INTERCEPTED,
        Mistake.COORDINATOR_CERTIFICATE,
        Mistake.DATABASE_WRITES,
    }
    assert {mistake for mistake, _ in SPOILS} | by_themselves == set(Mistake)


def test_the_command_names_them_with_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "silo").mkdir(mode=0o700)
    done = run_command(main, "check", "--json", "--dir", tmp_path / "silo", "--data", tmp_path / "nowhere")
    assert done.code == 3
    assert re.fullmatch(r"silo-agent: 2 of \d+ checks failed: files and permissions, data\n", done.err)
    assert '"misconfiguration": "not-enrolled"' in done.out
    assert '"misconfiguration": "data-missing"' in done.out
