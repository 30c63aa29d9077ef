"""What a silo may ask of the coordinator. `silo` arguments are identities from verified certificates, never from a
message."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import structlog

from lorica_coordinator.rounds.events import (
    EvaluationReported,
    MaskAnswered,
    ReadinessDeclared,
    SiloDeclined,
    SiloLeft,
    SiloTrained,
)
from lorica_coordinator.rounds.orders import order_for
from lorica_coordinator.rounds.states import population_of
from lorica_coordinator.service.attendance import Seat
from lorica_coordinator.service.callers.parts import FederationParts
from lorica_coordinator.service.ports import ModelStore
from lorica_coordinator.service.transfers.chunk_cache import ChunkCache
from lorica_coordinator.service.transfers.uploads import Upload
from lorica_security.audit.chain import Head
from lorica_security.errors import AuthorisationError, Conflict, LoricaError, MalformedMessage, StateError, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.secure_aggregation.messages import Advertisement
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from silo_wire.canonical import Digest
from silo_wire.codecs.groups_codec import GroupsOffer, KnownIdentity
from silo_wire.codecs.ledger_receipt import LEDGER_DOMAIN, LedgerReceipt, ledger_statement
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluate,
    Evaluation,
    HeldPieces,
    Mask,
    MaskAnswer,
    MaskedHeader,
    ModelHeader,
    Order,
    RoundKey,
    Train,
    UpdateHeader,
)
from silo_wire.wire_version import Speaker

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model that may be handed out: its header, and its chunks on demand."""

    header: ModelHeader
    _models: ModelStore
    _chunks: ChunkCache

    def reading(self) -> AbstractContextManager[None]:
        """To be entered around the pieces of one download."""
        return self._chunks.reading()

    async def piece(self, index: int) -> bytes:
        """Chunk `index` as it is sent. Raises MalformedMessage for an index outside the model, IntegrityError or
        StorageError for its file."""
        return await self._chunks.piece(self._models, self.header.manifest, index)


