"""What each piece of work does: a plan is prepared, a model fetched, an update trained, masked and delivered, a model
scored."""

import asyncio
from dataclasses import replace
from pathlib import Path

from lorica_security.errors import DataError, IntegrityError, LoricaError, PolicyRefusal, StateError
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import FederationName
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.rounds.as_planned import AsPlanned
from silo_agent.rounds.effects import (
    AnswerMask,
    FetchModel,
    FetchPlan,
    ReportEvaluation,
    RunEvaluation,
    RunTraining,
    UploadUpdate,
    Work,
)
from silo_agent.rounds.events import (
    Evaluated,
    EvaluationDelivered,
    MaskAnswered,
    ModelFetched,
    PlanPrepared,
    Result,
    SavedUpdate,
    Trained,
    Uploaded,
)
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.service.masking import Masking
from silo_agent.service.ports import (
    CoordinatorPort,
    DisplayPort,
    JournalPort,
    MaskedFile,
    ModelChecksPort,
    PlanGatePort,
    PlanStorePort,
    Progress,
    RoundModel,
    TrainerPort,
)
from silo_agent.service.work.joint_timing import JointTiming
from silo_agent.service.work.paid_releases import PaidReleases
from silo_agent.service.work.progress_reports import ProgressReports
from silo_agent.service.work.worker_thread import WorkerThread
from silo_wire.canonical import Digest
from silo_wire.manifest import SCORES_ALONE
from silo_wire.messages import AgentPhase, Evaluate, Evaluation, Finished, Mask, RoundKey, Train
from silo_wire.plans.plan import PlanBundle


