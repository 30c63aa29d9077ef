"""What the service needs of the world: storage of bytes and of state, keys, a clock, an observer.

The edges implement these. Methods that may block (everything that touches a disk) are called in a worker thread, one
call at a time per plan store, spool or aggregation; they raise the errors of `lorica_security.errors` and nothing else
on purpose. Whatever they write is durable when they return.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from lorica_coordinator.rounds.effects import Cause, Record
from lorica_coordinator.rounds.secure_attempt import MaskedSum
from lorica_coordinator.rounds.states import State
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_coordinator.service.issued import AuthorityStanding, Certificate, IssuedCertificate, Trusted
from lorica_coordinator.service.records import (
    BegunPlan,
    EnrolledSilo,
    HeldTrust,
    Invitation,
    RoundRow,
    SignedModel,
)
from lorica_coordinator.service.views.disclosure import Means
from lorica_coordinator.service.views.pulse import Pulse
from lorica_security.audit.chain import Head
from lorica_security.audit.entry import Event, Particular
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import Unreachable
from lorica_security.identifiers import Identity, SiloName
from lorica_security.identity.succession import Succession
from lorica_security.pki.authority_succession import AuthoritySuccession
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from lorica_security.secure_aggregation.masked_vectors.scores import Scores
from lorica_security.secure_aggregation.model_evidence.evidence import Evidence, SignedEvidence
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, Manifest
from silo_wire.messages import Evaluation, HeldPieces, MaskedHeader, RoundKey, UpdateHeader
from silo_wire.plans.plan import PlanBundle
from silo_wire.wire_version import Speaker

Clock = Callable[[], float]
"""Unix seconds, now: for people and certificates. It may be set, either way and at any time."""
Steady = Callable[[], float]
"""Seconds since whenever, of a clock that nobody can set: for waiting and deadlines."""


class Overtaken(Unreachable):
    """The state was written by somebody else, or is ahead of this process: it must end, and whoever starts next takes
    the state up. Silos try again, as with any coordinator that has gone; nothing in its text is of this machine."""


class PlanShelf(Protocol):
    """The operator's plan folders, and a kept copy of every plan that was ever offered to a silo."""

    def compile(self, name: str) -> PlanBundle:
        """Read, validate and digest the plan folder `name`, keep a copy; raises ConfigurationError naming the file."""

    def bundle(self, plan: Digest) -> PlanBundle:
        """The kept copy; raises StateError when this digest was never compiled, PlanOfAnotherRelease, IntegrityError
        when it was changed."""

    def keep(self, bundle: PlanBundle) -> None:
        """Have a copy that outlasts the folder. Raises StorageError."""


class ModelStore(Protocol):
    """The models of one plan, with the server optimizer's state that belongs to each."""

    def initial(self) -> Digest:
        """The plan's initial model as it is handed out, by its manifest digest; makes it if it is not stored yet.

        Raises IntegrityError when the plan's file of it was changed.
        """

    def lacking(self, model: Digest) -> Sequence[Path]:
        """Files of `model` without which nobody trains from it, or no next one is made of it."""

    def keep(self, model: Digest) -> None:
        """Have all of a model that is stored outlast the folder. Raises StorageError."""

    def manifest(self, model: Digest) -> Manifest:
        """Raises StorageError when the model is not stored."""

    def read_chunk(self, model: Digest, index: int) -> bytes:
        """Chunk `index`, checked; raises IntegrityError naming the file when it was damaged."""

    def retain(self, models: set[Digest]) -> None:
        """Delete every model of this plan, and its optimizer state, that is not in `models`."""

    def clear_spares(self) -> None:
        """Delete the files that are kept to be written over: no further model is made of this plan."""


