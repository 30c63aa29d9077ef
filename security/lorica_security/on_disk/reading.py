"""A log as people and programs read it: offline, from where its lines are and the writer's public keys alone."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.entry import Entry, Event
from lorica_security.audit.signed_head import SignedHead, heads_from_lines
from lorica_security.audit.verification import Known, Verification
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StateError, StorageError
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.on_disk.log_file import log_place
from lorica_security.on_disk.log_place import LogPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All entries of a log that is whole, as far as the log itself says."""

    entries: tuple[Entry, ...]
    walk: Verification
    where: str

    @property
    def writer(self) -> str:
        return self.walk.writer

    def of(self, *events: Event) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.event in events)

    def summary(self) -> list[str]:
        """What `verify` prints of the chain and its seals."""
        count, position = len(self.entries), self.walk.position
        seals = sum(1 for _ in self.of(Event.SEALED))
        said = [f"{self.where} is whole: {count} entries, {seals} seals, signed by {self.writer}"]
        if self.entries:
            said.append(f"from {instant(self.entries[0].at)} to {instant(position.at)}, head {position.head.digest}")
        if position.unsealed:
            said.append(f"not signed yet: the last {position.unsealed} entries, which follow the last seal")
        if self.walk.clock_went_back:
            said.append(f"the clock was set back {self.walk.clock_went_back} times")
        return said


def entries_of(place: Path | LogPlace, walk: Verification) -> Iterator[Entry]:
    """One by one, up to the first that is wrong: there IntegrityError is raised. Raises StateError where there is no
    log."""
    empty = True
    log = log_place(place)
    for line in log.lines():
        empty = False
        yield walk.take(line.content, line.where)
    if empty:
        raise StateError(f"{log.where} holds no audit log: nothing was entered yet, or this is another folder")


def read_log(place: Path | LogPlace, *, writer: str = "", keys: Sequence[Ed25519PublicKey] = ()) -> Reading:
    """Raises IntegrityError naming file, line and entry of the first that is wrong."""
    walk = Verification(writer=writer, keys=keys)
    return Reading(entries=tuple(entries_of(place, walk)), walk=walk, where=log_place(place).where)


def heads_in(entries: Iterator[Entry]) -> Iterator[tuple[Entry, SignedHead]]:
    """What the other side signed of its log, and in which entry it stands. Raises IntegrityError naming an entry."""
    for entry in entries:
        try:
            head = SignedHead.from_particulars(entry.details)
        except MalformedMessage as error:
            raise IntegrityError(
                f"entry {entry.sequence} holds a head of another log that does not parse ({error})"
            ) from error
        if head is not None:
            yield entry, head


def known_from_file(path: Path, reading: Reading, keys: Sequence[Ed25519PublicKey]) -> list[Known]:
    """What an exported file of heads says of this log; heads of others' logs are passed over.

    Raises IntegrityError for one in this writer's name that it did not sign, StorageError.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    known = []
    for number, head in enumerate(heads_from_lines(raw, str(path)), 1):
        if head.writer == reading.writer:
            try:
                head.check(*keys)
            except IntegrityError as error:
                raise IntegrityError(f"{path} line {number}: {error}: it says nothing of the log") from error
            known.append(Known(head=head.head, by=f"{path} line {number}"))
    return known


def against(path: Path, reading: Reading, keys: Sequence[Ed25519PublicKey]) -> str:
    """What `verify` prints after comparing the log with a file of heads; raises IntegrityError where they differ."""
    known = known_from_file(path, reading, keys)
    if not known:
        raise StateError(f"{path} holds no head of the log of {reading.writer}: export it at the other side")
    count = reading.walk.check_known(known, reading.where)
    return (
        f"{path}: {count} heads that the other side holds agree with the log, up to entry "
        f"{max(one.head.sequence for one in known)}"
    )


def shown(place: Path | LogPlace, *, last: int, as_json: bool) -> Iterator[str]:
    """What `show` prints: a line for each of the `last` entries, 0 for all. What `entries_of` raises comes after those
    before it."""
    entries: list[Entry] = []
    trouble: IntegrityError | None = None
    try:
        entries.extend(entries_of(place, Verification()))
    except IntegrityError as error:
        trouble = error
    for entry in entries[-last:]:
        yield json.dumps(facts(entry)) if as_json else described(entry)
    if trouble is not None:
        raise trouble


def verdict(reading: Reading, said: Sequence[str], *, as_json: bool) -> str:
    """What `verify` prints of a log that is whole, and of what was `said` of it."""
    if not as_json:
        return "\n".join(said)
    return json.dumps({"whole": True, "entries": len(reading.entries), "found": said}, indent=1)


def key_from_digits(option: str, text: str) -> Ed25519PublicKey:
    """A writer's identity key as it is given for `verify`; raises ConfigurationError naming the option."""
    try:
        return public_key_from_bytes(bytes.fromhex(text))
    except (ValueError, MalformedMessage) as error:
        raise ConfigurationError(
            f"{option} {text[:80]!r} is no identity key of 64 hexadecimal digits: give the one that the log's owner's "
            "`audit verify` prints"
        ) from error


def described(entry: Entry) -> str:
    """One line, for a terminal."""
    said = " ".join(f"{name}={one_line(value)}" for name, value in sorted(entry.details.items()))
    return f"{entry.sequence:>6}  {instant(entry.at)}  {entry.event.value:<20}  {one_line(entry.who)}  {said}".rstrip()


def facts(entry: Entry) -> dict[str, object]:
    """For JSON."""
    return {
        "sequence": entry.sequence,
        "at": entry.at,
        "event": entry.event.value,
        "who": entry.who,
        "details": dict(entry.details),
        "digest": entry.digest,
    }


def one_line(value: object, most: int = 300) -> str:
    """No control characters, and no more than a person reads."""
    shown = "".join(character if character.isprintable() else " " for character in str(value))
    return shown if len(shown) <= most else f"{shown[:most]}..."


def instant(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
