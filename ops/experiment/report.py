"""What a study found: a page in Markdown with tables, and the paper's figures, from results.jsonl alone.

Means stand with the standard deviation over seeds (n - 1). A score is exact match on test unless a table says otherwise.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.experiment.definition import SETUPS, Study
from ops.experiment.run import require_done
from security.errors import ConfigurationError

PAGE = "report.md"
Line = Mapping[str, Any]
Curve = dict[float, list[float]]
"""By round, the values of the seeds."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`curves` by label; the least and the greatest value of the seeds are drawn as a band around their mean."""

    file: str
    title: str
    curves: Mapping[str, Curve]
    of: str
    along: str = "round"


def write_report(study: Study, out: Path) -> Path:
    """The page and its pictures in `out`; raises ConfigurationError where no run of the study is done."""
    by_setup = _by_setup(require_done(study, out))
    for figure in _figures(by_setup):
        _draw(figure, out)
    page = out / PAGE
    page.write_text(report_text(study, out), encoding="utf-8")
    return page


def report_text(study: Study, out: Path) -> str:
    """The page; raises ConfigurationError where no run of the study is done."""
    lines = require_done(study, out)
    by_setup = _by_setup(lines)
    parts = [
        f"# Study {study.name}\n",
        _provenance(study, lines),
        "## Exact match on test\n",
        _scores(by_setup, "exact_match"),
        "## Execution accuracy on test, where a silo has a database\n",
        _scores(by_setup, "execution_accuracy"),
        "## Loss per target token on test, in nats\n",
        _scores(by_setup, "loss_per_token", share=False),
        "## What Lorar changes\n",
        _lorar(by_setup, "exact_match", "points of exact match more than without"),
        _lorar(by_setup, "loss_per_token", "nats of loss per token more than without", share=False),
        "## Whose update counted\n",
        _shares(by_setup),
        *(f"![{figure.title}]({figure.file})\n" for figure in _figures(by_setup)),
    ]
    return "\n".join(parts)


def _by_setup(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """In the paper's order, whichever run ended first; the seeds in theirs."""
    by_setup: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: (list(SETUPS).index(line["setup"]), str(line["point"]), line["seed"])):
        by_setup[_named(line)].append(line)
    return by_setup


def _named(line: Line) -> str:
    point = ", ".join(f"{key} = {value}" for key, value in line["point"].items())
    return SETUPS[line["setup"]].label + (f" ({point})" if point else "")


def _provenance(study: Study, lines: Sequence[Line]) -> str:
    commits = sorted({line["commit"] for line in lines if line["commit"]})
    seeds = sorted({line["seed"] for line in lines})
    seconds = sum(line["seconds"] for line in lines)
    return (
        f"{len(lines)} runs, seeds {', '.join(map(str, seeds))}, {seconds / 3600:.1f} hours; begun with "
        f"{(study.start.folder and Path(study.start.folder).name) or study.start.size}; commit {', '.join(commits) or 'unknown'}. "
        f"Values of the plan: {', '.join(f'`{key} = {value}`' for key, value in study.plan.items()) or 'the preset alone'}.\n"
    )


def spread(values: Sequence[float], *, share: bool = True) -> str:
    """Mean and standard deviation over seeds; one seed has none."""
    if not values:
        return ""
    scale, digits = (100.0, 1) if share else (1.0, 3)
    text = f"{scale * statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {scale * statistics.stdev(values):.{digits}f}"


def _scores(by_setup: Mapping[str, Sequence[Line]], of: str, *, share: bool = True) -> str:
    silos = sorted(
        {silo for lines in by_setup.values() for line in lines for silo, score in line["test"].items() if of in score}
    )
    if not silos:
        return "No silo has one.\n"
    rows = []
    for name, lines in by_setup.items():
        cells = [
            spread([line["test"][silo][of] for line in lines if of in line["test"].get(silo, {})], share=share)
            for silo in silos
        ]
        macro = [_macro(line, silos, of) for line in lines]
        micro = [_micro(line, silos, of) for line in lines]
        rows.append((name, *cells, spread(macro, share=share), spread(micro, share=share)))
    return _table(("set-up", *silos, "MacroAvg", "MicroAvg"), rows)


def _macro(line: Line, silos: Sequence[str], of: str) -> float:
    return statistics.fmean(line["test"][silo][of] for silo in silos)


def _micro(line: Line, silos: Iterable[str], of: str) -> float:
    scores = [line["test"][silo] for silo in silos]
    examples = sum(score["examples"] for score in scores)
    return float(sum(score[of] * score["examples"] for score in scores) / examples)


def _lorar(by_setup: Mapping[str, Sequence[Line]], of: str, title: str, *, share: bool = True) -> str:
    """Lorar less its base algorithm, seed by seed; silos from the smallest test split on."""
    rows: list[Sequence[str]] = []
    head: Sequence[str] = ()
    for base in ("fedopt", "fedavg", "fedprox"):
        plain, weighted = SETUPS[base].label, SETUPS[f"{base}-lorar"].label
        seeds = {line["seed"]: line for line in by_setup.get(plain, ())}
        pairs = [(seeds[line["seed"]], line) for line in by_setup.get(weighted, ()) if line["seed"] in seeds]
        if not pairs:
            continue
        silos = sorted(pairs[0][0]["test"], key=lambda silo: pairs[0][0]["test"][silo]["examples"])
        cells = [spread([b["test"][silo][of] - a["test"][silo][of] for a, b in pairs], share=share) for silo in silos]
        macro = [_macro(b, silos, of) - _macro(a, silos, of) for a, b in pairs]
        micro = [_micro(b, silos, of) - _micro(a, silos, of) for a, b in pairs]
        head = (title, *silos, "MacroAvg", "MicroAvg")
        rows.append((weighted, *cells, spread(macro, share=share), spread(micro, share=share)))
    return _table(head, rows) if rows else "Its set-ups are not in this study.\n"


