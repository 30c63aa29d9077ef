"""Under which plans this silo has masked, and every model that it saw under them, in `lineages.json` of its folder.

It stands apart from `masking/memory` and notes that file's sequence number, so that each of the two shows that the other was
lost, or comes from a backup: a silo that forgot could be led into two sums over one delta. Where both were, others find it out
(silo_memory.py), and it is noted here what they saw.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from security.errors import PolicyRefusal
from security.pki.seal import Seal
from security.secure_aggregation.silo_memory import MASKING_MEMORY, Forgotten, PlanMemory, SiloMemory
from silo_agent.edges.private_record import PrivateRecord
from silo_agent.policy import Lineage, beginnings
from silo_wire.canonical import Digest
from silo_wire.plan import DigestText, PlanBundle
from silo_wire.strict_toml import NameText, Section

RESET = "silo-agent trust reset-memory"
_SPENT = (1 << 31) - 1
"""As an attempt's number: no further attempt of that round."""


class _Plan(Section):
    name: NameText | None = None
    layout: DigestText | None = None  # of the whole model; None: of a plan that an earlier release masked under
    begins: list[DigestText] | None = None  # None: noted by an earlier release, whose layout is that of what is trained
    round: Annotated[int, Field(ge=0)] = 0  # the last that was joined; 0: none was
    models: list[DigestText] = Field(default_factory=list)


class _Lineages(Section):
    version: Literal[1] = 1
    sequence: Annotated[int, Field(ge=0)] = 0
    plans: dict[DigestText, _Plan] = Field(default_factory=dict)
    forgotten: dict[DigestText, str] = Field(default_factory=dict)  # advertisements of this silo, and who saw them


class Lineages:
    """Each call reads the file. Raises ConfigurationError naming it when it is damaged, StorageError."""

    def __init__(self, path: Path, seal: Seal) -> None:
        self.path = path
        self._record = PrivateRecord(
            path,
            _Lineages,
            check=lambda _content: None,
            remedy=f"restore it from a backup of today, or have this silo's people decide with `{RESET}`",
            seal=seal,
        )

    def all(self) -> Sequence[Lineage]:
        return [
            Lineage(
                plan=Digest(plan),
                name=it.name or "",
                layout=it.layout if it.begins is not None else None,
                begins=frozenset(it.begins) if it.begins is not None else None,
                round=it.round,
                models=frozenset(it.models),
            )
            for plan, it in self._record.read().plans.items()
        ]

    def saw(self, bundle: PlanBundle, model: Digest) -> None:
        """Note, durably, that `model` is a model of this plan, which has masks."""
        plan = bundle.plan

        def edit(content: _Lineages) -> _Lineages:
            known = content.plans.get(plan.digest, _Plan())
            models = known.models if model in known.models else [*known.models, model]
            noted = known.model_copy(
                update={
                    "name": plan.name,
                    "layout": bundle.whole_layout.digest,
                    "begins": sorted(beginnings(plan)),
                    "models": models,
                }
            )
            return content.model_copy(update={"plans": {**content.plans, plan.digest: noted}})

        self._record.change(edit)

    def mark(self, memory: SiloMemory, *, whoever_wrote_it: bool = False) -> None:
        """Note, durably, that this is what the silo remembers now; `whoever_wrote_it`: people took over what is there."""

        def edit(content: _Lineages) -> _Lineages:
            plans = dict(content.plans)
            for it in memory.plans:
                known = plans.get(it.plan.hex(), _Plan())
                plans[it.plan.hex()] = known.model_copy(update={"round": max(it.round, known.round)})
            forgotten = {Digest(digest.hex()): witness for digest, witness in _unknown(content, memory).items()}
            changed = {"sequence": memory.sequence, "plans": plans, "forgotten": forgotten}
            return content.model_copy(update=changed)

        self._record.change(edit, whoever_wrote_it=whoever_wrote_it)

    def check(self, memory: SiloMemory | None) -> None:
        """Raise PolicyRefusal unless `memory` is as new as this file, and this file as new as it; None: it is lost.

        The memory is written first, so that a crash between the two leaves it one change ahead.
        """
        content = self._record.read()
        forgotten = _unknown(content, memory)
        if forgotten:
            raise lost(str(Forgotten(forgotten)))
        joined = any(plan.round for plan in content.plans.values())
        if memory is None and (content.sequence or joined):
            raise lost("masking/memory is missing, and lineages.json says that this silo has masked")
        if memory is None or memory.sequence == content.sequence == 0:
            return  # a new silo, or one that an earlier release wrote the memory of
        if memory.sequence < content.sequence:
            raise lost(
                f"masking/memory is of change {memory.sequence}, lineages.json knows of change {content.sequence}: it "
                "comes from a backup"
            )
        unknown = [it.plan for it in memory.plans if it.plan.hex() not in content.plans]
        if memory.sequence > content.sequence + 1 or unknown:
            raise lost(
                f"lineages.json is missing or comes from a backup: it is of change {content.sequence}, masking/memory of "
                f"change {memory.sequence}"
            )

    def note(self, forgotten: Forgotten) -> None:
        """Note, durably, what others saw of this silo and it does not remember: until its people have spoken `check` refuses."""
        told = {Digest(digest.hex()): witness for digest, witness in forgotten.witnesses.items()}
        self._record.change(lambda content: content.model_copy(update={"forgotten": {**content.forgotten, **told}}))

    def joined(self, memory: SiloMemory) -> SiloMemory:
        """`memory` with every round that either file knows of taken for answered, under a number that neither has had.

        What others saw of this silo is known to it from then on.
        """
        content = self._record.read(whoever_wrote_it=True)
        plans = {bytes.fromhex(plan): it.round for plan, it in content.plans.items() if it.round}
        for it in memory.plans:
            plans[it.plan] = max(it.round, plans.get(it.plan, 0))
        answered = (PlanMemory(plan=plan, round=at, number=_SPENT, answered=True) for plan, at in plans.items())
        whole = replace(memory, plans=tuple(answered), sequence=max(memory.sequence, content.sequence) + 1)
        return whole.with_announced(*map(bytes.fromhex, content.forgotten))


def _unknown(content: _Lineages, memory: SiloMemory | None) -> dict[bytes, str]:
    known = frozenset(() if memory is None else memory.announced)
    told = {bytes.fromhex(digest): witness for digest, witness in content.forgotten.items()}
    return {digest: witness for digest, witness in told.items() if digest not in known}


def lost(what: str) -> PolicyRefusal:
    return PolicyRefusal(
        MASKING_MEMORY,
        f"{what}, in the folder of this silo, which could be led into two sums over one delta: restore both from a backup of "
        f"today, or have its people decide with `{RESET}`",
    )
