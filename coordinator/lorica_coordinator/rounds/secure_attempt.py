"""One attempt of secure aggregation as the round machine holds it: the coordinator's half, and its journal.

Persisted is the journal: a restarted coordinator replays it and stands where it stood
(secure_aggregation/coordinator/machine.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import public_key_bytes, public_key_from_bytes
from lorica_security.identity.succession import Succession
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator import effects as protocol_effects
from lorica_security.secure_aggregation.coordinator import events as protocol_events
from lorica_security.secure_aggregation.coordinator import machine as protocol_machine
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.messages import Identities, MaskedInput
from silo_wire.canonical import Digest
from silo_wire.codecs.secure_journals_codec import coordinator_event_from_bytes, coordinator_event_to_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberKey:
    """The identity key of a silo that was invited: Ed25519, in hexadecimal; and what led to it, oldest first.

    Each of `successions` is predecessor, successor and statement in hexadecimal.
    """

    silo: SiloName
    key: str
    successions: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureAttempt:
    """`journal` has every event so far, each as `secure_journals_codec.coordinator_event_to_bytes` gives it.

    `held` is the state that they led to; None where they were not replayed (`recovered`).
    """

    federation: FederationName
    members: tuple[MemberKey, ...]
    journal: tuple[bytes, ...]
    held: protocol_states.State | None = field(default=None, compare=False, repr=False)

    @property
    def state(self) -> protocol_states.State:
        if self.held is not None:
            return self.held
        state, effects = protocol_machine.restored(self.events, self._identities())
        _erase_masks(effects)
        return state

    def recovered(self) -> "SecureAttempt":
        """The same attempt, its journal replayed once for all.

        Raises MalformedMessage, WrongTime or Conflict for a journal that no attempt has written.
        """
        return replace(self, held=self.state)

    @property
    def attempt(self) -> Attempt:
        state = self.state
        assert not isinstance(state, protocol_states.Idle), "an attempt begins with its opening"
        return state.attempt

    @property
    def identities(self) -> tuple[tuple[SiloName, Ed25519PublicKey], ...]:
        return tuple(self._identities().items())

    @property
    def successions(self) -> tuple[tuple[SiloName, tuple[Succession, ...]], ...]:
        """Of the members whose identity key succeeded another one."""
        return tuple((member.silo, _successions(member)) for member in self.members if member.successions)

    @property
    def words(self) -> int:
        """Length of a masked vector; once there is a roster."""
        state = self.state
        assert isinstance(state, protocol_states.WithRoster), f"no vector has a length in the phase {state.phase}"
        return state.roster.parameters.fixed_point.words

    def would_take(self, masked: MaskedInput) -> bool:
        """Whether this announcement of a masked vector is sound. Where it is not, `stepped` with it drops its sender.

        Raises WrongTime or Conflict as `stepped` does.
        """
        _, effects = self.stepped(masked)
        return not any(isinstance(effect, protocol_effects.Blame) for effect in effects)

    def stepped(self, event: protocol_events.Event) -> "tuple[SecureAttempt, tuple[protocol_effects.Effect, ...]]":
        """The attempt after `event`, and its effects without those that journal and state hold: `unmask` gives the
        masks.

        Raises WrongTime or Conflict and changes nothing; MalformedMessage for an opening whose terms do not hold.
        """
        after, effects = protocol_machine.step(self.state, event, self._identities())
        _erase_masks(effects)
        added = (coordinator_event_to_bytes(it.event) for it in effects if isinstance(it, protocol_effects.Journal))
        then = SecureAttempt(
            federation=self.federation, members=self.members, journal=(*self.journal, *added), held=after
        )
        of_the_attempt = (protocol_effects.Journal, protocol_effects.Send, protocol_effects.Unmask)
        return then, tuple(it for it in effects if not isinstance(it, of_the_attempt))

    def unmask(self) -> protocol_effects.Unmask:
        """How to unmask the sum, of an attempt that is unmasked. The caller erases its masks."""
        _, effects = protocol_machine.restored(self.events, self._identities())
        (unmask,) = (it for it in effects if isinstance(it, protocol_effects.Unmask))
        return unmask

    @property
    def events(self) -> tuple[protocol_events.Event, ...]:
        """The journal, decoded."""
        return tuple(coordinator_event_from_bytes(item, self.federation) for item in self.journal)

    def _identities(self) -> Identities:
        return {member.silo: public_key_from_bytes(bytes.fromhex(member.key)) for member in self.members}


def _erase_masks(effects: Sequence[protocol_effects.Effect]) -> None:
    for effect in effects:
        if isinstance(effect, protocol_effects.Unmask):
            effect.masks.erase()


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedVector:
    """A survivor's masked vector, durable and checked against the manifest with this digest."""

    silo: SiloName
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSum:
    """What becomes a sum: the vectors of all survivors, and the attempt whose silos have revealed enough to unmask
    it.
    """

    vectors: tuple[MaskedVector, ...]
    attempt: SecureAttempt

    @property
    def silos(self) -> tuple[SiloName, ...]:
        return tuple(vector.silo for vector in self.vectors)


def _successions(member: MemberKey) -> tuple[Succession, ...]:
    return tuple(
        Succession.of_bytes(
            predecessor=bytes.fromhex(old), successor=bytes.fromhex(new), statement=bytes.fromhex(statement)
        )
        for old, new, statement in member.successions
    )


def opened(
    opening: protocol_events.OpenAttempt,
    identities: Sequence[tuple[SiloName, Ed25519PublicKey]],
    successions: Mapping[SiloName, Sequence[Succession]],
) -> tuple[SecureAttempt, tuple[protocol_effects.Effect, ...]]:
    """A new attempt; raises MalformedMessage when its terms do not hold for those invited."""
    members = tuple(
        MemberKey(
            silo=silo,
            key=public_key_bytes(key).hex(),
            successions=tuple(
                (public_key_bytes(one.predecessor).hex(), public_key_bytes(one.successor).hex(), one.statement.hex())
                for one in successions.get(silo, ())
            ),
        )
        for silo, key in identities
    )
    attempt = SecureAttempt(
        federation=opening.attempt.federation, members=members, journal=(), held=protocol_states.Idle()
    )
    return attempt.stepped(opening)
