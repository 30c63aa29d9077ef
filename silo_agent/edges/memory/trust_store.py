"""Whose identity keys this silo has pinned, in `peers.json` of its folder, sealed, each change noted in
`lineages.json`.

People pin a peer's key after comparing it by a way of their own (`silo-agent trust add`): the coordinator runs the
federation's authority and could make up silos. Rules that hold whoever asks:

- a pinned silo keeps its key: another one is taken only with succession statements that lead to it, the first of them
  signed by the pinned key; people bring them, or a roster does;
- one key stands for one silo, and this silo's own name and key for no other;
- the key that a peer comes with first is pinned only where this silo's policy opted in, and never for a peer whose pin
  people removed.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import ConfigurationError, Conflict, IntegrityError, PolicyRefusal, StateError
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.key_text import key_text
from lorica_security.identity.seal import Seal
from lorica_security.identity.succession import Succession, check_succession, steps_between
from silo_agent.edges.disk.counted_record import CountedRecord, Notes
from silo_agent.edges.disk.private_record import RESET
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory.lineages import Lineages, lost
from silo_agent.edges.memory.pins_file import (
    MOST_PEERS,
    MOST_PREDECESSORS,
    REMEDY,
    How,
    Line,
    Peers,
    PinnedPeer,
    Step,
    check_peers,
    key_of_text,
    new_line,
    owners_of,
    pinned_peer,
    text_of_key,
)

TRUSTED_PEERS = "trusted_peers"
"""The rule that pins make; as the roster's check in lorica_security.secure_aggregation names it."""


class Taken(Enum):
    """What `TrustStore.add` came to."""

    PINNED = "pinned"
    CONFIRMED = "confirmed"  # was pinned on first use, is now known to people
    SUCCEEDED = "succeeded"
    KNOWN = "known"


class PinsKeeper(Protocol):
    """Keeps a note of how often peers.json changed, and finds out by it that the file was lost or put back."""

    def check_pins(self, changes: int) -> None:
        """Raise PolicyRefusal unless a file of so many changes is the newest that there was."""

    def note_pins(self, changes: int) -> None:
        """Durable when it returns. Raises PolicyRefusal where this silo's memory of masked rounds is not whole."""


