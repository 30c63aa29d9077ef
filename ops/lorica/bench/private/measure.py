"""One way to train, measured in a process of its own: `python -m lorica.bench.private.measure` with a Task in JSON on
its standard input.

The trainers are the real ones, on questions and SQL of the demo's hospital. Steps are timed from one report of progress
to the next, the first not counted; each private step has every record in it (a rate of 1), so that all ways see the
same.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from lorica.bench.private.ways import WAYS
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.silos import questions
from lorica.memory_readings import memory_bytes, reset_peak
from lorica_security.noise.random_words import RandomWords
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.model.model import T5
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.private.private_trainer import PrivateSchedule, train_privately
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.sizes import size_named
from silo_wire.public_text import public_text
from silo_wire.transport import keep_chunks_in_memory

PIECES = 2500
"""Of the tokenizer: about as many as this project's public text has words for; fewer where a model has no room for
them."""
LORA_RANK = 8
_KEY = bytes(32)  # noise of a benchmark protects nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`batch` records a step, `physical` in memory at a time; `steps` count, after one that does not."""

    way: str
    size: str
    batch: int
    physical: int
    steps: int
    device: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians over the steps that count, in seconds; noise is part of the step. The peak is of the device: beyond the
    imports on a CPU."""

    parameters: int
    trained_parameters: int
    step_s: float
    cpu_s: float
    noise_s: float
    peak_bytes: int


class _Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends: list[tuple[float, float]] = []
        self.noise: list[float] = []

    def step(self, *_: float) -> None:
        self._wait()
        self.ends.append((time.perf_counter(), time.process_time()))

    @contextmanager
    def of_noise(self) -> Iterator[None]:
        """Adding noise is timed while this is open."""
        add_noise = PrivateOptimizer.add_noise

        def timed(optimizer: PrivateOptimizer) -> None:
            self._wait()
            began = time.perf_counter()
            add_noise(optimizer)
            self._wait()
            self.noise.append(time.perf_counter() - began)

        with patch.object(PrivateOptimizer, "add_noise", timed):
            yield

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(task: Task) -> Measured:
    keep_chunks_in_memory()  # as a silo's agent does
    device = torch.device(task.device)
    if task.threads:
        torch.set_num_threads(task.threads)
    examples = records(task.batch, pieces=min(PIECES, size_named(task.size).vocabulary))
    gc.collect()
    before, _ = memory_bytes(os.getpid())
    model, parameters = model_for(task, device)
    reset_peak(os.getpid())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    watch = _Stopwatch(device)
    with watch.of_noise():
        _train(task, model, parameters, examples, watch)
    steps = [
        (after[0] - began[0], after[1] - began[1]) for began, after in zip(watch.ends, watch.ends[1:], strict=False)
    ]
    _, peak = memory_bytes(os.getpid())
    return Measured(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_parameters=sum(parameter.numel() for parameter in parameters),
        step_s=statistics.median(wall for wall, _ in steps),
        cpu_s=statistics.median(cpu for _, cpu in steps),
        noise_s=statistics.median(watch.noise[1:]) if watch.noise else 0.0,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak - before,
    )


def records(count: int, *, pieces: int = PIECES) -> EncodedExamples:
    """Of the demo's hospital, with the tokens that a model of this project's own vocabulary makes of them."""
    tokenizer = train_tokenizer(public_text(), pieces)
    chosen = questions(HOSPITAL, seed=1).train

    def tokens(texts: Sequence[str]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], ...]:
        return tuple(np.asarray(ids[:64], dtype=np.int32) for ids in tokenizer(list(texts)).input_ids)

    chosen = tuple(chosen[index % len(chosen)] for index in range(count))
    return EncodedExamples(
        inputs=tokens([record.question for record in chosen]),
        targets=tokens([record.query for record in chosen]),
        inputs_cut=0,
        targets_cut=0,
        targets_with_unknown=0,
    )


def model_for(task: Task, device: torch.device) -> tuple[T5, list[nn.Parameter]]:
    """A random T5 of the task's size, and what is trained of it."""
    model = random_t5(task.size, dropout=0.0)  # of all ways: private training has none
    if WAYS[task.way].adapters == "lora":
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=LORA_RANK, target_modules=["q", "v"]), model)  # which are trained
    model.to(device)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def random_t5(size: str, *, dropout: float) -> T5:
    """Of a size in the table, on the CPU; the same each time."""
    shape = size_named(size)
    torch.manual_seed(1)
    config = {
        "vocab_size": shape.vocabulary,
        "d_model": shape.d_model,
        "d_kv": shape.d_kv,
        "d_ff": shape.d_ff,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "feed_forward_proj": "gated-gelu" if shape.gated else "relu",
        "decoder_start_token_id": 0,  # nosec B105  # a number of a vocabulary
        "dropout_rate": dropout,
    }
    return T5ForConditionalGeneration(T5Config.from_dict(config))


def _train(
    task: Task, model: T5, parameters: Sequence[nn.Parameter], examples: EncodedExamples, watch: _Stopwatch
) -> None:
    backend = WAYS[task.way].backend
    settings: Mapping[str, object] = {
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "batch_size": task.physical,
        **WAYS[task.way].training,
    }
    if backend is None:
        accumulated = -(-task.batch // task.physical)
        train_locally(
            model,
            parameters,
            examples,
            TrainingSection.model_validate(
                {**settings, "epochs": task.steps + 1, "gradient_accumulation": accumulated}
            ),
            seed=1,
            sample=None,
            round_parameters=None,
            checkpoint=None,
            on_progress=watch.step,
            should_stop=lambda: False,
            clock=time.monotonic,
        )
        return
    train_privately(
        model,
        parameters,
        examples,
        TrainingSection.model_validate(settings),
        PrivateSchedule(
            sampling_rate=1.0,
            steps=task.steps + 1,
            expected_batch_size=task.batch,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            loss_bound=10.0,
            loss_noise_multiplier=None,
            weight_cap=1.0,
        ),
        backend=backend,
        words=RandomWords(_KEY),
        on_progress=watch.step,
        should_stop=lambda: False,
    )


def main() -> None:
    print(json.dumps(asdict(measure(Task(**json.load(sys.stdin))))))


if __name__ == "__main__":
    main()
