"""A silo's data and database, as its plan needs them."""

from pathlib import Path

from lorica_security.console.preflight import Misconfigured, misconfigured
from lorica_security.errors import DataError
from lorica_security.identifiers import SiloName
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, UnitOwnsHalf
from silo_agent.training.loss_log import logged_losses, require_losses
from silo_wire.plans.plan import Plan


def check_data(sources: SiloSources, folder: Path) -> str:
    try:
        data = sources.summary()
    except DataError as error:
        text = str(error)
        schema = text.startswith(str(folder / SCHEMA_FILE))
        bad = " bad lines of " in text
        mistake = Mistake.SCHEMA if schema else Mistake.DATA_BAD if bad else Mistake.DATA_MISSING
        raise Misconfigured(mistake.value, text) from error
    first = f"; {data.bad_lines} bad lines left out, the first: {data.problems[0]}" if data.bad_lines else ""
    return f"{data.train_examples} train, {data.dev_examples} dev, {data.test_examples} test examples{first}"


def check_losses(sources: SiloSources, plan: Plan, silo: SiloName) -> str:
    examples = sources.summary().train_examples
    try:
        require_losses(plan, silo, examples)
    except DataError as error:
        raise Misconfigured(Mistake.FEW_LOSSES.value, str(error)) from error
    return f"{logged_losses(examples, plan.training.for_silo(silo))} are logged on {examples} examples"


def check_unit(sources: SiloSources, unit: str) -> str:
    try:
        data = sources.data_for(Reading(unit_field=unit, private=True, task=sources.data().task))
    except UnitOwnsHalf as error:
        raise Misconfigured(Mistake.UNIT_HALF.value, str(error)) from error
    except DataError as error:
        raise misconfigured(Mistake.UNIT_FIELD.value, f"the plan groups lines by {unit!r}: {error}") from error
    return f"{len(data.train)} lines of {len({example.unit for example in data.train})} by {unit!r}"


def check_database(sources: SiloSources) -> str:
    try:
        return sources.check_database() or "none: execution accuracy is not measured here"
    except DataError as error:
        # The sandbox's process tells in words what it found.
        mistake = Mistake.DATABASE_WRITES if " refused: its role " in str(error) else Mistake.DATABASE
        raise Misconfigured(mistake.value, str(error)) from error
