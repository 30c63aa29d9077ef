"""The filter that a plan has a silo without labels put its answers through: this silo's database, its sandbox, its
limits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lorica_security.errors import DataError
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.sql_sandbox import DatabaseTarget, Sandbox
from silo_agent.training.semi_supervised.answer_filter import AnswerFilter
from silo_wire.plans.plan import Plan


def filters_here(plan: Plan, silo: SiloName) -> bool:
    """Whether `silo` tries answers on its database while it trains under `plan`."""
    return plan.semi_supervised.filter != "none" and plan.semi_supervised.without_labels(silo)


def required_database(plan: Plan, sources: SiloSources) -> DatabaseTarget:
    """Raises DataError where there is none to try answers on."""
    target = sources.database()
    if target is None:
        raise DataError(
            f'plan {plan.name} has [semi_supervised] filter = "{plan.semi_supervised.filter}", and this silo has no '
            'database: set [database] url, or have the operator set filter to "none"'
        )
    return target


@contextmanager
def answers_tried(plan: Plan, silo: SiloName, sources: SiloSources) -> Iterator[AnswerFilter | None]:
    """With an open sandbox within; None where the plan asks for no filter here. Raises DataError."""
    if not filters_here(plan, silo):
        yield None
        return
    limits, question_seconds, round_seconds = sources.filter_limits()
    with Sandbox(required_database(plan, sources), limits) as box:
        yield AnswerFilter.of(
            plan, box, question_seconds=question_seconds, round_seconds=round_seconds, clock=time.monotonic
        )
