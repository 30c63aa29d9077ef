"""A federation on this machine whose processes may be killed and started again, to the end of its plan.

The coordinator and every agent are processes of their own, over mutual TLS on loopback, started by the commands that an
operator and a silo would type. The quorum is all silos, so that every run has the same committed updates in each round.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorica.demo.plan import set_arguments
from lorica.demo.ports import free_ports
from lorica.demo.processes import Processes
from lorica.demo.silos.silos import SILOS, keep_first, write_silo
from lorica.soak.comparison import Result
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import Finished, Idle
from lorica_security.errors import StateError
from lorica_security.host.files import write_private
from silo_agent.edges.disk.silo_folder import SiloFolder

COORDINATOR = "coordinator"
PLAN = "soak"
MOST_EPSILON = 1000.0
"""Of private silos: no budget may end a soak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained on how much; `lines` are training lines of each silo, `values` are keys of the plan.

    `secure`: under secure aggregation, with silos that refuse any plan without it, and pin each other's keys on first
    use. `spot` are those of them that check round models by single chunks, the others check all of them together.
    `private`: under record-level differential privacy, with silos that refuse any plan without it.
    """

    federation: str
    silos: tuple[str, ...]
    size: str
    lines: int
    dev_lines: int
    secure: bool = False
    spot: tuple[str, ...] = ()
    private: bool = False
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plan stands."""

    phase: str
    round: int


