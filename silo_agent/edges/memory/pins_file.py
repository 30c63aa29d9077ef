"""What `peers.json` of a silo's folder says: whose identity keys are pinned, since when and how, and after which
others."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import AwareDatetime, Field

from lorica_security.console.strict_toml import NameText, Section
from lorica_security.errors import ConfigurationError
from lorica_security.host.files import is_there
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import public_key_bytes, public_key_from_bytes
from lorica_security.identity.seal import Seal
from silo_agent.edges.disk.counted_record import CountedContent, require_plausible
from silo_agent.edges.disk.private_record import RESET, PrivateRecord

MOST_PEERS = 10_000
MOST_PREDECESSORS = 32
"""Of one peer: its oldest keys are forgotten first, and what it signed with them is then evidence of nothing here."""

REMEDY = f"restore it from backup, or have this silo's people decide with `{RESET}`, and compare the pins again"


class How(Enum):
    ADDED = "added"
    FIRST_USE = "first use"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPeer:
    """`how` is how the first key of this peer was pinned; `predecessors` were followed to the present one, newest
    first.

    They are for what was signed at their time, evidence of old rounds and release groups that others went on from, and
    for nothing else.
    """

    silo: SiloName
    key: Ed25519PublicKey
    how: How
    since: datetime
    predecessors: tuple[Ed25519PublicKey, ...] = ()

    @property
    def predecessor(self) -> Ed25519PublicKey | None:
        """The one that signed for the present key."""
        return self.predecessors[0] if self.predecessors else None


KeyText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
StatementText = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Step(Section):
    key: KeyText
    statement: StatementText | None = None  # by which it named the next one; an earlier release did not keep it


class Line(Section):
    identity_key: KeyText
    how: How
    since: AwareDatetime
    predecessor: KeyText | None = None  # the newest of those below, and the only one that an earlier release kept
    predecessors: Annotated[list[Step], Field(max_length=MOST_PREDECESSORS)] = Field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        """From each key before the present one to the next, newest first."""
        if self.predecessors or self.predecessor is None:
            return self.predecessors
        return [Step(key=self.predecessor)]

    def followed(self, key: str, since: datetime, steps: Sequence[Step]) -> "Line":
        """With the pin moved to `key` by `steps`, newest first."""
        kept = [*steps, *self.steps][:MOST_PREDECESSORS]
        return Line(identity_key=key, how=self.how, since=since, predecessor=kept[0].key, predecessors=kept)


class Peers(CountedContent):
    version: Literal[1] = 1
    taken_over: bool = False  # by people's word, unproven: whose pins they had removed is not known for sure any more
    federation: str = ""
    peers: Annotated[dict[NameText, Line], Field(max_length=MOST_PEERS)] = Field(default_factory=dict)
    removed: dict[NameText, AwareDatetime] = Field(default_factory=dict)
    removed_keys: dict[NameText, Annotated[list[KeyText], Field(max_length=MOST_PREDECESSORS)]] = Field(
        default_factory=dict
    )  # of peers whose pins were ever removed, newest first; stay when another key is pinned


def changes_of(path: Path, seal: Seal) -> int:
    """How often the file changed; 0 where there is none. Raises ConfigurationError, StorageError as TrustStore does."""
    return PrivateRecord(path, Peers, check=lambda _content: None, remedy=REMEDY, seal=seal).read().changes


def take_over(
    path: Path, federation: FederationName, own: SiloName | None, seal: Seal, known: int, *, proven: bool
) -> int:
    """By word of people what is there counts from now on, whoever wrote it: how often it changed, more than the `known`
    times.

    Unless it is `proven` that this silo wrote the file, and last, nobody is pinned on first use any more: people may
    have removed the pin. Raises ConfigurationError, StorageError.
    """
    if not known and not is_there(path):
        return 0
    changes = 0

    def check(content: Peers) -> None:
        check_peers(content, federation, own, seal.public_key)
        require_plausible(content.changes, "changes")

    def edit(content: Peers) -> Peers:
        nonlocal changes
        changes = max(content.changes, known) + 1
        return content.model_copy(
            update={"federation": federation, "changes": changes, "taken_over": content.taken_over or not proven}
        )

    PrivateRecord(path, Peers, check=check, remedy=REMEDY, seal=seal).change(edit, whoever_wrote_it=True)
    return changes


def check_peers(content: Peers, federation: FederationName, own: SiloName | None, own_key: Ed25519PublicKey) -> None:
    if content.federation != federation:
        raise ConfigurationError(f"it is of federation {content.federation!r}, this silo is in {federation}")
    keys = [text_of_key(pinned_peer(SiloName(silo), line).key) for silo, line in content.peers.items()]
    if len(set(keys)) != len(keys) or text_of_key(own_key) in keys or own in content.peers:
        raise ConfigurationError("one key or this silo's own stands for two silos")


def owners_of(content: Peers) -> dict[str, str]:
    """Which silo each pinned key stands for: names by keys, in hexadecimal."""
    return {line.identity_key: silo for silo, line in content.peers.items()}


def new_line(key: Ed25519PublicKey, how: How, since: datetime) -> Line:
    return Line(identity_key=text_of_key(key), how=how, since=since)


def pinned_peer(silo: SiloName, line: Line) -> PinnedPeer:
    predecessors = tuple(key_of_text(step.key) for step in line.steps)
    return PinnedPeer(
        silo=silo, key=key_of_text(line.identity_key), how=line.how, since=line.since, predecessors=predecessors
    )


def key_of_text(text: str) -> Ed25519PublicKey:
    return public_key_from_bytes(bytes.fromhex(text))


def text_of_key(key: Ed25519PublicKey) -> str:
    return public_key_bytes(key).hex()
