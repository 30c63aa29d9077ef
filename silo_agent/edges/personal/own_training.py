"""`silo-agent personal train`: this silo's own models are trained and scored beside the newest global model.

It works on what the agent has collected, dials nobody and writes below `personal` alone. What is done is recorded step
by step, and what was done for the same model, data and settings is not done again. Imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lorica_security.errors import StorageError
from silo_agent.edges.personal.own_models import Collected, OwnModels, read_model
from silo_agent.edges.personal.own_scores import OwnScores, Scored, Which, completion
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.edges.workshop.workshop import on_records
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.ports import Cancelled, Notice, RoundModel
from silo_agent.settings import Settings
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import judged_on
from silo_agent.training.model.initial_model import is_from_seed, seeded_vector
from silo_agent.training.personal_trainer import Goal, OwnSettings, PersonalTrainer
from silo_wire.canonical import Digest


class OwnTraining:
    """Raises DataError for data that cannot be used, and what training raises; WorkCancelled soon after `cancelled()`
    turns true, with the last whole epoch on disk."""

    def __init__(
        self,
        collected: Collected,
        own: OwnModels,
        *,
        settings: Settings,
        policy: SiloPolicy,
        sources: SiloSources,
        notice: Notice,
        cancelled: Cancelled,
    ) -> None:
        self._bundle, self._global, self._own = collected.bundle, collected.newest, own
        self._sources, self._notice, self._cancelled = sources, notice, cancelled
        plan, chosen = collected.bundle.plan, settings.personal
        self._chosen = chosen
        assert chosen.method != "none", "the caller looks"
        with on_records():
            data = sources.data_for(Reading.of(plan, policy.silo))
            device = DeviceSettings(device=settings.training.device, threads=settings.training.threads)
            self._trainer = PersonalTrainer(
                collected.bundle,
                data,
                policy.silo,
                device,
                OwnSettings(
                    method=chosen.method,
                    epochs=chosen.epochs,
                    learning_rate=chosen.learning_rate,
                    ditto_lambda=chosen.ditto_lambda,
                    adapter_rank=chosen.adapter_rank,
                ),
                base=collected.base,
            )
            executes = (
                plan.task.is_sql
                and plan.evaluation.execution
                and policy.rules.allow_execution
                and sources.database() is not None
            )
            self._executes, self._questions = executes, f"{self._trainer.questions()} {'run' if executes else 'read'}"

    def run(self) -> OwnScores:
        """All that is to be done for the newest global model; the scores as they stand then."""
        with on_records():
            self._trainer.personal(self._global.manifest.digest)  # what cannot be trained is refused before any work
            self._begin()
            self._personal()
            self._local()
            self._change(complete=completion(self._global.manifest.digest, self._chosen))
        self._own.delete_others(self._own.record.read())
        return self._own.record.read()

    # ---- the steps ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget what is of another plan, score anew what was scored on other questions, score the global model."""
        before = self._own.record.read()
        if before.plan != self._bundle.plan.digest:
            before = OwnScores(plan=self._bundle.plan.digest, score=self._bundle.plan.task.score)
            self._own.record.change(lambda _: before)
        if before.questions != self._questions:
            again = {
                which: self._scored(model, scored.method, scored.goal)
                for which, scored in before.scores.items()
                if which != "global" and (model := self._model_of(scored))
            }
            self._change(questions=self._questions, scores=again)
        known = self._known("global")
        if known is None or known.model != self._global.manifest.digest:
            self._keep("global", self._scored(self._global))

    def _personal(self) -> None:
        goal = self._trainer.personal(self._global.manifest.digest)
        known = self._known("personal")
        kept = self._model_of(known) if known is not None else None
        if known is not None and kept is not None and known.goal == goal.digest:
            return
        goes_on = known is not None and known.method == goal.method == "ditto"
        start = kept if goes_on and kept is not None else self._global
        self._train("personal", goal, start=start, towards=self._global)

    def _local(self) -> None:
        goal = self._trainer.local()
        known = self._known("local")
        if known is not None and known.goal == goal.digest and self._model_of(known) is not None:
            return
        with self._initial() as start:
            if start is None:
                self._change(no_local=_NO_INITIAL)
                return
            self._train("local", goal, start=start, towards=start)
        self._change(no_local="")

    def _train(self, which: Which, goal: Goal, *, start: RoundModel, towards: RoundModel) -> None:
        own = self._own
        by = "" if which == "local" else f" by {goal.method}"
        self._notice("training", f"the {which} model{by}, {goal.section.epochs} epochs")
        manifest = self._trainer.train(
            goal,
            start=start,
            towards=towards,
            out=own.draft,
            checkpoint=own.checkpoint(which),
            on_notice=self._notice,
            should_stop=self._cancelled,
        )
        self._keep(which, self._scored(own.name_draft(manifest), goal.method, goal.digest))
        own.checkpoint(which).unlink(missing_ok=True)

    # ---- what they rest on ----------------------------------------------------------------------------------------

    def _known(self, which: Which) -> Scored | None:
        return self._own.record.read().scores.get(which)

    def _model_of(self, scored: Scored) -> RoundModel | None:
        return self._own.model(Digest(scored.model), self._bundle.layout)

    @contextmanager
    def _initial(self) -> Iterator[RoundModel | None]:
        """The plan's initial model, for as long as it is used: as the agent kept it, or made again from the plan's
        seed."""
        digest = self._bundle.plan.initial_model
        if kept := self._own.initial(digest, self._bundle.model_layout):
            yield kept
        elif not is_from_seed(self._bundle):
            yield None
        else:
            try:
                made = self._made_again()
                yield made if made is not None and made.manifest.digest == digest else None
            finally:
                self._own.seeded.unlink(missing_ok=True)

    def _made_again(self) -> RoundModel | None:
        file = self._own.seeded
        try:
            with file.open("wb") as written:
                written.writelines(seeded_vector(self._bundle))
        except OSError as error:
            raise StorageError(f"{file} cannot be written: {error.strerror}; free some space") from error
        return read_model(file, self._bundle.model_layout)

    def _scored(self, model: RoundModel, method: str = "", goal: str | None = None) -> Scored:
        right: dict[str, float] = {}
        target = self._sources.database() if self._executes else None
        with judged_on(target, self._sources.limits()) as same_result:
            evaluation = self._trainer.evaluate(
                model, same_result=same_result, on_parts=right.update, should_stop=self._cancelled
            )
        return Scored.of(model.manifest.digest, evaluation, right, method=method, goal=goal)

    def _keep(self, which: Which, scored: Scored) -> None:
        self._change(scores={**self._own.record.read().scores, which: scored})

    def _change(self, **values: object) -> None:
        self._own.record.change(lambda now: now.model_copy(update=values))


_NO_INITIAL = (
    "the plan's initial model is not here, and its seed does not make it on this machine: set [personal] before the "
    "first round of a plan"
)
