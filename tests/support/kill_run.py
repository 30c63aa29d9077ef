"""A plan driven to its end while its processes are killed as planned: each incarnation of a process has one kill before
it.

After each death, and before the same command is given again, the dead process's folder is looked at: what it had made
durable says where it really died.
"""

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorica.demo.processes import Processes
from lorica.soak.comparison import Result, timeless
from lorica.soak.federation import COORDINATOR, MortalFederation
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import State, course_of
from lorica_coordinator.service.records import RoundRow
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.seal import Seal, unsealed
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from silo_agent.edges.disk.round_journal import RecordedOutcome, RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials
from silo_agent.edges.memory.masking_journal import MaskingJournal
from silo_agent.rounds.events import SavedUpdate
from tests.support.json_logs import logged
from tests.support.repeatable_draws import Draws
from tests.support.warm_processes import WarmProcesses

LONGEST_S = 1200.0
LOOK_S = 0.05
MANY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """At the `nth` call that fits the point, in `round`; None: in whichever comes first."""

    process: str
    point: str
    round: int | None = None
    nth: int = 1


@dataclass(frozen=True, slots=True)
class CoordinatorRecords:
    state: State
    rounds: tuple[RoundRow, ...]


@dataclass(frozen=True, slots=True)
class AgentRecords:
    """`masking` has the kinds of the events that the journal of secure aggregation holds, as it can be read.

    `accepted`: the rounds whose models it accepted under masks.
    """

    update: SavedUpdate | None
    outcomes: Sequence[RecordedOutcome]
    masking: Sequence[str]
    memory: SiloMemory
    accepted: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What a killed process left: its own records, and `files` below its folder with their sizes."""

    kill: Kill
    round: int | None
    files: dict[str, int]
    coordinator: CoordinatorRecords | None = None
    agent: AgentRecords | None = None

    def at(self) -> int:
        assert self.round is not None
        return self.round


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRun:
    """A finished run; `deaths` in the order in which they happened."""

    federation: MortalFederation
    result: Result
    deaths: tuple[Death, ...]

    def death(self, kill: Kill) -> Death:
        for death in self.deaths:
            if death.kill == kill:
                return death
        raise AssertionError(f"{kill.process} never came to {kill.point} of round {kill.round}")


def check_the_round(number: int | None, run: KillRun, undisturbed: KillRun) -> None:
    """The round of a kill (all, where it was none) has one attempt, every silo's update in it once, and the same
    model."""
    only = range(run.result.rounds[-1].round + 1) if number is None else (number,)
    for one in only:
        (row,) = [row for row in run.result.rounds if row.round == one]
        assert row.attempt == 1
        assert row.outcome in (("applied", "scored") if one else ("evaluated",))
        assert [silo.outcome for silo in row.silos] == ["committed" if one else "evaluated"] * len(
            run.federation.shape.silos
        )
        (expected,) = [row for row in undisturbed.result.rounds if row.round == one]
        assert timeless(row) == timeless(expected)
    assert run.result.model == undisturbed.result.model


def check_work_was_done_once(run: KillRun) -> None:
    """By the agents' logs: whoever was killed where, an update that was finished was not trained again."""
    for silo in run.federation.shape.silos:
        trained = [record["round"] for record in logged(run.federation.log(silo), "trained")]
        assert trained == [row.round for row in run.result.rounds if row.outcome == "applied"], silo


