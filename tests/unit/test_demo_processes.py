"""How the demo's children end: all at once, none of them left, also where they are slow or somebody is impatient."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lorica.demo import processes
from lorica.demo.processes import Processes, in_parallel, run
from lorica_security.errors import StateError
from tests.support.waiting import until

CHILD = """
import os, signal, sys, time
from pathlib import Path

what, name, others = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
told = name.with_suffix(".told")

def end(number, frame):
    told.touch()
    if what == "impatient":
        os.kill(os.getppid(), signal.SIGINT)  # as a second Ctrl-C
    if what == "asks":
        sys.exit(name.with_suffix(".told") != Path(others[0]) and Path(others[0]).exists())
    while what != "together" or not all(Path(other).exists() for other in others):
        time.sleep(0.01)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
name.with_suffix(".ready").touch()
while True:
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """It is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that ends together with the others, after a second Ctrl-C, or never."""
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "a_child"


def started(here: Processes, tmp_path: Path, child: str, what: str, names: list[str]) -> list[psutil.Process]:
    for name in names:
        here.start(name, child, [what, str(tmp_path / name), *(str(tmp_path / f"{other}.told") for other in names)])
    until(lambda: all((tmp_path / f"{name}.ready").exists() for name in names), here.check, 120.0)
    return [psutil.Process(here.pid(name)) for name in names]


def test_all_children_are_told_before_any_is_waited_for(tmp_path: Path, child: str) -> None:
    """Each of them ends only once every other has been told as well."""
    names = ["a", "b", "c"]
    with Processes(tmp_path) as here:
        started(here, tmp_path, child, "together", names)
        children = [here._entry(name)[1] for name in names]
    assert [one.returncode for one in children] == [0, 0, 0]


def test_whom_the_others_talk_to_is_stopped_after_them(tmp_path: Path, child: str) -> None:
    with Processes(tmp_path, last="served") as here:
        for name in ("served", "a"):
            here.start(name, child, ["asks", str(tmp_path / name), str(tmp_path / "served.told")])
        until(lambda: all((tmp_path / f"{name}.ready").exists() for name in ("served", "a")), here.check, 120.0)
        children = [here._entry(name)[1] for name in ("served", "a")]
    assert [one.returncode for one in children] == [0, 0], "the one was not told while the other was there"


def test_a_second_ctrl_c_leaves_no_child(tmp_path: Path, child: str) -> None:
    running: list[psutil.Process] = []

    def stopped() -> None:
        with Processes(tmp_path) as here:
            running.extend(started(here, tmp_path, child, "impatient", ["a", "b"]))

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not [one for one in running if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_child_that_does_not_end_is_killed(tmp_path: Path, child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    with Processes(tmp_path) as here:
        started(here, tmp_path, child, "stubborn", ["a"])
        one = here._entry("a")[1]
    assert one.returncode == -signal.SIGKILL


def test_an_interruption_ends_commands_in_parallel_and_begins_no_other(tmp_path: Path, child: str) -> None:
    """Ctrl-C is heard by the main thread alone, which waits for those that wait for the commands."""
    ended: list[str] = []

    def work(name: str) -> None:
        with pytest.raises(StateError) as caught:
            run(child, "stubborn", str(tmp_path / name))
        ended.append(str(caught.value))

    def interrupt() -> None:
        until(lambda: all((tmp_path / f"{name}.ready").exists() for name in ("a", "b")), lambda: None, 120.0)
        os.kill(os.getpid(), signal.SIGINT)

    somebody = threading.Thread(target=interrupt)
    somebody.start()
    with pytest.raises(KeyboardInterrupt):
        in_parallel(work, ["a", "b", "c", "d"])
    somebody.join()
    assert [f"exit code {-signal.SIGKILL}" in one for one in ended] == [True, True]
    assert sorted(path.name for path in tmp_path.glob("*.ready")) == ["a.ready", "b.ready"]


def test_commands_in_parallel_give_their_results_in_order() -> None:
    assert in_parallel(lambda number: subprocess.run(["true"]).returncode + number, range(5)) == list(range(5))
