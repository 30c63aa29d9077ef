"""A plan's values, section by section, and what follows from several of them."""

from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from pydantic import Field

from lorica_security.console.strict_toml import NameText, Section
from silo_wire.algorithm import Number
from silo_wire.canonical import Digest
from silo_wire.drift_correction import NO_CORRECTION
from silo_wire.plans.adapters import AdaptersSection
from silo_wire.plans.privacy import PrivacySection, Release
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.model import ModelSection
from silo_wire.plans.sections.schedule import EvaluationSection, ScheduleSection, WireSection
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection
from silo_wire.plans.sections.server_rates import ServerRates
from silo_wire.plans.sections.task import TaskSection
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.timetable import Timetable
from silo_wire.weightings.weighting import Told


class PlanValues(Section):
    """Every section of a plan, and what follows from several of them."""

    version: Literal[1] = 1
    name: NameText
    federation: NameText
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    model: ModelSection
    task: TaskSection = TaskSection()
    schedule: ScheduleSection
    aggregation: AggregationSection = AggregationSection()
    wire: WireSection = WireSection()
    semi_supervised: SemiSupervisedSection = SemiSupervisedSection()
    adapters: AdaptersSection = AdaptersSection()
    training: TrainingSection = TrainingSection()
    privacy: PrivacySection = PrivacySection()
    evaluation: EvaluationSection = EvaluationSection()

    @property
    def releases_of_round(self) -> Sequence[Release]:
        """What each silo enters into its own ledger for a round, whose unit is a record; nothing where it is promised
        nothing.

        A delta that leaves in the clear, for the coordinator to noise, is not covered by anything. In a noised masked
        sum one record more or less can turn a clipped delta into any other, which is twice as far as a silo that is not
        there: the noise counts half.
        """
        privacy = self.privacy
        if privacy.level == "record":
            makers = {"makers": self.noise_makers} if self.joint else {}
            return privacy.releases_of_round(weighted=self.weighted, **makers)
        if self.noise_at == "silos":
            return privacy.releases_of_round(weighted=self.weighted, noise_multiplier=privacy.noise_multiplier / 2)
        return []

    @property
    def noise_at(self) -> Literal["nowhere", "coordinator", "silos"]:
        """Who makes the noise of sums: of deltas, under silo-level privacy, the silos where the coordinator sees
        nothing but the sum."""
        if self.joint:
            return "silos"
        if self.privacy.level != "silo":
            return "nowhere"
        return "silos" if self.aggregation.secure_aggregation else "coordinator"

    @property
    def joint(self) -> bool:
        """Whether a round is one step of a masked sum of gradients, whose noise the silos make together."""
        return self.privacy.level == "record" and self.privacy.noise == "joint"

    @property
    def noise_makers(self) -> int:
        """Of joint noise: of how many silos it counts. So many of any sum make theirs, and are not among those who look
        at it.

        As for the smallest cohort that may begin, without release groups; where groups leave fewer silos in a sum, no
        attempt begins (parameters.NoiseTerms). It is 2 at least, by the rules of masks.
        """
        # Here, not above: numpy, which this brings, is for plans with masks alone.
        from lorica_security.secure_aggregation.parameters import threshold_for

        wanted = self.aggregation
        threshold = threshold_for(self.schedule.min_silos, colluders=wanted.colluders, asked=wanted.threshold or None)
        return max(threshold, wanted.min_survivors) - max(wanted.colluders, 1)

    @property
    def gradient_reach(self) -> float:
        """Of joint noise: how many records of the largest gradient the range of a silo's sum has room for."""
        return self.aggregation.delta_bound * self.privacy.expected_batch_size / self.training.max_grad_norm

    @property
    def timetable(self) -> Timetable:
        return Timetable(
            rounds=self.schedule.rounds,
            every=self.evaluation.every,
            initial=self.evaluation.initial,
            last=self.evaluation.last,
            masked=self.aggregation.secure_aggregation,
        )

    @property
    def smallest_cohort(self) -> int:
        """Of any round: where silos with labels train in turn with others, each kind has a quorum of its own."""
        section, least = self.semi_supervised, self.schedule.min_silos
        return min(least, section.min_labelled) if section.who_trains.labelled_alone == "in_turn" else least

    def too_few(self, silos: Collection[str]) -> str:
        """Why not every kind of round can begin with `silos`, all that are enrolled, and what to do; "" where each
        can."""
        section, least = self.semi_supervised, self.schedule.min_silos
        alone, of = section.who_trains.labelled_alone, f"of {len(silos)} enrolled silos"
        labelled = sum(not section.without_labels(silo) for silo in silos)
        unlabelled = len(silos) - labelled
        wanting: tuple[tuple[bool, str], ...] = (
            (
                len(silos) < least,
                f"has min_silos = {least} and {len(silos)} silos are enrolled: enrol more or lower it",
            ),
            (
                not labelled,
                f"has [semi_supervised] unlabelled = {section.unlabelled}, which names all {len(silos)} enrolled "
                "silos, so that nobody has labels: leave some out of it, or enrol more",
            ),
            (
                alone == "always" and labelled < least,
                f"has min_silos = {least} and {labelled} {of} have labels: enrol more or lower it",
            ),
            (
                alone == "in_turn" and labelled < section.min_labelled,
                f"has [semi_supervised] min_labelled = {section.min_labelled} and {labelled} {of} have labels: enrol "
                "more or lower it",
            ),
            (
                alone == "in_turn" and unlabelled < least,
                f"has min_silos = {least} for rounds of silos without labels, and {unlabelled} {of} have none: enrol "
                "more or lower it",
            ),
        )
        return next((f"plan {self.name} {why}" for short, why in wanting if short), "")

    @property
    def initial_model(self) -> Digest:
        """The initial model as silos are handed it, by the digest of its manifest."""
        return Digest(str(self.model.initial_bfloat16 if self.wire.model == "bfloat16" else self.model.initial))

    @property
    def weighted(self) -> bool:
        """Whether updates weigh by the loss reduction of their silo."""
        return Number.LOSS_REDUCTION in self.aggregation.weighs.needs

    @property
    def server_rates(self) -> ServerRates:
        """By round."""
        return ServerRates(
            who=self.semi_supervised.who_trains,
            at_end=self.aggregation.server_rate_at_end,
            rounds=self.schedule.rounds,
        )

    @property
    def corrects_drift(self) -> bool:
        """Whether each silo keeps a vector from round to round by which its gradients are corrected."""
        return self.training.drift_correction != NO_CORRECTION.name

    def no_weight(self, told: Told) -> str:
        """What the people of a silo that tells this should know where its update has no weight; else ""."""
        if self.aggregation.weighs.raw_weight(told) > 0.0:
            return ""
        least = "as little as the plan allows" if self.aggregation.secure_aggregation else "nothing"
        return f"the loss did not fall, so that this silo's update weighs {least}"

    @property
    def evaluates_losses(self) -> bool:
        """Whether local training takes the loss of a sample before and after, for the weight alone.

        Private training has a way of its own, which counts every record.
        """
        return self._weighs_by("evaluated")

    @property
    def logs_losses(self) -> bool:
        """Whether updates weigh by losses that local training logs."""
        return self._weighs_by("logged", "as_published")

    def _weighs_by(self, *measures: str) -> bool:
        told = {Number.LOSS_REDUCTION, Number.ROUND_LOSS} & self.aggregation.weighs.needs
        return bool(told) and self.privacy.level != "record" and self.training.loss_reduction in measures
