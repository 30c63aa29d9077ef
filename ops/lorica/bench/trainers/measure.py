"""One trainer, measured in a process of its own: `python -m lorica.bench.trainers.measure` with a Task in JSON on its
standard input.

All train the same random T5 with dropout on the same questions and SQL of the demo's hospital, with AdamW and clipped
gradients, and nothing is logged, saved or evaluated. Steps are timed from one's end to the next one's, the first not
counted.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from blake3 import blake3
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from lorica.bench.private.measure import PIECES, random_t5, records
from lorica.bench.trainers.task import Measured, Task, Way
from lorica.memory_readings import memory_bytes, reset_peak
from silo_agent.training.data.batches import IGNORED, EncodedExamples
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.loss_reduction import sample_loss
from silo_agent.training.model.model import T5
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.sizes import size_named
from silo_wire.public_text import public_text
from silo_wire.transport import keep_chunks_in_memory

_Training = Callable[[], object]

DROPOUT = 0.1
_LEARNING_RATE, _MAX_GRAD_NORM, _SEED = 1e-4, 1.0, 1
_LOOKED_AT = 32
"""Examples whose loss is computed after training."""


class Stopwatch:
    """Of steps' ends: wall time, and CPU time of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends: list[tuple[float, float]] = []

    def step(self, *_: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ends.append((time.perf_counter(), time.process_time()))

    def steps(self) -> list[tuple[float, float]]:
        """Of those that count: all but the first."""
        return [(after[0] - one[0], after[1] - one[1]) for one, after in zip(self.ends, self.ends[1:], strict=False)]


def measure(task: Task) -> Measured:
    keep_chunks_in_memory()  # as a silo's agent does
    device = torch.device(task.device)
    if task.threads:
        torch.set_num_threads(task.threads)
    examples = examples_of(task)
    gc.collect()
    before, _ = memory_bytes(os.getpid())
    model = random_t5(task.size, dropout=DROPOUT).to(device)
    reset_peak(os.getpid())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    watch = Stopwatch(device)
    train = TRAININGS[task.way](task, model, examples, watch)
    began = time.perf_counter()
    train()
    ended = time.perf_counter()
    _, peak = memory_bytes(os.getpid())
    if device.type == "cuda":
        before, peak = 0, torch.cuda.max_memory_allocated(device)
    if len(watch.ends) != task.steps + 1:
        raise RuntimeError(f"{len(watch.ends)} steps were made in place of {task.steps + 1}")
    steps = watch.steps()
    looked_at = range(min(_LOOKED_AT, len(examples)))
    return Measured(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        step_s=statistics.median(wall for wall, _ in steps),
        cpu_s=statistics.median(cpu for _, cpu in steps),
        before_s=watch.ends[0][0] - began,
        after_s=ended - watch.ends[-1][0],
        peak_bytes=peak - before,
        examples=digest(examples),
        loss=sample_loss(model, examples, looked_at, section(task), should_stop=lambda: False),
    )


def examples_of(task: Task) -> EncodedExamples:
    """As many as the steps take, each once."""
    count = task.batch * task.accumulation * (task.steps + 1)
    return records(count, pieces=min(PIECES, size_named(task.size).vocabulary))


def digest(examples: EncodedExamples) -> str:
    """Of all token ids, in hexadecimal."""
    hasher = blake3()
    for ids in (*examples.inputs, *examples.targets):
        hasher.update(len(ids).to_bytes(4, "little"))
        hasher.update(ids.astype("<i4").tobytes())
    return hasher.hexdigest(length=8)


def section(task: Task) -> TrainingSection:
    return TrainingSection.model_validate(
        {
            "optimizer": "adamw",
            "learning_rate": _LEARNING_RATE,
            "max_grad_norm": _MAX_GRAD_NORM,
            "batch_size": task.batch,
            "gradient_accumulation": task.accumulation,
            "precision": task.precision,
            "dropout": DROPOUT,
        }
    )


def _with_lorica(task: Task, model: T5, examples: EncodedExamples, watch: Stopwatch) -> _Training:
    return lambda: train_locally(
        model,
        list(model.parameters()),
        examples,
        section(task),
        seed=_SEED,
        sample=None,
        round_parameters=None,
        checkpoint=None,
        on_progress=watch.step,
        should_stop=lambda: False,
        clock=time.monotonic,
    )


def _with_transformers(task: Task, model: T5, examples: EncodedExamples, watch: Stopwatch) -> _Training:
    class Told(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            watch.step()

    lines: list[Any] = [
        {"input_ids": inputs.tolist(), "labels": targets.tolist()}
        for inputs, targets in zip(examples.inputs, examples.targets, strict=True)
    ]
    tokenizer = train_tokenizer(public_text(), min(PIECES, model.config.vocab_size))
    pads = DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=IGNORED)

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = Seq2SeqTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=task.batch,
                gradient_accumulation_steps=task.accumulation,
                num_train_epochs=1,
                optim="adamw_torch_fused",
                learning_rate=_LEARNING_RATE,
                weight_decay=0.0,
                max_grad_norm=_MAX_GRAD_NORM,
                lr_scheduler_type="constant",
                bf16=task.precision == "bfloat16",
                use_cpu=task.device == "cpu",
                seed=_SEED,
                logging_strategy="no",
                save_strategy="no",
                eval_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            trainer = Seq2SeqTrainer(
                model=model, args=options, train_dataset=lines, data_collator=pads, callbacks=[Told()]
            )
            trainer.train()

    return train


TRAININGS: Mapping[Way, Callable[[Task, T5, EncodedExamples, Stopwatch], _Training]] = {
    "lorica": _with_lorica,
    "transformers": _with_transformers,
}


def main() -> None:
    print(json.dumps(asdict(measure(Task(**json.load(sys.stdin))))))


if __name__ == "__main__":
    main()
