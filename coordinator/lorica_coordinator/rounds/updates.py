"""What a silo's committed update comes to, and what aggregation makes of a set of them."""

from dataclasses import dataclass
from enum import Enum

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.scores import Scores
from silo_wire.canonical import Digest
from silo_wire.messages import TrainingSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedUpdate:
    """A client update whose bytes are durable, checked against its manifest and signed by its silo.

    `digest` is the manifest digest, `delta_norm` the L2 norm of the delta.
    """

    silo: SiloName
    digest: Digest
    summary: TrainingSummary
    delta_norm: float

    @property
    def examples(self) -> int:
        return self.summary.examples

    @property
    def loss_reduction(self) -> float:
        return self.summary.loss_reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class IncludedUpdate:
    """An update that became part of a model: its silo, and its manifest digest."""

    silo: SiloName
    digest: Digest


class Outcome(Enum):
    """What aggregation did: a new model, or none because the weights did not sum to more than zero, or because nobody
    was to train.
    """

    APPLIED = "applied"
    ZERO_WEIGHT = "zero_weight"
    SCORED = "scored"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloWeight:
    """One silo's part of the weighted mean: `weight` before and `share` after division by the sum; `capped` if a cap
    bit; `left_out` where the plan's reducer did not take the update, whatever the silo's loss did.
    """

    silo: SiloName
    weight: float
    share: float
    capped: bool = False
    left_out: bool = False

    @property
    def nothing(self) -> bool:
        """Whether the update is in the mean with a share of 0."""
        return not self.weight and not self.left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationResult:
    """`model` equals the base model when the outcome is ZERO_WEIGHT; `fallback`: all weights were zero, |D_i| was used.

    Under secure aggregation there are no `weights`, since nobody sees them, but their sum; of the `coordinates` of all
    deltas in it, `saturated` were beyond the range that the round could express, and their tensors were scaled down (or
    more: a silo's count has a limit); `scores` is what all silos in the sum told of the model that they trained from,
    None where it contradicts itself. Under silo-level privacy nothing is told of weights at all; `last` says that a
    further release would cost more than the plan promises. `step_length` is what the server's rate
    was multiplied by.
    """

    model: Digest
    outcome: Outcome
    weights: tuple[SiloWeight, ...]
    fallback: bool = False
    weight_sum: float = 0.0
    saturated: int = 0
    coordinates: int = 0
    scores: Scores | None = None
    last: bool = False
    step_length: float = 1.0
