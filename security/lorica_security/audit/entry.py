"""One entry of an audit log: what happened, when by the writer's clock, on whose account, and with which particulars.

A line of canonical JSON (security/lorica_security/audit/chain.py). Particulars are texts and whole numbers; digests are
hexadecimal. What an entry may say is a closed set of events, so that a log can be read by a program, and by people who
did not write it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from lorica_security.audit.chain import Head, digest_of_entry, line_of_entry, text, whole_number
from lorica_security.errors import IntegrityError

DOMAIN: Final = "lorica/v1/audit-log"
LOCAL: Final = "local"
"""On whose account: people at the machine that the log is of."""
SALT_BYTES: Final = 16
MOST_LINE_BYTES: Final = 1 << 20
MOST_TEXT_CHARACTERS: Final = 100_000
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")

Particular = str | int


class Event(Enum):
    """What can happen. The value is what stands in the log."""

    # of every log
    STARTED = "started"
    STOPPED = "stopped"
    SEALED = "sealed"  # a signature over everything before it
    CLOCK_WENT_BACK = "clock went back"
    REPEATED = "repeated"  # more of what an entry before tells, counted
    ENROLLED = "enrolled"
    CERTIFICATE_RENEWED = "certificate renewed"
    IDENTITY_SUCCEEDED = "identity succeeded"  # by a key that the one before named
    REFUSED = "refused"

    # of the coordinator's
    OPERATOR_COMMAND = "operator command"  # before it is done
    ACCESS_GRANTED = "access granted"  # by the command before, with the certificate that it made
    PLAN_OFFERED = "plan offered"
    PLAN_STOPPED = "plan stopped"
    PLAN_FINISHED = "plan finished"
    ROUND_OPENED = "round opened"
    UPDATE_RECEIVED = "update received"  # whole and checked; it counts unless the round was over by then
    SILO_DROPPED = "silo dropped"
    ROUND_CLOSED = "round closed"
    ROUND_ABANDONED = "round abandoned"
    MODEL_SCORED = "model scored"
    AUTHORITY_CHANGED = "authority changed"  # by command, or by itself when it was due
    GROUPS_STAND = "release groups stand"  # with the signatures of the silos that are needed
    SUM_RELEASED = "sum released"  # under silo-level privacy, with noise of the coordinator's
    PLAN_CLOSED = "plan closed"  # no further sum of it is released: the ledger may have forgotten some

    # of a silo's
    PLAN_RECEIVED = "plan received"
    PLAN_ALLOWED = "plan allowed"
    PLAN_APPROVED = "plan approved"  # by people
    MEMORY_RESET = "memory reset"  # of masked rounds, by people who know that it was lost
    TRAINED = "trained"
    UPDATE_LEAVES = "update leaves"
    MASKED_UPDATE_LEAVES = "masked update leaves"
    RECEIPT = "receipt"  # signed by the coordinator, for an update that it holds
    KEYS_LEAVE = "keys leave"  # a message of secure aggregation
    SUM_UNMASKED = "sum unmasked"  # before this silo's share of it leaves: of which model, over which silos
    FALSE_MODEL = "false model"  # a chunk of a round model that the sum did not make; the proof lies beside the log
    MODEL_WENT_BACK = (
        "model went back"  # an older one of the plan than this silo accepted is trained from, as after a restore
    )
    SCORES_LEAVE = "scores leave"
    DECLINED = "declined"  # a round; the reason leaves the silo
    ROUND_ENDED = "round ended"  # this silo's part of it
    PIN_ADDED = "pin added"
    PIN_REMOVED = "pin removed"
    GROUPS_SIGNED = "release groups signed"  # before the signature leaves
    GROUPS_TAKEN = "release groups taken"  # they stand, and this silo masks under them
    GROUPS_APPROVED = "release groups approved"  # by people, with what may be learnt of whom
    GROUPS_WITHDRAWN = "release groups withdrawn"  # a signature, by people
    KEYS_PROTECTED = "keys protected"  # by people: encrypted otherwise, or left in clear
    PAUSED = "paused"
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`at` is in seconds since 1970; `who` an identity URI, an address that nobody vouches for, or LOCAL.

    `salt` is random: the other side learns the digest, and could otherwise find out by guessing what an entry says.
    """

    sequence: int
    previous: str
    at: int
    event: Event
    who: str
    details: Mapping[str, Particular]
    salt: str

    def __post_init__(self) -> None:
        for name, value in self.details.items():
            if not _NAME.fullmatch(name) or type(value) not in (str, int):
                raise ValueError(f"{name} = {value!r} is no particular of an audit entry: use a text or a whole number")
            if isinstance(value, str) and len(value) > MOST_TEXT_CHARACTERS:
                raise ValueError(
                    f"{name} of an audit entry has {len(value)} characters: at most {MOST_TEXT_CHARACTERS}"
                )

    @property
    def digest(self) -> str:
        return digest_of_entry(DOMAIN, self._fields())

    @property
    def head(self) -> Head:
        """The log up to here."""
        return Head(self.sequence, self.digest)

    def line(self) -> bytes:
        return line_of_entry(DOMAIN, self._fields())

    def text(self, name: str) -> str:
        """A particular as text; empty where the entry has none of this name."""
        return str(self.details.get(name, ""))

    def number(self, name: str) -> int:
        """A particular as a number; 0 where the entry has none of this name."""
        value = self.details.get(name, 0)
        return value if isinstance(value, int) else 0

    def _fields(self) -> Mapping[str, object]:
        return {
            "at": self.at,
            "details": dict(self.details),
            "event": self.event.value,
            "previous": self.previous,
            "salt": self.salt,
            "sequence": self.sequence,
            "who": self.who,
        }


def entry_from_line(line: bytes, where: str) -> Entry:
    """The entry that `line`, with its newline, is. Raises IntegrityError naming `where` for anything that no log's
    writer wrote."""
    try:
        if len(line) > MOST_LINE_BYTES:
            raise ValueError("too long")
        value: Any = json.loads(line)
        if not isinstance(value, dict) or not isinstance(value["details"], dict):
            raise ValueError("no entry")
        entry = Entry(
            sequence=whole_number(value["sequence"]),
            previous=text(value["previous"]),
            at=whole_number(value["at"]),
            event=Event(value["event"]),
            who=text(value["who"]),
            details=value["details"],
            salt=text(value["salt"]),
        )
        whole = entry.line()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"{where} is no entry of an audit log: the file was edited or damaged") from error
    if whole != line:
        raise IntegrityError(f"{where}: entry {entry.sequence} does not have the digest that it names: it was edited")
    return entry
