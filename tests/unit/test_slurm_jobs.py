"""Jobs of Slurm for ranks, without a Slurm: an srun and a scancel that write down what they were told."""

import os
from pathlib import Path

import pytest

from silo_agent.edges.ranks import slurm_jobs
from silo_agent.edges.ranks.rank_group import GroupLost
from tests.support.rank_silo import RankSilo


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What both were told."""
    programs, told = tmp_path / "bin", tmp_path / "told"
    programs.mkdir()
    for name, words in (("srun", "named $SLURM_JOB_NAME"), ("scancel", "ended $*")):
        (programs / name).write_text(f'#!/bin/sh\necho "{words}" >> {told}\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return told


def started(root: Path, launch: list[str]) -> None:
    """A group whose launcher ends at once."""
    silo = RankSilo(root, 2, own={"launch": launch})
    trainer = silo.trainer()
    trainer._own.prepare(silo.bundle, None)
    with pytest.raises(GroupLost):
        trainer._group_of(silo.bundle)
    assert not list(silo.ranks.glob("group-*"))


@pytest.mark.parametrize("launch", [["srun", "-n2"], ["/bin/sh", "-c", 'exec srun -n2 "$@"', "sh"]])
def test_a_group_ends_the_job_that_its_srun_was_to_name(launch: list[str], tmp_path: Path, told: Path) -> None:
    started(tmp_path / "silo", launch)
    named, ended = told.read_text().splitlines()
    job = named.removeprefix("named ")
    assert job.startswith("lorica-group-")
    assert ended == f"ended --quiet --name {job}"


def test_what_an_agent_left_is_ended_by_its_name(tmp_path: Path, told: Path) -> None:
    (tmp_path / "silo" / "ranks" / "group-left").mkdir(parents=True, mode=0o700)
    (tmp_path / "silo" / "ranks").chmod(0o700)
    started(tmp_path / "silo", ["srun"])
    assert told.read_text().splitlines()[0] == "ended --quiet --name lorica-group-left"


def test_slurm_is_not_asked_where_it_starts_nothing(tmp_path: Path, told: Path) -> None:
    started(tmp_path / "silo", ["/bin/false"])
    assert not told.exists()


def test_a_slurm_that_is_not_there_or_hangs_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    slurm_jobs.cancel_of(tmp_path)
    (tmp_path / "scancel").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setattr(slurm_jobs, "ANSWER_S", 0.05)
    slurm_jobs.cancel_of(tmp_path)
