"""Rounds of a few flat deltas over files, summed by a reducer of the coordinator, with no model but a vector of zeros."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_coordinator.vectors import model_file
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.manifest import UpdateDtype
from tests.support.coordinator_edges import Vector, Workplace, content_of, stored_vector
from tests.support.federation_peer import small_bundle

FED_AVG = {"server_optimizer": "sgd", "server_learning_rate": 1.0, "momentum": 0.0, "weighting": "equal"}
"""So that the model after a round is the model before plus what the reducer made."""
SETTINGS: dict[str, dict[str, Any]] = {
    "trimmed_mean": {"trimmed_share": 0.2},
    "median": {},
    "multi_krum": {"hostile_silos": 1},
    "centred_clipping": {"clipping_radius": 3.0},
    "nearest_neighbour_mixing": {"hostile_silos": 1},
    "geometric_median": {},
}
"""What each robust reducer needs besides, for rounds of five silos."""


def section_of(reducer: str, **changes: Any) -> dict[str, Any]:
    """`[aggregation]`."""
    return {**FED_AVG, "reducer": reducer, **SETTINGS[reducer], **changes}


def place_of(folder: Path, elements: int, *, update: UpdateDtype = "float32") -> Workplace:
    """One plan's files below `folder`, whose first model is zeros."""
    bundle = small_bundle(elements=elements, wire={"update": update})
    initial = folder / "initial"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = model_file.write(initial, bundle.layout, [bytes(bundle.layout.total_bytes)])
    models = ModelStore(
        folder / "models",
        layout=bundle.layout,
        model_layout=bundle.layout,
        initial=manifest.digest,
        initial_file=initial,
    )
    return Workplace(folder, bundle, models, Spools(folder / "spools"))


def sent(place: Workplace, deltas: Mapping[str, Vector], round_number: int = 1) -> list[CommittedUpdate]:
    """The updates of a round, in the order of `deltas`."""
    return [place.send(place.key(round_number), SiloName(silo), delta) for silo, delta in deltas.items()]


def reduced(
    place: Workplace,
    section: dict[str, Any],
    updates: list[CommittedUpdate],
    *,
    base: Digest | None = None,
    round_number: int = 1,
    slab_bytes: int = 4096,
) -> AggregationResult:
    """What the plan's reducer makes of them, on the model `base`, at first the initial one."""
    base = place.models.initial() if base is None else base
    return place.aggregator(section, slab_bytes=slab_bytes).aggregate(place.key(round_number), base, updates)


def mean_of(place: Workplace, section: dict[str, Any], deltas: Mapping[str, Vector]) -> Vector:
    """What the reducer makes of the deltas of a first round."""
    return stored_vector(place.models, reduced(place, section, sent(place, deltas)).model)


def state_of(place: Workplace, model: Digest) -> dict[str, bytes]:
    """What is kept beside a model, bit by bit."""
    return {name: content_of(vector) for name, vector in place.models.state(model).slots.items()}


def drawn(silos: int, elements: int, seed: int, scale: float = 1.0) -> dict[str, Vector]:
    """Deltas by the name of their silo."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((silos, elements), generator=generator) * scale
    return {f"silo-{index:02}": np.ascontiguousarray(row, dtype="<f4") for index, row in enumerate(values.numpy())}