class ForSilos(FederationParts):
    """What a silo may ask, by its identity."""

    def require_enrolled(self, silo: SiloName) -> None:
        """Raise AuthorisationError for a silo that is not in the records, whatever certificate it still has."""
        if silo not in population_of(self._loop.state):
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")

    async def attend(
        self, silo: SiloName, instance: bytes, plan: Digest, speaker: Speaker | None = None
    ) -> AsyncGenerator[Order, None]:
        """The order that stands for this silo, now and whenever it, the trust bundle or the release groups change, for
        as long as the agent is there.

        `instance` tells agents of one silo apart (attendance.py); `plan` is the one that the agent holds, `speaker` its
        release. Ends when the same agent attends anew, also from a restart. Raises Conflict for a second agent,
        AuthorisationError for a silo that is not enrolled. Close the generator (contextlib.aclosing) when the stream
        breaks: that is how the silo leaves.
        """
        self.require_enrolled(silo)
        seat = self._attendance.take(silo, instance)
        told_release = {} if speaker is None else {"agent": speaker.release, "wire": str(speaker.wire)}
        _log.info("silo connected", silo=silo, holds_plan=plan, **told_release)
        try:
            self._last_seen[silo] = self._clock()
            await self._threads.store(self._store.seen, silo, self._last_seen[silo], speaker)
            if seat.restarted:
                self._loop.post_soon(SiloLeft(now=self._loop.now(), silo=silo))
            self._changed()
            last: Order | None = None
            told = (b"", b"")
            while not seat.taken_over:
                seat.wake.clear()
                order = order_for(self._loop.state, silo, self._loop.now())
                if isinstance(order, Mask) and order.message is None:
                    order = replace(order, seen=self._announced.get(silo))
                if last is None or _essence(order) != _essence(last):
                    last, told = order, self._beside
                    seat.phase, seat.fraction = None, 0.0
                    yield order
                elif told != self._beside:
                    told = self._beside
                    yield order  # the same again, with another trust bundle or other release groups
                else:
                    await seat.wake.wait()
        finally:
            self._left(seat)

    def _left(self, seat: Seat) -> None:
        if self._attendance.leave(seat):
            _log.info("silo disconnected", silo=seat.silo)
            self._last_seen[seat.silo] = self._clock()
            leaving = asyncio.create_task(self._keep_last_seen(seat.silo))
            self._leavings.add(leaving)
            leaving.add_done_callback(self._leavings.discard)
            self._loop.post_soon(SiloLeft(now=self._loop.now(), silo=seat.silo))
            self._changed()

    async def _keep_last_seen(self, silo: SiloName) -> None:
        """Over a restart: until then, `_last_seen` has it."""
        try:
            await self._threads.store(self._store.seen, silo, self._last_seen[silo])
        except LoricaError as error:
            _log.warning("when a silo left could not be stored", silo=silo, error=str(error))

    async def declare_readiness(self, silo: SiloName, plan: Digest, *, ready: bool, reason: str = "") -> None:
        """A connected silo has checked `plan`; raises WrongTime when another one is under way or nobody attends."""
        course = self._check_plan(plan)
        if ready:  # no round opens before, for a restart takes nobody for ready
            await self._keep_plan(course)
            self._check_plan(plan)
        seat = self._seat(silo)
        seat.unready_reason = "" if ready else reason
        if not ready:
            _log.warning("silo is not ready", silo=silo, reason=reason)
        await self._loop.post(ReadinessDeclared(now=self._loop.now(), silo=silo, ready=ready))

    async def plan_bundle(self, plan: Digest) -> bytes:
        """The encoded bundle of the plan under way; raises WrongTime for any other."""
        self._check_plan(plan)
        return (await self._desk.opened(plan)).encoded

    async def model(self, plan: Digest, model: Digest) -> ModelSource:
        """The present model of the plan, its best, or the base of its adapters; raises WrongTime for any other."""
        course = self._check_plan(plan)
        opened = await self._desk.opened(plan)
        if opened.parts.base is not None and model == opened.bundle.plan.model.base:
            manifest = await self._threads.transfer(opened.parts.base.manifest, model)
            header = ModelHeader(manifest=manifest, round=0, signature=self._sign_initial(plan, model))
            return ModelSource(header, opened.parts.base, self._chunks)
        if model not in (course.model, course.best_model):
            raise WrongTime(f"model {model} is not handed out now, the present one is {course.model}")
        signed = await self._threads.store(self._store.signed_model, plan, model)
        if signed is None:
            raise StateError(f"model {model} has no signature in the records: restore the state from backup")
        manifest = await self._threads.transfer(opened.parts.models.manifest, model)
        header = ModelHeader(manifest=manifest, round=signed.round, signature=signed.signature)
        return ModelSource(header, opened.parts.models, self._chunks)

    async def evidence(self, plan: Digest, model: Digest) -> bytes:
        """What shows that a masked sum made `model`, as it travels; raises WrongTime for another plan, StateError where
        none did."""
        self._check_plan(plan)
        return await self.checks.evidence(plan, model)

    async def pieces(self, plan: Digest, model: Digest, chunk: int, held: HeldPieces) -> tuple[bytes, ...]:
        """What one chunk of the round that made the present model is made again with, without what is `held`.

        Raises WrongTime for another plan, StateError for another model, MalformedMessage for a chunk that there is not.
        """
        self._check_plan(plan)
        return await self.checks.pieces(plan, model, chunk, held)

    async def share_verdict(
        self, silo: SiloName, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        """As RoundChecks.share; raises WrongTime for another plan or model than the present one."""
        course = self._check_plan(plan)
        if course.model != model:
            raise WrongTime(f"model {model} is not the present one, {course.model} is: wait for the next order")
        enrolled = await self._threads.store(self._store.silo, silo)
        if enrolled is None:
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation")
        key = public_key_from_bytes(enrolled.identity_public_key)
        return await self.checks.share(silo, plan, model, verdict, known, identity_key=key)

    async def verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        """Those that are kept on `model`; raises WrongTime for another plan."""
        self._check_plan(plan)
        return await self.checks.verdicts(plan, model)

    async def declare_trained(self, silo: SiloName, key: RoundKey, model: Digest) -> None:
        """The silo holds a delta from `model` for the masked sum of this attempt; raises WrongTime or Conflict."""
        await self._loop.post(SiloTrained(now=self._loop.now(), key=key, silo=silo, model=model))

    async def answer_mask(self, silo: SiloName, key: RoundKey, answer: MaskAnswer) -> None:
        """A message of secure aggregation. Raises AuthorisationError for another silo's, WrongTime or Conflict.

        A false one is acknowledged like any other: its sender is dropped, and finds so in its next order.
        """
        if answer.silo != silo:
            raise AuthorisationError(
                f"silo {silo} brings a {type(answer).__name__} of silo {answer.silo}: only its own is taken"
            )
        await self._loop.post(MaskAnswered(now=self._loop.now(), key=key, answer=answer))
        if isinstance(answer, Advertisement):
            await self._threads.store(self._store.announce, silo, answer.digest)
            self._announced[silo] = answer.digest

    async def groups_offer(self, after: int) -> GroupsOffer:
        """Release groups from number `after` on, what is proposed, and the keys that they are signed with."""
        links, proposed = self.groups.after(after), self.groups.proposed
        named = {silo for one in links for silo, _ in one.signatures}
        named |= frozenset() if proposed is None else proposed.link.members
        identities = []
        for item in await self._threads.store(self._store.silos):
            if item.silo in named:
                successions = await self._threads.store(self._store.successions, item.silo)
                key = public_key_from_bytes(item.identity_public_key)
                identities.append(KnownIdentity(silo=item.silo, key=key, successions=successions))
        return GroupsOffer(links=links, proposed=proposed, identities=tuple(identities))

    async def begin_update(self, silo: SiloName, header: UpdateHeader | MaskedHeader) -> Upload:
        """Check an update before its bytes come; then `write` its chunks, `commit`, and always `close`."""
        if isinstance(header, MaskedHeader) and header.masked.silo != silo:
            raise AuthorisationError(f"silo {silo} brings a masked vector of silo {header.masked.silo}")
        return await self._uploads.begin(silo, header)

    async def upload_offset(self, silo: SiloName, key: RoundKey, update: Digest) -> tuple[int, bool]:
        """Chunks held of this update, and whether it has been committed."""
        return await self._uploads.offset(silo, key, update)

    async def decline(self, silo: SiloName, key: RoundKey, reason: DeclineReason, detail: str) -> None:
        """The silo will not do its part of this attempt; raises WrongTime, or Conflict when it has done it."""
        await self._loop.post(SiloDeclined(now=self._loop.now(), key=key, silo=silo, reason=reason, detail=detail))

    def report_progress(self, silo: SiloName, phase: AgentPhase, fraction: float) -> None:
        """How far a connected silo is, 0 to 1; forgotten at a restart. Raises MalformedMessage or WrongTime."""
        if not 0 <= fraction <= 1:  # also catches NaN
            raise MalformedMessage(f"progress fraction is {fraction}: it must be from 0 to 1")
        seat = self._seat(silo)
        seat.phase, seat.fraction = phase, fraction

    async def report_evaluation(self, silo: SiloName, key: RoundKey, model: Digest, evaluation: Evaluation) -> None:
        """The silo's score of `model`; the same again is acknowledged, even after the phase has closed."""
        if await self._threads.store(self._store.evaluation, key, silo) == evaluation:
            return
        await self._loop.post(
            EvaluationReported(now=self._loop.now(), key=key, silo=silo, model=model, evaluation=evaluation)
        )

    async def countersign_ledger(self, silo: SiloName, head: Head, *, after: Head) -> LedgerReceipt:
        """Remember the head of the silo's privacy ledger, if it follows the one known, and sign the newest known.

        `after` is the head that the silo takes to be the one known. A silo that finds a newer one in the receipt, or
        another, knows that its ledger went back; here that counts as a Conflict.
        """
        newest = await self._threads.store(self._store.countersign_ledger, silo, head, after=after, at=self._clock())
        if newest != head:
            _log.warning("privacy ledger does not follow", silo=silo, shown=head.sequence, known=newest.sequence)
            if newest.sequence >= head.sequence:
                self._observer.refused(Conflict.__name__)
        statement = ledger_statement(federation=self._federation, silo=silo, head=newest)
        return LedgerReceipt(newest=newest, signature=self._keys.sign(LEDGER_DOMAIN, statement))


def _essence(order: Order) -> Order:
    """The order without the time left, which changes all the time."""
    return replace(order, seconds_left=0.0) if isinstance(order, Train | Mask | Evaluate) else order