class Executioner:
    """Starts the processes of `federation`, each with its next kill before it; `at_death` may spoil something in
    between."""

    def __init__(
        self,
        federation: MortalFederation,
        kills: Sequence[Kill],
        at_death: Callable[[Death], None] = lambda death: None,
        draws: Draws | None = None,
    ) -> None:
        """With `draws`, what secure aggregation draws is repeatable, and known to the test."""
        self._federation = federation
        self._ahead = {name: [kill for kill in kills if kill.process == name] for name in federation.names}
        self._armed: dict[str, Kill] = {}
        self._started: set[str] = set()
        self._at_death = at_death
        self._draws = draws
        self._given_up = False
        self.deaths: list[Death] = []

    def run(self) -> KillRun:
        """Everything from the enrolment to the end of the plan."""
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Enrol all silos and start them."""
        federation = self._federation
        tokens = federation.invite()
        self.start(COORDINATOR)
        self.until(federation.is_serving)
        federation.enrol(tokens)
        for silo in federation.shape.silos:
            self.start(silo)

    def finish(self) -> KillRun:
        """See the plan through to its end, and stop the processes then."""
        federation = self._federation
        self.until(federation.is_over)
        for name in federation.names:
            federation.processes.stop(name)
        return KillRun(federation=federation, result=federation.result(), deaths=tuple(self.deaths))

    def give_up(self) -> None:
        """Have `until` raise at its next look, in whichever thread it waits."""
        self._given_up = True

    def start(self, process: str) -> None:
        self._started.add(process)
        if not self._ahead[process] and self._draws is None:
            self._federation.start(process)
            return
        wrapper = [self._program(process), "--note", str(self._note(process))]
        if self._ahead[process]:
            kill = self._armed[process] = self._ahead[process].pop(0)
            where = () if kill.round is None else ("--round", str(kill.round))
            wrapper += ["--at", kill.point, "--nth", str(kill.nth), *where]
        if self._draws is not None:
            wrapper += ["--draws", str(self._draws.folder), "--eager"]
        _, arguments = self._federation.command(process)
        self._federation.processes.start(process, "tests.support.killed_process", [*wrapper, "--", *arguments])

    def _program(self, process: str) -> str:
        return "coordinator" if process == COORDINATOR else "silo-agent"

    def until(self, reached: Callable[[], bool]) -> None:
        """Bury who was killed as planned and start it again, until `reached`; any other end of a process is an
        error."""
        deadline = time.monotonic() + LONGEST_S
        while not self._buried() or not reached():
            assert not self._given_up, "nobody waits for this run any longer"
            assert time.monotonic() < deadline, f"not over within {LONGEST_S:.0f} s: {self._armed} are still to come"
            time.sleep(LOOK_S)

    def _buried(self) -> bool:
        """Whether nobody was dead."""
        dead = False
        for process in sorted(self._started):
            code = self._federation.processes.ended(process)
            if code is None:
                continue
            dead = True
            kill, note = self._armed.pop(process, None), self._note(process)
            log = self._federation.log(process).read_text(errors="replace").splitlines()[-15:]
            assert code == -signal.SIGKILL, f"{process} ended with {code} before {kill}:\n" + "\n".join(log)
            assert kill is not None
            assert note.exists(), f"{process} was killed by somebody else than {kill}"
            facts = json.loads(note.read_text())
            note.unlink()
            death = self._post_mortem(kill, facts["round"])
            self.deaths.append(death)
            self._at_death(death)
            self.start(process)
        return not dead

    def _note(self, process: str) -> Path:
        return self._federation.root / f"{process}.killed"

    def _post_mortem(self, kill: Kill, round_number: int | None) -> Death:
        federation = self._federation
        if kill.process == COORDINATOR:
            return Death(
                kill=kill,
                round=round_number,
                files=sizes(federation.state),
                coordinator=coordinator_records(federation.folder),
            )
        folder = federation.agent(kill.process)
        return Death(
            kill=kill,
            round=round_number,
            files=sizes(folder.root),
            agent=agent_records(folder, SiloName(kill.process)),
        )


def sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def coordinator_records(folder: CoordinatorFolder) -> CoordinatorRecords:
    """From a copy of the database: to open the dead process's own would mend it before its next start does."""
    loaded = Coordinator.load(folder)
    with tempfile.TemporaryDirectory() as copy:
        for part in loaded.settings.state_folder.glob("state.sqlite*"):
            shutil.copy(part, copy)
        store = SqlRoundStore(Path(copy) / "state.sqlite", FederationName(loaded.federation))
        try:
            state = store.load()
            course = course_of(state)
            return CoordinatorRecords(state, () if course is None else store.rounds(course.terms.plan, 0))
        finally:
            store.close()


def agent_records(folder: SiloFolder, silo: SiloName) -> AgentRecords:
    """From a copy, as above."""
    with tempfile.TemporaryDirectory() as copy:
        for part in folder.root.glob("journal.sqlite*"):
            shutil.copy(part, copy)
        if folder.masking.exists():
            shutil.copytree(folder.masking, Path(copy) / "masking")
        for file in (folder.lineages, folder.release_groups):
            if file.exists():
                shutil.copy(file, copy)
        journal = RoundJournal(Path(copy) / "journal.sqlite", updates=folder.updates, silo=silo)
        masking = MaskingJournal(
            Path(copy) / "masking", (who := load_credentials(folder)).federation, Seal(who.identity_key)
        )
        try:
            return AgentRecords(
                journal.saved_update(),
                journal.history(MANY),
                [type(event).__name__ for event in masking.events()],
                masking.memory(),
                _accepted(folder.accepted),
            )
        finally:
            journal.close()


def _accepted(path: Path) -> Sequence[int]:
    if not path.exists():
        return ()
    plans = json.loads(unsealed(path.read_bytes()))["plans"].values()  # none while the first evidence is noted alone
    return [one["round"] for plan in plans for one in plan]


def processes_in(root: Path) -> Processes:
    (root / "logs").mkdir(parents=True)
    return WarmProcesses(root / "logs")
