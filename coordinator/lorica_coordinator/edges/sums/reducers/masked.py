"""The sum of masked vectors, unmasked as a whole: of single silos the coordinator sees nothing."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final

from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.masked_sum import MaskedVectors, MeanReader
from lorica_coordinator.edges.sums.next_model import NextModel, of_mean
from lorica_coordinator.edges.sums.reducers.reducer import spooled
from lorica_coordinator.rounds.secure_attempt import MaskedSum
from lorica_coordinator.rounds.updates import AggregationResult, Outcome
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.effects import Unmask
from silo_wire.algorithm import Number, Promise
from silo_wire.canonical import Digest
from silo_wire.manifest import masked_layout
from silo_wire.messages import RoundKey


class Masked:
    """`nominal_silos`, under silo-level privacy, whose noise the silos have made, takes the place of the sum of
    weights."""

    name: Final = "masked"
    meaning: Final = (
        "sum of the masked deltas over the sum of their weights; a public constant under silo-level privacy"
    )
    needs: Final = frozenset[Number]()
    masks: Final = "sees the sum alone"
    promises: Final = frozenset[Promise]({"record", "joint", "silo"})
    passes: Final = 1

    def __init__(self, *, spools: Spools, into: NextModel, nominal_silos: int | None) -> None:
        self._spools = spools
        self._into = into
        self._nominal_silos = nominal_silos

    def reduce(self, key: RoundKey, base_model: Digest, committed: MaskedSum) -> AggregationResult:
        """Unmask the sum of the survivors' vectors and divide it by the sum of weights in it, or the constant.

        A sum of weights that is not above zero changes nothing: ZERO_WEIGHT. Raises what every reducer raises;
        ConfigurationError where the mean takes the model out of float32's range, which is nobody's fault that could be
        seen.
        """
        unmask = committed.attempt.unmask()
        try:
            return self.unmasked(key, base_model, unmask, {it.silo: it.digest for it in committed.vectors})
        finally:
            unmask.masks.erase()

    def unmasked(
        self, key: RoundKey, base_model: Digest, unmask: Unmask, digests: Mapping[SiloName, Digest]
    ) -> AggregationResult:
        """`reduce` with the masks given, and the manifest digest of each survivor's vector. Masks stay as they are."""
        vectors = self._vectors(key, unmask, digests)
        base = self._into.base(base_model)
        ranges = unmask.fixed_point.ranges
        if ranges.elements != base.elements:
            raise StateError(
                f"the masked vectors are of {ranges.elements} parameters, model {base_model} has {base.elements}"
            )
        tail = vectors.tail()
        told = AggregationResult(
            model=base_model,
            outcome=Outcome.ZERO_WEIGHT,
            weights=(),
            weight_sum=tail.weight_sum,
            saturated=tail.saturated,
            coordinates=ranges.elements * len(unmask.survivors),
            scores=tail.scores,
        )
        if not tail.weight_sum > 0.0:
            return told
        weight_sum = tail.weight_sum
        if self._nominal_silos is not None:  # weights are shares of the cap, and the sum of them is nobody's to know
            weight_sum = ranges.weight_cap * self._nominal_silos
        slab_elements = min(self._into.slab_elements, ranges.elements)
        with closing(MeanReader(vectors, weight_sum=weight_sum, slab_elements=slab_elements)) as mean:
            silos = len(unmask.survivors)
            model, rate = self._into.made(base, of_mean(mean), round_number=key.round, silos=silos)
        return replace(told, model=model, outcome=Outcome.APPLIED, step_length=rate)

    def scored(self, key: RoundKey, base_model: Digest, committed: MaskedSum) -> AggregationResult:
        """The scores in the sum of a closing round, in which nobody trained; the model stays. Raises as `reduce`."""
        unmask = committed.attempt.unmask()
        try:
            tail = self._vectors(key, unmask, {it.silo: it.digest for it in committed.vectors}).tail()
        finally:
            unmask.masks.erase()
        return AggregationResult(model=base_model, outcome=Outcome.SCORED, weights=(), scores=tail.scores)

    def _vectors(self, key: RoundKey, unmask: Unmask, digests: Mapping[SiloName, Digest]) -> MaskedVectors:
        if set(digests) != set(unmask.survivors):
            raise StateError(
                f"vectors of {', '.join(sorted(digests))} came for a sum of {', '.join(unmask.survivors)}: no mask fits"
            )
        return MaskedVectors(
            fixed_point=unmask.fixed_point,
            masks=unmask.masks,
            spools=[(silo, self._masked(key, silo, digests[silo], unmask)) for silo in unmask.survivors],
        )

    def _masked(self, key: RoundKey, silo: SiloName, digest: Digest, unmask: Unmask) -> StoredVector:
        vector = spooled(self._spools, key, silo, digest)
        try:
            vector.manifest.check_layout(masked_layout(unmask.fixed_point.words))
        except MalformedMessage as error:
            raise UnusableUpdate(silo, f"the masked vector of silo {silo}: {error}") from error
        return vector
