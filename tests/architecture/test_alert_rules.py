"""The alert rules ask for metrics that exist, and each says what to do."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from coordinator.edges.metrics import CoordinatorMetrics
from silo_agent.edges.metrics import SiloMetrics

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "prometheus"
RULES = sorted(FOLDER.glob("*.rules.yml"))


def known() -> set[str]:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    SiloMetrics(registry)
    return {metric.name for metric in registry.collect()} | {f"{metric.name}_total" for metric in registry.collect()}


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_every_rule_asks_for_metrics_that_exist_and_says_what_to_do(file: Path) -> None:
    names = known()
    rules = [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        asked = set(re.findall(r"lorica_\w+", rule["expr"]))
        assert asked, rule["alert"]
        assert asked <= names, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_prometheus_loads_every_file_of_rules() -> None:
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert sorted(configuration["rule_files"]) == [file.name for file in RULES]
