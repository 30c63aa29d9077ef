"""The agent's loop: an event comes, the machine steps, the journal is written, then effects are started.

Three things run beside the loop: attending to the coordinator's orders, at most one piece of work, and errands (what
must be told in order). A piece of work that was cancelled finishes leaving before the next begins, and its result is
dropped; what it refused is recorded all the same. Training and evaluation run in one worker thread.
"""

import asyncio

from lorica_security.errors import Conflict, FalseModel, LoricaError, StateError, WrongTime
from lorica_security.identifiers import FederationName
from silo_agent.rounds.effects import (
    AnswerMask,
    CancelWork,
    DeclareReadiness,
    DeclareTrained,
    Decline,
    Effect,
    EndMasking,
    Errand,
    FetchModel,
    FetchPlan,
    JournalActivity,
    JournalModel,
    JournalOutcome,
    JournalPlan,
    JournalRoundModel,
    JournalUpdate,
    RecordRefusal,
    ReportEvaluation,
    UploadUpdate,
    Work,
)
from silo_agent.rounds.events import (
    Event,
    PauseAsked,
    PlanRefused,
    Result,
    ResumeAsked,
    StopAsked,
    WorkFailed,
    WorkUnwanted,
)
from silo_agent.rounds.machine import step
from silo_agent.rounds.states import Agent, Holding, Idle, Stopped
from silo_agent.service.masking import Masking
from silo_agent.service.ports import (
    CoordinatorPort,
    DisplayPort,
    JournalPort,
    ModelChecksPort,
    ObserverPort,
    PlanGatePort,
    PlanStorePort,
    TrainerPort,
)
from silo_agent.service.privacy import PrivacyGuard
from silo_agent.service.refusals import rule_of
from silo_agent.service.told import reason, told
from silo_agent.service.work.joint_timing import JointTiming
from silo_agent.service.work.paid_releases import PaidReleases
from silo_agent.service.work.progress_reports import ProgressReports
from silo_agent.service.work.round_work import RoundWork
from silo_agent.service.work.worker_thread import WorkerThread, finished
from silo_wire.messages import RoundKey

STOP_S = 5.0
"""How long a stopping agent tries to tell the coordinator so."""
ERRANDS_WAITING = 16
"""More than an honest coordinator's orders ever leave to be told at once."""


