"""A real Prometheus (Debian's package) on loopback with the rules of ops/prometheus, and promtool."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lorica.demo.ports import free_ports
from tests.support.waiting import until

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "prometheus"
RECORDING = "recording.rules.yml"
LONGEST_S = 90.0
QUICKER = 120
"""By how much alerts are quicker here: `for`, ranges, and thresholds that are written as N * 60. Hours and days of
certificates and disks stay as they are."""
_SPAN = re.compile(r"(?<![\w.])(\d+)([smh])\b")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def found(program: str) -> str:
    """Where the program is; skips the test, saying so, where it is not."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not there: apt-get install prometheus")
    return path


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([found("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=120)


def quicker(rules: str) -> str:
    """Rules that wait QUICKER times shorter."""
    groups: dict[str, Any] = yaml.safe_load(rules)
    for rule in (rule for group in groups["groups"] for rule in group["rules"]):
        if "for" in rule:
            rule["for"] = _shorter(rule["for"])
        rule["expr"] = re.sub(r"\[(\w+)\]", lambda span: f"[{_shorter(span[1])}]", rule["expr"])
        rule["expr"] = re.sub(r"\* 60\b", f"* {60 / QUICKER}", rule["expr"])
    return yaml.safe_dump(groups)


def _shorter(span: str) -> str:
    return _SPAN.sub(lambda it: f"{int(it[1]) * _SECONDS[it[2]] * 1000 // QUICKER}ms", span)


@dataclass(frozen=True)
class Prometheus:
    url: str
    check: Callable[[], None]

    def _get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as reply:
            return json.loads(reply.read())["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The samples of an instant query, now: labels and value."""
        return [(it["metric"], float(it["value"][1])) for it in self._get("query", query=expr)["result"]]

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """The labels of each alert that fires, by its name."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in self._get("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule as it was evaluated last: name, health, lastError."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def healthy(self) -> set[str]:
        """The instances that were scraped."""
        targets = self._get("targets", state="active")["activeTargets"]
        return {target["labels"]["instance"] for target in targets if target["health"] == "up"}

    def wait(self, reached: Callable[[], bool], *, check: Callable[[], None] = lambda: None) -> None:
        def checks() -> None:
            self.check()
            check()

        until(reached, checks, LONGEST_S)


@contextmanager
def prometheus(root: Path, *, coordinator: str, silos: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrapes twice a second what the configuration of ops/prometheus says, at these addresses, with alerts that are
    QUICKER."""
    program = found("prometheus")
    root.mkdir()
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [coordinator]
    (root / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    targets = [{"targets": [address], "labels": {"silo": silo}} for silo, address in silos.items()]
    (root / "silos.yml").write_text(yaml.safe_dump(targets))
    for name in configuration["rule_files"]:
        text = (FOLDER / name).read_text()
        (root / name).write_text(text if name == RECORDING else quicker(text))
    (port,) = free_ports(1)
    command = [
        program,
        f"--config.file={root / 'prometheus.yml'}",
        f"--storage.tsdb.path={root / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (root / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def check() -> None:
            assert process.poll() is None, (root / "log").read_text()

        def ready() -> bool:
            with suppress(OSError):
                return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5).status == 200)
            return False

        try:
            until(ready, check, LONGEST_S)
            yield Prometheus(f"http://127.0.0.1:{port}", check)
        finally:
            process.terminate()
            process.wait(30)
