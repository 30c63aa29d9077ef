"""What every reducer is: an algorithm that makes the next model from what the silos of a round committed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import ClassVar, Final, Protocol, TypeVar

import torch

from lorica_coordinator.aggregation.squared_distances import Distances, Piece
from lorica_coordinator.aggregation.weighting import CohortWeights, SiloSummary, WeightCaps, weigh
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.delta_source import DeltaForm
from lorica_coordinator.edges.sums.masked_sum import Spooled
from lorica_coordinator.edges.sums.next_model import BaseModel, Deltas, NextModel, SlabStep
from lorica_coordinator.edges.sums.spool_pieces import pieces
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome, SiloWeight
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from silo_wire.algorithm import Algorithm, Number, Promise
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import RobustRule
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.weightings.equal import EQUAL

Committed = TypeVar("Committed", contravariant=True)
MOST_BYTES: Final = 128 << 20
"""Of the slabs of all silos, which are sorted together: 1 M parameters of 32 silos."""


class Reducer(Algorithm, Protocol[Committed]):
    """Of one plan: from the deltas of a round to the next model, stored.

    A delta is a flat vector of all parameters of the plan's layout, local model minus round model, so in the unit of
    the parameters; it lies on disk as bfloat16, float16 or float32, or as integers under masks. The next model has the
    shape and the type of the model before.
    """

    def reduce(self, key: RoundKey, base_model: Digest, committed: Committed) -> AggregationResult:
        """The next model of round `key`, made from the model `base_model` and what the silos committed for this
        attempt, or why there is none.

        A function of its arguments alone: neither the clock nor the order of arrival nor an earlier try counts. Raises
        UnusableUpdate naming the silo whose spool was damaged or whose summary is absurd; StorageError or
        IntegrityError naming the file of the coordinator that cannot be used.
        """


def spools_of(spools: Spools, key: RoundKey, committed: Sequence[CommittedUpdate]) -> list[Spooled]:
    """What each silo committed, in order of name; raises UnusableUpdate, IntegrityError where one stands twice."""
    return [(one.silo, spooled(spools, key, one.silo, one.digest, one.delta_norm)) for one in by_name(committed)]


def by_name(committed: Sequence[CommittedUpdate]) -> list[CommittedUpdate]:
    """Raises IntegrityError where two are of one silo."""
    listed = sorted(committed, key=lambda update: update.silo)
    for one, following in pairwise(listed):
        if one.silo == following.silo:
            raise IntegrityError(
                f"the state of the round has two updates of silo {one.silo}: somebody edited it; put back a database "
                "of before, and ask who could write it"
            )
    return listed


def spooled(spools: Spools, key: RoundKey, silo: SiloName, digest: Digest, norm: float | None = None) -> StoredVector:
    """What the silo committed; raises UnusableUpdate, also where it has another `norm` than the state says."""
    try:
        return spools.committed(key, silo, digest, norm)
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
            loss_first=update.summary.loss_first,
        )
    except MalformedMessage as error:
        raise UnusableUpdate(update.silo, str(error)) from error


def caps_of(section: AggregationSection) -> WeightCaps:
    """The caps that a plan sets."""
    return WeightCaps(
        max_weight=section.max_weight or None,
        max_weight_share=section.max_weight_share or None,
        max_delta_norm=section.max_delta_norm or None,
    )


def equal_weights(rule: RobustRule, section: AggregationSection, committed: Sequence[CommittedUpdate]) -> CohortWeights:
    """For a robust rule: every silo as much as another, with what the cap leaves of its delta's length.

    Raises UnusableUpdate; StateError for fewer silos than the rule needs, which no round has whose quorum the plan was
    held to.
    """
    least = rule.least_silos(section)
    if len(committed) < least:
        raise StateError(f'{len(committed)} updates came for reducer "{rule.name}", which needs {least}')
    return weigh([summary_of(update) for update in committed], weighting=EQUAL, caps=caps_of(section))


@contextmanager
def blamed_on_the_longest(committed: Sequence[CommittedUpdate]) -> Iterator[None]:
    """Finite deltas whose mean or step is not: the longest of them is to blame, and the others can go on."""
    try:
        yield
    except (MalformedMessage, ConfigurationError) as error:
        longest = max(sorted(committed, key=lambda update: update.silo), key=lambda update: update.delta_norm)
        raise UnusableUpdate(
            longest.silo, f"the delta of silo {longest.silo} has norm {longest.delta_norm:.3g}: {error}"
        ) from error


def result_of(
    model: Digest, outcome: Outcome, cohort: CohortWeights, *, rate: float = 1.0, cut: Sequence[bool] | None = None
) -> AggregationResult:
    """With what each silo counted; `rate`: of the round, beside the length that follows from deltas; `cut`: those that
    the reducer itself counted less, beside those that a cap bit."""
    return AggregationResult(
        model=model,
        outcome=outcome,
        weights=tuple(
            SiloWeight(silo=one.silo, weight=one.weight, share=one.share, capped=bool(one.caps) or less)
            for one, less in zip(cohort.silos, cut or [False] * len(cohort.silos), strict=True)
        ),
        fallback=cohort.fallback,
        step_length=cohort.length * rate,
    )


class Robust:
    """What reducers of robust rules share: each says its `rule` and `passes`, and reduces. `form` is how the
    committed deltas are read."""

    rule: ClassVar[RobustRule]
    name: ClassVar[str]
    meaning: ClassVar[str]
    needs: Final = frozenset({Number.DELTA_NORM})
    masks: Final = ""
    promises: Final = frozenset[Promise]({"record"})

    def __init_subclass__(cls) -> None:
        cls.name, cls.meaning = cls.rule.name, cls.rule.meaning

    def __init__(self, section: AggregationSection, *, spools: Spools, form: DeltaForm, into: NextModel) -> None:
        self._section = section
        self._spools = spools
        self._form = form
        self._into = into

    def _cohort(self, committed: Sequence[CommittedUpdate]) -> CohortWeights:
        """Every silo as much as another; raises as `equal_weights`."""
        return equal_weights(self.rule, self._section, committed)

    def _compared(
        self,
        committed: Sequence[CommittedUpdate],
        spools: Sequence[Spooled],
        cohort: CohortWeights,
        base: BaseModel,
        compare: Callable[[Sequence[SiloName], Iterator[Piece]], Distances],
    ) -> Distances:
        """What `compare` finds between the deltas of all silos, in a pass of its own; raises UnusableUpdate."""
        read = pieces(spools, cohort, self._form, base.elements)
        with blamed_on_the_longest(committed):
            return compare([member.silo for member in cohort.silos], read)

    def _deltas(self, spools: Sequence[Spooled], step: SlabStep, *, most_elements: int | None = None) -> Deltas:
        sources = [partial(self._form.open, *spool) for spool in spools]
        return Deltas(sources=sources, dtype=self._form.dtype, step=step, most_elements=most_elements)

    def _table(self, rows: int, base: BaseModel) -> torch.Tensor:
        """Room for a slab of so many rows, of MOST_BYTES at most."""
        most = max(1, min(MOST_BYTES // (torch.float32.itemsize * rows), base.elements))
        slab_elements = min(most, self._into.slab_elements)
        return torch.empty((rows, slab_elements), dtype=torch.float32, device=self._into.device)
