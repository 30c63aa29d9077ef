"""What an exported model says of itself: for people, and in the metadata that the Hugging Face Hub reads."""

from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from lorica_coordinator.edges.models.model_card import Made, made_of, model_card
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_security.console.strict_toml import ShownText
from lorica_security.identifiers import SiloName
from lorica_security.on_disk.provenance import RoundMade
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import Plan, PlanBundle
from tests.support.federation_peer import small_bundle

MODEL = Digest("b" * 64)
BUNDLE = small_bundle()
SHOWN = TypeAdapter(ShownText)


def with_(section: str, bundle: PlanBundle = BUNDLE, **values: Any) -> PlanBundle:
    """With other values in one section, unchecked: what the plan's own rules allow is not the card's matter."""
    plan = bundle.plan
    changed = Plan.model_construct(
        **{name: getattr(plan, name) for name in Plan.model_fields}
        | {section: getattr(plan, section).model_copy(update=values)}
    )
    return PlanBundle(changed, bundle.files)


def card_of(bundle: PlanBundle, made: Made | None = None) -> tuple[str, dict[str, Any]]:
    text = model_card(bundle, MODEL, 2, made)
    return text, ModelCard(text).data.to_dict()


def made(*silos: int, score: float | None = 0.753) -> Made:
    rounds = tuple(RoundMade(round=number, attempt=1, silos=count, model=MODEL) for number, count in enumerate(silos))
    return Made(rounds=rounds, score=score)


def row(model: Digest, *, outcome: str = "applied", scored: int = 3) -> RoundRow:
    of_one = Evaluation(
        split="dev", examples=8, exact_matches=2, loss_per_token=1.0, executed=0, execution_matches=0, seconds=1.0
    )
    return RoundRow(
        round=1,
        attempt=1,
        outcome=outcome,
        detail="a silo's own words",
        opened_unix_s=0.0,
        closed_unix_s=1.0,
        model=model,
        weight_fallback=False,
        silos=tuple(
            SiloRow(
                silo=SiloName(f"clinic-{number}"),
                outcome="committed",
                examples=31337,
                evaluation=of_one if number < scored else None,
            )
            for number in range(3)
        ),
        macro_exact_match=0.25,
        micro_exact_match=0.25,
    )


def test_the_metadata_is_what_the_hub_reads() -> None:
    text, head = card_of(with_("model", source="hub:google/t5-efficient-mini"), made(3, 5, 4))
    assert head["library_name"] == "transformers"
    assert head["tags"] == ["text-to-sql", "federated-learning", "t5"]
    assert head["base_model"] == "google/t5-efficient-mini"
    ((result,),) = [one["results"] for one in head["model-index"]]
    assert result["metrics"] == [{"type": "exact_match", "name": "exact match (MicroAvg)", "value": 0.753}]
    assert "| rounds that made a model | 3, each of 3 to 5 silos |" in text
    assert "| exact match (MicroAvg) | 75.3% of all held-out questions of the silos together |" in text
    assert "No differential privacy was promised: the model may repeat" in text


def test_what_the_plan_promises_is_in_the_card() -> None:
    masked = with_("aggregation", secure_aggregation=True)
    text, head = card_of(with_("privacy", masked, level="silo", target_epsilon=3.0, dp_delta=1e-6), made(8))
    assert head["tags"][-2:] == ["secure-aggregation", "differential-privacy"]
    assert "under masks, so that the coordinator saw sums alone; silo-level differential privacy, epsilon 3" in text
    assert (
        "differential privacy of one silo with all of its records (add or remove one): epsilon\n3 at delta 1e-06"
        in (text)
    )
    assert "may repeat" not in text
    text, _ = card_of(with_("privacy", level="record", unit_field="patient"))
    assert "of all records of a silo with one value of patient" in text


def test_a_card_of_another_task_speaks_of_no_sql() -> None:
    text, head = card_of(with_("task", kind="text-to-text", score="rouge_l"), made(3))
    assert "SQL" not in text
    assert "text-to-sql" not in head["tags"]
    assert "The input is a text, as it is" in text
    assert "ROUGE-L (MicroAvg)" in text
    text, _ = card_of(with_("task", kind="triage", version="1.2", score="hits"), made(3))
    assert "The input is as the task triage 1.2 lays it out" in text
    assert "SQL" not in text


def test_of_single_silos_a_card_says_nothing() -> None:
    text, head = card_of(BUNDLE, made_of([row(MODEL)], MODEL))
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.25
    assert not any(told in text for told in ("clinic", "31337", "own words"))
    text, head = card_of(BUNDLE, made_of([row(MODEL, scored=2)], MODEL))
    assert "model-index" not in head
    assert "| exact match (MicroAvg) | not measured, or of fewer than three silos |" in text
    assert "25.0%" not in text


def test_rounds_that_made_no_model_do_not_count() -> None:
    other = Digest("c" * 64)
    found = made_of([row(other), row(MODEL, outcome="abandoned"), row(MODEL, outcome="zero_weight")], MODEL)
    assert [one.model for one in found.rounds] == [other, MODEL]
    assert "| none yet: this is the initial model |" in card_of(BUNDLE, made())[0]


def is_shown(text: str) -> bool:
    try:
        SHOWN.validate_python(text)
    except ValidationError:
        return False
    return bool(text)


HOSTILE = st.sampled_from(["|", "\\", "`", "<b>", "[x](y)", "---", '"', "'", ": ", "#", "{{", "hub:a/b", "\\|"])


@pytest.mark.parametrize("begins", ["", "hub:"])
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(HOSTILE | st.text(st.characters(exclude_categories=("C", "Z")), max_size=9), min_size=1, max_size=5)
)
def test_attack_text_of_others_in_a_card(begins: str, parts: list[str]) -> None:
    """Where a model began is free text: it may neither add metadata nor rows nor mark anything up."""
    source = begins + "".join(parts).strip()
    if not is_shown(source):
        return
    honest, expected = card_of(BUNDLE)
    text, head = card_of(with_("model", source=source))
    assert head.pop("base_model", source.removeprefix("hub:")) == source.removeprefix("hub:")
    assert head == expected
    assert len(text.splitlines()) - len(honest.splitlines()) == ("\nbase_model: " in text)
    (line,) = [line for line in text.splitlines() if line.startswith("| begun from")]
    assert line.replace("\\\\", "").replace("\\|", "").count("|") == 3
    assert "<b>" not in line.replace("\\<", "")


def test_a_server_rate_that_falls_is_told_with_where_it_ends() -> None:
    falling = with_("aggregation", server_learning_rate=0.5, server_rate_at_end=0.2)
    assert "| server optimizer | sgd, learning rate 0.5, falling to 0.1 in round 3 |" in card_of(falling)[0]
    assert "| server optimizer | sgd, learning rate 1 |" in card_of(BUNDLE)[0]
