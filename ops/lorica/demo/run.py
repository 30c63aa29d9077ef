"""`lorica try` and `lorica demo`: a whole federation on one machine, by the commands that an operator and a silo type.

    generate silos -> coordinator init, plan new, invite (x4) -> serve -> enroll, start (x4) -> rounds -> export -> ask

One coordinator and one agent per silo, each its own process, over mutual TLS on loopback. Everything stays in the
folder `out`, with summary.json on top.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lorica.demo import guide, half_labels
from lorica.demo.federation import Layout, Outcome, Scene, export_and_score, federation, prepared
from lorica.demo.plan import DEMO_PLAN, MASKED_PLAN, PRIVATE_RECORDS, ROOM_FOR_THE_FILTER, SIZE, private_plan
from lorica.demo.processes import in_parallel, run
from lorica.demo.silos.query_log import TEST, query_log
from lorica.demo.silos.silos import SILOS, Record, write_silo, write_silos
from lorica.demo.silos.specification import SiloSpecification
from lorica.demo.warm_start import write_textbook_start
from lorica_coordinator.service.records import COMPLETED
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, StateError

SUMMARY: Final = "summary.json"


def run_demo(
    out: Path,
    *,
    seed: int,
    values: Sequence[str] = (),
    secure: bool = False,
    epsilon: float | None = None,
    labels: str = "",
    page: bool = False,
    stay: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Run the demo and return its summary, which is also `out`/summary.json; raises StateError when a process fails.

    `values` are KEY=VALUE of the plan, over the demo's own. `secure`: under secure aggregation, with silos that pin
    each other's identity keys and refuse any plan without it. `epsilon`: under record-level differential privacy, with
    silos that refuse any plan without it and whatever would cost more. `labels`: "half" hides them at two of the silos.
    `page`: the status page is opened in a browser, where there is a screen. `stay`: at the end coordinator and agents
    go on until Ctrl-C.
    """
    if labels:
        half_labels.require_sound(labels, secure=secure, private=epsilon is not None)
    if epsilon is not None and not math.isfinite(epsilon):
        raise ConfigurationError(f"epsilon {epsilon} promises nothing: give a number such as 8, or leave it out")
    place = Layout(out.absolute())
    began = time.monotonic()
    with prepared(place), ExitStack() as running:
        names = list(half_labels.NAMES) if labels else [silo.name for silo in SILOS]
        plan: Sequence[str] = MASKED_PLAN if secure else DEMO_PLAN
        policy: dict[str, object] = {}
        if labels:
            with console.status("generating four silos, two of them without labels, and training a public model"):
                half_labels.write_half_labelled(place.out / "silos", place.answers, place.warm_start, seed=seed)
            plan = half_labels.plan_arguments(place.warm_start)
        elif epsilon is None:
            with console.status("generating four silos"):
                write_silos(place.out / "silos", seed=seed)
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
        lives = running.enter_context(federation(place, scene, console, opened=page))
        watched = lives.watch(console)
        if not stay:
            running.close()
        outcome = export_and_score(place, scene, watched, console, judged=judged)
        summary = _summary(outcome, seconds=time.monotonic() - began)
        if epsilon is not None:
            summary["privacy"] = {name: spent(place, name) for name in names}
        _write_summary(place, summary)
        _show_result(console, names, summary)
        if labels:
            _show_what_branches_bring(console, place, outcome, judged, summary, seed=seed, values=values)
        if epsilon is not None:
            _show_privacy(console, place, names, summary)
        _answer(console, place, names)
        console.print(
            f"Everything is in {place.out}: model/ loads with from_pretrained, {SUMMARY} has the figures.",
            soft_wrap=True,
        )
        guide.show(console, _next_steps(place, names[0], lives=stay))
        if stay:
            guide.stay(console, lives.processes, lives.page)
    return summary


def _next_steps(place: Layout, silo: str, *, lives: bool) -> Sequence[guide.NextStep]:
    left = guide.WhatIsLeft(
        coordinator=place.coordinator,
        agent=place.agent(silo),
        data=place.data(silo),
        model=place.model,
        question=_held_out_question(place, silo),
    )
    return (*guide.next_steps(left, lives=lives), *guide.elsewhere())


def _held_out_question(place: Layout, silo: str) -> str:
    with (place.data(silo) / "test.jsonl").open(encoding="utf-8") as lines:
        question: str = json.loads(next(lines))["question"]
    return question


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
    values: Sequence[str],
) -> None:
    """Beside the same plan without them, which is simulated."""
    with console.status("simulating the same plan without the branches, to compare"):
        without = half_labels.without_branches(
            place.out / "without-branches", place.out / "silos", place.warm_start, judged, seed=seed, values=values
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


def spent(place: Layout, name: str) -> dict[str, Any]:
    """What a silo's ledger says it has released."""
    shown = json.loads(run("silo_agent.cli", "privacy", "show", "--json", "--dir", str(place.agent(name))))
    return {**shown["spent"], "releases": len(shown["releases"])}


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
        question = _held_out_question(place, name)
        words = ("ask", question, "--dir", str(place.agent(name)), "--data", str(place.data(name)))
        try:
            return question, run("silo_agent.cli", *words, log=place.logs / "commands.log")
        except StateError as error:  # a model that has learnt little writes SQL that the sandbox refuses
            return question, str(error)

    with console.status("asking each silo one question"):
        answers = in_parallel(ask, names)
    for name, (question, answer) in zip(names, answers, strict=True):
        console.print(f"{name}: {question}", highlight=False, markup=False, soft_wrap=True)
        console.print(answer.rstrip(), highlight=False, markup=False, soft_wrap=True)
