"""ops/compose: it is what the Compose Specification says, as tight as its comments say, and fits the images, the
settings and the monitoring."""

import re
import shlex
import subprocess
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from lorica.cli import app as lorica_app
from lorica_coordinator.cli import main as coordinator
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.settings import METRICS_PORT
from lorica_coordinator.settings import Settings as CoordinatorSettings
from lorica_security.daemon.listen_address import address as parsed_address
from silo_agent.cli import app as silo_app
from silo_agent.settings import Settings as SiloSettings
from tests.support.command_line import run_command
from tests.support.deployment_tools import tool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ops" / "compose"
FILE = FOLDER / "compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
SILOS = ("hospital", "bank", "insurer")
MADE_BY_PEOPLE = ("./data/", "./secrets/")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PAGE = (ROOT / "ops" / "docs" / "deployment.md").read_text(encoding="utf-8")


STANDBY: dict[str, Any] = yaml.safe_load((FOLDER / "standby.yml").read_text(encoding="utf-8"))
INIT = r"coordinator init /var/lib/lorica/federation (.+)"


def networks(service: str) -> set[str]:
    return set(SERVICES[service].get("networks", ()))


def address(service: str, network: str) -> str:
    given = SERVICES[service]["networks"][network]["ipv4_address"]
    assert isinstance(given, str)
    return given


def mounts(service: str) -> list[tuple[str, str, bool]]:
    """(source, target, whether it can be written to)"""
    parts = [volume.split(":") for volume in SERVICES[service].get("volumes", ())]
    return [(part[0], part[1], part[2:] != ["ro"]) for part in parts]


