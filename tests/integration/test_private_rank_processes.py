"""Record-level privacy in ranks that are processes: whoever is killed at whatever point, what leaves has all of its
noise, once, and no file ever had less.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorica_security.noise.noise_streams import BLOCK_ELEMENTS
from tests.support.killed_ranks import launched
from tests.support.rank_silo import RankSilo, require_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOISE, CLIP, EXPECTED, RATE = 3.0, 0.5, 9, 1e-3
PRIVATE: dict[str, Any] = {
    "evaluation": {"every": 0, "initial": False, "last": False},
    "privacy": {
        "level": "record",
        "noise_multiplier": NOISE,
        "steps": 1,
        "nominal_records": 18,
        "expected_batch_size": EXPECTED,
    },
}
TRAINING = {
    "optimizer": "sgd",
    "epochs": 1,
    "learning_rate": RATE,
    "max_grad_norm": CLIP,
    "gradient_accumulation": 1,
    "fedprox_mu": 0.0,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("private-ranks")


@pytest.fixture(autouse=True)
def nothing_left(root: Path) -> Iterator[None]:
    yield
    require_nothing_left(root)


def deviations(update: Path) -> np.ndarray:
    """Of each block of the sum that an update of one step of gradient descent was made of, over what is promised."""
    summed = np.fromfile(update, dtype="<f4").astype(np.float64) * EXPECTED / RATE
    blocks = [summed[start : start + BLOCK_ELEMENTS] for start in range(0, len(summed), BLOCK_ELEMENTS)]
    return np.array([block.std() for block in blocks if len(block) > 1000]) / (NOISE * CLIP)


def test_an_update_of_ranks_has_the_noise_of_one_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    silo = RankSilo(root, 2, TRAINING, sections=PRIVATE)
    trainer = silo.trainer()
    try:
        trainer.prepare(silo.bundle, None)
        first = silo.train(trainer)
        made = silo.update.read_bytes()
        found = deviations(silo.update)
        assert len(found) >= 4, "several blocks for each rank"
        assert np.abs(found - 1).max() < 0.03, found
        second = silo.train(trainer, number=2)
        assert silo.update.read_bytes() != made, "another round has other noise"
        assert {first.summary.examples, second.summary.examples} == {18}, "the plan's number"
    finally:
        trainer.close()
