"""Joint noise beside noise of each silo's own: eight silos of the study's records, the same epsilon and steps for every
way.

Each of the study's two silos (silos.py) is four here, with a quarter of its records each and all of its held-out
questions. The federation is a simulated one: real agents, masks and ledgers without a network. What joint noise
promises is less (privacy.md): towards who sees sums alone. Its server steps by Adam, since it has no local optimizer;
the other ways step by AdamW at each silo and average deltas.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console

from lorica.demo.federation import Layout
from lorica.demo.plan import private_values
from lorica.demo.run import write_private_silos
from lorica.privacy_utility.answers import Answers
from lorica.privacy_utility.comparison import comparison_table, comparisons
from lorica.privacy_utility.rows import EIGHT, TODAY, Row, keep, read_rows
from lorica.privacy_utility.silos import HELD_OUT, NAMES, study_silos
from lorica.simulation.run import silos_in, simulate
from lorica_coordinator.plans.model_source import FolderModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.console.terminal import show_table

PARTS: Final = 4
"""Silos that each of the study's is divided into."""
_PLAN: Final = "joint"
_ALLOWED: Final = "[policy]\nmax_epsilon = 1000.0\nmax_epsilon_alone = 1000.0\n"
_STEPS: Final = 80
_RATE: Final = 0.025
"""Of a silo's records in a step."""

WAYS: Final[Mapping[str, Mapping[str, object]]] = {
    TODAY: {"schedule.rounds": 4, "privacy.steps": _STEPS // 4},
    "own, a step a round": {"schedule.rounds": _STEPS, "privacy.steps": 1},
    "joint": {
        "schedule.rounds": _STEPS,
        "privacy.steps": 1,
        "privacy.noise": "joint",
        "privacy.answer_after_s": 600.0,
        "aggregation.secure_aggregation": True,
        "aggregation.max_delta_norm": 0.0,
        "aggregation.server_optimizer": "adam",
        "aggregation.server_learning_rate": 3.5e-3,
        "aggregation.tau": 1e-6,
    },
}
"""What a plan has otherwise than another. TODAY's is noise of each silo's own, in rounds of twenty steps.

The server's rate is the silos' over the root of eight: their steps are averaged, so that noise moves a parameter by as
much either way. No rate was tuned for a way.
"""


def run_joint(
    work: Path, *, epsilon: float, seeds: Sequence[int], records: int, out: Path, console: Console
) -> Sequence[Row]:
    """Do every training that `out` does not have yet; the rows. `records` is of each of the study's silos, before it is
    divided.

    Raises as run_utility, and what stops a simulation.
    """
    rows = read_rows(out)
    for seed in seeds:
        shared = Layout(work / f"seed-{seed}")
        for way, settings in WAYS.items():
            if any(row.training == (EIGHT, records, epsilon, seed, way) for row in rows):
                continue
            if not (shared.out / "eight").exists():
                _lay_out(shared, records, seed)
            rows.append(_trained(shared, way, settings, epsilon=epsilon, records=records, seed=seed))
            keep(out, rows, console)
    if found := list(comparisons(rows)):
        show_table(console, comparison_table(found))
    return rows


def _lay_out(shared: Layout, records: int, seed: int) -> None:
    shutil.rmtree(shared.out, ignore_errors=True)
    shared.out.mkdir(parents=True)
    write_private_silos(shared, study_silos(), records=records, seed=seed, test=HELD_OUT)
    making = shared.out / "eight.part"
    for name in NAMES:
        lines = (shared.data(name) / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        for part in range(PARTS):
            folder = making / f"{name}-{part + 1}"
            shutil.copytree(shared.data(name), folder)
            (folder / "train.jsonl").write_text("".join(lines[part::PARTS]), encoding="utf-8")
            (folder / "silo.toml").write_text(_ALLOWED, encoding="utf-8")
    making.rename(shared.out / "eight")


def _trained(
    shared: Layout, way: str, settings: Mapping[str, object], *, epsilon: float, records: int, seed: int
) -> Row:
    place = shared.out / f"{way.replace(' ', '-').replace(',', '')}-{epsilon:g}"
    silos, each = silos_in(shared.out / "eight"), records // PARTS
    if not (place / "plans" / _PLAN).exists():
        create_plan(
            place / "plans",
            name=_PLAN,
            federation="study",
            source=FolderModel(shared.warm_start),
            seed=seed,
            overrides={
                **private_values(silos=len(silos), records=each, epsilon=epsilon),
                "aggregation.weighting": "equal",
                "privacy.expected_batch_size": round(_RATE * each),
                "training.batch_size": 32,
                **settings,
            },
        )
    done = simulate(place / "plans" / _PLAN, silos, place / "of", threads=1)
    answers = Answers()
    held_out = {name: shared.data(name) for name in NAMES}
    before, after = answers(done.coordinator.folder.root, done.plan, done.final, held_out)
    cost = done.coordinator.shelf.bundle(done.plan).plan
    return Row(
        data=EIGHT,
        records=records,
        epsilon=epsilon,
        seed=seed,
        exact_match_before=fmean(score.exact_match for score in before.values()),
        exact_match=fmean(score.exact_match for score in after.values()),
        loss_per_token_before=fmean(score.loss_per_token for score in before.values()),
        loss_per_token=fmean(score.loss_per_token for score in after.values()),
        spent=cost.privacy.epsilon(rounds=cost.schedule.rounds, weighted=cost.weighted),
        variant=way,
        right=answers.right,
    )
