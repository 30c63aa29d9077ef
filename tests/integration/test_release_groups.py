"""Release groups between a real coordinator and agents over mutual TLS, with the commands of their people."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_security.audit.entry import Event
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import (
    Link,
    Partition,
    Promise,
    SignedLink,
    first_link,
    signers,
    successor,
)
from silo_agent.cli import main as silo_main
from silo_agent.edges.accounts.audit_log import audit_log
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.group_chain import GroupChain
from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
from silo_agent.edges.keys.key_store import load_credentials
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.group_keeper import GroupKeeper
from silo_wire.codecs.groups_codec import GroupsOffer
from tests.support.command_line import Done, run_command
from tests.support.coordinator import FEDERATION, RunningCoordinator, initialise, running, until
from tests.support.lifecycle import KeptAgent, kept_agent, silo_at

NAMES = tuple(SiloName(f"silo-{letter}") for letter in "abcdef")
EVERYBODY = first_link(FEDERATION, Partition.of([NAMES]))
HALVES = successor(EVERYBODY, Partition.of([NAMES[:3], NAMES[3:]]))


@dataclass
class GroupedSilo:
    """An agent that attends and keeps its release groups; `waits` are the sentences that its people were told.

    `waiting`: whether something waited for them, each time that it looked.
    """

    folder: SiloFolder
    keeper: GroupKeeper
    chain: GroupChain
    waits: list[str]
    waiting: list[bool]
    refused: list[tuple[str, str]]


class Silos:
    def __init__(self, at: RunningCoordinator, folders: dict[SiloName, SiloFolder]) -> None:
        self.at = at
        self.folders = folders
        self.silos: dict[SiloName, GroupedSilo] = {}
        self.rules: dict[SiloName, PolicyRules] = {}
        self._stack = AsyncExitStack()
        self._agents: dict[SiloName, AsyncExitStack] = {}

    async def __aenter__(self) -> "Silos":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def begin(self, *names: SiloName) -> None:
        for name in names:
            self._agents[name] = await self._stack.enter_async_context(AsyncExitStack())
            agent = await self._agents[name].enter_async_context(kept_agent(self.folders[name]))
            self.silos[name] = self._grouped(name, agent)
            keeping = asyncio.create_task(self.silos[name].keeper.run())
            self._agents[name].callback(keeping.cancel)

    async def end(self, name: SiloName) -> None:
        """Its agent hears nothing more."""
        await self._agents.pop(name).aclose()

    def _grouped(self, name: SiloName, agent: KeptAgent) -> GroupedSilo:
        folder = self.folders[name]
        credentials = agent.stored
        chain = group_chain(folder, credentials, SiloPolicy(rules=self.rules.get(name, PolicyRules()), silo=name))
        log = audit_log(folder, credentials)
        waits: list[str] = []
        waiting: list[bool] = []
        refused: list[tuple[str, str]] = []

        def told(event: str, **fields: str) -> None:
            if event == "release-groups-wait":
                waits.append(fields["detail"])

        groups = ReleaseGroups(
            chain,
            trust_store(folder, credentials, first_use=False),
            credentials,
            client=agent.coordinator,
            log=log,
        )
        keeper = GroupKeeper(
            groups,
            backoff=Backoff(first_s=0.02, most_s=0.1),
            told=told,
            refused=lambda *one: refused.append(one),
            waits=waiting.append,
        )
        agent.coordinator.on_groups = keeper.heard
        return GroupedSilo(folder, keeper, chain, waits, waiting, refused)

    async def all_hold(self, link: Link, names: Iterable[SiloName] = NAMES) -> None:
        await until(lambda: all(self.silos[name].chain.head == link for name in names))


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator's folder, and six silos' that pinned each other."""
    root = tmp_path_factory.mktemp("groups")

    async def enrol() -> None:
        async with running(initialise(root / "coordinator")) as at:
            credentials = {name: await at.enrolled(name) for name in NAMES}
        for name, own in credentials.items():
            folder = silo_at(root / name, own, at.address)
            pins = trust_store(folder, own, first_use=False)
            for peer, other in credentials.items():
                if peer != name:
                    pins.add(peer, other.identity_key.public_key())

    asyncio.run(enrol())
    return root


