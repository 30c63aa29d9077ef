"""A global model as a Hugging Face folder that `from_pretrained` loads: the plan's own files and the parameters.

Nothing is converted: configuration and tokenizer are the bytes that the silos approved, the parameters those that they
were handed, in the plan's type for models, each chunk checked on the way. Adapters are merged into the model that they
are for.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.merged_model import FixedHalves, merged_blocks
from lorica_coordinator.vectors.model_file import MODEL_FILE
from lorica_security.host import files
from lorica_security.on_disk.provenance import PROVENANCE_FILE, digests_of
from silo_wire.canonical import Digest
from silo_wire.model_folders.seeded_model import seeded_adapters
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE, LAYOUT_FILE


def export_model(
    bundle: PlanBundle,
    models: ModelStore,
    model: Digest,
    folder: Path,
    *,
    base: ModelStore | None = None,
    round_number: int,
    provenance: Callable[[Mapping[str, str]], bytes] | None = None,
) -> None:
    """Write `model`, which round `round_number` of the plan made, to `folder`, which must be empty or not exist.

    `base` is the store of what the model's adapters are for, where the plan has adapters. `provenance` signs for the
    files, by name and SHA-256.

    Raises ConfigurationError for a folder that holds anything, IntegrityError naming a damaged file of the store; the
    folder is made whole or not at all.
    """
    with files.new_folder(folder) as work:
        vector = models.vector(model)
        for name, content in bundle.files.items():
            if name not in (LAYOUT_FILE, BASE_LAYOUT_FILE):
                files.replace(work / name, content)
        files.replace(work / "README.md", _card(bundle, model, round_number).encode())

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


def _card(bundle: PlanBundle, model: Digest, round_number: int) -> str:
    plan = bundle.plan
    training = plan.training
    prompt = "{question} ; structured knowledge: {schema}" if training.schema_in_input else "{question}"
    return f"""---
library_name: transformers
pipeline_tag: text2text-generation
tags: [text-to-sql, federated-learning, t5]
---

# {plan.name}: a text-to-SQL model of the federation {plan.federation}

Trained where the data is, by the silos of the federation; no example left a silo.

| | |
| --- | --- |
| plan | `{plan.digest}` |
| round | {round_number} of {plan.schedule.rounds} |
| model (manifest digest) | `{model}` |
| begun from | {plan.model.source} |
| parameters | {bundle.whole_layout.parameters:,}{_adapters(bundle)} |
| weighting | {plan.aggregation.weighting} |
| reducer | {plan.aggregation.reducer} |
| server optimizer | {plan.aggregation.server_optimizer}, learning rate {plan.aggregation.server_learning_rate:g} |
| updates | {_covered(plan)} |

`{PROVENANCE_FILE}` is the coordinator's signed statement of plan, rounds and files: `lorica verify DIR --key KEY`, with
the identity key that its operator gives, checks it offline.

The input is `{prompt}`, at most {training.max_input_tokens} tokens.
The output is SQL, at most {training.max_output_tokens} tokens.
SQL that a model wrote may be wrong or harmful: run it read-only, with a time limit.

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForSeq2SeqLM.from_pretrained("DIR")
question = tokenizer("how many patients are there ?", return_tensors="pt")
ids = model.generate(**question, max_new_tokens={training.max_output_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```
"""


def _covered(plan: Plan) -> str:
    masks = (
        "under masks, so that the coordinator saw sums alone" if plan.aggregation.secure_aggregation else "in the clear"
    )
    privacy = plan.privacy
    if privacy.level == "none":
        return f"{masks}; no differential privacy"
    return (
        f"{masks}; {privacy.level}-level differential privacy, epsilon {privacy.target_epsilon:g} at delta "
        f"{privacy.dp_delta:g} over all rounds"
    )


def _adapters(bundle: PlanBundle) -> str:
    rank = bundle.plan.adapters.rank
    return (
        f", of which adapters of rank {rank} were trained ({bundle.layout.parameters:,}) and are merged" if rank else ""
    )
