"""The coordinator as an agent sees it, in the same process: `CoordinatorPort` over its service, without a wire.

What an agent checks because a stranger sent it (certificates, signatures of models and receipts, digests of chunks on
their way) has nothing to hold against here. What decides a round is the service's own: it checks and signs each update
as it always does.
"""

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from lorica.simulation.hostile_silos import Conspiracy
from lorica.simulation.model_files import KeptModel
from lorica_coordinator.service.callers.silos import ModelSource
from lorica_coordinator.service.federation import Federation
from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import StorageError
from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.keys.signed_update import signed_header
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import Progress, RoundModel
from silo_wire.canonical import Digest
from silo_wire.codecs.chunk_piece import ChunkPiece, reader
from silo_wire.codecs.groups_codec import GroupsOffer
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.manifest import Layout, Manifest
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluation,
    Finished,
    MaskAnswer,
    MaskedHeader,
    Order,
    RoundKey,
    UpdateHeader,
)
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import federation_pb2

_NO_PLAN = Digest("")
_read = reader(federation_pb2.ModelPiece)


class SharedModels:
    """Round models as flat vectors in `folder`, once for all silos: the newest and the one before.

    `kept` is given each. What is there from a simulation that was killed is deleted: nobody asks for it under its name
    any more.
    """

    def __init__(self, folder: Path, kept: KeptModel) -> None:
        for old in folder.glob("*.model"):
            old.unlink(missing_ok=True)
        self._folder, self._kept = folder, kept
        self._held: dict[Digest, RoundModel] = {}
        self._plans: dict[Digest, PlanBundle] = {}
        self._lock = asyncio.Lock()

    def plan(self, raw: bytes, digest: Digest) -> PlanBundle:
        """As PlanBundle.decode, parsed for the first silo that asks: nothing changes a bundle."""
        if digest not in self._plans:
            self._plans[digest] = PlanBundle.decode(raw, digest)
        return self._plans[digest]

    async def model(self, source: ModelSource) -> RoundModel:
        digest = source.header.manifest.digest
        async with self._lock:
            if digest not in self._held:
                self._held[digest] = await self._fetched(source)
                self._kept.add(self._held[digest])
                for old in list(self._held)[:-2]:
                    self._held.pop(old).file.unlink(missing_ok=True)
        return self._held[digest]

    async def _fetched(self, source: ModelSource) -> RoundModel:
        manifest = source.header.manifest
        path = self._folder / f"{manifest.digest}.model"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with path.open("wb") as file, source.reading():
                for index in range(manifest.chunks):
                    piece = _read(await source.piece(index))
                    assert isinstance(piece, ChunkPiece)
                    await asyncio.to_thread(file.write, piece.data)
                file.flush()
                mark = FileMark.of(file.fileno())
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}; free some space") from error
        return RoundModel(file=path, manifest=manifest, mark=mark)


class DirectCoordinator:
    """For one silo. `refused` hears why this silo will not take part, or declined a round; `finished` that the plan has
    ended. `conspiracy`: where some silos are hostile, what this one sends passes through it."""

    def __init__(
        self,
        service: Federation,
        credentials: SiloCredentials,
        models: SharedModels,
        *,
        refused: Callable[[str], None],
        finished: Callable[[], None],
        conspiracy: Conspiracy | None = None,
    ) -> None:
        self._service = service
        self._who = credentials
        self._models = models
        self._refused = refused
        self._finished = finished
        self._conspiracy = conspiracy
        self._instance = secrets.token_bytes(16)

    async def orders(self) -> AsyncIterator[Order]:
        async with aclosing(self._service.attend(self._who.silo, self._instance, _NO_PLAN)) as orders:
            async for order in orders:
                yield order
                if isinstance(order, Finished):
                    self._finished()
        await asyncio.Event().wait()  # pragma: no cover  # the service ends a stream for a newer one of this silo alone

    async def fetch_plan(self, plan: Digest) -> PlanBundle:
        return self._models.plan(await self._service.plan_bundle(plan), plan)

    async def declare_readiness(self, plan: Digest, *, ready: bool, reason: str) -> None:
        await self._service.declare_readiness(self._who.silo, plan, ready=ready, reason=reason)
        if not ready:
            self._refused(reason)

    async def fetch_base(self, *, plan: Digest, layout: Layout, model: Digest, progress: Progress) -> RoundModel:
        return await self._models.model(await self._service.model(plan, model))

    async def fetch_model(
        self,
        *,
        plan: Digest,
        layout: Layout,
        key: RoundKey | None,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> RoundModel:
        return await self._models.model(await self._service.model(plan, model))

    async def upload(
        self, update: SavedUpdate, file: Path, *, mark: FileMark | None = None, progress: Progress
    ) -> UpdateReceipt:
        if self._conspiracy is not None:
            update, file = await self._conspiracy.passed(self._who.silo, update, file)
        header = signed_header(update, self._who, first_chunk=0, log=self._log())
        return await self._uploaded(header, update.manifest, file)

    async def upload_masked(
        self,
        key: RoundKey,
        masked: MaskedInput,
        manifest: Manifest,
        file: Path,
        *,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        header = MaskedHeader(key=key, masked=masked, manifest=manifest, first_chunk=0, log=self._log())
        return await self._uploaded(header, manifest, file)

    async def _uploaded(self, header: UpdateHeader | MaskedHeader, manifest: Manifest, file: Path) -> UpdateReceipt:
        held, committed = await self._service.upload_offset(self._who.silo, header.key, manifest.digest)
        first = manifest.chunks if committed else held
        upload = await self._service.begin_update(self._who.silo, replace(header, first_chunk=first))
        try:
            with file.open("rb") as source:
                for index in range(first, manifest.chunks):
                    size, start = manifest.chunk_size(index), index * manifest.chunk_bytes
                    data = await asyncio.to_thread(functools.partial(os.pread, source.fileno(), size, start))
                    await upload.write(index, data)
            return await upload.commit()
        finally:
            await upload.close()

    def _log(self) -> SignedHead:
        """Of an audit log that nobody keeps here."""
        return SignedHead.sign(self._who.identity_key, writer=self._who.identity.uri, head=Head())

    async def declare_trained(self, key: RoundKey, model: Digest) -> None:
        await self._service.declare_trained(self._who.silo, key, model)

    async def answer_mask(self, key: RoundKey, answer: MaskAnswer) -> None:
        await self._service.answer_mask(self._who.silo, key, answer)

    async def decline(self, key: RoundKey, reason: DeclineReason, detail: str) -> None:
        await self._service.decline(self._who.silo, key, reason, detail)
        self._refused(f"round {key.round}: {reason.value} {detail}".rstrip())

    async def report_progress(self, key: RoundKey, phase: AgentPhase, fraction: float) -> None:
        self._service.report_progress(self._who.silo, phase, fraction)

    async def report_evaluation(self, key: RoundKey, model: Digest, evaluation: Evaluation) -> None:
        await self._service.report_evaluation(self._who.silo, key, model, evaluation)

    async def fetch_groups(self, after: int, *, held: Sequence[SignedLink] = ()) -> GroupsOffer:
        return await self._service.groups_offer(after)

    async def sign_groups(self, link: bytes, signature: bytes) -> None:
        await self._service.groups.sign(self._who.silo, link, signature)

    async def countersign_ledger(self, head: Head, *, after: Head) -> LedgerReceipt:
        return await self._service.countersign_ledger(self._who.silo, head, after=after)
