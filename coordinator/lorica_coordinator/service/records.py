"""What the coordinator's records say: silos, invitations and rounds, as the store returns them."""

from dataclasses import dataclass
from typing import Final

from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation

COMPLETED: Final = ("applied", "zero_weight")
"""Outcomes of an attempt that ended its round; after any other the round is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolledSilo:
    """`identity_public_key` is Ed25519, 32 bytes; `last_seen_unix_s` 0 while the silo has never connected.

    `certificate_serial` and `certificate_digest`, as in Certificate, are those of its newest one.

    `revoked_unix_s` is set for one that the operator shut out; it is invited anew to come back.

    `agent_version` and `agent_wire` are of the agent that connected last, "" where that is not known.
    """

    silo: SiloName
    identity_public_key: bytes
    certificate_serial: str
    certificate_digest: str
    certificate_expires_unix_s: float
    enrolled_unix_s: float
    last_seen_unix_s: float
    revoked_unix_s: float | None = None
    agent_version: str = ""
    agent_wire: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunPlan:
    """A plan in the records; `active_unix_s` is when it was begun, or its last round was closed.

    `newest_round` is None where none was opened; `deletions` counts how often details of its rounds were deleted.
    """

    digest: Digest
    name: str
    begun_unix_s: float
    active_unix_s: float
    newest_round: int | None
    deletions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentPlan:
    """The plan that the state is about, None without one; `models` of it are needed: the last one and the best.

    `under_way`: it may open further rounds, so that everything of it is needed.
    """

    plan: Digest | None
    models: frozenset[Digest]
    under_way: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTrust:
    """Who holds it connects with a certificate of `authority`, and trusts the bundle of digest `trust`.

    Both in hexadecimal: SHA-256 of the authority's certificate, and of the bundle. `sent`: the serial of a newer
    certificate with which no call has come yet; its answer may have been lost. "" for none.
    """

    authority: str
    trust: str
    sent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """An open one: not spent, not replaced by a newer one; perhaps expired. `pin`: of the authority that its token
    pins."""

    silo: SiloName
    secret_digest: bytes
    expires_unix_s: float
    pin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedModel:
    """A model that some round of a plan made (0: the initial one), with the coordinator's signature."""

    model: Digest
    round: int
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloRow:
    """One silo's part of an attempt. `outcome`: training, committed, late, declined, refused, evaluated; where people
    are shown it also trained, masking, absent and no update (round_rows.py).

    Numbers are 0 where the silo committed nothing; `weight` and `share` until the round is closed.
    """

    silo: SiloName
    outcome: str
    detail: str = ""
    examples: int = 0
    loss_max: float = 0.0
    loss_min: float = 0.0
    weight: float = 0.0
    share: float = 0.0
    delta_norm: float = 0.0
    evaluation: Evaluation | None = None

    @property
    def loss_reduction(self) -> float:
        return self.loss_max - self.loss_min


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTotals:
    """What a masked sum says beside the model: the sum of the weights; of its coordinates, how many had to be cut."""

    weight_sum: float
    saturated: int
    coordinates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One attempt at a round. `outcome`: running, applied, zero_weight, abandoned; evaluated for round 0; scored for a
    closing one.

    `model` is the one that the round made, or started from while it has made none. Averages are of exact match, 0 to 1,
    None where nothing was evaluated; `scored` says of how many silos, None where nobody knows. Under secure aggregation
    silos have neither weights nor scores, and `masked` says what their sum does.
    """

    round: int
    attempt: int
    outcome: str
    detail: str
    opened_unix_s: float
    closed_unix_s: float | None
    model: Digest
    weight_fallback: bool
    masked: MaskedTotals | None = None
    silos: tuple[SiloRow, ...]
    macro_exact_match: float | None
    micro_exact_match: float | None
    scored: int | None = None

    @property
    def without_weight(self) -> tuple[SiloName, ...]:
        """Silos whose loss did not fall, so that their updates are in the round's model with a share of 0; none where
        single silos are not shown. What a reducer left out has no weight either, and is none of these."""
        if self.outcome != "applied":
            return ()
        weighed = [it for it in self.silos if it.examples and it.outcome != "refused"]
        return tuple(it.silo for it in weighed if not it.weight and not it.loss_reduction > 0.0)
