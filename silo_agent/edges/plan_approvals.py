"""The plans that this silo's people approved with `silo-agent plan approve`, in `approvals.json` of its folder."""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field

from silo_agent.edges.private_record import PrivateRecord
from silo_wire.canonical import Digest
from silo_wire.plan import DigestText
from silo_wire.strict_toml import NameText, Section


class _Approval(Section):
    name: NameText | None = None  # of a plan that was here to be looked at
    approved_at: AwareDatetime


class _Approvals(Section):
    version: Literal[1] = 1
    plans: dict[DigestText, _Approval] = Field(default_factory=dict)


class PlanApprovals:
    """Each call reads the file: an approval holds at once.

    Raises ConfigurationError naming the file when it is damaged or when others can read it, StorageError.
    """

    def __init__(self, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._record = PrivateRecord(
            path,
            _Approvals,
            check=lambda _content: None,
            remedy="restore it from backup, or remove it and approve the plans again",
        )

    def digests(self) -> Collection[str]:
        return self._record.read().plans.keys()

    def approve(self, plan: Digest, *, name: str | None = None) -> None:
        """`name` is for people alone: what is approved is the digest."""
        approval = _Approval(name=name, approved_at=self._now())
        self._record.change(
            lambda content: (
                content
                if plan in content.plans
                else content.model_copy(update={"plans": {**content.plans, plan: approval}})
            )
        )
