"""A federation of real silo machines and a real coordinator machine, joined by a queue that a test may order, drop and
alter.

All randomness is expanded from a text, so that a run can be repeated byte for byte.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import WrongTime
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.groups.release_groups import Link, Partition, Promise, first_link, least_group
from lorica_security.secure_aggregation.keys import key_agreement
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    EXTRA_WORDS,
    Encoder,
    FixedPoint,
    Ranges,
    Workspace,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Words
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from lorica_security.secure_aggregation.messages import Reveal, SelfMaskShare, SharedKeys
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import resumption as silo_resumption
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing

FEDERATION = FederationName("test")
PLAN = bytes.fromhex("11" * 32)
MODEL = bytes.fromhex("22" * 32)
SIZES = (3, 7, 1, 10)
PHASES = ("advertise keys", "share keys", "masked input", "consistency check", "unmasking")
PHASE_OF = {
    "Advertisement": "advertise keys",
    "SharedKeys": "share keys",
    "Complaint": "masked input",
    "MaskedInput": "masked input",
    "Agreement": "consistency check",
    "Reveal": "unmasking",
}


def entropy(*names: object) -> bytes:
    """32 bytes that only the names decide."""
    return blake3("/".join(map(str, names)).encode()).digest()


def silo_names(count: int) -> tuple[SiloName, ...]:
    return tuple(SiloName(f"silo-{index:02}") for index in range(count))


def identity_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(entropy("identity", name))


def identities(names: Iterable[SiloName]) -> dict[SiloName, Ed25519PublicKey]:
    return {name: identity_key(name).public_key() for name in names}


def alone(names: Iterable[SiloName], *, colluders: int = 0) -> Link:
    promise = Promise(colluders=colluders, smallest_group=least_group(colluders))
    return first_link(FEDERATION, Partition.singletons(names), promise)


ALONE = alone(silo_names(64))
"""Every silo is a group of its own, as people may allow: what the rest of the protocol keeps is seen without what
groups keep."""


def party(name: SiloName, peers: Iterable[SiloName], **more: Any) -> silo_party.Party:
    return silo_party.Party(
        **{
            "federation": FEDERATION,
            "silo": name,
            "identity_key": identity_key(name),
            "pinned": identities(peers),
            "link": ALONE,
            "approved": frozenset(ALONE.atoms),
            **more,
        }
    )


def attempt(*, round: int = 1, number: int = 1, salt: str = "attempt", plan: bytes = PLAN) -> Attempt:
    return Attempt(federation=FEDERATION, plan=plan, round=round, number=number, id=entropy(salt, round, number))


def ranges(sizes: Sequence[int] = SIZES) -> Ranges:
    return Ranges.of(sizes=sizes, largest_delta=[2.0**-index for index in range(len(sizes))], largest_weight=64)


def terms(**more: Any) -> Terms:
    return Terms(model=MODEL, ranges=more.pop("ranges", ranges()), link=more.pop("link", ALONE), **more)


def opening(name: str, of: Attempt, *, model: bytes = MODEL, sizes: tuple[int, ...] = SIZES) -> silo_events.OpenAttempt:
    return silo_events.OpenAttempt(
        attempt=of, model=model, tensors=sizes, root=Secret(entropy("root", name, of.id.hex()))
    )


def delta_of(name: str, sizes: Sequence[int] = SIZES) -> np.ndarray:
    seed = int.from_bytes(entropy("delta", name)[:8], "big")
    generator = np.random.default_rng(seed)
    scales = np.concatenate([np.full(size, 2.0**-index / 3) for index, size in enumerate(sizes)])
    return (generator.uniform(-1, 1, sum(sizes)) * scales).astype(np.float32)


def weight_of(name: str) -> float:
    return 1.0 + entropy("weight", name)[0] / 8


def scores_of(name: str) -> Scores:
    drawn = entropy("scores", name)
    questions, executed = 20 + drawn[0], 10 + drawn[1] % 10
    return Scores(
        questions=questions,
        exact_matches=drawn[2] % questions,
        executed=executed,
        execution_matches=drawn[3] % executed,
        loss=1 + drawn[4] * 100,
    )


def encoded(
    fixed_point: FixedPoint,
    rounding: mask_stream.KeyStream,
    delta: np.ndarray,
    weight: float,
    scores: Scores = NO_SCORES,
) -> Words:
    workspace = Workspace()
    encoder = Encoder(fixed_point=fixed_point, weight=weight, rounding=rounding, scores=scores)
    words = np.zeros(fixed_point.words, dtype="<u4")
    saturated = encoder.encode(words[:-EXTRA_WORDS], delta, 0, workspace)
    words[-EXTRA_WORDS:] = encoder.encode_tail(saturated, workspace)
    return words


@cache
def _encapsulated(dealer: SiloName, public: bytes) -> tuple[bytes, bytes]:
    made = key_agreement.encapsulated(public)
    secret = bytes(made.secret.buffer)
    made.secret.erase()
    return secret, made.ciphertext


def encapsulate_of(dealer: SiloName) -> key_agreement.Encapsulate:
    """To each key the same throughout a run of the tests, so that an attempt can be repeated; by each dealer
    another."""

    def encapsulate(public: bytes) -> key_agreement.Encapsulation:
        secret, ciphertext = _encapsulated(dealer, public)
        return key_agreement.Encapsulation(Secret(secret), ciphertext)

    return encapsulate


def public_key(*names: object) -> bytes:
    """A sound public key that only the names decide."""
    return key_agreement.KeyPair(Secret(entropy(*names))).public


@dataclass
class Silo:
    """One silo: its machine, its disk (memory and journal) and the vectors that it made."""

    party: silo_party.Party
    state: silo_states.State = field(default_factory=lambda: silo_states.Resting(SiloMemory()))
    memory: SiloMemory = field(default_factory=SiloMemory)
    journal: list[silo_events.Event] = field(default_factory=list)
    encoded: Words | None = None
    masked: Words | None = None
    sent: list[Any] = field(default_factory=list)
    erased: list[Secret] = field(default_factory=list)

    @property
    def name(self) -> SiloName:
        return self.party.silo

    def take(self, event: silo_events.Event) -> list[Any]:
        """What it sends in answer to `event`, with its own work done in between."""
        self.state, effects = silo_machine.step(self.state, event, self.party)
        return self.do(effects)

    def shared_keys(self) -> SharedKeys:
        assert isinstance(self.state, silo_states.WithRoster)
        return silo_own_dealing.shared_keys(self.state, self.party, encapsulate_of(self.name))

    def do(self, effects: Sequence[silo_effects.Effect]) -> list[Any]:
        messages = []
        for effect in effects:
            match effect:
                case silo_effects.Remember():
                    self.memory = effect.memory
                case silo_effects.Journal():
                    self.journal.append(effect.event)
                case silo_effects.Send():
                    messages.append(effect.message)
                case silo_effects.ShareKeys():
                    messages += self.take(self.shared_keys())
                case silo_effects.MaskVector():
                    messages += self.take(silo_events.VectorMasked(self.mask(effect)))
                case silo_effects.Erase():
                    effect.root.erase()
                    self.erased.append(effect.root)
                    self.journal.clear()
        self.sent += messages
        return messages

    def mask(self, effect: silo_effects.MaskVector) -> bytes:
        self.encoded = encoded(
            effect.fixed_point, effect.rounding, delta_of(self.name), weight_of(self.name), scores_of(self.name)
        )
        self.masked = self.encoded.copy()
        workspace = mask_stream.Workspace()
        effect.masks.apply(self.masked[:5], 0, workspace)
        effect.masks.apply(self.masked[5:], 5, workspace)
        effect.erase()
        return blake3(self.masked.tobytes()).digest()

    def restart(self) -> list[Any]:
        """As after `kill -9`: all that is left is the disk."""
        self.state, effects = silo_resumption.restored(self.memory, tuple(self.journal), self.party)
        return self.do(effects)


class Federation:
    """`run` carries one attempt through; `queue` holds what is on its way, as (recipient or "", message)."""

    def __init__(
        self,
        count: int,
        *,
        of: Attempt | None = None,
        terms_: Terms | None = None,
        silos: Mapping[SiloName, Silo] | None = None,
        demands: silo_party.Demands | None = None,
        link: Link = ALONE,
    ) -> None:
        self.names = silo_names(count)
        self.identities = identities(self.names)
        self.attempt = of or attempt()
        self.terms = terms_ or terms(link=link)
        more = {"link": link} if demands is None else {"link": link, "demands": demands}
        self.silos = silos or {name: Silo(party(name, self.names, **more)) for name in self.names}
        self.coordinator: coordinator_states.State = coordinator_states.Idle()
        self.journal: list[coordinator_events.Event] = []
        self.blames: list[coordinator_effects.Blame] = []
        self.unmask: coordinator_effects.Unmask | None = None
        self.queue: list[tuple[str, Any]] = []
        self.seen: list[Any] = []
        self.alter: Callable[[str, Any], Any] = lambda to, message: message

    def begin(self, *, model: bytes = MODEL) -> None:
        self.tell_coordinator(
            coordinator_events.OpenAttempt(attempt=self.attempt, terms=self.terms, invited=self.names)
        )
        for name in self.names:
            self.tell_silo(name, opening(name, self.attempt, model=model))

    def tell_coordinator(self, event: coordinator_events.Event) -> None:
        self.coordinator, effects = coordinator_machine.step(self.coordinator, event, self.identities)
        for effect in effects:
            match effect:
                case coordinator_effects.Journal():
                    self.journal.append(effect.event)
                case coordinator_effects.Send():
                    self.queue.append((effect.to, effect.message))
                case coordinator_effects.Blame():
                    self.blames.append(effect)
                case coordinator_effects.Unmask():
                    self.unmask = effect

    def tell_silo(self, name: SiloName, event: silo_events.Event) -> None:
        for message in self.silos[name].take(event):
            self.queue.append(("", message))

    def deliver(self, index: int = 0) -> None:
        to, message = self.queue.pop(index)
        message = self.alter(to, message)
        if message is None:
            return
        if to:
            self.tell_silo(SiloName(to), message)
            return
        self.seen.append(message)
        self.tell_coordinator(message)

    @property
    def over(self) -> bool:
        return isinstance(self.coordinator, coordinator_states.Unmasked | coordinator_states.Abandoned)

    def run(
        self,
        *,
        drops: Mapping[SiloName, str] | None = None,
        until: str = "",
        order: Callable[[int], int] = lambda waiting: 0,
    ) -> "Federation":
        """Until the attempt is over, or the coordinator's phase is `until`; `drops` says in which phase who falls
        silent."""
        if isinstance(self.coordinator, coordinator_states.Idle):
            self.begin()
        silent = drops or {}
        while not self.over and self.coordinator.phase != until:
            if not self.queue:
                self.tell_coordinator(coordinator_events.PhaseClosed(self.coordinator.phase))
                continue
            index = order(len(self.queue))
            to, message = self.queue[index]
            sender = to if to else message.silo
            phase = PHASE_OF.get(type(message).__name__, "")
            if not to and sender in silent and PHASES.index(silent[sender]) <= PHASES.index(phase):
                self.queue.pop(index)
                continue
            try:
                self.deliver(index)
            except WrongTime:
                if not to:
                    continue
                raise
        return self

    def end(self) -> None:
        for each in self.silos.values():
            each.do(self._ended(each))

    def _ended(self, each: Silo) -> tuple[silo_effects.Effect, ...]:
        each.state, effects = silo_machine.step(each.state, silo_events.AttemptEnded(self.attempt), each.party)
        return effects

    def sum(self) -> Words:
        """The unmasked sum, as an aggregator makes it."""
        assert self.unmask is not None
        total = np.zeros(self.unmask.fixed_point.words, dtype="<u4")
        for name in self.unmask.survivors:
            masked = self.silos[name].masked
            assert masked is not None
            total += masked
        self.unmask.masks.apply(total, 0, mask_stream.Workspace())
        return total

    def true_sum(self) -> Words:
        """The sum of what the survivors encoded, without any mask."""
        assert self.unmask is not None
        total = np.zeros(self.unmask.fixed_point.words, dtype="<u4")
        for name in self.unmask.survivors:
            words = self.silos[name].encoded
            assert words is not None
            total += words
        return total

    def shares_seen(self) -> dict[tuple[SiloName, str], set[SiloName]]:
        """(dealer, which secret) -> whose shares of it reached the coordinator."""
        seen: dict[tuple[SiloName, str], set[SiloName]] = {}
        for message in self.seen:
            if isinstance(message, Reveal):
                for share in message.shares:
                    kind = "self mask" if isinstance(share, SelfMaskShare) else "mask key"
                    seen.setdefault((share.dealer, kind), set()).add(message.silo)
        return seen


def altered(message: Any, **changes: Any) -> Any:
    """`message` with other fields, and so, where it is signed, with a signature that no longer fits."""
    return replace(message, **changes)
