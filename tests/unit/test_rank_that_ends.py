"""A rank that cannot begin: what it says, to whom, and that nobody waits for it."""

import os
import socket
from pathlib import Path

import pytest

from silo_agent.edges.ranks import frames
from silo_agent.edges.ranks.rank_process import GONE, main


def ended(folder: Path) -> int:
    """The exit code of a process that is to be rank 0 there: its threads end this one otherwise."""
    child = os.fork()
    if child == 0:
        os._exit(main(str(folder), {"RANK": "0", "WORLD_SIZE": "1"}))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_machine_without_the_interface_is_named_and_not_waited_for(tmp_path: Path) -> None:
    """Only a rank there knows what its interfaces are called; gloo says that it found no address, and not where."""
    folder = tmp_path / "group"
    folder.mkdir(mode=0o700)
    start = dict.fromkeys(frames.Start.model_fields, "") | {
        "world": 1,
        "sharded": False,
        "max_bad_lines_share": 0.0,
        "tasks": [],
        "threads": 1,
        "timeout_s": 1.0,
        "base": None,
        "interface": "ib9",
    }
    frames.Start.model_validate(start).write(folder / frames.START)
    assert ended(folder) == GONE
    said = frames.Out.read(folder / "out-0-0.json")
    assert said is not None
    assert isinstance(said.out, frames.Raised)
    assert said.out.error == "ConfigurationError"
    assert f"'ib9' is no network interface of {socket.gethostname()}: give one of " in said.out.text
    assert (folder / "gone-0").exists()


def test_a_rank_that_starts_when_its_group_has_ended_says_that(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that waited for nodes may start it then."""
    assert ended(tmp_path / "group") == GONE
    (line,) = capfd.readouterr().err.splitlines()
    assert "is not there: its agent has ended these ranks" in line
