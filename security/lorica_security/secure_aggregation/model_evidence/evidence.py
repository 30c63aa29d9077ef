"""Evidence of a masked round: what shows that a round model is what the last sum made of the model before.

It is a statement of the coordinator's: this attempt summed the vectors of these survivors, whose digests they signed;
its sum says these last words; the step that it made led from this state of model and optimizer to that one. Beside it
stands the coordinator's journal of the attempt. Whoever pinned the cohort's keys replays it (`opened`): every
signature, commitment and threshold is checked by the very machine that ran the attempt, and the masks of the sum come
out. So the sum of any stretch of the vectors can be made again, and the server's step of that stretch
(silo_wire.checked_chunk).

States form a `Lineage`: it begins with constants of the plan, and a state joins it by evidence whose `before` is in it.
Rounds that a silo missed join in the same way. With each state stands how far the silo knows that it is true. A round
without a step (zero weight, abandoned, stopped) leaves model and state as they are and needs none; after a restore the
next evidence begins at an older state of the lineage.

A reader of evidence sees what the coordinator sees: it counts as a colluder. Evidence binds the coordinator, not a silo
that works with it, which can still send any vector within its ranges.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import LoricaError, MalformedMessage, PolicyRefusal
from lorica_security.identifiers import FederationName
from lorica_security.identity.identity_key import sign, verify
from lorica_security.secure_aggregation.attempt import MAX_NUMBER, Attempt
from lorica_security.secure_aggregation.coordinator.effects import Blame, Unmask
from lorica_security.secure_aggregation.coordinator.events import Event
from lorica_security.secure_aggregation.coordinator.machine import step
from lorica_security.secure_aggregation.coordinator.states import Idle, State, Unmasked
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, UNSIGNED_MAX
from lorica_security.secure_aggregation.messages import Identities, SurvivorSet
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.party import Demands
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, digest

VERIFY = "verify"
"""The rule that says which round models this silo trains from and scores."""
EVIDENCE_DOMAIN = b"round-evidence"
MAX_SLOTS = 8
MAX_SLOT_NAME = 64
MAX_EVENTS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A model and what the next step begins from, as digests of manifests: `model` as it is handed out, `master` in
    float32.

    `slots` are the optimizer's vectors by name, none before the first step: a constant of the plan fills them. Where
    models are handed out in float32, `model` is `master`. Raises MalformedMessage.
    """

    steps: int
    model: bytes
    master: bytes
    slots: tuple[tuple[str, bytes], ...] = ()

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 0 <= self.steps < MAX_NUMBER:
            raise MalformedMessage(f"model state after {self.steps} steps: allowed are 0 to {MAX_NUMBER - 1}")
        check_bytes("model state", DIGEST_BYTES, model=self.model, master=self.master)
        names = [name for name, _ in self.slots]
        if len(names) > MAX_SLOTS or names != sorted(set(names)):
            raise MalformedMessage(
                f"model state has {len(names)} slots: at most {MAX_SLOTS}, sorted by name, none twice"
            )
        for name, vector in self.slots:
            if not name.isidentifier() or len(name) > MAX_SLOT_NAME:
                raise MalformedMessage(f"model state has a slot {name[:80]!r}: that is no name of an optimizer's state")
            check_bytes(f"model state, slot {name}:", DIGEST_BYTES, vector=vector)
        if self.slots and not self.steps:
            raise MalformedMessage("model state has slots before the first step: constants of the plan fill them")

    @cached_property
    def digest(self) -> bytes:
        return digest("model-state", self.steps, self.model, self.master, self.slots)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of the attempt whose sum made a step. `tail` has the last words of the sum: weights, coordinates that were cut,
    scores.

    `journal` has the coordinator's events of the attempt, up to the one at which the sum came out. Raises
    MalformedMessage.
    """

    attempt: Attempt
    survivors: SurvivorSet
    before: ModelState
    after: ModelState
    tail: tuple[int, ...]
    journal: tuple[Event, ...]

    def __post_init__(self) -> None:
        if self.after.steps != self.before.steps + 1:
            raise MalformedMessage(
                f"evidence of {self.attempt} leads from {self.before.steps} to {self.after.steps} steps of the server "
                "optimizer: a round makes one"
            )
        names, later = ([name for name, _ in state.slots] for state in (self.before, self.after))
        if self.before.steps and names != later:
            raise MalformedMessage(f"evidence of {self.attempt} has the optimizer state {names} before, {later} after")
        if len(self.tail) != EXTRA_WORDS:
            raise MalformedMessage(
                f"evidence of {self.attempt} ends with {len(self.tail)} words: expected {EXTRA_WORDS}"
            )
        if any(type(word) is not int or not 0 <= word <= UNSIGNED_MAX for word in self.tail):
            raise MalformedMessage(f"evidence of {self.attempt} ends with {self.tail}: no 32-bit words")
        if len(self.journal) > MAX_EVENTS:
            raise MalformedMessage(f"evidence of {self.attempt} has {len(self.journal)} events: at most {MAX_EVENTS}")

    @cached_property
    def digest(self) -> bytes:
        """Stands for all that it says; the coordinator signs it. The journal is bound by what the survivors signed."""
        before, after = self.before.digest, self.after.digest
        return digest("evidence", self.attempt.digest, self.survivors.digest, before, after, *self.tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedEvidence:
    """Evidence, and the coordinator's signature that makes it its own."""

    evidence: Evidence
    signature: bytes

    def check(self, coordinator: Ed25519PublicKey) -> None:
        """Raise IntegrityError unless the coordinator signed it."""
        verify(coordinator, domain=EVIDENCE_DOMAIN, payload=self.evidence.digest, signature=self.signature)


