"""Under which plans this silo has masked, and every model that it saw under them, in `lineages.json` of its folder.

It stands apart from `masking/memory`, so that each of the two shows that the other was lost, or comes from a backup: a
silo that forgot could be led into two sums over one delta. Each counts its own changes and notes the other's count; a
change is written where it is made, then noted in the other. So a kill leaves a note one behind, and what comes from a
backup is behind the other's note. Where both were put back, others find it out (secure_aggregation/silo/memory.py), and
it is noted here what they saw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lorica_security.console.strict_toml import NameText, Section
from lorica_security.errors import ConfigurationError, PolicyRefusal
from lorica_security.host.files import is_there
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.silo.memory import (
    MASKING_MEMORY,
    MAX_ANNOUNCED,
    MAX_PLANS,
    Forgotten,
    PlanMemory,
    SiloMemory,
)
from silo_agent.edges.disk.counted_record import MOST_UNPROVEN, Number, require_plausible
from silo_agent.edges.disk.private_record import RESET, PrivateRecord
from silo_agent.edges.memory.group_file import GroupsNote, LinkNumber
from silo_agent.policy.record import Lineage, beginnings
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.model import DigestText

MORE_MODELS = 8
"""Of one plan, beside the one that it begins from and one after each round: what orders that end a plan may name."""
NumberText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_SPENT = (1 << 31) - 1
"""As an attempt's number: no further attempt of that round."""


class _Plan(Section):
    name: NameText | None = None
    layout: DigestText | None = None  # of the whole model; None: of a plan that an earlier release masked under
    begins: list[DigestText] | None = None  # None: noted by an earlier release, whose layout is that of what is trained
    round: Number = 0  # the last that was joined; 0: none was
    models: list[DigestText] = Field(default_factory=list)
    handed: dict[NumberText, DigestText] = Field(default_factory=dict)  # the one model after each round, 0: the first


class _Groups(Section):
    changes: Number = 0
    number: LinkNumber = 0
    signed: dict[DigestText, DigestText] = Field(default_factory=dict)


