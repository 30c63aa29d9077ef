"""The Helm chart: helm renders it, Kubernetes' schemas take it, and what it starts is what the images and the programs
have."""

import json
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from lorica_coordinator.cli import app as coordinator_app
from lorica_coordinator.settings import ENROLMENT_PORT, METRICS_PORT, SILOS_PORT, settings_text
from lorica_security.daemon.metrics_port import READY
from silo_agent.cli import app as silo_app
from silo_agent.edges.accounts.shared_budget import MACHINE_WIDE
from silo_agent.edges.wire.https_proxy import ConnectProxy, proxy_for
from silo_agent.settings import Settings as SiloSettings
from tests.architecture.test_alert_rules import DASHBOARDS, RULES
from tests.support.deployment_tools import tool

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "ops" / "helm" / "lorica"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
EXAMPLES = ("coordinator", "coordinators", "silo")
KUBERNETES = ("1.29", "1.37")
each_example = pytest.mark.parametrize("example", EXAMPLES)


def helm(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([tool("helm"), *words], capture_output=True, text=True, check=False)


@cache
def rendered(example: str, *settings: str) -> str:
    values = str(CHART / "examples" / f"{example}.yaml")
    sets = [word for setting in settings for word in ("--set-json" if setting[-1] in "]}" else "--set", setting)]
    done = helm("template", "north", str(CHART), "--namespace", "lorica", "--values", values, *sets)
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifests(example: str, *settings: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(rendered(example, *settings)) if one]


def of_kind(example: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in manifests(example) if one["kind"] == kind]


def workload(example: str) -> dict[str, Any]:
    (one,) = of_kind(example, "StatefulSet") + of_kind(example, "Deployment")
    return one


def pod(example: str) -> dict[str, Any]:
    spec = workload(example)["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def containers(example: str) -> Iterator[dict[str, Any]]:
    yield from pod(example)["initContainers"]
    yield from pod(example)["containers"]


@each_example
def test_helm_finds_no_fault(example: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(CHART / "examples" / f"{example}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def taken(kubernetes: str, text: str, given: Path) -> "subprocess.CompletedProcess[str]":
    given.write_text(text)
    check = [tool("kubernetes-validate"), "--strict", "--quiet", "-k", kubernetes, given]
    return subprocess.run(check, capture_output=True, text=True, check=False)


SHARED = "silo.sharedBudget.existingClaim=hospital-budget"
RUNBOOK = "https://wiki.example.org/lorica/runbook"
AFFINITY = {
    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
}
ENVIRONMENT = [
    {"name": "TZ", "value": "UTC"},
    {"name": "SSL_CERT_DIR", "valueFrom": {"configMapKeyRef": {"name": "site", "key": "certs"}}},
]
MONITORED = ("prometheusRule.enabled=true", f"prometheusRule.runbookUrl={RUNBOOK}", "dashboards.enabled=true")
PROXY = ("silo.proxy.host=proxy.example.org", 'silo.proxy.noProxy=["example.net","10.0.0.0/8"]')
PROXY_CREDENTIALS = "silo.proxy.credentials.existingSecret=lorica-proxy"


def side(example: str) -> str:
    return "silo" if example == "silo" else "coordinator"


def placed(example: str) -> tuple[str, ...]:
    own = side(example)
    return (
        f"{own}.affinity={json.dumps(AFFINITY)}",
        f"{own}.extraEnv={json.dumps(ENVIRONMENT)}",
        f"{own}.runtimeClassName=nvidia",
        f"{own}.disruptionBudget.enabled=true",
    )


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_kubernetes_takes_every_manifest(kubernetes: str, tmp_path: Path) -> None:
    text = "\n".join(rendered(example, "serviceMonitor.enabled=false") for example in EXAMPLES)
    plain = ("serviceMonitor.enabled=false", "dashboards.enabled=true")
    text += "\n" + rendered("silo", *plain, SHARED, *PROXY, PROXY_CREDENTIALS, *placed("silo"))
    text += "\n" + rendered("coordinator", *plain, *placed("coordinator"))
    done = taken(kubernetes, text, tmp_path / "manifests.yaml")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_misspelt_key_is_not_taken(tmp_path: Path) -> None:
    text = rendered("silo", "serviceMonitor.enabled=false").replace("readOnlyRootFilesystem", "readOnlyRootFileSystem")
    assert taken(KUBERNETES[-1], text, tmp_path / "manifests.yaml").returncode != 0


SILO = ("silo.enabled=true", "silo.data.existingClaim=d", "silo.token.existingSecret=t")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "enabled"),
        (("coordinator.enabled=true",), "federation"),
        (("silo.enabled=true", "silo.data.existingClaim=data"), "existingSecret"),
        (("coordinator.enabled=true", "coordinator.federation=north", "coordinator.hosts={a}", "cordinator.x=1"), "cordinator"),
        (("silo.enabled=true", "silo.data.existingClaim=d", "silo.token.existingSecret=t", "image.tag=latest"), "tag"),
        ((*SILO, "prometheusRule.enabled=true"), "runbookUrl"),
        ((*SILO, "prometheusRule.enabled=true", "prometheusRule.runbookUrl=ops/docs/runbook.md"), "runbookUrl"),
        ((*SILO, "silo.proxy.host=http://proxy:3128"), "host"),
        ((*SILO, "silo.extraEnv[0].name=LORICA_SILO_DIR"), "extraEnv/0/name"),
        ((*SILO, "silo.disruptionBudget.maxUnavailable=2"), "maxUnavailable"),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused(settings: tuple[str, ...], said: str) -> None:
    done = helm("template", "north", str(CHART), *(word for one in settings for word in ("--set", one)))
    assert done.returncode != 0
    assert said in done.stderr


@each_example
def test_pods_are_what_kubernetes_calls_restricted_and_cannot_write_to_their_root(example: str) -> None:
    spec = pod(example)
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    said = spec["securityContext"]
    (uid,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert said["runAsNonRoot"] is True
    assert {said["runAsUser"], said["runAsGroup"], said["fsGroup"]} == {int(uid)}
    assert said["seccompProfile"] == {"type": "RuntimeDefault"}
    assert said["fsGroupChangePolicy"] == "OnRootMismatch"  # else every start loosens the modes of private keys
    assert all({"emptyDir", "secret", "configMap", "persistentVolumeClaim"} & one.keys() for one in spec["volumes"])
    for container in containers(example):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_silos_that_share_a_budget_mount_it_where_their_agents_look_and_nobody_else_does() -> None:
    assert "shared-budget" not in json.dumps(pod("silo"))
    spec = pod_with("silo", SHARED)
    (claim,) = (one for one in spec["volumes"] if one["name"] == "shared-budget")
    assert claim["persistentVolumeClaim"] == {"claimName": "hospital-budget"}
    (made,) = (one for one in spec["initContainers"] if one["name"] == "shared-budget")
    (agent,) = spec["containers"]
    (mount,) = (one for one in agent["volumeMounts"] if one["name"] == "shared-budget")
    assert mount == {"name": "shared-budget", "mountPath": str(MACHINE_WIDE), "subPath": "registry"}
    assert "mkdir --mode=0700 /shared/registry" in made["command"][-1]  # a folder that others can read is refused
    assert made["securityContext"] == agent["securityContext"]


def pod_with(example: str, *settings: str) -> dict[str, Any]:
    (one,) = (one for one in manifests(example, *settings) if one["kind"] in ("StatefulSet", "Deployment"))
    spec = one["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@each_example
def test_a_site_says_where_pods_run_and_what_is_in_their_environment(example: str) -> None:
    plain = f"{side(example)}.extraEnv=[]"
    before, spec = pod_with(example, plain), pod_with(example, *placed(example))
    assert "runtimeClassName" not in before
    assert ("affinity" in before) is (example == "coordinators")  # on two nodes, where nobody says more
    assert (spec["affinity"], spec["runtimeClassName"]) == (AFFINITY, "nvidia")
    first, *_ = spec["initContainers"]
    for container, as_before in (
        (first, before["initContainers"][0]),
        (spec["containers"][0], before["containers"][0]),
    ):
        assert container["env"] == as_before["env"] + ENVIRONMENT


@each_example
def test_a_disruption_budget_means_the_one_pod(example: str) -> None:
    assert of_kind(example, "PodDisruptionBudget") == []
    made = manifests(example, *placed(example))
    (budget,) = (one["spec"] for one in made if one["kind"] == "PodDisruptionBudget")
    (there,) = (one for one in made if one["kind"] in ("StatefulSet", "Deployment"))
    labels = there["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    assert budget["selector"]["matchLabels"]["app.kubernetes.io/component"] == labels["app.kubernetes.io/component"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (0, "AlwaysAllow")


def test_a_silo_goes_through_its_proxy_which_its_policy_lets_it_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*settings: str) -> dict[str, str]:
        env = pod_with("silo", *settings)["containers"][0]["env"]
        return {one["name"]: one.get("value") or one["valueFrom"]["secretKeyRef"]["name"] for one in env}

    assert not {"HTTPS_PROXY", "NO_PROXY"} & told().keys()
    plain, known = told(*PROXY), told(*PROXY, PROXY_CREDENTIALS)
    assert "PROXY_CREDENTIALS" not in plain
    assert known["PROXY_CREDENTIALS"] == "lorica-proxy"
    names = list(known)
    assert names.index("PROXY_CREDENTIALS") < names.index("HTTPS_PROXY")  # else Kubernetes leaves $(...) as it stands
    for name in ("https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for said, credentials in ((plain, ""), (known, "ann:secret")):
        monkeypatch.setenv("HTTPS_PROXY", said["HTTPS_PROXY"].replace("$(PROXY_CREDENTIALS)", credentials))
        monkeypatch.setenv("NO_PROXY", said["NO_PROXY"])
        assert proxy_for("coordinator.example.org") == ConnectProxy(
            host="proxy.example.org", port=3128, credentials=credentials
        )
        assert proxy_for("coordinator.example.net") is None
        assert proxy_for("10.1.2.3") is None
    (policy,) = (one for one in manifests("silo", *PROXY) if one["kind"] == "NetworkPolicy")
    assert 3128 in {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}


def test_the_alerts_are_those_of_the_repository_and_lead_to_the_sites_runbook() -> None:
    assert of_kind("coordinator", "PrometheusRule") == []
    (made,) = (one for one in manifests("coordinator", *MONITORED) if one["kind"] == "PrometheusRule")
    wanted = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    for group in wanted:
        for rule in group["rules"]:
            if "alert" in rule:
                url = f"{RUNBOOK}#{rule['alert'].lower()}"
                rule["annotations"]["runbook_url"] = url
    assert made["spec"]["groups"] == wanted


def test_the_dashboards_are_those_of_the_repository() -> None:
    assert [one for one in of_kind("coordinator", "ConfigMap") if one["metadata"]["name"] == "north-dashboards"] == []
    (made,) = (one for one in manifests("coordinator", *MONITORED) if one["metadata"]["name"] == "north-dashboards")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    texts = {f"lorica-{file.name}": json.loads(file.read_text()) for file in DASHBOARDS}
    assert {name: json.loads(text) for name, text in made["data"].items()} == texts


def test_a_packaged_chart_has_the_alerts_and_the_dashboards(tmp_path: Path) -> None:
    """They are links in the repository."""
    assert helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("lorica-*.tgz")
    with tarfile.open(package) as archive:
        names = set(archive.getnames())
    assert {f"lorica/prometheus/{file.name}" for file in RULES} <= names
    assert {f"lorica/dashboards/{file.name}" for file in DASHBOARDS} <= names


@pytest.mark.parametrize(("name", "label"), [("", "north"), ("hospital-a", "hospital-a")])
def test_a_silos_metrics_have_its_name_as_dashboards_ask_for_it(name: str, label: str) -> None:
    (monitor,) = (one for one in manifests("silo", f"silo.name={name}") if one["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    told = {one["targetLabel"]: one["replacement"] for one in endpoint["relabelings"]}
    assert told == {"job": "lorica-silos", "silo": label}


@each_example
def test_secrets_are_named_and_never_given(example: str) -> None:
    assert of_kind(example, "Secret") == []
    for container in containers(example):
        told = {one["name"]: one.get("value") for one in container["env"]}
        assert all("secretKeyRef" in one["valueFrom"] for one in container["env"] if "value" not in one)
        passphrase = str(told["LORICA_KEY_PASSPHRASE_FILE"])
        mounted = {one["mountPath"]: one.get("readOnly") for one in container["volumeMounts"]}
        assert mounted[str(Path(passphrase).parent)] is True
    modes = {one["name"]: one["secret"]["defaultMode"] for one in pod(example)["volumes"] if "secret" in one}
    assert set(modes.values()) == {0o440}  # what lorica_security.host.files takes of root


@each_example
def test_probes_are_the_images_own_health_check_and_the_state_is_its_volume(example: str) -> None:
    target = "silo-agent" if example == "silo" else "coordinator"
    stage = DOCKERFILE.partition(f"AS {target}\n")[2].partition("\nFROM ")[0]
    (check,) = re.findall(r"CMD (\[\"sh\".*?\])\n", stage)
    (container,) = pod(example)["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["exec"]["command"] == json.loads(check)
    (volume,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {"name": "state", "mountPath": volume} in container["volumeMounts"]
    environment = dict(re.findall(r"^ENV (LORICA_\w+)=(\S+)$", stage, re.MULTILINE))
    assert environment.items() <= {one["name"]: one.get("value") for one in container["env"]}.items()


@each_example
def test_policies_services_and_monitors_mean_the_pods_that_there_are(example: str) -> None:
    labels = workload(example)["spec"]["template"]["metadata"]["labels"]
    services = of_kind(example, "Service")
    selectors = [one["spec"]["selector"] for one in services]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(example, "NetworkPolicy")]
    assert len(selectors) >= 2
    assert all(selector.items() <= labels.items() for selector in selectors)
    (container,) = pod(example)["containers"]
    ports = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
    for service in services:
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        assert "metrics" not in [port["name"] for port in service["spec"]["ports"]] or service["spec"]["clusterIP"] == "None"  # fmt: skip
    (monitor,) = of_kind(example, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    scraped = [one for one in services if wanted.items() <= one["metadata"]["labels"].items()]
    assert any(port["name"] == "metrics" for one in scraped for port in one["spec"]["ports"])


def test_the_coordinator_opens_no_connection_and_its_metrics_are_for_the_monitoring() -> None:
    (policy,) = of_kind("coordinator", "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []
    silos, monitoring = policy["spec"]["ingress"]
    assert {port["port"] for port in silos["ports"]} == {"silos", "enrolment"}
    assert [port["port"] for port in monitoring["ports"]] == ["metrics"]
    assert monitoring["from"]
    ports = {one["name"]: one["containerPort"] for one in pod("coordinator")["containers"][0]["ports"]}
    assert ports == {"silos": SILOS_PORT, "enrolment": ENROLMENT_PORT, "metrics": METRICS_PORT}
    alone = manifests("coordinator", "networkPolicy.monitoring=null")
    (policy,) = [one for one in alone if one["kind"] == "NetworkPolicy"]
    assert len(policy["spec"]["ingress"]) == 1


def test_a_silo_opens_the_coordinators_ports_and_what_is_asked_for() -> None:
    (policy,) = of_kind("silo", "NetworkPolicy")
    opened = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert opened == {SILOS_PORT, ENROLMENT_PORT, 53, 5432}
    assert [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]] == ["metrics"]
    assert workload("silo")["spec"]["strategy"] == {"type": "Recreate"}
    data = {one["name"]: one for one in pod("silo")["volumes"]}["data"]
    assert data["persistentVolumeClaim"]["readOnly"] is True


def test_a_silos_settings_are_settings() -> None:
    (given,) = of_kind("silo", "ConfigMap")
    settings = SiloSettings.model_validate(tomllib.loads(given["data"]["silo.toml"]))
    assert settings.policy.approved_plans == "ask"
    assert settings.metrics.listen == "0.0.0.0:9465"


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example != "coordinators"])
def test_the_commands_and_their_options_exist(example: str) -> None:
    app: Any = typer.main.get_command(coordinator_app if example == "coordinator" else silo_app)
    (first,), (container,) = pod(example)["initContainers"], pod(example)["containers"]
    program = "coordinator" if example == "coordinator" else "silo-agent"
    (command,) = re.findall(rf"exec {program} (\w+)", first["command"][2])
    for name, words in ((command, first["command"]), (container["args"][0], container["args"])):
        known = {option for item in app.commands[name].params for option in item.opts}
        assert {word for word in words if word.startswith("--")} <= known


FOLDER = "coordinator.folder.existingSecret=f"
WITH_FOLDER = ("coordinator.enabled=true", FOLDER)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("coordinator.replicas=2", "coordinator.federation=north", "coordinator.hosts={a}"), "replicas"),
        (("coordinator.attemptKeys.existingClaim=k", "coordinator.federation=n", "coordinator.hosts={a}"), "attemptKeys"),
        (("coordinator.files.existingSecret=k", "coordinator.federation=n", "coordinator.hosts={a}"), "files"),
        ((FOLDER, "coordinator.replicas=3"), "replicas"),
        ((FOLDER, "coordinator.federation=north"), "federation"),
        ((FOLDER, "coordinator.hosts={a}"), "hosts"),
    ],
)  # fmt: skip
def test_a_state_outside_and_a_volume_are_not_mixed(settings: tuple[str, ...], said: str) -> None:
    words = (word for one in ("coordinator.enabled=true", *settings) for word in ("--set", one))
    done = helm("template", "north", str(CHART), *words)
    assert done.returncode != 0
    assert f"/coordinator/{said}" in done.stderr


def test_a_coordinator_is_ready_by_what_says_whether_it_leads() -> None:
    """Also where no helm is."""
    template = (CHART / "templates" / "coordinator.yaml").read_text(encoding="utf-8")
    (probe,) = re.findall(r"readinessProbe:\n +httpGet: (.*)\n", template)
    assert yaml.safe_load(probe) == {"path": READY, "port": "metrics"}


def test_two_coordinators_have_no_volume_and_an_update_does_not_wait_for_the_one_that_stands_by() -> None:
    made = workload("coordinators")
    assert (made["kind"], made["spec"]["replicas"]) == ("Deployment", 2)
    assert made["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": "100%", "maxSurge": 0}
    assert "volumeClaimTemplates" not in made["spec"]
    volumes = {one["name"]: one for one in pod("coordinators")["volumes"]}
    assert "emptyDir" in volumes["state"]
    (claim,) = (one for one in volumes.values() if "persistentVolumeClaim" in one)
    assert claim["persistentVolumeClaim"] == {"claimName": "lorica-attempt-keys"}
    (container,) = pod("coordinators")["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": READY, "port": "metrics"}  # who stands by says no there
    (policy,) = of_kind("coordinators", "NetworkPolicy")
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53, 5432, 443}
    spare = {one["name"] for one in pod_with("coordinators", "coordinator.attemptKeys.existingClaim=")["volumes"]}
    assert spare == volumes.keys() - {claim["name"]}


@pytest.mark.parametrize(
    ("listen", "fits"),
    [("0.0.0.0:9464", True), ("[::]:9464", True), ("127.0.0.1:9464", False), ("0.0.0.0:9465", False)],
)
def test_a_folder_whose_metrics_the_probe_does_not_reach_is_refused_by_name(
    tmp_path: Path, listen: str, fits: bool
) -> None:
    (tmp_path / "given").mkdir()
    text = settings_text("north", ["localhost"]).replace('metrics = "127.0.0.1:9464"', f'metrics = "{listen}"')
    (tmp_path / "given" / "federation.toml").write_text(text)
    script = pod("coordinators")["initContainers"][0]["command"][2]
    for at in ("/etc/lorica/files", "/var/lib/lorica", "/attempt-keys"):
        script = script.replace(at, str(tmp_path / at[1:]))
    (tmp_path / "etc/lorica/files").mkdir(parents=True)
    (tmp_path / "etc/lorica/files/passfile").write_text("*")
    script = script.replace("/etc/lorica/folder", str(tmp_path / "given"))
    done = subprocess.run(["sh", "-c", script], check=False, capture_output=True, text=True)
    assert (done.returncode == 0) is fits, done.stderr
    assert ('set metrics = "0.0.0.0:9464"' in done.stderr) is not fits
    assert (tmp_path / "var/lib/lorica/federation/federation.toml").exists() is fits


def test_the_folder_of_a_secret_comes_out_whole_private_and_once(tmp_path: Path) -> None:
    """The script itself, with its paths moved under `tmp_path`."""
    given, state, files, attempt_keys = (tmp_path / name for name in ("given", "lib", "files", "attempt-keys"))
    for folder in (given, state, files, attempt_keys):
        folder.mkdir()
    settings = f'# metrics\nmetrics = "0.0.0.0:{METRICS_PORT}"\n'
    for name, text in (("federation.toml", settings), ("ca.key", "1"), ("identity.key", "2")):
        (given / name).write_text(text)
    (given / "..data").mkdir()  # as Kubernetes lays secrets out
    (files / "passfile").write_text("*")
    for one in (*given.iterdir(), *files.iterdir()):
        one.chmod(0o750 if one.is_dir() else 0o440)
    first, *_ = pod("coordinators")["initContainers"]
    script = first["command"][2]
    for at, moved in (
        ("/etc/lorica/folder", given),
        ("/etc/lorica/files", files),
        ("/var/lib/lorica", state),
        ("/attempt-keys", attempt_keys),
    ):
        script = script.replace(at, str(moved))

    def run() -> None:
        assert subprocess.run(["sh", "-c", script], check=False).returncode == 0

    run()
    made = state / "federation"
    assert {path.name for path in (made / "keys").iterdir()} == {"ca.key", "identity.key"}
    written = (*made.rglob("*"), *(state / "files").iterdir(), attempt_keys / "keys")
    assert not [path for path in written if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)]
    assert (made / "federation.toml").read_text() == settings
    (made / "keys" / "ca.key").write_text("renewed")
    run()
    assert (made / "keys" / "ca.key").read_text() == "renewed"
    (made / "federation.toml").unlink()  # a kill before it: begun anew
    run()
    assert (made / "keys" / "ca.key").read_text() == "1"
