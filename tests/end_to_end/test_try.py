"""`lorica try`, as somebody types it who has just installed it: the page that it opens answers, each command that it
prints works, and Ctrl-C leaves nothing behind. Here with labels at half of the silos, as `make demo LABELS=half`."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from lorica.demo import guide
from lorica.demo.half_labels import BRANCHES, LABELLED
from lorica.demo.observer import FederationView
from lorica.demo.processes import environment
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_security.errors import Conflict, exit_code
from tests.support.background import in_the_background
from tests.support.waiting import until

LONGEST_S = 600.0
NOTHING_TO_RUN = 7
"""Exit code of `silo-agent ask` where the model, after one round, writes what is no SQL."""
SHORT = ("schedule.rounds=2", "evaluation.every=0", "training.max_output_tokens=16")
MODULES = {"coordinator": "lorica_coordinator.cli", "silo-agent": "silo_agent.cli", "lorica": "lorica.cli"}
PLACEHOLDERS = ("data of your own", "two hosts")
AGAIN = ("the same under masks", "the same under differential privacy")
"""What takes as long as the whole again; tests of the demo run it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Tried:
    place: Path
    process: subprocess.Popen[bytes]

    @property
    def said(self) -> str:
        return (self.place / "log").read_text(encoding="utf-8")

    def check(self) -> None:
        assert self.process.poll() is None, self.said

    def until_it_says(self, words: str) -> None:
        until(lambda: words in self.said, self.check, LONGEST_S)

    @property
    def steps(self) -> dict[str, str]:
        """Command by purpose."""
        lines = self.said.split("\nnext:\n")[1].splitlines()
        indented = [line for line in lines if line.startswith("  ")]
        return {
            purpose.strip(" :"): command.strip() for purpose, command in zip(indented[::2], indented[1::2], strict=True)
        }


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    """In a folder of its own, with a browser that notes what it was given and whether that answered."""
    place = tmp_path_factory.mktemp("try")
    browser = place / "browser"
    browser.write_text(
        f"#!{sys.executable}\nimport sys, urllib.request\n"
        f"with urllib.request.urlopen(sys.argv[1]) as page:\n"
        f"    open({str(place / 'opened')!r}, 'w').write(f'{{page.status}} {{sys.argv[1]}}\\n')\n"
    )
    browser.chmod(0o700)
    values = [argument for value in SHORT for argument in ("--set", value)]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            in_the_background(sys.executable, "-m", "lorica.cli", "try", "--labels", "half", "--stay", *values),
            cwd=place,
            env=environment(BROWSER=str(browser)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    it = Tried(place, process)
    try:
        it.until_it_says("Ctrl-C stops them")
        yield it
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LONGEST_S)


def test_it_opens_the_page_of_the_federation_that_runs(tried: Tried) -> None:
    told = re.search(r"its status page, while it runs: (\S+)", tried.said)
    assert told
    assert (tried.place / "opened").read_text(encoding="utf-8") == f"200 {told[1]}\n"
    with urlopen(told[1]) as page:  # still: coordinator and agents go on
        assert page.status == 200


def test_a_federation_that_is_at_work_is_not_replaced(tried: Tried) -> None:
    """By whoever types the same once more, in another terminal."""
    words = [sys.executable, "-m", "lorica.cli", "try", "--no-page", "--no-stay"]
    done = subprocess.run(words, cwd=tried.place, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == exit_code(Conflict(""))
    assert re.search(r"another demo .* works on", done.stderr)
    assert "Traceback" not in done.stderr
    tried.check()


def test_silos_without_labels_have_none_and_take_their_turn(tried: Tried) -> None:
    """And the same plan without them is beside it, of as many rounds on labels."""
    out = tried.place / "lorica-try"
    for branch in BRANCHES:
        texts = [file.read_text(encoding="utf-8") for file in (out / "silos" / branch).glob("*.jsonl")]
        assert texts
        assert not any('"query"' in text for text in texts)
    folder = Coordinator.load(CoordinatorFolder(out / "coordinator"))
    _, records = FederationView(folder.operator_access()).look()
    took_part = [{it.silo for it in record.silos if it.outcome == "committed"} for record in records if record.round]
    assert took_part == [set(LABELLED), set(BRANCHES)]
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["silos"]) == set(summary["without_branches"]) == {*LABELLED, *BRANCHES}
    without = [json.loads(line) for line in (out / "without-branches" / "run" / "rounds.jsonl").open(encoding="utf-8")]
    assert max(row["round"] for row in without) == 1
    assert "learn from a teacher" in tried.said


def test_each_command_that_it_prints_works(tried: Tried) -> None:
    """In the folder where it was typed, one after the other; the last one trains by another plan."""
    steps = {purpose: command for purpose, command in tried.steps.items() if purpose not in (*PLACEHOLDERS, *AGAIN)}
    assert len(steps) == 6
    watch = steps.pop("watch the federation")
    said = {}
    for purpose, command in steps.items():
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tried.place,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, NOTHING_TO_RUN if purpose == "ask the model" else 0), f"{command}: {done.stderr}"
        said[purpose] = done.stdout
    assert "applied" in said["see each round"]
    assert "bank" in said["see what left that silo"]
    assert "plan mine" in said["train by a plan of your own"]
    view = FederationView(
        Coordinator.load(CoordinatorFolder(tried.place / "lorica-try" / "coordinator")).operator_access()
    )
    until(lambda: "training" in {silo.state for silo in view.look()[0].silos}, tried.check, LONGEST_S)
    with subprocess.Popen(
        shlex.split(watch), cwd=tried.place, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as watching:
        assert watching.stdout is not None
        try:
            assert b" of 4, " in watching.stdout.readline(), "rounds of the new plan"
        finally:
            watching.kill()


def test_the_commands_of_what_comes_next_exist(tried: Tried) -> None:
    """With each option that is printed."""
    commands = [
        shlex.split(command) for purpose in (*PLACEHOLDERS, *AGAIN) for command in tried.steps[purpose].split(", then ")
    ]
    for program, command in {(Path(words[0]).name, words[1]) for words in commands}:
        words = [sys.executable, "-m", MODULES[program], command, "--help"]
        told = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True).stdout
        of_it = [words for words in commands if (Path(words[0]).name, words[1]) == (program, command)]
        options = {word for words in of_it for word in words if word.startswith("--")}
        assert [option for option in options if option not in told] == []


def test_ctrl_c_ends_all_of_it(tried: Tried) -> None:
    """The last test of this module."""
    here = psutil.Process(tried.process.pid).children(recursive=True)
    assert len(here) == 5
    tried.process.send_signal(signal.SIGINT)
    assert tried.process.wait(LONGEST_S) == 0
    assert not [one for one in here if one.is_running()]
    assert not [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(tried.place) in word for word in process.info["cmdline"] or ()) and process.pid != os.getpid()
    ]


@pytest.mark.parametrize(
    ("environment", "platform", "shows"),
    [
        ({}, "linux", False),  # Python would draw a page by w3m, over what the terminal shows
        ({"DISPLAY": ""}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"BROWSER": "firefox"}, "linux", True),
        ({}, "darwin", True),
    ],
)
def test_a_page_is_opened_where_there_is_a_screen(environment: dict[str, str], platform: str, *, shows: bool) -> None:
    assert guide.can_show_pages(environment, platform) is shows