class _Lineages(Section):
    version: Literal[1] = 1
    sequence: Number = 0  # the last change of masking/memory that is noted here
    changes: Number = 0  # of this file's own: all but what follows from the memory
    plans: Annotated[dict[DigestText, _Plan], Field(max_length=MAX_PLANS)] = Field(default_factory=dict)
    forgotten: dict[DigestText, str] = Field(default_factory=dict)  # advertisements of this silo, and who saw them
    groups: _Groups = Field(default_factory=_Groups)  # what is noted here of release-groups.json
    pins: Number = 0  # how often peers.json changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Where a kill left a note one behind, which is made up for before the next change: in this file, or in
    masking/memory."""

    lineages: bool
    memory: bool


class Lineages:
    """Each call reads the file. Raises ConfigurationError naming it when it is damaged, StorageError."""

    def __init__(self, path: Path, seal: Seal) -> None:
        self.path = path
        remedy = f"restore it from a backup of today, or have this silo's people decide with `{RESET}`"
        self._record = PrivateRecord(path, _Lineages, check=lambda _content: None, remedy=remedy, seal=seal)
        self._left = PrivateRecord(path, _Lineages, check=_check_left, remedy=remedy, seal=seal)
        """As people take it over: anything that could not be gone on from is as good as no file."""

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

    def saw(self, bundle: PlanBundle, model: Digest, number: int | None = None) -> bool:
        """Note, durably, that `model` is a model of this plan, which has masks; whether that is a change.

        `number`: it is the one after that round, 0 before the first; None: whichever. Raises PolicyRefusal where
        another one was, and for more models than the plan can have.
        """
        plan = bundle.plan

        def edit(content: _Lineages) -> _Lineages:
            known = content.plans.get(plan.digest, _Plan())
            models = known.models if model in known.models else [*known.models, model]
            if len(models) > max(len(known.models), plan.schedule.rounds + 1 + MORE_MODELS):
                raise PolicyRefusal(
                    "one_model",
                    f"{model} would be model {len(models)} of plan {plan.name}, which has {plan.schedule.rounds} "
                    "rounds: ask the operator, whose coordinator hands out more than there can be",
                )
            handed = known.handed if number is None else {str(number): model, **known.handed}
            if number is not None and handed[str(number)] != model:
                raise PolicyRefusal(
                    "one_model",
                    f"{model} is handed out as plan {plan.name}'s after round {number}, where this silo had "
                    f"{handed[str(number)]} before: have the operator hand out that one, or offer a new plan",
                )
            noted = known.model_copy(
                update={
                    "name": plan.name,
                    "layout": bundle.whole_layout.digest,
                    "begins": sorted(beginnings(plan)),
                    "models": models,
                    "handed": handed,
                }
            )
            return content.model_copy(update={"plans": {**content.plans, plan.digest: noted}})

        return self._change(edit)

    def note(self, forgotten: Forgotten) -> bool:
        """Note, durably, what others saw of this silo and it does not remember: until its people have spoken `check`
        refuses.

        Whether that is a change.
        """
        told = {Digest(digest.hex()): witness for digest, witness in forgotten.witnesses.items()}
        return self._change(
            lambda content: content.model_copy(update={"forgotten": {**content.forgotten, **told}}),
        )

    def hold(self, note: GroupsNote) -> bool:
        """Note, durably, what release-groups.json says now; whether that is a change."""
        return self._change(lambda content: content.model_copy(update={"groups": _groups(note)}))

    def hold_pins(self, changes: int) -> bool:
        """Note, durably, how often peers.json changed; whether that is a change."""
        return self._change(lambda content: content.model_copy(update={"pins": changes}))

    def is_proven(self, known: int) -> bool:
        """Whether this silo wrote the file, and not before its change `known`."""
        try:
            return is_there(self.path) and self._record.read().changes >= known
        except ConfigurationError:
            return False

    def said(self) -> Sequence[tuple[str, int]]:
        """What people are shown of a file that is not proven: plans and their last rounds."""
        return [(plan[:16], it.round) for plan, it in self._left.read(whoever_wrote_it=True).plans.items() if it.round]

    def pins(self) -> int:
        """How often peers.json changed as far as is noted, whoever wrote it."""
        return self._left.read(whoever_wrote_it=True).pins

    def groups(self) -> GroupsNote:
        """What is noted of release-groups.json, whoever wrote it."""
        content = self._left.read(whoever_wrote_it=True)
        masked = any(plan.round for plan in content.plans.values())
        noted = content.groups
        return GroupsNote(changes=noted.changes, number=max(noted.number, int(masked)), signed=noted.signed)

    def check_groups(self, changes: int) -> None:
        """Raise PolicyRefusal unless a release-groups.json of so many changes is as new as this file, and this file as
        new as it."""
        _check_count("release-groups.json", self._record.read().groups.changes, changes)

    def check_pins(self, changes: int) -> None:
        """Raise PolicyRefusal unless a peers.json of so many changes is as new as this file, and this file as new as
        it."""
        _check_count("peers.json", self._record.read().pins, changes)

    def mark(self, memory: SiloMemory) -> None:
        """Note, durably, that this is what the silo remembers now. Raises PolicyRefusal unless the change before is
        noted here."""

        def edit(content: _Lineages) -> _Lineages:
            if not content.sequence <= memory.sequence <= content.sequence + 1:
                raise lost(
                    f"lineages.json is missing or comes from a backup: it is to note change {memory.sequence} of "
                    f"masking/memory, and knows of {content.sequence}"
                )
            return _marked(content, memory)

        self._record.change(edit)

    def check(self, memory: SiloMemory | None, known: int) -> Behind:
        """Raise PolicyRefusal unless `memory` is as new as this file, and this file as new as it; None: it is lost.

        `known` is how many changes of this file are noted with it.
        """
        content = self._record.read()
        forgotten = _unknown(content, memory)
        if forgotten:
            raise lost(str(Forgotten(forgotten)))
        rounds = {bytes.fromhex(plan): it.round for plan, it in content.plans.items()}
        if memory is None:
            if content.sequence or content.changes > 1 or any(rounds.values()):
                raise lost(
                    "masking/memory is missing, and lineages.json says that this silo has masked, or was about to, "
                    "or has pinned others"
                )
            return Behind(lineages=False, memory=content.changes == 1)
        counts = (
            f"masking/memory is of change {memory.sequence} and knows of {known} of lineages.json, which is of change "
            f"{content.changes} and knows of {content.sequence} of masking/memory"
        )
        if memory.sequence < content.sequence or known < content.changes - 1:
            raise lost(f"masking/memory comes from a backup: {counts}")
        if memory.sequence > content.sequence + 1 or known > content.changes:
            raise lost(f"lineages.json is missing or comes from a backup: {counts}")
        for it in memory.plans:
            if it.plan not in rounds:
                raise lost(
                    f"lineages.json is missing or comes from a backup: it does not know of plan {it.plan.hex()[:16]}"
                )
            if it.round > rounds[it.plan] and memory.sequence == content.sequence:
                raise lost(
                    f"lineages.json comes from a backup: it knows of round {rounds[it.plan]} of plan "
                    f"{it.plan.hex()[:16]}, masking/memory of round {it.round}"
                )
        for plan, joined in rounds.items():
            last = memory.of(plan)
            if joined > (0 if last is None else last.round):
                raise lost(
                    f"masking/memory comes from a backup: lineages.json knows of round {joined} of plan "
                    f"{plan.hex()[:16]}, it of {'none' if last is None else f'round {last.round}'}"
                )
        return Behind(lineages=memory.sequence > content.sequence, memory=known < content.changes)

    def reset(self, memory: SiloMemory, known: int, groups: GroupsNote, pins: int) -> tuple[SiloMemory, int]:
        """Begin anew, durably, by word of people, from what is left of both: how `memory` is to be, and how many
        changes it knows of.

        Every round that either file knows of is taken for answered, under counts that neither has had. What others saw
        of this silo is known to it from then on.
        """
        after: tuple[SiloMemory, int] | None = None

        def edit(content: _Lineages) -> _Lineages:
            nonlocal after
            plans = {bytes.fromhex(plan): it.round for plan, it in content.plans.items() if it.round}
            for it in memory.plans:
                plans[it.plan] = max(it.round, plans.get(it.plan, 0))
            answered = (PlanMemory(plan=plan, round=at, number=_SPENT, answered=True) for plan, at in plans.items())
            whole = replace(memory, plans=tuple(answered), sequence=max(memory.sequence, content.sequence) + 1)
            whole = whole.with_announced(*map(bytes.fromhex, content.forgotten))
            after = whole, max(known, content.changes) + 1
            noted = {"changes": after[1], "groups": _groups(groups), "pins": pins}
            marked = _marked(content, whole)
            # What comes now is rounds that nothing left of yet: whichever model they begin with is the one.
            kept = {name: it.model_copy(update={"handed": {}}) for name, it in marked.plans.items()}
            return marked.model_copy(update={**noted, "plans": kept})

        self._left.change(edit, whoever_wrote_it=True)
        assert after is not None, "edit was run"
        return after

    def _change(self, edit: Callable[[_Lineages], _Lineages]) -> bool:
        changed = False

        def counted(content: _Lineages) -> _Lineages:
            nonlocal changed
            after = edit(content)
            changed = after != content
            return after.model_copy(update={"changes": content.changes + 1}) if changed else content

        self._record.change(counted, make=False)
        return changed


def _groups(note: GroupsNote) -> _Groups:
    return _Groups(changes=note.changes, number=note.number, signed=dict(note.signed))


def _check_left(content: _Lineages) -> None:
    """Raises ConfigurationError for a file that anybody may have written, and that this silo could not go on from."""
    for what, number in (
        ("sequence", content.sequence),
        ("changes", content.changes),
        ("changes of release-groups.json", content.groups.changes),
        ("changes of peers.json", content.pins),
        *((f"round of plan {plan[:16]}", it.round) for plan, it in content.plans.items()),
    ):
        require_plausible(number, what)
    if 2 * len(content.plans) > MAX_PLANS or len(content.forgotten) > MAX_ANNOUNCED:
        raise ConfigurationError(
            f"it names {len(content.plans)} plans and {len(content.forgotten)} advertisements, more than this silo "
            "can remember"
        )


def plausible(memory: SiloMemory, known: int) -> bool:
    """Whether this silo could go on from a memory that anybody may have written."""
    numbers = (memory.sequence, known, *(it.round for it in memory.plans))
    return max(numbers) <= MOST_UNPROVEN and 2 * len(memory.plans) <= MAX_PLANS


def _check_count(name: str, known: int, changes: int) -> None:
    if known <= changes <= known + 1:
        return
    which = name if changes < known else "lineages.json"
    raise lost(
        f"{which} is missing or comes from a backup: lineages.json knows of change {known} of {name}, which is of "
        f"change {changes}"
    )


def _marked(content: _Lineages, memory: SiloMemory) -> _Lineages:
    plans = dict(content.plans)
    for it in memory.plans:
        known = plans.get(it.plan.hex(), _Plan())
        plans[it.plan.hex()] = known.model_copy(update={"round": max(it.round, known.round)})
    forgotten = {Digest(digest.hex()): witness for digest, witness in _unknown(content, memory).items()}
    return content.model_copy(update={"sequence": memory.sequence, "plans": plans, "forgotten": forgotten})


def _unknown(content: _Lineages, memory: SiloMemory | None) -> dict[bytes, str]:
    known = frozenset(() if memory is None else memory.announced)
    told = {bytes.fromhex(digest): witness for digest, witness in content.forgotten.items()}
    return {digest: witness for digest, witness in told.items() if digest not in known}


def lost(what: str) -> PolicyRefusal:
    return PolicyRefusal(
        MASKING_MEMORY,
        f"{what}, in the folder of this silo, which could be led into two sums over one delta: restore both from a "
        f"backup of today, or have its people decide with `{RESET}`",
    )
