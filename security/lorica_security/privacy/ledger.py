"""The ledger of one holder's releases: entries that name each other (security/lorica_security/audit/chain.py), so that
none can be changed, left out or taken back unseen. The head stands for all that was ever released.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final, Protocol

from lorica_security.audit.chain import Head, digest_of_entry, line_of_entry, text, whole_number
from lorica_security.errors import ConfigurationError, IntegrityError
from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.privacy.mechanisms.named import mechanism_named
from lorica_security.privacy.renyi_filter import check_order

_DOMAIN: Final = "lorica/v1/privacy-ledger"
_MOST_LINE_BYTES: Final = 4096
_REMEDY: Final = (
    'Put the newest ledger back, from the disk that went on; where it is lost, see "A ledger that is lost" in '
    "privacy.md"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`at` is for people: seconds since 1970 by the clock of who wrote it. `mechanism` is the name of one of
    `MECHANISMS`.

    `subject` is the digest of what the noise was bound to, where the same release may be made again and counts once;
    else empty.
    `unit` is the key of whom several records belong to, where the release is private for all of these together; else
    empty.
    `nonce` tells it from an entry of another silo's that is the same for the rest; ledgers of earlier releases have
    none.
    `order` is what the ledger's filter favours (renyi_filter.py), in its first entry, or the first that a release with
    filters wrote; else 0.
    """

    sequence: int
    previous: str
    federation: str
    plan: str
    round: int
    attempt: int
    mechanism: str
    release: GaussianRelease
    at: int
    subject: str = ""
    unit: str = ""
    order: int = 0
    nonce: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Of one key are the releases of one attempt."""
        return self.federation, self.plan, self.round, self.attempt

    @property
    def digest(self) -> str:
        return digest_of_entry(_DOMAIN, self._fields())

    def line(self) -> bytes:
        return line_of_entry(_DOMAIN, self._fields())

    def _fields(self) -> Mapping[str, object]:
        return {
            "at": self.at,
            "attempt": self.attempt,
            "federation": self.federation,
            "mechanism": self.mechanism,
            "noise_multiplier": self.release.noise_multiplier.hex(),
            "plan": self.plan,
            "previous": self.previous,
            "round": self.round,
            "sampling_rate": self.release.sampling_rate.hex(),
            "sequence": self.sequence,
            "steps": self.release.steps,
            **({"subject": self.subject} if self.subject else {}),
            **({"unit": self.unit} if self.unit else {}),
            **({"order": self.order} if self.order else {}),
            **({"nonce": self.nonce} if self.nonce else {}),
            **({"makers": self.release.makers} if self.release.makers > 1 else {}),
        }


class Attempt(Protocol):
    """At a round of a plan: what silo_wire has as RoundKey."""

    @property
    def federation(self) -> str: ...
    @property
    def plan(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def attempt(self) -> int: ...


def head_of(entries: Sequence[Entry]) -> Head:
    return Head(entries[-1].sequence, entries[-1].digest) if entries else Head()


def next_entry(
    entries: Sequence[Entry],
    key: Attempt,
    mechanism: str,
    release: GaussianRelease,
    *,
    at: int,
    subject: str = "",
    unit: str = "",
    order: int = 0,
    nonce: str = "",
) -> Entry:
    """The one that follows `entries`, which are a whole ledger: `release` of the attempt `key`."""
    head = head_of(entries)
    return Entry(
        sequence=head.sequence + 1,
        previous=head.digest,
        federation=key.federation,
        plan=key.plan,
        round=key.round,
        attempt=key.attempt,
        mechanism=mechanism,
        release=release,
        at=at,
        subject=subject,
        unit=unit,
        order=order,
        nonce=nonce,
    )


def releases_of(entries: Iterable[Entry]) -> list[GaussianRelease]:
    return [entry.release for entry in entries]


def read_ledger(raw: bytes, where: str) -> tuple[tuple[Entry, ...], int]:
    """The entries of a ledger file and how many of its bytes they take: less
    than all when the last line was not finished.

    Such a line is what a crash leaves of an entry whose release never began. Raises IntegrityError naming `where` for
    anything else that is not a ledger: an entry that was edited, left out, repeated or put in from another one.
    """
    entries: list[Entry] = []
    head, whole = Head(), 0
    *lines, _ = raw.split(b"\n")
    for number, line in enumerate(lines, 1):
        entry = entry_of(line + b"\n", f"{where} line {number}")
        if (entry.sequence, entry.previous) != (head.sequence + 1, head.digest):
            raise IntegrityError(
                f"{where} line {number}: entry {entry.sequence} does not follow entry {head.sequence}: entries were "
                "removed, repeated or put in; nothing more is released"
            )
        entries.append(entry)
        head = Head(entry.sequence, entry.digest)
        whole += len(line) + 1
    return tuple(entries), whole


def read_releases(raw: bytes, where: str) -> tuple[tuple[Entry, ...], int]:
    """Entries of any ledgers, in any order, and how many bytes they take; an unfinished last line counts as not there.

    Each is checked by itself. Raises IntegrityError naming `where`.
    """
    *lines, _ = raw.split(b"\n")
    entries = tuple(entry_of(line + b"\n", f"{where} line {number}") for number, line in enumerate(lines, 1))
    return entries, sum(len(line) + 1 for line in lines)


def check_head(entries: Sequence[Entry], known: Head, *, where: str, by: str) -> None:
    """Raise IntegrityError unless the ledger holds the entry that `by` knows as its head at some time."""
    if known.sequence == 0:
        return
    if len(entries) < known.sequence:
        raise IntegrityError(
            f"{where} ends with entry {len(entries)}, but {by} knows entry {known.sequence}: it was truncated or "
            f"put back from a backup; nothing more is released. {_REMEDY}"
        )
    if not compare_digest(entries[known.sequence - 1].digest, known.digest):
        raise IntegrityError(
            f"{where} has another entry {known.sequence} than {by} knows: it was replaced; nothing more is "
            f"released. {_REMEDY}"
        )


def entry_of(line: bytes, where: str) -> Entry:
    """What one line says, by itself; raises IntegrityError naming `where`."""
    try:
        value: Any = json.loads(line)
        if len(line) > _MOST_LINE_BYTES or not isinstance(value, dict):
            raise ValueError("no entry")
        entry = Entry(
            sequence=whole_number(value["sequence"]),
            previous=text(value["previous"]),
            federation=text(value["federation"]),
            plan=text(value["plan"]),
            round=whole_number(value["round"]),
            attempt=whole_number(value["attempt"]),
            mechanism=text(value["mechanism"]),
            release=GaussianRelease(
                noise_multiplier=float.fromhex(text(value["noise_multiplier"])),
                sampling_rate=float.fromhex(text(value["sampling_rate"])),
                steps=whole_number(value["steps"]),
                makers=whole_number(value.get("makers", 1)),
            ),
            at=whole_number(value["at"]),
            subject=text(value.get("subject", "")),
            unit=text(value.get("unit", "")),
            order=whole_number(value.get("order", 0)),
            nonce=text(value.get("nonce", "")),
        )
        if entry.order:
            check_order(entry.order)
        if mechanism_named(entry.mechanism).joint != (entry.release.makers > 1):
            raise ValueError("who makes the noise does not go with what was released")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, ConfigurationError) as error:
        raise IntegrityError(f"{where} is no entry of a privacy ledger: the file was edited or damaged") from error
    if entry.line() != line:
        raise IntegrityError(f"{where}: entry {entry.sequence} does not have the digest that it names: it was edited")
    return entry
