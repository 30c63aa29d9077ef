"""Losses on dev of a study of rows: by round, and what a row has more than the one that it is compared with."""

import math
import statistics
from collections.abc import Mapping, Sequence

from lorica.experiments.reports.tables import Group, Line, spread, table


def losses_by_round(rows: Mapping[Group, Sequence[Line]]) -> str:
    """Mean of the silos, mean and standard deviation over seeds; of rounds that were scored."""
    curves = {point: [_curve(line) for line in lines] for (_, point), lines in rows.items()}
    rounds = sorted({number for row in curves.values() for curve in row for number in curve})
    found = [
        (name, *(spread([curve[number] for curve in row if number in curve], share=False) for number in rounds))
        for name, row in curves.items()
    ]
    return table(("row", *(f"round {number}" for number in rounds)), found)


def loss_differences(rows: Mapping[Group, Sequence[Line]], baseline: Sequence[Line]) -> str:
    """After the last round, by seed, and over all of them."""
    others = {line["seed"]: _last(line) for line in baseline}
    seeds = sorted(others)
    found = []
    for (_, point), lines in rows.items():
        if lines is not baseline:
            more = {line["seed"]: _last(line) - others[line["seed"]] for line in lines if line["seed"] in others}
            cells = (f"{more[seed]:+.3f}" if seed in more else "" for seed in seeds)
            found.append((point, *cells, interval(list(more.values()))))
    return table(("row", *(f"seed {seed}" for seed in seeds), "all"), found)


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval by Student's t; of a single seed there is none."""
    if len(values) < 2:
        return ""
    # Here, not above: it takes a second, and commands that only list themselves do without.
    from scipy.stats import t

    mean = statistics.fmean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def _curve(line: Line) -> dict[int, float]:
    """By round, the mean over silos of the loss per token on dev; the only federation of its run."""
    (rounds,) = line["rounds"]
    told = {
        row["round"]: [silo["loss_per_token"] for silo in row["silos"].values() if "loss_per_token" in silo]
        for row in rounds
    }
    return {number: statistics.fmean(losses) for number, losses in told.items() if losses}


def _last(line: Line) -> float:
    curve = _curve(line)
    return curve[max(curve)]
