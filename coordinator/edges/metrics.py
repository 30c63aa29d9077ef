"""What Prometheus sees. Counters exist at zero from the start; label sets are closed, never a peer's own words.

Silo names are labels because the population of a federation is small and fixed by enrolment; rounds are values, never
labels.
"""

import time
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.rounds.updates import AggregationResult
from security.errors import EXIT_CODES
from security.identifiers import SiloName
from silo_wire.messages import Evaluation, RoundKey

PHASES = ("idle", "gathering", "collecting", "masking", "aggregating", "evaluating", "stopped", "finished")
OUTCOMES = ("applied", "zero_weight", "abandoned")
DROPPED = ("declined", "late", "refused")
SILO_STATES = ("enrolled", "connected", "ready")
ERROR_KINDS = (*(kind.__name__ for kind in EXIT_CODES), "Defect")  # the last: an exception that is none of Lorica's
_PHASE_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)


class CoordinatorMetrics:
    """The coordinator's instruments, in a registry of their own so that two coordinators can share a test process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.round = Gauge(
            "lorica_round", "Round that is running or comes next; 0 is the initial evaluation.", registry=registry
        )
        self.attempt = Gauge("lorica_round_attempt", "Attempt at the present round, from 1.", registry=registry)
        self.phase = Gauge(
            "lorica_phase", "1 for the phase that the round is in, else 0.", ["phase"], registry=registry
        )
        self.phase_seconds = Histogram(
            "lorica_phase_duration_seconds",
            "Time spent in a phase.",
            ["phase"],
            buckets=_PHASE_SECONDS,
            registry=registry,
        )
        self.rounds_total = Counter("lorica_rounds", "Rounds that ended, by outcome.", ["outcome"], registry=registry)
        self.silos = Gauge(
            "lorica_silos", "Silos by state; a ready one is also connected and enrolled.", ["state"], registry=registry
        )
        self.weight = Gauge(
            "lorica_silo_weight", "Weight of a silo's delta in the last closed round.", ["silo"], registry=registry
        )
        self.share = Gauge(
            "lorica_silo_weight_share_ratio", "Share of the last weighted mean.", ["silo"], registry=registry
        )
        self.loss_reduction = Gauge(
            "lorica_silo_loss_reduction",
            "Maximum minus minimum training loss of the last committed update.",
            ["silo"],
            registry=registry,
        )
        self.examples = Gauge(
            "lorica_silo_examples", "Training examples behind the last committed update.", ["silo"], registry=registry
        )
        self.delta_norm = Gauge(
            "lorica_silo_delta_norm", "L2 norm of the last committed delta.", ["silo"], registry=registry
        )
        self.exact_match = Gauge(
            "lorica_silo_exact_match_ratio",
            "Exact match of the global model on a silo's dev set.",
            ["silo"],
            registry=registry,
        )
        self.execution_accuracy = Gauge(
            "lorica_silo_execution_accuracy_ratio",
            "Execution accuracy of the global model on a silo's dev set.",
            ["silo"],
            registry=registry,
        )
        self.macro_exact_match = Gauge(
            "lorica_macro_exact_match_ratio", "Mean of the silos' exact match.", registry=registry
        )
        self.micro_exact_match = Gauge(
            "lorica_micro_exact_match_ratio", "Exact match over all dev examples.", registry=registry
        )
        self.received = Counter("lorica_received_bytes", "Bytes of update chunks received.", registry=registry)
        self.sent = Counter("lorica_sent_bytes", "Bytes of plan and model chunks sent.", registry=registry)
        self.errors = Counter(
            "lorica_errors", "Calls refused or failed, by kind of error.", ["kind"], registry=registry
        )
        self.weight_fallbacks = Counter(
            "lorica_weight_fallbacks",
            "Rounds whose weights summed to zero, so that size weights stood in.",
            registry=registry,
        )
        self.saturated = Counter(
            "lorica_saturated_coordinates",
            "Coordinates of masked updates that were cut to the range that their round could express.",
            registry=registry,
        )
        self.certificate_expiry = Gauge(
            "lorica_certificate_expiry_timestamp_seconds",
            "When the coordinator's own certificate expires.",
            registry=registry,
        )
        self.silo_certificate_expiry = Gauge(
            "lorica_enrolled_silo_certificate_expiry_timestamp_seconds",
            "When the newest certificate of a silo expires, as the coordinator issued it.",
            ["silo"],
            registry=registry,
        )
        self.authority_expiry = Gauge(
            "lorica_authority_expiry_timestamp_seconds",
            "When the certificate of the authority that issues expires.",
            registry=registry,
        )
        self.cohort = Gauge("lorica_cohort_silos", "Silos in the last opened round.", registry=registry)
        self.dropped = Counter(
            "lorica_dropped_silos",
            "Silos dropped from a round, by what became of their update.",
            ["outcome"],
            registry=registry,
        )
        self.round_seconds = Histogram(
            "lorica_round_duration_seconds",
            "From opening a round to closing it.",
            buckets=_PHASE_SECONDS,
            registry=registry,
        )
        self._phase: str | None = None
        self._phase_since = 0.0
        for dropped in DROPPED:
            self.dropped.labels(dropped)
        for phase in PHASES:
            self.phase.labels(phase).set(0)
            self.phase_seconds.labels(phase)
        for outcome in OUTCOMES:
            self.rounds_total.labels(outcome)
        for state in SILO_STATES:
            self.silos.labels(state).set(0)
        for kind in ERROR_KINDS:
            self.errors.labels(kind)

    def know_silos(self, silos: Iterable[str]) -> None:
        """Create the per-silo series at zero for every enrolled silo."""
        for silo in silos:
            for gauge in (self.weight, self.share, self.loss_reduction, self.examples, self.delta_norm):
                gauge.labels(silo)
            self.exact_match.labels(silo)
            self.execution_accuracy.labels(silo)

    # What follows is the `Observer` port of the service.

    def phase_changed(self, phase: str, *, round_number: int, attempt: int) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self.phase.labels(self._phase).set(0)
            self.phase_seconds.labels(self._phase).observe(now - self._phase_since)
        self._phase, self._phase_since = phase, now
        self.phase.labels(phase).set(1)
        self.round.set(round_number)
        self.attempt.set(attempt)

    def round_opened(self, key: RoundKey, cohort: Sequence[SiloName]) -> None:
        self.know_silos(cohort)
        self.cohort.set(len(cohort))

    def update_committed(self, silo: SiloName, *, examples: int, loss_reduction: float, delta_norm: float) -> None:
        self.examples.labels(silo).set(examples)
        self.loss_reduction.labels(silo).set(loss_reduction)
        self.delta_norm.labels(silo).set(delta_norm)

    def silo_dropped(self, silo: SiloName, outcome: str) -> None:
        self.dropped.labels(outcome).inc()

    def round_closed(self, key: RoundKey, *, outcome: str, seconds: float, result: AggregationResult | None) -> None:
        self.rounds_total.labels(outcome).inc()
        self.round_seconds.observe(seconds)
        if result is None:
            return
        if result.fallback:
            self.weight_fallbacks.inc()
        self.saturated.inc(result.saturated)
        for item in result.weights:
            self.weight.labels(item.silo).set(item.weight)
            self.share.labels(item.silo).set(item.share)

    def evaluated(
        self, key: RoundKey, *, reports: Sequence[tuple[SiloName, Evaluation]], macro: float, micro: float
    ) -> None:
        self.macro_exact_match.set(macro)
        self.micro_exact_match.set(micro)
        for silo, report in reports:
            self.exact_match.labels(silo).set(report.exact_matches / report.examples)
            if report.executed:
                self.execution_accuracy.labels(silo).set(report.execution_matches / report.executed)

    def silos_by_state(self, counts: dict[str, int]) -> None:
        for state in SILO_STATES:
            self.silos.labels(state).set(counts.get(state, 0))

    def refused(self, kind: str) -> None:
        self.errors.labels(kind).inc()
