"""`lorica demo`: a whole federation on one machine, by the same commands that an operator and a silo would type.

    generate silos -> coordinator init, plan new, invite (x4) -> serve -> enroll, start (x4) -> rounds -> export -> ask

One coordinator and one agent per silo, each its own process, over mutual TLS on loopback. Everything stays in the
folder `out`, with summary.json on top.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lorica.demo import half_labels
from lorica.demo.display import RoundDisplay, round_table
from lorica.demo.observer import FederationView
from lorica.demo.plan import DEMO_PLAN, MASKED_PLAN, PLAN_NAME, PRIVATE_RECORDS, ROOM_FOR_THE_FILTER, SIZE, private_plan
from lorica.demo.ports import free_ports
from lorica.demo.processes import Processes, in_parallel, run
from lorica.demo.scoring import Score, Scoring, score_silos
from lorica.demo.silos.query_log import TEST, query_log
from lorica.demo.silos.silos import SILOS, Record, write_silo
from lorica.demo.silos.specification import SiloSpecification
from lorica.demo.warm_start import write_textbook_start
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.service.records import COMPLETED
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, StateError
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_wire.canonical import Digest
from silo_wire.v1 import operator_pb2

MARKER = ".lorica-demo"
SUMMARY = "summary.json"
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
class Outcome:
    status: operator_pb2.StatusReply
    records: Sequence[operator_pb2.RoundRecord]
    before: Mapping[str, Score]
    after: Mapping[str, Score]


def run_demo(
    out: Path,
    *,
    seed: int,
    values: Sequence[str] = (),
    secure: bool = False,
    epsilon: float | None = None,
    labels: str = "",
    console: Console,
) -> dict[str, Any]:
    """Run the demo and return its summary, which is also `out`/summary.json; raises StateError when a process fails.

    `values` are KEY=VALUE of the plan, over the demo's own. `secure`: under secure aggregation, with silos that pin
    each other's identity keys and refuse any plan without it. `epsilon`: under record-level differential privacy, with
    silos that refuse any plan without it and whatever would cost more. `labels`: "half" hides them at two of the silos.
    """
    if labels:
        half_labels.require_sound(labels, secure=secure, private=epsilon is not None)
    began = time.monotonic()
    place = Layout(out.resolve())
    prepare(place)
    names = list(half_labels.NAMES) if labels else [silo.name for silo in SILOS]
    plan: Sequence[str] = MASKED_PLAN if secure else DEMO_PLAN
    policy: dict[str, object] = {}
    if labels:
        with console.status("generating four silos, two of them without labels, and training a public model"):
            half_labels.write_half_labelled(place.out / "silos", place.answers, place.warm_start, seed=seed)
        plan = half_labels.plan_arguments(place.warm_start)
    elif epsilon is None:
        with console.status("generating four silos"):
            for silo in SILOS:
                write_silo(place.data(silo.name), silo, seed=seed)
    else:
        with console.status("generating four silos, and training a public model that never saw them"):
            write_private_silos(place, SILOS, records=PRIVATE_RECORDS, seed=seed)
        plan = private_plan(place.warm_start, silos=len(names), records=PRIVATE_RECORDS, epsilon=epsilon)
        policy |= {"require_privacy": "record", "max_epsilon": ROOM_FOR_THE_FILTER * epsilon}
    if secure:
        values = ("aggregation.secure_aggregation=true", *values)
        policy["require_secure_aggregation"] = True
    _show_silos(console, place, names)
    if labels:
        console.print(half_labels.TOLD, highlight=False)
    given = [argument for value in values for argument in ("--set", value)]
    scene = Scene(names=names, plan=(*plan, "--seed", str(seed), *given), policy=policy, pins=secure)
    judged = half_labels.judged_on(place.out / "silos", place.answers) if labels else {}
    outcome = run_federation(place, scene, console, judged=judged)
    seconds = time.monotonic() - began
    summary = _summary(outcome, seconds=seconds)
    if epsilon is not None:
        summary["privacy"] = {name: spent(place, name) for name in names}
    _write_summary(place, summary)
    _show_result(console, names, summary)
    if labels:
        _show_what_branches_bring(console, place, outcome, judged, summary, seed=seed)
    if epsilon is not None:
        _show_privacy(console, place, names, summary)
    _answer(console, place, names)
    console.print(
        f"Everything is in {place.out}: model/ loads with from_pretrained, {SUMMARY} has the figures.", soft_wrap=True
    )
    return summary


def _write_summary(place: Layout, summary: Mapping[str, Any]) -> None:
    (place.out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def _show_what_branches_bring(
    console: Console,
    place: Layout,
    outcome: Outcome,
    judged: Mapping[str, Path],
    summary: dict[str, Any],
    *,
    seed: int,
) -> None:
    """Beside the same plan without them, which is simulated."""
    with console.status("simulating the same plan without the branches, to compare"):
        without = half_labels.without_branches(
            place.out / "without-branches", place.out / "silos", place.warm_start, judged, seed=seed
        )
    half_labels.show(console, outcome.after, without)
    summary["without_branches"] = {name: score.exact_match for name, score in without.items()}
    _write_summary(place, summary)


def write_private_silos(
    place: Layout, silos: Sequence[SiloSpecification], *, records: int, seed: int, test: int = TEST
) -> None:
    """Query logs of `records` records and `test` held-out questions each, and a public model that was trained on their
    textbooks."""
    textbook: list[Record] = []
    for silo in silos:
        made = query_log(silo, records=records, seed=seed, test=test)
        write_silo(place.data(silo.name), silo, seed=seed, splits=made.log)
        textbook += made.textbook
    write_textbook_start(place.warm_start, textbook, size=SIZE, seed=seed)


def run_federation(
    place: Layout,
    scene: Scene,
    console: Console,
    *,
    score: Scoring = score_silos,
    judged: Mapping[str, Path] | None = None,
) -> Outcome:
    """A coordinator and its agents from `init` to `export`, over the silos' data that is there, and what `score` makes
    of the models, by silo on the data in `judged`, where that is other data than the silo has."""
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
        console.print(f"its status page, while it runs: http://{coordinator.settings.listen.status}/", highlight=False)
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
        status, records = _watch(view, processes, names, console)
    run(
        "lorica_coordinator.cli",
        "export",
        str(place.model),
        "--dir",
        str(place.coordinator),
        log=place.logs / "commands.log",
    )
    with console.status("scoring the first and the final model on held-out questions"):
        before, after = score(
            place.coordinator,
            Digest(status.plan_digest.hex()),
            Digest(status.best_model_digest.hex()),
            {name: place.data(name) for name in names} | dict(judged or {}),
        )
    return Outcome(status, records, before, after)


@contextmanager
def _telling_of_an_interruption(console: Console) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        console.print("stopping the coordinator and all agents ...")
        raise


def spent(place: Layout, name: str) -> dict[str, Any]:
    """What a silo's ledger says it has released."""
    shown = json.loads(run("silo_agent.cli", "privacy", "show", "--json", "--dir", str(place.agent(name))))
    return {**shown["spent"], "releases": len(shown["releases"])}


