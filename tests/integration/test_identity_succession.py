"""A silo's identity key is succeeded by another one: on disk, at the coordinator, and at the silos that pinned it."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lorica_security.audit.entry import Event, entry_from_line
from lorica_security.errors import Conflict, DataError, IntegrityError, LoricaError, StateError, Unreachable
from lorica_security.host import files
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes
from lorica_security.identity.key_text import key_text
from lorica_security.identity.succession import Succession, possession_statement, succession_statement
from lorica_security.on_disk.log_file import lines
from lorica_security.secure_aggregation.messages import Advertisement
from silo_agent.cli import main as silo_main
from silo_agent.commands.identity_commands import finish_rotation
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, check_settled, load_credentials
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.memory.identity_succession import predecessors, succeed
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.pins_file import How
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.codecs.renewal import succession_request
from silo_wire.messages import RoundKey
from tests.support.command_line import run_command
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    HOSPITAL,
    FederationTemplate,
    RunningCoordinator,
    Silo,
    refused,
    running,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.killed_commands import Killed, dying, each_death
from tests.support.lifecycle import silo_at
from tests.support.rogue_silos import ROGUE, SILOS, Attack, Declared, Play, PlayedSilo, make_rogue_template, played
from tests.support.secagg_federation import attempt, opening

HOSPITAL_IDENTITY = Identity(FEDERATION, Role.SILO, HOSPITAL)
Playing = Callable[..., AbstractAsyncContextManager[Play]]


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    async with running(federation_template.copy(tmp_path / "coordinator")) as coordinator:
        yield coordinator


def enrolled_key(at: RunningCoordinator) -> bytes:
    store = at.coordinator.open_store()
    try:
        silo = store.silo(HOSPITAL)
        assert silo is not None
        return silo.identity_public_key
    finally:
        store.close()


# --- the command ------------------------------------------------------------------------------------------------------


async def test_rotate_makes_a_successor_that_the_coordinator_knows(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    before = load_credentials(folder)
    keys = [before.identity_key.public_key()]
    for times in (1, 2):
        os.link(folder.identity_key, tmp_path / f"{times}")
        done = await asyncio.to_thread(run_command, silo_main, "identity", "rotate", "--dir", folder.root)
        assert (done.code, done.err) == (0, "")
        after = load_credentials(folder)
        keys.append(after.identity_key.public_key())
        assert key_text(after.identity, keys[-1]) in done.out
        assert predecessors(folder, after)[-1].statement.hex() in done.out
        assert enrolled_key(at) == public_key_bytes(keys[-1])
        assert [one.key for one in predecessors(folder, after)] == [public_key_bytes(key) for key in keys[:times]]
        assert after.tls_key_pem == before.tls_key_pem
        assert not folder.next_identity_key.exists()
        assert not any((tmp_path / f"{times}").read_bytes())  # the key before is not left on the disk
    shown = run_command(silo_main, "identity", "show", "--dir", folder.root).out
    assert [line.split()[1] for line in shown.splitlines()] == [key_text(before.identity, key) for key in keys]
    read = json.loads(run_command(silo_main, "identity", "show", "--json", "--dir", folder.root).out)
    assert read["identity_key"] == key_text(before.identity, keys[-1])
    store = at.coordinator.open_store()
    try:
        chain = store.successions(HOSPITAL)
    finally:
        store.close()
    assert [(one.predecessor, one.successor) for one in chain] == [(keys[0], keys[1]), (keys[1], keys[2])]
    for one in chain:
        one.check(HOSPITAL_IDENTITY)


def test_rotate_beside_a_running_agent_or_without_the_coordinator_changes_nothing(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    before = folder.identity_key.read_bytes()
    with ProcessLock(folder.lock, "silo agent"):
        done = run_command(silo_main, "identity", "rotate", "--dir", folder.root)
        done.is_refusal(Conflict, "stop it first")
        assert not folder.next_identity_key.exists()
    done = run_command(silo_main, "identity", "rotate", "--dir", folder.root)
    done.is_refusal(Unreachable)
    assert folder.identity_key.read_bytes() == before
    # The coordinator may have heard of it, for all that this silo knows: nothing is done under either key until it is
    # settled.
    listed = run_command(silo_main, "trust", "list", "--dir", folder.root)
    listed.is_refusal(StateError, "identity.next", "silo-agent start")


def succeeded(folder: SiloFolder) -> list[str]:
    """The keys that the audit log says this silo went over to."""
    entries = (entry_from_line(line.content, line.where) for line in lines(folder.audit))
    return [str(one.details["identity_key"]) for one in entries if one.event is Event.IDENTITY_SUCCEEDED]


async def test_an_agent_that_starts_finishes_a_rotation_that_was_killed(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each durable step of the command; what `start` does first needs no people, and the audit log tells of it."""
    folder = silo_at(tmp_path / "silo", federation_template.silos[BANK], at.address)

    def rotate() -> None:
        done = run_command(silo_main, "identity", "rotate", "--dir", folder.root)
        assert (done.code, done.err) == (0, "")

    def start() -> None:
        """Of a command that died half-way: there are no data, which the agent finds out once all that comes before is
        done."""
        with dying(5, within=folder.root), pytest.raises(Killed):
            rotate()
        assert folder.next_identity_key.exists()
        run_command(silo_main, "start", "--dir", folder.root, "--data", tmp_path / "none").is_refusal(DataError)
        assert not folder.next_identity_key.exists()

    monkeypatch.setattr(
        signal, "signal", lambda *_: None
    )  # this is not the main thread, whose loop is the coordinator's
    await asyncio.to_thread(start)
    deaths = 0
    for died in await asyncio.to_thread(lambda: list(_each_start(rotate, folder))):
        deaths += bool(died)
    assert deaths >= 8
    credentials = load_credentials(folder)
    store = at.coordinator.open_store()
    try:
        silo = store.silo(BANK)
        assert silo is not None
        assert silo.identity_public_key == public_key_bytes(credentials.identity_key.public_key())
    finally:
        store.close()


