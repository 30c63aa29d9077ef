"""The agent's loop: an event comes, the machine steps, the journal is written, then effects are started.

Three things run beside the loop: attending to the coordinator's orders, at most one piece of work, and errands (what
must be told in order). A piece of work that was cancelled finishes leaving before the next begins, and its result is
dropped; what it refused is recorded all the same. Training and evaluation run in one worker thread.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorica_security.errors import (
    Conflict,
    DataError,
    FalseModel,
    IntegrityError,
    LoricaError,
    PolicyRefusal,
    StateError,
    WrongTime,
)
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import FederationName
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.rounds.as_planned import AsPlanned
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
    RunEvaluation,
    RunTraining,
    UploadUpdate,
    Work,
)
from silo_agent.rounds.events import (
    Evaluated,
    EvaluationDelivered,
    Event,
    MaskAnswered,
    ModelFetched,
    PauseAsked,
    PlanPrepared,
    PlanRefused,
    Result,
    ResumeAsked,
    SavedUpdate,
    StopAsked,
    Trained,
    Uploaded,
    WorkFailed,
    WorkUnwanted,
)
from silo_agent.rounds.machine import step
from silo_agent.rounds.states import Agent, Holding, Idle, Stopped
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.service.masking import Masking
from silo_agent.service.ports import (
    CoordinatorPort,
    DisplayPort,
    JournalPort,
    MaskedFile,
    ModelChecksPort,
    Notice,
    ObserverPort,
    PlanGatePort,
    PlanStorePort,
    Progress,
    RoundModel,
    TrainedUpdate,
    TrainerPort,
    WorkCancelled,
)
from silo_agent.service.privacy import PrivacyGuard
from silo_agent.service.refusals import rule_of
from silo_agent.service.told import reason, told
from silo_wire.canonical import Digest
from silo_wire.manifest import SCORES_ALONE
from silo_wire.messages import AgentPhase, Evaluate, Evaluation, Finished, Mask, RoundKey, Train
from silo_wire.plans.plan import Plan, PlanBundle

STOP_S = 5.0
"""How long a stopping agent tries to tell the coordinator so."""
ERRANDS_WAITING = 16
"""More than an honest coordinator's orders ever leave to be told at once."""
PROGRESS_S = 2.0
"""Between two reports of progress to the coordinator."""
LATE_S = 60.0
"""Under joint noise a silo that is late, or called off, begins nothing for a whole number of these: when it was done tells of its sample."""
_PROGRESS_STEP = 0.005  # of what a person sees

T = TypeVar("T")