def prepare(place: Layout) -> None:
    """An empty folder; an earlier demo's is replaced, anybody else's is refused."""
    out = place.out
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise ConfigurationError(f"{out} holds files that no demo made: choose another folder with OUT=DIR")
        shutil.rmtree(out)
    (out / "logs").mkdir(parents=True)
    (out / "agents").mkdir()
    (out / MARKER).write_text("made by lorica demo; the next demo replaces this folder\n")


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


def _watch(
    view: FederationView, processes: Processes, names: Sequence[str], console: Console
) -> tuple[operator_pb2.StatusReply, Sequence[operator_pb2.RoundRecord]]:
    """Show the rounds until the plan is finished."""
    deadline = time.monotonic() + LONGEST_S
    status, records = view.look()
    with RoundDisplay(console, names, status.rounds) as display:
        while status.phase != "finished":
            processes.check()
            if time.monotonic() > deadline:
                raise StateError(f"the demo's plan did not finish within {LONGEST_S:.0f} s: see the logs folder")
            time.sleep(POLL_S)
            status, records = view.look()
            display.update(status, records)
    show_table(console, round_table(records, names))
    return status, records


def _summary(outcome: Outcome, *, seconds: float) -> dict[str, Any]:
    before, after = outcome.before, outcome.after
    return {
        "macro_exact_match": sum(score.exact_match for score in after.values()) / len(after),
        "macro_execution_accuracy": sum(score.execution_accuracy for score in after.values()) / len(after),
        "silos": {
            name: {
                "held_out_questions": after[name].questions,
                "exact_match_before": before[name].exact_match,
                "exact_match": after[name].exact_match,
                "execution_accuracy_before": before[name].execution_accuracy,
                "execution_accuracy": after[name].execution_accuracy,
            }
            for name in after
        },
        "rounds": sum(record.outcome in COMPLETED for record in outcome.records),
        "seconds": round(seconds, 1),
        "plan_digest": outcome.status.plan_digest.hex(),
    }


