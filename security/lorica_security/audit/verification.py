"""Whether a log is the one that its writer wrote: line by line, from what the log itself and the heads that others hold
say.

    edited                          a line does not have the digest that it names, or is not the one that the next one
                                    follows
    put in, left out, reordered     a number that is not due
    written anew without the key    a seal whose signature is not the writer's, or no seal for too long
    written anew with the key, cut  the log has not the entry that a signed head names

The first bad entry is named, or, where only a signature over many is wrong, the stretch that it is in. What comes after
the last seal is in the chain, and nobody has signed it: `unsealed` says how much that is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.chain import NO_ENTRY, Head
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import IntegrityError, MalformedMessage

SEAL_EVERY: Final = 64
"""Most entries without a seal."""
SEAL_WITHIN_S: Final = 60
"""A writer seals before it adds to an entry that has waited longer."""
CLOCK_TOLERANCE_S: Final = 300
"""Clocks are corrected; by more than this a log says so."""

_BEGINNING: Final = Head()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a log stands: its head and its instant, how many entries no seal covers, and since when."""

    head: Head = _BEGINNING
    unsealed: int = 0
    unsealed_since: int = 0
    at: int = 0
    sealed: int = 0
    """The newest seal's number."""

    def after(self, entry: Entry) -> "Position":
        sealing = entry.event is Event.SEALED
        return Position(
            head=entry.head,
            unsealed=0 if sealing else self.unsealed + 1,
            unsealed_since=entry.at if sealing or not self.unsealed else self.unsealed_since,
            at=entry.at,
            sealed=entry.sequence if sealing else self.sealed,
        )

    def seal_is_due(self, now: int) -> bool:
        return self.unsealed >= SEAL_EVERY or (self.unsealed > 0 and not 0 <= now - self.unsealed_since < SEAL_WITHIN_S)

    def clock_went_back(self, now: int) -> bool:
        return now < self.at - CLOCK_TOLERANCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What somebody else knows of a log. `by` names who or what, for people."""

    head: Head
    by: str


class Verification:
    """Takes a log's lines in their order, then what is known of it.

    Without `keys` signatures are left alone, and `writer` is whatever the log says.
    """

    def __init__(self, *, writer: str = "", keys: Sequence[Ed25519PublicKey] = (), at: Position | None = None) -> None:
        """`at` is where the first line goes on; None: the log begins."""
        self.position = at or Position()
        self.writer = writer
        self.clock_went_back = 0
        self._keys = keys
        self._digests: list[str] = []
        self._first = self.position.head.sequence + 1

    @property
    def entries(self) -> int:
        return self.position.head.sequence

    def take(self, line: bytes, where: str) -> Entry:
        """The entry that `line` is. Raises IntegrityError naming it, and `where`."""
        entry = entry_from_line(line, where)
        before = self.position
        due = before.head.sequence + 1
        if entry.sequence != due:
            raise IntegrityError(
                f"{where}: entry {entry.sequence} stands where entry {due} is due: entries were left out, repeated, "
                "reordered or put in"
            )
        if not compare_digest(entry.previous, before.head.digest):
            raise IntegrityError(
                f"{where}: entry {due} follows another entry {due - 1} than the one before it: entry {due - 1} was "
                "edited or replaced"
                if due > 1
                else f"{where}: entry 1 follows an entry that is not there: the beginning of the log was cut off"
            )
        self._check_times(entry, where)
        if entry.event is Event.SEALED:
            self._check_seal(entry, where)
        elif before.unsealed >= SEAL_EVERY:
            raise IntegrityError(
                f"{where}: entry {due} has more than {SEAL_EVERY} entries before it that no seal covers: a seal was "
                "left out"
            )
        self.position = before.after(entry)
        self._digests.append(self.position.head.digest)
        return entry

    def check_known(self, known: Iterable[Known], where: str) -> int:
        """How many of `known` the log agrees with, all of them. Raises IntegrityError naming the first entry that is
        missing or another."""
        agreed = Head()
        count = 0
        for one in sorted(known, key=lambda item: item.head.sequence):
            sequence = one.head.sequence
            if sequence > self.entries:
                raise IntegrityError(
                    f"{where} ends with entry {self.entries}, {one.by} knows entry {sequence}: entry "
                    f"{self.entries + 1} and what followed was cut off, or the log was put back from a backup"
                )
            if not compare_digest(self.digest_of(sequence), one.head.digest):
                raise IntegrityError(
                    f"{where} has another entry {sequence} than {one.by} knows: the log was written anew from an "
                    f"entry after {agreed.sequence} on"
                )
            agreed = one.head
            count += 1
        return count

    def digest_of(self, sequence: int) -> str:
        """Of an entry that was taken; 0: what the first one follows."""
        return NO_ENTRY if sequence == 0 else self._digests[sequence - self._first]

    def _check_times(self, entry: Entry, where: str) -> None:
        before = self.position
        if entry.event is Event.CLOCK_WENT_BACK:
            self.clock_went_back += 1
            return
        if before.clock_went_back(entry.at):
            raise IntegrityError(
                f"{where}: entry {entry.sequence} is {before.at - entry.at} s before the one before it, and nothing "
                "says that the clock was set back: it was put in or edited"
            )
        waited = entry.at - before.unsealed_since
        if before.unsealed and entry.event is not Event.SEALED and waited > SEAL_WITHIN_S + CLOCK_TOLERANCE_S:
            raise IntegrityError(
                f"{where}: entry {entry.sequence} comes {waited} s after one that no seal covers: a seal was left out"
            )

    def _check_seal(self, entry: Entry, where: str) -> None:
        self.writer = self.writer or entry.who
        if not self._keys:
            return
        stretch = f"entries {self.position.sealed + 1} to {entry.sequence}"
        try:
            if entry.who != self.writer:
                raise IntegrityError(f"it is of {entry.who[:200]}, the log of {self.writer}")
            sealed_head(entry).check(*self._keys)
        except (IntegrityError, MalformedMessage) as error:
            raise IntegrityError(
                f"{where}: entry {entry.sequence} is no seal of {self.writer} ({error}): one of {stretch} was "
                "edited or put in"
            ) from error


def seal_particulars(sealed: SignedHead) -> dict[str, str | int]:
    """Of a seal: what it covers stands in the entry, `previous` and the number before."""
    return {"signature": sealed.signature.hex()}


def sealed_head(seal: Entry) -> SignedHead:
    """What a seal says, unchecked. Raises MalformedMessage."""
    try:
        signature = bytes.fromhex(seal.text("signature"))
    except ValueError as error:
        raise MalformedMessage("its signature is not hexadecimal") from error
    return SignedHead(writer=seal.who, head=Head(seal.sequence - 1, seal.previous), signature=signature)
