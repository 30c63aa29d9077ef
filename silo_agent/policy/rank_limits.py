"""What a silo that trains in several processes cannot do yet: plans that ask for it are refused, by name."""

from collections.abc import Iterator
from typing import Final

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_wire.plans.plan import Plan

LOOPBACK: Final = "lo"


def rank_refusals(
    silo: SiloName, plan: Plan, processes: int, rank_interface: str = LOOPBACK, *, sharded: bool = False
) -> Iterator[PolicyRefusal]:
    """Of `plan` at `silo`, whose [training] processes is `processes`, on `rank_interface`; nothing where that is 0.
    `sharded` ranks hold a part of the model each."""
    if not processes:
        return
    if plan.privacy.level == "record" and rank_interface != LOOPBACK:
        yield PolicyRefusal(
            "processes",
            f'plan {plan.name} has [privacy] level = "record", and ranks on [training] rank_interface = '
            f'"{rank_interface}" of this silo would tell each other sums of gradients before they have noise, over a '
            "network and without TLS: leave rank_interface out, with all ranks on one machine, or set processes to 0",
        )
    for asks, wanted in (
        ('[privacy] noise = "joint"', plan.joint),
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
    if sharded:
        yield from _shard_refusals(plan)


def _shard_refusals(plan: Plan) -> Iterator[PolicyRefusal]:
    optimizer, adapters = plan.training.optimizer, plan.adapters
    for asks, wanted in (
        ('[privacy] level = "record"', plan.privacy.level == "record"),
        (f'[training] optimizer = "{optimizer}", and no "adamw"', optimizer != "adamw"),
        (f"[adapters] rank = {adapters.rank}", adapters.rank > 0),
        (f'[wire] update = "{plan.wire.update}", and no "float32"', plan.wire.update != "float32"),
    ):
        if wanted:
            yield PolicyRefusal(
                "sharded",
                f"plan {plan.name} has {asks}, which a training whose ranks hold a part of the model each does not do "
                "yet, and [training] sharded of this silo asks for one: set sharded to false, or have the operator "
                "make another plan",
            )
