"""Commands of a soak are killed and given again until they work, and what must not run meanwhile does not."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace
from typing import Any

import pytest

from lorica.soak.commands import MOST_ROTATIONS, Commander
from lorica.soak.federation import COORDINATOR
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_security.errors import StateError
from silo_agent.edges.disk.silo_folder import SiloFolder


class Scene:
    """`told` is all that happens, in order; a command that is given again fails as often as `failures` says."""

    def __init__(self, root: Path, *, secure: bool = False) -> None:
        self.root, self.failures, self.over = root, 0, False
        self.told: list[str] = []
        self.folder = CoordinatorFolder(root / "coordinator")
        self.shape = SimpleNamespace(silos=("bank-a",), secure=secure)
        self.now = 0.0
        self.known = ["bank-a"]

    def agent(self, silo: str) -> SiloFolder:
        return SiloFolder(self.root / silo)

    def log(self, process: str) -> Path:
        return self.root / process

    def is_over(self) -> bool:
        return self.over

    @contextmanager
    def down(self, process: str) -> Iterator[None]:
        self.told.append(f"down {process}")
        yield
        self.told.append(f"up {process}")

    def begin(self, module: str, *words: str) -> Any:
        self.told.append(f"begin {words[0]}")

        def wait(timeout: float | None = None) -> int:
            if timeout is not None:
                raise TimeoutExpired(words[0], timeout)
            return -9

        return SimpleNamespace(wait=wait, kill=lambda: self.told.append("kill"))

    def run(self, module: str, *words: str, log: Path) -> str:
        self.now += 100.0
        if self.failures:
            self.failures -= 1
            raise StateError("not yet")
        self.told.append(f"run {words[0]}")
        return json.dumps({"silos": [{"silo": name} for name in self.known]}) if words[0] == "status" else "token\n"

    def commander(self) -> Commander:
        return Commander(self, random.Random(1), self.begin, self.run, lambda: self.now, lambda seconds: None)  # type: ignore[arg-type]


def test_a_command_that_was_killed_is_given_again_until_it_works(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.failures = 1
    commander = scene.commander()
    commander.give_one("gc")
    assert scene.told == ["begin gc", "kill", "run gc"]
    assert [(one.command, one.killed) for one in commander.given] == [("gc", True)]


@pytest.mark.parametrize("over", [True, False])
def test_a_command_that_never_works_ends_the_soak(tmp_path: Path, over: bool) -> None:
    scene = Scene(tmp_path)
    scene.failures, scene.over = 100, over
    with pytest.raises(StateError, match="not yet"):
        scene.commander().give_one("gc")
    assert scene.failures == (99 if over else 98)


@pytest.mark.parametrize("known", [True, False])
def test_a_revocation_that_was_done_before_the_kill_finds_nobody_and_is_done(tmp_path: Path, known: bool) -> None:
    class Refusing(Scene):
        def run(self, module: str, *words: str, log: Path) -> str:
            if words[0] == "revoke" and self.now < 1000.0:
                self.now += 100.0
                raise StateError("nobody could be revoked")
            return super().run(module, *words, log=log)

    scene = Refusing(tmp_path)
    if known:
        scene.known.append("guest")
        with pytest.raises(StateError, match="nobody could be revoked"):
            scene.commander().give_one("invite")
    else:
        scene.commander().give_one("invite")
        assert scene.told[-3:] == ["begin revoke", "kill", "run status"]


def test_restore_and_upgrade_are_given_while_the_coordinator_is_down(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    commander = scene.commander()
    commander.give_one("upgrade")
    assert scene.told == [f"down {COORDINATOR}", "begin upgrade", "kill", "run upgrade", f"up {COORDINATOR}"]
    commander.give_one("restore")
    assert scene.told[5:] == ["begin backup", "kill", "run backup"], "there was none to be restored"
    commander.give_one("restore")
    assert scene.told[8:] == [
        f"down {COORDINATOR}",
        "begin restore",
        "kill",
        "run restore",
        "run status",
        f"up {COORDINATOR}",
    ]


def test_a_rotation_is_not_given_again_the_agent_finishes_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    commander = scene.commander()
    for _ in range(MOST_ROTATIONS + 1):
        commander.give_one("identity rotate")
    assert scene.told == ["down bank-a", "begin identity", "kill", "up bank-a"] * MOST_ROTATIONS


def test_masked_soaks_have_no_guest(tmp_path: Path) -> None:
    assert "enroll" in Scene(tmp_path).commander().names
    assert "enroll" not in Scene(tmp_path, secure=True).commander().names
