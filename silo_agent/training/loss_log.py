"""The losses that training logs, of which a plan may take the largest minus the smallest as its loss reduction.

Losses are logged after the first optimizer step and after each one whose number is a multiple of `loss_log_steps`: each
is the mean over the steps since the last one. So the first is that of the round model, before anything was learnt.

With "as_published" losses are logged as the code of Zhang et al. 2023 has it, which counts what an epoch leaves of its
batches otherwise than training here does: it makes no step, but goes with the next epoch's first one, and a step's loss
is divided by `gradient_accumulation` batches, however many it has. A window that the end cuts off is not logged.
"""

from dataclasses import dataclass
from typing import Final

from lorica_security.errors import DataError
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import optimizer_steps

LEAST_LOSSES: Final = 3
"""With fewer, the largest minus the smallest tells how losses were logged rather than what was learnt."""


@dataclass(slots=True)
class LossLog:
    """Means over windows that end with step 1 and with each multiple of `every`; `open_*` is the window that is not
    full yet.

    `every` and `steps` are counted in optimizer steps.
    """

    every: int
    losses: list[float]
    steps: int = 0
    open_sum: float = 0.0
    open_weight: int = 0

    @classmethod
    def empty(cls, every: int) -> "LossLog":
        return cls(every, [])

    def add(self, loss_sum: float, weight: int, *, ends_step: bool = True) -> None:
        """A summed loss and what its mean divides it by; what ends no step belongs to the next one."""
        self.open_sum += loss_sum
        self.open_weight += weight
        if ends_step:
            self.steps += 1
            if self.steps == 1 or self.steps % self.every == 0:
                self.close()

    def add_as_published(self, mean: float, *, batches: int, of: int, accumulation: int) -> None:
        """The mean loss of so many `batches`, of the `of` of an epoch, which training here makes a step of."""
        whole = batches == accumulation or of < accumulation
        self.add(mean * batches / accumulation, int(whole), ends_step=whole)

    def close(self) -> None:
        """Log the window that is open, if it has anything."""
        if self.open_weight:
            self.losses.append(self.open_sum / self.open_weight)
            self.open_sum, self.open_weight = 0.0, 0


def logged_losses(examples: int, section: TrainingSection) -> int:
    """How many losses a round's training on `examples` examples logs, which has `section` as it stands for its silo."""
    every = section.loss_log_steps
    if section.loss_reduction != "as_published":
        steps = optimizer_steps(examples, section)
        return steps if every == 1 else 1 + (-(-steps // every) if steps > 1 else 0)
    batches = -(-examples // section.batch_size)
    steps = section.epochs * max(1, batches // section.gradient_accumulation)
    return steps if every == 1 else 1 + steps // every


def require_losses(plan: Plan, silo: str, examples: int) -> None:
    """Raise DataError where the plan weighs `silo` by logged losses and it would log too few on `examples` examples."""
    if not plan.logs_losses:
        return
    section = plan.training.for_silo(silo)
    if (losses := logged_losses(examples, section)) < LEAST_LOSSES:
        raise DataError(
            f"this silo would log {losses} of at least {LEAST_LOSSES} losses a round on its {examples} training "
            f"examples, and its weight would follow from that: the plan has [training] loss_reduction = "
            f'"{section.loss_reduction}", loss_log_steps = {section.loss_log_steps}; have the operator set '
            'loss_reduction to "evaluated", loss_log_steps lower, or more epochs for this silo in '
            "[training.overrides]"
        )