class MortalFederation:
    """Everything is kept below `root`. Processes are known by name: `coordinator`, and each silo's."""

    def __init__(self, root: Path, shape: Shape, processes: Processes) -> None:
        self.root = root
        self.shape = shape
        self.processes = processes
        self.folder = CoordinatorFolder(root / "coordinator")
        self.state = self.folder.root / "state"
        self.names = (COORDINATOR, *shape.silos)
        self.place = Place(phase=Idle.phase, round=0)
        self.connected: set[str] = set()
        self._read: dict[str, int] = {}
        self._over: set[str] = set()

    def agent(self, silo: str) -> SiloFolder:
        return SiloFolder(self.root / "agents" / silo)

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    # --- from nothing to a federation

    def set_up(self) -> None:
        """Make data, authority and plan; nothing runs yet."""
        shape = self.shape
        for index, silo in enumerate(shape.silos):
            _write_data(self.root / "data" / silo, index, shape)
        (self.root / "agents").mkdir()
        if shape.secure:
            for silo in shape.silos:
                self.agent(silo).root.mkdir(mode=0o700)
                self.agent(silo).settings.write_text(
                    '[policy]\nrequire_secure_aggregation = true\napproved_plans = "any"\ntrust_on_first_use = true\n'
                    f'verify = "{"spot" if silo in shape.spot else "joint"}"\n'
                )
                # The same in the run that nobody disturbs: else the two come to other models.
                write_private(self.agent(silo).own_entropy, hashlib.sha256(silo.encode()).digest())
        if shape.private:
            for silo in shape.silos:
                self.agent(silo).root.mkdir(mode=0o700)
                self.agent(silo).settings.write_text(
                    f'[policy]\nrequire_privacy = "record"\nmax_epsilon = {MOST_EPSILON}\napproved_plans = "any"\n'
                )
        ports = free_ports(3)
        self.processes.command(
            "lorica_coordinator.cli",
            *(
                "init",
                str(self.folder.root),
                "--federation",
                shape.federation,
                "--host",
                "127.0.0.1",
                "--no-plan",
                "--status-port",
                "0",
            ),
            *("--silos-port", str(ports[0]), "--enrolment-port", str(ports[1]), "--metrics-port", str(ports[2])),
            # The user's own commands must not mean this coordinator from now on.
            extra={"XDG_CONFIG_HOME": str(self.root / "config")},
        )
        values = {
            "schedule.min_silos": len(shape.silos),
            "schedule.start_when_ready": "true",
            **({"aggregation.secure_aggregation": "true", "aggregation.max_weight": 100.0} if shape.secure else {}),
            **shape.values,
        }
        self.processes.command(
            "lorica_coordinator.cli", "plan", "new", PLAN, *self._where(), "--size", shape.size, *set_arguments(values)
        )

    def copy(self, root: Path, processes: Processes) -> "MortalFederation":
        """The same federation once more, on other ports: same plan, same authority, same data; before anything ran."""
        twin = MortalFederation(root, self.shape, processes)
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        listen = Coordinator.load(self.folder).settings.listen
        text = twin.folder.settings.read_text()
        for address, port in zip((listen.silos, listen.enrolment, listen.metrics), free_ports(3), strict=True):
            text = text.replace(address, f"{address.rpartition(':')[0]}:{port}")
        twin.folder.settings.write_text(text)
        return twin

    def invite(self) -> Mapping[str, str]:
        """A token for every silo; the coordinator is not running."""
        return {
            silo: self.processes.command("lorica_coordinator.cli", "invite", silo, *self._where()).strip()
            for silo in self.shape.silos
        }

    def enrol(self, tokens: Mapping[str, str]) -> None:
        """Every silo; the coordinator is running."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._enrol, tokens, tokens.values()))

    def _enrol(self, silo: str, token: str) -> None:
        self.processes.command("silo_agent.cli", "enroll", token, "--dir", str(self.agent(silo).root))

    # --- processes

    def command(self, process: str) -> tuple[str, list[str]]:
        """The module and the arguments that start this process, and start it again."""
        if process == COORDINATOR:
            return "lorica_coordinator.cli", ["serve", *self._where(), "--plan", PLAN]
        data = self.root / "data" / process
        return "silo_agent.cli", ["start", "--dir", str(self.agent(process).root), "--data", str(data)]

    def kill(self, process: str) -> None:
        """SIGKILL; nobody hears of it from the process itself."""
        self.processes.kill(process)
        self.connected -= set(self.shape.silos) if process == COORDINATOR else {process}

    def start(self, process: str) -> None:
        module, arguments = self.command(process)
        self.processes.start(process, module, arguments)

    @contextmanager
    def down(self, process: str) -> Iterator[None]:
        """It is killed, and started again after the block."""
        self.kill(process)
        yield
        self.start(process)

    def begin_again(self) -> None:
        """Everything is stopped, and the plan is to be gone through from a backup of the coordinator."""
        self.place = Place(phase=Idle.phase, round=0)
        self.connected.clear()
        self._over.clear()

    def _where(self) -> tuple[str, str]:
        return "--dir", str(self.folder.root)

    # --- how far it is, by the logs: nothing is asked of processes that may be dead

    def is_serving(self) -> bool:
        return any(record.get("event") == "serving" for record in self._new_records(COORDINATOR))

    def is_over(self) -> bool:
        """Whether the plan is finished and every agent has heard so; takes `place` and `connected` along."""
        for record in self._new_records(COORDINATOR):
            match record.get("event"):
                case "resumed":
                    self.connected.clear()
                case "silo connected":
                    self.connected.add(str(record["silo"]))
                case "silo disconnected":
                    self.connected.discard(str(record["silo"]))
            if record.get("phase") is not None and record.get("round") is not None:  # neither is known at the start
                self.place = Place(phase=str(record["phase"]), round=int(record["round"]))
        for silo in self.shape.silos:
            if any(record.get("activity") == "finished" for record in self._new_records(silo)):
                self._over.add(silo)
        return self.place.phase == Finished.phase and self._over == set(self.shape.silos)

    def _new_records(self, process: str) -> Iterator[Mapping[str, Any]]:
        """What was logged since the last look; a line that a kill cut off is no record."""
        log = self.log(process)
        if not log.exists():
            return
        with log.open("rb") as file:
            file.seek(self._read.get(process, 0))
            lines, end, _ = file.read().rpartition(b"\n")
        self._read[process] = self._read.get(process, 0) + len(lines) + len(end)
        for line in lines.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record

    def result(self) -> Result:
        """What the coordinator's records say of a plan that is over; raises StateError for one that is not."""
        store = SqlRoundStore(self.state / "state.sqlite", Coordinator.load(self.folder).federation)
        try:
            state = store.load()
            if not isinstance(state, Finished):
                raise StateError(f"the plan is in the phase {state.phase}, not finished: see the logs in {self.root}")
            plan = state.course.terms.plan
            return Result(plan=plan, model=state.course.model, rounds=store.rounds(plan, 0))
        finally:
            store.close()


def _write_data(folder: Path, index: int, shape: Shape) -> None:
    """Synthetic data of one of the demo's kinds, cut to the shape's lines; no two silos have the same."""
    write_silo(folder, SILOS[index % len(SILOS)], seed=1 + index)
    for split, lines in (("train", shape.lines), ("dev", shape.dev_lines), ("test", shape.dev_lines)):
        keep_first(folder / f"{split}.jsonl", lines)
