"""A plan folder's model parted in two: the base, which stays, and the adapters, which are trained
(silo_wire/plans/adapters.py)."""

from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.model_file import BASE_FILE, MODEL_FILE
from silo_wire.manifest import Layout, Manifest, manifest_of
from silo_wire.model_folders.seeded_model import seeded_adapters
from silo_wire.plans.adapters import AdaptersSection, adapter_layout, fixed_layout
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE, LAYOUT_FILE


@dataclass(frozen=True, slots=True)
class WrittenAdapters:
    """`fixed` is of what nobody trains and the seed makes again, where there is any."""

    layout: Layout
    initial: Manifest
    fixed: Manifest | None


def write_adapters(folder: Path, base: Layout, section: AdaptersSection, seed: int) -> WrittenAdapters:
    """Make the model in `folder`, of layout `base`, the base of new adapters; raises ConfigurationError for layers it
    lacks.

    A is random under `seed`, as PEFT begins it, and B zero: the model computes what it did before.
    """
    layout = adapter_layout(base, section)
    (folder / MODEL_FILE).rename(folder / BASE_FILE)
    (folder / LAYOUT_FILE).rename(folder / BASE_LAYOUT_FILE)
    initial = model_file.write(folder / MODEL_FILE, layout, seeded_adapters(layout, seed))
    (folder / LAYOUT_FILE).write_bytes(layout.to_json())
    fixed = fixed_layout(base, section)
    return WrittenAdapters(layout, initial, None if fixed is None else manifest_of(fixed, seeded_adapters(fixed, seed)))
