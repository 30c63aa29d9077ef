"""Loss and exact match of federations that train with epsilon 1, 4 and without privacy, by the same commands as the
demo.

Two silos (silos.py) have query logs (ops/lorica/demo/silos/query_log.py) and train adapters from a public warm start;
the same silos, warm start and steps for every training of a seed. One real silo of a few hundred records trains a small
T5 from scratch: what cannot be learnt at epsilon 8 is shown beside what can. Ideas for more accuracy at the same
epsilon are trained beside it (comparison.py). Each finished training is in the JSON file at once, and is not done again
by the next run. Seed by seed all trainings are done, so that a study that is cut off is balanced.
"""

import gzip
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from lorica.demo.federation import Layout, Outcome, Scene, prepared, run_federation
from lorica.demo.plan import ROOM_FOR_THE_FILTER, private_plan, set_arguments
from lorica.demo.run import spent, write_private_silos
from lorica.privacy_utility.answers import Answers
from lorica.privacy_utility.comparison import VARIANTS, comparison_table, comparisons
from lorica.privacy_utility.rows import QUERY_LOGS, TODAY, Row, by_epsilon, keep, read_rows
from lorica.privacy_utility.silos import HELD_OUT, NAMES, study_silos
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError

NO_PRIVACY = math.inf
REAL = "geoquery"
REAL_ROUNDS = 6
_BATCH, _STEPS, _ROUNDS = 500, 20, 4
_AT_A_TIME = 32
"""Records in memory: what a small model's processor computes fastest."""
_WEIGHTING = {"aggregation.weighting": "equal"}
_TEXT = {"training.schema_in_input": "false", "training.dropout": 0.0, "training.max_input_tokens": 64}
_UNEVALUATED = {"evaluation.every": 0, "evaluation.initial": "false", "evaluation.last": "false"}


def run_utility(
    work: Path,
    *,
    epsilons: Sequence[float],
    seeds: Sequence[int],
    records: int,
    real: Path | None,
    out: Path,
    console: Console,
    variants: Sequence[str] = (),
) -> Sequence[Row]:
    """Do every training that `out` does not have yet; the rows, in order. `real` is the folder of the silo REAL, or
    None.

    `variants` of VARIANTS are trained beside today's, with the least epsilon, where noise is most. Raises
    ConfigurationError for a folder `work` or `real` that cannot be used and for an unknown variant, StateError when a
    process fails.
    """
    if unknown := sorted(set(variants) - VARIANTS.keys()):
        raise ConfigurationError(f"variant {unknown[0]!r} is unknown: use some of {', '.join(VARIANTS)}")
    if real is not None and not (real / "train.jsonl").is_file():
        raise ConfigurationError(
            f"{real} holds no train.jsonl: name the folder of the silo {REAL} with --real, or leave it out"
        )
    rows = read_rows(out)
    quiet = Console(quiet=True)
    for seed in seeds:
        shared = work / f"seed-{seed}"
        for epsilon, variant in _trainings(epsilons, variants):
            if any(row.training == (QUERY_LOGS, records, epsilon, seed, variant) for row in rows):
                continue
            if not (shared / "warm-start").exists():
                console.print(f"seed {seed}: query logs of {records} records, and the public model", highlight=False)
                shutil.rmtree(shared, ignore_errors=True)
                shared.mkdir(parents=True)
                write_private_silos(Layout(shared), study_silos(), records=records, seed=seed, test=HELD_OUT)
            scene = Scene(
                names=NAMES,
                plan=_of_query_logs(shared / "warm-start", records, epsilon, seed, variant),
                policy=_policy(epsilon),
            )
            rows.append(_trained(QUERY_LOGS, records, epsilon, seed, shared, scene, quiet, variant))
            keep(out, rows, console)
    for epsilon in () if real is None else (NO_PRIVACY, 8.0):
        count = sum(1 for _ in (real / "train.jsonl").open()) if real else 0
        if real is None or any(row.training == (REAL, count, epsilon, seeds[0], TODAY) for row in rows):
            continue
        shared = work / REAL
        _lay_out(real, Layout(shared).data(REAL))
        scene = Scene(names=[REAL], plan=_of_real(count, epsilon, seeds[0]), policy=_policy(epsilon))
        rows.append(_trained(REAL, count, epsilon, seeds[0], shared, scene, quiet))
        keep(out, rows, console)
    show_table(console, _table([row for row in rows if row.variant == TODAY]))
    if found := list(comparisons(rows)):
        show_table(console, comparison_table(found))
    return rows


