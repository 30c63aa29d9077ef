"""What Prometheus sees of one silo. Counters exist at zero from the start; label sets are closed, never a peer's own words.

Nothing of the silo's data is in them, nor of what it learnt: how often it refused, how its parts of rounds ended, and what they
have cost in privacy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    start_http_server,
)

from security.errors import ConfigurationError
from silo_agent.service.refusals import RULES
from silo_agent.task.effects import JournalOutcome, Outcome
from silo_wire.listen_address import address

TRAINING, EVALUATION = "training", "evaluation"
ENDS: Final = {
    TRAINING: (Outcome.UPLOADED, Outcome.DECLINED, Outcome.CLOSED),
    EVALUATION: (Outcome.EVALUATED, Outcome.DECLINED, Outcome.CLOSED),
}


class SiloMetrics:
    """The silo's instruments, in a registry of their own so that several silos can share a test process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.refusals = Counter(
            "lorica_silo_refusals",
            "What the coordinator asked or sent and this silo refused, by rule: a key of [policy], a rule of secure "
            "aggregation, or the kind of error.",
            ["rule"],
            registry=registry,
        )
        self.rounds = Counter(
            "lorica_silo_rounds",
            "This silo's parts of rounds that ended, by work and outcome.",
            ["work", "outcome"],
            registry=registry,
        )
        self.epsilon_spent = Gauge(
            "lorica_silo_epsilon_spent",
            "Epsilon of all private releases of this silo so far, at [policy] max_dp_delta; from its first private plan on.",
            registry=registry,
        )
        self.epsilon_allowed = Gauge(
            "lorica_silo_epsilon_allowed",
            "[policy] max_epsilon of this silo; from its first private plan on.",
            registry=registry,
        )
        self.certificate_expiry = Gauge(
            "lorica_silo_certificate_expiry_timestamp_seconds",
            "When this silo's certificate expires; its agent renews it when a third of its life is left.",
            registry=registry,
        )
        for rule in RULES:
            self.refusals.labels(rule)
        for work, outcomes in ENDS.items():
            for outcome in outcomes:
                self.rounds.labels(work, outcome.value)

    def refused(self, rule: str) -> None:
        self.refusals.labels(rule).inc()

    def epsilon(self, *, spent: float, allowed: float) -> None:
        self.epsilon_spent.set(spent)
        self.epsilon_allowed.set(allowed)

    def round_ended(self, outcome: JournalOutcome) -> None:
        self.rounds.labels(EVALUATION if outcome.evaluation else TRAINING, outcome.outcome.value).inc()


@contextmanager
def metrics_served(listen: str) -> Iterator[SiloMetrics]:
    """The silo's metrics, at /metrics of `listen` (ADDRESS:PORT) while inside; an empty one counts and shows nobody.

    Raises ConfigurationError where the port is taken or the address is not of this machine.
    """
    registry = CollectorRegistry()
    metrics = SiloMetrics(registry)
    if not listen:
        yield metrics
        return
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    at = address(listen)
    try:
        http, thread = start_http_server(at.port, at.host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {listen} for metrics ({error.strerror}): change [metrics] listen in silo.toml"
        ) from error
    try:
        yield metrics
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
