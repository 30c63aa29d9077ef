"""A masked round over mutual TLS of three silos: one process, two ranks that hold the whole model each, and two that
hold parts of it, of which one hangs. The model is the one that silos of one process make.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from lorica.demo.plan import set_arguments
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica_security.identifiers import SiloName
from silo_agent.edges.ranks import frames
from silo_wire.canonical import Digest
from tests.support.coordinator_edges import Workplace, content_of
from tests.support.federation import Federation
from tests.support.json_logs import logged
from tests.support.trained_alone import bundle_at, first_model, folder_of, update_alone, vectors
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

SHARDED, WHOLE = SiloName(CLINIC.name), SiloName(INSURER.name)
TIMEOUT_S = 20
OF_ALL = '[policy]\ntrust_on_first_use = true\n[training]\nthreads = 1\ndevice = "cpu"\n'
TRAINING = {
    SHARDED: f"processes = 2\nsharded = true\nrank_timeout_s = {TIMEOUT_S}\n",
    WHOLE: "processes = 2\n",
}
VALUES = {
    "schedule.rounds": 1,
    "schedule.min_silos": 3,
    "aggregation.secure_aggregation": "true",
    "aggregation.weighting": "equal",
    "aggregation.momentum": 0.0,
    "aggregation.max_weight": 1.0,
    "training.optimizer": "adamw",
    "training.epochs": 2,
    "training.batch_size": 4,
    "training.gradient_accumulation": 2,
    "training.dropout": 0.0,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 32,
    "training.max_output_tokens": 32,
    "evaluation.initial": "false",
    "evaluation.last": "false",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """After its round, before which rank 1 of the sharded silo was stopped: it does not hear that it is called."""
    root = tmp_path_factory.mktemp("ranks")
    data = {}
    for silo in (CLINIC, INSURER, HOSPITAL):
        data[silo.name] = root / "data" / silo.name
        write_silo(data[silo.name], silo, seed=3, splits=query_log(silo, records=36, seed=3).log)
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init("--no-plan")
        it.coordinator("plan", "new", "covered", "--size", "micro", *set_arguments(VALUES))
        it.serve("--plan", "covered")
        for name in data:
            folder = it.root / "agents" / name
            folder.mkdir(mode=0o700, parents=True)
            (folder / "silo.toml").write_text(OF_ALL + TRAINING.get(SiloName(name), ""))
            it.agent(name, "enroll", it.coordinator("invite", name).strip())
            it.start_agent(name)
        it.wait(it.all_ready)
        (group,) = folder_of(it, SHARDED).ranks.glob("group-*")
        (hello,) = (it for it in map(frames.Hello.read, group.glob("hello-1.json")) if it is not None)
        os.kill(hello.pid, signal.SIGSTOP)
        it.coordinator("plan", "start", "covered")
        it.wait(it.finished)
        assert not psutil.pid_exists(hello.pid)
        yield it


def numbers(path: Path) -> NDArray[np.float32]:
    return np.frombuffer(path.read_bytes(), dtype="<f4")


def test_a_rank_that_hangs_is_ended_and_the_round_goes_on(federation: Federation) -> None:
    _, (record,) = federation.view().look()
    assert (record.round, record.attempt, record.outcome) == (1, 1, "applied")
    assert {silo.silo for silo in record.silos} == set(federation.data)
    lines = logged(federation.root / "logs" / f"{SHARDED}.log", "ranks-started-again")
    assert len(lines) == 1


def test_the_model_is_that_of_silos_of_one_process(federation: Federation, tmp_path: Path) -> None:
    """But for the gradients of shards, which are added in another order, and by which AdamW's first steps go."""
    _, (record,) = federation.view().look()
    place = Workplace.at(federation.folder / "state", bundle_at(federation, SHARDED))
    made = np.frombuffer(content_of(place.models.vector(Digest(record.model_digest.hex()))), dtype="<f4")
    sent = {silo: numbers(sent_by(federation, silo)) for silo in federation.data}
    alone = {silo: numbers(update_alone(federation, SiloName(silo), tmp_path)) for silo in federation.data}
    for silo in set(federation.data) - {SHARDED}:
        assert (sent[silo] == alone[silo]).all()
    assert np.linalg.norm(sent[SHARDED] - alone[SHARDED]) < 1e-5 * np.linalg.norm(alone[SHARDED])
    mean = np.mean([update.astype(np.float64) for update in sent.values()], axis=0)
    assert np.linalg.norm(made - numbers(first_model(federation, SHARDED)) - mean) < 1e-5 * np.linalg.norm(mean)


def sent_by(it: Federation, silo: str) -> Path:
    (sent,) = vectors(folder_of(it, SiloName(silo)).updates, bundle_at(it, SiloName(silo)).layout.total_bytes)
    return sent


def test_ranks_end_with_their_agent_and_leave_nothing(federation: Federation) -> None:
    """Last of this module: the agents are told to stop, as a service manager does."""
    for silo in (WHOLE, SHARDED):
        groups = list(folder_of(federation, silo).ranks.glob("group-*"))
        assert len(groups) == 1, "one group trained, and is there for the next round"
        ranks = [process for process in psutil.process_iter() if str(groups[0]) in words_of(process)]
        assert len(ranks) == 3, "a launcher and two ranks"
        federation.processes.stop(silo)
        until(lambda ranks=ranks: not any(process.is_running() for process in ranks), lambda: None, 60.0)
        assert not list(folder_of(federation, silo).ranks.glob("group-*"))


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
