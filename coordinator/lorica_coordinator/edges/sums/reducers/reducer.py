"""What every reducer is: an algorithm that makes the next model from what the silos of a round committed."""

from typing import Protocol, TypeVar

from lorica_coordinator.aggregation.weighting import SiloSummary
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import SiloName
from silo_wire.algorithm import Algorithm
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey

Committed = TypeVar("Committed", contravariant=True)


class Reducer(Algorithm, Protocol[Committed]):
    """Of one plan."""

    def reduce(self, key: RoundKey, base_model: Digest, committed: Committed) -> AggregationResult:
        """The next model, stored, or why there is none.

        A function of its arguments alone: neither the clock nor the order of arrival nor an earlier try counts. Raises
        UnusableUpdate naming the silo whose spool was damaged or whose summary is absurd; StorageError or
        IntegrityError naming the file of the coordinator that cannot be used.
        """


def spooled(spools: Spools, key: RoundKey, silo: SiloName, digest: Digest) -> StoredVector:
    """What the silo committed; raises UnusableUpdate."""
    try:
        return spools.committed(key, silo, digest)
    except IntegrityError as error:
        raise UnusableUpdate(silo, str(error)) from error


def summary_of(update: CommittedUpdate) -> SiloSummary:
    """What is known of an update apart from the delta itself; raises UnusableUpdate for what cannot be."""
    try:
        return SiloSummary(
            silo=update.silo,
            examples=update.examples,
            loss_reduction=update.loss_reduction,
            optimizer_steps=update.summary.optimizer_steps,
            delta_norm=update.delta_norm,
        )
    except MalformedMessage as error:
        raise UnusableUpdate(update.silo, str(error)) from error
