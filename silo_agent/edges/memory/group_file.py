"""What `release-groups.json` of a silo's folder says: the newest link, what this silo signed, what people approved; and
what is noted of it."""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import AwareDatetime, Field

from lorica_security.console.strict_toml import NameText
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.groups.release_groups import MAX_LINKS, Group, Link, SignedLink
from silo_agent.edges.disk.counted_record import CountedContent
from silo_agent.edges.disk.private_record import RESET, PrivateRecord
from silo_wire.codecs.groups_codec import MOST_SILOS, signed_groups_from_bytes, signed_groups_to_bytes

REMEDY = (
    f"restore it from a backup of today, or have this silo's people decide with `{RESET}`; nothing is masked without it"
)
MOST_EARLIER = 256 << 10
"""Characters of the links before the newest one: a coordinator that came from a backup is given them back."""
DigestText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LinkNumber = Annotated[int, Field(ge=0, lt=MAX_LINKS)]
ApprovedSets = Annotated[list[list[NameText]], Field(max_length=MOST_SILOS)]


class ChainContent(CountedContent):
    version: Literal[1] = 1
    lost: LinkNumber = 0  # people went on though links up to this number were lost: none before it is held
    federation: str = ""
    held: str = ""  # the newest link, as it travels, in base64
    earlier: list[str] = Field(default_factory=list)  # the links before it, oldest first, as far as there is room
    proposed: str = ""  # what is to follow it, as it was offered last
    signed: dict[DigestText, DigestText] = Field(default_factory=dict)  # predecessor: the one successor
    approved: dict[DigestText, AwareDatetime] = Field(default_factory=dict)
    approved_atoms: ApprovedSets = Field(default_factory=list)
    approved_groups: ApprovedSets = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsNote:
    """What stands elsewhere of a chain: how often its file changed, the number of the link that was held, and what was
    signed last."""

    changes: int = 0
    number: int = 0
    signed: Mapping[str, str] = field(default_factory=dict)


class GroupsKeeper(Protocol):
    """Keeps that note, and finds out by it that the file was lost or put back."""

    def check_groups(self, changes: int) -> None:
        """Raise PolicyRefusal unless a file of so many changes is the newest that there was."""

    def note_groups(self, note: GroupsNote) -> None:
        """Durable when it returns. Raises PolicyRefusal where this silo's memory of masked rounds is not whole."""


def holding(content: ChainContent, previous: Link | None, signed: SignedLink) -> ChainContent:
    """Of the signatures those of silos that sign it: others bring nothing, and take the room of earlier links."""
    known = signed.link.members | (frozenset() if previous is None else previous.members)
    signed = SignedLink(link=signed.link, signatures=tuple(one for one in signed.signatures if one[0] in known))
    return content.model_copy(update={"earlier": _earlier(content), "held": text_of(signed), "proposed": ""})


def _earlier(content: ChainContent) -> list[str]:
    """With the link that is held, before another takes its place; the oldest go where there is no room."""
    earlier = [*content.earlier, *filter(None, [content.held])]
    while sum(map(len, earlier)) > MOST_EARLIER:
        earlier.pop(0)
    return earlier


def sets_of(groups: Iterable[Iterable[str]]) -> frozenset[Group]:
    return frozenset(tuple(map(SiloName, group)) for group in groups)


def changes_of(path: Path, seal: Seal) -> int:
    """How often the file changed; 0 where there is none. Raises ConfigurationError, StorageError as GroupChain does."""
    return PrivateRecord(path, ChainContent, check=lambda _content: None, remedy=REMEDY, seal=seal).read().changes


def note_of(content: ChainContent) -> GroupsNote:
    return GroupsNote(
        changes=content.changes,
        number=max(number_of(content), content.lost),
        signed=dict(list(content.signed.items())[-1:]),
    )


def number_of(content: ChainContent) -> int:
    """Of the link that is held, 0 where none is. Raises MalformedMessage."""
    if not content.held:
        return 0
    return decoded(content.held, FederationName(content.federation)).link.number


def decoded(text: str, federation: FederationName) -> SignedLink:
    """Raises MalformedMessage."""
    try:
        data = b64decode(text, validate=True)
    except ValueError as error:
        raise MalformedMessage("release groups are no base64: they are damaged") from error
    return signed_groups_from_bytes(data, federation)


def text_of(signed: SignedLink) -> str:
    return b64encode(signed_groups_to_bytes(signed)).decode()
