"""What this silo's people decided by command, and the plans under which it has masked."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A plan under which this silo has masks, what it begins from, and the models that this silo saw under it.

    `layout` is that of the whole model, adapters' base included; `begins` is its initial model in either wire type, and
    its base. Both are None where an earlier release noted the plan. `round` is the last that was joined, 0 where none
    was.
    """

    plan: Digest
    name: str
    layout: str | None
    begins: frozenset[str] | None
    round: int
    models: frozenset[str]

    @property
    def known(self) -> frozenset[str]:
        """Every model that this silo knows to be of the plan."""
        return self.models | (self.begins or frozenset())

    def led_to(self, model: str) -> bool:
        """Whether this silo saw `model` under the plan, and it is not what the plan begins from."""
        return self.begins is not None and model in self.models - self.begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What this silo's people decided by command, and what it has masked, as of now.

    `compared` are plans whose initial model people compared, `pairs` those that they approved beside each other.
    """

    approved: Collection[str] = ()
    compared: Collection[str] = ()
    pairs: Collection[frozenset[str]] = ()
    lineages: Sequence[Lineage] = ()


def beginnings(plan: Plan) -> frozenset[str]:
    """What a plan begins from, by digest: the very numbers may come in another wire type, or below adapters of another
    seed or rank."""
    model = plan.model
    return frozenset(it for it in (model.initial, model.initial_bfloat16, model.base) if it is not None)
