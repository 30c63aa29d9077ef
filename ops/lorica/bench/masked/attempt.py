"""A masked sum of an attempt in memory as the round machine holds it, which evidence of the round is made of."""

from collections.abc import Mapping

from lorica.secure_aggregation.in_memory import FEDERATION, AttemptInMemory
from lorica_coordinator.rounds.secure_attempt import MaskedSum, MaskedVector, MemberKey, SecureAttempt
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import public_key_bytes
from silo_wire.canonical import Digest
from silo_wire.codecs.secure_journals_codec import coordinator_event_to_bytes


def sum_of(attempt: AttemptInMemory, vectors: Mapping[SiloName, Digest]) -> MaskedSum:
    """Of the silos whose vectors have these digests; raises StateError where no sum comes out."""
    events = attempt.journal({name: bytes.fromhex(digest) for name, digest in vectors.items()})
    members = tuple(MemberKey(silo=name, key=public_key_bytes(key).hex()) for name, key in attempt.identities.items())
    journal = tuple(coordinator_event_to_bytes(event) for event in events)
    return MaskedSum(
        vectors=tuple(MaskedVector(silo=name, digest=digest) for name, digest in vectors.items()),
        attempt=SecureAttempt(federation=FEDERATION, members=members, journal=journal),
    )
