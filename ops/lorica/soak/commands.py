"""Commands that are given at random while a plan runs, each killed at a random moment and then given again.

    operator    backup, restore of the last backup into a new folder, gc, plan start, invite, revoke, upgrade (the
                coordinator is down)
    silo        identity rotate (its agent is down: it finishes what was cut off as it starts again), enroll of a guest,
                who is revoked

None of them may change what comes of the plan. A command that is given again has to end well, or to say that it is
done.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Final, Protocol

from lorica.demo.processes import begin, run
from lorica.soak.federation import COORDINATOR, PLAN, MortalFederation
from lorica_security.errors import StateError

GUEST: Final = "guest"
MOST_LIFE_S: Final = 4.0
"""Or as long as the longest command took so far: most are killed at work, some before or after."""
INSIST_S: Final = 180.0
"""A coordinator that was killed may still be starting."""
MOST_ROTATIONS: Final = 8
"""Of each silo: a chain of keys has an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`killed`: it did not come to its end before."""

    at_s: float
    command: str
    killed: bool


class Mortal(Protocol):
    """A command under way."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


@dataclass
class Commander:
    """Gives one of them at each `give`. `federation` is the one under kills."""

    federation: MortalFederation
    draw: random.Random
    begin: Callable[..., Mortal] = begin
    run: Callable[..., str] = run
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    given: list[Given] = field(default_factory=list)
    backups: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._rotations: dict[str, int] = {}
        self._number = 0
        self._life_s = MOST_LIFE_S
        self._commands: Mapping[str, Callable[[], None]] = {
            "backup": self._backup,
            "restore": self._restore,
            "gc": lambda: self._twice("gc"),
            "plan start": lambda: self._twice("plan", "start", PLAN),
            "invite": self._invite,
            "upgrade": self._upgrade,
            "identity rotate": self._rotate,
            # Release groups are made of all who are enrolled: under masks a guest would be missed in every sum.
            **({} if self.federation.shape.secure else {"enroll": self._enrol}),
        }

    @property
    def out(self) -> Path:
        return self.federation.root / "commands"

    @property
    def names(self) -> Sequence[str]:
        return sorted(self._commands)

    def give(self) -> None:
        """One by chance; raises as `give_one`."""
        self.give_one(self.draw.choice(self.names))

    def give_one(self, name: str) -> None:
        """Raises StateError where a command that is given again does not work."""
        self._number += 1
        self._commands[name]()

    def _backup(self) -> None:
        target = self.out / f"backup-{self._number}"
        self._killed("backup", *self._operators("backup", str(target), "--plain"))
        if not target.exists():
            self._insist(*self._operators("backup", str(target), "--plain"))
        self.backups.append(target)

    def _restore(self) -> None:
        """While the coordinator is down: two of one identity would tell silos two histories."""
        if not self.backups:
            return self._backup()
        target = self.out / f"restored-{self._number}"
        words = ("lorica_coordinator.cli", "restore", str(self.backups[-1]), str(target), "--without-log")
        with self.federation.down(COORDINATOR):
            self._killed("restore", *words)
            if not target.exists():
                self._insist(*words)
            self._insist("lorica_coordinator.cli", "status", "--dir", str(target))

    def _upgrade(self) -> None:
        with self.federation.down(COORDINATOR):
            self._twice("upgrade")

    def _invite(self) -> None:
        self._twice("invite", GUEST)
        self._revoke(GUEST)

    def _rotate(self) -> None:
        silo = self.draw.choice(self.federation.shape.silos)
        if self._rotations.get(silo, 0) == MOST_ROTATIONS:
            return
        self._rotations[silo] = self._rotations.get(silo, 0) + 1
        with self.federation.down(silo):
            self._killed("identity rotate", "silo_agent.cli", "identity", "rotate", "--dir", self._folder(silo))

    def _enrol(self) -> None:
        silo = f"{GUEST}-{self._number}"
        folder = self.federation.agent(silo)
        token = self._insist(*self._operators("invite", silo)).strip()
        self._killed("enroll", "silo_agent.cli", "enroll", token, "--dir", str(folder.root))
        if not folder.enrolment.exists():
            token = self._insist(*self._operators("invite", silo)).strip()
            self._insist("silo_agent.cli", "enroll", token, "--dir", str(folder.root))
        self._revoke(silo)

    def _revoke(self, silo: str) -> None:
        """Killed, then to its end, unless it was done and the silo is known no more: an open invitation leaves no
        trace."""
        self._killed(f"revoke {silo}", *self._operators("revoke", silo))
        self._insist(*self._operators("revoke", silo), is_done=lambda: silo not in self._known())

    def _known(self) -> Sequence[str]:
        """Raises StateError where the coordinator does not answer."""
        told = self.run(*self._operators("status", "--json"), log=self.federation.log("commands"))
        return [silo["silo"] for silo in json.loads(told)["silos"]]

    def _folder(self, silo: str) -> str:
        return str(self.federation.agent(silo).root)

    def _operators(self, *words: str) -> Sequence[str]:
        return "lorica_coordinator.cli", *words, "--dir", str(self.federation.folder.root)

    def _twice(self, *words: str) -> None:
        """Killed, then to its end."""
        self._killed(" ".join(words), *self._operators(*words))
        self._insist(*self._operators(*words))

    def _killed(self, name: str, module: str, *words: str) -> None:
        self.out.mkdir(exist_ok=True)
        under_way = self.begin(module, *words)
        try:
            under_way.wait(timeout=self.draw.uniform(0.0, self._life_s))
            killed = False
        except TimeoutExpired:
            killed = True
        finally:
            under_way.kill()
        under_way.wait()
        self.given.append(Given(at_s=self.clock() - self._began, command=name, killed=killed))

    def _insist(self, module: str, *words: str, is_done: Callable[[], bool] = lambda: False) -> str:
        """What it prints once it works; nothing where it does not and `is_done`."""
        latest = self.clock() + INSIST_S
        while True:
            began = self.clock()
            try:
                printed = self.run(module, *words, log=self.federation.log("commands"))
                self._life_s = max(self._life_s, self.clock() - began)
                return printed
            except StateError:
                with suppress(StateError):
                    if is_done():
                        return ""
                if self.federation.is_over() or self.clock() > latest:
                    raise
                self.sleep(1.0)
