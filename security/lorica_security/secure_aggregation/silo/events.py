"""What can happen to a silo within an attempt: what its own side does, and the coordinator's messages."""

from dataclasses import dataclass

from lorica_security.errors import StateError
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.key_agreement import ROOT_BYTES
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import Delivery, SharedKeys, SurvivorSet, UnmaskRequest
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.memory import Seen
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes


@dataclass(frozen=True, kw_only=True)
class OpenAttempt:
    """The agent takes part: `model` and `tensors` are what it trained from; `root` is 32 fresh bytes of OS entropy.

    `seen` is the machine's to fill in: what this silo says in its advertisement of others.
    """

    attempt: Attempt
    model: bytes
    tensors: tuple[int, ...]
    root: Secret
    seen: Seen = ()

    def __post_init__(self) -> None:
        check_bytes("attempt", DIGEST_BYTES, model=self.model)
        if len(self.root) != ROOT_BYTES:
            raise StateError(f"the root of an attempt has {len(self.root)} bytes: draw {ROOT_BYTES}")


@dataclass(frozen=True, slots=True)
class VectorMasked:
    """The masked vector is on disk; `vector` is its digest (of its manifest).

    It also pins the encoding, masks being fixed.
    """

    vector: bytes

    def __post_init__(self) -> None:
        check_bytes("masked vector", DIGEST_BYTES, digest=self.vector)


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The sum came out, or the attempt was abandoned, by whichever side."""

    attempt: Attempt


Event = OpenAttempt | Roster | SharedKeys | Delivery | VectorMasked | SurvivorSet | UnmaskRequest | AttemptEnded
EVENTS: tuple[type[Event], ...] = (
    OpenAttempt,
    Roster,
    SharedKeys,
    Delivery,
    VectorMasked,
    SurvivorSet,
    UnmaskRequest,
    AttemptEnded,
)