@asynccontextmanager
async def held(folder: CoordinatorFolder) -> AsyncIterator[None]:
    """As by `coordinator serve`: commands ask the coordinator that runs, and do nothing by themselves."""
    with ProcessLock(folder.lock, "coordinator"):
        yield


@pytest.fixture
async def silos(enrolled: Path, tmp_path: Path) -> AsyncIterator[Silos]:
    shutil.copytree(enrolled, tmp_path, dirs_exist_ok=True)
    with capture_logs():  # what the coordinator logs is not what a command in this process prints
        folder = CoordinatorFolder(tmp_path / "coordinator")
        async with (
            held(folder),
            running(folder) as at,
            Silos(at, {name: SiloFolder(tmp_path / name) for name in NAMES}) as silos,
        ):
            yield silos


async def people(main: Callable[[], None], *arguments: str | Path) -> Done:
    return await asyncio.to_thread(partial(run_command, main, *arguments))


async def at_silo(silos: Silos, name: SiloName, *arguments: str) -> Done:
    done = await people(silo_main, "groups", *arguments, "--dir", silos.folders[name].root)
    silos.silos[name].keeper.wake()  # as the command does by a signal to a running agent
    return done


async def propose(
    silos: Silos, *groups: Sequence[SiloName], colluders: int | None = None, smallest_group: int | None = None
) -> Done:
    options = ("--json", "--dir", silos.at.coordinator.folder.root)
    if colluders is not None:
        options = ("--colluders", str(colluders), *options)
    if smallest_group is not None:
        options = ("--smallest-group", str(smallest_group), *options)
    return await people(coordinator_main, "groups", "propose", *map(",".join, groups), *options)


async def test_one_group_of_all_comes_to_stand_by_itself_and_halves_with_the_word_of_peoples(silos: Silos) -> None:
    await silos.begin(*NAMES)
    assert json.loads((await propose(silos, NAMES)).out)["missing"] == list(NAMES)
    await silos.all_hold(EVERYBODY)
    assert not any(any(one.waiting) for one in silos.silos.values())

    await propose(silos, NAMES[:3], NAMES[3:])
    await until(lambda: all(one.waits for one in silos.silos.values()))
    assert all(one.waiting[-1] for one in silos.silos.values())
    assert all("alone" in one.waits[0] for one in silos.silos.values())
    shown = json.loads((await at_silo(silos, NAMES[0], "show", "--json")).out)
    assert shown["held"]["digest"] == EVERYBODY.digest.hex()
    assert shown["proposed"]["digest"] == HALVES.digest.hex()
    assert shown["waits_for_people"].startswith(silos.silos[NAMES[0]].waits[0])
    assert "no good signature is here of silo-b, silo-c, silo-d" in shown["waits_for_people"]

    for name in NAMES[:4]:
        assert (await at_silo(silos, name, "approve", HALVES.digest.hex())).code == 0
    await silos.all_hold(HALVES, NAMES[:4])
    assert silos.at.service.groups.head == HALVES
    assert all(silos.silos[name].chain.head == EVERYBODY for name in NAMES[4:]), "their people have not spoken"
    for name in NAMES[4:]:
        await at_silo(silos, name, "approve", HALVES.digest.hex())
    await silos.all_hold(HALVES)
    await until(lambda: not any(one.waiting[-1] for one in silos.silos.values()))
    assert not any(one.refused for one in silos.silos.values())
    await until(lambda: len(silos.at.service.groups.after(2)[0].signatures) == len(NAMES))


