"""A real coordinator in the test's own process: real folder, real listeners on loopback, real certificates.

`federation_template` is made once per session: an initialised folder with two silos enrolled through the enrolment
listener and the plan `default` around a micro T5. Tests serve copies of it, each on ports of its own.
"""

import asyncio
import hashlib
import shutil
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from lorica.demo.ports import free_ports
from lorica_coordinator.composition import Serving, serving
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import State
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.settings import settings_text
from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import LoricaError
from lorica_security.host import ballast, files
from lorica_security.identifiers import FederationName, SiloName, coordinator_dns_name
from lorica_security.identity.enrolment_token import EnrolmentToken, decode
from lorica_security.identity.identity_key import sign
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.wire.enrolment_client import enrol
from silo_wire.canonical import Digest
from silo_wire.codecs import common_codec, orders_codec, updates_codec
from silo_wire.manifest import Layout, Manifest, manifest_of
from silo_wire.messages import Order, RoundKey, Train, TrainingSummary, UpdateHeader
from silo_wire.statements import UPDATE_DOMAIN, update_statement
from silo_wire.transport import CHANNEL_OPTIONS, answer_to, error_of
from silo_wire.v1 import common_pb2, federation_pb2, federation_pb2_grpc, operator_pb2_grpc
from silo_wire.wire_version import OURS

FEDERATION = FederationName("test-net")
HOSPITAL = SiloName("hospital-a")
BANK = SiloName("bank-b")
PATIENCE_S = 60.0
CHUNK_BYTES = 1 << 14
PLAN = "default"
PLAN_VALUES: dict[str, object] = {
    "schedule.rounds": 2,
    "schedule.min_silos": 1,
    "schedule.start_when_ready": True,
    "schedule.gathering_deadline_s": 600.0,
    "schedule.training_deadline_s": 600.0,
    "schedule.evaluation_deadline_s": 600.0,
    "evaluation.initial": False,
    "evaluation.every": 1,
}

OrderT = TypeVar("OrderT")


# --- the folder ---------------------------------------------------------------------------------------------------


def initialise(root: Path, federation: FederationName = FEDERATION) -> CoordinatorFolder:
    """A new coordinator's folder, as `coordinator init` makes it but for its ports and without a plan."""
    folder = CoordinatorFolder(root)
    files.make_private_folder(root)
    KeyStore.create(folder.keys, federation, datetime.now(UTC))
    choose_ports(folder, federation)
    return folder


def choose_ports(folder: CoordinatorFolder, federation: FederationName = FEDERATION) -> None:
    """Write federation.toml with ports that are free now, all on loopback."""
    silos, enrolment, metrics = free_ports(3)
    text = settings_text(
        federation,
        ["127.0.0.1"],
        silos_port=silos,
        enrolment_port=enrolment,
        metrics_port=metrics,
        status_port=0,
    )
    files.replace(folder.settings, text.replace("0.0.0.0", "127.0.0.1").encode())


def contents_of(root: Path) -> dict[str, str]:
    """Every file below `root` with the digest of its content, but for locks and ballast: to see that nothing was
    harmed."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name != ballast.NAME
    }


@dataclass(frozen=True, slots=True)
class FederationTemplate:
    """`folder` is copied, never served; `silos` are enrolled in it."""

    folder: Path
    silos: dict[SiloName, SiloCredentials]

    def copy(self, root: Path) -> CoordinatorFolder:
        shutil.copytree(self.folder, root)
        folder = CoordinatorFolder(root)
        choose_ports(folder)
        return folder


@pytest.fixture(scope="session")
def federation_template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    return make_template(tmp_path_factory.mktemp("template") / "coordinator")


def make_template(root: Path) -> FederationTemplate:
    from lorica_coordinator.plans.model_source import SizedModel
    from lorica_coordinator.plans.plan_folder import create_plan

    folder = initialise(root)
    create_plan(
        Coordinator.load(folder).shelf.plans,
        name=PLAN,
        federation=FEDERATION,
        source=SizedModel("micro"),
        overrides=PLAN_VALUES,
    )

    async def enrol_both() -> dict[SiloName, SiloCredentials]:
        async with running(folder) as coordinator:
            return {silo: await coordinator.enrolled(silo) for silo in (HOSPITAL, BANK)}

    return FederationTemplate(root, asyncio.run(enrol_both()))


# --- the coordinator at work --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Clock:
    """Wall-clock time, and `ahead` seconds more."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCoordinator:
    coordinator: Coordinator
    metrics: CoordinatorMetrics
    clock: Clock
    serving: Serving

    @property
    def service(self) -> Federation:
        return self.serving.service

    @property
    def silos_port(self) -> int:
        return self.coordinator.settings.public_silos_port

    @property
    def enrolment_port(self) -> int:
        return self.coordinator.settings.public_enrolment_port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.silos_port}"

    def errors(self, kind: str) -> float:
        """The counter lorica_errors_total of this kind, as Prometheus reads it."""
        value = self.metrics.registry.get_sample_value("lorica_errors_total", {"kind": kind})
        assert value is not None, f"no counter for {kind}: it must exist from the start"
        return value

    def saved(self) -> tuple[State, object, object]:
        """What a restart would find: the machine's state, the rounds of its plan, the enrolled silos."""
        store = self.coordinator.open_store()
        try:
            state = store.load()
            course = getattr(state, "course", None)
            rounds = () if course is None else store.rounds(course.terms.plan, 0)
            return state, rounds, [replace(silo, last_seen_unix_s=0.0) for silo in store.silos()]
        finally:
            store.close()

    async def invited(self, silo: str, valid_seconds: int = 3600) -> EnrolmentToken:
        """A token, once the enrolment listener takes it."""
        text, expires = await self.service.enrolment.invite(silo, valid_seconds)
        await self.service.enrolment.until_listening(expires)
        return decode(text)

    async def enrolled(self, silo: str) -> SiloCredentials:
        return await enrol(await self.invited(silo), now=datetime.now(UTC), agent_version="test")

    def channel(self, *, key_pem: bytes | None, certificate_pem: bytes | None) -> grpc.aio.Channel:
        """To the mutually authenticated listener, with any key and certificate, or none."""
        roots = self.coordinator.keys.trust.to_pem()
        return channel_to(self.address, roots, key_pem=key_pem, certificate_pem=certificate_pem)

    @asynccontextmanager
    async def operator(self) -> AsyncIterator["operator_pb2_grpc.OperatorAsyncStub"]:
        pair = self.coordinator.keys.present_operator_pair()
        async with self.channel(key_pem=pair.key_pem, certificate_pem=pair.certificate_pem) as channel:
            yield operator_pb2_grpc.OperatorStub(channel)


