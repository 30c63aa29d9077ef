"""The bits of the server's step on one kind of CPU after the other: `python -m tests.support.server_step_bits
CAPABILITY...`.

Prints a JSON object for each capability: what torch says it computes with, and the distinct digests that a case had,
over threads, stretches and alignments. torch is imported once; each capability has a child of its own, forked before
torch computes.
"""

import json
import os
import sys

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.rounding import round_to_bfloat16
from silo_wire.server_step.server_optimizer import Adagrad, Adam, ServerOptimizer, Sgd, Yogi, slots

ELEMENTS = 70_001
STEPS = (1, 2, 3, 1_000)
OPTIMIZERS: dict[str, ServerOptimizer] = {
    "sgd": Sgd(learning_rate=0.7, momentum=0.0),
    "momentum": Sgd(learning_rate=0.7, momentum=0.9),
    "adam": Adam(learning_rate=0.05),
    "yogi": Yogi(learning_rate=0.05),
    "adagrad": Adagrad(learning_rate=0.05),
}


def drawn() -> tuple[Tensor, list[Tensor]]:
    """A model, and means of sizes over twelve decades with denormal numbers and both zeros; by numpy, so the same for
    all."""
    generator = np.random.default_rng(11)
    scale = 10.0 ** generator.uniform(-12.0, 0.0, ELEMENTS)
    means = []
    for _ in STEPS:
        mean = (generator.standard_normal(ELEMENTS) * scale).astype(np.float32)
        mean[::97], mean[1::97], mean[2::89] = 0.0, -0.0, 1e-40
        means.append(torch.from_numpy(mean))
    return torch.from_numpy(generator.uniform(-1.0, 1.0, ELEMENTS).astype(np.float32)), means


def bits(optimizer: ServerOptimizer, start: Tensor, means: list[Tensor], stretch: int, shift: int) -> str:
    """The digest of model, state and model in bfloat16; memory begins `shift` elements behind an aligned address."""

    def placed(values: Tensor) -> Tensor:
        memory = torch.empty(len(values) + shift, dtype=values.dtype)[shift:]
        return memory.copy_(values)

    model = placed(start)
    state = {name: placed(torch.full((ELEMENTS,), fill)) for name, fill in slots(optimizer).items()}
    for number, mean in zip(STEPS, means, strict=True):
        mean = placed(mean)
        for first in range(0, ELEMENTS, stretch):
            part = slice(first, min(first + stretch, ELEMENTS))
            apply_mean(
                model[part],
                mean[part],
                optimizer,
                {name: values[part] for name, values in state.items()},
                step_number=number,
                scratch=torch.empty(part.stop - part.start),
            )
    published = torch.empty(ELEMENTS, dtype=torch.bfloat16)
    round_to_bfloat16(model, published)
    digest = blake3(published.view(torch.uint8).numpy().data)
    for values in (model, *state.values()):
        digest.update(values.numpy().data.cast("B"))
    return digest.hexdigest()[:16]


def found() -> dict[str, object]:
    start, means = drawn()
    cases: dict[str, list[str]] = {}
    for name, optimizer in OPTIMIZERS.items():
        digests = set()
        for threads, stretch, shift in (
            (1, ELEMENTS, 0),
            (2, ELEMENTS, 0),
            (1, 4_096, 0),
            (2, 33_333, 1),
            (1, 1_003, 3),
        ):
            torch.set_num_threads(threads)
            digests.add(bits(optimizer, start, means, stretch, shift))
        cases[name] = sorted(digests)
    return {"capability": torch.backends.cpu.get_cpu_capability(), "cases": cases}


def main(capabilities: list[str]) -> None:
    for capability in capabilities:
        child = os.fork()
        if not child:
            os.environ["ATEN_CPU_CAPABILITY"] = capability
            print(json.dumps(found()), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"the child with {capability} ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1:])
