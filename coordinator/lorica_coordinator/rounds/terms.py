"""What the round machine needs to know of a plan, and nothing more."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final, Literal

from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.parameters import LEAST_COHORT
from silo_wire.canonical import Digest
from silo_wire.plans.sections.named_silos import is_among
from silo_wire.plans.sections.who_trains import Alone, WhoTrains
from silo_wire.plans.timetable import Timetable

EXACT_MATCH: Final = "exact match"
"""By what answers count where a plan does not say, as people are shown it."""
KindOfRound = Literal["all", "labelled", "unlabelled"]
"""Whose a round is: of all silos, or of those with or without labels alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """`plan` is the plan's digest. Every phase has one deadline, in seconds from its beginning, and the quorum
    `min_silos`.

    `masking_deadline_s` is for each phase of secure aggregation; `min_survivors`, `colluders` and `threshold` are its
    own, `threshold` None where the default is meant. `record_level`, `silo_level`: of privacy. `cohort_size` silos are
    drawn for a round, 0: all that are ready. `corrects_drift`: silos go on with corrections that they made together.
    `without_labels` are the silos that have no scores, as a plan names them; `labelled_alone` as in WhoTrains, and
    `min_labelled` is the quorum of rounds in which silos with labels take turns with them.
    `score` is by what answers count, as people are shown it.
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
    score: str = EXACT_MATCH
    corrects_drift: bool = False
    without_labels: tuple[str, ...] = ()
    labelled_alone: Alone = "never"
    min_labelled: int = 1

    @property
    def who_trains(self) -> WhoTrains:
        return WhoTrains(unlabelled=self.without_labels, labelled_alone=self.labelled_alone)

    @property
    def takes_turns(self) -> bool:
        """Whether silos with labels train in some rounds and those without in others."""
        return self.labelled_alone == "in_turn"

    def taking_part(self, silos: Set[SiloName], round_number: int, *, training: bool) -> frozenset[SiloName]:
        """Those of `silos` that a round is for, or its evaluation where some never are asked to train beside others."""
        who = self.who_trains
        if training or self.labelled_alone == "never":
            return frozenset(silo for silo in silos if who.trains(silo, round_number))
        return frozenset(self.scored(silos))

    def quorum(self, round_number: int, *, training: bool = True) -> int:
        """Fewest silos of a round's training, or of the gathering for its evaluation."""
        alone = self.takes_turns and (not training or self.who_trains.labelled_round(round_number))
        return self.min_labelled if alone else self.min_silos

    @property
    def kinds_of_rounds(self) -> Mapping[KindOfRound, int]:
        """By whose rounds they are, each kind of round that the plan has, with the number of the first one."""
        if self.takes_turns:
            return {"labelled": 1, "unlabelled": 2}
        return {"all" if self.labelled_alone == "never" else "labelled": 1}

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
