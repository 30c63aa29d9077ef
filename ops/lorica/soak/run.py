"""`lorica soak`: a plan to its end while a process or a command chosen at random is killed every few seconds, then what
changed by that.

    undisturbed run -> the same plan again, with kill -9 of any process, or of a command beside them, and the same
    command again -> compare -> the first backup that was made meanwhile is restored, and goes on to the end of the plan

The seed is printed: it fixes who is killed after which wait, though not what that process is doing at that moment.
"""

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorica.demo.processes import Processes, run
from lorica.soak.commands import Commander, Given
from lorica.soak.comparison import differences
from lorica.soak.federation import COORDINATOR, PLAN, MortalFederation, Place, Shape
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, IntegrityError, StateError
from lorica_security.host import files
from lorica_security.secure_aggregation.parameters import LEAST_COHORT

MARKER = ".lorica-soak"
MOST_WAIT_S = 5.0
LOOK_S = 0.1
LONGEST_S = 6 * 3600.0
COMMANDS = 0.4
"""Share of turns at which a command is given and killed, in place of a process."""
LINES = 32
_PRIVATE: Mapping[str, object] = {
    "privacy.level": "record",
    "privacy.expected_batch_size": 8,
    "privacy.steps": 2,
    "privacy.loss_bound": 4.0,
    "privacy.nominal_records": LINES,
    "privacy.target_epsilon": 50.0,
    "aggregation.max_weight": 4.0 * LINES,
    "aggregation.momentum": 0.0,
    "training.epochs": 1,
    "training.dropout": 0.0,
    "training.max_grad_norm": 0.5,
    "evaluation.every": 0,
    "evaluation.initial": "false",
    "evaluation.last": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Killing:
    """`at_s` after the start of the run; `place` is where the plan stood, by the coordinator's log."""

    at_s: float
    process: str
    place: Place


def run_soak(
    out: Path, *, seed: int, rounds: int, silos: int, secure: bool = False, private: bool = False, console: Console
) -> None:
    """Raises IntegrityError when a kill changed anything but the time, StateError when a process ends by itself.

    `secure`: under secure aggregation, `private`: under record-level differential privacy. Masks and noise are drawn
    anew in each run, so that numbers are not compared.
    """
    if secure and private:
        raise ConfigurationError("a soak is either --secure or --private: leave one out")
    out = out.resolve()
    _prepare(out)
    again = f"make soak SEED={seed}{' SECURE=1' if secure else ''}{' PRIVATE=1' if private else ''}"
    console.print(f"soak: {rounds} rounds, {silos} silos, seed {seed}; {again} kills in the same order")
    undisturbed, disturbed = out / "undisturbed", out / "disturbed"
    for folder in (undisturbed, disturbed):
        (folder / "logs").mkdir(parents=True)
    with Processes(undisturbed / "logs") as first, Processes(disturbed / "logs") as second:
        calm = MortalFederation(undisturbed, _shape(rounds, silos, secure=secure, private=private), first)
        calm.set_up()
        killed = calm.copy(disturbed, second)
        with console.status("the undisturbed run"):
            calm_s = _run(calm)
        expected = calm.result()
        console.print(f"undisturbed: {calm_s:.0f} s, final model {expected.model}")
        draw = random.Random(seed)
        commander = Commander(killed, draw)
        killer = Killer(killed, draw, commander)
        with console.status("the run under kills"):
            killed_s = _run(killed, killer.look)
        actual = killed.result()
        if commander.backups and not secure:
            with console.status("the first backup, to the end of the plan"):
                _go_on_from(commander.backups[0], killed)
            console.print("the first backup was restored, and went on to the end of the plan")
    _show(console, killer.killings)
    _show_commands(console, commander.given)
    of_coordinator = sum(killing.process == COORDINATOR for killing in killer.killings)
    console.print(
        f"under kills: {killed_s:.0f} s, {len(killer.killings)} kills ({of_coordinator} of the coordinator), "
        f"final model {actual.model}"
    )
    if found := differences(expected, actual, drawn_anew=secure or private):
        raise IntegrityError(
            f"the kills of seed {seed} changed the outcome, everything is in {out}: {'; '.join(found)}"
        )
    journals = [killed.agent(silo).masking / "attempt" for silo in killed.shape.silos]
    if left := [journal for journal in journals if journal.exists()]:
        raise IntegrityError(
            f"the plan is over, and secrets of an attempt are still there: {', '.join(map(str, left))}"
        )
    if private:
        console.print("the same rounds: one attempt each, every silo in every sum")
    elif secure:
        console.print("the same rounds: one attempt each, every silo in every sum, no secret left")
    else:
        console.print("the same to the last bit: models, weights and scores of every round, one attempt each")


def _shape(rounds: int, silos: int, *, secure: bool, private: bool) -> Shape:
    least = LEAST_COHORT if secure else 1
    if not (rounds >= 1 and least <= silos <= 99):
        raise ConfigurationError(
            f"a soak of {rounds} rounds and {silos} silos: use at least 1 round, and {least} to 99 silos"
        )
    names = tuple(f"silo-{number:02}" for number in range(1, silos + 1))
    return Shape(
        federation="soak",
        silos=names,
        size="tiny",
        lines=LINES,
        dev_lines=4,
        secure=secure,
        spot=names[-1:] if secure else (),
        values={
            "schedule.rounds": rounds,
            "aggregation.momentum": 0.9,
            "training.epochs": 2,
            "training.batch_size": 8,
            "training.schema_in_input": "false",
            "training.max_input_tokens": 48,
            "training.max_output_tokens": 24,
            "evaluation.every": 3,
            **(_PRIVATE if private else {}),
        },
        private=private,
    )


def _run(federation: MortalFederation, meanwhile: Callable[[], None] = lambda: None) -> float:
    """From the first process to the end of the plan, in seconds; `meanwhile` is called at each look at a plan under
    way."""
    tokens = federation.invite()
    began = time.monotonic()
    federation.start(COORDINATOR)
    _until(federation.is_serving, federation, began)
    federation.enrol(tokens)
    for silo in federation.shape.silos:
        federation.start(silo)
    _until(federation.is_over, federation, began, meanwhile)
    seconds = time.monotonic() - began
    for name in federation.names:
        federation.processes.stop(name)
    return seconds


def _until(
    reached: Callable[[], bool],
    federation: MortalFederation,
    began: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    while not reached():
        federation.processes.check()
        if time.monotonic() - began > LONGEST_S:
            raise StateError(f"the plan is not over after {LONGEST_S:.0f} s: see the logs in {federation.root}")
        meanwhile()
        time.sleep(LOOK_S)


def _go_on_from(backup: Path, federation: MortalFederation) -> None:
    """In place of the coordinator whose plan is over, with the silos as they are: they have seen later rounds than
    it."""
    before = federation.folder.root.rename(federation.root / "coordinator-before")
    log = ("--log", str(before / "audit"))
    run("lorica_coordinator.cli", "restore", str(backup), str(federation.folder.root), *log)
    federation.begin_again()
    began = time.monotonic()
    for name in federation.names:
        federation.start(name)
    _until(federation.is_serving, federation, began)
    run("lorica_coordinator.cli", "plan", "start", PLAN, "--dir", str(federation.folder.root))
    _until(federation.is_over, federation, began)
    for name in federation.names:
        federation.processes.stop(name)


class Killer:
    """Kills one process after another and starts it again by the same command; now and then a command in its place.

    Half of the kills follow the one before within seconds, whatever is still starting; the other half wait until all
    silos are connected, so that a plan comes to its end on a slow machine too.
    """

    def __init__(self, federation: MortalFederation, draw: random.Random, commander: Commander) -> None:
        self._federation, self._draw, self._commander = federation, draw, commander
        self._began = time.monotonic()
        self.killings: list[Killing] = []
        self._due: float | None = None
        self._aim()

    def look(self) -> None:
        """Kill, if it is time."""
        now = time.monotonic()
        if self._due is None and self._federation.connected == set(self._federation.shape.silos):
            self._due = now + self._wait_s
        if self._due is not None and now >= self._due:
            if self._victim is None:
                self._commander.give()
                self._aim()
                return
            place = self._federation.place
            self._federation.kill(self._victim)
            self.killings.append(Killing(at_s=now - self._began, process=self._victim, place=place))
            self._federation.start(self._victim)
            self._aim()

    def _aim(self) -> None:
        """Draw who is next, and when."""
        self._victim = None if self._draw.random() < COMMANDS else self._draw.choice(self._federation.names)
        at_once = self._draw.random() < 0.5 and bool(self.killings)
        self._wait_s = self._draw.uniform(0.0, MOST_WAIT_S)
        self._due = time.monotonic() + self._wait_s if at_once else None


def _show(console: Console, killings: Sequence[Killing]) -> None:
    table = Table("kill", "after", "process", "round", "phase")
    for number, killing in enumerate(killings, 1):
        place = killing.place
        table.add_row(str(number), f"{killing.at_s:.1f} s", killing.process, str(place.round), place.phase)
    show_table(console, table)


def _show_commands(console: Console, given: Sequence[Given]) -> None:
    table = Table("command", "given", "killed")
    for name in sorted({one.command for one in given}):
        of_name = [one for one in given if one.command == name]
        table.add_row(name, str(len(of_name)), str(sum(one.killed for one in of_name)))
    show_table(console, table)


def _prepare(out: Path) -> None:
    """An empty folder; an earlier soak's is replaced, anybody else's is refused."""
    files.require_not_everybodys(out)
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise ConfigurationError(f"{out} holds files that no soak made: choose another folder with OUT=DIR")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text("made by lorica soak; the next soak replaces this folder\n")
