"""What a silo computes on a GPU is what the CPU computes but for rounding, also after a stop, and with the same noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from silo_agent.training.data.batches import Batch
from silo_agent.training.private.clipping import Backend, clipping
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.example_losses import example_losses
from tests.support.checkpointed_training import EPOCHS, SiloFiles
from tests.unit.test_training_checkpoint import Watched
from tests.unit.test_training_local_trainer import encoded, flat, model, section, train
from tests.unit.test_training_private_gradients import BACKENDS, batch_of, clipped_sum, gradients_one_by_one, t5
from tests.unit.test_training_private_trainer import SCHEDULE, examples_of
from tests.unit.test_training_private_trainer import train as train_privately

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and this machine has none")

GPU = torch.device("cuda")
TRAININGS: list[dict[str, Any]] = [
    {"optimizer": optimizer, "precision": precision}
    for optimizer in ("adamw", "adafactor", "sgd")
    for precision in ("float32", "bfloat16")
]


def test_training_in_float32_is_that_of_the_cpu_but_for_rounding() -> None:
    on_cpu, on_gpu = model(), model().to(GPU)
    plan = section(epochs=2, optimizer="sgd", precision="float32", learning_rate=1e-3)
    there, here = train(on_gpu, encoded(), plan), train(on_cpu, encoded(), plan)
    torch.testing.assert_close(flat(on_gpu).cpu(), flat(on_cpu), rtol=1e-4, atol=1e-5)
    assert there.loss_last == pytest.approx(here.loss_last, rel=1e-4)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: " ".join(map(str, training.values())))
def test_a_training_that_was_stopped_goes_on(tmp_path: Path, training: dict[str, Any]) -> None:
    """In its second epoch; dropout is on, and its masks are of the GPU's own generator. On an H200 two undisturbed
    trainings by AdamW or Adafactor differ in their last bits already, so that bits are not compared."""
    whole = Watched(SiloFiles(tmp_path / "whole", device="cuda", **training))
    silo = SiloFiles(tmp_path / "silo", device="cuda", **training)
    first = Watched(silo, stop_after=len(whole.steps) // EPOCHS + 1)
    second = Watched(silo)
    assert first.summary is None
    assert second.events == ["training-resumed"]
    expected, found = (np.frombuffer(one.update, dtype="<f4") for one in (whole, second))
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    assert second.summary.loss_last == pytest.approx(whole.summary.loss_last, rel=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1-gated"])
def test_clipped_gradients_are_those_of_one_example_at_a_time_on_the_cpu(backend: Backend, gated: bool) -> None:
    on_cpu, on_gpu, batch = t5(gated=gated), t5(gated=gated).to(GPU), batch_of(5, 9, 7)
    norms_here, sum_here = clipped_sum(on_cpu, batch, backend)
    there = Batch(batch.input_ids.to(GPU), batch.attention_mask.to(GPU), batch.labels.to(GPU), batch.target_tokens)
    norms_there, sum_there = clipped_sum(on_gpu, there, backend)
    torch.testing.assert_close(norms_there.cpu(), norms_here, rtol=1e-4, atol=0)
    assert float((sum_there.cpu() - sum_here).norm() / sum_here.norm()) < 1e-4
    on_cpu.eval()
    single = torch.stack([gradient.norm() for gradient in gradients_one_by_one(on_cpu, batch)])
    torch.testing.assert_close(norms_there.cpu(), single, rtol=1e-4, atol=0, check_dtype=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_private_training_adds_the_noise_that_it_adds_on_the_cpu(backend: Backend) -> None:
    """Samples and noise are of the key, drawn on the host; no more than rounding differs."""
    on_cpu, on_gpu = t5(), t5().to(GPU)
    begun = flat(on_cpu).clone()
    weight_here = train_privately(on_cpu, examples_of(24), SCHEDULE, backend=backend)
    weight_there = train_privately(on_gpu, examples_of(24), SCHEDULE, backend=backend)
    moved = (flat(on_cpu) - begun).norm()
    assert float((flat(on_gpu).cpu() - flat(on_cpu)).norm() / moved) < 1e-2
    assert weight_there == pytest.approx(weight_here, abs=1e-2)


@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1-gated"])
def test_what_an_example_adds_follows_from_itself_alone(gated: bool) -> None:
    """In chunks as large as this GPU's trials allow, whoever else was drawn: losses to the last bit, and norms but for
    what float64 rounds."""
    on_gpu, examples = t5(gated=gated).to(GPU), examples_of(24)
    found: dict[int, list[tuple[float, float]]] = {}
    for drawn in (range(24), range(23, -1, -1), range(0, 24, 3), [5]):
        for indices, batch in Chunks(on_gpu, most=8).of(examples, list(drawn)):
            losses = example_losses(on_gpu, batch)
            norms = clipping("ghost", on_gpu, list(on_gpu.parameters()), max_grad_norm=0.5).accumulate(batch)
            for row, index in enumerate(indices):
                found.setdefault(index, []).append((float(losses[row]), float(norms[row])))
    for (loss, norm), *others in found.values():
        assert all(other == loss for other, _ in others)
        assert [other for _, other in others] == pytest.approx([norm] * len(others), rel=1e-12)