class AgentService:
    """One silo's agent. Raises what `CoordinatorPort.orders` raises, FalseModel, StorageError of the journal, and
    defects."""

    def __init__(
        self,
        *,
        federation: FederationName,
        coordinator: CoordinatorPort,
        journal: JournalPort,
        plans: PlanStorePort,
        gate: PlanGatePort,
        trainer: TrainerPort,
        masking: Masking,
        checks: ModelChecksPort,
        privacy: PrivacyGuard,
        display: DisplayPort,
        observer: ObserverPort,
        holds_answers: bool = True,
    ) -> None:
        """`holds_answers`: False where nobody is told when this silo answers, in a simulation."""
        self._coordinator = coordinator
        self._journal = journal
        self._masking = masking
        self._false_model: FalseModel | None = None
        self._display = display
        self._observer = observer
        saved = journal.saved_update()
        # An attempt of secure aggregation that an earlier process began goes on, or is erased at the first order.
        holds = saved is not None and saved.masked and masking.under_way
        self._agent = Agent(
            phase=Holding(saved) if saved is not None and holds else Idle(),
            paused=journal.paused(),
            saved=saved,
            models=journal.round_models(),
        )
        self._thread = WorkerThread()
        self._progress = ProgressReports(coordinator, display)
        self._timing = JointTiming(self._thread, journal)
        self._pieces = RoundWork(
            federation=federation,
            coordinator=coordinator,
            journal=journal,
            plans=plans,
            gate=gate,
            trainer=trainer,
            masking=masking,
            checks=checks,
            display=display,
            releases=PaidReleases(privacy, coordinator, observer, self._thread),
            progress=self._progress,
            timing=self._timing,
            thread=self._thread,
            holds_answers=holds_answers,
        )
        self._inbox: asyncio.Queue[tuple[asyncio.Task[None] | None, Event]] = asyncio.Queue()
        self._errands: asyncio.Queue[Errand] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    @property
    def agent(self) -> Agent:
        return self._agent

    @property
    def waiting(self) -> tuple[int, int]:
        """Events that were not looked at yet, and errands that the coordinator was not told of yet."""
        return self._inbox.qsize(), self._errands.qsize()

    # ---- wishes, from signal handlers of the same thread ---------------------------------------------------------

    def stop(self) -> None:
        self._inbox.put_nowait((None, StopAsked()))

    def reread_journal(self) -> None:
        """Take over a pause or its end that another process wrote."""
        self._inbox.put_nowait((None, PauseAsked() if self._journal.paused() else ResumeAsked()))

    # ---- the loop -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`, or what ends the agent."""
        try:
            if not isinstance(self._agent.phase, Holding):
                await self._masking.end()  # without its update it serves nothing
            async with asyncio.TaskGroup() as group:
                attending = group.create_task(self._attend())
                telling = group.create_task(self._run_errands())
                reporting = group.create_task(self._progress.keep_telling())
                try:
                    while not isinstance(self._agent.phase, Stopped):
                        source, event = await self._inbox.get()
                        if source is None or source is self._work:
                            self._take(group, event)
                finally:
                    self._timing.end()
                attending.cancel()
                reporting.cancel()
                try:
                    async with asyncio.timeout(STOP_S):  # not wait_for, which can lose a cancellation in Python 3.11
                        await self._errands.join()
                except TimeoutError:
                    self._display.note("coordinator-not-told", detail="it did not answer while the agent stopped")
                telling.cancel()
        except ExceptionGroup as errors:
            raise _sole(errors) from errors
        finally:
            await self._timing.settle()
            self._thread.close()
        if self._false_model is not None:
            raise self._false_model

    def _take(self, group: asyncio.TaskGroup, event: Event) -> None:
        if not isinstance(event, Result):
            self._display.note("event", kind=type(event).__name__)
        self._agent, effects = step(self._agent, event)
        for effect in effects:
            self._begin(group, effect)

    def _begin(self, group: asyncio.TaskGroup, effect: Effect) -> None:
        match effect:
            case JournalActivity():
                self._journal.record(effect)
                self._display.activity(effect)
                self._observer.activity(effect)
            case RecordRefusal(rule=rule, detail=detail):
                self._observer.refused(rule, detail)
            case JournalOutcome(key=key, outcome=outcome, detail=detail):
                self._journal.record(effect)
                self._observer.round_ended(effect)
                work = "evaluation" if effect.evaluation else "training"
                self._display.note(
                    "round", round=key.round, attempt=key.attempt, work=work, outcome=outcome.value, detail=detail
                )
            case JournalPlan() | JournalModel() | JournalRoundModel() | JournalUpdate():
                self._journal.record(effect)
            case DeclareReadiness() | DeclareTrained() | Decline():
                self._errands.put_nowait(effect)
            case CancelWork():
                if self._work is not None:
                    self._work.cancel()
                    self._leaving, self._work = self._work, None
            case EndMasking(key=key):
                group.create_task(self._end_masking(key, self._work or self._leaving))
            case _:
                self._work = group.create_task(self._do(effect, self._work or self._leaving))

    async def _attend(self) -> None:
        async for order in self._coordinator.orders():
            self._inbox.put_nowait((None, order))
            if self._errands.qsize() > ERRANDS_WAITING:
                await self._errands.join()  # who does not listen is not listened to: nothing piles up here

    async def _run_errands(self) -> None:
        while True:
            errand = await self._errands.get()
            try:
                match errand:
                    case DeclareReadiness(plan=plan, ready=ready, reason=why):
                        self._display.note("readiness", ready=ready, reason=why)
                        await self._coordinator.declare_readiness(plan, ready=ready, reason=why)
                    case DeclareTrained(key=key, model=model):
                        await self._coordinator.declare_trained(key, model)
                    case Decline(key=key, reason=declined_for, detail=detail):
                        await self._coordinator.decline(key, declined_for, detail)
            except LoricaError as error:
                # The order that stands now follows on the stream; there is nothing to mend here.
                self._display.note("errand-refused", errand=type(errand).__name__, detail=str(error))
            finally:
                self._errands.task_done()

    # ---- work ---------------------------------------------------------------------------------------------------

    async def _end_masking(self, key: RoundKey, at_work: asyncio.Task[None] | None) -> None:
        if at_work is not None and not at_work.done():
            await asyncio.wait({at_work})
        await self._pieces.end_masking(key)

    async def _do(self, work: Work, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await finished(earlier)
        try:
            await self._timing.free()
            result = await self._pieces.perform(work)
        except LoricaError as error:
            self._display.note("work-failed", work=type(work).__name__, error=type(error).__name__, detail=str(error))
            if (rule := rule_of(error)) is not None:
                self._observer.refused(rule, str(error))
            result = _failure(work, error, private=self._pieces.private, masked=self._pieces.masked)
            if isinstance(error, FalseModel):
                self._false_model = error
        self._inbox.put_nowait((asyncio.current_task(), result))
        if self._false_model is not None:
            self.stop()  # with a coordinator that was caught people decide what goes on


def _failure(work: Work, error: LoricaError, *, private: bool, masked: bool) -> Result:
    """The event that a piece of work ended with; what the coordinator no longer wants is no failure of this silo."""
    why, heard = reason(error, private=private, masked=masked), told(error, private=private, masked=masked)
    match work:
        case FetchPlan(plan):
            return PlanRefused(plan=plan, reason=why, detail=str(error), told=heard)
        case FetchModel() | UploadUpdate() | ReportEvaluation() if isinstance(error, WrongTime | Conflict | StateError):
            return WorkUnwanted(str(error))
        case AnswerMask() if isinstance(error, WrongTime):  # a stale step, or an answer that came too late
            return WorkUnwanted(str(error))
        case _:
            return WorkFailed(reason=why, detail=str(error), told=heard)


def _sole(errors: ExceptionGroup[Exception]) -> Exception:
    """The one error that ended the agent; a defect before an error that somebody can act on."""
    leaves: list[Exception] = []
    for error in errors.exceptions:
        leaves.append(_sole(error) if isinstance(error, ExceptionGroup) else error)
    return next((leaf for leaf in leaves if not isinstance(leaf, LoricaError)), leaves[0])
