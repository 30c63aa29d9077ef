"""The demo's federation: its folders, and one coordinator and one agent per silo, each its own process, over mutual TLS
on loopback."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from lorica.demo import guide
from lorica.demo.display import RoundDisplay, round_table
from lorica.demo.observer import FederationView
from lorica.demo.plan import PLAN_NAME
from lorica.demo.ports import free_ports
from lorica.demo.processes import Processes, in_parallel, run
from lorica.demo.scoring import Score, Scoring, score_silos
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, StateError, StorageError
from lorica_security.host import files
from lorica_security.host.process_lock import ProcessLock
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_wire.canonical import Digest
from silo_wire.v1 import operator_pb2

MARKER = ".lorica-demo"
LOCK = ".lorica-demo.lock"
POLL_S = 0.5
LONGEST_S = 1800.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the demo keeps what; data and warm start in `shared`, where several federations have them in common."""

    out: Path
    shared: Path | None = None

    @property
    def coordinator(self) -> Path:
        return self.out / "coordinator"

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    def data(self, silo: str) -> Path:
        return (self.shared or self.out) / "silos" / silo

    def agent(self, silo: str) -> Path:
        return self.out / "agents" / silo

    @property
    def warm_start(self) -> Path:
        """The public model that private training begins from."""
        return (self.shared or self.out) / "warm-start"

    @property
    def model(self) -> Path:
        return self.out / "model"

    @property
    def answers(self) -> Path:
        """What silos without labels do not have: their answers, by which they are judged in the end."""
        return self.out / "answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a federation of the demo is made of.

    `plan` are arguments of `coordinator plan new`. `policy` is each silo's `[policy]`. `pins`: the silos pin each
    other's identity keys, as masked rounds need.
    """

    names: Sequence[str]
    plan: Sequence[str]
    policy: Mapping[str, object] = field(default_factory=dict)
    pins: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """How its plan ended."""

    status: operator_pb2.StatusReply
    records: Sequence[operator_pb2.RoundRecord]


@dataclass(frozen=True, slots=True)
class Outcome:
    status: operator_pb2.StatusReply
    records: Sequence[operator_pb2.RoundRecord]
    before: Mapping[str, Score]
    after: Mapping[str, Score]


@dataclass(frozen=True, slots=True)
class Federation:
    """One whose coordinator and agents run."""

    place: Layout
    names: Sequence[str]
    processes: Processes
    view: FederationView
    page: str
    """Address of its status page."""

    def watch(self, console: Console) -> Watched:
        """Show the rounds until the plan is finished."""
        deadline = time.monotonic() + LONGEST_S
        status, records = self.view.look()
        with RoundDisplay(console, self.names, status.rounds) as display:
            while status.phase != "finished":
                self.processes.check()
                if time.monotonic() > deadline:
                    raise StateError(f"the demo's plan did not finish within {LONGEST_S:.0f} s: see the logs folder")
                time.sleep(POLL_S)
                status, records = self.view.look()
                display.update(status, records)
        show_table(console, round_table(records, self.names))
        return Watched(status, records)


@contextmanager
def federation(place: Layout, scene: Scene, console: Console, *, opened: bool = False) -> Iterator[Federation]:
    """From `init` to agents that train, over the silos' data that is there. `opened`: its page, in a browser."""
    names = scene.names
    with Processes(place.logs, last="coordinator") as processes, _telling_of_an_interruption(console):
        with console.status("coordinator: init, plan new"):
            _set_up_coordinator(place, scene.plan)
        processes.start(
            "coordinator", "lorica_coordinator.cli", ["serve", "--dir", str(place.coordinator), "--plan", PLAN_NAME]
        )
        coordinator = Coordinator.load(CoordinatorFolder(place.coordinator))
        view = FederationView(coordinator.operator_access())
        view.wait_until_serving(processes.check, LONGEST_S)
        page = f"http://{coordinator.settings.listen.status}/"
        console.print(f"its status page, while it runs: {page}", highlight=False)
        if opened:
            guide.open_page(page)
        with console.status("inviting and enrolling the silos"):
            in_parallel(lambda name: _enrol(place, name), names)
        if scene.pins:
            with console.status("the silos pin each other's identity keys"):
                _pin_each_other(place, names)
        for name in names:
            _write_policy(place, name, scene.policy)
            processes.start(
                name, "silo_agent.cli", ["start", "--dir", str(place.agent(name)), "--data", str(place.data(name))]
            )
        if scene.pins:
            with console.status("each silo makes the plan's initial model again, and approves the plan"):
                _approve(place, names, processes)
        yield Federation(place, names, processes, view, page)


def run_federation(place: Layout, scene: Scene, console: Console, *, score: Scoring = score_silos) -> Outcome:
    """A coordinator and its agents from `init` to `export`, and what `score` makes of the models."""
    with federation(place, scene, console) as lives:
        watched = lives.watch(console)
    return export_and_score(place, scene, watched, console, score=score)


