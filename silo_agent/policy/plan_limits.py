"""Limits on a plan of any kind: its size, the tensors that it trains, the questions that it scores."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sections.task import TaskSection

if TYPE_CHECKING:
    pass
from silo_agent.policy.rules import PolicyRules

SHOWN = 3


def some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def above(rule: str, what: str, asked: int, most: int) -> Iterator[PolicyRefusal]:
    if asked > most:
        yield PolicyRefusal(
            rule, f"the plan asks for {asked} {what}, [policy] {rule} of this silo allows {most}: change one of them"
        )


def tensor_refusals(rules: PolicyRules, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
    allowed = rules.allowed_tensors
    if allowed == "any":
        return
    names = frozenset(pattern for pattern in allowed if not pattern.endswith("*"))
    beginnings = tuple(pattern[:-1] for pattern in allowed if pattern.endswith("*"))
    others = [
        tensor.name
        for tensor in bundle.layout.tensors
        if tensor.name not in names and not tensor.name.startswith(beginnings)
    ]
    if others:
        yield PolicyRefusal(
            "allowed_tensors",
            f"plan {bundle.plan.name} trains {some_of(others)}, which [policy] "
            "allowed_tensors of this silo does not name: change one of them",
        )


def database_refusals(rules: PolicyRules, silo: SiloName, plan: Plan) -> Iterator[PolicyRefusal]:
    """Of a plan that has this silo try a model's answers on its database while it trains."""
    section = plan.semi_supervised
    if section.filter == "none" or not section.without_labels(silo):
        return
    asks = f'plan {plan.name} has [semi_supervised] filter = "{section.filter}"'
    if not rules.database_in_training:
        yield PolicyRefusal(
            "database_in_training",
            f"{asks}: whoever chooses the model asks this silo's database whatever it likes, and sees in updates which "
            "statements ran. [policy] database_in_training of this silo is false: have the operator set filter to "
            '"none", or set it to true',
        )
    if not rules.allow_execution:
        yield PolicyRefusal(
            "allow_execution",
            f"{asks}, and [policy] allow_execution of this silo lets no model query its database: have the operator "
            'set filter to "none", or set it to true',
        )


def task_refusals(rules: PolicyRules, task: TaskSection) -> Iterator[PolicyRefusal]:
    """Of a plan for a task that Lorica does not bring."""
    if not task.built_in and task.kind not in rules.tasks:
        yield PolicyRefusal(
            "tasks",
            f"the plan is for task {task.kind} {task.version}, which Lorica does not bring, and [policy] tasks of this "
            f"silo is {rules.tasks}: install its package and add the name, or approve no such plan",
        )


def evaluation_refusals(rules: PolicyRules, plan: Plan) -> Iterator[PolicyRefusal]:
    most = plan.evaluation.max_examples
    if rules.tell_scores and plan.timetable.has_scores and 0 < most < rules.smallest_evaluation:
        yield PolicyRefusal(
            "smallest_evaluation",
            f"plan {plan.name} has scores of {most} held-out questions, [policy] smallest_evaluation of this silo "
            f"wants at least {rules.smallest_evaluation}: have the operator raise [evaluation] max_examples in the "
            f"plan",
        )
