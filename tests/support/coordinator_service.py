"""The coordinator's service on real storage and keys in a folder, and silos that do by hand what agents do."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client import CollectorRegistry

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.plan_parts import model_store
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.plans.plan_folder import PLAN_FILE
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_coordinator.plans.plan_text import plan_text
from lorica_coordinator.rounds.events import DeadlinePassed
from lorica_coordinator.rounds.states import State
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.members.enrolment import Issued
from lorica_coordinator.service.ports import PlanParts
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import WrongTime
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity import identity_key
from lorica_security.identity.endorsement import endorse_request
from lorica_security.identity.enrolment_token import decode
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.tls_key import new_tls_key
from silo_wire.canonical import Digest
from silo_wire.codecs.chunk_piece import ChunkPiece, reader
from silo_wire.codecs.update_receipt import coordinator_uri, silo_uri
from silo_wire.manifest import manifest_of
from silo_wire.messages import (
    Evaluate,
    Evaluation,
    Finished,
    Order,
    Prepare,
    RoundKey,
    Train,
    TrainingSummary,
    UpdateHeader,
)
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.statements import UPDATE_DOMAIN, update_statement
from silo_wire.v1 import federation_pb2
from tests.support.coordinator_edges import CHUNK_BYTES, chunk_of, make_plan, random_vector, travelling

FEDERATION = FederationName("health-net")
NO_PLAN = Digest("")
_READ = reader(federation_pb2.ModelPiece)


@dataclass
class AdjustableClock:
    """The real clock, set by hand: `ahead` of the right one, or behind it. `steady` is the one that nobody sets."""

    ahead: float = 0.0
    right: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic

    def __call__(self) -> float:
        return self.right() + self.ahead


def make_coordinator_folder(folder: Path) -> None:
    """Keys, and a plan folder `first` with a micro model."""
    KeyStore.create(folder / "keys", FEDERATION, datetime.now(UTC))
    make_plan(folder)


def add_plan(folder: Path, name: str, **sections: Any) -> Plan:
    """Another plan with the model of `first`; `sections` replace values of the plan's sections."""
    shutil.copytree(folder / "plans" / "first", folder / "plans" / name, dirs_exist_ok=True)
    values = Plan.from_toml((folder / "plans" / "first" / PLAN_FILE).read_text(), "first").model_dump()
    for section, changes in sections.items():
        values[section] = {**values[section], **changes} if isinstance(changes, dict) else changes
    plan = Plan.model_validate({**values, "name": name})
    (folder / "plans" / name / PLAN_FILE).write_text(plan_text(plan))
    return plan


def load_keys(folder: Path) -> KeyStore:
    return KeyStore.load(
        folder / "keys",
        hosts=("coordinator.example",),
        enrolment_host="coordinator.example",
        enrolment_port=7444,
        silo_certificate_lifetime=timedelta(days=7),
        own_certificate_lifetime=timedelta(days=30),
    )


@dataclass
class Running:
    """A coordinator's service at work on `folder`."""

    service: Federation
    store: SqlRoundStore
    metrics: CoordinatorMetrics
    folder: Path
    clock: AdjustableClock

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no metric {name} {labels}"
        return value

    async def reaches(self, condition: Callable[[State], bool]) -> None:
        """Return when the round machine's state fulfils `condition`."""
        loop = self.service._loop
        changed = asyncio.Event()
        loop.on_change.append(changed.set)
        while not condition(loop.state):
            changed.clear()
            await changed.wait()
        loop.on_change.remove(changed.set)

    async def settled(self) -> None:
        """Return when all that follows from what has happened is done: events are taken one at a time."""
        with suppress(WrongTime):
            await self.service._loop.post(DeadlinePassed(now=0.0, deadline=0.0))

    async def enrolled(self, name: str) -> "SiloStandIn":
        """Invite and enrol a new silo."""
        token, _ = await self.service.enrolment.invite(name, 3600)
        silo = SiloStandIn(SiloName(name))
        await silo.enrol(self.service, token)
        return silo


@asynccontextmanager
async def running(
    folder: Path,
    *,
    clock: AdjustableClock | None = None,
    store: SqlRoundStore | None = None,
    kept: KeptFiles = FOLDER_ALONE,
    spool_keys: SpoolKeys | None = None,
) -> AsyncIterator[Running]:
    """Start the service on whatever state `folder` holds, or `store`; stopped at the end, as by a signal."""
    clock = clock or AdjustableClock()
    store = store or SqlRoundStore(folder / "state.sqlite", FEDERATION)
    spools = Spools(folder / "spools", keys=spool_keys, kept=kept)
    metrics = CoordinatorMetrics(CollectorRegistry())
    keys = load_keys(folder)

    def open_plan(bundle: PlanBundle) -> PlanParts:
        models = model_store(folder, bundle, kept)
        aggregator = Aggregator(
            bundle.plan.aggregation,
            models=models,
            spools=spools,
            update_dtype=bundle.plan.wire.update,
            device=torch.device("cpu"),
            training=bundle.plan.training,
            privacy=bundle.plan.privacy,
            releases=ReleaseLedger(folder / "privacy"),
        )
        evidence = RoundEvidence(
            folder / "models" / bundle.plan.digest,
            federation=FEDERATION,
            plan=bundle.plan.digest,
            models=models,
            spools=spools,
            kept=kept,
        )
        return PlanParts(models=models, base=None, aggregator=aggregator, evidence=evidence)

    service = Federation(
        federation=FEDERATION,
        store=store,
        shelf=PlanShelf(folder, kept),
        open_plan=open_plan,
        spools=spools,
        keys=keys,
        audit=AuditLog(folder / "audit", writer=coordinator_uri(FEDERATION), key=keys.identity, clock=clock),
        observer=metrics,
        clock=clock,
        steady=clock.steady,
        retry_s=0.05,
    )
    await service.start()
    work = asyncio.create_task(service.run())
    try:
        yield Running(service, store, metrics, folder, clock)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await service.end()
        store.close()


