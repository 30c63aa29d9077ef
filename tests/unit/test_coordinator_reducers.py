"""Which reducer a plan has, and what each says of itself."""

import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums import reducers as room
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.reducers.chosen import REDUCERS
from lorica_coordinator.vectors import model_file
from silo_wire.algorithm import Algorithm
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.aggregation import AggregationSection

LAYOUT = Layout("float32", (TensorSpec("a", (3,)),))


def aggregator(state: Path, **section: Any) -> Aggregator:
    initial = state / "initial"
    manifest = model_file.write(initial, LAYOUT, [bytes(12)])
    models = ModelStore(
        state / "models", layout=LAYOUT, model_layout=LAYOUT, initial=manifest.digest, initial_file=initial
    )
    privacy = PrivacySection.model_validate(section.pop("privacy", {}))
    return Aggregator(
        AggregationSection.model_validate(section),
        models=models,
        spools=Spools(state / "spools"),
        update_dtype="float32",
        device=torch.device("cpu"),
        privacy=privacy,
    )


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({}, "plain"),
        ({"privacy": {"level": "record"}}, "plain"),
        ({"reducer": "trimmed_mean", "trimmed_share": 0.2}, "trimmed_mean"),
        ({"reducer": "median", "privacy": {"level": "record"}}, "median"),
        ({"privacy": {"level": "silo", "noise_multiplier": 1.0}}, "noised"),
    ],
)
def test_a_plan_has_the_reducer_that_its_keys_ask_for(tmp_path: Path, section: dict[str, Any], name: str) -> None:
    assert aggregator(tmp_path, **section).updates.name == name
    assert aggregator(tmp_path, **section).masks.name == "masked"


def test_every_file_of_the_room_is_a_reducer() -> None:
    files = {module.name for module in pkgutil.iter_modules(room.__path__)}
    assert files - {"chosen", "reducer"} == {reducer.name for reducer in REDUCERS}


def test_each_says_what_it_goes_with() -> None:
    algorithms: list[type[Algorithm]] = list(REDUCERS)
    assert {it.name: (bool(it.masks), set(it.promises), it.passes) for it in algorithms} == {
        "plain": (False, {"record"}, 1),
        "reproject": (False, set(), 1),
        "trimmed_mean": (False, {"record"}, 1),
        "median": (False, {"record"}, 1),
        "multi_krum": (False, {"record"}, 2),
        "centred_clipping": (False, {"record"}, 2),
        "nearest_neighbour_mixing": (False, {"record"}, 2),
        "geometric_median": (False, {"record"}, 2),
        "masked": (True, {"record", "joint", "silo"}, 1),
        "noised": (False, {"silo"}, 1),
    }
