"""Whose identity keys this silo has pinned, in `peers.json` of its folder, sealed, each change noted in `lineages.json`.

People pin a peer's key after comparing it by a way of their own (`silo-agent trust add`): the coordinator runs the
federation's authority and could make up silos. Rules that hold whoever asks:

- a pinned silo keeps its key: another one is taken only with succession statements that lead to it, the first of them
  signed by the pinned key; people bring them, or a roster does;
- one key stands for one silo, and this silo's own name and key for no other;
- the key that a peer comes with first is pinned only where this silo's policy opted in, and never for a peer whose pin
  people removed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import AwareDatetime, Field

from security.errors import ConfigurationError, Conflict, IntegrityError, PolicyRefusal, StateError
from security.files import is_there
from security.identifiers import FederationName, Identity, Role, SiloName
from security.pki.identity_key import public_key_bytes, public_key_from_bytes
from security.pki.key_text import key_text
from security.pki.seal import Seal
from security.pki.succession import Succession, check_succession, steps_between
from silo_agent.edges.counted_record import CountedContent, CountedRecord, Notes, require_plausible
from silo_agent.edges.key_store import SiloCredentials
from silo_agent.edges.lineages import Lineages, lost
from silo_agent.edges.private_record import RESET, PrivateRecord
from silo_agent.edges.silo_folder import SiloFolder
from silo_wire.strict_toml import NameText, Section

MOST_PEERS = 10_000
MOST_PREDECESSORS = 32
"""Of one peer: its oldest keys are forgotten first, and what it signed with them is then evidence of nothing here."""
TRUSTED_PEERS = "trusted_peers"
"""The rule that pins make; as the roster's check in security.secure_aggregation names it."""

_REMEDY = f"restore it from backup, or have this silo's people decide with `{RESET}`, and compare the pins again"


class How(Enum):
    ADDED = "added"
    FIRST_USE = "first use"


class Taken(Enum):
    """What `TrustStore.add` came to."""

    PINNED = "pinned"
    CONFIRMED = "confirmed"  # was pinned on first use, is now known to people
    SUCCEEDED = "succeeded"
    KNOWN = "known"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPeer:
    """`how` is how the first key of this peer was pinned; `predecessors` were followed to the present one, newest first.

    They are for what was signed at their time, evidence of old rounds and release groups that others went on from, and for nothing else.
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


class _Step(Section):
    key: KeyText
    statement: StatementText | None = None  # by which it named the next one; an earlier release did not keep it


class _Line(Section):
    identity_key: KeyText
    how: How
    since: AwareDatetime
    predecessor: KeyText | None = None  # the newest of those below, and the only one that an earlier release kept
    predecessors: Annotated[list[_Step], Field(max_length=MOST_PREDECESSORS)] = Field(default_factory=list)

    @property
    def steps(self) -> list[_Step]:
        """From each key before the present one to the next, newest first."""
        if self.predecessors or self.predecessor is None:
            return self.predecessors
        return [_Step(key=self.predecessor)]

    def followed(self, key: str, since: datetime, steps: Sequence[_Step]) -> "_Line":
        """With the pin moved to `key` by `steps`, newest first."""
        kept = [*steps, *self.steps][:MOST_PREDECESSORS]
        return _Line(identity_key=key, how=self.how, since=since, predecessor=kept[0].key, predecessors=kept)


class _Peers(CountedContent):
    version: Literal[1] = 1
    taken_over: bool = False  # by people's word, unproven: whose pins they had removed is not known for sure any more
    federation: str = ""
    peers: Annotated[dict[NameText, _Line], Field(max_length=MOST_PEERS)] = Field(default_factory=dict)
    removed: dict[NameText, AwareDatetime] = Field(default_factory=dict)
    removed_keys: dict[NameText, Annotated[list[KeyText], Field(max_length=MOST_PREDECESSORS)]] = Field(
        default_factory=dict
    )  # of peers whose pins were ever removed, newest first; stay when another key is pinned


class PinsKeeper(Protocol):
    """Keeps a note of how often peers.json changed, and finds out by it that the file was lost or put back."""

    def check_pins(self, changes: int) -> None:
        """Raise PolicyRefusal unless a file of so many changes is the newest that there was."""

    def note_pins(self, changes: int) -> None:
        """Durable when it returns. Raises PolicyRefusal where this silo's memory of masked rounds is not whole."""