def _each_start(rotate: Callable[[], None], folder: SiloFolder) -> Iterator[str]:
    for died in each_death(rotate, before=lambda: None, within=folder.root):
        finish_rotation(folder, pytest.fail)
        check_settled(folder)
        after = load_credentials(folder)
        assert not folder.next_identity_key.exists()
        chain = predecessors(folder, after)
        for earlier, later in itertools.pairwise(chain):
            assert earlier.successor == later.key
        if chain:
            assert chain[-1].successor == public_key_bytes(after.identity_key.public_key())
            assert set(succeeded(folder)) == {one.successor.hex() for one in chain}, died
        yield died


def test_an_agent_that_starts_waits_for_the_coordinator_to_finish_a_rotation(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    run_command(silo_main, "identity", "rotate", "--dir", folder.root)
    told: list[str] = []

    def trouble(word: str) -> None:
        told.append(word)
        if len(told) == 2:
            raise Killed

    with pytest.raises(Killed):
        finish_rotation(folder, trouble)
    assert "rotation of the identity key" in told[0]
    assert folder.next_identity_key.exists()


def nobody(_: SiloCredentials) -> None:
    return


async def test_a_kill_between_any_two_steps_leaves_one_way_to_go(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write and the call is cut off in turn, before and after; the next run ends with one key, the enrolled
    one."""
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], at.address)
    cut_off = 0
    for cut in range(40):
        calls = 0

        def meet() -> None:
            nonlocal calls
            if calls == cut:  # noqa: B023
                raise Killed
            calls += 1

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **how: Any) -> None:
                meet()
                real(*arguments, **how)
                meet()

            return call

        credentials = load_credentials(folder)
        async with Silo(at, credentials) as silo:

            async def send(succession: Succession, possession: bytes) -> None:
                request = succession_request(
                    federation=FEDERATION, silo=HOSPITAL, succession=succession, possession=possession
                )
                await silo.stub.SucceedIdentity(request)

            async def cut_send(succession: Succession, possession: bytes) -> None:
                meet()
                await send(succession, possession)
                meet()

            killed = False
            with monkeypatch.context() as patch:
                patch.setattr(files, "replace", counted(files.replace))
                patch.setattr(Path, "unlink", counted(Path.unlink))
                try:
                    await succeed(folder, credentials, cut_send, nobody)
                except Killed:
                    killed = True
            after = load_credentials(folder)
            if folder.next_identity_key.exists():
                after = await succeed(folder, load_credentials(folder), send, nobody)
            check_settled(folder)
            assert not folder.next_identity_key.exists()
            stored = load_credentials(folder).identity_key.public_key()
            assert after.identity_key.public_key() == stored
            assert enrolled_key(at) == public_key_bytes(stored)
            chain = predecessors(folder, after)
            for earlier, later in itertools.pairwise(chain):
                assert earlier.successor == later.key
            if chain:
                assert chain[-1].successor == public_key_bytes(stored)
            if not killed:
                break
            cut_off += 1
    assert cut_off >= 8


def test_rotate_while_an_attempt_is_journalled_here_is_refused(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    event = opening(HOSPITAL, attempt())
    masking_journal(folder, load_credentials(folder)).append(event)
    done = run_command(silo_main, "identity", "rotate", "--dir", folder.root)
    assert done.code != 0
    assert "secure aggregation is under way" in done.err
    assert not folder.next_identity_key.exists()


# --- who may not
# --------------------------------------------------------------------------------------------------------


async def test_attack_successions_that_one_of_both_keys_did_not_sign(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    """A stolen TLS key names a successor, somebody names a key that is another's, a statement is moved to another
    silo."""
    credentials = federation_template.silos[HOSPITAL]
    bank = federation_template.silos[BANK]
    old, new, stranger = credentials.identity_key, new_identity_key(), new_identity_key()
    here, there = HOSPITAL_IDENTITY, bank.identity

    def named(by: Any, successor: Any, identity: Identity = here) -> Succession:
        return Succession(
            predecessor=old.public_key(),
            successor=successor.public_key(),
            statement=succession_statement(by, identity=identity, new_key=successor.public_key()),
        )

    def proof(by: Any, identity: Identity = here) -> bytes:
        return possession_statement(by, identity=identity, old_key=old.public_key())

    async with Silo(at, credentials) as silo:
        for succession, possession in (
            (named(stranger, new), proof(new)),  # the old key did not sign
            (named(old, new), proof(old)),  # nor did the new one
            (named(old, bank.identity_key), proof(stranger)),  # a key of another silo, which did not sign
            (named(old, new, there), proof(new)),
            (named(old, new), proof(new, there)),
        ):
            request = succession_request(
                federation=FEDERATION, silo=HOSPITAL, succession=succession, possession=possession
            )
            async with refused(at, IntegrityError, grpc.StatusCode.DATA_LOSS, "identity/succ"):
                await silo.stub.SucceedIdentity(request)
        request = succession_request(
            federation=FEDERATION,
            silo=HOSPITAL,
            succession=named(old, bank.identity_key),
            possession=proof(bank.identity_key),
        )
        async with refused(at, Conflict, grpc.StatusCode.ALREADY_EXISTS, "that of another silo"):
            await silo.stub.SucceedIdentity(request)
        # Someone who had an earlier key cannot name another successor of it later.
        request = succession_request(
            federation=FEDERATION, silo=HOSPITAL, succession=named(old, new), possession=proof(new)
        )
        await silo.stub.SucceedIdentity(request)
        await silo.stub.SucceedIdentity(request)  # the same again is acknowledged
        fork = succession_request(
            federation=FEDERATION, silo=HOSPITAL, succession=named(old, stranger), possession=proof(stranger)
        )
        async with refused(at, Conflict, grpc.StatusCode.ALREADY_EXISTS, "not the one that is enrolled"):
            await silo.stub.SucceedIdentity(fork)


def test_a_pin_follows_signed_steps_and_nothing_else(federation_template: FederationTemplate, tmp_path: Path) -> None:
    folder = silo_at(tmp_path / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    credentials = load_credentials(folder)
    store = trust_store(folder, credentials)
    identity = Identity(FEDERATION, Role.SILO, BANK)
    first, second, third, stranger = (new_identity_key() for _ in range(4))

    def step(old: Any, new: Any, by: Any = None, whose: Identity = identity) -> Succession:
        statement = succession_statement(old, identity=whose, new_key=new.public_key())
        if by is not None:
            statement = succession_statement(by, identity=whose, new_key=new.public_key())
        return Succession(predecessor=old.public_key(), successor=new.public_key(), statement=statement)

    honest = (step(first, second), step(second, third))
    store.follow(BANK, third.public_key(), honest)
    assert store.peers() == ()  # nobody is pinned by following
    store.add(BANK, first.public_key())
    for key, steps in (
        (stranger, (step(first, stranger, by=stranger),)),
        (stranger, (step(first, stranger, whose=credentials.identity),)),
        (stranger, honest),
        (third, honest[1:]),  # a step is missing
        (third, (honest[0], step(second, third, by=stranger))),
        (third, ()),
    ):
        store.follow(BANK, key.public_key(), steps)
        assert store.identities() == {BANK: first.public_key()}
    own = step(first, credentials.identity_key)
    store.follow(BANK, credentials.identity_key.public_key(), (own,))
    assert store.identities() == {BANK: first.public_key()}
    store.follow(BANK, third.public_key(), honest)
    (pin,) = store.peers()
    assert (pin.key, pin.predecessor, pin.how) == (third.public_key(), second.public_key(), How.ADDED)
    store.follow(BANK, first.public_key(), honest)  # it never goes back
    assert store.identities() == {BANK: third.public_key()}


# --- peers, in real masked rounds
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rogue_template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    return make_rogue_template(tmp_path_factory.mktemp("rogue") / "coordinator")


async def test_peers_follow_a_silo_that_changed_its_key_between_two_masked_rounds(
    rogue_template: FederationTemplate, tmp_path: Path
) -> None:
    """In round 1 the change is refused, since the attempt knows the old key; round 2 is made by all, under the new
    one."""
    asked: list[LoricaError] = []

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        who = silo.credentials
        if isinstance(message, Advertisement) and key.round == 1:
            new = new_identity_key()
            old = who.identity_key
            succession = Succession(
                predecessor=old.public_key(),
                successor=new.public_key(),
                statement=succession_statement(old, identity=who.identity, new_key=new.public_key()),
            )
            possession = possession_statement(new, identity=who.identity, old_key=old.public_key())
            with pytest.raises(StateError, match="knows silo rogue-d by its present identity key") as caught:
                await silo.client.succeed_identity(succession, possession)
            asked.append(caught.value)
            with pytest.raises(StateError, match="secure aggregation is under way here"):
                await succeed(silo.folder, who, silo.client.succeed_identity, nobody)
        if isinstance(message, Declared) and key.round == 2:
            # What a restart between the rounds does, without the wait for one.
            silo.credentials = await succeed(silo.folder, who, silo.client.succeed_identity, nobody)
            policy = SiloPolicy(rules=PolicyRules(), silo=silo.name)
            silo.masking._party = party_of(silo.folder, silo.credentials, policy)
            silo.masking._journal = masking_journal(silo.folder, silo.credentials)
            silo.client._credentials = silo.credentials
        await silo.send(key, message)

    took: Attack = attack
    async with played(rogue_template, tmp_path, took) as play:
        first = play.rogue.credentials.identity_key.public_key()
        play.check_made_by(await play.closed(1), *SILOS)
        play.check_made_by(await play.closed(2), *SILOS)
        second = play.rogue.credentials.identity_key.public_key()
        assert second != first
        for name in SILOS:
            if name != ROGUE:
                silo = play.silos[name]
                (pin,) = [one for one in trust_store(silo.folder, silo.credentials).peers() if one.silo == ROGUE]
                assert (pin.key, pin.predecessor) == (second, first)
    assert len(asked) == 1
