"""A silo that trains in two processes takes part over mutual TLS, and sends what one process would have sent."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica_security.identifiers import SiloName
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.own_entropy import own_entropy
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.ports import RoundModel
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey
from tests.support.federation import Federation
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

SILO = SiloName("clinic")
VALUES = {
    "schedule.rounds": 1,
    "schedule.min_silos": 1,
    "training.epochs": 1,
    "training.batch_size": 8,
    "training.gradient_accumulation": 2,
    "training.dropout": 0.0,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 32,
    "training.max_output_tokens": 32,
    "evaluation.initial": "false",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A plan of one round, which one silo of two ranks has trained."""
    root = tmp_path_factory.mktemp("ranks")
    data = {SILO: root / "data" / SILO}
    write_silo(data[SILO], CLINIC, seed=3, splits=query_log(CLINIC, records=40, seed=3).log)
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init("--no-plan")
        values = [argument for key, value in VALUES.items() for argument in ("--set", f"{key}={value}")]
        it.coordinator("plan", "new", "plain", "--size", "micro", *values)
        it.serve("--plan", "plain")
        it.agent(SILO, "enroll", it.coordinator("invite", SILO).strip())
        (folder(it).root / "silo.toml").write_text('[training]\nprocesses = 2\nthreads = 1\ndevice = "cpu"\n')
        it.start_agent(SILO)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "plain")
        it.wait(it.finished)
        yield it


def folder(it: Federation) -> SiloFolder:
    return SiloFolder(it.root / "agents" / SILO)


def test_what_it_sent_is_what_one_process_sends(federation: Federation, tmp_path: Path) -> None:
    _, (record,) = federation.view().look()
    assert record.outcome == "applied"
    kept = folder(federation)
    status, _ = federation.view().look()
    bundle = PlanStore(kept.plans).load(Digest(status.plan_digest.hex()))
    assert bundle is not None
    size = bundle.layout.total_bytes
    (sent,) = (path for path in kept.updates.iterdir() if path.stat().st_size == size)
    settings = Settings.model_validate(
        {"data": {"folder": str(federation.data[SILO])}, "training": {"device": "cpu", "threads": 1}}
    )
    one = Workshop(
        settings=settings,
        policy=SiloPolicy(rules=settings.policy, silo=SILO),
        sources=SiloSources(settings, tmp_path / "scratch"),
        own_entropy=own_entropy(kept.own_entropy),
    )
    one.prepare(bundle, None)
    models = {manifest_of(bundle.layout, [path.read_bytes()]).digest: path for path in vectors(kept.models, size)}
    begun = bundle.plan.model.initial
    one.train(
        bundle=bundle,
        key=RoundKey(federation=bundle.plan.federation, plan=bundle.plan.digest, round=1, attempt=1),
        model=RoundModel(file=models[begun], manifest=manifest_of(bundle.layout, [models[begun].read_bytes()])),
        update_file=tmp_path / "update",
        included_update=None,
        told_before=None,
        checkpoint_file=tmp_path / "checkpoint",
        progress=lambda fraction: None,
        notice=lambda event, detail: None,
        cancelled=lambda: False,
    )
    assert (tmp_path / "update").read_bytes() == sent.read_bytes()


def vectors(models: Path, size: int) -> list[Path]:
    return [path for path in models.rglob("*") if path.is_file() and path.stat().st_size == size]


def test_its_ranks_end_with_it_and_leave_nothing(federation: Federation) -> None:
    """Last of this module: the agent is told to stop, as a service manager does."""
    groups = list(folder(federation).ranks.glob("group-*"))
    assert len(groups) == 1, "one group trained, and is there for the next round"
    ranks = [process for process in psutil.process_iter() if str(groups[0]) in words_of(process)]
    assert len(ranks) == 3, "a launcher and two ranks"
    federation.processes.stop(SILO)
    until(lambda: not any(process.is_running() for process in ranks), lambda: None, 60.0)
    assert not list(folder(federation).ranks.glob("group-*"))


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
