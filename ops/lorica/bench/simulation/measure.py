"""A simulated plan of eight generated silos, measured from one round's beginning to the next one's."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lorica.bench.simulation.stopwatch import PARTS, REST, Stopwatch
from lorica.demo.silos.eight_silos import write_eight_silos
from lorica.simulation.run import silos_in, simulate
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from silo_agent.training.data.text_to_sql_data import load_silo_data

EPOCHS: Final = 2
PLAN: Final[Mapping[str, object]] = {
    "schedule.min_silos": 8,
    "training.epochs": EPOCHS,
    "training.max_output_tokens": 64,
    "evaluation.every": 1,
    "evaluation.initial": False,
}
"""The rest is the default preset's: AdamW, batches of 16, schemas in the input. Every round is followed by scores of
all dev sets."""
NOT_COUNTED: Final = 2
"""Rounds: the first, which warms up, and the last, whose end is that of everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians of `rounds` rounds: seconds, training examples for each second of training, and what share of the wall
    time each part had."""

    size: str
    parameters: int
    silos: int
    examples: int
    dev_examples: int
    rounds: int
    threads: int
    round_s: float
    examples_per_s: float
    shares: Mapping[str, float]

    def to_json(self) -> Mapping[str, object]:
        return asdict(self)


def measure(work: Path, *, size: str, largest: int, rounds: int, threads: int) -> Figures:
    """Everything is left in the new folder `work`. Raises what a simulation raises."""
    write_eight_silos(work / "silos", largest=largest)
    silos = silos_in(work / "silos")
    bundle = create_plan(
        work / "plans",
        name="bench",
        federation="bench",
        source=SizedModel(size),
        overrides={**PLAN, "schedule.rounds": rounds + NOT_COUNTED},
    )
    watch = Stopwatch()
    with watch.running():
        simulate(work / "plans" / "bench", silos, work / "simulation", device="cpu", threads=threads)
    data = [load_silo_data(folder) for folder in silos.values()]
    examples = sum(len(one.train) for one in data)
    counted = list(zip(watch.laps[1:-1], watch.laps[2:], strict=True))
    walls = [after.at_s - before.at_s for before, after in counted]
    shares: dict[str, float] = {}
    for part in PARTS:
        took = [after.parts[part] - before.parts[part] for before, after in counted]
        shares[part] = statistics.median(seconds / wall for seconds, wall in zip(took, walls, strict=True))
    known = [sum(after.parts.values()) - sum(before.parts.values()) for before, after in counted]
    shares[REST] = statistics.median(1 - seconds / wall for seconds, wall in zip(known, walls, strict=True))
    return Figures(
        size=size,
        parameters=bundle.plan.model.parameters,
        silos=len(silos),
        examples=examples,
        dev_examples=sum(len(one.dev) for one in data),
        rounds=len(counted),
        threads=threads,
        round_s=round(statistics.median(walls), 3),
        examples_per_s=round(
            statistics.median(examples * EPOCHS / (after.training_s - before.training_s) for before, after in counted),
            1,
        ),
        shares={part: round(share, 4) for part, share in shares.items()},
    )
