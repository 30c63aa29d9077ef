"""What the round machine needs to know of a plan, and nothing more."""

from collections.abc import Iterable
from dataclasses import dataclass

from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.parameters import LEAST_COHORT
from silo_wire.canonical import Digest
from silo_wire.plans.sections.named_silos import is_among
from silo_wire.plans.timetable import Timetable


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """`plan` is the plan's digest. Every phase has one deadline, in seconds from its beginning, and the quorum
    `min_silos`.

    `masking_deadline_s` is for each phase of secure aggregation; `min_survivors`, `colluders` and `threshold` are its
    own, `threshold` None where the default is meant. `record_level`, `silo_level`: of privacy. `cohort_size` silos are
    drawn for a round, 0: all that are ready. `corrects_drift`: silos go on with corrections that they made together.
    `without_labels` are the silos that have no scores, as a plan names them.
    """

    federation: FederationName
    plan: Digest
    name: str
    rounds: int
    min_silos: int
    start_when_ready: bool
    gathering_deadline_s: float
    training_deadline_s: float
    evaluation_deadline_s: float
    evaluate_every: int
    evaluate_initial: bool
    evaluate_last: bool
    secure_aggregation: bool = False
    masking_deadline_s: float = 0.0
    min_survivors: int = LEAST_COHORT
    colluders: int = 0
    threshold: int | None = None
    record_level: bool = False
    silo_level: bool = False
    cohort_size: int = 0
    corrects_drift: bool = False
    without_labels: tuple[str, ...] = ()

    def scored(self, silos: Iterable[SiloName]) -> tuple[SiloName, ...]:
        """Those of `silos` that can be asked for scores."""
        return tuple(silo for silo in silos if not is_among(silo, self.without_labels))

    @property
    def least_scores(self) -> int:
        """How many silos' scores make a model comparable with others. Where some silos have none, how many have is not
        said beforehand: one."""
        return 1 if self.without_labels else self.min_silos

    @property
    def shows_single_silos(self) -> bool:
        """Whether what one silo told of its training or its scores may be shown to people, or only what all of them
        come to.
        """
        return not (self.secure_aggregation or self.record_level or self.silo_level)

    @property
    def timetable(self) -> Timetable:
        return Timetable(
            rounds=self.rounds,
            every=self.evaluate_every,
            initial=self.evaluate_initial,
            last=self.evaluate_last,
            masked=self.secure_aggregation,
        )

    def evaluation_due(self, round_number: int) -> bool:
        """Whether silos are asked to score the model that this round made; under masks scores come with the next
        round's updates.
        """
        return not self.secure_aggregation and self.timetable.scores(round_number)