async def test_people_approve_a_whole_digest_alone_and_read_what_they_approve(silos: Silos) -> None:
    """Whoever makes both proposals can make two that begin alike. Signatures that nobody checked are not counted."""
    await silos.begin(*NAMES)
    await propose(silos, NAMES)
    await silos.all_hold(EVERYBODY)
    await propose(silos, NAMES[:3], NAMES[3:])
    await until(lambda: all(one.waits for one in silos.silos.values()))
    digest = HALVES.digest.hex()
    for command in ("approve", "withdraw"):
        for part in (digest[:16], digest[:-1]):
            refused = await at_silo(silos, NAMES[0], command, part)
            assert refused.code != 0
            assert "whole digest of release groups" in refused.err
    chain = silos.silos[NAMES[0]].chain
    false = SignedLink(link=HALVES, signatures=tuple((name, bytes(64)) for name in NAMES[1:]))
    for _ in range(20):  # the agent looks as well, and keeps what the coordinator offers
        chain.take(GroupsOffer(links=(), proposed=false, identities=()))
        shown = (await at_silo(silos, NAMES[0], "show")).out
        if "false: " in shown:
            break
    assert f"release groups 2 (proposed), {digest}\n  against 0 colluders, smallest group 3; signed by 0\n" in shown
    assert f"false: signatures of {', '.join(NAMES[1:])}" in shown
    assert f"silo-agent groups approve {digest} allows it" in shown
    told = chain.standing().objection or ""
    assert f"waits for this silo's people: {told}" in shown
    approved = await at_silo(silos, NAMES[0], "approve", digest)
    assert told in approved.out
    log = await people(silo_main, "audit", "show", "--dir", silos.folders[NAMES[0]].root, "--json")
    entries = [one for one in map(json.loads, log.out.splitlines()) if one["event"] == Event.GROUPS_APPROVED.value]
    assert [one["details"]["learnt"] for one in entries] == [told]


async def test_a_proposal_promises_what_the_operator_says(silos: Silos) -> None:
    folder = silos.at.coordinator.folder.root
    for options, promise in (
        ((), Promise()),
        (("--colluders", "2"), Promise(colluders=2, smallest_group=4)),
        (("--smallest-group", "5"), Promise(smallest_group=5)),
    ):
        done = await people(coordinator_main, "groups", "propose", ",".join(NAMES), *options, "--dir", folder)
        assert (
            f"against {promise.colluders} colluders, smallest group {promise.smallest_group}, signed by 0" in done.out
        )
        proposed = silos.at.service.groups.proposed
        assert proposed is not None
        assert proposed.link.promise == promise
        digest = proposed.link.digest.hex()
        assert f"release groups 1 (proposed), {digest}\n" in done.out, "what people read to each other"
        status = await people(coordinator_main, "status", "--dir", folder)
        assert f"release groups {digest} are proposed and wait for 6 signatures of: {', '.join(NAMES)}" in status.out
        two, four = ",".join(NAMES[:2]), ",".join(NAMES[2:])
        assert "in none of" not in done.out
        refused = await people(coordinator_main, "groups", "propose", two, four, "--dir", folder)
        assert "release group silo-a,silo-b has 2 silos" in refused.err
        assert silos.at.service.groups.proposed == proposed
    fewer = await people(coordinator_main, "groups", "propose", ",".join(NAMES[:4]), "--dir", folder)
    assert "enrolled, and in none of the proposed groups: silo-e, silo-f; what these silos train is in no" in fewer.out


async def test_a_silo_that_asks_for_more_refuses_by_name_and_takes_what_promises_enough(silos: Silos) -> None:
    """Those who signed what it refuses take their signatures back, and allow what asks for more than their policy
    does."""
    silos.rules[NAMES[0]] = PolicyRules(colluders=1)
    await silos.begin(*NAMES)
    await propose(silos, NAMES)
    await until(lambda: bool(silos.silos[NAMES[0]].refused))
    rule, detail = silos.silos[NAMES[0]].refused[0]
    assert rule == "release_groups"
    assert "colluders 0 instead of 1" in detail
    assert "coordinator groups propose" in detail
    assert not silos.silos[NAMES[0]].waits
    await until(lambda: silos.at.service.groups.waits_for() == (frozenset(NAMES[:1]), 1))
    await propose(silos, NAMES, colluders=1)
    higher = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=1))
    for name in NAMES[1:]:
        await until(lambda name=name: bool(silos.silos[name].waits))  # type: ignore[misc]
        assert "colluders 1 where 0 would do" in silos.silos[name].waits[0]
        withdrawn = await at_silo(silos, name, "withdraw", EVERYBODY.digest.hex())
        assert "the signature under release groups 1 is withdrawn" in withdrawn.out
        assert (await at_silo(silos, name, "approve", higher.digest.hex())).code == 0
    await silos.all_hold(higher)
    assert not silos.silos[NAMES[0]].waits, "its policy says it"