@asynccontextmanager
async def running(folder: CoordinatorFolder, *, offer: str = "") -> AsyncGenerator[RunningCoordinator, None]:
    """The coordinator of this folder with all its listeners."""
    coordinator = Coordinator.load(folder)
    metrics = CoordinatorMetrics(CollectorRegistry())
    clock = Clock()
    async with serving(coordinator, metrics, offer=offer, clock=clock) as at_work:
        yield RunningCoordinator(coordinator=coordinator, metrics=metrics, clock=clock, serving=at_work)


def channel_to(
    address: str, roots: bytes, *, key_pem: bytes | None = None, certificate_pem: bytes | None = None
) -> grpc.aio.Channel:
    options = [
        *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.enable_http_proxy"),
        ("grpc.enable_http_proxy", 0),
        ("grpc.ssl_target_name_override", coordinator_dns_name(FEDERATION)),
    ]
    tls = grpc.ssl_channel_credentials(roots, key_pem, certificate_pem)
    return grpc.aio.secure_channel(address, tls, options=options)


def accepts(port: int) -> bool:
    """Whether something listens on this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def until(holds: Any) -> None:
    """Until a condition outside this event loop's reach holds: a port, a file."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


# --- what a refusal must be ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Refusal:
    message: str = ""
    logs: list[Any] = field(default_factory=list)


@asynccontextmanager
async def refused(
    at: RunningCoordinator, kind: type[LoricaError], code: grpc.StatusCode, match: str
) -> AsyncIterator[Refusal]:
    """The calls within are refused with this error and status, counted, logged in one line, and harm nothing saved."""
    before, counted = at.saved(), at.errors(kind.__name__)
    refusal = Refusal()
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        yield refusal
    status = caught.value
    refusal.message, refusal.logs = status.details() or "", logs
    told = error_of(status)
    assert (type(told), status.code()) == (kind, code), f"{status.code()}: {status.details()}"
    assert match in refusal.message, refusal.message
    assert "\n" not in refusal.message
    assert at.errors(kind.__name__) == counted + 1
    warnings = [entry for entry in logs if entry["event"] == "call refused"]
    assert [(entry["kind"], entry["error"]) for entry in warnings] == [(kind.__name__, refusal.message)]
    assert at.saved() == before
    assert not at.serving.loop.done()


# --- a silo driven by hand ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HandMadeUpdate:
    """An update as it is sent: `pieces` may be tampered with before they go out."""

    header: UpdateHeader
    data: bytes

    @property
    def chunks(self) -> list[tuple[int, bytes]]:
        size = self.header.manifest.chunk_bytes
        return [(index, self.data[index * size : (index + 1) * size]) for index in range(self.header.manifest.chunks)]


