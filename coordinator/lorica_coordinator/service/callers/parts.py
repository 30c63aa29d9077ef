"""The parts of the coordinator's service, put together once for all callers."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from lorica_coordinator.rounds.events import GroupsChanged
from lorica_coordinator.rounds.states import Course, course_of, groups_of
from lorica_coordinator.service.attendance import Attendance, Seat
from lorica_coordinator.service.loop.round_loop import RETRY_S, RoundLoop
from lorica_coordinator.service.members.authority_succession import AuthoritySteps
from lorica_coordinator.service.members.enrolment import Enrolment
from lorica_coordinator.service.members.held_trust import HeldTrusts
from lorica_coordinator.service.members.register import Register
from lorica_coordinator.service.members.renewal import Renewal
from lorica_coordinator.service.plan_desk import PlanDesk
from lorica_coordinator.service.ports import (
    AuditPort,
    Clock,
    Keys,
    Observer,
    OpenPlan,
    PlanShelf,
    RoundStore,
    Spools,
    Steady,
)
from lorica_coordinator.service.release_groups import ReleaseGroups
from lorica_coordinator.service.round_checks import RoundChecks
from lorica_coordinator.service.threads import Threads
from lorica_coordinator.service.transfers.chunk_cache import ChunkCache
from lorica_coordinator.service.transfers.receipts import Receipts
from lorica_coordinator.service.transfers.uploads import Uploads
from lorica_coordinator.service.views.pulse import pulse
from lorica_security.errors import LoricaError, WrongTime
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest
from silo_wire.statements import MODEL_DOMAIN, model_statement

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class FederationParts:
    """What the service is put together from, and what both kinds of callers need of it."""

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
        self._desk = PlanDesk(federation=federation, shelf=shelf, open_plan=open_plan, steady=steady)
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
        self._keeping = asyncio.Lock()
        self._kept: Digest | None = None
        """The plan that was found to outlast the folder; what its rounds make is kept as they make it."""
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
    def _beside(self) -> tuple[bytes, bytes]:
        """What each order comes with."""
        return self._keys.trust_digest, self.groups.digest

    def _check_plan(self, plan: Digest) -> Course:
        course = course_of(self._loop.state)
        if course is None or course.terms.plan != plan:
            under_way = "none" if course is None else course.terms.plan
            raise WrongTime(f"plan {plan} is not under way, {under_way} is: wait for the next order")
        return course

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Also where whoever waits for it goes away."""
        under_way = asyncio.create_task(work)
        self._unattended.add(under_way)
        under_way.add_done_callback(self._unattended.discard)
        return await asyncio.shield(under_way)

    async def _keep_plan(self, course: Course) -> None:
        """Have the plan, and the models that it goes on from, outlast the folder, where that was not seen yet. Raises
        StorageError."""
        await self._to_its_end(self._keep(course))

    async def _keep_plan_soon(self, course: Course) -> None:
        """The same; where that fails, it is tried again when a silo is ready."""
        try:
            await self._keep(course)
        except LoricaError as error:
            _log.warning("what the plan goes on from cannot be kept", plan=course.terms.name, error=str(error))

    async def _keep(self, course: Course) -> None:
        async with self._keeping:
            if self._kept != course.terms.plan:
                opened = await self._desk.opened(course.terms.plan)
                await self._desk.keep(opened, {course.model, course.best_model})
                self._kept = course.terms.plan

    def _seat(self, silo: SiloName) -> Seat:
        seat = self._attendance.seat(silo)
        if seat is None:
            raise WrongTime(f"silo {silo} is not attending: open the stream of orders first")
        return seat

    def _sign_initial(self, plan: Digest, model: Digest) -> bytes:
        statement = model_statement(federation=self._federation, plan=plan, round_number=0, model=model)
        return self._keys.sign(MODEL_DOMAIN, statement)
