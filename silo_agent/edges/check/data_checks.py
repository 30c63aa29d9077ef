"""A silo's data and database, as its plan needs them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from lorica_security.console.preflight import Checks, Misconfigured, misconfigured
from lorica_security.errors import DataError, MalformedMessage
from lorica_security.identifiers import SiloName
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.training.data.data_card import data_card
from silo_agent.training.data.repeats import UnitKeys
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, UnitOwnsHalf
from silo_agent.training.loss_log import logged_losses, require_losses
from silo_agent.training.tasks.named import task_named
from silo_agent.training.tasks.text_task import TextTask
from silo_wire.plans.model_files import CONFIG_FILE
from silo_wire.plans.plan import Plan, PlanBundle

TRIED_LINES: Final = 20_000


def check_data(sources: SiloSources, folder: Path, plan: Plan | None, silo: SiloName | None) -> str:
    """As `plan`, the offered one, has this silo's lines read, with or without labels; as they are where there is
    none."""
    try:
        if plan is not None and silo is not None:
            sources.data_for(replace(Reading.of(plan, silo), unit_field="", private=False))
        data = sources.summary()
    except DataError as error:
        text = str(error)
        schema = text.startswith(str(folder / SCHEMA_FILE))
        bad = " bad lines of " in text
        mistake = Mistake.SCHEMA if schema else Mistake.DATA_BAD if bad else Mistake.DATA_MISSING
        raise Misconfigured(mistake.value, text) from error
    first = f"; {data.bad_lines} bad lines left out, the first: {data.problems[0]}" if data.bad_lines else ""
    return f"{data.train_examples} train, {data.dev_examples} dev, {data.test_examples} test examples{first}"


def runs_sql(sources: SiloSources) -> bool:
    """Whether answers of the task are SQL, which may be tried on a database."""
    return not isinstance(task_named(sources.data().task), TextTask)


def check_splits(checks: Checks, sources: SiloSources) -> None:
    """A row for each split of the data card, and one more where held-out questions are in train."""
    data = sources.data()
    asked, said = ("question", "answer") if runs_sql(sources) else ("input", "target")
    for card in data_card(data):
        checks.run(f"{card.split} split", partial(card.told, asked=asked, said=said))
        if card.questions_in_train:
            checks.notice(
                f"{card.split} split",
                f"{card.questions_in_train:,} of its {card.examples:,} {asked}s are in train, so that scores on it "
                f"say too much: cut the splits by {asked} (silo-agent import does)",
            )


def check_lengths(checks: Checks, name: str, sources: SiloSources, bundle: PlanBundle, silo: SiloName) -> None:
    """Check `name`: what the plan's limits and vocabulary cost of the train split. Its first TRIED_LINES lines stand
    for all."""
    # Here, not above: torch takes seconds to import.
    from silo_agent.training.data.batches import encode_examples
    from silo_agent.training.data.tokenizer import TextTokenizer
    from silo_wire.model_folders.t5_config import t5_config

    data, section = sources.data(), bundle.plan.training.for_silo(silo)
    task = task_named(data.task)
    try:
        tokenizer = TextTokenizer.of_model(bundle.files, t5_config(bundle.files[CONFIG_FILE]))
    except MalformedMessage as error:  # such a plan is refused before any training
        checks.skip(name, because=f"the plan's files make no model: {error}")
        return
    encoded = encode_examples(
        tokenizer,
        data.train[:TRIED_LINES],
        schemas={schema.db_id: task.shown(schema) for schema in data.schemas}
        if section.schema_in_input and task.shows_schema
        else None,
        max_input_tokens=section.max_input_tokens,
        max_output_tokens=section.max_output_tokens,
    )
    told = f"of {len(encoded):,} inputs {encoded.inputs_cut:,} are cut at {section.max_input_tokens} tokens"
    if data.labelled:
        said = "answers" if runs_sql(sources) else "targets"
        told += (
            f"; of {said} {encoded.targets_cut:,} at {section.max_output_tokens}, and "
            f"{encoded.targets_with_unknown:,} have a sign that its vocabulary lacks"
        )
    checks.run(name, lambda: told)


def check_losses(sources: SiloSources, plan: Plan, silo: SiloName) -> str:
    examples = sources.summary().train_examples
    try:
        require_losses(plan, silo, examples)
    except DataError as error:
        raise Misconfigured(Mistake.FEW_LOSSES.value, str(error)) from error
    return f"{logged_losses(examples, plan.training.for_silo(silo))} are logged on {examples} examples"


def check_unit(sources: SiloSources, unit: str) -> str:
    try:
        data = sources.data_for(replace(sources.reading, unit_field=unit, private=True, labelled=True))
    except UnitOwnsHalf as error:
        raise Misconfigured(Mistake.UNIT_HALF.value, str(error)) from error
    except DataError as error:
        raise misconfigured(Mistake.UNIT_FIELD.value, f"the plan groups lines by {unit!r}: {error}") from error
    units = UnitKeys()
    for example in data.train:
        units.append(example.unit)
    return f"{len(data.train)} lines of {len(units.units() or ())} by {unit!r}"


def check_database(sources: SiloSources) -> str:
    try:
        return sources.check_database() or "none: execution accuracy is not measured here"
    except DataError as error:
        # The sandbox's process tells in words what it found.
        mistake = Mistake.DATABASE_WRITES if " refused: its role " in str(error) else Mistake.DATABASE
        raise Misconfigured(mistake.value, str(error)) from error
