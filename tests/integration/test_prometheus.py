"""A real Prometheus scrapes a federation that runs: every panel has data, and every alert but four fires when its
fault is caused.

The alerts are those of ops/prometheus, QUICKER times shorter (tests/support/prometheus.py); thresholds are as they are.
What is caused is real: rounds, private rounds, a learning rate far too high, a damaged file, a full disk, calls that
are refused, certificates of one day, processes that are killed. promtool alone (test_alert_rules_in_promtool.py) shows
LoricaScoreFalling, which needs a model that has learnt something, and LoricaAuthorityEndsSoon: an authority that is
near its end has a successor long before; and those of coordinators that stand by, whose state is in PostgreSQL. The
panels of GPUs and of coordinators stay empty without these.
"""

import asyncio
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from lorica.demo.plan import set_arguments
from lorica.demo.ports import free_ports
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica_security.errors import AuthenticationError
from lorica_security.host import files
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials
from silo_agent.edges.wire.channel import mutual_channel
from silo_wire.v1 import operator_pb2, operator_pb2_grpc
from tests.architecture.test_alert_rules import ALERTS, DASHBOARDS
from tests.support.federation import Federation
from tests.support.prometheus import LONGEST_S, Prometheus, found, prometheus
from tests.support.warm_processes import WarmProcesses

SILOS = HOSPITAL, BANK, INSURER = "hospital", "bank", "insurer"
LATE = "late"
"""Is enrolled at the end of the day, and never there."""
RECORDS = 32
EPSILON = 8.0
CALLS = 25
DISK_BYTES = 16 << 20
PLAIN = {
    "schedule.rounds": 2,
    "schedule.min_silos": 2,
    "schedule.start_when_ready": "true",
    "schedule.gathering_deadline_s": 3.0,
    "aggregation.server_optimizer": "sgd",
    "aggregation.momentum": 0.0,
    "training.epochs": 1,
    "training.dropout": 0.0,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 48,
    "training.max_output_tokens": 24,
    "evaluation.max_examples": 4,
    "evaluation.initial": "false",
}
UNSCORED = {"schedule.rounds": 1, "evaluation.every": 0, "evaluation.last": "false"}
MASKED = {
    "schedule.rounds": 1,
    "schedule.min_silos": 3,
    "aggregation.secure_aggregation": "true",
    "aggregation.max_weight": 100.0,
    "aggregation.max_delta_norm": 0.5,
    "training.learning_rate": 1e-4,
}
NOISED = {
    **UNSCORED,
    "privacy.level": "silo",
    "privacy.target_epsilon": EPSILON,
    "privacy.max_noise_to_signal": 1e6,
    "aggregation.max_weight": 100.0,
    "aggregation.max_delta_norm": 0.5,
}
PRIVATE = {
    **UNSCORED,
    "privacy.level": "record",
    "privacy.target_epsilon": EPSILON,
    "privacy.nominal_records": RECORDS,
    "privacy.expected_batch_size": 8,
    "privacy.steps": 2,
    "aggregation.max_delta_norm": 0.0,
    "aggregation.weighting": "equal",  # not by loss reductions, whose noise now and then leaves both silos at 0
}
DIVERGING = {**UNSCORED, "training.learning_rate": 3.0, "training.batch_size": 16}
ONE_DIVERGES = {**UNSCORED, f"training.overrides.{BANK}.learning_rate": 3.0, "training.batch_size": 16}
HOPELESS = {**UNSCORED, "training.epochs": 1000, "training.batch_size": 1, "schedule.training_deadline_s": 1.0}
"""32,000 steps, some hundreds of attempts: each goes on where the one before was."""

