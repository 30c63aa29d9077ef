"""An audit log and its writer; on disk it is numbered files of JSON lines in a private folder, appended to and never
rewritten.

    log.000001, log.000002, ...     each goes on where the one before ends, which is with a seal
    audit.lock                      held while a process appends: the daemon, or a command beside it

An entry is durable when `append` returns. A last line that a crash tore never was one, and is cut off by the next
append. The writer seals what it wrote with its identity key (verification.py says when); a log that does not end with a
seal was ended by a crash, or is being written.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.audit.chain import Head
from lorica_security.audit.entry import (
    LOCAL,
    MOST_LINE_BYTES,
    MOST_TEXT_CHARACTERS,
    SALT_BYTES,
    Entry,
    Event,
    Particular,
    entry_from_line,
)
from lorica_security.audit.signed_head import SignedHead
from lorica_security.audit.verification import Position, Verification, seal_particulars
from lorica_security.errors import IntegrityError, StorageError
from lorica_security.host.files import append_private, make_private_folder, read_private
from lorica_security.on_disk.log_place import Line, LogPlace

R = TypeVar("R")
SEGMENT_BYTES = 4 << 20
"""From this size on a file is not added to: the newest one is read whole when a process begins to append."""
_REMEDY = "free some space; nothing goes on that the audit log cannot tell of"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """The newest file as this process left it: `number` from 1, `size` in bytes that are whole lines, `torn` what
    follows them."""

    number: int
    size: int
    torn: int = 0
    position: Position

    def is_full(self, most: int) -> bool:
        """Whether the next entry begins another file: this one has to end with a seal, and nothing torn behind it."""
        return self.size >= most and not self.position.unsealed and not self.torn


class AuditLog:
    """One side's log. Safe to use from several threads and processes. Raises StorageError, IntegrityError naming the
    file, or what else the log is in."""

    def __init__(
        self, place: Path | LogPlace, *, writer: str, key: Ed25519PrivateKey, clock: Callable[[], float]
    ) -> None:
        """`writer` is the URI of whose log it is, `key` its identity key; `clock` gives seconds since 1970."""
        self.place, self.writer, self.clock = log_place(place), writer, clock
        self._key = key
        self._added = False

    @property
    def public_key(self) -> Ed25519PublicKey:
        return self._key.public_key()

    def in_place(self, place: LogPlace) -> "AuditLog":
        """Of the same writer, elsewhere."""
        return AuditLog(place, writer=self.writer, key=self._key, clock=self.clock)

    def append(self, event: Event, *, who: str = LOCAL, **details: Particular) -> Head:
        """Durable when this returns, as the head that is given."""
        return self.place.in_tries(partial(self._append, event, who, details))

    def _append(self, event: Event, who: str, details: dict[str, Particular]) -> Head:
        with self.place.alone() as end:
            now = int(self.clock())
            fresh: list[Entry] = []
            position = end.position

            def add(kind: Event, by: str, particulars: dict[str, Particular]) -> None:
                nonlocal position
                head = position.head
                entry = Entry(
                    sequence=head.sequence + 1,
                    previous=head.digest,
                    at=now,
                    event=kind,
                    who=by,
                    details=particulars,
                    salt=secrets.token_hex(SALT_BYTES),
                )
                fresh.append(entry)
                position = position.after(entry)

            def seal() -> None:
                signed = SignedHead.sign(self._key, writer=self.writer, head=position.head)
                add(Event.SEALED, self.writer, seal_particulars(signed))

            def is_full() -> bool:
                return end.is_full_with(sum(len(entry.line()) for entry in fresh))

            if position.clock_went_back(now):
                add(Event.CLOCK_WENT_BACK, self.writer, {"seconds": position.at - now})
            if position.seal_is_due(now):
                seal()
            if event is not Event.SEALED:
                add(event, who, _bounded(details))
            if position.seal_is_due(now) or (position.unsealed and (event is Event.SEALED or is_full())):
                seal()
            end.write(fresh, position)
        self._added = True
        return position.head

    def seal(self) -> None:
        """Sign what is not signed yet, at a clean stop; nothing happens where this process has added nothing."""
        if self._added:
            self.append(Event.SEALED)

    def seal_if_due(self) -> None:
        """To be called every now and then, so that nothing waits long."""
        if self._position().seal_is_due(int(self.clock())):
            self.append(Event.SEALED)

    def head(self) -> Head:
        return self._position().head

    def signed_head(self) -> SignedHead:
        """How far the log is, as evidence for the other side."""
        return SignedHead.sign(self._key, writer=self.writer, head=self.head())

    def _position(self) -> Position:
        def look() -> Position:
            with self.place.alone() as end:
                return end.position

        return self.place.in_tries(look)


class LogFiles:
    """A LogPlace: the files of a private folder, which is made with the first entry."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self.segment_bytes = folder, segment_bytes
        self._tail: _Tail | None = None

    @property
    def where(self) -> str:
        return str(self.folder)

    def lines(self) -> Iterator[Line]:
        return lines(self.folder)

    def telling(self, *texts: str) -> Iterator[Line]:
        wanted = [text.encode() for text in texts]
        for path in reversed(segments(self.folder)):
            content, _ = _whole_lines(path)
            yield from (line for line in reversed(content) if any(text in line.content for text in wanted))

    def in_tries(self, work: Callable[[], R]) -> R:
        """Who would add waits for the lock: nothing is tried again."""
        return work()

    @contextmanager
    def alone(self) -> Iterator["_FilesEnd"]:
        make_private_folder(self.folder)
        try:
            descriptor = os.open(self.folder / "audit.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{self.folder / 'lock'} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self._tail is None or not self._is_current(self._tail):
                self._tail = _read_tail(self.folder)
            yield _FilesEnd(self, self._tail)
        finally:
            os.close(descriptor)

    def _is_current(self, tail: _Tail) -> bool:
        path = segment(self.folder, tail.number)
        size = path.stat().st_size if path.exists() else 0
        return size == tail.size and not segment(self.folder, tail.number + 1).exists()

    def write(self, tail: _Tail, entries: Sequence[Entry], position: Position) -> None:
        """Behind `tail`, which is held alone."""
        if not entries:
            return
        data = b"".join(entry.line() for entry in entries)
        full = tail.is_full(self.segment_bytes)
        number, at = (tail.number + 1, 0) if full else (tail.number, tail.size)
        self._tail = None  # until it is known to be written
        append_private(segment(self.folder, number), data, at, remedy=_REMEDY)
        self._tail = _Tail(number=number, size=at + len(data), position=position)


@dataclass(frozen=True, slots=True)
class _FilesEnd:
    files: LogFiles
    tail: _Tail

    @property
    def position(self) -> Position:
        return self.tail.position

    def is_full_with(self, size: int) -> bool:
        most = self.files.segment_bytes
        return (0 if self.tail.is_full(most) else self.tail.size) + size >= most

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        self.files.write(self.tail, entries, position)


def write_copy(place: LogPlace, folder: Path) -> None:
    """The lines of a log as files in a folder that holds none: they verify as the log does. Raises StorageError."""
    number, size = 1, 0
    held: list[bytes] = []
    for line in place.lines():
        held.append(line.content)
        size += len(line.content)
        if size >= SEGMENT_BYTES and entry_from_line(line.content, line.where).event is Event.SEALED:
            append_private(segment(folder, number), b"".join(held))
            number, held, size = number + 1, [], 0
    if held:
        append_private(segment(folder, number), b"".join(held))


def log_place(place: Path | LogPlace) -> LogPlace:
    """Of a log in a folder, the files."""
    return LogFiles(place) if isinstance(place, Path) else place


def segment(folder: Path, number: int) -> Path:
    return folder / f"log.{number:06}"


def segments(folder: Path) -> list[Path]:
    """The files of a log, oldest first. Raises IntegrityError naming one that is missing between two."""
    numbers = sorted(int(path.suffix[1:]) for path in folder.glob("log.*") if path.suffix[1:].isdigit())
    for due, number in enumerate(numbers, 1):
        if number != due:
            raise IntegrityError(f"{segment(folder, due)} is missing: the entries in it were left out")
    return [segment(folder, number) for number in numbers]


def lines(folder: Path) -> Iterator[Line]:
    """Every whole line of a log, oldest first. Raises IntegrityError for a file that ends within a line though another
    follows it."""
    paths = segments(folder)
    for path in paths:
        content, torn = _whole_lines(path)
        yield from content
        if torn and path != paths[-1]:
            raise IntegrityError(
                f"{path} ends within a line though {paths[-1].name} follows: the file was cut or damaged"
            )


def _whole_lines(path: Path) -> tuple[list[Line], int]:
    """And how many bytes follow the last of them."""
    *whole, torn = read_private(path).split(b"\n")
    return [Line(line + b"\n", f"{path} line {number}") for number, line in enumerate(whole, 1)], len(torn)


def _read_tail(folder: Path) -> _Tail:
    """Raises IntegrityError for a newest file that is not as a writer left it: it is not added to."""
    paths = segments(folder)
    if not paths:
        return _Tail(number=1, size=0, position=Position())
    newest, torn = _whole_lines(paths[-1])
    walk = Verification(at=_end_of(paths[-2]) if len(paths) > 1 else None)
    for line in newest:
        walk.take(line.content, line.where)
    size = sum(len(line.content) for line in newest)
    return _Tail(number=len(paths), size=size, torn=torn, position=walk.position)


def _end_of(path: Path) -> Position:
    """Of a file that another one follows: it ends with a seal."""
    content, _ = _whole_lines(path)
    if not content:
        raise IntegrityError(f"{path} holds no entry though another file follows: it was emptied")
    entry = entry_from_line(content[-1].content, content[-1].where)
    return Position(head=entry.head, at=entry.at, sealed=entry.sequence)


def _bounded(details: dict[str, Particular]) -> dict[str, Particular]:
    """With texts cut until the line is one that is read again: a character may take twelve bytes there."""
    longest = MOST_TEXT_CHARACTERS
    while True:
        kept = {name: value[:longest] if isinstance(value, str) else value for name, value in details.items()}
        if len(json.dumps(kept)) <= MOST_LINE_BYTES // 2 or longest == 0:
            return kept
        longest //= 2
