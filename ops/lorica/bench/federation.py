"""Lorica's own rounds, measured: a real coordinator and real agents, each its own process, over mutual TLS on loopback.

Local training is a constant (constant_silo.py); the server optimizer is plain FedAvg, as the peers run it. After the
last round the global model is compared with what it must be: each round adds the constant to every parameter.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

from lorica.bench.constant_silo import STEP, moved
from lorica.bench.elsewhere.storage import Storage
from lorica.bench.figures import Reading, Run
from lorica.bench.model import write_model
from lorica.bench.processes import Meter, imports_bytes
from lorica.demo.observer import FederationView
from lorica.demo.plan import set_arguments
from lorica.demo.ports import free_ports
from lorica.demo.processes import Processes, environment, run
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.silos import write_silo
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.vectors.model_file import MODEL_FILE
from lorica_security.errors import StateError
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.service.model_checks import Mode

PLAN = "bench"
POLL_S = 0.02
PREPARING_S = 30.0
ROUNDED_ROUNDS = 16
"""Up to which the relative tolerance holds; the sum of more rounds is rounded more often."""
ROUNDED_SILOS = 8
"""The same of the absolute tolerance, of a sum of more silos; in each round each of them multiplies rows of its own."""
WRITTEN_LATELY_NS = 100_000_000
LONGEST_ROUND_S = 3600.0
_COORDINATOR_IMPORTS = (  # what `coordinator serve` imports before it serves: the program itself imports nothing of it
    "lorica_coordinator.commands.host_commands",
    "lorica_coordinator.composition",
    "lorica_coordinator.edges.sums.aggregator",
)
_AGENT_IMPORTS = (
    "lorica.bench.constant_silo",
    "silo_agent.edges.workshop.workshop",
    "silo_agent.edges.wire.grpc_client",
)
_VALUES: Mapping[str, str | int | float] = {
    "schedule.start_when_ready": "true",
    "schedule.training_deadline_s": LONGEST_ROUND_S,
    "aggregation.weighting": "equal",
    "aggregation.momentum": 0.0,
    "evaluation.every": 0,
    "evaluation.initial": "false",
    "evaluation.last": "false",
    "training.schema_in_input": "false",
}


_SECURE_VALUES: Mapping[str, str | int | float] = {
    "aggregation.secure_aggregation": "true",
    "aggregation.max_weight": 1000.0,
    "schedule.masking_deadline_s": LONGEST_ROUND_S,
}
_NAMES: Mapping[Mode | None, Sequence[str]] = {
    None: (),
    "joint": ("masked",),
    "spot": ("masked, spot checks",),
    "off": ("masked, no checks",),
}
"""What systems are called: a masked federation checks jointly unless it is told otherwise."""


def run_lorica(
    work: Path,
    *,
    silos: int,
    parameters: int,
    rounds: int,
    wire: str = "float32",
    masked: Mode | None = None,
    storage: Storage | None = None,
    kind: type[Processes] = Processes,
) -> Run:
    """Measure `rounds` rounds after one that is not counted; raises StateError when a process fails or the sum is
    wrong.

    1: the first round of all, from its opening. `parameters` is what is asked for, the result has what came out. `work`
    is an empty folder for everything. `masked`: under secure aggregation, among silos that pin each other, send nothing
    else and check round models in this way. `storage`: where the coordinator has its state and files, if not in its
    folder alone. `kind`: how coordinator, agents and their commands are started.
    """
    warm_up = 1 if rounds > 1 else 0
    names = [f"silo-{index:02}" for index in range(1, silos + 1)]
    home = work / "coordinator"
    made = write_model(work / "t5", parameters, seed=1, dtype=torch.bfloat16 if wire == "bfloat16" else torch.float32)
    _set_up(work, home, silos=silos, rounds=rounds + warm_up, wire=wire, masked=masked, storage=storage)
    with kind(work) as processes:
        processes.start("coordinator", "lorica_coordinator.cli", ["serve", "--dir", str(home), "--plan", PLAN])
        view = FederationView(Coordinator.load(CoordinatorFolder(home)).operator_access())
        view.wait_until_serving(processes.check, LONGEST_ROUND_S)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: _enrol(processes, work, home, name, made, masked=masked), names))
        if masked:
            _pin_each_other([work / name for name in names])
        for name in names:
            folders = ["--dir", str(work / name), "--data", str(work / "data")]
            processes.start(name, "lorica.bench.constant_silo", ["start", *folders])
        with Meter(
            coordinator=[processes.pid("coordinator")], agents=[[processes.pid(name)] for name in names]
        ) as meter:
            readings = _follow(home, _Watch(view, processes), meter, rounds + warm_up, opening=not warm_up)
    _check(work, rounds + warm_up, silos, masked=masked)
    return Run(
        system=" ".join(
            ["lorica", *_NAMES[masked], *([wire] if wire != "float32" else []), *([storage.words] if storage else [])]
        ),
        silos=silos,
        parameters=made,
        readings=readings,
        coordinator_imports_bytes=imports_bytes(sys.executable, _COORDINATOR_IMPORTS, environment()),
        agent_imports_bytes=imports_bytes(sys.executable, _AGENT_IMPORTS, environment()),
    )


def _set_up(
    work: Path, home: Path, *, silos: int, rounds: int, wire: str, masked: Mode | None, storage: Storage | None
) -> None:
    ports = free_ports(3)
    where = ("--dir", str(home))
    model = work / "t5"
    config = {"XDG_CONFIG_HOME": str(work / "config")}  # the user's own commands must not mean this coordinator later
    run(
        "lorica_coordinator.cli",
        *("init", str(home), "--federation", "bench", "--host", "127.0.0.1", "--no-plan", "--status-port", "0"),
        *("--silos-port", str(ports[0]), "--enrolment-port", str(ports[1]), "--metrics-port", str(ports[2])),
        extra=config,
    )
    if storage is not None:
        storage.write_into(CoordinatorFolder(home).settings)
    values = {
        **_VALUES,
        "schedule.rounds": rounds,
        "schedule.min_silos": silos,
        "wire.model": wire,
        "wire.update": wire,
        **(_SECURE_VALUES if masked else {}),
    }
    run("lorica_coordinator.cli", "plan", "new", PLAN, "--model", str(model), *set_arguments(values), *where)
    shutil.rmtree(model)  # the plan has a copy, and disks have ends
    write_silo(work / "data", CLINIC, seed=1)  # read and tokenised, but nothing learns from it


def _enrol(processes: Processes, work: Path, home: Path, name: str, parameters: int, *, masked: Mode | None) -> None:
    token = processes.command("lorica_coordinator.cli", "invite", name, "--dir", str(home))
    processes.command("silo_agent.cli", "enroll", token.strip(), "--dir", str(work / name))
    upload = 4 * (parameters + EXTRA_WORDS if masked else parameters)
    policy = f"[policy]\nmax_parameters = {parameters}\nmax_upload_bytes = {upload}\n"
    (work / name / "silo.toml").write_text(
        policy + (f'require_secure_aggregation = true\napproved_plans = "any"\nverify = "{masked}"\n' if masked else "")
    )


def _pin_each_other(folders: Sequence[Path]) -> None:
    """Each silo the others' identity keys, as `silo-agent trust add` does: of 64 that would be 4032 commands."""
    opened = [(folder, load_credentials(folder)) for folder in map(SiloFolder, folders)]
    keys = {credentials.silo: credentials.identity_key.public_key() for _, credentials in opened}
    for folder, own in opened:
        trust_store(folder, own).add_all({silo: key for silo, key in keys.items() if silo != own.silo})


