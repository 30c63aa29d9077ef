"""A plan folder's model parted in two: the base, which stays, and the adapters, which are trained
(silo_wire/plans/adapters.py)."""

from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.model_file import BASE_FILE, MODEL_FILE
from lorica_security.errors import ConfigurationError
from silo_wire.manifest import Layout, Manifest, manifest_of
from silo_wire.model_folders.seeded_model import seeded_adapters
from silo_wire.plans.adapters import AdaptersSection, adapted, adapter_layout, fixed_layout
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE, LAYOUT_FILE


@dataclass(frozen=True, slots=True)
class WrittenAdapters:
    """`fixed` is of what nobody trains and the seed makes again, where there is any."""

    layout: Layout
    initial: Manifest
    fixed: Manifest | None


def write_adapters(folder: Path, base: Layout, section: AdaptersSection, seed: int) -> WrittenAdapters:
    """Make the model in `folder`, of layout `base`, the base of new adapters; raises ConfigurationError for layers it
    lacks, and for a rank above that of a layer.

    A is random under `seed`, as PEFT begins it, and B zero: the model computes what it did before.
    """
    _require_room(base, section)
    layout = adapter_layout(base, section)
    (folder / MODEL_FILE).rename(folder / BASE_FILE)
    (folder / LAYOUT_FILE).rename(folder / BASE_LAYOUT_FILE)
    initial = model_file.write(folder / MODEL_FILE, layout, seeded_adapters(layout, seed))
    (folder / LAYOUT_FILE).write_bytes(layout.to_json())
    fixed = fixed_layout(base, section)
    return WrittenAdapters(layout, initial, None if fixed is None else manifest_of(fixed, seeded_adapters(fixed, seed)))


def _require_room(base: Layout, section: AdaptersSection) -> None:
    """A product of more than so many rows has no more ranks: they would be trained and sent for nothing."""
    smallest = min(adapted(base, section), key=lambda weight: min(weight.shape))
    most = min(smallest.shape)
    if section.rank > most:
        raise ConfigurationError(
            f"[adapters] rank = {section.rank} is more than {smallest.name} of shape {smallest.shape} has: set rank to "
            f"at most {most}, or leave that layer out of layers"
        )