class Aggregator(Protocol):
    """Updates of one plan into its next model."""

    def aggregate(self, key: RoundKey, base_model: Digest, updates: Sequence[CommittedUpdate]) -> AggregationResult:
        """Sum the committed spools of `updates` (sorted by silo), step the server optimizer, store the new model.

        A function of its arguments alone: repeated after a crash it gives the same model. Optimizer state is taken from
        `base_model`'s and stored with the new model's. Raises UnusableUpdate naming the silo, BudgetSpent where nothing
        more of this plan may be released, StorageError otherwise.
        """

    def aggregate_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        """The same of masked vectors: their sum, unmasked, over the sum of the weights that is in it."""

    def score_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        """Of a closing round's masked vectors: the scores in their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRound:
    """A masked round whose chunks can be made again: it made `model` of `base`, by the vectors of the attempt `key`."""

    model: Digest
    base: Digest
    key: RoundKey


class RoundEvidence(Protocol):
    """What shows that masked sums made the models of one plan."""

    def make(
        self,
        key: RoundKey,
        base_model: Digest,
        masked: MaskedSum,
        model: Digest,
        sign: Callable[[Evidence], SignedEvidence],
    ) -> None:
        """Keep what shows that the sum of `masked` made `model` of `base_model`; the same again changes nothing."""

    def read(self, model: Digest) -> bytes:
        """A CheckableRound as it travels; raises StateError where no masked sum made `model`."""

    def pieces(self, model: Digest, chunk: int, held: HeldPieces) -> tuple[bytes, ...]:
        """What chunk `chunk` of the round that made `model` is made again with, as it travels to who has what is
        `held`.

        Raises StateError where that is there no more, MalformedMessage for a chunk that it does not have.
        """

    def verdicts(self, model: Digest) -> tuple[Verdict, ...]:
        """What silos found right of `model`."""

    def keep_verdict(self, model: Digest, verdict: Verdict) -> tuple[Verdict, ...]:
        """Keep it durably in the place of one of that silo's on no other chunks; all that are kept on `model`.

        Who signed it was checked. Raises StateError for a verdict on other evidence, MalformedMessage.
        """

    def kept(self) -> tuple[KeptRound, ...]:
        """The rounds whose chunks can be made again."""

    def let_go(self, model: Digest) -> None:
        """The round that made `model` is made again no more; its evidence stays."""


@dataclass(frozen=True)
class PlanParts:
    """What works for one plan alone."""

    models: ModelStore
    base: ModelStore | None
    """Of the one model that the plan's adapters are for, where it has adapters."""
    aggregator: Aggregator
    evidence: RoundEvidence
    spent: Callable[[], float] = lambda: 0.0
    """Epsilon of what the coordinator released of this plan with noise of its own. Reads the disk."""


OpenPlan = Callable[[PlanBundle], PlanParts]


