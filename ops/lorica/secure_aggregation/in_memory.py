"""One attempt of secure aggregation in memory, by the state machines that silos and coordinator run; messages arrive at
once."""

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from lorica_security.errors import StateError
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.attempt import ATTEMPT_ID_BYTES, Attempt
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.coordinator.effects import Unmask
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys.key_agreement import ROOT_BYTES, encapsulated
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    Encoder,
    Ranges,
    Workspace,
    averaged,
    decode,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Words
from lorica_security.secure_aggregation.messages import Identities
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.effects import MaskVector
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.own_dealing import shared_keys
from silo_wire.canonical import digest_of

FEDERATION = FederationName("memory")
PLAN = digest_of(b"memory")
ROUND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """`vector` in float64, as long as each silo's. `saturated`: numbers that were beyond their range, and were cut to
    it."""

    vector: NDArray[np.float64]
    weight_sum: float
    saturated: int


def terms_of(
    silos: Sequence[SiloName], *, elements: int, largest: float, largest_weight: float, colluders: int = 0
) -> Terms:
    """Terms of one sum of vectors of `elements` numbers, each within -`largest` to `largest`.

    No silo weighs more than `largest_weight`. Each silo is a release group of its own. Raises ConfigurationError or
    MalformedMessage where such a sum cannot be expressed, or is of too few silos (3, and one more for each colluder).
    """
    return Terms(
        model=bytes(32),
        ranges=Ranges.of(sizes=[elements], largest_delta=[largest], largest_weight=largest_weight),
        link=first_link(FEDERATION, Partition.singletons(silos)),
        colluders=colluders,
    )


def masked(work: MaskVector, vector: NDArray[np.floating[Any]], *, weight: float) -> Words:
    """What a silo sends: `vector` (one dimension, finite) times `weight` as integers mod 2^32, under its masks; once
    for each work.

    The keys in `work` are erased. Raises StateError for a number that is not finite or a negative weight, ValueError
    for another length.
    """
    point, workspace = work.fixed_point, Workspace()
    if vector.shape != (point.ranges.elements,):
        raise ValueError(f"a vector of shape {vector.shape}: the terms have {point.ranges.elements} numbers")
    encoder = Encoder(fixed_point=point, weight=weight, rounding=work.rounding)
    words: Words = np.zeros(point.words, dtype="<u4")
    try:
        saturated = encoder.encode(words[: len(vector)], vector.astype(np.float32), 0, workspace)
        words[len(vector) :] = encoder.encode_tail(saturated, workspace)
        work.masks.apply(words, 0, workspace.stream)
    finally:
        workspace.erase()
        work.erase()
    return words