def test_it_follows_the_compose_specification(tmp_path: Path) -> None:
    check = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, FILE, FOLDER / "standby.yml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yml"
    wrong.write_text(FILE.read_text().replace("cap_drop: [ALL]", "cap_drops: [ALL]"))
    assert subprocess.run([*check, wrong], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_confined(service: str) -> None:
    said = SERVICES[service]
    assert said["read_only"] is True
    assert said["cap_drop"] == ["ALL"]
    assert said["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "pid", "ipc", "userns_mode", "devices", "cap_add", "env_file"} & said.keys()
    assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+", said["image"])
    assert not any("docker.sock" in volume for volume in said.get("volumes", ()))


def test_silos_reach_the_coordinator_and_nobody_else() -> None:
    for one, other in combinations(SILOS, 2):
        assert networks(one).isdisjoint(networks(other))
    for silo in SILOS:
        assert networks(silo) & networks("coordinator") == {silo}
        assert networks(silo) & networks("prometheus") == {f"watch-{silo}"}
        assert networks(silo).isdisjoint(networks("grafana"))
        assert "ports" not in SERVICES[silo]


def test_one_network_leads_out_and_ports_are_published_on_loopback() -> None:
    open_ones = {name: said for name, said in COMPOSE["networks"].items() if not said.get("internal")}
    assert open_ones.keys() == {"front", "page"}
    assert open_ones["page"]["driver_opts"] == {"com.docker.network.bridge.enable_ip_masquerade": "false"}
    assert [name for name in SERVICES if "front" in networks(name)] == ["grafana"]
    assert [name for name in SERVICES if "page" in networks(name)] == ["coordinator"]
    published = [port for said in SERVICES.values() for port in said.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_what_is_mounted_is_there_and_read_only_but_for_state() -> None:
    for service in SERVICES:
        for source, target, written in mounts(service):
            if not source.startswith("."):
                assert source in COMPOSE["volumes"], source
            elif service != "demo-data":
                assert not written, target
                assert source.startswith(MADE_BY_PEOPLE) or (FOLDER / source).exists(), source


def test_the_images_are_those_of_the_dockerfile_with_their_state_in_a_volume() -> None:
    (state,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for service in ("coordinator", *SILOS):
        build = SERVICES[service]["build"]
        assert build["target"] in targets
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert (service, state, True) in mounts(service)
        assert "HEALTHCHECK" in DOCKERFILE.partition(f"AS {build['target']}\n")[2]


def test_a_browser_reaches_the_status_page_that_init_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    words, _ = re.findall(INIT, PAGE)
    done = run_command(coordinator, "init", tmp_path / "federation", *words.split(), "--no-plan")
    assert done.code == 0, done.err
    listen = CoordinatorSettings.read(tmp_path / "federation" / "federation.toml").listen
    at = parsed_address(listen.status)
    assert at.host == address("coordinator", "page")
    assert f"127.0.0.1:{at.port}:{at.port}" in SERVICES["coordinator"]["ports"]
    assert f"<https://127.0.0.1:{at.port}/>" in PAGE
    secret = Path(listen.status_token_file)
    assert str(secret.parent) == "/run/secrets"
    assert secret.name in SERVICES["coordinator"]["secrets"]
    assert COMPOSE["secrets"][secret.name] == {"file": f"./secrets/{secret.name}"}
    made = re.findall(r"openssl rand -hex 32 \| sudo install -m 0400 -o 10001 /dev/stdin (\S+)", PAGE)
    assert made == [f"secrets/{secret.name}"]


def test_each_has_a_passphrase_of_its_own_as_a_file() -> None:
    for service in ("coordinator", *SILOS):
        secret, *others = SERVICES[service]["secrets"]
        assert others == (["status-token"] if service == "coordinator" else [])
        assert SERVICES[service]["environment"]["LORICA_KEY_PASSPHRASE_FILE"] == f"/run/secrets/{secret}"
        assert COMPOSE["secrets"][secret]["file"] == f"./secrets/{secret}"
        assert secret == f"{service}-passphrase"
    ignored = (FOLDER / ".gitignore").read_text().split()
    assert {"/secrets/", "/data/"} <= set(ignored)
    assert "ops/compose" in (ROOT / ".dockerignore").read_text().split()


def test_metrics_are_served_to_the_monitoring_alone_and_scraped_where_they_are() -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"] for job in scraped["scrape_configs"]}
    assert targets["lorica-coordinator"] == [{"targets": [f"{address('coordinator', 'watch')}:{METRICS_PORT}"]}]
    listening = {}
    for silo in SILOS:
        settings = SiloSettings.model_validate(tomllib.loads((FOLDER / "silos" / f"{silo}.toml").read_text()))
        assert settings.metrics.listen.startswith(f"{address(silo, f'watch-{silo}')}:")
        listening[silo] = [settings.metrics.listen]
    assert {one["labels"]["silo"]: one["targets"] for one in targets["lorica-silos"]} == listening
    assert f"--metrics-host {address('coordinator', 'watch')}" in PAGE


def test_prometheus_takes_the_rules_of_the_repository() -> None:
    (mounted,) = [target for source, target, _ in mounts("prometheus") if source == "../prometheus"]
    ours = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert ours["rule_files"] == [f"{mounted}/*.rules.yml"]
    local = yaml.safe_load((ROOT / "ops" / "prometheus" / "prometheus.yml").read_text())
    assert all(name.endswith(".rules.yml") for name in local["rule_files"])
    names = {job["job_name"] for job in local["scrape_configs"]}
    assert names <= {job["job_name"] for job in ours["scrape_configs"]}
    assert ours["global"] == local["global"]


def test_grafana_is_given_what_its_provisioning_asks_for() -> None:
    provisioning = ROOT / "ops" / "grafana" / "provisioning"
    asked = {name for file in provisioning.rglob("*.yml") for name in re.findall(r"\$\{?([A-Z_]+)", file.read_text())}
    environment = SERVICES["grafana"]["environment"]
    assert asked <= environment.keys()
    assert any(target == environment["LORICA_DASHBOARDS"] for _, target, _ in mounts("grafana"))
    assert environment["PROMETHEUS_URL"].removeprefix("http://") in str(SERVICES["prometheus"]["command"])


def test_the_commands_exist() -> None:
    silo: Any = typer.main.get_command(silo_app)
    for name in SILOS:
        command, *rest = SERVICES[name]["command"]
        known = {option for item in silo.commands[command].params for option in item.opts}
        assert {word for word in rest if word.startswith("--")} <= known
    lorica: Any = typer.main.get_command(lorica_app)
    command, *_ = SERVICES["demo-data"]["command"]
    assert command in lorica.commands


def test_each_image_of_ours_has_the_program_that_it_starts() -> None:
    """The wheel of a side is made without the commands of the others."""
    scripts = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
    stages = {stage.split(maxsplit=3)[2]: stage for stage in re.split(r"(?m)^FROM ", DOCKERFILE)[1:]}
    ours = {name: one["build"]["target"] for name, one in SERVICES.items() if "build" in one}
    assert {name for name, one in SERVICES.items() if one["image"].startswith("lorica/")} == ours.keys()
    for name, target in ours.items():
        assert "entrypoint" not in SERVICES[name], "the image's own"
        (program,) = re.findall(r'ENTRYPOINT \["(.+)"\]', stages[target])
        (taken_away,) = re.findall(r"/\^\((.+)\) = \"/d", stages[f"build-{target}"]) or [""]
        assert program == {"coordinator": "coordinator", "demo-data": "lorica"}.get(name, "silo-agent")
        assert program in scripts - set(taken_away.split("|"))


def test_the_standby_is_a_second_coordinator_as_confined_as_the_first() -> None:
    first, second, database = (
        SERVICES["coordinator"],
        *(STANDBY["services"][n] for n in ("coordinator-2", "database")),
    )
    assert STANDBY["x-hardened"] == COMPOSE["x-hardened"]
    for said in (second, database):
        assert STANDBY["x-hardened"].items() <= said.items()
        assert not {"privileged", "pid", "ipc", "userns_mode", "devices", "cap_add", "env_file"} & said.keys()
    assert (second["image"], second["build"], second["environment"]) == (
        first["image"], first["build"], first["environment"]
    )  # fmt: skip
    added = STANDBY["services"]["coordinator"]
    assert set(second["secrets"]) == {*first["secrets"], *added["secrets"]}
    assert set(second["volumes"]) == {*first["volumes"], *added["volumes"]}
    assert second["networks"].keys() == first["networks"].keys()
    for silo in SILOS:
        assert second["networks"][silo] == {"aliases": ["coordinator"]}  # what invitations name
    assert database["network_mode"] == "none"
    assert database["command"] == ["postgres", "-c", "listen_addresses="]
    assert all(port.startswith("127.0.0.1:") for port in second["ports"])
    assert not set(second["ports"]) & {port for said in SERVICES.values() for port in said.get("ports", ())}
    assert STANDBY["volumes"].keys().isdisjoint(COMPOSE["volumes"])


def test_the_standby_listens_and_reads_where_init_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    _, words = re.findall(INIT, PAGE)
    done = run_command(coordinator, "init", tmp_path / "federation", *shlex.split(words), "--no-plan")
    assert done.code == 0, done.err
    settings = CoordinatorSettings.read(tmp_path / "federation" / "federation.toml")
    metrics, page = parsed_address(settings.listen.metrics), parsed_address(settings.listen.status)
    services, taken = STANDBY["services"], set()
    for name, networks_of in (("coordinator", SERVICES["coordinator"]), ("coordinator-2", services["coordinator-2"])):
        own = dict(one.split(":") for one in services[name]["extra_hosts"])
        wanted = {metrics.host: "watch", page.host: "page"}
        assert own == {host: networks_of["networks"][at]["ipv4_address"] for host, at in wanted.items()}
        taken |= set(own.values())
        assert any(port.endswith(f":{page.port}") for port in [*networks_of["ports"]])
    assert len(taken) == 4
    place = DatabasePlace.parse(settings.storage.database, tmp_path / "federation" / "federation.toml")
    assert f"database-socket:{place.host}:ro" in services["coordinator-2"]["volumes"]
    passfile = Path(place.parameters["passfile"])
    assert (str(passfile.parent), passfile.name in services["coordinator"]["secrets"]) == ("/run/secrets", True)
    database = services["database"]["environment"]
    assert (database["POSTGRES_USER"], database["POSTGRES_DB"]) == (place.url.username, place.url.database)
    for secret in STANDBY["secrets"]:
        assert f"secrets/{secret}" in PAGE


def test_prometheus_asks_both_coordinators_by_names_that_their_metrics_answer_to() -> None:
    _, words = re.findall(INIT, PAGE)
    base, ours = (yaml.safe_load((FOLDER / f"prometheus{of}.yml").read_text()) for of in ("", "-standby"))
    (own,) = (job for job in ours["scrape_configs"] if job["job_name"] == "lorica-coordinator")
    (targets,) = (one["targets"] for one in own["static_configs"])
    assert targets == [f"{name}:{METRICS_PORT}" for name in ("coordinator", "coordinator-2")]
    hosts = re.findall(r"--host (\S+)", words)
    assert {target.partition(":")[0] for target in targets} <= set(hosts)
    assert hosts[0] == "coordinator"
    assert [job for job in ours["scrape_configs"] if job != own] == base["scrape_configs"][1:]
    assert {**ours, "scrape_configs": 0} == {**base, "scrape_configs": 0}
    (mounted,) = STANDBY["services"]["prometheus"]["volumes"]
    assert mounted.split(":")[1] in {target for _, target, _ in mounts("prometheus")}
