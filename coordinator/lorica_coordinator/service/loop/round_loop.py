"""The one place that moves the round machine: event in -> step -> persist -> effects -> acknowledge.

Events queue; one task takes them in order, so nothing else ever sees a half-made transition. A caller that goes away
does not undo its event. An event whose transition cannot be persisted has not happened: its caller gets StorageError;
the loop's own events (deadlines, aggregation) are tried again after `retry_s`.

Deadlines go by the steady clock alone, in whatever way the wall's is set. What is left of one is saved with each
transition and a while later again, each time as it will be at the next such save: a process that ends in between takes
no more of it than that, and gives nothing back, so that no number of restarts puts a deadline off. One that is stopped
saves what is left to the second.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from lorica_coordinator.rounds.effects import (
    COMMANDS,
    Aggregate,
    ArmDeadline,
    Command,
    DisarmDeadline,
    DiscardUpdates,
    OpenMasking,
    Record,
    RetainModels,
    RoundClosed,
    records_of,
)
from lorica_coordinator.rounds.events import (
    Aggregated,
    AggregationFailed,
    BudgetExhausted,
    DeadlinePassed,
    Event,
    MaskingOpened,
    Resumed,
    SiloRevoked,
)
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.phases.aggregating import told_of_unusable
from lorica_coordinator.rounds.states import Aggregating, Idle, Masking, State, Stopped, course_of, deadline_of
from lorica_coordinator.rounds.updates import Outcome
from lorica_coordinator.service.journal import Journal
from lorica_coordinator.service.loop.masking_opening import masking_opened
from lorica_coordinator.service.loop.tidying import Tidying, plan_under_way
from lorica_coordinator.service.plan_desk import PlanDesk, terms_of
from lorica_coordinator.service.ports import Clock, Keys, Observer, Overtaken, RoundStore, Spools, Steady
from lorica_coordinator.service.release_groups import ReleaseGroups
from lorica_coordinator.service.round_checks import RoundChecks
from lorica_coordinator.service.threads import Threads
from lorica_coordinator.service.unusable import BudgetSpent, UnusableUpdate
from lorica_security.errors import ConfigurationError, LoricaError, MalformedMessage, StorageError, Unreachable, kind_of
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.statements import MODEL_DOMAIN, model_statement

RETRY_S = 10.0
PAID_MOST_S = 60.0
PAID_LEAST_S = 1.0
PAID_PART = 0.1
"""Of what is left of a deadline a crash costs a tenth at most, and a minute; near its end a second."""
_CLOSED_ATTEMPTS_TO_CLEAR = 4

_log = structlog.get_logger(__name__)


class RoundLoop:
    """Call `resume` once, then keep `run` going; `post` from anywhere on the same event loop."""

    def __init__(
        self,
        *,
        store: RoundStore,
        desk: PlanDesk,
        groups: ReleaseGroups,
        spools: Spools,
        keys: Keys,
        observer: Observer,
        clock: Clock,
        steady: Steady,
        threads: Threads,
        checks: RoundChecks,
        retry_s: float = RETRY_S,
    ) -> None:
        """`clock` dates what is recorded, for people; `steady` is what deadlines go by."""
        self._checks = checks
        self._store = store
        self._threads = threads
        self._desk = desk
        self._groups = groups
        self._keys = keys
        self._observer = observer
        self._journal = Journal(observer)
        self._clock = clock
        self._steady = steady
        self._saving = False
        """A transition is being saved; so for ever where this was cancelled meanwhile, and the store may be ahead of
        `state`."""
        self._save_due: float | None = None
        self._retry_s = retry_s
        self._state: State = Idle()
        self._inbox: asyncio.Queue[tuple[Event, asyncio.Future[State]]] = asyncio.Queue()
        self._owed: list[Command] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tidying = Tidying(
            desk=desk, spools=spools, checks=checks, state=lambda: self._state, complain=self._complain
        )
        self._aggregating = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._ended = False
        self.on_change: list[Callable[[], None]] = []
        self.fault: str | None = None
        """Why the present phase cannot go on, while it is tried again."""
        self._counted_plan: Digest | None = None

    @property
    def state(self) -> State:
        return self._state

    def now(self) -> float:
        """What the `now` of an event is: an instant of the steady clock."""
        return self._steady()

    @property
    def seconds_left(self) -> float | None:
        """Until the deadline of the present phase; None where it has none."""
        at = deadline_of(self._state)
        return None if at is None else max(0.0, at - self._steady())

    @property
    def waiting_events(self) -> int:
        return self._inbox.qsize()

    async def resume(self) -> None:
        """Take up the persisted state; raises StorageError."""
        now = self._steady()
        before = await self._threads.store(self._store.load, now)
        silos = await self._threads.store(self._store.silos)
        population = frozenset(item.silo for item in silos if item.revoked_unix_s is None)
        lost = await self._threads.store(self._store.lost_attempt)
        event = Resumed(now=now, population=population, groups=self._groups.foreseen, lost=lost)
        after, effects = step(before, event)
        records = records_of(effects)
        await self._save(after, records)
        self._state = after
        if records:
            self._journal.transition(before, event, after, records)
        self._fault(None)
        self._owed = [effect for effect in effects if isinstance(effect, COMMANDS)]
        for key in await self._threads.store(self._store.closed_attempts, _CLOSED_ATTEMPTS_TO_CLEAR):
            self._owed.append(DiscardUpdates(key=key))  # may have been lost between the record and the deed
        self._journal.resumed(after)
        for item in silos:
            if item.revoked_unix_s is not None:  # the process may have ended before the machine was told
                self.post_soon(SiloRevoked(now=now, silo=item.silo))

    async def run(self) -> None:
        """Work until cancelled. A defect in an aggregation ends it, with that error; so does Overtaken."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._count_epsilon()
                for command in self._owed:
                    await self._do(command)
                if plan_under_way(self._state) is None:
                    course = course_of(self._state)
                    await self._tidying.let_go_of(None if course is None else course.terms.plan)
                while True:
                    try:
                        async with asyncio.timeout(self._until_save()):
                            event, done = await self._inbox.get()
                    except TimeoutError:
                        await self._save_what_is_left()
                    else:
                        await self._take(event, done)
        except BaseExceptionGroup as group:
            for error in group.exceptions:
                if isinstance(error, Overtaken):
                    raise error from group
            raise
        finally:
            self._ended = True
            self._disarm()
            while not self._inbox.empty():
                _, done = self._inbox.get_nowait()
                if not done.done():
                    done.set_exception(_Stopping())

    async def end(self) -> None:
        """After `run`: save what is left of the deadline, to the second."""
        if not self._saving and deadline_of(self._state) is not None:
            with suppress(Overtaken):  # `run` has raised it, or the next start finds out
                await self._save_what_is_left(paid=0.0)

    async def post(self, event: Event) -> State:
        """Have `event` happen and return the state after it; raises what the machine raises, or StorageError."""
        return await asyncio.shield(self._queue(event))

    def post_soon(self, event: Event) -> None:
        """Have `event` happen without waiting for it; an error is logged alone."""
        if not self._ended:
            self._queue(event).add_done_callback(_log_failure)

    def _queue(self, event: Event) -> asyncio.Future[State]:
        if self._ended:
            raise _Stopping()
        done: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_see)
        self._inbox.put_nowait((event, done))
        return done

    async def _take(self, event: Event, done: asyncio.Future[State]) -> None:
        try:
            after = await self._transition(event)
        except LoricaError as error:
            if not done.done():
                done.set_exception(error)
            if isinstance(error, Overtaken):
                raise
        else:
            if not done.done():
                done.set_result(after)
        finally:
            if not done.done():  # cancelled half-way: whether it was persisted, the next start will tell
                done.set_exception(_Stopping())

    async def _transition(self, event: Event) -> State:
        before = self._state
        after, effects = step(before, event)
        records = records_of(effects)
        if after != before or records:
            await self._save(after, records)
            self._state = after
            self._journal.transition(before, event, after, records)
            self._count_epsilon(anew=any(isinstance(record, RoundClosed) for record in records))
        if after.phase != before.phase:
            self._fault(None)
        for effect in effects:
            if isinstance(effect, COMMANDS):
                await self._do(effect)
        for changed in self.on_change:
            changed()
        if (ended := plan_under_way(before)) != plan_under_way(after):
            await self._tidying.let_go_of(ended)
        return after

    async def _do(self, command: Command) -> None:
        match command:
            case ArmDeadline(at=at):
                self._arm(at)
            case DisarmDeadline():
                self._disarm()
            case OpenMasking():
                assert self._tasks is not None
                self._tasks.create_task(self._open_masking(command))
            case Aggregate():
                assert self._tasks is not None
                self._tasks.create_task(self._aggregate(command))
            case DiscardUpdates(key=key):
                await self._tidying.discard(key)
            case RetainModels(plan=plan, models=models):
                await self._tidying.retain(plan, set(models))

    def _fault(self, why: str | None) -> None:
        self.fault = why
        is_missing = isinstance(self._state, Stopped) and self._state.missing != ""
        self._observer.phase_failing(why is not None or is_missing)

    def _count_epsilon(self, *, anew: bool = False) -> None:
        """Have the observer told what the plan has cost, where another plan is under way or, `anew`, something was
        released."""
        course = course_of(self._state)
        plan = None if course is None else course.terms.plan
        if plan != self._counted_plan or anew:
            self._counted_plan = plan
            assert self._tasks is not None
            self._tasks.create_task(self._tell_epsilon(plan))

    async def _tell_epsilon(self, plan: Digest | None) -> None:
        spent = allowed = 0.0
        if plan is not None:
            try:
                opened = await self._desk.opened(plan)
                if opened.bundle.plan.noise_at == "coordinator":
                    spent = await asyncio.to_thread(opened.parts.spent)
                    allowed = opened.bundle.plan.privacy.target_epsilon
            except LoricaError as error:
                self._complain("epsilon could not be counted", error)
                return
        self._observer.epsilon(spent=spent, allowed=allowed)

    def _complain(self, what: str, error: LoricaError) -> None:
        kind = kind_of(error).__name__
        _log.error(what, kind=kind, error=str(error))
        self._observer.refused(kind)

    # --- deadlines

    async def _save(self, state: State, records: Sequence[Record], *, paid: float | None = None) -> None:
        """`paid`: seconds of the deadline that count as over already; None: those until the next save."""
        now, deadline = self._steady(), deadline_of(state)
        if paid is None:
            paid = 0.0 if deadline is None else paid_until_next_save(deadline - now)
        at = self._clock()
        self._saving = True
        try:
            await self._threads.store(lambda: self._store.transition(state, records, at=at, now=now + paid))
        except Exception:
            self._saving = False
            raise
        self._saving = False
        self._save_due = None if deadline is None else now + paid

    async def _save_what_is_left(self, *, paid: float | None = None) -> None:
        try:
            await self._save(self._state, [], paid=paid)
        except Overtaken:
            raise
        except LoricaError as error:
            self._save_due = self._steady() + self._retry_s
            self._complain("what is left of the deadline could not be saved", error)

    def _until_save(self) -> float | None:
        return None if self._save_due is None else max(0.0, self._save_due - self._steady())

    def _arm(self, at: float) -> None:
        self._disarm()
        delay = max(0.0, at - self._steady())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer, at)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self, at: float) -> None:
        assert self._tasks is not None
        now = self._steady()
        if now < at:  # the timer was a little early
            self._arm(at)
        else:
            self._tasks.create_task(self._insist(DeadlinePassed(now=now, deadline=at)))

    # --- secure aggregation

    async def _open_masking(self, command: OpenMasking) -> None:
        while isinstance(self._state, Masking) and self._state.key == command.key and self._state.secure is None:
            try:
                event = await masking_opened(
                    command,
                    desk=self._desk,
                    groups=self._groups,
                    store=self._store,
                    threads=self._threads,
                    steady=self._steady,
                )
            except LoricaError as error:
                self._fault(str(error))
                self._complain("secure aggregation cannot be opened, it is tried again", error)
                await self._groups.changed(within_s=self._retry_s)
            else:
                await self._insist(event)
                return

    # --- aggregation

    async def _aggregate(self, command: Aggregate) -> None:
        async with self._aggregating:  # one that began before a stop may still be at work
            while self._is_owed(command.key):
                try:
                    event = await self._aggregated(command)
                except LoricaError as error:
                    self._fault(str(error))
                    self._complain("aggregation failed, it is tried again", error)
                    await asyncio.sleep(self._retry_s)
                else:
                    await self._insist(event)
                    return

    def _is_owed(self, key: RoundKey) -> bool:
        return isinstance(self._state, Aggregating) and self._state.key == key

    async def _aggregated(self, command: Aggregate) -> Aggregated | AggregationFailed | BudgetExhausted:
        opened = await self._desk.opened(command.key.plan)
        try:
            if command.masked is None:
                result = await asyncio.to_thread(
                    opened.parts.aggregator.aggregate, command.key, command.base_model, command.updates
                )
            else:
                aggregator = opened.parts.aggregator
                summed = aggregator.score_masked if command.closing else aggregator.aggregate_masked
                result = await asyncio.to_thread(summed, command.key, command.base_model, command.masked)
                if result.outcome is Outcome.APPLIED:
                    await asyncio.to_thread(self._checks.keep, opened, command, result.model)
        except UnusableUpdate as error:
            told = told_of_unusable(str(error), terms_of(opened.bundle.plan))
            self._complain(f"update of silo {error.silo} cannot be used", UnusableUpdate(error.silo, told))
            return AggregationFailed(now=self._steady(), key=command.key, silo=error.silo, reason=str(error))
        except BudgetSpent as error:
            _log.warning("plan ends", reason=str(error))
            return BudgetExhausted(now=self._steady(), key=command.key, reason=str(error))
        except (MalformedMessage, ConfigurationError) as error:
            if command.masked is None:
                raise
            # A sum that takes the model out of float32's range: nobody can see whose part of it that was.
            self._complain("masked sum cannot be used", error)
            return AggregationFailed(now=self._steady(), key=command.key, silo=None, reason=str(error))
        statement = model_statement(
            federation=command.key.federation,
            plan=command.key.plan,
            round_number=command.key.round,
            model=result.model,
        )
        signature = self._keys.sign(MODEL_DOMAIN, statement)
        return Aggregated(now=self._steady(), key=command.key, result=result, signature=signature)

    async def _insist(
        self, event: DeadlinePassed | MaskingOpened | Aggregated | AggregationFailed | BudgetExhausted
    ) -> None:
        """Post one of the loop's own events until it is persisted, or no longer fits."""
        while True:
            try:
                await self.post(event)
                return
            except StorageError as error:
                self._fault(str(error))
                self._complain("transition could not be saved, it is tried again", error)
                await asyncio.sleep(self._retry_s)
            except LoricaError as error:
                _log.info("event no longer fits", event_type=type(event).__name__, reason=str(error))
                return


def paid_until_next_save(left: float) -> float:
    """Of the seconds that are `left` of a deadline, how many count as over when that is saved: until it is saved
    again."""
    return max(PAID_LEAST_S, min(PAID_MOST_S, left * PAID_PART))


class _Stopping(Unreachable):
    def __init__(self) -> None:
        super().__init__("the coordinator is stopping: try again when it runs")


def _see(done: asyncio.Future[State]) -> None:
    """A caller that has gone away leaves its error unseen; asyncio would complain of that."""
    if not done.cancelled():
        done.exception()


def _log_failure(done: asyncio.Future[State]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, _Stopping):  # who is connected matters to nobody any longer
        _log.error("event was lost", kind=type(error).__name__, error=str(error))
