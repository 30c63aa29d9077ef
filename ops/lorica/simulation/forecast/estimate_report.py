"""What `lorica simulate --dry-run` shows: lines and a table on a terminal, and estimate.json with the same numbers."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorica.simulation.forecast.dry_run import DryRun
from lorica.simulation.forecast.estimate import Estimate, SiloEstimate
from lorica.simulation.forecast.lines import LINES, Shorter, line_text, seconds, shorter
from lorica_coordinator.plans.forecast import forecast
from lorica_security.console.terminal import show_table
from lorica_security.host import files

ESTIMATE_FILE = "estimate.json"


def write(out: Path, done: DryRun) -> None:
    """Bytes, and seconds of the machine that it was measured on."""
    facts = {"plan_name": done.bundle.plan.name, **asdict(done.estimate)}
    facts["measured_on"] = done.device
    facts["problems"] = list(done.problems)
    it = done.estimate
    facts["line_s"] = {name: seconds(slowest(it).traffic, line) for name, line in LINES.items()}
    facts["shorter"] = [asdict(one) for one in _shorter(done)]
    files.replace(out / ESTIMATE_FILE, (json.dumps(facts, indent=1) + "\n").encode())


def show(console: Console, done: DryRun) -> None:
    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    it, plan = done.estimate, done.bundle.plan
    line(
        f"plan {plan.name} ({it.plan[:16]}): {it.parameters:,} parameters, {it.rounds} rounds, {it.evaluations} "
        f"evaluations; measured on {done.device}"
    )
    show_table(console, _table(it))
    for text in (*_lines(it), *_on_lines(done), *forecast(plan)):
        line(text)
    for text in it.late:
        line(f"LATE: {text}", "bold yellow")


def _table(it: Estimate) -> Table:
    table = Table(title="one round", title_style="dim")
    table.add_column("silo", no_wrap=True)
    for column in ("train", "dev", "cut", "steps", "training", "evaluation", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for silo in it.silos:
        counts = silo.counts
        table.add_row(
            silo.silo,
            f"{counts.train:,}",
            f"{silo.scored:,}" if silo.scored == counts.dev else f"{silo.scored:,}/{counts.dev:,}",
            f"{counts.inputs_cut:,}+{counts.targets_cut:,}",
            f"{silo.steps:,}",
            seconds_text(silo.training_s),
            seconds_text(silo.evaluation_s),
            bytes_text(silo.memory.peak or silo.memory.counted),
        )
    return table


def _lines(it: Estimate) -> list[str]:
    silo = max(
        it.silos, key=lambda one: one.masks.down + one.masks.up
    )  # the others differ by the length of their names
    memory, masks, total = silo.memory, silo.masks, it.coordinator_traffic
    turns = (
        "one silo after the other"
        if it.workers == 1
        else f"by {it.workers} workers, if they do not get in each other's way"
    )
    beside = f", of which {bytes_text(masks.down)} and {bytes_text(masks.up)} are messages of masks" if masks.up else ""
    return [
        "cut: inputs + targets, of train and dev, that are longer than the plan's max_input_tokens and "
        "max_output_tokens",
        f"wire, a round: {bytes_text(silo.traffic.down)} to a silo, {bytes_text(silo.traffic.up)} from it{beside}",
        f"wire, the plan: {bytes_text(silo.whole_traffic.down)} to a silo, {bytes_text(silo.whole_traffic.up)} from "
        f"it; the coordinator sends {bytes_text(total.down)} and receives {bytes_text(total.up)}",
        f"time, the plan: {seconds_text(it.federation_s)} in a federation of a machine for each silo, of which the "
        f"slowest sets each round; {seconds_text(it.simulation_s)} simulated here, {turns}",
        f"memory at a silo: {bytes_text(memory.parameters)} parameters, {bytes_text(memory.gradients)} gradients, "
        f"{bytes_text(memory.optimizer)} optimizer, {bytes_text(memory.round_model)} round model; the rest is "
        "activations, data and program",
        f"coordinator: about {bytes_text(it.coordinator_memory)} of memory, whatever model and silos, and "
        f"{bytes_text(it.coordinator_disk)} on disk",
    ]


def slowest(it: Estimate) -> SiloEstimate:
    """By training, which sets each round."""
    return max(it.silos, key=lambda silo: silo.training_s)


def _shorter(done: DryRun) -> tuple[Shorter, ...]:
    silo = slowest(done.estimate)
    return shorter(done.bundle, round_s=silo.training_s, traffic=silo.traffic)


def _on_lines(done: DryRun) -> Iterator[str]:
    silo = slowest(done.estimate)
    times = ", ".join(f"{name} {seconds_text(seconds(silo.traffic, line))}" for name, line in LINES.items())
    yield f"lines, a round: {times}, beside {seconds_text(silo.training_s)} of training at silo {silo.silo}"
    found = [one for one in _shorter(done) if one.below is None or one.below >= min(LINES.values())]
    if not found:
        yield (
            "recommended: the plan's own types on the wire; no other that goes with it shortens a round by a tenth on "
            f"a line of {line_text(min(LINES.values()))} or more"
        )
    for one in found:
        where = "every line of a silo" if one.below is None else f"lines of silos slower than {line_text(one.below)}"
        yield f'recommended: [wire] {one.key} = "{one.dtype}" on {where}: it shortens a round by a tenth or more there'


def bytes_text(size: int) -> str:
    """In the unit that leaves one to four digits before the point."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def seconds_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
