"""The plans that this silo's people approved with `silo-agent plan approve`, in `approvals.json` of its folder."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field

from lorica_security.console.strict_toml import NameText, Section
from lorica_security.identity.seal import Seal
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_agent.policy.record import Lineage, Record
from silo_wire.canonical import Digest
from silo_wire.plans.sections.model import DigestText


class Comparison(Enum):
    """How people made sure of a plan's initial model."""

    COPY = "compared with a copy"
    SEED = "made again from its seed"
    EARLIER = "compared at an earlier approval"
    NONE = "not compared"


class _Approval(Section):
    name: NameText | None = None  # of a plan that was here to be looked at
    approved_at: AwareDatetime
    model: Comparison = Comparison.NONE
    although: list[DigestText] = Field(default_factory=list)  # plans with masks that may go beside this one
    of_pair_alone: bool = False  # the plan itself needs no approval here, or is listed in silo.toml


class _Approvals(Section):
    version: Literal[1] = 1
    plans: dict[DigestText, _Approval] = Field(default_factory=dict)


class PlanApprovals:
    """Each call reads the file: an approval holds at once.

    Raises ConfigurationError naming the file when it is damaged, edited, or when others can read it, StorageError.
    """

    def __init__(self, path: Path, seal: Seal, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._record = PrivateRecord(
            path,
            _Approvals,
            check=lambda _content: None,
            remedy="restore it from backup, or remove it and approve the plans again",
            seal=seal,
        )

    def record(self, lineages: Sequence[Lineage] = ()) -> Record:
        """What `SiloPolicy` asks for."""
        plans = self._record.read().plans
        return Record(
            approved=[plan for plan, it in plans.items() if not it.of_pair_alone],
            compared=[plan for plan, it in plans.items() if it.model is not Comparison.NONE],
            pairs=[frozenset({plan, other}) for plan, it in plans.items() for other in it.although],
            lineages=lineages,
        )

    def approve(
        self,
        plan: Digest,
        *,
        name: str | None = None,
        model: Comparison = Comparison.NONE,
        although: Collection[Digest] = (),
        of_pair_alone: bool = False,
    ) -> None:
        """`name` is for people alone: what is approved is the digest. A later approval adds to an earlier one."""

        def edit(content: _Approvals) -> _Approvals:
            known = content.plans.get(plan)
            approval = _Approval(
                name=name if known is None else known.name,
                approved_at=self._now() if known is None else known.approved_at,
                model=model if known is None or known.model is Comparison.NONE else known.model,
                although=sorted({*(known.although if known else ()), *although}),
                of_pair_alone=of_pair_alone and (known is None or known.of_pair_alone),
            )
            return content.model_copy(update={"plans": {**content.plans, plan: approval}})

        self._record.change(edit)
