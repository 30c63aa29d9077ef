"""Hostile streams: who never speaks, who never stops, who begins and never ends, on both sides of the wire.

The coordinator and the agent are real processes here, so that what an attack costs can be read off them: resident
memory before and after, files on disk. What single chunks, headers and words can do wrong is in
test_attacks_on_a_round.py. After each attack on the coordinator two honest silos finish a round.
"""

import asyncio
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.server.gate import OF_ALL_STRANGERS, OF_ONE_CALLER
from lorica_coordinator.edges.server.places import Places
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.daemon.listen_address import address
from lorica_security.identifiers import SiloName
from lorica_security.identity.enrolment_token import EnrolmentToken, decode
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, store_credentials
from silo_agent.edges.wire.enrolment_client import enrol
from silo_agent.training.model.model import bind, vector_blocks
from silo_wire.canonical import Digest, digest_from_wire
from silo_wire.codecs import common_codec, orders_codec, updates_codec
from silo_wire.messages import DeclineReason, Prepare, RoundKey, Standby, StandbyReason, Train
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import common_pb2, federation_pb2, operator_pb2, operator_pb2_grpc
from tests.integration.test_agent_process import data_folder
from tests.support import federation_peer
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    HOSPITAL,
    PATIENCE_S,
    PLAN_VALUES,
    FederationTemplate,
    Silo,
    accepts,
    channel_to,
    chunk_pieces,
    header_piece,
    running,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.federation_peer import FederationPeer, OfferedModel, TestNet
from tests.support.raw_http2 import Gone, RawConnection, client_context, grpc_message, nobody, raw_connection
from tests.support.tiny_t5 import bundle_of, random_model

MB = 1_000_000
GROWTH_BYTES = 100 * MB
"""What any attack may cost a process in resident memory."""
CLINIC = SiloName("clinic-c")
LONG_S = 120.0
MESSAGE_BYTES = (5 << 20) - 100
PLAN = "streams"


def environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name.lower() not in ("https_proxy", "all_proxy")},
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }


class Process:
    """One of the two programs, its log and its memory."""

    def __init__(self, log: Path, *command: str, before: Callable[[], None] | None = None) -> None:
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command], env=environment(), stdout=file, stderr=file, preexec_fn=before
            )

    def check(self) -> None:
        assert self._process.poll() is None, self.log.read_text()[-4000:]

    def memory(self) -> int:
        """Resident bytes."""
        self.check()
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def open_files(self) -> int:
        return int(psutil.Process(self._process.pid).num_fds())

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not holds():
            self.check()
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- the coordinator under attack ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """`coordinator serve` with the plan `streams` under way. hospital-a is the attacker; bank-b and clinic-c are
    honest."""

    process: Process
    coordinator: Coordinator
    bundle: PlanBundle
    silos: dict[SiloName, SiloCredentials]
    context: ssl.SSLContext

    @property
    def port(self) -> int:
        return self.coordinator.settings.public_silos_port

    def channel(self, *, key_pem: bytes | None, certificate_pem: bytes | None) -> grpc.aio.Channel:
        roots = self.coordinator.keys.trust.to_pem()
        return channel_to(f"127.0.0.1:{self.port}", roots, key_pem=key_pem, certificate_pem=certificate_pem)

    def metric(self, sample: str) -> float:
        where = self.coordinator.settings.listen.metrics
        with urllib.request.urlopen(f"http://{where}/metrics") as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f"{sample} "):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {sample}")

    def silo(self, name: SiloName) -> Silo:
        return Silo(self, self.silos[name])  # type: ignore[arg-type]  # it asks for a channel alone

    def honest_round(self) -> None:
        """bank-b and clinic-c train a round, and it is applied."""
        applied = 'lorica_rounds_total{outcome="applied"}'
        before = self.metric(applied)
        asyncio.run(self._honest_round())
        self.process.until(lambda: self.metric(applied) > before)

    async def _honest_round(self) -> None:
        async with self.silo(BANK) as bank, self.silo(CLINIC) as clinic:
            orders = [await ready(silo, self.bundle) for silo in (bank, clinic)]
            for silo, order in zip((bank, clinic), orders, strict=True):
                await silo.upload(silo.update(order or await silo.order(Train), self.bundle.layout))

    async def invite(self, silo: str) -> EnrolmentToken:
        """A token from the operator; the enrolment listener is open from now on."""
        pair = self.coordinator.keys.operator_pair(datetime.now(UTC))
        async with self.channel(key_pem=pair.key_pem, certificate_pem=pair.certificate_pem) as channel:
            request = operator_pb2.InviteRequest(silo=silo, valid_seconds=3600)
            reply = await operator_pb2_grpc.OperatorStub(channel).Invite(request)
            return decode(reply.token)

    async def present_model(self) -> bytes:
        """The digest of what FetchModel hands out now."""
        pair = self.coordinator.keys.operator_pair(datetime.now(UTC))
        async with self.channel(key_pem=pair.key_pem, certificate_pem=pair.certificate_pem) as channel:
            reply = await operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest())
            return bytes(reply.model_digest)

    @contextmanager
    def attacked(self, connections: int) -> Iterator[list[RawConnection]]:
        """So many connections of hospital-a, with its good certificate."""
        with ExitStack() as stack:
            yield [stack.enter_context(raw_connection(self.port, self.context)) for _ in range(connections)]

    @contextmanager
    def spared(self) -> Iterator[None]:
        """What happens within costs little memory, and afterwards, too, a round goes well."""
        before = self.process.memory()
        yield
        self.honest_round()
        grown = self.process.memory() - before
        assert grown < GROWTH_BYTES, f"the coordinator has grown by {grown / MB:.0f} MB"


