"""Ranks that a real srun starts: the bytes of one process, and no job left when nobody is there to end it."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from silo_agent.edges.ranks.rank_group import GroupLost
from silo_agent.settings import Settings
from tests.support.rank_silo import RankSilo, require_nothing_left
from tests.support.slurm import jobs, running_slurm
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 60.0
BY_SRUN = {"launch": ["srun", "--ntasks={processes}"]}
NO_RANKS = {"launch": ["srun", "--ntasks={processes}", "/bin/sh", "-c", "sleep 600", "sh"]}
"""What srun starts never says that it is a rank: a job that runs, or waits for nodes, when its srun is killed."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    with running_slurm() as config:
        yield config


@pytest.fixture(autouse=True)
def conf(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("srun")


def lost(silo: RankSilo) -> None:
    trainer = silo.trainer()
    trainer._own.prepare(silo.bundle, None)
    with pytest.raises(GroupLost):
        trainer._group_of(silo.bundle)


def sruns(agent: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(agent).children() if child.name() == "srun"]


def kill_sessions(agent: int) -> None:
    """srun, and the process that it has to end its job when it is killed itself."""
    for srun in sruns(agent):
        os.killpg(srun.pid, signal.SIGKILL)


def test_ranks_of_srun_write_the_bytes_of_one_process_and_leave_no_job(root: Path, slurm: Path) -> None:
    one, two = RankSilo(root), RankSilo(root, 2, own=BY_SRUN)
    own = one.workshop()
    own.prepare(one.bundle, None)
    one.train(own)
    trainer = two.trainer()
    try:
        trainer.prepare(two.bundle, None)
        (group,) = two.ranks.glob("group-*")
        assert jobs(slurm) == [f"lorica-{group.name} R"]
        two.train(trainer)
    finally:
        trainer.close()
    assert two.update.read_bytes() == one.update.read_bytes()
    until(lambda: not jobs(slurm), lambda: None, WAIT_S)
    require_nothing_left(root)


def test_an_srun_that_is_killed_with_all_its_processes_leaves_no_job(root: Path, slurm: Path) -> None:
    silo = RankSilo(root, 2, own=NO_RANKS)
    agent = threading.Thread(target=lost, args=(silo,))
    agent.start()
    until(lambda: any(job.endswith(" R") for job in jobs(slurm)), lambda: None, WAIT_S)
    kill_sessions(os.getpid())
    agent.join(WAIT_S)
    assert not agent.is_alive()
    until(lambda: not jobs(slurm), lambda: None, WAIT_S)
    require_nothing_left(root)


def test_the_next_agent_ends_the_job_of_one_that_was_killed_with_its_srun(root: Path, slurm: Path) -> None:
    silo = RankSilo(root, 2, own=NO_RANKS)
    agent = os.fork()
    if agent == 0:
        lost(silo)
        os._exit(1)
    until(lambda: any(job.endswith(" R") for job in jobs(slurm)), lambda: None, WAIT_S)
    os.kill(agent, signal.SIGSTOP)  # it is to see nothing of its srun's end
    kill_sessions(agent)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert jobs(slurm), "Slurm itself goes on with it"
    silo.settings = Settings.model_validate(
        {"data": silo.settings.data, "training": {"processes": 2, "launch": ["/bin/false", "srun"]}}
    )
    lost(silo)
    until(lambda: not jobs(slurm), lambda: None, WAIT_S)
    require_nothing_left(root)