class AttemptInMemory:
    """Silos `names` have shared keys; `works` has what each is to encode and mask with. Fresh keys each time."""

    def __init__(self, names: Iterable[SiloName], terms: Terms) -> None:
        self.keys = keys = {name: Ed25519PrivateKey.generate() for name in names}
        self.identities: Identities = {name: key.public_key() for name, key in keys.items()}
        self._parties = {
            name: Party(
                federation=FEDERATION,
                silo=name,
                identity_key=key,
                pinned=self.identities,
                link=terms.link,
                approved=frozenset(terms.link.atoms),
            )
            for name, key in keys.items()
        }
        attempt = Attempt(
            federation=FEDERATION,
            plan=bytes.fromhex(PLAN),
            round=ROUND,
            number=1,
            id=secrets.token_bytes(ATTEMPT_ID_BYTES),
        )
        states = _States(coordinator_states.Idle(), dict.fromkeys(keys, silo_states.Resting(SiloMemory())))
        self._tell(
            states,
            ("", coordinator_events.OpenAttempt(attempt=attempt, terms=terms, invited=tuple(keys))),
            *(
                (
                    name,
                    silo_events.OpenAttempt(
                        attempt=attempt,
                        model=terms.model,
                        tensors=terms.ranges.sizes,
                        root=Secret(secrets.token_bytes(ROOT_BYTES)),
                    ),
                )
                for name in keys
            ),
        )
        self._states = states
        self.works: Mapping[SiloName, MaskVector] = states.works

    def unmask(self, vectors: Mapping[SiloName, bytes]) -> Unmask:
        """What takes the masks off the sum of these silos' vectors, given by digest; all others were lost before they
        sent theirs.

        May be asked again, for other silos: states are values. Raises StateError where no sum comes out.
        """
        unmask = self._unmasked(vectors).unmask
        assert unmask is not None
        return unmask

    def journal(self, vectors: Mapping[SiloName, bytes]) -> tuple[coordinator_events.Event, ...]:
        """What the coordinator's journal has of such a sum; raises StateError where none comes out."""
        states = self._unmasked(vectors)
        assert states.unmask is not None
        states.unmask.masks.erase()
        return tuple(states.journal)

    def mean(self, vectors: Mapping[SiloName, Words]) -> Mean:
        """The mean of what these silos masked (`masked`), each counted by its weight; all others were lost before they
        sent theirs.

        Raises StateError where no sum comes out of so few, or where they weigh nothing together.
        """
        digests = {silo: bytes.fromhex(digest_of(words.tobytes())) for silo, words in vectors.items()}
        unmask = self.unmask(digests)
        point, workspace = unmask.fixed_point, Workspace()
        total: Words = np.zeros(point.words, dtype="<u4")
        for words in vectors.values():
            np.add(total, words, out=total)
        unmask.masks.apply(total, 0, workspace.stream)
        unmask.masks.erase()
        tail = decode_tail(point, total[point.ranges.elements :])
        if not tail.weight_sum:
            raise StateError(f"the vectors of {len(vectors)} silos weigh nothing together: give weights above 0")
        mean = np.zeros(point.ranges.elements)
        decode(averaged(point, tail.weight_sum), total[: len(mean)], 0, mean)
        return Mean(vector=mean, weight_sum=tail.weight_sum, saturated=tail.saturated)

    def _unmasked(self, vectors: Mapping[SiloName, bytes]) -> "_States":
        states = _States(self._states.coordinator, dict(self._states.silos), self._states.journal)
        lost = [name for name in self._parties if name not in vectors]
        self._tell(
            states,
            *((name, silo_events.VectorMasked(digest)) for name, digest in vectors.items()),
            *(("", coordinator_events.SiloDropped(name, "lost")) for name in lost),
        )
        if states.unmask is None:
            raise StateError(f"no sum of {len(vectors)} of {len(self._parties)} silos comes out: {states.coordinator}")
        return states

    def _tell(self, states: "_States", *events: tuple[str, Any]) -> None:
        """`events` by whom they are for, "" for the coordinator, and all that follows from them."""
        queue = deque(events)
        while queue:
            to, event = queue.popleft()
            for effect in (
                states.silo_takes(self._parties[SiloName(to)], event)
                if to
                else states.coordinator_takes(event, self.identities)
            ):
                match effect:
                    case silo_effects.ShareKeys():
                        name = SiloName(to)
                        shared = shared_keys(states.sharing(name), self._parties[name], encapsulated)
                        queue.append((to, shared))
                    case silo_effects.Send():
                        queue.append(("", effect.message))
                    case coordinator_effects.Send():
                        queue.append((effect.to, effect.message))
                    case coordinator_effects.Abandon():
                        raise StateError(f"the attempt was abandoned: {effect.reason}")


class _States:
    """Where everybody stands, what was to be masked, and how the sum is unmasked once that is known."""

    def __init__(
        self,
        coordinator: coordinator_states.State,
        silos: dict[SiloName, silo_states.State],
        journal: Iterable[coordinator_events.Event] = (),
    ) -> None:
        self.coordinator = coordinator
        self.silos = silos
        self.journal = list(journal)
        self.works: dict[SiloName, MaskVector] = {}
        self.unmask: Unmask | None = None

    def sharing(self, name: SiloName) -> silo_states.Sharing:
        state = self.silos[name]
        assert isinstance(state, silo_states.Sharing), f"{name} has no roster"
        return state

    def silo_takes(self, party: Party, event: Any) -> tuple[silo_effects.Effect, ...]:
        self.silos[party.silo], effects = silo_machine.step(self.silos[party.silo], event, party)
        for effect in effects:
            if isinstance(effect, MaskVector):
                self.works[party.silo] = effect
        return effects

    def coordinator_takes(self, event: Any, identities: Identities) -> tuple[coordinator_effects.Effect, ...]:
        self.coordinator, effects = coordinator_machine.step(self.coordinator, event, identities)
        for effect in effects:
            if isinstance(effect, Unmask):
                self.unmask = effect
            elif isinstance(effect, coordinator_effects.Journal):
                self.journal.append(event)
        return effects