async def ready(silo: Silo, bundle: PlanBundle) -> Train | None:
    """The silo attends and is ready; its order to train, if it has one already."""
    silo.attend()
    async with asyncio.timeout(PATIENCE_S):
        while silo.standing is None:
            await asyncio.sleep(0.01)
    if isinstance(silo.standing, Train):
        return silo.standing
    if isinstance(silo.standing, Prepare):
        request = federation_pb2.ReadinessRequest(key=silo.key(bundle.plan.digest), ready=True)
        await silo.stub.DeclareReadiness(request)
    return None


@contextmanager
def serving(template: FederationTemplate, root: Path, **schedule: object) -> Iterator[Victim]:
    folder = template.copy(root / "coordinator")

    async def enrol_clinic() -> SiloCredentials:
        async with running(folder) as at:
            return await at.enrolled(CLINIC)

    silos = {**template.silos, CLINIC: asyncio.run(enrol_clinic())}
    coordinator = Coordinator.load(CoordinatorFolder(folder.root))
    values = {
        "schedule.rounds": 1000,
        "schedule.min_silos": 2,
        "schedule.start_when_ready": True,
        "evaluation.every": 0,
        "evaluation.initial": False,
        "evaluation.last": False,
        **{f"schedule.{key}": value for key, value in schedule.items()},
    }
    create_plan(coordinator.shelf.plans, name=PLAN, federation=FEDERATION, source=SizedModel("tiny"), overrides=values)
    attacker = silos[HOSPITAL]
    process = Process(
        root / "coordinator.log",
        *("lorica_coordinator.cli", "serve", "--dir", str(folder.root), "--plan", PLAN),
        before=few_open_files,
    )
    try:
        process.until(lambda: accepts(address(coordinator.settings.listen.metrics).port))  # the last to listen
        victim = Victim(
            process=process,
            coordinator=coordinator,
            bundle=coordinator.shelf.compile(PLAN),
            silos=silos,
            context=client_context(attacker.tls_key_pem, attacker.certificate_pem, root),
        )
        victim.honest_round()  # whatever a first round costs is no attack's doing
        yield victim
    finally:
        process.end()


