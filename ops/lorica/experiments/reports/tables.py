"""What reports are made of: the runs of a study that are done, by row, and tables in Markdown."""

import re
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lorica.experiments.definition import SETUPS, VARIANT, Study
from lorica.experiments.reports.intervals import Difference, paired, right_of
from lorica.experiments.results_file import results
from lorica_security.errors import ConfigurationError

Line = Mapping[str, Any]
Group = tuple[str, str]
"""A set-up and its point of the grid, in words; "" without a grid."""


def require_done(study: Study, out: Path) -> list[Line]:
    """Results of this study alone; raises ConfigurationError where there is none.

    In the paper's order, whichever run ended first; then points of the grid and seeds in the file's. What a run is, the
    study says: a value that has moved to the grid since has the same run, whose line knows no point.
    """
    runs = {run.key: run for run in study.runs()}
    lines = {line["run"]: line for line in results(out)}
    points = [run.point for run in runs.values()]
    order = sorted(
        (run for key, run in runs.items() if key in lines),
        key=lambda run: (list(SETUPS).index(run.setup), points.index(run.point)),
    )
    if not order:
        raise ConfigurationError(f"{out} has no run of study {study.name}: run it first")
    return [{**lines[run.key], "point": dict(run.point)} for run in order]


def grouped(lines: Iterable[Line]) -> dict[Group, list[Line]]:
    """The seeds of each set-up at each point, in the order of the lines."""
    by_setup: dict[Group, list[Line]] = defaultdict(list)
    for line in lines:
        words = (str(value) if key == VARIANT else f"{key} = {value}" for key, value in line["point"].items())
        by_setup[line["setup"], ", ".join(words)].append(line)
    return by_setup


def row_name(group: Group, done: int, seeds: int) -> str:
    """A row's name; it tells where its mean is one of fewer seeds than the study has."""
    setup, point = group
    facts = [*([point] if point not in ("", setup) else []), *([f"{done} of {seeds} seeds"] if done < seeds else [])]
    return SETUPS[setup].label + (f" ({'; '.join(facts)})" if facts else "")


def provenance(study: Study, lines: Sequence[Line]) -> str:
    commits = sorted({line["commit"] for line in lines if line["commit"]})
    seeds = sorted({line["seed"] for line in lines})
    seconds = sum(line["seconds"] for line in lines)
    of_all = len(list(study.runs()))
    count = f"{len(lines)} of {of_all}" if len(lines) < of_all else f"{of_all}"
    return wrapped(
        f"{count} runs, seeds {', '.join(map(str, seeds))}, {seconds / 3600:.1f} hours; begun with "
        f"{(study.start.folder and Path(study.start.folder).name) or study.start.size}; commit "
        f"{', '.join(commits) or 'unknown'}. Values of the plan: {values_of(study.plan) or 'the preset alone'}."
        + "".join(f" Of {SETUPS[name].label} alone: {values_of(values)}." for name, values in study.only.items())
        + "".join(
            f" Of {name}: {values_of(values)}." for name, values in study.variants.items() if not _says_it(name, values)
        )
        + (f" Training examples at most: {values_of(study.at_most)}." if study.at_most else "")
    )


def _says_it(name: str, values: Mapping[str, object]) -> bool:
    """Whether a variant's name is all that it changes."""
    return list(values.values()) in ([], [name])


def difference(lines: Sequence[Line], others: Sequence[Line]) -> Difference | None:
    """`lines` less `others` in MacroAvg, over the seeds that both have; None without one."""
    by_seed = {line["seed"]: line for line in others}
    pairs = [(line, by_seed[line["seed"]]) for line in lines if line["seed"] in by_seed]
    return paired([(right_of(one["test"]), right_of(other["test"])) for one, other in pairs])


def spread(values: Sequence[float], *, share: bool = True) -> str:
    """Mean and standard deviation over seeds; one seed has none."""
    if not values:
        return ""
    scale, digits = (100.0, 1) if share else (1.0, 3)
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {scale * statistics.stdev(values):.{digits}f}"


def wrapped(paragraph: str) -> str:
    """The paragraph in lines of at most 120 characters; code stays on one line."""
    bound = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), paragraph)
    lines = textwrap.fill(bound, 120, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ") + "\n"


def values_of(values: Mapping[str, object]) -> str:
    return ", ".join(f"`{key} = {value}`" for key, value in values.items())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