class TrustStore:
    """The pins of one silo. Each call reads the file: what people changed holds from the next attempt on.

    Raises ConfigurationError naming the file when it is damaged, edited, or when others can read it, PolicyRefusal where `keeper`
    knows of a newer one, StorageError.
    """

    def __init__(
        self,
        path: Path,
        *,
        own: Identity,
        own_key: Ed25519PublicKey,
        seal: Seal,
        keeper: PinsKeeper | None = None,
        first_use: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._own = own
        self._own_key = own_key
        self._first_use = first_use
        self._now = now
        notes: Notes[_Peers] | None = None
        if keeper is not None:
            notes = Notes(check=keeper.check_pins, note=lambda content: keeper.note_pins(content.changes))
        self._record = CountedRecord(path, _Peers, check=self._check, remedy=_REMEDY, seal=seal, notes=notes)

    def peers(self) -> tuple[PinnedPeer, ...]:
        """By name."""
        return tuple(_peer(SiloName(silo), line) for silo, line in sorted(self._record.read().peers.items()))

    def removed(self) -> tuple[SiloName, ...]:
        """Peers whose pins people removed, by name: not taken on first use."""
        return tuple(SiloName(silo) for silo in sorted(self._record.read().removed))

    def removed_keys(self) -> Mapping[SiloName, Sequence[Ed25519PublicKey]]:
        """Keys whose pins people removed, newest first.

        For evidence of rounds that this silo helped to sum, release groups that others went on from, and for nothing else.
        """
        return {SiloName(silo): tuple(map(_key, keys)) for silo, keys in self._record.read().removed_keys.items()}

    def trusted(self) -> tuple[PinnedPeer, ...]:
        """Those of `peers` whose pins count: one of first use does where this silo's policy opted in."""
        return tuple(peer for peer in self.peers() if self._first_use or peer.how is How.ADDED)

    def identities(self) -> Mapping[SiloName, Ed25519PublicKey]:
        """What a `Party` of secure aggregation takes as `pinned`."""
        return {peer.silo: peer.key for peer in self.peers()}

    def add(self, silo: SiloName, key: Ed25519PublicKey, *, succession: bytes | None = None) -> Taken:
        """Pin what this silo's people compared; a second key of a pinned silo needs `succession`, signed by the first.

        Raises ConfigurationError for this silo's own name or a key that stands for another silo, Conflict for another key,
        IntegrityError for a statement that the pinned key did not sign, StateError where there is no pin to succeed.
        """
        taken = Taken.KNOWN

        def edit(content: _Peers) -> _Peers:
            nonlocal taken
            self._check_free(content, silo, key)
            line = content.peers.get(silo)
            if line is None and succession is not None:
                raise StateError(
                    f"no key is pinned for silo {silo} that another could succeed: compare this one with its people, "
                    "then add it without a statement"
                )
            if line is None:
                taken = Taken.PINNED
                return self._with(content, silo, _line(key, How.ADDED, self._now()))
            if line.identity_key == _hex(key):
                taken = Taken.KNOWN if line.how is How.ADDED else Taken.CONFIRMED
                return self._with(content, silo, line.model_copy(update={"how": How.ADDED}))
            statement = self._succession(_peer(silo, line), key, succession)
            taken = Taken.SUCCEEDED
            step = _Step(key=line.identity_key, statement=statement.hex())
            return self._with(content, silo, line.followed(_hex(key), self._now(), [step]))

        self._record.change(edit)
        return taken

    def remove(self, silo: SiloName) -> None:
        """Pin nothing for this silo any longer, on first use neither; raises StateError where nothing is pinned."""

        def edit(content: _Peers) -> _Peers:
            line = content.peers.get(silo)
            if line is None:
                raise StateError(f"no key is pinned for silo {silo}: `silo-agent trust list` names those that are")
            kept = {name: line for name, line in content.peers.items() if name != silo}
            keys = [line.identity_key, *(step.key for step in line.steps), *content.removed_keys.get(silo, [])]
            removed_keys = {**content.removed_keys, silo: list(dict.fromkeys(keys))[:MOST_PREDECESSORS]}
            removed = {**content.removed, silo: self._now()}
            return content.model_copy(update={"peers": kept, "removed": removed, "removed_keys": removed_keys})

        self._record.change(edit)

    def follow(self, silo: SiloName, key: Ed25519PublicKey, successions: Sequence[Succession]) -> None:
        """Move the pin of `silo` to `key`, where signed steps lead there from the pinned one; nothing happens otherwise.

        The pinned key's owner names its successor, whoever relays it. What is not led to stays refused where it is used.
        """
        line = self._record.read().peers.get(silo)
        if line is None or line.identity_key == _hex(key):
            return

        def edit(content: _Peers) -> _Peers:
            known = content.peers.get(silo)
            if known is None:
                return content
            try:
                self._check_free(content, silo, key)
                steps = steps_between(
                    successions, identity=self._identity(silo), pinned=_peer(silo, known).key, present=key
                )
            except (ConfigurationError, IntegrityError):
                return content
            if not steps:
                return content
            back = [_Step(key=_hex(one.predecessor), statement=one.statement.hex()) for one in reversed(steps)]
            return self._with(content, silo, known.followed(_hex(key), self._now(), back))

        self._record.change(edit)

    def trusted_on_first_use(self, silo: SiloName, key: Ed25519PublicKey) -> None:
        """The key that `silo` comes with is its pinned one, or is pinned now, where this silo's policy opted in.

        Raises PolicyRefusal otherwise, showing both pins where there are two.
        """
        line = self._record.read().peers.get(silo)
        if line is not None and line.identity_key == _hex(key):
            return

        def edit(content: _Peers) -> _Peers:
            try:
                self._check_free(content, silo, key)
            except ConfigurationError as error:
                raise PolicyRefusal(TRUSTED_PEERS, str(error)) from error
            known = content.peers.get(silo)
            if known is not None and known.identity_key != _hex(key):
                raise PolicyRefusal(TRUSTED_PEERS, self._two_keys(_peer(silo, known), key))
            if known is not None:
                return content
            if silo in content.removed:
                raise PolicyRefusal(
                    TRUSTED_PEERS, f"this silo's people removed the pin of silo {silo}: they alone add one again"
                )
            if content.taken_over:
                raise PolicyRefusal(
                    TRUSTED_PEERS,
                    f"peers.json was taken over with `{RESET}`, so that nobody knows whether the pin of silo {silo} was removed: this "
                    "silo's people alone add one, with `silo-agent trust add`",
                )
            if not self._first_use:
                raise PolicyRefusal(
                    "trust_on_first_use",
                    f"no key is pinned for silo {silo}, which comes with {self._text(silo, key)}: compare that with its "
                    f"people, then `silo-agent trust add {silo} KEY`",
                )
            return self._with(content, silo, _line(key, How.FIRST_USE, self._now()))

        self._record.change(edit)

    # ---- what every pin keeps to ----------------------------------------------------------------------------------

    def _check(self, content: _Peers) -> None:
        """Raises ConfigurationError or MalformedMessage for a file that this class would not have written."""
        _check_peers(content, self._own.federation, SiloName(self._own.name), self._own_key)

    def _check_free(self, content: _Peers, silo: SiloName, key: Ed25519PublicKey) -> None:
        """Raises ConfigurationError when name or key belong to another pin: one silo could take two seats of a cohort."""
        if silo == self._own.name:
            raise ConfigurationError(f"{silo} is this silo itself: it needs no pin")
        if key == self._own_key:
            raise ConfigurationError(f"the key that silo {silo} is said to have is this silo's own")
        for other, line in content.peers.items():
            if other != silo and line.identity_key == _hex(key):
                raise ConfigurationError(
                    f"the key that silo {silo} is said to have is pinned for silo {other}: one key stands for one silo"
                )

    def _succession(self, pinned: PinnedPeer, key: Ed25519PublicKey, succession: bytes | None) -> bytes:
        """`succession`, which the pinned key signed for `key`."""
        if succession is None:
            raise Conflict(self._two_keys(pinned, key))
        try:
            check_succession(succession, identity=self._identity(pinned.silo), old_key=pinned.key, new_key=key)
        except IntegrityError:
            raise IntegrityError(
                f"the succession statement is not signed by the pinned key: {self._two_keys(pinned, key)}"
            ) from None
        return succession

    def _two_keys(self, pinned: PinnedPeer, key: Ed25519PublicKey) -> str:
        return (
            f"silo {pinned.silo} is pinned with {self._text(pinned.silo, pinned.key)}, another key is refused: "
            f"{self._text(pinned.silo, key)}; take it with a succession statement signed by the pinned key, or, once its "
            f"people confirm that the old key is lost, after `silo-agent trust remove {pinned.silo}`"
        )

    def _with(self, content: _Peers, silo: SiloName, line: _Line) -> _Peers:
        if silo not in content.peers and len(content.peers) >= MOST_PEERS:
            raise StateError(f"{MOST_PEERS} peers are pinned: remove some before silo {silo} is added")
        removed = {name: when for name, when in content.removed.items() if name != silo}
        peers = {**content.peers, silo: line}
        return content.model_copy(update={"federation": self._own.federation, "peers": peers, "removed": removed})

    def _text(self, silo: SiloName, key: Ed25519PublicKey) -> str:
        return key_text(self._identity(silo), key)

    def _identity(self, silo: SiloName) -> Identity:
        return silo_identity(self._own.federation, silo)


def trust_store(folder: SiloFolder, credentials: SiloCredentials, *, first_use: bool = False) -> TrustStore:
    """The pins of an enrolled silo; `first_use` is [policy] trust_on_first_use."""
    return TrustStore(
        folder.peers,
        own=credentials.identity,
        own_key=credentials.identity_key.public_key(),
        seal=Seal(credentials.identity_key),
        keeper=_Noted(folder, credentials),
        first_use=first_use,
    )


class _Noted:
    """The note of peers.json that a silo's folder has, as PinsKeeper."""

    def __init__(self, folder: SiloFolder, credentials: SiloCredentials) -> None:
        self._folder = folder
        self._credentials = credentials
        self._lineages = Lineages(folder.lineages, Seal(credentials.identity_key))

    def check_pins(self, changes: int) -> None:
        try:
            self._lineages.check_pins(changes)
        except ConfigurationError as error:
            raise lost(str(error)) from error

    def note_pins(self, changes: int) -> None:
        # Here, not above: numpy, which this brings, is not for commands that only look.
        from silo_agent.edges.masking_journal import masking_journal

        masking_journal(self._folder, self._credentials).note_pins(changes)


def changes_of(path: Path, seal: Seal) -> int:
    """How often the file changed; 0 where there is none. Raises ConfigurationError, StorageError as TrustStore does."""
    return PrivateRecord(path, _Peers, check=lambda _content: None, remedy=_REMEDY, seal=seal).read().changes


def take_over(
    path: Path, federation: FederationName, own: SiloName | None, seal: Seal, known: int, *, proven: bool
) -> int:
    """By word of people what is there counts from now on, whoever wrote it: how often it changed, more than the `known` times.

    Unless it is `proven` that this silo wrote the file, and last, nobody is pinned on first use any more: people may have removed
    the pin. Raises ConfigurationError, StorageError.
    """
    if not known and not is_there(path):
        return 0
    changes = 0

    def check(content: _Peers) -> None:
        _check_peers(content, federation, own, seal.public_key)
        require_plausible(content.changes, "changes")

    def edit(content: _Peers) -> _Peers:
        nonlocal changes
        changes = max(content.changes, known) + 1
        return content.model_copy(
            update={"federation": federation, "changes": changes, "taken_over": content.taken_over or not proven}
        )

    PrivateRecord(path, _Peers, check=check, remedy=_REMEDY, seal=seal).change(edit, whoever_wrote_it=True)
    return changes


def _check_peers(content: _Peers, federation: FederationName, own: SiloName | None, own_key: Ed25519PublicKey) -> None:
    if content.federation != federation:
        raise ConfigurationError(f"it is of federation {content.federation!r}, this silo is in {federation}")
    keys = [_hex(_peer(SiloName(silo), line).key) for silo, line in content.peers.items()]
    if len(set(keys)) != len(keys) or _hex(own_key) in keys or own in content.peers:
        raise ConfigurationError("one key or this silo's own stands for two silos")


def silo_identity(federation: FederationName, silo: SiloName) -> Identity:
    return Identity(federation, Role.SILO, silo)


def _line(key: Ed25519PublicKey, how: How, since: datetime) -> _Line:
    return _Line(identity_key=_hex(key), how=how, since=since)


def _peer(silo: SiloName, line: _Line) -> PinnedPeer:
    predecessors = tuple(_key(step.key) for step in line.steps)
    return PinnedPeer(silo=silo, key=_key(line.identity_key), how=line.how, since=line.since, predecessors=predecessors)


def _key(text: str) -> Ed25519PublicKey:
    return public_key_from_bytes(bytes.fromhex(text))


def _hex(key: Ed25519PublicKey) -> str:
    return public_key_bytes(key).hex()