def _shares(by_setup: Mapping[str, Sequence[Line]]) -> str:
    """Of the sum of weights, in percent, as a mean over the rounds of a run."""
    rows, silos = [], sorted({silo for lines in by_setup.values() for line in lines for silo in line["test"]})
    for name, lines in by_setup.items():
        if any(len(line["rounds"]) > 1 or len(line["rounds"][0][-1]["silos"]) == 1 for line in lines):
            continue  # silos by themselves
        means = [_mean_shares(line["rounds"][0], silos) for line in lines]
        rows.append((name, *(spread([mean[silo] for mean in means]) for silo in silos)))
    return _table(("percent of the sum of weights", *silos), rows) if rows else "No run has several silos together.\n"


def _mean_shares(rounds: Sequence[Line], silos: Sequence[str]) -> dict[str, float]:
    counted = [row["silos"] for row in rounds if any("share" in silo for silo in row["silos"].values())]
    return {silo: statistics.fmean(row.get(silo, {}).get("share", 0.0) for row in counted) for silo in silos}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# --- pictures


def dev_curve(lines: Sequence[Line]) -> Curve:
    """MicroAvg exact match on dev over rounds, of runs that are one federation each."""
    curve: Curve = defaultdict(list)
    for line in lines:
        for row in line["rounds"][0] if len(line["rounds"]) == 1 else ():
            if row["micro_exact_match"] is not None:
                curve[row["round"]].append(row["micro_exact_match"])
    return curve


def dev_loss_curve(lines: Sequence[Line]) -> Curve:
    """Loss of a target token on dev over rounds, a mean over silos, of runs that are one federation each."""
    curve: Curve = defaultdict(list)
    for line in lines:
        for row in line["rounds"][0] if len(line["rounds"]) == 1 else ():
            losses = [facts["loss_per_token"] for facts in row["silos"].values() if "loss_per_token" in facts]
            if losses:
                curve[row["round"]].append(statistics.fmean(losses))
    return curve


def loss_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """By silo, the largest and the least training loss of each round, as one line that falls within a round."""
    curves: dict[str, Curve] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for row in line["rounds"][0] if len(line["rounds"]) == 1 else ():
            for silo, facts in row["silos"].items():
                if "loss_min" in facts:
                    curves[silo][row["round"] - 0.9].append(facts["loss_max"])
                    curves[silo][row["round"] - 0.1].append(facts["loss_min"])
    return curves


def _figures(by_setup: Mapping[str, Sequence[Line]]) -> Iterator[Figure]:
    def of(curve: Callable[[Sequence[Line]], Curve], *names: str) -> dict[str, Curve]:
        return {SETUPS[name].label: curve(by_setup.get(SETUPS[name].label, ())) for name in names}

    algorithms = ("fedopt", "fedopt-lorar", "fedavg", "fedavg-lorar", "fedprox", "fedprox-lorar")
    weightings = ("fedopt", "fedopt-lorar", "fedopt-loss-reduction", "fedopt-equal")
    figures = []
    for number, names, title in (
        (5, algorithms, "With Lorar and without (as the paper's figure 5)"),
        (6, weightings, "Other weightings of FedOPT (as figure 6)"),
    ):
        figures += [
            Figure(f"figure-{number}.svg", title, of(dev_curve, *names), "MicroAvg exact match, dev"),
            Figure(
                f"figure-{number}-loss.svg",
                f"{title}: loss",
                of(dev_loss_curve, *names),
                "loss of a target token on dev, mean of silos",
            ),
        ]
    for number, name in ((3, "fedopt"), (4, "fedopt-lorar")):
        label = SETUPS[name].label
        curves = loss_curves(by_setup.get(label, ()))
        title = f"Training loss of each silo, {label} (as figure {number})"
        figures.append(Figure(f"figure-{number}.svg", title, curves, "largest and least loss of a round"))
    yield from (figure for figure in figures if any(figure.curves.values()))


def _draw(figure: Figure, out: Path) -> None:
    # Here, not above: it takes a second to load, and an installation that runs no studies has none.
    try:
        import matplotlib as mpl
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed: pip install 'lorica[studies]'"
        ) from error

    pyplot.switch_backend("svg")
    mpl.rcParams["svg.hashsalt"] = "lorica"  # the same results give the same bytes
    canvas, axes = pyplot.subplots(figsize=(8, 4.5))
    for label, curve in figure.curves.items():
        if not curve:
            continue
        along = sorted(curve)
        (line,) = axes.plot(along, [statistics.fmean(curve[at]) for at in along], label=label, linewidth=1.5)
        least, most = [min(curve[at]) for at in along], [max(curve[at]) for at in along]
        axes.fill_between(along, least, most, alpha=0.15, color=line.get_color())
    axes.set(title=figure.title, xlabel=figure.along, ylabel=figure.of)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    canvas.tight_layout()
    canvas.savefig(out / figure.file, metadata={"Date": None})
    pyplot.close(canvas)