def export_and_score(
    place: Layout,
    scene: Scene,
    watched: Watched,
    console: Console,
    *,
    score: Scoring = score_silos,
    judged: Mapping[str, Path] | None = None,
) -> Outcome:
    """The best model as a folder, and scores by silo, on the data in `judged` where that is other data than the silo
    has."""
    log = place.logs / "commands.log"
    run("lorica_coordinator.cli", "export", str(place.model), "--dir", str(place.coordinator), log=log)
    with console.status("scoring the first and the final model on held-out questions"):
        before, after = score(
            place.coordinator,
            Digest(watched.status.plan_digest.hex()),
            Digest(watched.status.best_model_digest.hex()),
            {name: place.data(name) for name in scene.names} | dict(judged or {}),
        )
    return Outcome(watched.status, watched.records, before, after)


@contextmanager
def _telling_of_an_interruption(console: Console) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.print("stopping the coordinator and all agents ...")
        raise


@contextmanager
def prepared(place: Layout) -> Iterator[None]:
    """An empty folder; an earlier demo's is replaced, anybody else's is refused, and that of one that is at work as
    well. No other demo takes it while inside.

    Raises ConfigurationError, Conflict, StorageError.
    """
    with ExitStack() as held:
        try:
            _empty(place, held)
        except OSError as error:
            raise StorageError(
                f"{place.out} cannot be used: {error.strerror or error}; choose another folder"
            ) from error
        yield


def _empty(place: Layout, held: ExitStack) -> None:
    """The mark of a demo goes first and is never missing: what is cut off here can be gone on with."""
    out = place.out
    files.require_not_everybodys(out)
    if out.exists() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ConfigurationError(f"{out} holds files that no demo made: choose another folder with OUT=DIR")
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(ProcessLock(out / LOCK, "demo"))
    (out / MARKER).write_text("made by lorica demo; the next demo replaces this folder\n")
    for left in out.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        elif left.name not in (LOCK, MARKER):
            left.unlink()
    (out / "logs").mkdir()
    (out / "agents").mkdir()


def _set_up_coordinator(place: Layout, plan: Sequence[str]) -> None:
    silos, enrolment, metrics, status = free_ports(4)
    log = place.logs / "commands.log"
    where = ("--dir", str(place.coordinator))
    run(
        "lorica_coordinator.cli",
        *("init", str(place.coordinator), "--federation", "demo", "--host", "127.0.0.1"),
        *("--silos-port", str(silos), "--enrolment-port", str(enrolment), "--metrics-port", str(metrics)),
        *("--status-port", str(status), "--no-plan"),
        log=log,
        # The user's own commands must not mean the demo's coordinator from now on.
        extra={"XDG_CONFIG_HOME": str(place.out / "config")},
    )
    run("lorica_coordinator.cli", "plan", "new", PLAN_NAME, *where, *plan, log=log)


def _enrol(place: Layout, name: str) -> None:
    token = run("lorica_coordinator.cli", "invite", name, "--dir", str(place.coordinator))  # a secret: not logged
    run("silo_agent.cli", "enroll", token.strip(), "--dir", str(place.agent(name)))


def _pin_each_other(place: Layout, names: Sequence[str]) -> None:
    """As their people would, after comparing the keys by telephone."""
    log = place.logs / "commands.log"
    keys = {name: run("silo_agent.cli", "trust", "own", "--dir", str(place.agent(name))).split() for name in names}

    def pin(name: str) -> None:
        for other in names:
            if other != name:
                run("silo_agent.cli", "trust", "add", *keys[other], "--dir", str(place.agent(name)), log=log)

    in_parallel(pin, names)


def _approve(place: Layout, names: Sequence[str], processes: Processes) -> None:
    """As each silo's people would, once the plan is offered to it."""
    deadline = time.monotonic() + LONGEST_S
    for name in names:
        store = PlanStore(SiloFolder(place.agent(name)).plans)
        while (offered := store.refused()) is None:
            processes.check()
            if time.monotonic() > deadline:
                raise StateError(f"silo {name} was offered no plan within {LONGEST_S:.0f} s: see the logs folder")
            time.sleep(POLL_S)
        where = ("--dir", str(place.agent(name)))
        run("silo_agent.cli", "plan", "approve", offered.plan.digest, *where, log=place.logs / "commands.log")


def _write_policy(place: Layout, name: str, policy: Mapping[str, object]) -> None:
    """What the silo refuses, in its own silo.toml."""
    if policy:
        lines = ["[policy]", *(f"{key} = {json.dumps(value)}" for key, value in policy.items())]
        (place.agent(name) / "silo.toml").write_text("\n".join(lines) + "\n")
