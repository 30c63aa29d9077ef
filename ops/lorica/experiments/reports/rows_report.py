"""What a study of rows found that says which row others are compared with (`compare_with`): a page in Markdown, from
its lines of results alone.

Where the task knows parts of an answer, each row has all of its metrics. Differences are paired, of the same seeds and
questions, with intervals by bootstrap over both (intervals.py). Pseudo-labels are what a teacher answers.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from lorica.experiments.definition import Study
from lorica.experiments.reports.averages import macro_average
from lorica.experiments.reports.dev_losses import loss_differences, losses_by_round
from lorica.experiments.reports.intervals import RESAMPLES
from lorica.experiments.reports.tables import (
    Group,
    Line,
    difference,
    grouped,
    provenance,
    spread,
    table,
    wrapped,
)
from silo_agent.training.tasks.wikisql_query import METRICS

_NAMES: Final = ("Overall", "Agg", "Sel", "Wn", "Wc", "Op", "Val")
"""As FedParsing and HydraNet call METRICS."""
_ROUNDS: Final = 8
"""At most so many columns."""
Rows = Mapping[Group, Sequence[Line]]


def rows_text(study: Study, done: Sequence[Line]) -> str:
    """The page of `done`, which are runs of the study (tables.require_done)."""
    rows, seeds = grouped(done), len(study.seeds)
    baseline = next((lines for (_, point), lines in rows.items() if point == study.compare_with), [])
    parts = [f"# Study {study.name}\n", provenance(study, done)]
    if _has_parts(done, "test"):
        parts += ["## Parts of an answer on test\n", _of_parts(rows, "test", seeds)]
        parts += ["## Parts of an answer on dev, which chose the model\n", _of_parts(rows, "dev", seeds)]
    else:
        parts += ["## Exact match on test\n", _of_silos(rows, seeds)]
    parts += [
        f"## Points more than {study.compare_with}\n",
        wrapped(
            f"Exact match on test, of the same seeds and questions; 95 % intervals by bootstrap over both ({RESAMPLES} "
            "draws). An interval from one seed is of questions alone; one from few seeds is too short."
        ),
        _differences(rows, baseline, seeds),
    ]
    if study.compare_losses:
        parts += [
            "## Loss per target token on dev, in nats\n",
            losses_by_round(rows),
            f"## Nats more than {study.compare_with} after the last round\n",
            wrapped("Mean of the silos, of the same seeds; 95 % intervals by Student's t over seeds."),
            loss_differences(rows, baseline),
        ]
    if any("pseudo_labels" in line for line in done):
        parts += [
            "## Right answers among those that a teacher begins a round with\n",
            wrapped(
                f"In percent, of {study.pseudo_labels} training questions of the silos without labels, by the model of "
                "each round of silos with labels. In a row without rounds of the others nobody is taught these answers."
            ),
            _by_round(rows, seeds),
            f"## Right answers of teachers, and points more than {study.compare_with}\n",
            _against_shares(rows, baseline),
        ]
    return "\n".join(parts)


def _has_parts(lines: Sequence[Line], split: str) -> bool:
    return all(METRICS[1] in score for line in lines for score in line[split].values())


def _named(group: Group, done: int, seeds: int) -> str:
    return f"{group[1]} ({done} of {seeds} seeds)" if done < seeds else group[1]


def _of_parts(rows: Rows, split: str, seeds: int) -> str:
    found = []
    for group, lines in rows.items():
        cells = (spread([macro_average(line[split].values(), name) for line in lines]) for name in METRICS)
        found.append((_named(group, len(lines), seeds), *cells))
    return table(("row", *_NAMES), found)


def _of_silos(rows: Rows, seeds: int) -> str:
    silos = sorted({silo for lines in rows.values() for line in lines for silo in line["test"]})
    found = []
    for group, lines in rows.items():
        cells = (spread([line["test"][silo]["exact_match"] for line in lines]) for silo in silos)
        macro = spread([line["macro_exact_match"] for line in lines])
        found.append((_named(group, len(lines), seeds), *cells, macro))
    return table(("row", *silos, "MacroAvg"), found)


def _differences(rows: Rows, baseline: Sequence[Line], seeds: int) -> str:
    numbers = sorted({line["seed"] for lines in rows.values() for line in lines})
    found = []
    for group, lines in rows.items():
        if lines is baseline or (whole := difference(lines, baseline)) is None:
            continue
        alone = ([one for one in lines if one["seed"] == seed] for seed in numbers)
        cells = (str(of_one or "") for of_one in (difference(one, baseline) if one else None for one in alone))
        found.append((_named(group, len(lines), seeds), *cells, str(whole)))
    return table(("row", *(f"seed {number}" for number in numbers), "all"), found)


def _by_round(rows: Rows, seeds: int) -> str:
    """Rounds of rows whose silos take turns have other numbers than those of rows without turns: counted are those of
    silos with labels."""
    most = max(len(line["pseudo_labels"]) for lines in rows.values() for line in lines)
    shown = sorted({round(step * (most - 1) / (_ROUNDS - 1)) for step in range(_ROUNDS)})
    found = []
    for group, lines in rows.items():
        shares = [[one["right"] for one in line["pseudo_labels"]] for line in lines]
        cells = (spread([share[number] for share in shares if number < len(share)]) for number in shown)
        found.append((_named(group, len(lines), seeds), *cells))
    return table(("row", *(str(number + 1) for number in shown)), found)


def _against_shares(rows: Rows, baseline: Sequence[Line]) -> str:
    return table(
        ("row", "seed", "right answers, mean of rounds", "of the last round", "Overall on test", "points more"),
        list(_each_run(rows, baseline)),
    )


def _each_run(rows: Rows, baseline: Sequence[Line]) -> Iterator[Sequence[str]]:
    for (_, point), lines in rows.items():
        for line in lines:
            shares = [one["right"] for one in line["pseudo_labels"]]
            more = "" if lines is baseline else str(difference([line], baseline) or "")
            overall = macro_average(line["test"].values(), "exact_match")
            yield (
                point,
                str(line["seed"]),
                spread([statistics.fmean(shares)]),
                spread([shares[-1]]),
                spread([overall]),
                more,
            )