def _trainings(epsilons: Sequence[float], variants: Sequence[str]) -> Iterator[tuple[float, str]]:
    """The least epsilon first, with today's and each variant."""
    for epsilon in sorted(set(epsilons)):
        others = [variant for variant in variants if variant != TODAY] if epsilon == min(epsilons) != NO_PRIVACY else []
        yield from ((epsilon, variant) for variant in (TODAY, *others))


def _lay_out(real: Path, folder: Path) -> None:
    """The silo's own files under `folder`, with its database unpacked."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in real.iterdir():
        if path.name == "db.sqlite.gz":
            with gzip.open(path) as source, (folder / "db.sqlite").open("wb") as target:
                shutil.copyfileobj(source, target)
        else:
            (folder / path.name).symlink_to(path.resolve())


def _of_query_logs(warm: Path, records: int, epsilon: float, seed: int, variant: str) -> Sequence[str]:
    """Without privacy: as many steps of batches as large, each record once instead of by chance."""
    private = epsilon != NO_PRIVACY
    own: dict[str, object] = {**_WEIGHTING, "schedule.rounds": _ROUNDS}
    if private:
        own |= {"privacy.expected_batch_size": _BATCH, "privacy.steps": _STEPS, "training.batch_size": _AT_A_TIME}
    else:
        rounds = max(1, round(_ROUNDS * _STEPS * _BATCH / records))
        own |= {"privacy.level": "none", "schedule.rounds": rounds, "training.batch_size": _BATCH}
    plan = private_plan(warm, silos=len(NAMES), records=records, epsilon=epsilon if private else 8.0)
    return (*plan, *set_arguments({**own, **VARIANTS[variant]}), "--seed", str(seed))


def _of_real(records: int, epsilon: float, seed: int) -> Sequence[str]:
    values: dict[str, object] = {
        **_WEIGHTING,
        **_TEXT,
        **_UNEVALUATED,
        "schedule.rounds": REAL_ROUNDS,
        "schedule.min_silos": 1,
        "schedule.start_when_ready": "true",
        "aggregation.momentum": 0.0,
        "training.epochs": 6,
        "training.learning_rate": 3e-3,
        "training.max_output_tokens": 160,
    }
    if epsilon != NO_PRIVACY:
        batch = 64
        values |= {
            "training.epochs": 1,
            "privacy.level": "record",
            "privacy.target_epsilon": epsilon,
            "privacy.nominal_records": records,
            "privacy.expected_batch_size": batch,
            "privacy.steps": 6 * records // batch,
        }
    return ("--size", "mini", *set_arguments(values), "--seed", str(seed))


def _policy(epsilon: float) -> Mapping[str, object]:
    return {} if epsilon == NO_PRIVACY else {"require_privacy": "record", "max_epsilon": ROOM_FOR_THE_FILTER * epsilon}


def _trained(
    data: str,
    records: int,
    epsilon: float,
    seed: int,
    shared: Path,
    scene: Scene,
    console: Console,
    variant: str = TODAY,
) -> Row:
    place = Layout(shared / f"epsilon-{epsilon:g}{'' if variant == TODAY else f'-{variant}'}", shared)
    answers = Answers()
    with prepared(place):
        outcome: Outcome = run_federation(place, scene, console, score=answers)
    before, after = outcome.before.values(), outcome.after.values()
    return Row(
        data=data,
        records=records,
        epsilon=epsilon,
        seed=seed,
        exact_match_before=fmean(score.exact_match for score in before),
        exact_match=fmean(score.exact_match for score in after),
        loss_per_token_before=fmean(score.loss_per_token for score in before),
        loss_per_token=fmean(score.loss_per_token for score in after),
        spent=max((spent(place, name)["as_one_schedule"] for name in scene.names), default=0.0),
        variant=variant,
        right=answers.right,
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="what privacy costs: held-out questions, means and seeds", title_style="dim")
    for column in (
        "data",
        "records",
        "epsilon",
        "exact match before",
        "exact match",
        "of each seed",
        "loss a token",
        "spent",
    ):
        table.add_column(column, justify="left" if column == "data" else "right")
    for data, records, epsilon, some in by_epsilon(rows):
        table.add_row(
            data,
            f"{records:,}",
            "none" if epsilon == NO_PRIVACY else f"{epsilon:g}",
            f"{fmean(row.exact_match_before for row in some):.1%}",
            f"{fmean(row.exact_match for row in some):.1%}",
            " ".join(f"{row.exact_match:.1%}" for row in some),
            f"{fmean(row.loss_per_token for row in some):.3f}",
            f"{max(row.spent for row in some):.3g}",
        )
    return table
