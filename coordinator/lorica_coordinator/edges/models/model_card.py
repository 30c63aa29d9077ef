"""The model card of an exported model: README.md with the metadata that the Hugging Face Hub reads.

It says what people are shown of the plan's rounds, and nothing of a single silo.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lorica_coordinator.service.records import COMPLETED, RoundRow
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_security.on_disk.provenance import PROVENANCE_FILE, RoundMade
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan, PlanBundle

_COMMITTED: Final = "committed"
_HUB: Final = re.compile(r"hub:([A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?)", re.ASCII)
_UNITS: Final = {"record": "one record", "silo": "one silo with all of its records"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How a model came about. `rounds` are all of its plan's that made one. `score` is the plan's, of the silos' dev
    splits together (MicroAvg, 0 to 1), None where it was not measured or is of fewer than three."""

    rounds: tuple[RoundMade, ...]
    score: float | None


def made_of(rounds: Sequence[RoundRow], model: Digest) -> Made:
    """Of `rounds`, which are all of the plan's; of single silos it says nothing, whatever the plan promises."""
    completed = [row for row in rounds if row.outcome in COMPLETED]
    return Made(
        rounds=tuple(
            RoundMade(
                round=row.round,
                attempt=row.attempt,
                silos=sum(silo.outcome == _COMMITTED for silo in row.silos),
                model=row.model,
            )
            for row in completed
        ),
        score=next((of_all_silos(row).micro_exact_match for row in completed if row.model == model), None),
    )


def model_card(bundle: PlanBundle, model: Digest, round_number: int, made: Made | None = None) -> str:
    """Markdown below a head of YAML. `made` None leaves rounds and scores out."""
    plan = bundle.plan
    training = plan.training
    rows = [
        ("plan", f"`{plan.digest}`"),
        ("round", f"{round_number} of {plan.schedule.rounds}"),
        *([("rounds that made a model", _rounds(made))] if made else []),
        ("model (manifest digest)", f"`{model}`"),
        ("begun from", _cell(plan.model.source)),
        ("parameters", f"{bundle.whole_layout.parameters:,}{_adapters(bundle)}"),
        ("weighting", plan.aggregation.weighting),
        ("reducer", plan.aggregation.reducer),
        ("server optimizer", f"{plan.aggregation.server_optimizer}, learning rate {_server_rate(plan)}"),
        ("updates", _covered(plan)),
        *([(f"{plan.task.score_label} (MicroAvg)", _score(made))] if made else []),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"""---
{_head(plan, made)}
---

# {plan.name}: {_article(plan)} of the federation {plan.federation}

Trained where the data is, by the silos of the federation; no example left a silo.

| | |
| --- | --- |
{table}

`{PROVENANCE_FILE}` is the coordinator's signed statement of plan, rounds and files: `lorica verify DIR --key KEY`, with
the identity key that its operator gives, checks it offline.

## Privacy

{_privacy(plan)}

## Use

{_prompt(plan)}, at most {training.max_input_tokens} tokens.
{_answer(plan)}

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForSeq2SeqLM.from_pretrained("DIR")
question = tokenizer({json.dumps(_example(plan))}, return_tensors="pt")
ids = model.generate(**question, max_new_tokens={training.max_output_tokens})
print(tokenizer.decode(ids[0], skip_special_tokens=True))
```
"""


def _head(plan: Plan, made: Made | None) -> str:
    """A line for each key, its value in JSON, which YAML has whole: no text of others ends it or adds a key."""
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text2text-generation",
        "tags": [*(["text-to-sql"] if _is_sql(plan) else []), "federated-learning", "t5"],
    }
    if plan.aggregation.secure_aggregation:
        head["tags"].append("secure-aggregation")
    if plan.privacy.level != "none":
        head["tags"].append("differential-privacy")
    if source := _HUB.fullmatch(plan.model.source):
        head["base_model"] = source[1]
    if made is not None and made.score is not None:
        result = {
            "task": {"type": "text2text-generation"},
            "dataset": {"name": "held-out questions of the federation's silos", "type": "private"},
            "metrics": [
                {"type": plan.task.score, "name": f"{plan.task.score_label} (MicroAvg)", "value": round(made.score, 6)}
            ],
        }
        head["model-index"] = [{"name": plan.name, "results": [result]}]
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())


def _is_sql(plan: Plan) -> bool:
    return plan.task.kind in ("sql", "wikisql")


def _article(plan: Plan) -> str:
    if _is_sql(plan):
        return "a text-to-SQL model"
    return "a text-to-text model" if plan.task.built_in else f"a model for the task {plan.task.kind}"


def _prompt(plan: Plan) -> str:
    if not plan.task.built_in:
        return f"The input is as the task {plan.task.kind} {plan.task.version} lays it out"
    if not _is_sql(plan):
        return "The input is a text, as it is"
    schema = " ; structured knowledge: {schema}" if plan.training.schema_in_input else ""
    return f"The input is `{{question}}{schema}`"


def _answer(plan: Plan) -> str:
    most = plan.training.max_output_tokens
    if not _is_sql(plan):
        return f"The output is text, at most {most} tokens. It may be wrong or harmful."
    return (
        f"The output is SQL, at most {most} tokens.\n"
        "SQL that a model wrote may be wrong or harmful: run it read-only, with a time limit."
    )


def _example(plan: Plan) -> str:
    return "how many patients are there ?" if _is_sql(plan) else "INPUT"


def _rounds(made: Made) -> str:
    silos = sorted({one.silos for one in made.rounds})
    if not silos:
        return "none yet: this is the initial model"
    return f"{len(made.rounds)}, each of {' to '.join(str(count) for count in sorted({silos[0], silos[-1]}))} silos"


def _score(made: Made | None) -> str:
    if made is None or made.score is None:
        return "not measured, or of fewer than three silos"
    return f"{made.score:.1%} of all held-out questions of the silos together"


def _cell(text: str) -> str:
    """Of a table: text of others neither ends it nor marks anything up."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def _server_rate(plan: Plan) -> str:
    first, last = plan.aggregation.server_learning_rate, plan.aggregation.last_server_rate
    return f"{first:g}" if first == last else f"{first:g}, falling to {last:g} in round {plan.schedule.rounds}"


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


def _privacy(plan: Plan) -> str:
    privacy = plan.privacy
    if privacy.level == "none":
        return (
            "No differential privacy was promised: the model may repeat what it was trained on. Give it to those\n"
            "alone who may see that."
        )
    unit = _UNITS[privacy.level]
    if privacy.unit_field:
        unit = f"all records of a silo with one value of {_cell(privacy.unit_field)}"
    relation = privacy.neighbouring_relation.replace("_", " ")
    return (
        f"The plan promises differential privacy of {unit} ({relation}): epsilon\n"
        f"{privacy.target_epsilon:g} at delta {privacy.dp_delta:g}, over all {plan.schedule.rounds} rounds. What was "
        "trained before, of the model that it began\nfrom, is not covered."
    )


def _adapters(bundle: PlanBundle) -> str:
    rank = bundle.plan.adapters.rank
    return (
        f", of which adapters of rank {rank} were trained ({bundle.layout.parameters:,}) and are merged" if rank else ""
    )