async def test_everything_is_in_the_logs_of_both_sides(silos: Silos) -> None:
    await silos.begin(*NAMES)
    await propose(silos, NAMES)
    await silos.all_hold(EVERYBODY)
    of_groups: list[dict[str, object]] = []
    async with asyncio.timeout(60.0):
        while len(of_groups) < 2:  # a link is held a moment before the log says it
            shown = await people(silo_main, "audit", "show", "--dir", silos.folders[NAMES[0]].root, "--json")
            events = [json.loads(line) for line in shown.out.splitlines()]
            of_groups = [one for one in events if one["event"] in (Event.GROUPS_SIGNED.value, Event.GROUPS_TAKEN.value)]
    assert [one["event"] for one in of_groups] == [Event.GROUPS_SIGNED.value, Event.GROUPS_TAKEN.value]
    assert all(EVERYBODY.digest.hex() in json.dumps(one) for one in of_groups)
    told = await people(coordinator_main, "audit", "show", "--dir", silos.at.coordinator.folder.root, "--json")
    stand = [one for one in map(json.loads, told.out.splitlines()) if one["event"] == Event.GROUPS_STAND.value]
    assert len(stand) == 1


async def test_a_silo_that_comes_late_holds_up_the_first_groups_and_then_takes_them(silos: Silos) -> None:
    await silos.begin(*NAMES[:-1])
    await propose(silos, NAMES)
    await until(lambda: silos.at.service.groups.waits_for() == (frozenset(NAMES[-1:]), 1))
    assert not any(one.chain.head for one in silos.silos.values())
    await silos.begin(NAMES[-1])
    await silos.all_hold(EVERYBODY)


async def test_a_silo_whose_people_did_not_pin_a_member_is_told_whom(silos: Silos) -> None:
    credentials = silos.folders[NAMES[0]]
    assert (await people(silo_main, "trust", "remove", NAMES[5], "--dir", credentials.root)).code == 0
    await silos.begin(*NAMES)
    await propose(silos, NAMES)
    await until(lambda: bool(silos.silos[NAMES[0]].waits))
    assert NAMES[5] in silos.silos[NAMES[0]].waits[0]
    assert silos.at.service.groups.head is None


async def test_a_signature_that_is_withdrawn_makes_way_for_other_groups(silos: Silos) -> None:
    await silos.begin(*NAMES)
    await propose(silos, NAMES)
    await silos.all_hold(EVERYBODY)
    await propose(silos, NAMES[:3], NAMES[3:])
    digest = HALVES.digest.hex()
    await until(lambda: bool(silos.silos[NAMES[0]].waits))
    await at_silo(silos, NAMES[0], "approve", digest)
    await until(lambda: silos.at.service.groups.waits_for()[1] == 3)
    assert (await at_silo(silos, NAMES[0], "withdraw", digest)).code == 0
    others = successor(EVERYBODY, Partition.of([NAMES[::2], NAMES[1::2]]))
    await propose(silos, NAMES[::2], NAMES[1::2])
    for name in NAMES:
        await until(lambda name=name: _proposed(silos, name) == others)  # type: ignore[misc]
        await at_silo(silos, name, "approve", others.digest.hex())
    await silos.all_hold(others)