NEEDS_A_GPU = {"federation: Memory of GPUs", "silo: Memory of GPUs"}
NEEDS_POSTGRESQL = {"federation: Coordinators"}
NOISE_AT_THE_COORDINATOR = {"security: Epsilon of the plan, share spent"}
NOISE_AT_SILOS = {"security: Epsilon of silos that let it be seen, share spent"}
SUMMED_UNDER_MASKS = {"security: Execution accuracy, summed under masks"}
OF_SINGLE_SILOS = {
    "federation: Score per silo: $score",
    "federation: Share of the weighted mean",
    "federation: Loss reduction per silo",
    "federation: Training loss, mean of silos",
    "silo: Examples",
    "silo: Weight",
    "silo: Share",
    "silo: Training loss",
    "silo: Scores of the global model here",
    "silo: Loss reduction and norm of the delta",
}
NOT_CAUSED = {
    "LoricaScoreFalling",
    "LoricaAuthorityEndsSoon",
    "LoricaNoLeader",
    "LoricaStandbyMissing",
    "LoricaBucketFailing",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def panels() -> dict[str, list[str]]:
    """The queries of each panel, as Grafana would send them."""
    found: dict[str, list[str]] = {}
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            if panel["type"] == "row":
                continue
            name = f"{file.stem}: {panel['title']}"
            name = f"{name} (agent)" if name in found else name
            exprs = [target["expr"] for target in panel["targets"]]
            found[name] = [it.replace("$silo", HOSPITAL).replace("$__rate_interval", "5s") for it in exprs]
    return found


PANELS = panels()


def with_data(watching: Prometheus, among: set[str]) -> set[str]:
    """The panels of which every query gives at least one number."""
    return {
        name
        for name in among
        if all(any(math.isfinite(value) for _, value in watching.query(expr)) for expr in PANELS[name])
    }


@dataclass
class Watched:
    """A federation under the eyes of Prometheus, and what was seen."""

    federation: Federation
    watching: Prometheus
    fired: set[str] = field(default_factory=set)
    shown: dict[str, set[str]] = field(default_factory=dict)
    of_silos: dict[str, list[str]] = field(default_factory=dict)

    def wait(self, reached: Callable[[], bool]) -> None:
        self.watching.wait(reached, check=self.federation.processes.check)

    def fires(self, *alerts: str, of: Callable[[], Any], silo: str = "") -> None:
        """Cause the fault, and see that the alerts fire, of `silo` if one is given, which did not before."""

        def firing() -> set[str]:
            found = self.watching.firing().items()
            return {name for name, each in found if any(silo in ("", labels.get("silo")) for labels in each)}

        before = firing() & set(alerts)
        assert not before, f"{before} fire before there is a reason"
        of()
        seen: set[str] = set()

        def all_were_seen() -> bool:
            seen.update(firing())  # one may be over before another begins
            return seen >= set(alerts)

        try:
            self.wait(all_were_seen)
        except AssertionError as error:
            raise AssertionError(f"{sorted(set(alerts) - seen)} do not fire") from error
        self.fired |= set(alerts)

    def start(self, plan: str, values: dict[str, Any]) -> None:
        seed = str(len(self.shown) + len(self.fired))  # no plan begins with the model of another
        self.federation.coordinator(
            "plan", "new", plan, "--size", "micro", "--seed", seed, *set_arguments(PLAIN | values)
        )
        self.federation.coordinator("plan", "start", plan)

    def finish(self) -> None:
        self.wait(self.federation.finished)

    def see(self, moment: str, wanted: set[str]) -> None:
        """Wait until these panels have data; keep which have, and the series about single silos."""
        seen = set[str]()
        try:
            self.wait(lambda: wanted <= with_data(self.watching, wanted))
            seen = wanted  # one scrape that comes late, and a second look would miss them
        finally:
            self.shown[moment] = seen | with_data(self.watching, set(PANELS))
        names = "|".join(
            (
                "lorica_silo_(weight|weight_share_ratio|loss_reduction|examples|delta_norm|training_loss)",
                ".*match_ratio",
            )
        )
        seen = self.watching.query(f'{{__name__=~"{names}", silo!=""}}')
        self.of_silos[moment] = sorted({labels["__name__"] for labels, _ in seen})


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount the small disk that this fills")
    found("prometheus")
    root = tmp_path_factory.mktemp("watched")
    (root / "logs").mkdir()
    with ExitStack() as here:
        processes = here.enter_context(WarmProcesses(root / "logs"))
        it = Federation(root, processes, {silo: root / "data" / silo for silo in SILOS})
        it.init("--no-plan")
        shorten_certificates(it.folder / "federation.toml")
        small_disk(here, root / "agents" / INSURER)
        with suppress(
            AuthenticationError
        ):  # it may be asked with the operator's certificate of seven days, just before it makes one of one
            it.serve("--plan", "")
        it.view().wait_until_serving(processes.check, LONGEST_S)
        listening = {silo: f"127.0.0.1:{port}" for silo, port in zip(SILOS, free_ports(len(SILOS)), strict=True)}
        for number, silo in enumerate(SILOS):
            log = query_log(CLINIC, records=RECORDS, seed=number).log
            write_silo(it.data[silo], CLINIC, seed=number, splits=log)
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            budget = 1.0 if silo == BANK else 10.0  # the plan costs 9.06 of it
            settings = f'[metrics]\nlisten = "{listening[silo]}"\n[policy]\nmax_epsilon = {budget}\ntrust_on_first_use = true\n'
            (root / "agents" / silo / "silo.toml").write_text(settings)
            it.start_agent(silo)
        coordinator = f"127.0.0.1:{it.ports[2]}"
        watching = here.enter_context(prometheus(root / "prometheus", coordinator=coordinator, silos=listening))
        watched = Watched(it, watching)
        watched.wait(lambda: watching.healthy() == {coordinator, *listening.values()})
        go_through_a_day(watched)
        yield watched


def shorten_certificates(settings: Path) -> None:
    """To one day: less than the 36 hours before which they should have been renewed."""
    text, count = re.subn(r"^((?:silo|own)_lifetime_days) = .*$", r"\1 = 1", settings.read_text(), flags=re.MULTILINE)
    assert count == 2
    settings.write_text(text)


def small_disk(here: ExitStack, at: Path) -> None:
    at.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", at], check=True)
    here.callback(subprocess.run, ["umount", "--lazy", at], check=True)


def go_through_a_day(it: Watched) -> None:
    federation, processes = it.federation, it.federation.processes
    certificates = {name for name in ALERTS if "CertificateEnds" in name}
    it.wait(lambda: certificates <= it.watching.firing().keys())
    it.fired |= certificates

    it.start("plain", {})
    it.finish()
    it.see(
        "plain",
        set(PANELS) - NEEDS_A_GPU - NEEDS_POSTGRESQL - NOISE_AT_THE_COORDINATOR - NOISE_AT_SILOS - SUMMED_UNDER_MASKS,
    )

    it.start("masked", MASKED)
    it.finish()
    it.see("masked", SUMMED_UNDER_MASKS)

    it.fires("LoricaRefusalsSpiking", of=lambda: asyncio.run(refused_calls(federation.root / "agents" / HOSPITAL)))
    filler = federation.root / "agents" / INSURER / "filler"
    it.fires("LoricaDiskFilling", "LoricaDiskFull", of=lambda: fill(filler), silo=INSURER)
    filler.unlink()

    secret = federation.folder / "state" / "privacy" / "root"
    files.make_private_folder(secret.parent)
    files.write_private(secret, b"cut off")
    it.fires("LoricaPhaseFailing", of=lambda: it.start("noised", NOISED))
    secret.unlink()
    it.fires("LoricaBudgetNearlySpent", of=it.finish)
    it.see("noised", NOISE_AT_THE_COORDINATOR)

    it.fires("LoricaSiloRefuses", "LoricaSiloBudgetNearlySpent", of=lambda: it.start("private", PRIVATE))
    it.finish()
    it.see("private", NOISE_AT_SILOS)

    risen = "LoricaLossDiverging", "LoricaSiloLossDiverging", "LoricaAllWeighNothing"
    it.fires(*risen, of=lambda: it.start("diverging", DIVERGING))
    it.finish()
    it.fires("LoricaSiloWeighsNothing", of=lambda: it.start("one-diverges", ONE_DIVERGES))
    it.finish()

    it.fires("LoricaRoundsAbandoned", of=lambda: it.start("hopeless", HOPELESS))
    it.fires("LoricaSiloSilent", "LoricaQuorumAtRisk", "LoricaSiloAgentDown", of=lambda: processes.kill(BANK))
    federation.agent(LATE, "enroll", federation.coordinator("invite", LATE).strip())
    it.fires(
        "LoricaReleaseGroupsWait",
        "LoricaSiloReleaseGroupsWait",
        of=lambda: federation.coordinator("groups", "propose", ",".join((*SILOS, LATE))),
    )
    it.fires("LoricaQuorumLost", "LoricaRoundStuck", of=lambda: processes.kill(INSURER))
    it.fires("LoricaCoordinatorDown", "LoricaSiloWithoutOrders", of=lambda: processes.kill("coordinator"))


def fill(filler: Path) -> None:
    """Leave less than 3 percent of the small disk."""
    free = os.statvfs(filler.parent)
    filler.write_bytes(bytes(free.f_bavail * free.f_frsize - DISK_BYTES // 50))


async def refused_calls(agent: Path) -> None:
    """A silo asks for what is the operator's."""
    async with mutual_channel(load_credentials(SiloFolder(agent))) as channel:
        stub: Any = operator_pb2_grpc.OperatorStub(channel)
        for _ in range(CALLS):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetStatus(operator_pb2.GetStatusRequest())


@pytest.mark.parametrize("panel", sorted(set(PANELS) - NEEDS_A_GPU - NEEDS_POSTGRESQL))
def test_every_panel_has_data(watched: Watched, panel: str) -> None:
    assert panel in set().union(*watched.shown.values())


def test_most_panels_have_data_after_the_first_plan(watched: Watched) -> None:
    empty = NEEDS_A_GPU | NEEDS_POSTGRESQL | NOISE_AT_THE_COORDINATOR | NOISE_AT_SILOS | SUMMED_UNDER_MASKS
    assert set(PANELS) - watched.shown["plain"] == empty
    assert set(PANELS) >= OF_SINGLE_SILOS


@pytest.mark.parametrize("moment", ["masked", "noised", "private"])
def test_nothing_of_single_silos_is_scraped_of_a_masked_or_private_plan(watched: Watched, moment: str) -> None:
    assert watched.of_silos["plain"]
    assert watched.of_silos[moment] == []
    assert not watched.shown[moment] & OF_SINGLE_SILOS


@pytest.mark.parametrize("alert", sorted(ALERTS.keys() - NOT_CAUSED))
def test_every_alert_fires_when_its_fault_is_caused(watched: Watched, alert: str) -> None:
    assert alert in watched.fired


def test_every_rule_was_evaluated_without_an_error(watched: Watched) -> None:
    rules = watched.watching.rules()
    assert {rule["name"] for rule in rules} >= ALERTS.keys()
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] != "ok"] == []
