"""What a silo and the operator may ask of the coordinator. The edges call this and translate its errors; it knows no gRPC.

`silo` arguments are identities from verified certificates, never from a message.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from coordinator.rounds.events import (
    EvaluationReported,
    GroupsChanged,
    MaskAnswered,
    PlanOffered,
    PlanPaused,
    PlanResumed,
    PlanStarted,
    PlanStopped,
    ReadinessDeclared,
    SiloDeclined,
    SiloLeft,
    SiloRevoked,
    SiloTrained,
)
from coordinator.rounds.orders import CLOSING, order_for, waiting_for
from coordinator.rounds.states import Course, Finished, Idle, course_of, groups_of, population_of, round_of
from coordinator.rounds.which_plan import DEFAULT_PLAN, check_start, unfinished
from coordinator.service.attendance import Attendance, Seat
from coordinator.service.members.authority_succession import AuthoritySteps
from coordinator.service.members.enrolment import Enrolment
from coordinator.service.members.held_trust import HeldTrusts
from coordinator.service.members.register import Register
from coordinator.service.members.renewal import Renewal, Renewed
from coordinator.service.plan_desk import OpenedPlan, PlanDesk, terms_of
from coordinator.service.ports import (
    AuditPort,
    Clock,
    Keys,
    ModelStore,
    Observer,
    OpenPlan,
    PlanShelf,
    RoundStore,
    Spools,
    Steady,
)
from coordinator.service.records import PresentPlan, RoundRow
from coordinator.service.release_groups import ReleaseGroups
from coordinator.service.round_checks import RoundChecks
from coordinator.service.round_loop import RETRY_S, RoundLoop
from coordinator.service.threads import Threads
from coordinator.service.transfers.chunk_cache import ChunkCache
from coordinator.service.transfers.receipts import Receipts
from coordinator.service.transfers.uploads import Upload, Uploads
from coordinator.service.views.disclosure import of_all_silos
from coordinator.service.views.pulse import pulse
from coordinator.service.views.round_rows import as_they_stand
from coordinator.service.views.standing import Standing, standing
from lorica_security.audit.chain import Head
from lorica_security.errors import (
    AuthorisationError,
    ConfigurationError,
    Conflict,
    LoricaError,
    MalformedMessage,
    StateError,
    WrongTime,
)
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
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
from silo_wire.plans.plan import Plan
from silo_wire.statements import MODEL_DOMAIN, model_statement
from silo_wire.wire_version import Speaker

_log = structlog.get_logger(__name__)
T = TypeVar("T")


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
        """Chunk `index` as it is sent. Raises MalformedMessage for an index outside the model, IntegrityError or StorageError for its file."""
        return await self._chunks.piece(self._models, self.header.manifest, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedPlan:
    plan: Digest
    name: str
    waits_for: str


class Federation:
    """`await start()` once, keep `run()` going as a task, then call the rest from the same event loop."""

    def __init__(
        self,
        *,
        federation: FederationName,
        store: RoundStore,
        shelf: PlanShelf,
        open_plan: OpenPlan,
        spools: Spools,
        keys: Keys,
        audit: AuditPort,
        observer: Observer,
        clock: Clock,
        steady: Steady = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        """`clock` dates what happens, and certificates; `steady` is what deadlines go by."""
        self._federation = federation
        self._store = store
        self._keys = keys
        self._observer = observer
        self._clock = clock
        self._desk = PlanDesk(federation=federation, shelf=shelf, open_plan=open_plan)
        self._threads = Threads()
        self._chunks = ChunkCache(self._threads)
        self.groups = ReleaseGroups(federation=federation, store=store, threads=self._threads)
        self.checks = RoundChecks(desk=self._desk, keys=keys, spools=spools)
        self._loop = RoundLoop(
            store=store,
            desk=self._desk,
            checks=self.checks,
            groups=self.groups,
            spools=spools,
            keys=keys,
            observer=observer,
            clock=clock,
            steady=steady,
            threads=self._threads,
            retry_s=retry_s,
        )
        self._attendance = Attendance()
        self._last_seen: dict[SiloName, float] = {}
        self._announced: dict[SiloName, bytes] = {}
        """The digest of each silo's newest advertisement: one that does not remember it has lost its memory."""
        self._choosing = asyncio.Lock()  # which plan is the present one
        self._unattended: set[asyncio.Task[Any]] = set()
        self._leavings: set[asyncio.Task[None]] = set()
        self._uploads = Uploads(
            loop=self._loop,
            desk=self._desk,
            spools=spools,
            store=store,
            receipts=Receipts(audit=audit, keys=keys, threads=self._threads),
            threads=self._threads,
        )
        self.register = Register(store=store, threads=self._threads, clock=clock)
        self.held = HeldTrusts(store=store, threads=self._threads)
        self.enrolment = Enrolment(
            store=store, keys=keys, loop=self._loop, register=self.register, clock=clock, threads=self._threads
        )
        self.authorities = AuthoritySteps(
            keys=keys,
            store=store,
            register=self.register,
            held=self.held,
            enrolment=self.enrolment,
            clock=clock,
            threads=self._threads,
        )
        self.renewal = Renewal(
            federation=federation,
            store=store,
            keys=keys,
            register=self.register,
            held=self.held,
            clock=clock,
            threads=self._threads,
            state=lambda: self._loop.state,
        )
        self._loop.on_change.append(self._changed)
        self.groups.on_change.append(self._regroup)
        self.authorities.on_change.append(self._attendance.wake_all)

    async def start(self) -> None:
        """Take up the persisted state; raises StorageError, or what is wrong with the plan under way."""
        await self.groups.load()
        await self._loop.resume()
        self._last_seen = {item.silo: item.last_seen_unix_s for item in await self._threads.store(self._store.silos)}
        self._announced = await self._threads.store(self._store.announced)
        await self.register.reload()
        await self.held.load()
        await self.enrolment.resume()
        if (course := course_of(self._loop.state)) is not None:
            await self._desk.opened(course.terms.plan)
        self._changed()

    @property
    def waiting_events(self) -> int:
        """Of the round machine: what has happened and was not looked at yet."""
        return self._loop.waiting_events

    async def run(self) -> None:
        """Drive the rounds until cancelled."""
        await self._loop.run()

    async def end(self) -> None:
        """Once nobody attends any more and `run` is over: until it is stored when they left, and what is left of the deadline."""
        await asyncio.gather(*self._leavings)
        await self._loop.end()

    def _changed(self) -> None:
        self._attendance.wake_all()
        _, unsigned = self.groups.waits_for()
        self._observer.standing_changed(
            pulse(
                self._loop.state,
                self._attendance,
                self._last_seen,
                seconds_left=self._loop.seconds_left,
                groups_unsigned=unsigned,
            )
        )

    def _regroup(self) -> None:
        if groups_of(self._loop.state) != self.groups.foreseen:
            self._loop.post_soon(GroupsChanged(now=self._loop.now(), groups=self.groups.foreseen))
        self._changed()

    @property
    def place(self) -> tuple[str, int, int]:
        """Phase, round and attempt of this moment."""
        return (self._loop.state.phase, *round_of(self._loop.state))

    @property
    def fault(self) -> str | None:
        """Why the present phase cannot go on, while it is tried again."""
        return self._loop.fault

    @property
    def trust_digest(self) -> bytes:
        """Of the trust bundle that stands now: what each order comes with."""
        return self._keys.trust_digest

    @property
    def _beside(self) -> tuple[bytes, bytes]:
        """What each order comes with."""
        return self._keys.trust_digest, self.groups.digest

    # --- for silos

    def require_enrolled(self, silo: SiloName) -> None:
        """Raise AuthorisationError for a silo that is not in the records, whatever certificate it still has."""
        if silo not in population_of(self._loop.state):
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")

    async def attend(
        self, silo: SiloName, instance: bytes, plan: Digest, speaker: Speaker | None = None
    ) -> AsyncGenerator[Order, None]:
        """The order that stands for this silo, now and whenever it, the trust bundle or the release groups change, for as long as the agent is there.

        `instance` tells agents of one silo apart (attendance.py); `plan` is the one that the agent holds, `speaker` its release. Ends when
        the same agent attends anew, also from a restart. Raises Conflict for a second agent, AuthorisationError for a silo that is not enrolled. Close the
        generator (contextlib.aclosing) when the stream breaks: that is how the silo leaves.
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
        """What shows that a masked sum made `model`, as it travels; raises WrongTime for another plan, StateError where none did."""
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

        `after` is the head that the silo takes to be the one known. A silo that finds a newer one in the receipt, or another,
        knows that its ledger went back; here that counts as a Conflict.
        """
        newest = await self._threads.store(self._store.countersign_ledger, silo, head, after=after, at=self._clock())
        if newest != head:
            _log.warning("privacy ledger does not follow", silo=silo, shown=head.sequence, known=newest.sequence)
            if newest.sequence >= head.sequence:
                self._observer.refused(Conflict.__name__)
        statement = ledger_statement(federation=self._federation, silo=silo, head=newest)
        return LedgerReceipt(newest=newest, signature=self._keys.sign(LEDGER_DOMAIN, statement))

    # --- for the operator

    async def offer_plan(self, name: str) -> None:
        """Let silos prepare the plan folder `name` at once, if no plan is there; it starts by itself if it says so."""
        async with self._choosing:
            if isinstance(self._loop.state, Idle):
                await self._offer_plan(name)

    async def _offer_plan(self, name: str) -> None:
        opened = await self._desk.compile(name)
        await self._check_unused(opened)
        model = await self._desk.store_initial(opened)
        await self._loop.post(
            PlanOffered(
                now=self._loop.now(),
                terms=terms_of(opened.bundle.plan),
                model=model,
                signature=self._sign_initial(opened.digest, model),
            )
        )

    async def collect_garbage(self, collect: Callable[[PresentPlan], T]) -> T:
        """What `collect`, in a thread, makes of the plan that the state is about; no other one is begun meanwhile."""
        # A thread cannot be stopped: when whoever asked goes away in the middle, no plan begins before it has ended all the same.
        return await self._to_its_end(self._collect_garbage(collect))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Also where whoever waits for it goes away."""
        under_way = asyncio.create_task(work)
        self._unattended.add(under_way)
        under_way.add_done_callback(self._unattended.discard)
        return await asyncio.shield(under_way)

    async def _collect_garbage(self, collect: Callable[[PresentPlan], T]) -> T:
        async with self._choosing:
            course = course_of(self._loop.state)
            present = PresentPlan(
                plan=None if course is None else course.terms.plan,
                models=frozenset() if course is None else await self._kept_models(course),
                under_way=course is not None and not isinstance(self._loop.state, Finished),
            )
            return await asyncio.to_thread(collect, present)

    async def _kept_models(self, course: Course) -> frozenset[Digest]:
        opened = await self._desk.opened(course.terms.plan)
        return frozenset({course.model, course.best_model, *await asyncio.to_thread(self.checks.bases, opened)})

    async def start_plan(self, name: str = "", *, leave: str = "") -> StartedPlan:
        """Start the plan folder `name`, or go on with it after a stop. Without a name: the plan that is there, else the default one.

        `leave` names the unfinished plan that is left for good. Raises ConfigurationError for a plan that cannot be used, StateError when
        another runs, or is stopped and not named so, when this one has run to its end or was left for another, or when fewer silos are
        enrolled than its quorum.
        """
        async with self._choosing:
            return await self._start_plan(name, leave)

    async def _start_plan(self, name: str, leave: str) -> StartedPlan:
        course = course_of(self._loop.state)
        if not name and course is not None and (there := unfinished(self._loop.state)) is not None:
            opened = await self._desk.opened(there.plan)  # as it began, whatever became of its folder
        else:
            opened = await self._desk.compile(name or (DEFAULT_PLAN if course is None else course.terms.name))
        plan = opened.bundle.plan
        known = course is not None and course.terms.plan == opened.digest
        if not known:
            await self._check_unused(opened)
        check_start(self._loop.state, plan=opened.digest, name=plan.name, leave=leave)
        enrolled = len(population_of(self._loop.state))
        if enrolled < plan.schedule.min_silos:
            raise StateError(
                f"plan {plan.name} has min_silos = {plan.schedule.min_silos} and {enrolled} silos are enrolled: "
                "enrol more or lower it"
            )
        if plan.aggregation.secure_aggregation:  # silos sign while they train
            await self.groups.propose_first(population_of(self._loop.state), colluders=plan.aggregation.colluders)
        # A plan that is known goes on from where it is: the machine looks at no model then.
        model = course.model if course is not None and known else await self._desk.store_initial(opened)
        state = await self._loop.post(
            PlanStarted(
                now=self._loop.now(),
                terms=terms_of(plan),
                model=model,
                signature=self._sign_initial(opened.digest, model),
                leave=leave,
            )
        )
        return StartedPlan(plan=opened.digest, name=plan.name, waits_for=waiting_for(state))

    async def stop_plan(self) -> str:
        """Stop the plan under way, keeping all that is committed; what that means, in one line."""
        return waiting_for(await self._loop.post(PlanStopped(now=self._loop.now())))

    async def pause_plan(self) -> str:
        """Let the attempt under way end and open no other; raises StateError where there is nothing to pause."""
        self._require_plan("pause")
        return waiting_for(await self._loop.post(PlanPaused(now=self._loop.now())))

    async def resume_plan(self) -> str:
        """Raises StateError where nothing is paused."""
        self._require_plan("resume")
        return waiting_for(await self._loop.post(PlanResumed(now=self._loop.now())))

    async def revoke(self, role: Role, name: str) -> str:
        """Shut somebody out: refused from now on, live calls cut, of no cohort any more; what that came to, in one line.

        Raises ConfigurationError for a name that is none, StateError where nobody of that name could be shut out.
        """
        if role is Role.COORDINATOR:
            raise ConfigurationError("the coordinator cannot revoke itself: stop it")
        identity = Identity(self._federation, role, name)
        # An operator who goes away in the middle has revoked all the same, in the machine as well.
        await self._to_its_end(self._revoke(identity))
        return f"{identity.uri} is revoked: its certificates are refused and its open calls were cut"

    async def _revoke(self, identity: Identity) -> None:
        if identity.role is not Role.SILO:
            return await self.register.revoke(identity)
        silo = SiloName(identity.name)
        enrolled = await self._threads.store(self._store.silo, silo) is not None
        await self.register.revoke(identity, known=enrolled or silo in self.enrolment.invited())
        await self.enrolment.resume()
        await self._loop.post(SiloRevoked(now=self._loop.now(), silo=silo))

    async def grant(self, role: Role, name: str, *, csr_der: bytes, valid_s: float) -> Renewed:
        """As Renewal.grant has it; raises AuthorisationError for a role that is not given so."""
        if role not in (Role.OPERATOR, Role.VIEWER):
            raise AuthorisationError(f"role {role.value} is not granted: operator and viewer are; silos are invited")
        return await self.renewal.grant(Identity(self._federation, role, name), csr_der=csr_der, valid_s=valid_s)

    async def status(self) -> Standing:
        enrolled = await self._threads.store(self._store.silos)
        return standing(
            federation=self._federation,
            state=self._loop.state,
            fault=self._loop.fault,
            behind=self.groups.behind(self._attendance.connected),
            enrolled=[
                replace(item, last_seen_unix_s=max(item.last_seen_unix_s, self._last_seen.get(item.silo, 0.0)))
                for item in enrolled
            ],
            invited=self.enrolment.invited(),
            attendance=self._attendance,
            now=self._clock(),
            seconds_left=self._loop.seconds_left,
        )

    async def plan(self) -> Plan | None:
        """The one under way, or that ran last; raises StateError or IntegrityError for its kept copy."""
        course = course_of(self._loop.state)
        return None if course is None else (await self._desk.opened(course.terms.plan)).bundle.plan

    async def rounds(self, last: int = 0) -> tuple[RoundRow, ...]:
        """The last attempts at rounds of the plan under way, oldest first; 0: all. A closing round, whose number is beyond the plan's, is named."""
        course = course_of(self._loop.state)
        if course is None:
            return ()
        plan = course.terms.plan
        kept = await self._threads.store(self._store.rounds, plan, last)
        rows = tuple(
            replace(row, detail="; ".join(filter(None, (CLOSING, row.detail))))
            if row.round > course.terms.rounds
            else row
            for row in (as_they_stand(row, plan, self._loop.state, self._attendance.connected) for row in kept)
        )
        return rows if course.terms.shows_single_silos else tuple(map(of_all_silos, rows))

    # --- checks

    def _check_plan(self, plan: Digest) -> Course:
        course = course_of(self._loop.state)
        if course is None or course.terms.plan != plan:
            under_way = "none" if course is None else course.terms.plan
            raise WrongTime(f"plan {plan} is not under way, {under_way} is: wait for the next order")
        return course

    def _require_plan(self, what: str) -> None:
        if isinstance(self._loop.state, Idle):
            raise StateError(f"there is no plan to {what}: start one with coordinator plan start")

    def _seat(self, silo: SiloName) -> Seat:
        seat = self._attendance.seat(silo)
        if seat is None:
            raise WrongTime(f"silo {silo} is not attending: open the stream of orders first")
        return seat

    async def _check_unused(self, opened: OpenedPlan) -> None:
        if await self._threads.store(self._store.has_rounds, opened.digest):
            raise StateError(
                f"plan {opened.bundle.plan.name} has run before and was left for another: "
                "change its seed or its name to run it from the beginning"
            )

    def _sign_initial(self, plan: Digest, model: Digest) -> bytes:
        statement = model_statement(federation=self._federation, plan=plan, round_number=0, model=model)
        return self._keys.sign(MODEL_DOMAIN, statement)


def _essence(order: Order) -> Order:
    """The order without the time left, which changes all the time."""
    return replace(order, seconds_left=0.0) if isinstance(order, Train | Mask | Evaluate) else order