class Spool(Protocol):
    """One silo's update on its way in. Written in order of chunk index."""

    @property
    def held(self) -> int:
        """Chunks held durably or in order so far; writing goes on at this index."""

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Take chunk `index` == `held`, or raise and keep nothing of it.

        MalformedMessage for size, order, or a value that is NaN or infinite; IntegrityError for its digest; WrongTime
        when the attempt is over; StorageError naming the file.
        """

    def commit(self) -> float:
        """Make the whole update durable and return its L2 norm; may be repeated.

        Raises MalformedMessage when chunks are missing, WrongTime when the attempt is over, StorageError naming the
        file.
        """

    def close(self) -> None:
        """Let go of the file; what is held stays for a later call. May be repeated."""


class Spools(Protocol):
    """All updates on their way in, by round key and silo; they outlive the process."""

    def open(self, key: RoundKey, silo: SiloName, header: UpdateHeader | MaskedHeader, layout: Layout) -> Spool:
        """Go on with the spool of exactly this manifest, or begin one in place of any other of this key and silo."""

    def held(self, key: RoundKey, silo: SiloName, update: Digest, layout: Layout) -> int:
        """Chunks held of the update with this manifest digest; 0 when there is no such spool."""

    def discard(self, key: RoundKey) -> None:
        """Let every spool of this attempt go; nothing happens when there is none."""

    def retain(self, plan: Digest | None) -> None:
        """Delete everything of every plan but this one; None: of every plan."""


class RoundStore(Protocol):
    """The coordinator's durable state. Every method is one transaction; raises StorageError naming the file."""

    def load(self, now: float = 0.0, /) -> State:
        """The state that was last saved; Idle with the enrolled silos in a new store. What was left of its deadline is
        left from `now` on."""

    def lost_attempt(self) -> bool | None:
        """Whether the state that was loaded last lacks its attempt of secure aggregation, whose key is gone: True where
        its silos may have been asked for shares; None: it lacks nothing."""

    def transition(self, state: State, records: Sequence[Record], *, at: float, now: float) -> None:
        """Save the state and what is recorded with it, all or nothing.

        `at`: Unix seconds, when that happened; `now`, of the steady clock: what is left of a deadline is counted from
        there.
        """

    def silos(self) -> tuple[EnrolledSilo, ...]: ...

    def silo(self, name: SiloName) -> EnrolledSilo | None: ...

    def seen(self, name: SiloName, at: float, speaker: Speaker | None = None, /) -> None:
        """That the silo is connected at `at`, and with which release of the agent, where that is known."""

    def announced(self) -> dict[SiloName, bytes]:
        """The digest of each silo's newest advertisement of secure aggregation."""

    def announce(self, name: SiloName, advertisement: bytes, /) -> None:
        """The silo has advertised keys, by their digest."""

    def invite(self, invitation: Invitation) -> None:
        """Store it in place of any open one for the same silo."""

    def invitations(self) -> tuple[Invitation, ...]:
        """The open ones."""

    def spent_at(self, silo: SiloName, secret_digest: bytes) -> float | None:
        """When this silo's token with this secret was used; None for one that was not, or that there never was."""

    def void_invitations(self, *, pins: Collection[str]) -> None:
        """Delete the open ones that pin another authority than these."""

    def certificates(self) -> tuple[Certificate, ...]:
        """All that are registered, revoked ones as well."""

    def register(self, certificate: Certificate) -> None:
        """Beside those that its identity has."""

    def grant(self, certificate: "IssuedCertificate", *, trust: str, renews: bool = False) -> None:
        """Register one for an operator or viewer; held at once by whoever had none that was good, sent to others.
        Raises AuthorisationError for one that `renews` where none is good any more."""

    def revoke(self, identity: Identity, at: float) -> None:
        """All certificates of this identity, and the silo or open invitation that it names."""

    def enrol(self, silo: EnrolledSilo, *, secret_digest: bytes, authority: str = "", trust: str = "") -> None:
        """Spend the invitation, store the silo and register its certificate in place of all that it had before.

        `authority` and `trust` as in HeldTrust, held at once. Raises AuthenticationError when the invitation is not
        open, and changes nothing.
        """

    def renew(
        self, silo: SiloName, certificate: "IssuedCertificate", *, identity_public_key: bytes, trust: str, at: float
    ) -> None:
        """The silo's newest certificate, registered beside the one before, and the digest of the trust bundle sent with
        it.

        Raises StateError for a silo that is not enrolled, was revoked, or has another identity key by now.
        """

    def held_trust(self) -> Mapping[Identity, HeldTrust]:
        """What everybody has who was given a certificate here, the coordinator's own host apart."""

    def has_arrived(self, identity: Identity, serial: str) -> None:
        """What was sent with the certificate of this serial is held from now on; nothing happens where another was sent
        since."""

    def succeed(self, silo: SiloName, succession: Succession, *, at: float) -> None:
        """The silo's identity key is the successor from now on; raises Conflict where it is not the predecessor."""

    def successions(self, silo: SiloName) -> tuple[Succession, ...]:
        """Those that led to the silo's present identity key, oldest first, at most MOST_SUCCESSIONS."""

    def countersign_ledger(self, silo: SiloName, head: Head, *, after: Head, at: float) -> Head:
        """The newest head known of a silo's privacy ledger: `head`, where it follows the known one and that is `after`.

        Where none is known, `head` is the first; one that does not follow is not stored, and the known one stays.
        """

    def release_groups(self) -> tuple[tuple[SignedLink, ...], SignedLink | None]:
        """The chain, oldest link first, and what is proposed to follow."""

    def keep_release_groups(self, signed: SignedLink, *, stands: bool) -> None:
        """With these signatures; one that does not stand takes the place of what was proposed before."""

    def has_rounds(self, plan: Digest) -> bool:
        """Whether a round of this plan was ever opened."""

    def signed_model(self, plan: Digest, model: Digest) -> SignedModel | None: ...

    def committed_update(self, key: RoundKey, silo: SiloName) -> Digest | None:
        """The manifest digest of the update that counted, or counts, for this attempt."""

    def evaluation(self, key: RoundKey, silo: SiloName) -> Evaluation | None: ...

    def closed_attempts(self, last: int) -> tuple[RoundKey, ...]:
        """The keys of the attempts that closed last, newest first."""

    def plans(self) -> tuple[BegunPlan, ...]:
        """Every plan that was ever begun."""

    def rounds(
        self, plan: Digest, last: int, since: int = 0, until: int | None = None, attempts: int = 0
    ) -> tuple[RoundRow, ...]:
        """The last attempts of a plan at the rounds with these numbers, oldest first; `last` 0: all. `attempts`: of
        each round so many, its first one and the newest; 0: all."""


