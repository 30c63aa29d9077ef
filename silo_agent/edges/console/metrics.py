"""What Prometheus sees of one silo. Counters exist at zero from the start; label sets are closed, never a peer's own
words.

Nothing of the silo's data is in them: what it is at and for how long, what went over the line, how often it refused,
how its parts of rounds ended, and what they have cost in privacy. What its models score is told on loopback alone.
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lorica_security.daemon.host_metrics import register_host
from lorica_security.daemon.listen_address import address
from lorica_security.daemon.metrics_port import metrics_port
from lorica_security.errors import ConfigurationError
from silo_agent.rounds.effects import Activity, JournalActivity, JournalOutcome, Outcome
from silo_agent.service.refusals import RULES
from silo_agent.training.tasks.wikisql_query import METRICS
from silo_wire.plans.sections.task import SCORE_LABELS
from silo_wire.wire_version import OURS

TRAINING, EVALUATION = "training", "evaluation"
ENDS: Final = {
    TRAINING: (Outcome.UPLOADED, Outcome.DECLINED, Outcome.CLOSED),
    EVALUATION: (Outcome.EVALUATED, Outcome.DECLINED, Outcome.CLOSED),
}
SCORED_MODELS: Final = ("local", "global", "personal")
PARTS: Final = (*METRICS, *SCORE_LABELS)
"""What tasks know of an answer beside whether it is right as a whole."""
MODEL_SCORES: Final = tuple(dict.fromkeys(("loss_per_token", "exact_match", "execution_match", *PARTS)))
EVENTS_QUEUE, ERRANDS_QUEUE = "events", "errands"
ACTIVITIES: Final = {activity: activity.name.lower() for activity in Activity}
_ACTIVITY_SECONDS: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400, 86400)


class SiloMetrics:
    """The silo's instruments, in a registry of their own so that several silos can share a test process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_ACTIVITY_SECONDS, registry=registry)
        self.connected = gauge("lorica_silo_connected", "1 while orders of the coordinator can come, else 0.")
        self.last_order = gauge(
            "lorica_silo_last_order_timestamp_seconds",
            "When the coordinator's last order came, the same one again included; 0 if none did.",
        )
        self.unreachable = counter(
            "lorica_silo_unreachable", "Calls that did not get to the coordinator, and are tried again."
        )
        self.round = gauge("lorica_silo_round", "Round that this silo worked in last.")
        self.activity = gauge("lorica_silo_activity", "1 for what the agent is at, else 0.", ["activity"])
        self.activity_seconds = histogram(
            "lorica_silo_activity_duration_seconds", "How long the agent was at it.", ["activity"]
        )
        self.received = counter("lorica_silo_received_bytes", "Bytes of plans and of chunks of models received.")
        self.sent = counter("lorica_silo_sent_bytes", "Bytes of chunks of updates sent.")
        self.queue = gauge(
            "lorica_silo_queue_depth",
            "What waits. events: what has happened and was not looked at; errands: what the coordinator is to be told.",
            ["queue"],
        )
        self.refusals = counter(
            "lorica_silo_refusals",
            "What the coordinator asked or sent and this silo refused, by rule: a key of [policy], a rule of secure "
            "aggregation, or the kind of error.",
            ["rule"],
        )
        self.groups_wait = gauge(
            "lorica_silo_release_groups_wait",
            "1 while release groups wait for this silo's people, who look with `silo-agent groups show`; else 0.",
        )
        self.checked_chunks = counter(
            "lorica_silo_checked_chunks",
            "Chunks of round models that this silo made again from the masked sum, and found right.",
        )
        self.rounds = counter(
            "lorica_silo_rounds", "This silo's parts of rounds that ended, by work and outcome.", ["work", "outcome"]
        )
        self.epsilon_spent = gauge(
            "lorica_silo_epsilon_spent",
            "Epsilon of all private releases of this silo so far, by the filter that holds over all plans, at "
            "[policy] max_dp_delta; from its first private plan on.",
        )
        self.epsilon_left = gauge("lorica_silo_epsilon_left", "What is left of that; from its first private plan on.")
        self.epsilon_allowed = gauge(
            "lorica_silo_epsilon_allowed", "[policy] max_epsilon of this silo; from its first private plan on."
        )
        self.epsilon_alone_spent = gauge(
            "lorica_silo_epsilon_alone_spent",
            "The same towards all others whose noise counts in it, if they worked against this silo; 0 without "
            "joint noise.",
        )
        self.epsilon_alone_allowed = gauge(
            "lorica_silo_epsilon_alone_allowed",
            "[policy] max_epsilon_alone of this silo; from its first private plan on.",
        )
        self.certificate_expiry = gauge(
            "lorica_silo_certificate_expiry_timestamp_seconds",
            "When this silo's certificate expires; its agent renews it when a third of its life is left.",
        )
        self.model_score = gauge(
            "lorica_silo_model_score",
            "What the global model that was scored last and this silo's own come to on its held-out questions: loss, "
            "and shares of right answers. There with [personal] method where [metrics] listen is loopback.",
            ["model", "score"],
        )
        self.answers_right = gauge(
            "lorica_silo_answers_right_ratio",
            "Shares of this silo's held-out questions that the global model that was scored last answers right, as a "
            "whole and in part. There where the plan's task knows parts and [metrics] listen is loopback.",
            ["part"],
        )
        self._activity: Activity | None = None
        self._activity_since = 0.0
        for activity in ACTIVITIES.values():
            self.activity.labels(activity)
            self.activity_seconds.labels(activity)
        for queue in (EVENTS_QUEUE, ERRANDS_QUEUE):
            self.queue.labels(queue)
        for rule in RULES:
            self.refusals.labels(rule)
        for work, outcomes in ENDS.items():
            for outcome in outcomes:
                self.rounds.labels(work, outcome.value)

    def refused(self, rule: str) -> None:
        self.refusals.labels(rule).inc()

    def epsilon_alone(self, *, spent: float, allowed: float) -> None:
        self.epsilon_alone_spent.set(spent)
        self.epsilon_alone_allowed.set(allowed)

    def epsilon(self, *, spent: float, allowed: float) -> None:
        self.epsilon_spent.set(spent)
        self.epsilon_left.set(max(0.0, allowed - spent))
        self.epsilon_allowed.set(allowed)

    def attending(self, orders_come: bool) -> None:
        self.connected.set(orders_come)
        if orders_come:
            self.last_order.set_to_current_time()

    def depths(self, waiting: Callable[[], tuple[int, int]]) -> None:
        """Of events and errands: asked for at each scrape, in another thread."""
        self.queue.labels(EVENTS_QUEUE).set_function(lambda: waiting()[0])
        self.queue.labels(ERRANDS_QUEUE).set_function(lambda: waiting()[1])

    def model_scores(self, known: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Of each model, by name: asked for at each scrape, in another thread; NaN where there is none."""

        def look(model: str, score: str) -> float:
            return known().get(model, {}).get(score, math.nan)

        for model in SCORED_MODELS:
            for score in MODEL_SCORES:
                self.model_score.labels(model, score).set_function(partial(look, model, score))

    def answers(self, shares: Mapping[str, float]) -> None:
        """Of the global model that was scored last, by part; those of a task before it go."""
        self.answers_right.clear()
        for part, share in shares.items():
            self.answers_right.labels(part).set(share)

    def activity_changed(self, now_at: JournalActivity) -> None:
        if now_at.key is not None:
            self.round.set(now_at.key.round)
        if now_at.activity is self._activity:
            return
        now = time.monotonic()
        if self._activity is not None:
            before = ACTIVITIES[self._activity]
            self.activity.labels(before).set(0)
            self.activity_seconds.labels(before).observe(now - self._activity_since)
        self._activity, self._activity_since = now_at.activity, now
        self.activity.labels(ACTIVITIES[now_at.activity]).set(1)

    def round_ended(self, outcome: JournalOutcome) -> None:
        self.rounds.labels(EVALUATION if outcome.evaluation else TRAINING, outcome.outcome.value).inc()


@asynccontextmanager
async def metrics_served(listen: str, folder: Path) -> AsyncIterator[SiloMetrics]:
    """The silo's metrics, with those of its `folder`, at /metrics of `listen` (ADDRESS:PORT) while inside; an empty one
    shows nobody.

    Raises ConfigurationError where the port is taken or the address is not of this machine.
    """
    registry = CollectorRegistry()
    metrics = SiloMetrics(registry)
    async with AsyncExitStack() as open_here:
        if listen:
            register_host(registry, folder, str(OURS))
            try:
                await open_here.enter_async_context(metrics_port(address(listen), registry))
            except OSError as error:
                raise ConfigurationError(
                    f"cannot listen on {listen} for metrics ({error.strerror}): change [metrics] listen in silo.toml"
                ) from error
        yield metrics