def signed_evidence(evidence: Evidence, coordinator: Ed25519PrivateKey) -> SignedEvidence:
    signature = sign(coordinator, domain=EVIDENCE_DOMAIN, payload=evidence.digest)
    return SignedEvidence(evidence=evidence, signature=signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSum:
    """What evidence shows of its attempt. The caller erases `unmask.masks`."""

    roster: Roster
    unmask: Unmask


def refused(what: Attempt | str, why: str, remedy: str) -> PolicyRefusal:
    return PolicyRefusal(VERIFY, f"evidence of {what}: {why}; {remedy}")


_ASK = "nothing was changed; ask the operator for the evidence of that round"


def opened(evidence: Evidence, identities: Identities, demands: Demands) -> OpenedSum:
    """Replay the attempt, `identities` being pinned keys, this silo's own among them.

    Raises PolicyRefusal unless the sum of exactly these survivors came out of the model in `before`, agreed on by a
    cohort as `demands` want it.
    """
    attempt = evidence.attempt
    state: State = Idle()
    unmask: Unmask | None = None
    blamed = ""
    try:
        for event in evidence.journal:
            if unmask is not None:
                raise MalformedMessage(f"{type(event).__name__} comes after the sum")
            state, effects = step(state, event, identities)
            for effect in effects:
                if isinstance(effect, Unmask):
                    unmask = effect
                elif isinstance(effect, Blame):
                    blamed = blamed or f" (silo {effect.silo}: {effect.detail})"
        if unmask is None or not isinstance(state, Unmasked):
            raise MalformedMessage(f"its journal ends in the phase {state.phase} without a sum")
        if (state.attempt, state.survivors) != (attempt, evidence.survivors):
            raise MalformedMessage(f"its journal is of {state.attempt} with other survivors than it says")
        if state.roster.model != evidence.before.model:
            raise MalformedMessage("its silos trained from another model than the one that it steps from")
        demands.check(state.roster.parameters)
    except LoricaError as error:
        if unmask is not None:
            unmask.masks.erase()
        if isinstance(error, PolicyRefusal):
            raise
        raise refused(attempt, f"{error}{blamed}", _ASK) from error
    return OpenedSum(roster=state.roster, unmask=unmask)


class Checked(Enum):
    """How far a silo knows that a state is what its evidence says; each one is more than the one before it."""

    # the attempt was replayed: the survivors signed for the model before it, and for nothing else of a state
    REPLAYED = "replayed"
    SPOT = "spot"  # some chunks were made again, by this silo's own choice
    JOINT = "joint"  # every chunk was, by this silo or by enough others

    def is_at_least(self, other: "Checked") -> bool:
        order = list(Checked)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A state that a silo accepted: made in `round`, 0 for the plan's initial model, by the evidence with this
    digest."""

    round: int
    state: ModelState
    evidence: bytes
    checked: Checked = Checked.JOINT

    def __post_init__(self) -> None:
        check_bytes("accepted state", DIGEST_BYTES, evidence=self.evidence)


NO_EVIDENCE = bytes(DIGEST_BYTES)
"""What the initial model, a constant of the plan, has instead."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The states of one plan that a silo accepted, in the order in which they joined; the plan's own is the first."""

    federation: FederationName
    plan: bytes
    accepted: tuple[Accepted, ...]

    @classmethod
    def of_plan(cls, *, federation: FederationName, plan: bytes, master: bytes, model: bytes) -> "Lineage":
        """Of the initial model, a constant of the plan; `model` is `master` unless models are handed out in another
        type."""
        first = Accepted(round=0, state=ModelState(steps=0, model=model, master=master), evidence=NO_EVIDENCE)
        return cls(federation=federation, plan=plan, accepted=(first,))

    @property
    def newest(self) -> Accepted:
        """The state that joined last."""
        return self.accepted[-1]

    def holds(self, model: bytes, least: Checked = Checked.SPOT) -> bool:
        """Whether this round model, by the digest of its manifest, was accepted, and checked as far as `least`."""
        return any(one.state.model == model and one.checked.is_at_least(least) for one in self.accepted)

    def begins(self, evidence: Evidence, least: Checked = Checked.REPLAYED) -> bool:
        """Whether it begins at a state that was accepted, and checked as far as `least`."""
        return any(one.state == evidence.before and one.checked.is_at_least(least) for one in self.accepted)

    def knows(self, evidence: Evidence) -> bool:
        """Whether this very evidence was accepted."""
        return any(one.evidence == evidence.digest for one in self.accepted)

    def goes_back(self, evidence: Evidence) -> bool:
        """Whether it begins at an older state than the newest, as after a restore."""
        return evidence.before != self.newest.state

    def require_next(self, evidence: Evidence, least: Checked = Checked.REPLAYED) -> None:
        """Raise PolicyRefusal unless `evidence` is of this plan and begins where a state of this lineage, checked as
        far as `least`, ended."""
        attempt = evidence.attempt
        if (attempt.federation, attempt.plan) != (self.federation, self.plan):
            raise refused(
                attempt, f"it is of plan {attempt.plan.hex()[:12]} of {attempt.federation}, not of this one", _ASK
            )
        for one in self.accepted:
            if one.round == attempt.round and one.evidence != evidence.digest:
                raise refused(
                    attempt,
                    f"another sum of round {attempt.round} was accepted before, {one.evidence.hex()[:12]}",
                    "nothing was changed; compare `silo-agent audit report` with the other silos",
                )
        if not self.begins(evidence, least):
            raise refused(
                attempt,
                f"it begins at step {evidence.before.steps} with a model or optimizer state that no accepted "
                "evidence led to",
                _ASK,
            )
        earliest = min(one.round for one in self.accepted if one.state == evidence.before)
        if earliest >= attempt.round:
            raise refused(attempt, f"it begins where round {earliest} ended, which is no round before it", _ASK)

    def after(self, evidence: Evidence, checked: Checked = Checked.JOINT) -> "Lineage":
        """With the state that `evidence` led to. Call it when `opened` agreed, and the checks of chunks as far as
        `checked`.

        The same again changes nothing but how far it is checked, where that is further now. Raises what `require_next`
        raises.
        """
        self.require_next(evidence)
        known = [one for one in self.accepted if one.evidence == evidence.digest]
        if any(one.checked.is_at_least(checked) for one in known):
            return self
        added = Accepted(round=evidence.attempt.round, state=evidence.after, evidence=evidence.digest, checked=checked)
        kept = tuple(added if one in known else one for one in self.accepted)
        return replace(self, accepted=kept if known else (*kept, added))
