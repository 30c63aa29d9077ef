"""One attempt of secure aggregation in memory, by the state machines that silos and coordinator run; messages arrive at once."""

import secrets
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.rounds.secure_attempt import MaskedSum, MaskedVector, MemberKey, SecureAttempt
from lorica_security.errors import StateError
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.secure_aggregation.attempt import ATTEMPT_ID_BYTES, Attempt
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.coordinator.effects import Unmask
from lorica_security.secure_aggregation.keys.key_agreement import ROOT_BYTES, encapsulated
from lorica_security.secure_aggregation.keys.secret import Secret
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
from silo_wire.canonical import Digest, digest_of
from silo_wire.codecs.secure_journals_codec import coordinator_event_to_bytes

FEDERATION = FederationName("bench")
PLAN = digest_of(b"bench")
ROUND = 2


class AttemptInMemory:
    """Silos `names` have shared keys; `works` has what each is to encode and mask with. Fresh keys each time."""

    def __init__(self, names: Iterable[SiloName], terms: Terms) -> None:
        self.keys = keys = {name: Ed25519PrivateKey.generate() for name in names}
        self._identities: Identities = {name: key.public_key() for name, key in keys.items()}
        self._parties = {
            name: Party(
                federation=FEDERATION,
                silo=name,
                identity_key=key,
                pinned=self._identities,
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
        """What takes the masks off the sum of these silos' vectors, given by digest; all others were lost before they sent theirs.

        May be asked again, for other silos: states are values. Raises StateError where no sum comes out.
        """
        unmask = self._unmasked(vectors).unmask
        assert unmask is not None
        return unmask

    def sum_of(self, vectors: Mapping[SiloName, Digest]) -> MaskedSum:
        """As the round machine holds it: what evidence of the round is made of; raises StateError where no sum comes out."""
        states = self._unmasked({name: bytes.fromhex(digest) for name, digest in vectors.items()})
        assert states.unmask is not None
        states.unmask.masks.erase()
        members = tuple(MemberKey(silo=name, key=public_key_bytes(key).hex()) for name, key in self._identities.items())
        journal = tuple(b64encode(coordinator_event_to_bytes(event)).decode() for event in states.journal)
        return MaskedSum(
            vectors=tuple(MaskedVector(silo=name, digest=digest) for name, digest in vectors.items()),
            attempt=SecureAttempt(federation=FEDERATION, members=members, journal=journal),
        )

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
                else states.coordinator_takes(event, self._identities)
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
