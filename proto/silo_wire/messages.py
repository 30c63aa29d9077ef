"""The messages of the wire as frozen values: what every part of both programs works with once bytes are parsed.

`codec` alone converts between these and protobuf. Ranges are checked here, at construction, so that a value that
exists is a value that may be used.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.identity.succession import Succession
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    Delivery,
    MaskedInput,
    Reveal,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
)
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest, masked_layout

if TYPE_CHECKING:  # it brings numpy, which is for plans with masks alone
    from lorica_security.secure_aggregation.roster import Roster

WIRE_VERSION = 2
MAX_DETAIL_CHARACTERS = 500
MAX_EXAMPLES = 1 << 40
MAX_OPTIMIZER_STEPS = 1 << 40


def _non_negative(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise MalformedMessage(f"{owner} {name} is {value}: it must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundKey:
    """One attempt at one round of one plan."""

    federation: str
    plan: Digest
    round: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    """How local training went. `loss_max - loss_min` is the loss reduction of Zhang et al. 2023, never negative.

    Of an evaluated one `loss_first` is the loss at the round model and `loss_last` that at the local model; it is 0
    where the loss rose. Of a logged one they are the first and the last that was logged. Where a plan averages
    reductions over rounds, `loss_max` is `loss_min` plus the average.
    """

    examples: int
    loss_max: float
    loss_min: float
    loss_first: float
    loss_last: float
    optimizer_steps: int
    seconds: float

    def __post_init__(self) -> None:
        _non_negative(
            "training summary",
            loss_max=self.loss_max,
            loss_min=self.loss_min,
            loss_first=self.loss_first,
            loss_last=self.loss_last,
            seconds=self.seconds,
        )
        if not 1 <= self.examples <= MAX_EXAMPLES:
            raise MalformedMessage(f"training summary examples is {self.examples}: allowed are 1 to {MAX_EXAMPLES}")
        if not 0 <= self.optimizer_steps <= MAX_OPTIMIZER_STEPS:
            raise MalformedMessage(
                f"training summary optimizer_steps is {self.optimizer_steps}: allowed are 0 to {MAX_OPTIMIZER_STEPS}"
            )
        if self.loss_min > self.loss_max:
            raise MalformedMessage(f"training summary loss_min {self.loss_min} is above loss_max {self.loss_max}")

    @property
    def loss_reduction(self) -> float:
        return self.loss_max - self.loss_min


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """Announces a client update before its chunks. `log`: how far the silo's audit log is; None where it does not
    travel."""

    key: RoundKey
    model: Digest
    manifest: Manifest
    summary: TrainingSummary
    signature: bytes
    first_chunk: int = 0
    log: SignedHead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedHeader:
    """Announces a masked update before its chunks; the signature of `masked` covers its manifest. `log` as in
    UpdateHeader."""

    key: RoundKey
    masked: MaskedInput
    manifest: Manifest
    first_chunk: int = 0
    log: SignedHead | None = None

    def __post_init__(self) -> None:
        self.manifest.check_layout(masked_layout(self.masked.words))
        if self.masked.vector.hex() != self.manifest.digest:
            raise MalformedMessage(
                f"masked header of silo {self.masked.silo} has another manifest than the one it signed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """Announces a round model before its chunks; `round` made it, `signature` is the coordinator's."""

    manifest: Manifest
    round: int
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The global model's score on one silo's held-out set. Counts, so that means over silos are exact."""

    split: str
    examples: int
    exact_matches: int
    executed: int
    execution_matches: int
    loss_per_token: float
    seconds: float

    def __post_init__(self) -> None:
        _non_negative("evaluation", loss_per_token=self.loss_per_token, seconds=self.seconds)
        if self.split not in ("dev", "test"):
            raise MalformedMessage(f"evaluation split is {self.split!r}: it must be dev or test")
        if not 1 <= self.examples <= MAX_EXAMPLES:
            raise MalformedMessage(f"evaluation examples is {self.examples}: allowed are 1 to {MAX_EXAMPLES}")
        if not (0 <= self.exact_matches <= self.examples and 0 <= self.executed <= self.examples):
            raise MalformedMessage("evaluation counts exceed the number of examples")
        if not 0 <= self.execution_matches <= self.executed:
            raise MalformedMessage("evaluation execution_matches exceeds executed")


class StandbyReason(Enum):
    NO_PLAN = "no plan has been started"
    GATHERING = "waiting for the round to open"
    TRAINED = "waiting for the other silos to train"
    UPDATE_RECEIVED = "this silo's part is done"
    NOT_IN_COHORT = "the round runs without this silo"
    AGGREGATING = "the coordinator is aggregating"
    STOPPED = "the plan is stopped"


@dataclass(frozen=True, slots=True)
class Standby:
    reason: StandbyReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Prepare:
    plan: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """`included_update`: the newest update of this silo that a model of the plan includes, if any does. Under a plan
    that corrects drift None says too that every silo begins anew."""

    key: RoundKey
    model: Digest
    seconds_left: float
    included_update: Digest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    key: RoundKey
    model: Digest
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    plan: Digest
    rounds: int
    final_model: Digest
    best_model: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The next step of secure aggregation for one silo; `message` is what it has to answer, None: advertise keys.

    `attempt` is one of the round of `key`; `model` is the one whose delta is to be masked. What the message itself says
    is for the protocol to judge. `identities`, beside a roster, are the coordinator's word alone; `successions` are
    signed by the keys that led to them, and still unchecked. `seen`, beside no message, is the digest of the newest
    advertisement that the coordinator has of this silo, None where it has none.
    """

    key: RoundKey
    model: Digest
    seconds_left: float
    attempt: Attempt
    message: "Roster | Delivery | SurvivorSet | UnmaskRequest | None" = None
    identities: tuple[tuple[SiloName, Ed25519PublicKey], ...] = ()
    successions: tuple[tuple[SiloName, tuple[Succession, ...]], ...] = ()
    seen: bytes | None = None

    def __post_init__(self) -> None:
        if self.seen is not None:
            check_bytes("mask order", DIGEST_BYTES, seen=self.seen)
        at, key = self.attempt, self.key
        if (at.federation, at.plan.hex(), at.round) != (key.federation, key.plan, key.round):
            raise MalformedMessage(f"mask order for round {key.round} is of another round or plan: {at}")


MaskAnswer = Advertisement | SharedKeys | Complaint | Agreement | Reveal
"""What a silo answers a Mask with; the MaskedInput goes before its vector, in a MaskedHeader."""

Order = Standby | Prepare | Train | Mask | Evaluate | Finished
"""What the coordinator wants of one silo now."""


class DeclineReason(Enum):
    POLICY = "policy"
    TRAINING_FAILED = "training_failed"
    DATA = "data"
    INTEGRITY = "integrity"
    PAUSED = "paused"
    STOPPING = "stopping"
    REVOKED = "revoked"  # the operator's word, which no silo sends


class AgentPhase(Enum):
    FETCHING = "fetching"
    TRAINING = "training"
    UPLOADING = "uploading"
    EVALUATING = "evaluating"
    MASKING = "masking"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPieces:
    """Which pieces of a chunk the silo that checks it has already, so that they are sent empty: the masked vector of
    `vector_of`, and the master of the round before."""

    vector_of: SiloName | None = None
    master: bool = False


NOTHING_HELD = HeldPieces()
