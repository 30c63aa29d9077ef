"""A silo that trains in two processes takes part over mutual TLS, and sends what one process would have sent."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica_security.identifiers import SiloName
from tests.support.command_line import set_options
from tests.support.federation import Federation
from tests.support.trained_alone import bundle_at, folder_of, update_alone, vectors
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
        it.coordinator("plan", "new", "plain", "--size", "micro", *set_options(VALUES))
        it.serve("--plan", "plain")
        it.agent(SILO, "enroll", it.coordinator("invite", SILO).strip())
        (folder_of(it, SILO).root / "silo.toml").write_text('[training]\nprocesses = 2\nthreads = 1\ndevice = "cpu"\n')
        it.start_agent(SILO)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "plain")
        it.wait(it.finished)
        yield it


def test_what_it_sent_is_what_one_process_sends(federation: Federation, tmp_path: Path) -> None:
    _, (record,) = federation.view().look()
    assert record.outcome == "applied"
    (sent,) = vectors(folder_of(federation, SILO).updates, bundle_at(federation, SILO).layout.total_bytes)
    assert update_alone(federation, SILO, tmp_path).read_bytes() == sent.read_bytes()


def test_its_ranks_end_with_it_and_leave_nothing(federation: Federation) -> None:
    """Last of this module: the agent is told to stop, as a service manager does."""
    groups = list(folder_of(federation, SILO).ranks.glob("group-*"))
    assert len(groups) == 1, "one group trained, and is there for the next round"
    ranks = [process for process in psutil.process_iter() if str(groups[0]) in words_of(process)]
    assert len(ranks) == 3, "a launcher and two ranks"
    federation.processes.stop(SILO)
    until(lambda: not any(process.is_running() for process in ranks), lambda: None, 60.0)
    assert not list(folder_of(federation, SILO).ranks.glob("group-*"))


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
