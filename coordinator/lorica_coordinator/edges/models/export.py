"""A global model as a Hugging Face folder that `from_pretrained` loads: the plan's own files and the parameters.

Nothing is converted: configuration and tokenizer are the bytes that the silos approved, the parameters those that they
were handed, in the plan's type for models, each chunk checked on the way. Adapters are merged into the model that they
are for.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lorica_coordinator.edges.models.model_card import Made, model_card
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.merged_model import FixedHalves, merged_blocks
from lorica_coordinator.vectors.model_file import MODEL_FILE
from lorica_security.host import files
from lorica_security.on_disk.provenance import PROVENANCE_FILE, digests_of
from silo_wire.canonical import Digest
from silo_wire.model_folders.seeded_model import seeded_adapters
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE, LAYOUT_FILE


def export_model(
    bundle: PlanBundle,
    models: ModelStore,
    model: Digest,
    folder: Path,
    *,
    base: ModelStore | None = None,
    round_number: int,
    made: Made | None = None,
    provenance: Callable[[Mapping[str, str]], bytes] | None = None,
) -> None:
    """Write `model`, which round `round_number` of the plan made, to `folder`, which must be empty or not exist.

    `base` is the store of what the model's adapters are for, where the plan has adapters. `made` is for the model card.
    `provenance` signs for the files, by name and SHA-256.

    Raises ConfigurationError for a folder that holds anything, IntegrityError naming a damaged file of the store; the
    folder is made whole or not at all.
    """
    with files.new_folder(folder) as work:
        vector = models.vector(model)
        for name, content in bundle.files.items():
            if name not in (LAYOUT_FILE, BASE_LAYOUT_FILE):
                files.replace(work / name, content)
        files.replace(work / "README.md", model_card(bundle, model, round_number, made).encode())

        def chunks() -> Iterator[bytes]:
            for index in range(vector.manifest.chunks):
                yield vector.chunk(index)

        if base is None or bundle.base_layout is None:
            model_file.write(work / MODEL_FILE, bundle.model_layout, chunks())
        else:
            whole = merged_blocks(
                base.vector(base.initial()),
                bundle.base_layout,
                vector,
                bundle.model_layout,
                bundle.plan.adapters,
                _fixed(bundle),
            )
            model_file.write(work / MODEL_FILE, bundle.base_layout, whole)
        if provenance is not None:
            files.replace(work / PROVENANCE_FILE, provenance(digests_of(work)))


def _fixed(bundle: PlanBundle) -> FixedHalves | None:
    if bundle.fixed_layout is None:
        return None
    plan = bundle.plan
    return FixedHalves(
        layout=bundle.fixed_layout,
        blocks=seeded_adapters(bundle.fixed_layout, plan.seed),
        digest=str(plan.model.fixed),
    )
