"""`TrainerPort` whose workshop is made when a plan first needs it: PyTorch and Transformers take seconds to import."""

from collections.abc import Callable
from pathlib import Path

from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import (
    Cancelled,
    DataSummary,
    MaskedFile,
    Notice,
    Progress,
    RoundModel,
    TrainedUpdate,
    TrainerPort,
)
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation, RoundKey
from silo_wire.plans.plan import PlanBundle


class LateWorkshop:
    """Every call is the workshop's own; the first one of all makes it, with `make`."""

    def __init__(self, make: Callable[[], TrainerPort]) -> None:
        self._make = make
        self._made: TrainerPort | None = None

    @property
    def _workshop(self) -> TrainerPort:
        if self._made is None:
            self._made = self._make()
        return self._made

    def prepare(self, bundle: PlanBundle, base: RoundModel | None, /) -> DataSummary:
        return self._workshop.prepare(bundle, base)

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
        return self._workshop.train(
            bundle=bundle,
            key=key,
            model=model,
            update_file=update_file,
            included_update=included_update,
            told_before=told_before,
            checkpoint_file=checkpoint_file,
            progress=progress,
            notice=notice,
            cancelled=cancelled,
        )

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
        return self._workshop.mask(
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
        return self._workshop.evaluate(bundle=bundle, model=model, progress=progress, cancelled=cancelled)

    def no_training(self, *, update_file: Path) -> TrainedUpdate:
        return self._workshop.no_training(update_file=update_file)
