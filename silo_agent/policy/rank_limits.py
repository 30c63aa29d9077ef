"""What a silo that trains in several processes cannot do yet: plans that ask for it are refused, by name."""

from collections.abc import Iterator

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_wire.plans.plan import Plan


def rank_refusals(silo: SiloName, plan: Plan, processes: int) -> Iterator[PolicyRefusal]:
    """Of `plan` at `silo`, whose [training] processes is `processes`; nothing where that is 0."""
    if not processes:
        return
    for asks, wanted in (
        (f'[privacy] level = "{plan.privacy.level}"', plan.privacy.level != "none"),
        (f"[adapters] of rank {plan.adapters.rank}", bool(plan.adapters.rank)),
        (f'[training] drift_correction = "{plan.training.drift_correction}"', plan.corrects_drift),
        (
            f'[semi_supervised] teacher = "{plan.semi_supervised.teacher}", this silo being without labels',
            plan.semi_supervised.without_labels(silo),
        ),
    ):
        if wanted:
            yield PolicyRefusal(
                "processes",
                f"plan {plan.name} has {asks}, which a training in several processes does not do yet, and [training] "
                f"processes = {processes} of this silo asks for one: set processes to 0, or have the operator make a "
                "plan without it",
            )