def _show_silos(console: Console, place: Layout, names: Sequence[str]) -> None:
    table = Table(title="silos", title_style="dim")
    for column in ("silo", "train", "dev", "test", "a question it holds"):
        table.add_column(column, justify="left" if column in ("silo", "a question it holds") else "right")
    for name in names:
        lines = {
            split: file.read_text().splitlines() if (file := place.data(name) / f"{split}.jsonl").exists() else []
            for split in ("train", "dev", "test")
        }
        example = json.loads(lines["train"][0])["question"]
        table.add_row(name, *(str(len(of_split)) for of_split in lines.values()), example)
    show_table(console, table)


def _show_result(console: Console, names: Sequence[str], summary: dict[str, Any]) -> None:
    table = Table(title="held-out questions, before -> after the federation", title_style="dim")
    for column in ("silo", "questions", "exact match", "execution accuracy"):
        table.add_column(column, justify="left" if column == "silo" else "right")
    for name in names:
        silo = summary["silos"][name]
        table.add_row(
            name,
            str(silo["held_out_questions"]),
            f"{silo['exact_match_before']:.1%} -> {silo['exact_match']:.1%}",
            f"{silo['execution_accuracy_before']:.1%} -> {silo['execution_accuracy']:.1%}",
        )
    macro = (f"{summary['macro_exact_match']:.1%}", f"{summary['macro_execution_accuracy']:.1%}")
    table.add_row("MacroAvg", "", *macro, style="bold")
    show_table(console, table)


def _show_privacy(console: Console, place: Layout, names: Sequence[str], summary: dict[str, Any]) -> None:
    table = Table(title="what each silo's own ledger says of its records", title_style="dim")
    for column in ("silo", "releases", "epsilon spent", "its people allow", "dp_delta"):
        table.add_column(column, justify="left" if column == "silo" else "right")
    for name in names:
        silo = summary["privacy"][name]
        table.add_row(
            name,
            str(silo["releases"]),
            f"{silo['epsilon']:.3g}",
            f"{silo['max_epsilon']:g}",
            f"{silo['dp_delta']:g}",
        )
    show_table(console, table)
    try:
        told = run("silo_agent.cli", "privacy", "forecast", "--dir", str(place.agent(names[0]))).rstrip()
    except StateError as refused:  # the plan was made to cost all of the budget
        told = str(refused).rpartition("silo-agent: ")[2]
    console.print(f"{names[0]}, asked for one round more: {told}", highlight=False, markup=False)


def _answer(console: Console, place: Layout, names: Sequence[str]) -> None:
    """One held-out question of each silo, through `silo-agent ask` against the silo's own database."""

    def ask(name: str) -> tuple[str, str]:
        with (place.data(name) / "test.jsonl").open() as lines:
            question: str = json.loads(next(lines))["question"]
        words = ("ask", question, "--dir", str(place.agent(name)), "--data", str(place.data(name)))
        try:
            return question, run("silo_agent.cli", *words, log=place.logs / "commands.log")
        except StateError as error:  # a model that has learnt little writes SQL that the sandbox refuses
            return question, str(error)

    with console.status("asking each silo one question"):
        answers = in_parallel(ask, names)
    for name, (question, answer) in zip(names, answers, strict=True):
        console.print(f"{name}: {question}", highlight=False, markup=False)
        console.print(answer.rstrip(), highlight=False, markup=False)