class _Watch:
    """Raises StateError when a process has ended, or a silo says at the beginning why it takes no part."""

    def __init__(self, view: FederationView, processes: Processes) -> None:
        self._view = view
        self._processes = processes
        self._look_at = time.monotonic() + PREPARING_S

    def __call__(self) -> None:
        self._processes.check()
        if time.monotonic() < self._look_at:
            return
        status, rounds = self._view.look()
        for silo in status.silos:
            if silo.state == "preparing" and silo.detail:
                raise StateError(f"{silo.silo} is not ready: {silo.detail}")
        # All are ready once a round is open, and looking would take the rounds' time.
        self._look_at = math.inf if rounds else self._look_at + PREPARING_S


def _follow(home: Path, watch: _Watch, meter: Meter, rounds: int, *, opening: bool) -> list[Reading]:
    """A reading at the end of each round, the uncounted first one included; with `opening`, one before when it
    opens."""
    coordinator = Coordinator.load(CoordinatorFolder(home))
    plan = coordinator.shelf.compile(PLAN).plan.digest
    store = coordinator.open_store()
    readings: list[Reading] = []
    opened: list[Reading] = []
    try:
        for _ in _changes(home.parent / "coordinator.log", watch):
            for row in reversed(store.rounds(plan, 2)):
                if row.outcome not in ("running", "applied"):
                    raise StateError(f"round {row.round} ended as {row.outcome}: {row.detail}")
                if opening and not opened and row.round == 1:
                    opened.append(meter.read())
                if row.closed_unix_s is not None and row.round == len(readings) + 1:
                    readings.append(meter.read())
            if len(readings) == rounds:
                break
    finally:
        store.close()
    return opened + readings