def _proposed(silos: Silos, name: SiloName) -> Link | None:
    proposed = silos.silos[name].chain.standing().proposed
    return None if proposed is None else proposed.link


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (("silo-a,silo-b", "silo-b,silo-c"), "in two of them"),
        (("silo-a,silo-b,nobody",), "not enrolled"),
        (("silo-a,,silo-b",), "names no silo"),
        (("silo-a,silo-b,silo-c,silo-d", "--colluders", "2"), "with --colluders 1 or less, or with 1 more silos"),
    ],
)
async def test_groups_that_are_none_are_refused_and_nothing_is_proposed(
    silos: Silos, groups: tuple[str, ...], says: str
) -> None:
    done = await people(coordinator_main, "groups", "propose", *groups, "--dir", silos.at.coordinator.folder.root)
    assert done.code != 0
    assert says in done.err
    assert silos.at.service.groups.proposed is None


# --- what came from a backup, and what was lost -----------------------------------------------------------------------

THIRDS = successor(HALVES, Partition.of([NAMES[:3], NAMES[3:5], NAMES[5:]]))


@asynccontextmanager
async def at_work(root: Path) -> AsyncIterator[Silos]:
    folder = CoordinatorFolder(root / "coordinator")
    with capture_logs():
        async with (
            held(folder),
            running(folder) as at,
            Silos(at, {name: SiloFolder(root / name) for name in NAMES}) as silos,
        ):
            await silos.begin(*NAMES)
            yield silos


async def agreed(silos: Silos, link: Link) -> None:
    """Proposed, approved by all people, and held by all."""
    small = min(map(len, link.partition.groups))
    await propose(silos, *link.partition.groups, smallest_group=small if small < link.promise.smallest_group else None)
    for name in NAMES:
        await until(lambda name=name: _proposed(silos, name) == link)  # type: ignore[misc]
        assert (await at_silo(silos, name, "approve", link.digest.hex())).code == 0
    await silos.all_hold(link)


async def test_a_coordinator_that_came_from_a_backup_has_the_groups_of_since_back_from_its_silos(
    enrolled: Path, tmp_path: Path
) -> None:
    """Two links stood since. It would open attempts of groups that no silo masks under any more."""
    shutil.copytree(enrolled, tmp_path, dirs_exist_ok=True)
    async with at_work(tmp_path) as silos:
        await propose(silos, NAMES)
        await silos.all_hold(EVERYBODY)
    shutil.copytree(tmp_path / "coordinator", tmp_path / "backup")
    async with at_work(tmp_path) as silos:
        await agreed(silos, HALVES)
        await agreed(silos, THIRDS)
    shutil.rmtree(tmp_path / "coordinator")
    (tmp_path / "backup").rename(tmp_path / "coordinator")
    async with at_work(tmp_path) as silos:
        await until(lambda: silos.at.service.groups.head == THIRDS)
        assert not any(one.refused or any(one.waiting) for one in silos.silos.values())
        shown = await people(coordinator_main, "audit", "show", "--dir", silos.at.coordinator.folder.root, "--json")
        stand = [one for one in map(json.loads, shown.out.splitlines()) if one["event"] == Event.GROUPS_STAND.value]
        assert [one["details"]["digest"] for one in stand][-2:] == [HALVES.digest.hex(), THIRDS.digest.hex()]


async def test_a_coordinator_of_an_older_backup_has_the_whole_chain_back_by_the_operators_word(
    enrolled: Path, tmp_path: Path
) -> None:
    shutil.copytree(enrolled, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "coordinator", tmp_path / "backup")
    async with at_work(tmp_path) as silos:
        await propose(silos, NAMES)
        await silos.all_hold(EVERYBODY)
        await agreed(silos, HALVES)
    shutil.rmtree(tmp_path / "coordinator")
    (tmp_path / "backup").rename(tmp_path / "coordinator")
    async with at_work(tmp_path) as silos:
        for one in silos.silos.values():
            await until(lambda one=one: bool(one.refused))  # type: ignore[misc]
        assert silos.at.service.groups.head is None, "any silo could say so"
        command = f"coordinator groups take-back {HALVES.digest.hex()}"
        assert command in silos.silos[NAMES[0]].refused[0][1]
        folder = silos.at.coordinator.folder.root
        short = await people(coordinator_main, "groups", "take-back", HALVES.digest.hex()[:16], "--dir", folder)
        assert "not the whole digest" in short.err
        assert (await people(coordinator_main, *command.split()[1:], "--dir", folder)).code == 0
        await until(lambda: silos.at.service.groups.head == HALVES)