def few_open_files() -> None:
    """As most systems start a process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


@pytest.fixture(scope="module")
def victim(federation_template: FederationTemplate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with serving(federation_template, tmp_path_factory.mktemp("victim"), gathering_deadline_s=0.5) as victim:
        yield victim


def closed_by_peer(sockets: list[socket.socket], longest_s: float) -> int:
    """How many of them the other side has ended, once all are or the time is over."""
    poll = select.poll()
    open_ones = {item.fileno(): item for item in sockets}
    for item in sockets:
        item.setblocking(False)
        poll.register(item, select.POLLIN)
    deadline = time.monotonic() + longest_s
    while open_ones and time.monotonic() < deadline:
        for fd, _ in poll.poll(200):
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                try:
                    ended = open_ones[fd].recv(4096) == b""
                except OSError as error:
                    if isinstance(error, BlockingIOError | ssl.SSLWantReadError):
                        raise
                    ended = True
                if ended:
                    poll.unregister(fd)
                    del open_ones[fd]
    return len(sockets) - len(open_ones)


@pytest.mark.slow
def test_1100_connections_that_never_speak_and_a_request_that_never_ends(victim: Victim) -> None:
    """More connections than the 1024 files that the process was started with; and slow-loris, a byte now and then."""
    unfinished = 'lorica_errors_total{kind="Unreachable"}'
    refused = victim.metric(unfinished)
    with victim.spared(), ExitStack() as stack, victim.attacked(1) as (connection,):
        stream, request = connection.open("DeclineRound"), grpc_message(1000, bytes(900))
        before = victim.process.open_files()
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", victim.port))) for _ in range(1100)]
        victim.process.until(lambda: victim.process.open_files() > 1100)
        victim.honest_round()
        deadline = time.monotonic() + LONG_S
        while stream not in connection.ended:
            assert time.monotonic() < deadline
            request = request[connection.send(stream, request[:1]) :]
            connection.read(0.5)
        assert closed_by_peer(silent, LONG_S) == 1100
        victim.process.until(lambda: victim.process.open_files() < before + 100)
    assert victim.metric(unfinished) == refused + 1


def test_1000_connections_without_a_certificate(victim: Victim) -> None:
    context = nobody()
    with victim.spared(), ExitStack() as stack:
        connections: list[socket.socket] = []
        for _ in range(1000):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", victim.port), PATIENCE_S))
            connections.append(stack.enter_context(context.wrap_socket(plain)))
        victim.honest_round()
        assert closed_by_peer(connections, LONG_S) == 1000


def opened(
    connections: list[RawConnection], method: str, message: bytes, service: str = "Federation"
) -> dict[tuple[int, int], memoryview]:
    """32 new streams on each, all that gRPC lets a connection have, and for each what is to be pushed: `message`."""
    return {
        (number, connection.open(method, service)): memoryview(message)
        for number, connection in enumerate(connections)
        for _ in range(32)
    }


def push(connections: list[RawConnection], sending: dict[tuple[int, int], memoryview]) -> None:
    """Send all that the windows of these (connection, stream) let through, until nothing has moved for a while.

    The while is a second at 8 connections, longer than a slow disk's log of refusals keeps the server from the next
    ones.
    """
    quiet = 0
    while quiet < 12:
        moved = False
        for connection in connections:
            while connection.read(0.01):
                moved = True
        for (number, stream), data in sending.items():
            connection = connections[number]
            at = 0
            while stream not in connection.ended and (sent := connection.send(stream, bytes(data[at : at + 16_384]))):
                at += sent
            sending[number, stream] = data[at:]
            moved = moved or at > 0
        quiet = 0 if moved else quiet + 1


@pytest.mark.parametrize("method", ["UploadUpdate", "Attend", "ReportProgress"])
def test_streams_with_all_but_the_last_byte_of_a_message(victim: Victim, method: str) -> None:
    """8 connections of 32 streams, 5 MiB on each, would be 1.3 GB; and what is not read is sent on and on."""
    unfinished = grpc_message(MESSAGE_BYTES, bytes(MESSAGE_BYTES - 1))
    with victim.spared(), victim.attacked(8) as connections:
        push(connections, opened(connections, method, unfinished))
        refused = sum(len(connection.ended) for connection in connections)
        assert refused == 8 * 32 - OF_ONE_CALLER.calls
        victim.honest_round()


def test_streams_that_are_flooded_and_never_read(victim: Victim) -> None:
    """Six requests of one silo are read at a time; what it piles up on its other streams stays in its own memory."""
    flood = memoryview(grpc_message(1 << 20, bytes(1 << 20)) * 64)
    with victim.spared(), victim.attacked(1) as (connection,):
        stalled = {
            (0, connection.open("UploadUpdate")): memoryview(grpc_message(MESSAGE_BYTES, b"\0"))
            for _ in range(OF_ONE_CALLER.requests)
        }
        push([connection], stalled)
        waiting = {(0, connection.open("UploadUpdate")): flood for _ in range(6)}
        push([connection], waiting)
        taken = [len(flood) - len(rest) for rest in waiting.values()]
        assert max(taken) < 8 << 20
        victim.honest_round()


def test_downloads_that_nobody_reads(victim: Victim) -> None:
    """The plan and the model on every stream that hospital-a can have, and not one byte is taken off the line."""
    with victim.spared(), victim.attacked(8) as connections:
        key = common_codec.call_key(federation=FEDERATION, silo=HOSPITAL, plan=victim.bundle.plan.digest)
        model = asyncio.run(victim.present_model())
        plan = federation_pb2.FetchPlanRequest(key=key).SerializeToString()
        fetch = federation_pb2.FetchModelRequest(key=key, model_digest=model).SerializeToString()
        for connection in connections:
            for method, request in (("FetchPlan", plan), ("FetchModel", fetch)) * 16:
                stream = connection.open(method)
                assert connection.send(stream, grpc_message(len(request), request))
        victim.honest_round()


def test_streams_that_are_opened_and_reset_at_once(victim: Victim) -> None:
    """CVE-2023-44487: a stream costs the attacker two frames, and must not cost the coordinator more than a moment."""
    with victim.spared(), victim.attacked(2) as connections:
        for connection in connections:
            with suppress(Gone, OSError):  # the server may well end such a connection
                for _ in range(5000):
                    connection.reset(connection.open("Attend"))
        victim.honest_round()


def test_strangers_who_fill_the_enrolment_port(victim: Victim) -> None:
    """Nobody on it is known, so all share one limit; when they are gone, who was invited gets in."""
    token = asyncio.run(victim.invite("newcomer"))
    victim.process.until(lambda: accepts(token.port))
    unfinished = grpc_message(MESSAGE_BYTES, bytes(MESSAGE_BYTES - 1))
    with victim.spared():
        with ExitStack() as stack:
            connections = [stack.enter_context(raw_connection(token.port, nobody())) for _ in range(8)]
            push(connections, opened(connections, "Enrol", unfinished, "Enrolment"))
            refused = sum(len(connection.ended) for connection in connections)
            assert refused == 8 * 32 - OF_ALL_STRANGERS.calls
            victim.honest_round()
        enrolled = asyncio.run(enrol(token, now=datetime.now(UTC), agent_version="test"))
        assert enrolled.silo == "newcomer"


def test_connections_that_call_nothing(victim: Victim) -> None:
    with victim.spared(), victim.attacked(300):
        victim.honest_round()


async def test_silo_that_stalls_in_mid_upload_holds_nobody_up_and_is_dropped_at_the_deadline(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lorica_coordinator.edges.server.federation_servicer.Places", partial(Places, 1)
    )  # it has the only one
    folder = federation_template.copy(tmp_path / "coordinator")
    values = {**PLAN_VALUES, "evaluation.every": 0, "evaluation.last": False, "schedule.training_deadline_s": 12.0}
    shelf = Coordinator.load(folder).shelf
    create_plan(shelf.plans, name=PLAN, federation=FEDERATION, source=SizedModel("micro"), overrides=values)
    async with (
        running(folder, offer=PLAN) as at,
        Silo(at, federation_template.silos[HOSPITAL]) as hospital,
        Silo(at, federation_template.silos[BANK]) as bank,
    ):
        bundle = at.coordinator.shelf.compile(PLAN)
        for silo in (hospital, bank):
            await silo.join(bundle.plan.digest)
        order = await hospital.order(Train, 1)
        update = hospital.update(order, bundle.layout)
        call = hospital.stub.UploadUpdate()
        await call.write(header_piece(updates_codec.update_header_to_wire(update.header, HOSPITAL)))
        await call.initial_metadata()
        await call.write(chunk_pieces(update.chunks)[0])
        await bank.upload(bank.update(await bank.order(Train, 1), bundle.layout))
        standby = await bank.order(Standby)
        assert standby.reason is StandbyReason.UPDATE_RECEIVED  # its part is done while the other one stalls
        order = await bank.order(Train, 2)  # the deadline has passed
        (first, _) = at.saved()[1]  # type: ignore[misc]
        assert (first.outcome, first.attempt) == ("applied", 1)
        assert {silo.silo: silo.outcome for silo in first.silos} == {BANK: "committed", HOSPITAL: "late"}
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(chunk_pieces(update.chunks)[1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert "wait for the next order" in (caught.value.details() or "")
        assert not list((folder.root / "state" / "spools").rglob(f"1-1/{HOSPITAL}*"))
        await hospital.order(Train, 2)  # dropped for the round, not for good


# --- the agent under attack ------------------------------------------------------------------------------------------

NET = TestNet.create()
Pieces = Callable[[OfferedModel, int], AsyncIterator[federation_pb2.ModelPiece]]
"""What FetchModel sends for a model from a chunk on."""


class HostileCoordinator(FederationPeer):
    """Honest but for `pieces` in place of a model, a `flood` of orders, and readiness that it does not listen to."""

    def __init__(self) -> None:
        super().__init__(NET)
        self.pieces: Pieces | None = None
        self.flood: list[federation_pb2.Notice] = []
        self.poured = 0
        self.listens = asyncio.Event()
        self.listens.set()

    async def FetchModel(  # noqa: N802
        self, request: federation_pb2.FetchModelRequest, context: Any
    ) -> AsyncIterator[federation_pb2.ModelPiece]:
        if self.pieces is None:
            async for piece in super().FetchModel(request, context):
                yield piece
            return
        model = self.models[digest_from_wire(request.model_digest, "model")]
        async for piece in self.pieces(model, request.first_chunk):
            yield piece

    async def Attend(  # noqa: N802
        self, request: federation_pb2.AttendRequest, context: Any
    ) -> AsyncIterator[federation_pb2.Notice]:
        async for notice in super().Attend(request, context):
            yield notice
            while self.flood:
                yield self.flood[self.poured % len(self.flood)]
                self.poured += 1

    async def DeclareReadiness(  # noqa: N802
        self, request: federation_pb2.ReadinessRequest, context: Any
    ) -> federation_pb2.Ack:
        await self.listens.wait()
        return await super().DeclareReadiness(request, context)


def header_of(model: OfferedModel) -> federation_pb2.ModelPiece:
    return federation_pb2.ModelPiece(header=updates_codec.model_header_to_wire(model.header))


def chunk_of(model: OfferedModel, index: int, *, size: int | None = None) -> federation_pb2.ModelPiece:
    """Chunk `index` as it is, or with `size` bytes of nothing in its place."""
    at = index * model.header.manifest.chunk_bytes
    data = model.data[at : at + model.header.manifest.chunk_bytes] if size is None else bytes(size)
    return federation_pb2.ModelPiece(chunk=common_pb2.Chunk(index=index, data=data))


async def manifest_of_a_tebibyte(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    header = header_of(model)
    header.header.manifest.total_bytes = 1 << 40
    header.header.manifest.chunk_bytes = 4 << 20
    header.header.manifest.chunk_digests.extend([b"\0" * 32] * (100_000 - model.header.manifest.chunks))
    yield header


async def manifest_beyond_any_message(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    header = header_of(model)
    header.header.manifest.total_bytes = 1 << 40
    header.header.manifest.chunk_bytes = 4 << 20
    header.header.manifest.chunk_digests[:] = [b"\0" * 32] * (1 << 18)
    yield header


async def chunks_out_of_order(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    yield header_of(model)
    for index in (first, first + 2, first + 1):
        yield chunk_of(model, index)


async def one_chunk_again_and_again(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    yield header_of(model)
    while True:
        yield chunk_of(model, first)


async def chunks_of_5_megabytes_for_1_kilobyte(
    model: OfferedModel, first: int
) -> AsyncIterator[federation_pb2.ModelPiece]:
    yield header_of(model)
    for index in range(first, model.header.manifest.chunks):
        yield chunk_of(model, index, size=5 * MB)


async def headers_without_end(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    while True:
        yield header_of(model)


async def chunks_before_any_header(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    while True:
        yield chunk_of(model, 0)


async def empty_chunks(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
    yield header_of(model)
    while True:
        yield chunk_of(model, first, size=0)


ATTACKS_ON_A_DOWNLOAD: dict[str, tuple[Pieces, str]] = {
    "no-header": (chunks_before_any_header, "before its header"),  # first: afterwards it is known
    "tebibyte": (manifest_of_a_tebibyte, "chunk digests, its sizes ask for"),
    "beyond-any-message": (manifest_beyond_any_message, "larger than max"),
    "out-of-order": (chunks_out_of_order, "model chunk 2 came where 1 was due"),
    "again-and-again": (one_chunk_again_and_again, "model chunk 1 came where 2 was due"),
    "oversized": (chunks_of_5_megabytes_for_1_kilobyte, "has 5000000 bytes, its manifest says"),
    "endless-headers": (headers_without_end, "a second time"),
    "empty": (empty_chunks, "chunk 2 has 0 bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A real `silo-agent start`, prepared under a plan around a tiny T5, and the coordinator that it talks to."""

    process: Process
    folder: SiloFolder
    coordinator: HostileCoordinator
    plan: Digest
    model: OfferedModel

    def key(self, attempt: int) -> RoundKey:
        return RoundKey(federation=federation_peer.FEDERATION, plan=self.plan, round=1, attempt=attempt)

    def train(self, attempt: int) -> Train:
        return Train(key=self.key(attempt), model=self.model.digest, seconds_left=600.0)

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.root.rglob("*") if path.is_file())

    @asynccontextmanager
    async def spared(self) -> AsyncIterator[None]:
        """What happens within costs little memory and disk, and the agent still obeys afterwards."""
        memory, disk = self.process.memory(), self.disk_bytes()
        yield
        said = len(self.coordinator.readiness)
        await self.coordinator.order(Standby(StandbyReason.NO_PLAN))
        await self.coordinator.order(Prepare(self.plan))
        await self.coordinator.until(lambda: len(self.coordinator.readiness) > said, within_s=LONG_S)
        grown = self.process.memory() - memory
        assert grown < GROWTH_BYTES, f"the agent has grown by {grown / MB:.0f} MB"
        assert self.disk_bytes() - disk < 10 * MB


