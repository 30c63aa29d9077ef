"""The rules of Prometheus and the dashboards ask for metrics that exist, each alert says what to do, and the runbook
has a section for it and no other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from lorica_coordinator.edges.telemetry.leadership_metrics import LEADERSHIP
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_security.daemon.host_metrics import BUILD, FOLDER, GPU
from silo_agent.edges.console.metrics import SiloMetrics

OPS = Path(__file__).resolve().parents[2] / "ops"
FOLDER_OF_RULES = OPS / "prometheus"
RULES = sorted(FOLDER_OF_RULES.glob("*.rules.yml"))
RUNBOOK = OPS / "docs" / "runbook.md"
DASHBOARDS = sorted((OPS / "grafana" / "dashboards").glob("*.json"))
ASKED = re.compile(r"\b(?:instance:|phase:)?lorica_\w+(?::\w+)?")


def known() -> set[str]:
    """Every name that a query may ask for."""
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    SiloMetrics(registry)
    names = {*BUILD, *LEADERSHIP, *FOLDER, *GPU, *(rule["record"] for rule in rules("record"))}
    for metric in registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(metric.type, ("",))
        names |= {f"{metric.name}{suffix}" for suffix in suffixes}
    return names


def rules(kind: str) -> list[dict[str, Any]]:
    """`kind`: alert or record."""
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = {rule["alert"]: rule for rule in rules("alert")}


def sections() -> dict[str, str]:
    """The runbook's section of each alert, by its heading."""
    parts = re.split(r"^#{2,3} (.+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name.startswith("Lorica")}


@pytest.mark.parametrize("rule", [*ALERTS.values(), *rules("record")], ids=lambda rule: next(iter(rule.values())))
def test_every_rule_asks_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    asked = set(ASKED.findall(rule["expr"]))
    assert asked or "up{" in rule["expr"]
    assert asked <= known()


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_it_is_and_leads_to_its_section_of_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} <= rule["annotations"].keys()
    assert rule["annotations"]["runbook_url"] == f"ops/docs/runbook.md#{name.lower()}"
    rows = re.findall(r"^\| (means|look|do) \| (.{20,}) \|$", sections()[name], re.MULTILINE)
    assert [kind for kind, _ in rows] == ["means", "look", "do"]


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    assert sections().keys() == ALERTS.keys()
    assert set(re.findall(r"\blorica_\w+", RUNBOOK.read_text(encoding="utf-8"))) <= known()


def test_prometheus_loads_every_file_of_rules() -> None:
    configuration = yaml.safe_load((FOLDER_OF_RULES / "prometheus.yml").read_text())
    assert sorted(configuration["rule_files"]) == [file.name for file in RULES]
    (silos,) = configuration["scrape_configs"][1]["file_sd_configs"]
    assert yaml.safe_load((FOLDER_OF_RULES / silos["files"][0]).read_text()) == []


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_panel_asks_for_metrics_that_exist(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert dashboard["uid"] == f"lorica-{file.stem}"
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        for target in panel["targets"]:
            asked = set(ASKED.findall(target["expr"]))
            assert asked or target["expr"].startswith(("ALERTS{", "process_", "rate(process_")), panel["title"]
            assert asked <= known(), panel["title"]


def test_three_dashboards_are_provisioned() -> None:
    assert [file.stem for file in DASHBOARDS] == ["federation", "security", "silo"]
    for kind in ("datasources", "dashboards"):
        (file,) = (OPS / "grafana" / "provisioning" / kind).glob("*.yml")
        assert yaml.safe_load(file.read_text())["apiVersion"] == 1