def _changes(written: Path, watch: _Watch) -> Iterator[None]:
    """Now, and while this file is being written to: asking the store itself so often would take the rounds' time.

    A little longer than the last write, since two within one tick of the kernel's clock have the same time.
    """
    before: int | None = None
    deadline = time.monotonic() + LONGEST_ROUND_S
    while True:
        now = os.stat(written).st_mtime_ns
        if now != before:
            before, deadline = now, time.monotonic() + LONGEST_ROUND_S
            yield
        elif time.time_ns() - now < WRITTEN_LATELY_NS:
            yield
        watch()
        if time.monotonic() > deadline:
            raise StateError(
                f"nothing happened within {LONGEST_ROUND_S:.0f} s: see the logs in {written.parent.parent}"
            )
        time.sleep(POLL_S)


def _check(work: Path, rounds: int, silos: int, *, masked: Mode | None) -> None:
    """Raise StateError unless each of `rounds` moved every parameter of the global model as its silos move theirs.

    Under secure aggregation to within what integers can express and silos' noise within float32's steps (ADR 18), and
    but for few rows and columns: of some hundred thousand a silo takes one or two for numbers of one size, which it
    multiplies (ADR 16).
    """
    fine, finest = (2.0**-16, 2.0**-10) if masked else (2.0**-20, 2.0**-20)
    home = work / "coordinator"
    run("lorica_coordinator.cli", "export", str(work / "model"), "--dir", str(home))
    initial = Coordinator.load(CoordinatorFolder(home)).settings.state_folder / "plans" / PLAN / MODEL_FILE
    with safe_open(initial, "pt") as before, safe_open(work / "model" / MODEL_FILE, "pt") as after:
        names = after.keys()
        for name in names:
            was, now = before.get_tensor(name), after.get_tensor(name)
            narrow = now.dtype == torch.bfloat16
            relative, absolute = (2.0**-6, 2.0**-6) if narrow else (fine, finest)
            expected = moved(was.clone(), rounds=rounds)
            relative *= max(1.0, rounds / ROUNDED_ROUNDS)
            absolute *= max(1.0, silos / ROUNDED_SILOS) * STEP * rounds
            close = torch.isclose(now.float(), expected, rtol=relative, atol=absolute)
            spared = max(now.numel() // 256, *now.shape) if masked and now.dim() == 2 else 0
            if int((~close).sum()) > spared * max(1.0, silos * rounds / ROUNDED_SILOS):
                raise StateError(f"the global model's {name} is not what {rounds} rounds of the silos' steps give")