@asynccontextmanager
async def agent_at_work(root: Path) -> AsyncIterator[Agent]:
    model = random_model()
    bundle = bundle_of(model)
    data = b"".join(bytes(block) for block in vector_blocks(bind(model, bundle.layout)))
    folder = SiloFolder(root / "silo")
    async with HostileCoordinator() as coordinator:
        offered = coordinator.offer(bundle, data, chunk_bytes=1024)
        store_credentials(folder, NET.credentials(coordinator.address))
        await coordinator.order(Prepare(bundle.plan.digest))
        arguments = ("silo_agent.cli", "start", "--dir", str(folder.root), "--data", str(data_folder(root / "data")))
        process = Process(root / "agent.log", *arguments)
        try:
            await coordinator.until(lambda: len(coordinator.readiness) == 1, within_s=LONG_S)
            yield Agent(process=process, folder=folder, coordinator=coordinator, plan=bundle.plan.digest, model=offered)
        finally:
            await asyncio.to_thread(process.end)


@pytest.mark.slow
async def test_agent_and_a_coordinator_that_sends_no_honest_model(tmp_path: Path) -> None:
    """Each attack is refused, told and forgotten; the drip, which breaks no rule, ends when another order comes."""
    async with agent_at_work(tmp_path) as agent:
        coordinator = agent.coordinator
        for attempt, (name, (pieces, told)) in enumerate(ATTACKS_ON_A_DOWNLOAD.items(), 1):
            async with agent.spared():
                coordinator.pieces = pieces
                await coordinator.order(agent.train(attempt))
                await coordinator.until(lambda done=attempt: len(coordinator.declined) == done, within_s=LONG_S)  # type: ignore[misc]
                key, reason, detail = coordinator.declined[-1]
                assert (key, reason) == (agent.key(attempt), DeclineReason.INTEGRITY), name
                assert told in detail, f"{name}: {detail}"

        dripping = asyncio.Event()

        async def drip(model: OfferedModel, first: int) -> AsyncIterator[federation_pb2.ModelPiece]:
            yield header_of(model)
            yield chunk_of(model, first)
            dripping.set()
            await asyncio.Event().wait()

        async with agent.spared():
            coordinator.pieces = drip
            await coordinator.order(agent.train(99))
            async with asyncio.timeout(LONG_S):
                await dripping.wait()