class TrustStore:
    """The pins of one silo. Each call reads the file: what people changed holds from the next attempt on.

    Raises ConfigurationError naming the file when it is damaged, edited, or when others can read it, PolicyRefusal
    where `keeper` knows of a newer one, StorageError.
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
        notes: Notes[Peers] | None = None
        if keeper is not None:
            notes = Notes(check=keeper.check_pins, note=lambda content: keeper.note_pins(content.changes))
        self._record = CountedRecord(path, Peers, check=self._check, remedy=REMEDY, seal=seal, notes=notes)

    def peers(self) -> tuple[PinnedPeer, ...]:
        """By name."""
        return tuple(pinned_peer(SiloName(silo), line) for silo, line in sorted(self._record.read().peers.items()))

    def removed(self) -> tuple[SiloName, ...]:
        """Peers whose pins people removed, by name: not taken on first use."""
        return tuple(SiloName(silo) for silo in sorted(self._record.read().removed))

    def removed_keys(self) -> Mapping[SiloName, Sequence[Ed25519PublicKey]]:
        """Keys whose pins people removed, newest first.

        For evidence of rounds that this silo helped to sum, release groups that others went on from, and for nothing
        else.
        """
        return {
            SiloName(silo): tuple(map(key_of_text, keys)) for silo, keys in self._record.read().removed_keys.items()
        }

    def trusted(self) -> tuple[PinnedPeer, ...]:
        """Those of `peers` whose pins count: one of first use does where this silo's policy opted in."""
        return tuple(peer for peer in self.peers() if self._first_use or peer.how is How.ADDED)

    def identities(self) -> Mapping[SiloName, Ed25519PublicKey]:
        """What a `Party` of secure aggregation takes as `pinned`."""
        return {peer.silo: peer.key for peer in self.peers()}

    def add(self, silo: SiloName, key: Ed25519PublicKey, *, succession: bytes | None = None) -> Taken:
        """Pin what this silo's people compared; a second key of a pinned silo needs `succession`, signed by the first.

        Raises ConfigurationError for this silo's own name or a key that stands for another silo, Conflict for another
        key, IntegrityError for a statement that the pinned key did not sign, StateError where there is no pin to
        succeed.
        """
        taken = Taken.KNOWN

        def edit(content: Peers) -> Peers:
            nonlocal taken
            line, taken = self._added(content, owners_of(content), silo, key, succession)
            return self._with(content, {silo: line})

        self._record.change(edit)
        return taken

    def add_all(self, keys: Mapping[SiloName, Ed25519PublicKey]) -> None:
        """Pin all of `keys`, or none: for who has compared a whole federation's; raises as `add` does."""

        def edit(content: Peers) -> Peers:
            owners, lines = owners_of(content), dict[SiloName, Line]()
            for silo, key in keys.items():
                lines[silo], _ = self._added(content, owners, silo, key, None)
                owners[lines[silo].identity_key] = silo
            return self._with(content, lines)

        self._record.change(edit)

    def _added(
        self,
        content: Peers,
        owners: Mapping[str, str],
        silo: SiloName,
        key: Ed25519PublicKey,
        succession: bytes | None,
    ) -> tuple[Line, Taken]:
        """The line of `silo` once `key` is pinned; `owners` says which silo each pinned key stands for."""
        self._check_free(owners, silo, key)
        line = content.peers.get(silo)
        if line is None and succession is not None:
            raise StateError(
                f"no key is pinned for silo {silo} that another could succeed: compare this one with its people, "
                "then add it without a statement"
            )
        if line is None:
            return new_line(key, How.ADDED, self._now()), Taken.PINNED
        if line.identity_key == text_of_key(key):
            taken = Taken.KNOWN if line.how is How.ADDED else Taken.CONFIRMED
            return line.model_copy(update={"how": How.ADDED}), taken
        statement = self._succession(pinned_peer(silo, line), key, succession)
        step = Step(key=line.identity_key, statement=statement.hex())
        return line.followed(text_of_key(key), self._now(), [step]), Taken.SUCCEEDED

    def remove(self, silo: SiloName) -> None:
        """Pin nothing for this silo any longer, on first use neither; raises StateError where nothing is pinned."""

        def edit(content: Peers) -> Peers:
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
        """Move the pin of `silo` to `key`, where signed steps lead there from the pinned one; nothing happens
        otherwise.

        The pinned key's owner names its successor, whoever relays it. What is not led to stays refused where it is
        used.
        """
        line = self._record.read().peers.get(silo)
        if line is None or line.identity_key == text_of_key(key):
            return

        def edit(content: Peers) -> Peers:
            known = content.peers.get(silo)
            if known is None:
                return content
            try:
                self._check_free(owners_of(content), silo, key)
                steps = steps_between(
                    successions, identity=self._identity(silo), pinned=pinned_peer(silo, known).key, present=key
                )
            except (ConfigurationError, IntegrityError):
                return content
            if not steps:
                return content
            back = [Step(key=text_of_key(one.predecessor), statement=one.statement.hex()) for one in reversed(steps)]
            return self._with(content, {silo: known.followed(text_of_key(key), self._now(), back)})

        self._record.change(edit)

    def trusted_on_first_use(self, silo: SiloName, key: Ed25519PublicKey) -> None:
        """The key that `silo` comes with is its pinned one, or is pinned now, where this silo's policy opted in.

        Raises PolicyRefusal otherwise, showing both pins where there are two.
        """
        line = self._record.read().peers.get(silo)
        if line is not None and line.identity_key == text_of_key(key):
            return

        def edit(content: Peers) -> Peers:
            try:
                self._check_free(owners_of(content), silo, key)
            except ConfigurationError as error:
                raise PolicyRefusal(TRUSTED_PEERS, str(error)) from error
            known = content.peers.get(silo)
            if known is not None and known.identity_key != text_of_key(key):
                raise PolicyRefusal(TRUSTED_PEERS, self._two_keys(pinned_peer(silo, known), key))
            if known is not None:
                return content
            if silo in content.removed:
                raise PolicyRefusal(
                    TRUSTED_PEERS, f"this silo's people removed the pin of silo {silo}: they alone add one again"
                )
            if content.taken_over:
                raise PolicyRefusal(
                    TRUSTED_PEERS,
                    f"peers.json was taken over with `{RESET}`, so that nobody knows whether the pin of silo {silo} "
                    "was removed: this silo's people alone add one, with `silo-agent trust add`",
                )
            if not self._first_use:
                raise PolicyRefusal(
                    "trust_on_first_use",
                    f"no key is pinned for silo {silo}, which comes with {self._text(silo, key)}: compare that with "
                    f"its people, then `silo-agent trust add {silo} KEY`",
                )
            return self._with(content, {silo: new_line(key, How.FIRST_USE, self._now())})

        self._record.change(edit)

    # ---- what every pin keeps to ----------------------------------------------------------------------------------

    def _check(self, content: Peers) -> None:
        """Raises ConfigurationError or MalformedMessage for a file that this class would not have written."""
        check_peers(content, self._own.federation, SiloName(self._own.name), self._own_key)

    def _check_free(self, owners: Mapping[str, str], silo: SiloName, key: Ed25519PublicKey) -> None:
        """Raises ConfigurationError when name or key belong to another pin: one silo could take two seats of a
        cohort."""
        if silo == self._own.name:
            raise ConfigurationError(f"{silo} is this silo itself: it needs no pin")
        if key == self._own_key:
            raise ConfigurationError(f"the key that silo {silo} is said to have is this silo's own")
        other = owners.get(text_of_key(key), silo)
        if other != silo:
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
            f"{self._text(pinned.silo, key)}; take it with a succession statement signed by the pinned key, or, "
            f"once its people confirm that the old key is lost, after `silo-agent trust remove {pinned.silo}`"
        )

    def _with(self, content: Peers, lines: Mapping[SiloName, Line]) -> Peers:
        peers = {**content.peers, **{str(silo): line for silo, line in lines.items()}}
        if len(peers) > MOST_PEERS:
            raise StateError(
                f"{len(content.peers)} peers are pinned, {MOST_PEERS} is the most: remove some before "
                f"{', '.join(sorted(set(lines) - set(content.peers))[:3])} can be added"
            )
        removed = {name: when for name, when in content.removed.items() if name not in lines}
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
        from silo_agent.edges.memory.masking_journal import masking_journal

        masking_journal(self._folder, self._credentials).note_pins(changes)


def silo_identity(federation: FederationName, silo: SiloName) -> Identity:
    return Identity(federation, Role.SILO, silo)
