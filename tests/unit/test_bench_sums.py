"""The benchmark of aggregation: what it writes, what it counts as different, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from lorica.bench.figures import read_figures
from lorica.bench.sums import Choice, _difference, run_bench_sums
from lorica_security.errors import ConfigurationError
from tests.support.coordinator_edges import Workplace, make_plan, random_vector

pytestmark = pytest.mark.slow

HERE = "cuda" if torch.cuda.is_available() else "cpu"


def chosen(tmp_path: Path, **changes: object) -> Choice:
    asked = {"devices": ["cpu"], "optimizers": ["adam"], "silos": 2, "parameters": 2_500_000, "repeats": 1}
    return Choice(**{"work": tmp_path, "out": tmp_path / "sums.json", **asked, **changes})  # type: ignore[arg-type]


def test_a_round_is_summed_and_told(tmp_path: Path) -> None:
    (figures,) = run_bench_sums(chosen(tmp_path, devices=[HERE]), Console(quiet=True))
    assert (figures.device, figures.optimizer, figures.silos) == (HERE, "adam", 2)
    assert figures.seconds > 0
    assert figures.differing == 0  # beside itself
    assert read_figures(tmp_path / "sums.json")[1][0]["parameters"] == figures.parameters
    assert not (tmp_path / "sums").exists()


def test_each_parameter_with_other_bits_is_counted(tmp_path: Path) -> None:
    place = Workplace.at(tmp_path, make_plan(tmp_path))
    base, key = place.models.initial(), place.key()
    delta = random_vector(place.layout, 1)
    other = delta.copy()
    other[:7] += np.float32(0.5)
    first = place.aggregator({"momentum": 0.0}).aggregate(key, base, [place.send(key, "a", delta)]).model
    key = place.key(attempt=2)
    second = place.aggregator({"momentum": 0.0}).aggregate(key, base, [place.send(key, "a", other)]).model
    assert _difference((place.models, first), (place.models, first)) == (0, 0.0)
    differing, largest = _difference((place.models, first), (place.models, second))
    assert differing == 7
    assert 0.1 < largest <= 2.0


@pytest.mark.parametrize(
    ("changes", "named"), [({"devices": ["tpu"]}, "device 'tpu'"), ({"optimizers": ["lion"]}, "optimizer 'lion'")]
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        chosen(tmp_path, **changes)