async def test_a_silo_tells_what_to_propose_to_a_coordinator_that_cannot_take_its_groups_back(
    enrolled: Path, tmp_path: Path
) -> None:
    shutil.copytree(enrolled, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "coordinator", tmp_path / "backup")
    async with at_work(tmp_path) as silos:
        await propose(silos, NAMES)
        await silos.all_hold(EVERYBODY)
    shutil.rmtree(tmp_path / "coordinator")
    (tmp_path / "backup").rename(tmp_path / "coordinator")
    async with at_work(tmp_path) as silos:
        for one in silos.silos.values():
            await until(lambda one=one: bool(one.refused))  # type: ignore[misc]
        rule, detail = silos.silos[NAMES[0]].refused[0]
        assert rule == "release_groups"
        command = f"coordinator groups propose {','.join(NAMES)} --colluders 0 --smallest-group 3"
        assert command in detail
        assert (
            await people(coordinator_main, *command.split()[1:], "--dir", silos.at.coordinator.folder.root)
        ).code == 0
        await until(lambda: silos.at.service.groups.head == EVERYBODY)


async def test_a_silo_that_lost_its_folder_comes_back_with_the_word_of_people(enrolled: Path, tmp_path: Path) -> None:
    """Enrolled again under its name, pinned anew by the others, while one that left is not pinned any more."""
    lost, left, others = NAMES[0], NAMES[5], NAMES[1:5]
    shutil.copytree(enrolled, tmp_path, dirs_exist_ok=True)
    without = successor(EVERYBODY, Partition.of([NAMES[:5]]))
    async with at_work(tmp_path) as silos:
        await propose(silos, NAMES)
        await silos.all_hold(EVERYBODY)
        await propose(silos, NAMES[:5])
        for name in NAMES[:4]:
            await until(lambda name=name: _proposed(silos, name) == without)  # type: ignore[misc]
            assert (await at_silo(silos, name, "approve", without.digest.hex())).code == 0
        await silos.all_hold(without, NAMES[:4])
        await at_silo(silos, NAMES[4], "approve", without.digest.hex())
        await silos.all_hold(without, NAMES[:5])

        await silos.end(lost)
        shutil.rmtree(tmp_path / lost)
        credentials = await silos.at.enrolled(lost)
        pins = trust_store(silo_at(tmp_path / lost, credentials, silos.at.address), credentials, first_use=False)
        for name in others:
            folder = silos.folders[name]
            pins.add(name, load_credentials(folder).identity_key.public_key())
            its = trust_store(folder, load_credentials(folder), first_use=False)
            its.remove(lost)
            its.add(lost, credentials.identity_key.public_key())
        await silos.begin(lost)
        await until(lambda: bool(silos.silos[lost].waits))
        assert f"have the people of {', '.join(others)} read out the digest" in silos.silos[lost].waits[0]
        held_elsewhere = json.loads((await at_silo(silos, others[0], "show", "--json")).out)["held"]["digest"]
        assert (await at_silo(silos, lost, "approve", held_elsewhere)).code == 0
        await silos.all_hold(without, NAMES[:5])
        new_key = {lost: credentials.identity_key.public_key()}
        await until(lambda: lost in signers(silos.at.service.groups.after(2)[0], new_key))

        larger = successor(without, Partition.of([NAMES[:5]]), Promise(smallest_group=4))
        await people(
            coordinator_main,
            "groups",
            "propose",
            ",".join(NAMES[:5]),
            "--smallest-group",
            "4",
            "--dir",
            silos.at.coordinator.folder.root,
        )
        for name in NAMES[:5]:
            await until(lambda name=name: _proposed(silos, name) == larger)  # type: ignore[misc]
            await at_silo(silos, name, "approve", larger.digest.hex())
        await silos.all_hold(larger, NAMES[:5])
        assert left not in larger.members
