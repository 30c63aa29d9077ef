"""Each alert by series that are made up: when it fires, and when it does not. What really happens is in
test_prometheus.py."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.test_alert_rules import ALERTS, FOLDER_OF_RULES, RULES
from tests.support.prometheus import promtool

WHERE = 'instance="a:1", job="lorica-coordinator"'
SILO = 'instance="b:1", job="lorica-silos", silo="clinic"'
DAY_S = 86400


@dataclass(frozen=True)
class Case:
    """`series`: values a minute apart, in promtool's notation; `fires` and `quiet`: minutes at which the alert does and
    does not."""

    alert: str
    series: dict[str, str]
    fires: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    count: int = 1
    name: str = field(default="", compare=False)


def coordinator(metric: str, **labels: str) -> str:
    return f"{metric}{{{WHERE}{''.join(f', {key}={value!r}' for key, value in labels.items())}}}".replace("'", '"')


def pair(metric: str, which: str) -> str:
    """Of one of two coordinators."""
    return f'{metric}{{instance="{which}:1", job="lorica-coordinator"}}'


def silo(metric: str, **labels: str) -> str:
    return f"{metric}{{{SILO}{''.join(f', {key}={value!r}' for key, value in labels.items())}}}".replace("'", '"')


RUNNING = {coordinator("lorica_plan_running"): "1x240"}
NO_DEADLINE = {coordinator("lorica_phase_deadline_timestamp_seconds"): "0x240"}
BEGAN = {coordinator("lorica_phase_began_timestamp_seconds"): "0x240"}


def silos(connected: str, *, enrolled: int = 3, quorum: int = 2, of: str = "all") -> dict[str, str]:
    return {
        coordinator("lorica_quorum_candidate_silos", of=of, state="connected"): connected,
        coordinator("lorica_quorum_candidate_silos", of=of, state="enrolled"): f"{enrolled}x240",
        coordinator("lorica_quorum_silos", of=of): f"{quorum}x240",
    }


def losses(first: str, last: str) -> dict[str, str]:
    return {
        coordinator("lorica_mean_training_loss", point="first"): first,
        coordinator("lorica_mean_training_loss", point="last"): last,
        coordinator("lorica_silo_training_loss", point="first", silo="clinic"): first,
        coordinator("lorica_silo_training_loss", point="last", silo="clinic"): last,
    }


def disk(free: str) -> dict[str, str]:
    return {coordinator("lorica_disk_free_bytes"): free, coordinator("lorica_disk_size_bytes"): "1000x500"}


CASES = (
    Case("LoricaRoundStuck", RUNNING | NO_DEADLINE | BEGAN, fires=("36m", "1h"), quiet=("34m",), name="no deadline"),
    Case(
        "LoricaRoundStuck",
        RUNNING | BEGAN | {coordinator("lorica_phase_deadline_timestamp_seconds"): "3600x240"},
        fires=("71m",),
        quiet=("59m", "69m"),
        name="a deadline that has passed",
    ),
    Case(
        "LoricaRoundStuck",
        {coordinator("lorica_plan_running"): "0x240"} | NO_DEADLINE | BEGAN,
        quiet=("1h",),
        name="nothing is under way",
    ),
    Case("LoricaPhaseFailing", {coordinator("lorica_phase_failing"): "0x9 1x20"}, fires=("16m",), quiet=("9m", "14m")),
    Case(
        "LoricaBucketFailing",
        {
            coordinator("lorica_bucket_failures_total", call="put"): "0x9 1x4 2x60",
            coordinator("lorica_bucket_failures_total", call="get"): "0x9 1x60",
            coordinator("lorica_bucket_failures_total", call="delete"): "0x240",
        },
        fires=("16m", "20m"),
        quiet=("9m", "12m", "40m"),
    ),
    Case(
        "LoricaRoundsAbandoned",
        {
            coordinator("lorica_abandoned_rounds_total", cause="late"): "0x9 1x9 2x9 3x100",
            coordinator("lorica_abandoned_rounds_total", cause="declined"): "0x240",
        },
        fires=("40m",),
        quiet=("20m", "2h"),
    ),
    Case(
        "LoricaRoundsAbandoned",
        {coordinator("lorica_abandoned_rounds_total", cause="late"): "5x39 _ 5x48 6x4 7x4 _ 7x200"},
        quiet=("99m", "100m", "2h20m"),
        name="two in a whole hour, scraped a little before its ends",
    ),
    Case(
        "LoricaRoundsAbandoned",
        {coordinator("lorica_abandoned_rounds_total", cause="stopped"): "0+1x100"},
        quiet=("1h",),
        name="the operator stopped them",
    ),
    Case("LoricaLossDiverging", losses("3x10", "2x4 3.1x5"), fires=("6m",), quiet=("4m",)),
    Case("LoricaSiloLossDiverging", losses("3x10", "2x2 4x3 5x4"), fires=("8m",), quiet=("2m", "5m")),
    Case(
        "LoricaSiloWeighsNothing",
        {coordinator("lorica_zero_weights_total"): "0x9 1x120"},
        fires=("12m", "1h"),
        quiet=("9m", "1h15m"),
    ),
    Case(
        "LoricaAllWeighNothing",
        {coordinator("lorica_weight_fallbacks_total"): "0x9 1x120"},
        fires=("12m",),
        quiet=("9m", "1h15m"),
        name="sizes stood in",
    ),
    Case(
        "LoricaAllWeighNothing",
        {
            coordinator("lorica_weight_fallbacks_total"): "0x129",
            coordinator("lorica_rounds_total", outcome="zero_weight"): "0x9 1x120",
        },
        fires=("12m",),
        quiet=("9m", "1h15m"),
        name="a sum without weight",
    ),
    Case(
        "LoricaAllWeighNothing",
        {
            coordinator("lorica_weight_fallbacks_total"): "3x60",
            coordinator("lorica_zero_weights_total"): "0+1x60",
            coordinator("lorica_rounds_total", outcome="applied"): "0+1x60",
        },
        quiet=("30m",),
        name="one of several",
    ),
    Case(
        "LoricaScoreFalling",
        {
            coordinator("lorica_micro_exact_match_ratio"): "0.6x60 0.2x500",
            coordinator("lorica_round"): "1x30 2x500",
        },
        fires=("62m", "3h"),
        quiet=("60m", "7h2m"),
    ),
    Case(
        "LoricaScoreFalling",
        {
            coordinator("lorica_micro_exact_match_ratio"): "0.6x60 0.2x100",
            coordinator("lorica_round"): "5x60 0x100",
        },
        quiet=("70m",),
        name="another plan begins",
    ),
    Case(
        "LoricaSiloSilent",
        {
            coordinator("lorica_enrolled_silo_last_seen_timestamp_seconds", silo="clinic"): "600x60",
            coordinator("lorica_enrolled_silo_last_seen_timestamp_seconds", silo="bank"): "0+60x60",
            coordinator("lorica_enrolled_silo_last_seen_timestamp_seconds", silo="never"): "0x60",
        },
        fires=("27m",),
        quiet=("24m",),
    ),
    Case("LoricaQuorumAtRisk", RUNNING | silos("3x9 2x100"), fires=("21m",), quiet=("9m", "18m")),
    Case("LoricaQuorumAtRisk", RUNNING | silos("3x100", quorum=3), quiet=("1h",), name="all that there are"),
    Case(
        "LoricaQuorumAtRisk",
        RUNNING | silos("1x9 0x100", enrolled=1, quorum=1, of="labelled") | silos("3x9 2x100", of="unlabelled"),
        fires=("21m",),
        quiet=("9m", "18m"),
        name="in turn, those without labels",
    ),
    Case(
        "LoricaQuorumLost",
        RUNNING | silos("1x9 0x100", enrolled=1, quorum=1, of="labelled") | silos("3x9 2x100", of="unlabelled"),
        fires=("21m",),
        quiet=("9m", "18m"),
        name="in turn, those with labels",
    ),
    Case("LoricaQuorumLost", RUNNING | silos("3x9 1x100"), fires=("21m",), quiet=("9m", "18m")),
    Case(
        "LoricaQuorumLost",
        {coordinator("lorica_plan_running"): "0x100"} | silos("1x100"),
        quiet=("1h",),
        name="nothing is under way",
    ),
    Case("LoricaCoordinatorDown", {coordinator("up"): "1x5 0x20"}, fires=("9m",), quiet=("5m", "7m")),
    Case(
        "LoricaNoLeader",
        {pair("lorica_leading", "a"): "1x5 0x20", pair("lorica_leading", "b"): "0x5 1x20"},
        quiet=("5m", "9m", "15m"),
        name="one takes over in time",
    ),
    Case(
        "LoricaNoLeader",
        {pair("lorica_leading", "a"): "1x5 0x20", pair("lorica_leading", "b"): "0x25"},
        fires=("7m", "20m"),
        quiet=("5m", "6m"),
    ),
    Case(
        "LoricaNoLeader",
        {pair("lorica_leading", "a"): "1x5 _x20", pair("lorica_leading", "b"): "0x25"},
        fires=("14m",),
        quiet=("5m", "6m"),
        name="the leader is gone",
    ),
    Case(
        "LoricaStandbyMissing",
        {pair("lorica_standby_coordinators", "a"): "1x5 0x2000"},
        fires=("11m", "1000m"),
        quiet=("5m", "10m", "1500m"),
    ),
    Case(
        "LoricaStandbyMissing",
        {pair("lorica_standby_coordinators", "a"): "1x5 _x60", pair("lorica_standby_coordinators", "b"): "_x10 0x60"},
        fires=("17m",),
        quiet=("5m", "15m"),
        name="after a take-over",
    ),
    Case(
        "LoricaStandbyMissing",
        {pair("lorica_standby_coordinators", "a"): "0x60"},
        quiet=("5m", "50m"),
        name="nobody ever stood by",
    ),
    Case("LoricaSiloAgentDown", {silo("up"): "1x5 0x40"}, fires=("22m",), quiet=("5m", "19m")),
    Case("LoricaSiloWithoutOrders", {silo("lorica_silo_connected"): "1x5 0x40"}, fires=("22m",), quiet=("5m", "19m")),
    Case(
        "LoricaRefusalsSpiking",
        {
            coordinator("lorica_errors_total", kind="AuthenticationError"): "0x9 15x60",
            coordinator("lorica_errors_total", kind="MalformedMessage"): "0x9 15x60",
            coordinator("lorica_errors_total", kind="WrongTime"): "0+100x60",
        },
        fires=("12m",),
        quiet=("9m", "40m"),
    ),
    Case(
        "LoricaSiloRefuses",
        {
            silo("lorica_silo_refusals_total", rule="one_model"): "0x9 1x60",
            silo("lorica_silo_refusals_total", rule="max_rounds"): "0x60",
        },
        fires=("12m",),
        quiet=("9m", "40m"),
    ),
    Case(
        "LoricaReleaseGroupsWait",
        {coordinator("lorica_release_groups_unsigned"): "0x9 2x100 0x20"},
        fires=("75m",),
        quiet=("9m", "60m", "112m"),
    ),
    Case(
        "LoricaSiloReleaseGroupsWait",
        {silo("lorica_silo_release_groups_wait"): "0x9 1x40 0x20"},
        fires=("30m",),
        quiet=("9m", "20m", "55m"),
    ),
    Case(
        "LoricaBudgetNearlySpent",
        {coordinator("lorica_plan_epsilon_spent"): "0 4 6.3 6.5", coordinator("lorica_plan_epsilon_allowed"): "8x4"},
        fires=("3m",),
        quiet=("2m",),
    ),
    Case(
        "LoricaBudgetNearlySpent",
        {coordinator("lorica_plan_epsilon_spent"): "0x5", coordinator("lorica_plan_epsilon_allowed"): "0x5"},
        quiet=("3m",),
        name="a plan without noise here",
    ),
    Case(
        "LoricaSiloBudgetNearlySpent",
        {silo("lorica_silo_epsilon_spent"): "0 4 6.3 6.5", silo("lorica_silo_epsilon_allowed"): "8x4"},
        fires=("3m",),
        quiet=("2m",),
    ),
    Case("LoricaDiskFilling", disk("200x10 99x60"), fires=("27m",), quiet=("10m", "24m"), name="nearly full"),
    Case("LoricaDiskFilling", disk("600-0.9x480"), fires=("7h",), quiet=("5h",), name="as it goes on"),
    Case("LoricaDiskFilling", disk("290x480"), quiet=("7h",), name="rather full and no fuller"),
    Case("LoricaDiskFull", disk("200x10 29x60"), fires=("17m",), quiet=("10m", "14m")),
    Case(
        "LoricaCoordinatorCertificateEndsSoon",
        {coordinator("lorica_certificate_expiry_timestamp_seconds"): f"{36 * 3600 + 1800}x600"},
        fires=("46m",),
        quiet=("29m", "44m"),
    ),
    Case(
        "LoricaSiloCertificateEndsSoon",
        {silo("lorica_silo_certificate_expiry_timestamp_seconds"): f"{36 * 3600 + 1800}x600"},
        fires=("46m",),
        quiet=("29m", "44m"),
    ),
    Case(
        "LoricaEnrolledSiloCertificateEndsSoon",
        {
            coordinator("lorica_enrolled_silo_certificate_expiry_timestamp_seconds", silo="clinic"): "131400x600",
            coordinator("lorica_enrolled_silo_certificate_expiry_timestamp_seconds", silo="long gone"): "-604801x600",
        },
        fires=("46m",),
        quiet=("29m", "44m"),
    ),
    Case(
        "LoricaAuthorityEndsSoon",
        {coordinator("lorica_authority_expiry_timestamp_seconds"): f"{180 * DAY_S + 600}x600"},
        fires=("72m",),
        quiet=("9m", "69m"),
    ),
)


def as_promtool_has_it(case: Case) -> dict[str, Any]:
    expr = f'count by (alertname) (ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
    firing = [{"labels": f'{{alertname="{case.alert}"}}', "value": case.count}]
    return {
        "name": f"{case.alert} {case.name}",
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": at, "exp_samples": samples}
            for times, samples in ((case.fires, firing), (case.quiet, []))
            for at in times
        ],
    }


def checked(tmp_path: Path, cases: tuple[Case, ...]) -> "subprocess.CompletedProcess[str]":
    tests = {
        "rule_files": [str(file) for file in RULES],
        "evaluation_interval": "1m",
        "tests": [as_promtool_has_it(case) for case in cases],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    return promtool("test", "rules", str(tmp_path / "tests.yml"))


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    done = checked(tmp_path, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_firing_and_quiet() -> None:
    for name in ALERTS:
        cases = [case for case in CASES if case.alert == name]
        assert any(case.fires for case in cases), name
        assert any(case.quiet for case in cases), name


@pytest.mark.parametrize(
    "wrong", [Case("LoricaPhaseFailing", {coordinator("lorica_phase_failing"): "0x20"}, fires=("16m",))]
)
def test_promtool_would_tell_of_an_alert_that_does_not_fire(tmp_path: Path, wrong: Case) -> None:
    assert checked(tmp_path, (wrong,)).returncode != 0


def test_configuration_and_rules_are_valid() -> None:
    for arguments in (
        ("check", "config", str(FOLDER_OF_RULES / "prometheus.yml")),
        ("check", "rules", *map(str, RULES)),
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