class Authorities(Protocol):
    """The federation's authorities. Each step is durable when it returns; raises StateError where it does not fit."""

    def standings(self) -> tuple[AuthorityStanding, ...]: ...

    def rotate(self, now: datetime) -> None:
        """A successor joins what is trusted."""

    def adopt(self, certificate_pem: bytes, chain_pem: bytes, now: datetime) -> None:
        """One that another CA certified does; raises ConfigurationError where that is not what was asked for."""

    def activate(self) -> None:
        """The successor issues from now on."""

    def retire(self, name: str, now: datetime) -> None:
        """One that issues no more is no longer trusted."""


class Keys(Protocol):
    """The coordinator's key material: its certificate authority and its identity key."""

    @property
    def identity_public_key(self) -> bytes:
        """Ed25519, 32 bytes: what silos verify round models with."""

    @property
    def trust_bundle_pem(self) -> bytes: ...

    @property
    def trust_digest(self) -> bytes:
        """Of the same, 32 bytes."""

    @property
    def trusted(self) -> Trusted:
        """The same with the digest, and its age, of one instant."""

    @property
    def trust_with_chains_pem(self) -> bytes:
        """The same with what certified the authorities, for whoever pins a root."""

    @property
    def authority_successions(self) -> tuple[AuthoritySuccession, ...]:
        """By which one that pins an older authority believes the newer ones."""

    @property
    def authorities(self) -> Authorities: ...

    @property
    def pin(self) -> str:
        """Of the authority that issues: what a token made now pins."""

    def sign(self, domain: str, statement: bytes) -> bytes:
        """Ed25519 signature by the coordinator's identity key under `domain`."""

    def certify(
        self, silo: SiloName, *, csr_der: bytes, identity_public_key: bytes, identity_endorsement: bytes, now: float
    ) -> IssuedCertificate:
        """A silo certificate for the CSR.

        Raises MalformedMessage or AuthorisationError unless the CSR is for this silo alone and is endorsed by the
        identity key.
        """

    def grant(self, identity: Identity, *, csr_der: bytes, valid_s: float, now: float) -> IssuedCertificate:
        """A certificate for an operator or viewer; raises MalformedMessage or AuthorisationError as `certify`."""

    def recertify(
        self, silo: SiloName, *, csr_der: bytes, identity_public_key: bytes, identity_endorsement: bytes, now: float
    ) -> IssuedCertificate:
        """The same for a renewal, which `identity_public_key`, the pinned one, endorsed; raises IntegrityError
        otherwise."""

    def token(self, silo: SiloName, *, secret: bytes, expires_unix_s: float, pin: str) -> str:
        """The enrolment token that holds `secret` and pins an authority, as the operator hands it to the silo."""


class AuditPort(Protocol):
    """The coordinator's audit log. Safe to call from several threads; raises StorageError, IntegrityError naming the
    file."""

    def append(self, event: Event, *, who: str = ..., **details: Particular) -> Head:
        """Durable when this returns, as the head that is given."""

    def signed_head(self) -> SignedHead: ...


class Observer(Protocol):
    """Told of what happened, after it is persisted; never raises. Label values come from closed sets and silo names."""

    def phase_changed(self, phase: str, *, round_number: int, attempt: int) -> None: ...

    def round_opened(self, key: RoundKey, cohort: Sequence[SiloName]) -> None: ...

    def update_committed(self, update: CommittedUpdate) -> None:
        """Only under terms that show single silos."""

    def silo_dropped(self, silo: SiloName, outcome: str, phase: str) -> None:
        """`outcome`: declined, late or refused. `phase`: of the round, or within masking that of secure aggregation."""

    def round_closed(self, result: AggregationResult, means: Means, *, seconds: float) -> None:
        """`result` has weights only under terms that show single silos."""

    def round_abandoned(self, cause: Cause, *, seconds: float) -> None: ...

    def evaluated(
        self,
        key: RoundKey,
        *,
        reports: Sequence[tuple[SiloName, Evaluation]],
        scores: Scores | None,
        macro: float | None,
        micro: float | None,
    ) -> None:
        """Exact match, 0 to 1; None where there is no mean, or none that may be shown."""

    def standing_changed(self, pulse: Pulse) -> None: ...

    def phase_failing(self, failing: bool) -> None:
        """Whether what the coordinator itself has to do in this phase fails, and is tried again."""

    def epsilon(self, *, spent: float, allowed: float) -> None:
        """Of the plan under way, where noise is made here; both 0 of any other."""

    def refused(self, kind: str) -> None:
        """An error without a caller to tell: class name of `lorica_security.errors`. The edges count those with one."""
