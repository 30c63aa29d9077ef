"""A silo's training of one round as a process of its own, which may be killed or kept from writing at a chosen point.

    python -m tests.support.checkpointed_training FOLDER OPTIMIZER FAULT

OPTIMIZER may be `ema` or `mlm` as well: that of the plan, at a silo without labels, with such a teacher.
FAULT is none, `file-size:BYTES` (RLIMIT_FSIZE), or where the process sends itself SIGKILL: `step:N` right after
optimizer step N of this process, `writing:N` when its checkpoint N is whole but not yet renamed, `trained` after the
last epoch. One JSON record a line on stdout: each step's fraction, each notice, the update's summary.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from silo_agent.training import silo_trainer
from silo_agent.training.device import DeviceSettings
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.silo_trainer import SiloTrainer
from tests.support.tiny_t5 import CORPUS, bundle_of, random_model, silo_data, write_model

EPOCHS, STEPS_PER_EPOCH = 3, 4
PAIRS = [(question, query) for question in CORPUS[:3] for query in CORPUS[3:6]] * 3 + [(CORPUS[0], CORPUS[4])]
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-2,
    "learning_rate_schedule": "linear",
    "weight_decay": 0.01,
    "epochs": EPOCHS,
    "batch_size": 4,
    "gradient_accumulation": 2,
    "fedprox_mu": 0.05,
    "loss_log_steps": 3,
    "dropout": 0.2,
    "max_output_tokens": 32,
}


class SiloFiles:
    """One silo's round: the model's file, where its update goes, and its checkpoint's. `teacher`: of a silo without
    labels."""

    def __init__(self, folder: Path, *, teacher: str = "", device: str = "cpu", **training: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.device = device
        model = random_model()
        without = {
            "aggregation": {"weighting": "equal"},
            "semi_supervised": {"unlabelled": ["clinic"], "order": "together", "teacher": teacher},
        }
        self.bundle = bundle_of(model, training={**TRAINING, **training}, **(without if teacher else {}))
        self.model, self.update, self.checkpoint = (folder / name for name in ("model", "update", "round.checkpoint"))
        self.manifest = write_model(model, self.model)

    def trainer(self, name: str = "clinic", pairs: list[tuple[str, str]] = PAIRS) -> SiloTrainer:
        data = silo_data(pairs)
        if self.bundle.plan.semi_supervised.without_labels(name):
            data = replace(data, train=tuple(replace(one, query="") for one in data.train), labelled=False)
        return SiloTrainer(self.bundle, data, name, DeviceSettings(device=self.device, threads=1))

    def train(self, trainer: SiloTrainer, *, round_number: int = 1, **how: Any) -> Any:
        return trainer.train(
            round_number=round_number,
            model_path=self.model,
            model=self.manifest,
            update_path=self.update,
            checkpoint_path=self.checkpoint,
            **how,
        )


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but its call number `call` ends the process."""
    calls = count(1)
    return lambda *given, **named: (_die if next(calls) == call else function)(*given, **named)


def killed(work: Callable[[], object], function: str, number: int) -> None:
    """Do `work` in a copy of this process, which has to be killed: before its `number`-th call of `os.function`."""
    child = os.fork()
    if child == 0:
        setattr(os, function, dying_at(number, getattr(os, function)))
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, signal.SIGKILL)


def _trained_and_died(*given: Any, **named: Any) -> None:
    train_locally(*given, **named)
    _die()


def settings_of(optimizer: str) -> dict[str, Any]:
    return {"teacher": optimizer} if optimizer in ("ema", "mlm") else {"optimizer": optimizer}


def main(folder: str, optimizer: str, fault: str) -> None:
    def tell(**record: object) -> None:
        print(json.dumps(record), flush=True)

    def on_progress(fraction: float, loss: float) -> None:
        tell(fraction=fraction, loss=loss)
        after_step()

    kind, _, number = fault.partition(":")
    after_step: Callable[[], object] = lambda: None  # noqa: E731
    match kind:
        case "file-size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(number), int(number)))
        case "step":
            after_step = dying_at(int(number), after_step)
        case "writing":
            os.replace = dying_at(int(number), os.replace)
        case "trained":
            silo_trainer.train_locally = _trained_and_died
    silo = SiloFiles(Path(folder), **settings_of(optimizer))
    update = silo.train(
        silo.trainer(), on_progress=on_progress, on_notice=lambda event, detail: tell(notice=event, detail=detail)
    )
    tell(summary=asdict(update.summary), update=update.manifest.digest)


if __name__ == "__main__":
    main(*sys.argv[1:])