async def test_agent_and_a_coordinator_that_never_stops_talking(tmp_path: Path) -> None:
    """A plan without end is refused; orders without end, each of which makes the agent say something, are taken only as
    long as somebody listens to what it says."""
    async with agent_at_work(tmp_path) as agent:
        coordinator = agent.coordinator
        async with agent.spared():
            coordinator.endless_bundle = True
            said = len(coordinator.readiness)
            await coordinator.order(Prepare(Digest("ab" * 32)))
            await coordinator.until(lambda: len(coordinator.readiness) > said, within_s=LONG_S)
            assert "more than the" in coordinator.readiness[-1][2]
            coordinator.endless_bundle = False

        async with agent.spared():
            coordinator.listens.clear()
            coordinator.flood = [
                orders_codec.order_to_wire(order, federation_peer.SILO)
                for order in (Prepare(agent.plan), Standby(StandbyReason.NO_PLAN, "x" * 500))
            ]
            await coordinator.order(Standby(StandbyReason.NO_PLAN))
            async with asyncio.timeout(LONG_S):
                before = -1
                while coordinator.poured > before:  # until the line is full and nobody empties it
                    before = coordinator.poured
                    await asyncio.sleep(1)
            assert before > 1000
            coordinator.flood = []
            coordinator.listens.set()
