"""Tables of the metrics of both programs."""

from typing import Final, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from lorica.documentation.markdown import DOCS, markdown_table
from lorica_coordinator.edges.telemetry.leadership_metrics import LEADERSHIP
from lorica_coordinator.edges.telemetry.metrics import POINTS, CoordinatorMetrics
from lorica_coordinator.rounds.terms import KindOfRound
from lorica_security.daemon.host_metrics import BuildCollector, FolderCollector, GpuCollector
from silo_agent.edges.console.metrics import MODEL_SCORES, PARTS, SCORED_MODELS, SiloMetrics
from silo_wire.plans.sections.task import SCORE_LABELS
from silo_wire.wire_version import OURS

# --- metrics


def metrics_table() -> str:
    registry = CollectorRegistry()
    return _instruments(CoordinatorMetrics(registry), registry)


def silo_metrics_table() -> str:
    registry = CollectorRegistry()
    return _instruments(SiloMetrics(registry), registry)


def leadership_metrics_table() -> str:
    rows = [(f"`{name}`", "gauge", "", meaning) for name, meaning in LEADERSHIP.items()]
    return markdown_table(("metric", "type", "labels", "meaning"), rows)


def host_metrics_table() -> str:
    versions = ", ".join(
        f"`{label}`" for family in BuildCollector(str(OURS)).collect() for label in family.samples[0].labels
    )
    rows = [
        (f"`{family.name}`", family.type, labels, family.documentation)
        for collector, labels in (
            (BuildCollector(str(OURS)), versions),
            (FolderCollector(DOCS), ""),
            (GpuCollector(), "`device`: 0, 1, ... as torch counts them"),
        )
        for family in collector.describe()
    ]
    return markdown_table(("metric", "type", "labels", "meaning"), rows)


OPEN_LABELS: Final = {
    "silo": ("enrolled silos",),
    "point": POINTS,
    "model": SCORED_MODELS,
    "score": MODEL_SCORES,
    "part": PARTS,
    "name": (*SCORE_LABELS.values(), "of an installed task its own"),
    "of": get_args(KindOfRound),
}
"""Of series that are there only while a plan lets them be, or has them."""


def _instruments(metrics: object, registry: CollectorRegistry) -> str:
    """One row a metric, as Prometheus names it, with the closed set of each label's values."""
    values: dict[str, dict[str, list[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                known = values.setdefault(family.name, {}).setdefault(label, [])
                if label != "le" and value not in known:
                    known.append(value)
    rows = []
    for instrument in vars(metrics).values():
        if not isinstance(instrument, MetricWrapperBase):
            continue
        (family,) = instrument.describe()
        labels = []
        for label in instrument._labelnames:  # the library tells them nowhere else before there is a series
            closed = values.get(family.name, {}).get(label)
            labels.append(f"`{label}`: {', '.join(OPEN_LABELS.get(label, closed or ()))}")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, "; ".join(labels), family.documentation))
    return markdown_table(("metric", "type", "labels", "meaning"), rows)
