"""What Prometheus sees. Counters exist at zero from the start; label sets are closed, never a peer's own words.

Silo names are labels because the population of a federation is small and fixed by enrolment; rounds are values, never
labels.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lorica_coordinator.rounds.effects import Cause
from lorica_coordinator.rounds.terms import KindOfRound
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_coordinator.service.views.disclosure import Means
from lorica_coordinator.service.views.pulse import Pulse, Quorum
from lorica_security.errors import EXIT_CODES
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.scores import Scores
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation, RoundKey

PHASES = ("idle", "gathering", "collecting", "masking", "aggregating", "evaluating", "stopped", "finished")
ABANDONED: Final = "abandoned"
OUTCOMES = (*(outcome.value for outcome in Outcome), ABANDONED)
BUCKET_CALLS = ("put", "get", "list", "delete")
DROPPED = ("declined", "late", "refused")
_MASKING_PHASES = ("advertise_keys", "share_keys", "masked_input", "consistency_check", "unmasking")
DROPPING_PHASES = ("collecting", "masking", *_MASKING_PHASES, "aggregating", "evaluating", "stopped")
POINTS: Final = ("first", "last")
EVENTS_QUEUE: Final = "events"
UNKNOWN: Final = math.nan
"""Of a gauge without labels, which Prometheus would otherwise show as a true 0."""
SILO_STATES = ("enrolled", "connected", "ready")
ERROR_KINDS = (*(kind.__name__ for kind in EXIT_CODES), "Defect")  # the last: an exception that is none of Lorica's
_PHASE_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)


class CoordinatorMetrics:
    """The coordinator's instruments, in a registry of their own so that two coordinators can share a test process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_PHASE_SECONDS, registry=registry)
        self.round = gauge("lorica_round", "Round that is running or comes next; 0 is the initial evaluation.")
        self.attempt = gauge("lorica_round_attempt", "Attempt at the present round, from 1.")
        self.phase = gauge("lorica_phase", "1 for the phase that the round is in, else 0.", ["phase"])
        self.phase_seconds = histogram("lorica_phase_duration_seconds", "Time spent in a phase.", ["phase"])
        self.rounds_total = counter("lorica_rounds", "Rounds that ended, by outcome.", ["outcome"])
        self.abandoned = counter(
            "lorica_abandoned_rounds", "Attempts at a round that made no model, by cause.", ["cause"]
        )
        self.phase_began = gauge(
            "lorica_phase_began_timestamp_seconds",
            "When the phase that the round is in began, or the coordinator was restarted in it.",
        )
        self.phase_deadline = gauge(
            "lorica_phase_deadline_timestamp_seconds",
            "When that phase ends at the latest, by the clock as it is set now; 0 without a deadline.",
        )
        self.failing = gauge(
            "lorica_phase_failing",
            "1 while what the coordinator itself has to do in this phase fails and is tried again, else 0.",
        )
        self.running = gauge(
            "lorica_plan_running", "1 while a plan is under way, else 0: none, not started, paused, stopped, finished."
        )
        self.quorum = gauge(
            "lorica_quorum_silos",
            "Fewest silos of a round by the plan under way, by whose the rounds are; 0 without one.",
            ["of"],
        )
        self.candidates = gauge(
            "lorica_quorum_candidate_silos", "Silos that such a round is for, by state.", ["of", "state"]
        )
        self.groups_unsigned = gauge(
            "lorica_release_groups_unsigned",
            "Signatures of silos that proposed release groups still want; 0 where nothing is proposed.",
        )
        self.groups_absent = gauge(
            "lorica_release_groups_absent_silos",
            "Silos that release groups lack, while a quorum is ready and no masked sum can come out of it; else 0.",
        )
        self.silos = gauge("lorica_silos", "Silos by state; a ready one is also connected and enrolled.", ["state"])
        self.last_seen = gauge(
            "lorica_enrolled_silo_last_seen_timestamp_seconds",
            "When the agent of a silo was last connected, now while it is; 0 if it never was.",
            ["silo"],
        )
        self.connected = gauge(
            "lorica_enrolled_silo_connected", "1 while the agent of a silo is connected, else 0.", ["silo"]
        )
        self.weight = gauge("lorica_silo_weight", "Weight of a silo's delta in the last closed round.", ["silo"])
        self.share = gauge("lorica_silo_weight_share_ratio", "Share of the last weighted mean.", ["silo"])
        self.loss_reduction = gauge(
            "lorica_silo_loss_reduction", "What the training loss of the last committed update fell by.", ["silo"]
        )
        self.examples = gauge("lorica_silo_examples", "Training examples behind the last committed update.", ["silo"])
        self.loss = gauge(
            "lorica_silo_training_loss", "First and last training loss of the last committed update.", ["silo", "point"]
        )
        self.delta_norm = gauge("lorica_silo_delta_norm", "L2 norm of the last committed delta.", ["silo"])
        self.exact_match = gauge(
            "lorica_silo_exact_match_ratio", "Exact match of the global model on a silo's dev set.", ["silo"]
        )
        self.execution_accuracy = gauge(
            "lorica_silo_execution_accuracy_ratio",
            "Execution accuracy of the global model on a silo's dev set.",
            ["silo"],
        )
        self.mean_loss = gauge(
            "lorica_mean_training_loss",
            "Mean over the silos of the last closed round of their first and last training loss; only of plans that "
            "show single silos.",
            ["point"],
        )
        self.mean_loss_reduction = gauge(
            "lorica_mean_loss_reduction",
            "Mean over the silos of the last closed round of their loss reduction; NaN under secure aggregation and "
            "silo-level privacy.",
        )
        self.mean_weight = gauge(
            "lorica_mean_silo_weight",
            "Mean weight of the silos in the last closed round; NaN under silo-level privacy.",
        )
        self.score = gauge(
            "lorica_plan_score",
            "1 for the score that the plan's answers count by: what every ratio of exact match is of.",
            ["name"],
        )
        self.macro_exact_match = gauge(
            "lorica_macro_exact_match_ratio",
            "Mean of the silos' exact match; NaN under secure aggregation, where scores come as a sum.",
        )
        self.micro_exact_match = gauge("lorica_micro_exact_match_ratio", "Exact match over all dev examples.")
        self.summed_execution = gauge(
            "lorica_summed_execution_accuracy_ratio",
            "Execution accuracy over all dev examples, of the last sum of scores under masks; NaN without one.",
        )
        self.summed_loss = gauge(
            "lorica_summed_loss_per_token",
            "Mean loss per token over all dev examples, of the last sum of scores under masks; NaN without one.",
        )
        self.scored_questions = gauge(
            "lorica_summed_questions", "Dev examples behind the last sum of scores under masks; NaN without one."
        )
        self.received = counter("lorica_received_bytes", "Bytes of update chunks received.")
        self.sent = counter("lorica_sent_bytes", "Bytes of plan and model chunks sent.")
        self.transfers = gauge(
            "lorica_transfers", "Models and updates that are on their way now, those that wait for their turn included."
        )
        self.queue = gauge(
            "lorica_queue_depth",
            "What waits to be looked at. events: what has happened in the round, such as an answer of a silo.",
            ["queue"],
        )
        self.errors = counter("lorica_errors", "Calls refused or failed, by kind of error.", ["kind"])
        self.weight_fallbacks = counter(
            "lorica_weight_fallbacks", "Rounds whose weights summed to zero, so that size weights stood in."
        )
        self.zero_weights = counter(
            "lorica_zero_weights",
            "Updates in closed rounds that weighed exactly nothing; only of plans that show single silos.",
        )
        self.saturated = counter(
            "lorica_saturated_coordinates",
            "Coordinates of masked updates that were beyond the range that their round could express; their tensors "
            "were scaled down.",
        )
        self.bucket_bytes = counter(
            "lorica_bucket_bytes", "Bytes put into the bucket of [storage] blobs, and got from it.", ["call"]
        )
        self.bucket_seconds = counter(
            "lorica_bucket_seconds", "Seconds that calls of it took, those at one time added up.", ["call"]
        )
        self.bucket_failures = counter(
            "lorica_bucket_failures", "Calls of it that failed, after they were tried again.", ["call"]
        )
        self.certificate_expiry = gauge(
            "lorica_certificate_expiry_timestamp_seconds", "When the coordinator's own certificate expires."
        )
        self.silo_certificate_expiry = gauge(
            "lorica_enrolled_silo_certificate_expiry_timestamp_seconds",
            "When the newest certificate of a silo expires, as the coordinator issued it.",
            ["silo"],
        )
        self.authority_expiry = gauge(
            "lorica_authority_expiry_timestamp_seconds", "When the certificate of the authority that issues expires."
        )
        self.cohort = gauge("lorica_cohort_silos", "Silos in the last opened round.")
        self.dropped = counter(
            "lorica_dropped_silos",
            "Silos dropped from a round, by phase (within masking that of secure aggregation) and by what became of "
            "their part.",
            ["phase", "outcome"],
        )
        self.round_seconds = histogram("lorica_round_duration_seconds", "From opening a round to closing it.")
        self.epsilon_spent = gauge(
            "lorica_plan_epsilon_spent",
            "Epsilon that the plan under way has cost, where the coordinator makes its noise; else 0, and silos "
            "count their own.",
        )
        self.epsilon_left = gauge(
            "lorica_plan_epsilon_left", "What is left of that; 0 where the coordinator makes no noise."
        )
        self.epsilon_allowed = gauge(
            "lorica_plan_epsilon_allowed",
            "[privacy] target_epsilon of the plan under way, where the coordinator makes its noise; else 0.",
        )
        for call in BUCKET_CALLS:
            for instrument in (self.bucket_bytes, self.bucket_seconds, self.bucket_failures):
                instrument.labels(call)
        self._seen: dict[SiloName, float] = {}
        self._at_hand: frozenset[SiloName] = frozenset()
        self._ends: float | None = None  # the phase, at the latest, by the monotonic clock
        self.phase_deadline.set_function(self._deadline)
        self._score = ""
        self._single_silos = False
        self._kinds: frozenset[KindOfRound] = frozenset()
        self._plan: Digest | None = None
        self._phase: str | None = None
        self._phase_since = 0.0
        for phase in DROPPING_PHASES:
            for dropped in DROPPED:
                self.dropped.labels(phase, dropped)
        for cause in Cause:
            self.abandoned.labels(cause.value)
        self.queue.labels(EVENTS_QUEUE)
        self._forget_means()
        for phase in PHASES:
            self.phase.labels(phase).set(0)
            self.phase_seconds.labels(phase)
        for outcome in OUTCOMES:
            self.rounds_total.labels(outcome)
        for state in SILO_STATES:
            self.silos.labels(state).set(0)
        self._show_quorums({"all": Quorum(least=0, enrolled=0, connected=0)})
        for kind in ERROR_KINDS:
            self.errors.labels(kind)

    def depths(self, *, events: Callable[[], int], transfers: Callable[[], int]) -> None:
        """What is asked for at each scrape, in another thread."""
        self.queue.labels(EVENTS_QUEUE).set_function(events)
        self.transfers.set_function(transfers)

    @property
    def _of_single_silos(self) -> tuple[Gauge, ...]:
        """What goes where a plan shows no single silos."""
        return (
            *(self.weight, self.share, self.loss_reduction, self.examples, self.delta_norm, self.loss),
            *(self.exact_match, self.execution_accuracy),
        )

    # What follows is the `Observer` port of the service.

    def phase_changed(self, phase: str, *, round_number: int, attempt: int) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self.phase.labels(self._phase).set(0)
            self.phase_seconds.labels(self._phase).observe(now - self._phase_since)
        self._phase, self._phase_since = phase, now
        self.phase.labels(phase).set(1)
        self.phase_began.set_to_current_time()
        self.round.set(round_number)
        self.attempt.set(attempt)

    def round_opened(self, key: RoundKey, cohort: Sequence[SiloName]) -> None:
        self._of_plan(key.plan)
        self.cohort.set(len(cohort))

    def _of_plan(self, plan: Digest) -> None:
        """What the silos of an earlier plan came to says nothing of this one."""
        if plan != self._plan:
            self._plan = plan
            self._forget_means()

    def _forget_means(self) -> None:
        for mean in (self.mean_loss_reduction, self.mean_weight, self.macro_exact_match, self.micro_exact_match):
            mean.set(UNKNOWN)
        self._show_scores(None)
        self.mean_loss.clear()

    def update_committed(self, update: CommittedUpdate) -> None:
        silo, summary = update.silo, update.summary
        self.examples.labels(silo).set(update.examples)
        self.loss_reduction.labels(silo).set(update.loss_reduction)
        self.delta_norm.labels(silo).set(update.delta_norm)
        for point, loss in zip(POINTS, (summary.loss_first, summary.loss_last), strict=True):
            self.loss.labels(silo, point).set(loss)

    def silo_dropped(self, silo: SiloName, outcome: str, phase: str) -> None:
        self.dropped.labels(phase, outcome).inc()

    def round_closed(self, result: AggregationResult, means: Means, *, seconds: float) -> None:
        self.rounds_total.labels(result.outcome.value).inc()
        self.round_seconds.observe(seconds)
        if result.outcome is Outcome.SCORED:
            return  # nobody trained: what the last training came to still stands
        if result.fallback:
            self.weight_fallbacks.inc()
        self.saturated.inc(result.saturated)
        for item in result.weights:
            if item.nothing:
                self.zero_weights.inc()
            self.weight.labels(item.silo).set(item.weight)
            self.share.labels(item.silo).set(item.share)
        self.mean_loss_reduction.set(UNKNOWN if means.loss_reduction is None else means.loss_reduction)
        self.mean_weight.set(UNKNOWN if means.weight is None else means.weight)
        for point, loss in zip(POINTS, (means.loss_first, means.loss_last), strict=True):
            if loss is not None:
                self.mean_loss.labels(point).set(loss)

    def round_abandoned(self, cause: Cause, *, seconds: float) -> None:
        self.rounds_total.labels(ABANDONED).inc()
        self.abandoned.labels(cause.value).inc()
        self.round_seconds.observe(seconds)

    def _show_scores(self, scores: Scores | None) -> None:
        self.scored_questions.set(UNKNOWN if scores is None else scores.questions)
        self.summed_loss.set(UNKNOWN if scores is None else scores.loss_per_token)
        executed = 0 if scores is None else scores.executed
        self.summed_execution.set(scores.execution_matches / executed if scores is not None and executed else UNKNOWN)

    def evaluated(
        self,
        key: RoundKey,
        *,
        reports: Sequence[tuple[SiloName, Evaluation]],
        scores: Scores | None,
        macro: float | None,
        micro: float | None,
    ) -> None:
        self._of_plan(key.plan)
        self._show_scores(scores)
        self.macro_exact_match.set(UNKNOWN if macro is None else macro)
        self.micro_exact_match.set(UNKNOWN if micro is None else micro)
        for silo, report in reports:
            self.exact_match.labels(silo).set(report.exact_matches / report.examples)
            if report.executed:
                self.execution_accuracy.labels(silo).set(report.execution_matches / report.executed)

    def standing_changed(self, pulse: Pulse) -> None:
        """Series of a silo go with it; those of what single silos told, with the plan that let them be shown."""
        for state in SILO_STATES:
            self.silos.labels(state).set(pulse.silos.get(state, 0))
        self._show_quorums(pulse.quorums)
        self.running.set(pulse.running)
        self._show_score(pulse.score)
        self.groups_unsigned.set(pulse.groups_unsigned)
        self.groups_absent.set(pulse.groups_absent)
        self._ends = None if pulse.seconds_left is None else time.monotonic() + pulse.seconds_left
        known, self._seen = self._seen, dict(pulse.last_seen_unix_s)
        for silo in pulse.connected ^ self._at_hand | self._seen.keys() - known.keys():
            self.connected.labels(silo).set(silo in pulse.connected)
        self._at_hand = pulse.connected
        for silo in self._seen.keys() - known.keys():
            self.last_seen.labels(silo).set_function(partial(self._last_seen, silo))
        for silo in known.keys() - self._seen.keys():
            for gauge in (self.connected, self.last_seen, self.silo_certificate_expiry, *self._of_single_silos):
                gauge.remove_by_labels({"silo": silo})
        if known.keys() != self._seen.keys() or pulse.single_silos != self._single_silos:
            self._single_silos = pulse.single_silos
            self._show_single_silos()

    def _show_score(self, score: str) -> None:
        if score != self._score:
            self.score.clear()
            self._score = score
            if score:
                self.score.labels(score).set(1)

    def _show_quorums(self, quorums: Mapping[KindOfRound, Quorum]) -> None:
        for kind in self._kinds - quorums.keys():
            for gauge in (self.quorum, self.candidates):
                gauge.remove_by_labels({"of": kind})
        for kind, quorum in quorums.items():
            self.quorum.labels(kind).set(quorum.least)
            self.candidates.labels(kind, "enrolled").set(quorum.enrolled)
            self.candidates.labels(kind, "connected").set(quorum.connected)
        self._kinds = frozenset(quorums)

    def _show_single_silos(self) -> None:
        if not self._single_silos:
            for gauge in (*self._of_single_silos, self.mean_loss):
                gauge.clear()
            return
        for gauge in self._of_single_silos:
            points = [(point,) for point in POINTS] if gauge is self.loss else [()]
            for silo, point in product(self._seen, points):
                gauge.labels(silo, *point)

    def _deadline(self) -> float:
        """By the clock of this moment, which the date of a deadline goes with, however it was set meanwhile."""
        return 0.0 if self._ends is None else time.time() + self._ends - time.monotonic()

    def _last_seen(self, silo: SiloName) -> float:
        return time.time() if silo in self._at_hand else self._seen.get(silo, 0.0)

    def phase_failing(self, failing: bool) -> None:
        self.failing.set(failing)

    def epsilon(self, *, spent: float, allowed: float) -> None:
        self.epsilon_spent.set(spent)
        self.epsilon_left.set(max(0.0, allowed - spent))
        self.epsilon_allowed.set(allowed)

    def bucket_called(self, call: str, size: int, seconds: float, failed: bool) -> None:
        """`call` is one of BUCKET_CALLS."""
        self.bucket_bytes.labels(call).inc(size)
        self.bucket_seconds.labels(call).inc(seconds)
        if failed:
            self.bucket_failures.labels(call).inc()

    def refused(self, kind: str) -> None:
        self.errors.labels(kind).inc()
