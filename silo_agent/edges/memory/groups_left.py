"""What people take over of a silo's release groups after a loss, whoever wrote what is left."""

from dataclasses import dataclass
from pathlib import Path

from lorica_security.errors import ConfigurationError
from lorica_security.host.files import is_there
from lorica_security.identifiers import FederationName
from lorica_security.identity.seal import Seal
from silo_agent.edges.disk.counted_record import require_plausible
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_agent.edges.memory.group_file import REMEDY, ChainContent, GroupsNote, changes_of, note_of, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of release-groups.json, for people who decide about it.

    `held` and `lost` are numbers of links, 0 where there is none; `approvals`, whether people's word or a proposal
    stands in it; `ours`, whether this silo wrote it.
    """

    held: int
    lost: int
    approvals: bool
    ours: bool


def left_of(path: Path, federation: FederationName, seal: Seal) -> Left:
    """Whoever wrote it. Raises ConfigurationError, StorageError."""
    content = _taken_over(path, federation, seal).read(whoever_wrote_it=True)
    said = (content.approved, content.approved_atoms, content.approved_groups, content.proposed)
    ours = _is_ours(path, seal)
    return Left(held=number_of(content) if ours else 0, lost=content.lost, approvals=any(said), ours=ours)


def take_over(
    path: Path,
    federation: FederationName,
    seal: Seal,
    known: GroupsNote,
    *,
    proven: bool = False,
    as_held: bool = False,
) -> GroupsNote:
    """By word of people what is there counts from now on, whoever wrote it. Raises ConfigurationError, StorageError.

    Unless it is `proven` that this silo wrote the file, and last, what it says of people's approvals and of proposed
    links is dropped; where somebody else wrote it, the link that is held, too: its signatures are checked when it is
    offered again. Where links that are `known` of were lost, none before them is held, no key is taken on first use,
    and the successor that was signed last stays the only one. `as_held`: people say that no link was lost, whatever
    number is noted.
    """
    note = known
    ours = _is_ours(path, seal)

    def edit(content: ChainContent) -> ChainContent:
        nonlocal note
        number = max(known.number, int(bool(content.held)))
        if not ours:
            content = content.model_copy(update={"held": ""})
        held = number_of(content)
        lost = number if held < number else content.lost
        if as_held:
            lost = min(lost, max(held, 1))  # 1: first use stays over
        after = content.model_copy(
            update={
                "federation": federation,
                "changes": max(content.changes, known.changes) + 1,
                "lost": lost,
                "signed": {**content.signed, **known.signed},
            }
        )
        if not proven:
            after = after.model_copy(
                update={"proposed": "", "approved": {}, "approved_atoms": [], "approved_groups": []}
            )
        note = note_of(after)
        return after

    if known != GroupsNote() or is_there(path):
        _taken_over(path, federation, seal).change(edit, whoever_wrote_it=True)
    return note


def _is_ours(path: Path, seal: Seal) -> bool:
    """Whether this silo wrote it, or nobody did."""
    try:
        changes_of(path, seal)
    except ConfigurationError:
        return False
    return True


def _taken_over(path: Path, federation: FederationName, seal: Seal) -> PrivateRecord[ChainContent]:
    """The file as people take it over: anything that could not be gone on from is as good as no file."""

    def check(content: ChainContent) -> None:
        if content.federation != federation:
            raise ConfigurationError(f"it is of federation {content.federation!r}, this silo is in {federation}")
        require_plausible(content.changes, "changes")
        number_of(content)

    return PrivateRecord(path, ChainContent, check=check, remedy=REMEDY, seal=seal)