@dataclass
class SiloStandIn:
    """Does what an agent does, with real keys and a drawn delta in place of training."""

    name: SiloName
    identity: Ed25519PrivateKey = field(default_factory=identity_key.new_identity_key)
    instance: bytes = b"i" * 16
    examples: int = 10
    loss_max: float = 3.0
    loss_min: float = 1.0
    exact_matches: int = 4

    async def enrol(self, service: Federation, token: str, *, name_in_request: str = "") -> Issued:
        parsed = decode(token)
        identity = Identity(FEDERATION, Role.SILO, name_in_request or self.name)
        request = certificate_request(new_tls_key(), identity)
        return await service.enrolment.enrol(
            self.name,
            token_secret=parsed.secret,
            csr_der=request,
            identity_public_key=identity_key.public_key_bytes(self.identity.public_key()),
            identity_endorsement=endorse_request(self.identity, request=request, identity=identity),
            trust=bytes(32),
        )

    def summary(self) -> TrainingSummary:
        return TrainingSummary(
            examples=self.examples,
            loss_max=self.loss_max,
            loss_min=self.loss_min,
            loss_first=self.loss_max,
            loss_last=self.loss_min,
            optimizer_steps=3,
            seconds=0.5,
        )

    def delta(self, bundle: PlanBundle, round_number: int) -> bytes:
        """In the plan's type for updates."""
        seed = sum(self.name.encode()) * 100 + round_number
        return travelling(random_vector(bundle.layout, seed), bundle.plan.wire.update)

    def header(
        self, key: RoundKey, model: Digest, bundle: PlanBundle, delta: bytes, *, first_chunk: int = 0
    ) -> UpdateHeader:
        layout = bundle.update_layout
        manifest = manifest_of(layout, [delta], CHUNK_BYTES - CHUNK_BYTES % layout.unit_bytes)
        statement = update_statement(
            key=key, silo=self.name, model=model, update=manifest.digest, summary=self.summary()
        )
        return UpdateHeader(
            key=key,
            model=model,
            manifest=manifest,
            summary=self.summary(),
            signature=identity_key.sign(self.identity, domain=UPDATE_DOMAIN.encode(), payload=statement),
            first_chunk=first_chunk,
            log=SignedHead.sign(self.identity, writer=silo_uri(FEDERATION, self.name), head=Head()),
        )

    async def upload(self, service: Federation, header: UpdateHeader, delta: bytes) -> Digest:
        upload = await service.begin_update(self.name, header)
        try:
            for index in range(header.first_chunk, header.manifest.chunks):
                await upload.write(index, chunk_of(header, delta, index))
            return (await upload.commit()).update
        finally:
            await upload.close()

    async def do(self, service: Federation, order: Order) -> None:
        """What an honest agent does at once with this order."""
        match order:
            case Prepare(plan):
                PlanBundle.decode(await service.plan_bundle(plan), plan)
                await service.declare_readiness(self.name, plan, ready=True)
            case Train(key=key, model=model):
                bundle = PlanBundle.decode(await service.plan_bundle(key.plan), key.plan)
                source = await service.model(key.plan, model)
                for index in range(source.header.manifest.chunks):
                    piece = _READ(await source.piece(index))
                    assert isinstance(piece, ChunkPiece)
                    source.header.manifest.check_chunk(index, piece.data)
                delta = self.delta(bundle, key.round)
                await self.upload(service, self.header(key, model, bundle, delta), delta)
            case Evaluate(key=key, model=model):
                await service.report_evaluation(self.name, key, model, self.evaluation())

    def evaluation(self) -> Evaluation:
        return Evaluation(
            split="dev",
            examples=10,
            exact_matches=self.exact_matches,
            executed=0,
            execution_matches=0,
            loss_per_token=1.0,
            seconds=0.1,
        )

    async def work(
        self, service: Federation, *, until: Callable[[Order], bool] = lambda order: isinstance(order, Finished)
    ) -> list[Order]:
        """Attend and do every order; return the orders, at the first for which `until` holds, not done any more."""
        seen: list[Order] = []
        async with aclosing(service.attend(self.name, self.instance, NO_PLAN)) as orders:
            async for order in orders:
                seen.append(order)
                if until(order):
                    break
                await self.do(service, order)
        return seen