class AgentService:
    """One silo's agent. Raises what `CoordinatorPort.orders` raises, FalseModel, StorageError of the journal, and defects."""

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
        self._holds_answers = holds_answers
        self._federation = federation
        self._coordinator = coordinator
        self._journal = journal
        self._plans = plans
        self._gate = gate
        self._trainer = trainer
        self._masking = masking
        self._checks = checks
        self._false_model: FalseModel | None = None
        self._privacy = privacy
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
        self._bundle: PlanBundle | None = None
        self._private, self._masked = False, False  # of the plan that was looked at last
        self._model: RoundModel | None = None
        self._written: tuple[Digest | None, FileMark | None] = None, None  # of the update that this process wrote last
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._inbox: asyncio.Queue[tuple[asyncio.Task[None] | None, Event]] = asyncio.Queue()
        self._errands: asyncio.Queue[Errand] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._reported: tuple[RoundKey, AgentPhase, float] | None = None
        self._report_due = asyncio.Event()
        self._ended = asyncio.Event()
        self._behind: asyncio.Task[None] | None = None  # what training that nobody waits for any more still does

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
                reporting = group.create_task(self._report_progress())
                try:
                    while not isinstance(self._agent.phase, Stopped):
                        source, event = await self._inbox.get()
                        if source is None or source is self._work:
                            self._take(group, event)
                finally:
                    self._ended.set()
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
            if self._behind is not None:
                await _done(self._behind)
            self._thread.shutdown()
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

    async def _do(self, work: Work, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await _done(earlier)
        try:
            if self._behind is not None:
                behind, self._behind = self._behind, None
                await _done(behind)
                behind.result()
            result = await self._perform(work)
        except LoricaError as error:
            self._display.note("work-failed", work=type(work).__name__, error=type(error).__name__, detail=str(error))
            if (rule := rule_of(error)) is not None:
                self._observer.refused(rule, str(error))
            result = _failure(work, error, private=self._private, masked=self._masked)
            if isinstance(error, FalseModel):
                self._false_model = error
        self._inbox.put_nowait((asyncio.current_task(), result))
        if self._false_model is not None:
            self.stop()  # with a coordinator that was caught people decide what goes on

    async def _perform(self, work: Work) -> Result:
        match work:
            case FetchPlan(plan):
                return PlanPrepared(plan, await self._prepare(plan))
            case FetchModel(order):
                return await self._fetch_model(order)
            case RunTraining(order):
                return await self._train(order)
            case AnswerMask(order, update):
                return await self._answer_mask(order, update)
            case UploadUpdate(update):
                await self._countersign(update)
                self._gate.check_upload(update.manifest)
                written, mark = self._written
                await self._coordinator.upload(
                    update,
                    self._journal.update_file(update.key),
                    mark=mark if written == update.manifest.digest else None,
                    progress=self._progress(update.key, AgentPhase.UPLOADING),
                )
                return Uploaded(update.key)
            case RunEvaluation(order):
                return await self._evaluate(order)
            case ReportEvaluation(order, evaluation):
                await self._coordinator.report_evaluation(order.key, order.model, evaluation)
                return EvaluationDelivered(order.key)

    async def _prepare(self, plan: Digest) -> AsPlanned:
        bundle = self._plans.load(plan)
        if bundle is None:
            bundle = await self._coordinator.fetch_plan(plan)
        if bundle.plan.federation != self._federation:
            raise IntegrityError(
                f"plan {bundle.plan.name} is of federation {bundle.plan.federation}, this silo is of {self._federation}"
            )
        releases = bundle.plan.releases_of_round
        self._private, self._masked = bool(releases), bundle.plan.aggregation.secure_aggregation
        try:
            await self._in_thread(
                lambda _cancelled: self._gate.check_plan(bundle)
            )  # what it costs takes seconds to tell
            if bundle.plan.aggregation.secure_aggregation:
                self._masking.check_memory()
        except PolicyRefusal:
            self._plans.keep_refused(bundle)  # for its people to look at
            raise
        self._plans.save(bundle)
        if releases:
            await self._afford(bundle)  # before others wait for a silo that will decline
        base: RoundModel | None = None
        if bundle.base_layout is not None:
            base = await self._coordinator.fetch_base(
                plan=plan,
                layout=bundle.base_layout,
                model=Digest(str(bundle.plan.model.base)),
                progress=self._progress(None, AgentPhase.FETCHING),
            )
        data = await self._in_thread(lambda _cancelled: self._trainer.prepare(bundle, base))
        if releases:  # by now it is known who else has these records
            unit = bundle.plan.privacy.unit_field
            await self._in_thread(lambda _cancelled: self._privacy.admit(releases, unit=unit))
        self._display.note(
            "prepared",
            plan=bundle.plan.name,
            train_examples=data.train_examples,
            dev_examples=data.dev_examples,
            bad_lines=data.bad_lines,
        )
        for problem in data.problems:
            self._display.note("bad-line", detail=problem)
        self._bundle = bundle
        return self._allows(bundle)

    def _allows(self, bundle: PlanBundle) -> AsPlanned:
        return AsPlanned(timetable=bundle.plan.timetable, tells_scores=self._gate.tells_scores)

    async def _fetch_model(self, order: Train | Evaluate | Finished) -> ModelFetched:
        bundle = self._prepared(order.plan if isinstance(order, Finished) else order.key.plan)
        key: RoundKey | None = None
        match order:
            case Train(key=key):
                latest = key.round - 1
            case Evaluate(key=key):
                latest = key.round
            case Finished(rounds=latest):
                pass
        model = order.best_model if isinstance(order, Finished) else order.model
        self._gate.check_model(bundle, model, latest_round=latest)
        masked = bundle.plan.aggregation.secure_aggregation
        if masked and key is not None:
            self._masking.saw(bundle, model, latest)
        if isinstance(order, Train):
            await self._checks.require(bundle, model)
        self._model = await self._coordinator.fetch_model(
            plan=bundle.plan.digest,
            layout=bundle.model_layout,
            key=key,
            model=model,
            latest_round=latest,
            progress=self._progress(key, AgentPhase.FETCHING),
        )
        if masked and key is None:
            self._masking.saw(bundle, model)  # which is there: an order could name any number of models that are none
        return ModelFetched(model)

    async def _train(self, order: Train) -> Trained:
        began = asyncio.get_running_loop().time()
        bundle = self._prepared(order.key.plan)
        model = self._fetched(order.model)
        releases = bundle.plan.releases_of_round
        if releases:
            await self._afford(bundle)  # before hours of training that would come to nothing
        scores = await self._scores(order, bundle, model)  # of the very model that the round begins with
        update_file = self._journal.new_update_file(order.key)
        if bundle.plan.timetable.is_closing(order.key.round):
            return await self._close(order, update_file, scores)
        checkpoint_file = self._journal.checkpoint_file(order.model)
        progress = self._progress(order.key, AgentPhase.TRAINING, told=_steps_are_told(bundle))
        if bundle.plan.joint:
            progress(0.0)
            progress = self._progress(None, AgentPhase.TRAINING)  # that there is a next step is told to nobody either
        notice = self._notice()
        training = self._in_thread(
            lambda cancelled: self._trainer.train(
                bundle=bundle,
                key=order.key,
                model=model,
                update_file=update_file,
                included_update=order.included_update,
                checkpoint_file=checkpoint_file,
                progress=progress,
                notice=notice,
                cancelled=cancelled,
            )
        )
        if bundle.plan.joint and self._holds_answers:
            training = self._when_due(began + bundle.plan.privacy.answer_after_s, training, order.key, bundle.plan)
        trained = await training
        trained.manifest.check_layout(bundle.update_layout)
        self._written = trained.manifest.digest, trained.mark
        if releases and bundle.plan.noise_at == "nowhere":
            unit = bundle.plan.privacy.unit_field
            await self._in_thread(lambda _cancelled: self._privacy.spend(order.key, releases, unit=unit))
            spent = await self._tell_spent()
            self._display.note("trained", round=order.key.round, epsilon_spent=round(spent, 3))
            await self._privacy.countersign(self._coordinator)  # before anything says that there is an update
        else:
            self._display.note(
                "trained",
                round=order.key.round,
                examples=trained.summary.examples,
                loss_first=trained.summary.loss_first,
                loss_last=trained.summary.loss_last,
                loss_reduction=trained.summary.loss_reduction,
                seconds=trained.summary.seconds,
            )
        return Trained(
            SavedUpdate(
                key=order.key,
                model=order.model,
                manifest=trained.manifest,
                summary=trained.summary,
                masked=bundle.plan.aggregation.secure_aggregation,
                private=bool(releases) and not bundle.plan.joint,
                scores=scores,
            )
        )

    async def _when_due(
        self, due: float, work: Coroutine[Any, Any, TrainedUpdate], key: RoundKey, plan: Plan
    ) -> TrainedUpdate:
        """What `work` comes to, under joint noise: neither sooner nor later than `due`, whichever way it ends.

        Who answers, fails or begins other work as soon as it can tells by that how many records its sample has. Raises StateError
        for what is not done then. The sum of what did not come to an answer is erased; nothing begins before that, and a while after.
        """
        working = asyncio.create_task(work)
        try:
            await self._hidden_until(due)
            if working.done():
                return working.result()
        except BaseException:
            self._behind = asyncio.create_task(self._given_up(working, key, due))
            raise
        self._behind = asyncio.create_task(self._given_up(working, key, due))
        raise StateError(
            f"the gradients were not there {plan.privacy.answer_after_s:g} s after the order, which is [privacy] answer_after_s of plan "
            f"{plan.name}: nothing leaves; have the operator raise it, or give this silo a faster machine"
        )

    async def _given_up(self, working: asyncio.Task[TrainedUpdate], key: RoundKey, due: float) -> None:
        """Return when nobody can tell any more when `working` would have been done."""
        working.cancel()
        await asyncio.wait({working})
        await self._in_thread(lambda _cancelled: self._journal.erase_update(key))
        late = asyncio.get_running_loop().time() - due
        await self._hidden_until(due + LATE_S * max(1, math.ceil(late / LATE_S)))
        error = None if working.cancelled() else working.exception()
        if error is not None and not isinstance(error, LoricaError):
            raise error

    async def _hidden_until(self, due: float) -> None:
        """Return then, also when cancelled; sooner only where this agent ends."""
        cancelled: asyncio.CancelledError | None = None
        while asyncio.get_running_loop().time() < due and not self._ended.is_set():
            try:
                async with asyncio.timeout_at(due):
                    await self._ended.wait()
            except TimeoutError:
                pass
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _scores(self, order: Train, bundle: PlanBundle, model: RoundModel) -> Scores:
        """What this silo adds to the sum of scores: zeros, which nobody can tell from others, where it has none to tell."""
        if not self._allows(bundle).scores(order):
            return NO_SCORES
        progress = self._progress(order.key, AgentPhase.TRAINING, told=False)  # who withholds them looks no different
        try:
            evaluation = await self._evaluated(bundle, model, progress, round_number=order.key.round - 1)
        except (DataError, PolicyRefusal, TrainingDiverged) as error:
            self._display.note("no-scores", round=order.key.round - 1, detail=str(error))
            return NO_SCORES
        return Scores.told(
            questions=evaluation.examples,
            exact_matches=evaluation.exact_matches,
            executed=evaluation.executed,
            execution_matches=evaluation.execution_matches,
            loss_per_token=evaluation.loss_per_token,
        )

    async def _close(self, order: Train, update_file: Path, scores: Scores) -> Trained:
        """A closing round: nobody trains, and every silo's update is the same but for the scores."""
        trained = await self._in_thread(lambda _cancelled: self._trainer.no_training(update_file=update_file))
        trained.manifest.check_layout(SCORES_ALONE)
        self._written = trained.manifest.digest, trained.mark
        update = SavedUpdate(
            key=order.key,
            model=order.model,
            manifest=trained.manifest,
            summary=trained.summary,
            masked=True,
            scores=scores,
        )
        return Trained(update)

    async def _afford(self, bundle: PlanBundle) -> None:
        """Raise IntegrityError for a ledger that went back, BudgetSpent where a round of this plan would cost too much."""
        releases, unit = bundle.plan.releases_of_round, bundle.plan.privacy.unit_field
        await self._privacy.countersign(self._coordinator)
        await self._in_thread(lambda _cancelled: self._privacy.check(releases, unit=unit))
        await self._tell_spent()

    async def _tell_spent(self) -> float:
        spent, alone = await self._in_thread(lambda _cancelled: self._spent())
        self._observer.epsilon(spent=spent, allowed=self._privacy.budget.epsilon)
        self._observer.epsilon_alone(spent=alone, allowed=self._privacy.budget.alone)
        return spent

    def _spent(self) -> tuple[float, float]:
        counted = self._privacy.counted()
        return counted.epsilon(), counted.epsilon_alone() if counted.joint() else 0.0

    async def _countersign(self, update: SavedUpdate) -> None:
        """An update that an earlier process saved may come from a disk that went back since."""
        if update.private:
            await self._privacy.countersign(self._coordinator)

    async def _answer_mask(self, order: Mask, update: SavedUpdate) -> MaskAnswered:
        bundle = self._prepared(order.key.plan)
        if not self._gate.tells_scores:  # its people may have said so since it trained
            update = replace(update, scores=NO_SCORES)
        progress = self._progress(order.key, AgentPhase.MASKING)

        written, mark = self._written
        mark = mark if written == update.manifest.digest else None

        async def mask(work: MaskVector) -> MaskedFile:
            masked = await self._in_thread(
                lambda cancelled: self._trainer.mask(
                    bundle=bundle,
                    update=update,
                    update_file=self._journal.update_file(update.key),
                    mark=mark,
                    out=self._masking.new_vector_file(),
                    work=work,
                    progress=progress,
                    cancelled=cancelled,
                )
            )
            self._gate.check_upload(masked.manifest, masked=True)
            if bundle.plan.noise_at == "silos":  # each started upload counts, also of an update that was masked before
                releases, unit = bundle.plan.releases_of_round, bundle.plan.privacy.unit_field
                await self._in_thread(lambda _cancelled: self._privacy.spend(order.key, releases, unit=unit))
                await self._tell_spent()
                await self._privacy.countersign(self._coordinator)  # before a byte of it leaves
            if bundle.plan.joint:  # one sample is in one sum
                await self._in_thread(lambda _cancelled: self._journal.erase_update(update.key))
            return masked

        if bundle.plan.releases_of_round:
            await self._privacy.countersign(self._coordinator)
        revealed = await self._masking.answer(order, update, bundle, mask=mask, progress=progress)
        return MaskAnswered(key=order.key, revealed=revealed)

    async def _end_masking(self, key: RoundKey, at_work: asyncio.Task[None] | None) -> None:
        if at_work is not None and not at_work.done():
            await asyncio.wait({at_work})
        try:
            bundle = self._bundle
            if bundle is None or bundle.plan.digest != key.plan:  # since an earlier process
                bundle = self._plans.load(key.plan)
            if bundle is not None and bundle.plan.joint:
                await self._in_thread(lambda _cancelled: self._journal.erase_update(key))
            await self._masking.end()
        except LoricaError as error:
            self._display.note("not-erased", detail=str(error))

    async def _evaluate(self, order: Evaluate) -> Evaluated:
        bundle = self._prepared(order.key.plan)
        progress = self._progress(order.key, AgentPhase.EVALUATING)
        evaluation = await self._evaluated(bundle, self._fetched(order.model), progress, round_number=order.key.round)
        return Evaluated(order.key, evaluation)

    async def _evaluated(
        self, bundle: PlanBundle, model: RoundModel, progress: Progress, *, round_number: int
    ) -> Evaluation:
        evaluation = await self._in_thread(
            lambda cancelled: self._trainer.evaluate(bundle=bundle, model=model, progress=progress, cancelled=cancelled)
        )
        self._display.note(
            "evaluated",
            round=round_number,
            examples=evaluation.examples,
            exact_matches=evaluation.exact_matches,
            executed=evaluation.executed,
            execution_matches=evaluation.execution_matches,
        )
        return evaluation

    async def _in_thread(self, call: Callable[[Callable[[], bool]], T]) -> T:
        """`call(cancelled)` in the worker thread; when this task is cancelled, `cancelled` says so and the thread is waited for."""
        stop = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, stop.is_set)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            while not running.done():
                try:
                    await asyncio.wait({running})
                except asyncio.CancelledError:
                    continue  # the thread is on its way out already
            error = running.exception()
            if error is not None and not isinstance(error, WorkCancelled | LoricaError):
                raise error from None
            raise

    def _prepared(self, plan: Digest) -> PlanBundle:
        if self._bundle is None or self._bundle.plan.digest != plan:
            raise StateError(f"plan {plan} is not prepared: nothing was done under it")
        return self._bundle

    def _fetched(self, model: Digest) -> RoundModel:
        if self._model is None or self._model.manifest.digest != model:
            raise StateError(f"model {model} is not fetched: nothing was done with it")
        return self._model

    def _notice(self) -> Notice:
        """For work in another thread."""
        loop = asyncio.get_running_loop()

        def tell(event: str, detail: str) -> None:
            loop.call_soon_threadsafe(partial(self._display.note, event, detail=detail))

        return tell

    # ---- progress -----------------------------------------------------------------------------------------------

    def _progress(self, key: RoundKey | None, phase: AgentPhase, *, told: bool = True) -> Progress:
        """For work in this thread or another; passes on what a person could see. Unless `told`, the coordinator hears of the phase alone."""
        loop = asyncio.get_running_loop()
        shown = -1.0

        def report(fraction: float) -> None:
            nonlocal shown
            fraction = min(max(fraction, 0.0), 1.0)
            if fraction - shown >= _PROGRESS_STEP or fraction == 1.0 > shown:
                shown = fraction
                loop.call_soon_threadsafe(self._progressed, key, phase, fraction, told)

        return report

    def _progressed(self, key: RoundKey | None, phase: AgentPhase, fraction: float, told: bool) -> None:
        self._display.progress(fraction)
        report = None if key is None else (key, phase, fraction if told else 0.0)
        if report is not None and report != self._reported:
            self._reported = report
            self._report_due.set()

    async def _report_progress(self) -> None:
        while True:
            await self._report_due.wait()
            self._report_due.clear()
            if self._reported is not None:
                await self._coordinator.report_progress(*self._reported)
                await asyncio.sleep(PROGRESS_S)


async def _done(earlier: asyncio.Task[None]) -> None:
    """Return then, also when cancelled: what begins after this one waits for this one alone."""
    cancelled: asyncio.CancelledError | None = None
    while not earlier.done():
        try:
            await asyncio.wait({earlier})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _steps_are_told(bundle: PlanBundle) -> bool:
    """One step's part of a training tells how many there are, and that how many records, where not the plan says how many."""
    plan = bundle.plan
    if plan.joint:
        return False
    return plan.privacy.level == "record" or not (plan.aggregation.secure_aggregation or plan.privacy.level == "silo")


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