class Silo:
    """A silo's calls, made one by one. `async with Silo(coordinator, credentials) as silo`."""

    def __init__(self, at: RunningCoordinator, credentials: SiloCredentials, *, instance: bytes = b"") -> None:
        self.at = at
        self.credentials = credentials
        self.instance = instance or credentials.silo.encode().ljust(16, b"\0")[:16]
        self.channel = at.channel(key_pem=credentials.tls_key_pem, certificate_pem=credentials.certificate_pem)
        self.stub: federation_pb2_grpc.FederationAsyncStub = federation_pb2_grpc.FederationStub(self.channel)
        self.standing: Order | None = None
        self._changed = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None

    @property
    def name(self) -> SiloName:
        return self.credentials.silo

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await self._reader
        await self.channel.close()

    def key(self, plan: Digest = common_codec.NO_DIGEST, round_number: int = 0, attempt: int = 0) -> common_pb2.CallKey:
        return common_codec.call_key(
            federation=FEDERATION, silo=self.name, plan=plan, round_number=round_number, attempt=attempt
        )

    def attend_request(self, **fields: Any) -> federation_pb2.AttendRequest:
        values: dict[str, Any] = {
            "key": self.key(),
            "wire_version": OURS.major,
            "wire_minor": OURS.minor,
            "agent_instance": self.instance,
            "agent_version": "test",
        }
        return federation_pb2.AttendRequest(**{**values, **fields})

    def attend(self) -> None:
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for notice in self.stub.Attend(self.attend_request()):
            async with self._changed:
                self.standing = orders_codec.order_from_wire(notice)
                self._changed.notify_all()

    async def order(self, kind: type[OrderT], round_number: int | None = None) -> OrderT:
        """The standing order, once it is of this kind (and round)."""

        def fits() -> bool:
            if self._reader is not None and self._reader.done():
                self._reader.result()
            key: RoundKey | None = getattr(self.standing, "key", None)
            return isinstance(self.standing, kind) and round_number in (None, key.round if key else None)

        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(fits)
        assert isinstance(self.standing, kind)
        return self.standing

    async def join(self, plan: Digest) -> None:
        """Attend and declare readiness."""
        from silo_wire.messages import Prepare

        self.attend()
        assert (await self.order(Prepare)).plan == plan
        await self.stub.DeclareReadiness(federation_pb2.ReadinessRequest(key=self.key(plan), ready=True))

    # --- updates

    def update(
        self,
        order: Train,
        layout: Layout,
        *,
        value: float = 0.01,
        data: bytes | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        summary: TrainingSummary | None = None,
        manifest: Manifest | None = None,
        identity_key: Any = None,
    ) -> HandMadeUpdate:
        """An update in which every element is `value`, signed by this silo unless another key is given."""
        content = vector(layout, value) if data is None else data
        manifest = manifest or manifest_of(layout, [content], chunk_bytes)
        header = UpdateHeader(
            key=order.key, model=order.model, manifest=manifest, summary=summary or SUMMARY, signature=b""
        )
        return HandMadeUpdate(header=self.signed(header, identity_key=identity_key), data=content)

    def signed(self, header: UpdateHeader, *, identity_key: Any = None) -> UpdateHeader:
        statement = update_statement(
            key=header.key,
            silo=self.name,
            model=header.model,
            update=header.manifest.digest,
            summary=header.summary,
        )
        key = identity_key or self.credentials.identity_key
        log = self.log_head()
        return replace(header, signature=sign(key, domain=UPDATE_DOMAIN.encode(), payload=statement), log=log)

    def log_head(self) -> SignedHead:
        """Of an audit log in which nothing stands yet."""
        return SignedHead.sign(self.credentials.identity_key, writer=self.credentials.identity.uri, head=Head())

    async def upload(self, update: HandMadeUpdate, chunks: list[tuple[int, bytes]] | None = None) -> bytes:
        """Send header and chunks and return the receipt's digest."""
        header = updates_codec.update_header_to_wire(update.header, self.name)
        return await self.send([header_piece(header), *chunk_pieces(update.chunks if chunks is None else chunks)])

    async def send(self, pieces: list[federation_pb2.UpdatePiece]) -> bytes:
        async def outgoing() -> AsyncIterator[federation_pb2.UpdatePiece]:
            for piece in pieces:
                yield piece

        receipt = await answer_to(self.stub.UploadUpdate(timeout=PATIENCE_S), outgoing())
        return bytes(receipt.update_digest)


SUMMARY = TrainingSummary(
    examples=100, loss_max=2.0, loss_min=1.5, loss_first=2.0, loss_last=1.5, optimizer_steps=10, seconds=1.0
)


def vector(layout: Layout, value: float) -> bytes:
    import numpy as np

    return np.full(layout.parameters, value, dtype="<f4").tobytes()


def header_piece(header: federation_pb2.UpdateHeader) -> federation_pb2.UpdatePiece:
    return federation_pb2.UpdatePiece(header=header)


def chunk_pieces(chunks: list[tuple[int, bytes]]) -> list[federation_pb2.UpdatePiece]:
    return [federation_pb2.UpdatePiece(chunk=common_pb2.Chunk(index=index, data=data)) for index, data in chunks]