class RoundWork:
    """One piece of work at a time, on the plan and the model that earlier pieces have fetched."""

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
        display: DisplayPort,
        releases: PaidReleases,
        progress: ProgressReports,
        timing: JointTiming,
        thread: WorkerThread,
        holds_answers: bool,
    ) -> None:
        """`holds_answers`: False where nobody is told when this silo answers, in a simulation."""
        self._federation = federation
        self._coordinator, self._journal, self._plans = coordinator, journal, plans
        self._gate, self._trainer, self._masking, self._checks = gate, trainer, masking, checks
        self._display, self._releases = display, releases
        self._progress, self._timing, self._thread = progress, timing, thread
        self._holds_answers = holds_answers
        self._bundle: PlanBundle | None = None
        self.private, self.masked = False, False  # of the plan that was looked at last
        self._model: RoundModel | None = None
        self._written: tuple[Digest | None, FileMark | None] = None, None  # of the update that this process wrote last

    async def perform(self, work: Work) -> Result:
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
                    progress=self._progress.of(update.key, AgentPhase.UPLOADING),
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
        releases = bool(bundle.plan.releases_of_round)
        self.private, self.masked = releases, bundle.plan.aggregation.secure_aggregation
        try:
            # What it costs takes seconds to tell.
            await self._thread.run(lambda _cancelled: self._gate.check_plan(bundle))
            if bundle.plan.aggregation.secure_aggregation:
                self._masking.check_memory()
        except PolicyRefusal:
            self._plans.keep_refused(bundle)  # for its people to look at
            raise
        self._plans.save(bundle)
        if releases:
            await self._releases.afford(bundle)  # before others wait for a silo that will decline
        base: RoundModel | None = None
        if bundle.base_layout is not None:
            base = await self._coordinator.fetch_base(
                plan=plan,
                layout=bundle.base_layout,
                model=Digest(str(bundle.plan.model.base)),
                progress=self._progress.of(None, AgentPhase.FETCHING),
            )
        data = await self._thread.run(lambda _cancelled: self._trainer.prepare(bundle, base))
        if releases:  # by now it is known who else has these records
            await self._releases.admit(bundle)
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
        return AsPlanned(
            timetable=bundle.plan.timetable,
            tells_scores=self._gate.tells_scores,
            silo=self._gate.silo,
            who=bundle.plan.semi_supervised.who_trains,
        )

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
            progress=self._progress.of(key, AgentPhase.FETCHING),
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
            await self._releases.afford(bundle)  # before hours of training that would come to nothing
        scores = await self._scores(order, bundle, model)  # of the very model that the round begins with
        update_file = self._journal.new_update_file(order.key)
        if bundle.plan.timetable.is_closing(order.key.round):
            return await self._close(order, update_file, scores)
        checkpoint_file = self._journal.checkpoint_file(order.model)
        told_before = self._journal.told_before(order.key) if bundle.plan.aggregation.reduction_memory else None
        progress = self._progress.of(order.key, AgentPhase.TRAINING, told=_steps_are_told(bundle))
        if bundle.plan.joint:
            progress(0.0)
            # That there is a next step is told to nobody either.
            progress = self._progress.of(None, AgentPhase.TRAINING)
        notice = self._progress.notice()
        training = self._thread.run(
            lambda cancelled: self._trainer.train(
                bundle=bundle,
                key=order.key,
                model=model,
                update_file=update_file,
                included_update=order.included_update,
                told_before=told_before,
                checkpoint_file=checkpoint_file,
                progress=progress,
                notice=notice,
                cancelled=cancelled,
            )
        )
        if bundle.plan.joint and self._holds_answers:
            training = self._timing.when_due(
                began + bundle.plan.privacy.answer_after_s, training, order.key, bundle.plan
            )
        trained = await training
        trained.manifest.check_layout(bundle.update_layout)
        self._written = trained.manifest.digest, trained.mark
        if releases and bundle.plan.noise_at == "nowhere":
            spent = await self._releases.spend(order.key, bundle)
            self._display.note("trained", round=order.key.round, epsilon_spent=round(spent, 3))
            await self._releases.countersign()  # before anything says that there is an update
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
        if why := bundle.plan.no_weight(trained.summary):
            self._display.note("no-loss-reduction", round=order.key.round, detail=why)
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

    async def _scores(self, order: Train, bundle: PlanBundle, model: RoundModel) -> Scores:
        """What this silo adds to the sum of scores: zeros, which nobody can tell from others, where it has none to
        tell."""
        if not self._allows(bundle).scores(order):
            return NO_SCORES
        progress = self._progress.of(
            order.key, AgentPhase.TRAINING, told=False
        )  # who withholds them looks no different
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
        trained = await self._thread.run(lambda _cancelled: self._trainer.no_training(update_file=update_file))
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

    async def _countersign(self, update: SavedUpdate) -> None:
        """An update that an earlier process saved may come from a disk that went back since."""
        if update.private:
            await self._releases.countersign()

    async def _answer_mask(self, order: Mask, update: SavedUpdate) -> MaskAnswered:
        bundle = self._prepared(order.key.plan)
        if not self._gate.tells_scores:  # its people may have said so since it trained
            update = replace(update, scores=NO_SCORES)
        progress = self._progress.of(order.key, AgentPhase.MASKING)

        written, mark = self._written
        mark = mark if written == update.manifest.digest else None

        async def mask(work: MaskVector) -> MaskedFile:
            masked = await self._thread.run(
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
                await self._releases.spend(order.key, bundle)
                await self._releases.countersign()  # before a byte of it leaves
            if bundle.plan.joint:  # one sample is in one sum
                await self._thread.run(lambda _cancelled: self._journal.erase_update(update.key))
            return masked

        if bundle.plan.releases_of_round:
            await self._releases.countersign()
        revealed = await self._masking.answer(order, update, bundle, mask=mask, progress=progress)
        return MaskAnswered(key=order.key, revealed=revealed)

    async def end_masking(self, key: RoundKey) -> None:
        """Erase what is left of an attempt; people hear of what could not be erased."""
        try:
            bundle = self._bundle
            if bundle is None or bundle.plan.digest != key.plan:  # since an earlier process
                bundle = self._plans.load(key.plan)
            if bundle is not None and bundle.plan.joint:
                await self._thread.run(lambda _cancelled: self._journal.erase_update(key))
            await self._masking.end()
        except LoricaError as error:
            self._display.note("not-erased", detail=str(error))

    async def _evaluate(self, order: Evaluate) -> Evaluated:
        bundle = self._prepared(order.key.plan)
        progress = self._progress.of(order.key, AgentPhase.EVALUATING)
        evaluation = await self._evaluated(bundle, self._fetched(order.model), progress, round_number=order.key.round)
        return Evaluated(order.key, evaluation)

    async def _evaluated(
        self, bundle: PlanBundle, model: RoundModel, progress: Progress, *, round_number: int
    ) -> Evaluation:
        evaluation = await self._thread.run(
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

    def _prepared(self, plan: Digest) -> PlanBundle:
        if self._bundle is None or self._bundle.plan.digest != plan:
            raise StateError(f"plan {plan} is not prepared: nothing was done under it")
        return self._bundle

    def _fetched(self, model: Digest) -> RoundModel:
        if self._model is None or self._model.manifest.digest != model:
            raise StateError(f"model {model} is not fetched: nothing was done with it")
        return self._model


def _steps_are_told(bundle: PlanBundle) -> bool:
    """One step's part of a training tells how many there are, and that how many records, where not the plan says how
    many."""
    plan = bundle.plan
    if plan.joint:
        return False
    return plan.privacy.level == "record" or not (plan.aggregation.secure_aggregation or plan.privacy.level == "silo")
