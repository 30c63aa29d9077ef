"""`TrainerPort` of a silo that trains in several processes: training is the ranks', all else this process's own.

The agent's own workshop reads the data, keeps the plan's model, scores and masks, as in a silo of one process: so a
rank has neither the database nor a key, and what leaves is made where it always is.
"""

from pathlib import Path
from typing import Final

from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.edges.keys.own_entropy import own_entropy
from silo_agent.edges.ranks import frames
from silo_agent.edges.ranks.launching import check_launch, threads_of_a_rank
from silo_agent.edges.ranks.rank_group import GroupLost, RankGroup
from silo_agent.edges.ranks.versions import versions
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.rank_limits import rank_refusals
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import (
    Cancelled,
    DataSummary,
    MaskedFile,
    Notice,
    Progress,
    RoundModel,
    TrainedUpdate,
    WorkCancelled,
)
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation, RoundKey
from silo_wire.plans.plan import PlanBundle

GROUPS: Final = 3
"""That are tried for one training: one that was lost twice more is not lost by chance."""


class RankTrainer:
    """Not for use by several threads at once. `close` ends the ranks."""

    def __init__(
        self,
        own: Workshop,
        *,
        settings: Settings,
        policy: SiloPolicy,
        folder: Path,
        entropy: Path,
    ) -> None:
        """`own` does what ranks do not. `folder` is where groups have theirs, `entropy` the file of the silo's own."""
        self._own, self._settings, self._policy = own, settings, policy
        self._folder, self._entropy = folder, entropy
        self._group: RankGroup | None = None
        self._plan: Digest | None = None
        self._base: RoundModel | None = None

    def prepare(self, bundle: PlanBundle, base: RoundModel | None, /) -> DataSummary:
        """Ranks are started here, so that a silo declares itself ready only when they have met."""
        section = self._settings.training
        for refusal in rank_refusals(
            self._policy.silo, bundle.plan, section.processes, section.rank_interface, sharded=section.sharded
        ):
            raise refusal
        check_launch(section)
        self.close()
        self._base = base
        summary = self._own.prepare(bundle, base)
        self._group_of(bundle)
        return summary

    def train(
        self,
        *,
        bundle: PlanBundle,
        key: RoundKey,
        model: RoundModel,
        update_file: Path,
        included_update: Digest | None,
        told_before: float | None,
        checkpoint_file: Path,
        progress: Progress,
        notice: Notice,
        cancelled: Cancelled,
    ) -> TrainedUpdate:
        call = frames.Call(
            round=key.round,
            model=frames.RoundModelFrame.of(model),
            update_file=str(update_file.absolute()),
            included_update=included_update,
            told_before=told_before,
            checkpoint_file=str(checkpoint_file.absolute()),
        )
        self._own.check_private_model(bundle, model)
        for left in reversed(range(GROUPS)):
            try:
                return self._group_of(bundle).train(call, progress=progress, notice=notice, cancelled=cancelled)
            except GroupLost as lost:
                self.close()
                update_file.unlink(missing_ok=True)
                if cancelled():
                    raise WorkCancelled from lost
                if not left:
                    raise
                again = "begins anew" if bundle.plan.privacy.level == "record" else "goes on from its checkpoint"
                notice("ranks-started-again", f"{lost}; training {again}")
            except BaseException:
                if self._group is not None and not self._group.whole:
                    self.close()
                raise
        raise AssertionError("the last group either trained or raised")

    def mask(
        self,
        *,
        bundle: PlanBundle,
        update: SavedUpdate,
        update_file: Path,
        mark: FileMark | None,
        out: Path,
        work: MaskVector,
        progress: Progress,
        cancelled: Cancelled,
    ) -> MaskedFile:
        return self._own.mask(
            bundle=bundle,
            update=update,
            update_file=update_file,
            mark=mark,
            out=out,
            work=work,
            progress=progress,
            cancelled=cancelled,
        )

    def evaluate(
        self, *, bundle: PlanBundle, model: RoundModel, progress: Progress, cancelled: Cancelled
    ) -> Evaluation:
        return self._own.evaluate(bundle=bundle, model=model, progress=progress, cancelled=cancelled)

    def no_training(self, *, update_file: Path) -> TrainedUpdate:
        return self._own.no_training(update_file=update_file)

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.end()

    def _group_of(self, bundle: PlanBundle) -> RankGroup:
        if self._group is None or self._plan != bundle.plan.digest:
            self.close()
            training, data = self._settings.training, self._settings.data
            start = frames.Start(
                silo=self._policy.silo,
                plan=bundle.plan.digest,
                examples=self._own.examples(bundle),
                world=training.processes,
                sharded=training.sharded,
                data=str(Path(data.folder).absolute()),
                max_bad_lines_share=data.max_bad_lines_share,
                tasks=list(self._settings.policy.tasks),
                device=training.device,
                threads=threads_of_a_rank(training),
                entropy=str(self._entropy.absolute()),
                interface=training.rank_interface,
                timeout_s=training.rank_timeout_s,
                base=None if self._base is None else frames.RoundModelFrame.of(self._base),
            )
            entropy = frames.committed(own_entropy(self._entropy), bundle.plan.digest)
            self._group = RankGroup(training, start, bundle.encode(), versions(), self._folder, entropy)
            self._plan = bundle.plan.digest
        return self._group
