"""What a study found: a page in Markdown with tables, and the paper's figures, from results.jsonl alone.

Means stand with the standard deviation over seeds (n - 1). A score is exact match on test unless a table says
otherwise.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lorica.experiments.definition import SETUPS, Study
from lorica.experiments.reports import hostile_report
from lorica.experiments.reports.averages import Score, macro_average, micro_average
from lorica.experiments.reports.intervals import RESAMPLES, right_of
from lorica.experiments.reports.pictures import Curve, Curves, Dots, Picture, draw
from lorica.experiments.reports.rows_report import rows_text
from lorica.experiments.reports.tables import (
    Group,
    Line,
    difference,
    grouped,
    provenance,
    require_done,
    row_name,
    spread,
    table,
    wrapped,
)
from lorica.experiments.results_file import BY_MACRO, results_files
from lorica_coordinator.service.records import COMPLETED

PAGE = "report.md"


def write_report(study: Study, out: Path) -> Path:
    """The page and its pictures in `out`; raises ConfigurationError where no run of the study is done."""
    page = out / PAGE
    if study.hostile is not None:
        page.write_text(hostile_report.report_text(study, *results_files(out)), encoding="utf-8")
        return page
    page.write_text(report_text(study, out), encoding="utf-8")  # first: it needs no matplotlib
    if study.compare_with:
        return page
    for figure in _figures(study, grouped(require_done(study, out))):
        draw(figure, out)
    return page


def report_text(study: Study, out: Path) -> str:
    """The page; raises ConfigurationError where no run of the study is done."""
    lines = require_done(study, out)
    if study.compare_with:
        return rows_text(study, lines)
    by_setup, seeds = grouped(lines), len(study.seeds)
    parts = [
        f"# Study {study.name}\n",
        provenance(study, lines),
        "## Exact match on test\n",
        _scores(by_setup, "exact_match", seeds),
        *_with_questions(by_setup, seeds),
        "## Execution accuracy on test, where a silo has a database\n",
        _scores(by_setup, "execution_accuracy", seeds),
        "## Loss per target token on test, in nats\n",
        _scores(by_setup, "loss_per_token", seeds, share=False),
        "## Loss per target token on dev after the last round, whose model need not be the one that was tested\n",
        _last_losses(by_setup, seeds),
        "## What Lorar changes\n",
        wrapped(
            "The run with it less that of the same seed without; silos from the one with the fewest training "
            "examples on. More of exact match is better, less of loss."
        ),
        _lorar(by_setup, "exact_match", "points of exact match more than without", seeds),
        _lorar(by_setup, "loss_per_token", "nats of loss per token more than without", seeds, share=False),
        "## Whose update counted\n",
        _shares(by_setup, seeds),
        *(f"![{figure.title}]({figure.file})\n" for figure in _figures(study, by_setup)),
    ]
    return "\n".join(parts)


def _points(by_setup: Iterable[Group]) -> list[str]:
    return list(dict.fromkeys(point for _, point in by_setup))


def _scores(by_setup: Mapping[Group, Sequence[Line]], of: str, seeds: int, *, share: bool = True) -> str:
    silos = sorted(
        {silo for lines in by_setup.values() for line in lines for silo, score in line["test"].items() if of in score}
    )
    if not silos:
        return "No silo has one.\n"
    rows = []
    for group, lines in by_setup.items():
        cells = [
            spread([line["test"][silo][of] for line in lines if of in line["test"].get(silo, {})], share=share)
            for silo in silos
        ]
        # An average over fewer silos would stand beside averages that it cannot be compared with.
        whole = [line for line in lines if all(of in line["test"].get(silo, {}) for silo in silos)]
        macro = [macro_average(_of(line, silos), of) for line in whole]
        micro = [micro_average(_of(line, silos), of) for line in whole]
        rows.append(
            (row_name(group, len(lines), seeds), *cells, spread(macro, share=share), spread(micro, share=share))
        )
    return table(("set-up", *silos, "MacroAvg", "MicroAvg"), rows)


def _with_questions(by_setup: Mapping[Group, Sequence[Line]], seeds: int) -> Iterator[str]:
    """Of a study whose lines say which questions were right."""
    if not all(right_of(line["test"]) for lines in by_setup.values() for line in lines):
        return
    yield "### By the model with the best MacroAvg on dev\n"
    by_macro = {group: [chosen_by_macro(line) for line in lines] for group, lines in by_setup.items()}
    yield _scores(by_macro, "exact_match", seeds)
    yield "### MacroAvg without one silo\n"
    yield _without_one(by_setup, seeds)
    yield "## Paired differences\n"
    yield wrapped(
        "Points of MacroAvg that a row has more than a column, over the seeds that both have, with 95 % intervals by "
        f"bootstrap over seeds and questions ({RESAMPLES} draws). An interval from one seed is of questions alone; one "
        "from few seeds is too short."
    )
    yield _differences(by_setup)
    yield "By the model with the best MacroAvg on dev:\n"
    yield _differences(by_macro)


def chosen_by_macro(line: Line) -> Line:
    """With the test scores of the model that had the best MacroAvg on dev, which often is the one with the best
    MicroAvg."""
    return {**line, "test": line.get(BY_MACRO, line["test"])}


def _without_one(by_setup: Mapping[Group, Sequence[Line]], seeds: int) -> str:
    silos = sorted({silo for lines in by_setup.values() for line in lines for silo in line["test"]})
    rows = []
    for group, lines in by_setup.items():
        cells = [
            spread([macro_average(_of(line, [it for it in silos if it != silo]), "exact_match") for line in lines])
            for silo in silos
        ]
        rows.append((row_name(group, len(lines), seeds), *cells))
    return table(("set-up", *(f"without {silo}" for silo in silos)), rows)


def _differences(by_setup: Mapping[Group, Sequence[Line]]) -> str:
    names = [row_name(group, 0, 0) for group in by_setup]
    rows = [
        (name, *("" if one is other else str(difference(one, other) or "") for other in by_setup.values()))
        for name, one in zip(names, by_setup.values(), strict=True)
    ]
    return table(("MacroAvg, points more than", *names), rows)


def _of(line: Line, silos: Sequence[str]) -> list[Score]:
    return [line["test"][silo] for silo in silos]


def _last_losses(by_setup: Mapping[Group, Sequence[Line]], seeds: int) -> str:
    """Of a set-up that is one federation. MacroAvg is the mean of the silos."""
    rows: list[Sequence[str]] = []
    silos = sorted({silo for lines in by_setup.values() for line in lines for silo in line["test"]})
    for group, lines in by_setup.items():
        last = [losses for line in lines if (losses := _last_dev(line)).keys() == set(silos)]
        if last:
            cells = (spread([losses[silo] for losses in last], share=False) for silo in silos)
            macro = spread([statistics.fmean(losses.values()) for losses in last], share=False)
            rows.append((row_name(group, len(last), seeds), *cells, macro))
    return table(("set-up", *silos, "MacroAvg"), rows) if rows else "No run has several silos together.\n"


def _last_dev(line: Line) -> dict[str, float]:
    """By silo, the loss of the last round that was scored; {} where silos train alone."""
    return next(filter(None, map(_dev_losses, reversed(_rounds(line)))), {})


def _rounds(line: Line) -> Sequence[Line]:
    """Of a run that is one federation; none of one whose silos train alone, which has as many as silos."""
    return line["rounds"][0] if len(line["rounds"]) == 1 else ()


def _dev_losses(row: Line) -> dict[str, float]:
    return {silo: facts["loss_per_token"] for silo, facts in row["silos"].items() if "loss_per_token" in facts}


@dataclass(frozen=True, slots=True)
class Change:
    """Lorar less its base algorithm at one point of the grid: the differences of seeds, by silo and average."""

    lorar: Group
    by_silo: Mapping[str, Sequence[float]]

    @property
    def seeds(self) -> int:
        return len(self.by_silo["MacroAvg"])


def changes(by_setup: Mapping[Group, Sequence[Line]], of: str) -> Iterator[Change]:
    """Of those that have a seed in common. Silos from the one with the fewest training examples on."""
    for base, point in itertools.product(("fedopt", "fedavg", "fedprox"), _points(by_setup)):
        plain = {line["seed"]: line for line in by_setup.get((base, point), ())}
        group = f"{base}-lorar", point
        pairs = [(plain[line["seed"]], line) for line in by_setup.get(group, ()) if line["seed"] in plain]
        if not pairs:
            continue
        silos = _from_the_smallest(pairs[0][0])
        by_silo = {silo: [b["test"][silo][of] - a["test"][silo][of] for a, b in pairs] for silo in silos}
        for average, name in ((macro_average, "MacroAvg"), (micro_average, "MicroAvg")):
            by_silo[name] = [average(_of(b, silos), of) - average(_of(a, silos), of) for a, b in pairs]
        yield Change(group, by_silo)


def _from_the_smallest(line: Line) -> list[str]:
    """Its silos by their training examples; where masks hide those, by those of the test split."""
    sizes = {silo: score["examples"] for silo, score in line["test"].items()}
    for row in line["rounds"][0]:
        told = {silo: facts["examples"] for silo, facts in row["silos"].items() if "examples" in facts}
        if told.keys() == sizes.keys():
            sizes = told
            break
    return sorted(sizes, key=lambda silo: (sizes[silo], silo))


def _lorar(by_setup: Mapping[Group, Sequence[Line]], of: str, title: str, seeds: int, *, share: bool = True) -> str:
    found = list(changes(by_setup, of))
    if not found:
        return "Its set-ups are not in this study.\n"
    return table(
        (title, *found[0].by_silo),
        [
            (
                row_name(change.lorar, change.seeds, seeds),
                *(spread(values, share=share) for values in change.by_silo.values()),
            )
            for change in found
        ],
    )


def _shares(by_setup: Mapping[Group, Sequence[Line]], seeds: int) -> str:
    """Of the sum of weights, in percent, as a mean over the rounds of a run."""
    rows, silos = [], sorted({silo for lines in by_setup.values() for line in lines for silo in line["test"]})
    for group, lines in by_setup.items():
        if SETUPS[group[0]].way != "together":
            continue
        means = [mean for line in lines if (mean := _mean_shares(line["rounds"][0], silos))]
        if means:  # under masks no silo has a weight that anybody knows
            cells = (spread([mean[silo] for mean in means]) for silo in silos)
            rows.append((row_name(group, len(means), seeds), *cells))
    return table(("percent of the sum of weights", *silos), rows) if rows else "No run has several silos together.\n"


def _mean_shares(rounds: Sequence[Line], silos: Sequence[str]) -> dict[str, float]:
    counted = [
        row["silos"] for row in rounds if _made_a_model(row) and any("share" in silo for silo in row["silos"].values())
    ]
    if not counted:
        return {}
    return {silo: statistics.fmean(row.get(silo, {}).get("share", 0.0) for row in counted) for silo in silos}


def _made_a_model(row: Line) -> bool:
    """Not so an attempt that was abandoned, though silos trained in it."""
    return row["outcome"] in COMPLETED


# --- pictures


def dev_curve(lines: Sequence[Line]) -> Curve:
    """MicroAvg exact match on dev over rounds, of runs that are one federation each."""
    return _curve(lines, lambda row: row["micro_exact_match"])


def dev_macro_curve(lines: Sequence[Line]) -> Curve:
    """MacroAvg exact match on dev over rounds, of runs that are one federation each."""
    return _curve(lines, lambda row: row["macro_exact_match"] if len(row["silos"]) > 1 else None)


def dev_loss_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """By silo, its loss of a target token on dev over rounds, of runs that are one federation each."""
    silos = sorted({silo for line in lines for row in _rounds(line) for silo in row["silos"] if len(row["silos"]) > 1})
    return {silo: _curve(lines, lambda row, silo=silo: _dev_losses(row).get(silo)) for silo in silos}  # type: ignore[misc]


def dev_loss_curve(lines: Sequence[Line]) -> Curve:
    """Loss of a target token on dev over rounds, a mean over silos, of runs that are one federation each."""

    def mean_loss(row: Line) -> float | None:
        losses = _dev_losses(row)
        return statistics.fmean(losses.values()) if losses else None

    return _curve(lines, mean_loss)


def _curve(lines: Sequence[Line], value_of: Callable[[Line], float | None]) -> Curve:
    curve: Curve = defaultdict(list)
    for line in lines:
        for row in _rounds(line):
            if (value := value_of(row)) is not None:
                curve[row["round"]].append(value)
    return curve


def loss_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """By silo, the training loss over its optimizer steps, of runs that are one federation each."""
    curves: dict[str, Curve] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for silo, points in line["losses"][0].items() if len(line["losses"]) == 1 else ():
            for step, loss in points:
                curves[silo][step].append(loss)
    return curves


def reduction_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """By silo, what it told of its loss before and after each round, of runs that are one federation each."""
    curves: dict[str, Curve] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for row in filter(_made_a_model, _rounds(line)):
            for silo, facts in row["silos"].items():
                if "loss_max" in facts:
                    curves[silo][row["round"]].append(facts["loss_max"] - facts["loss_min"])
    return curves


def share_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """By silo, its percent of the sum of weights, as a mean of the rounds up to each tenth, of runs that are one
    federation each."""
    curves: dict[str, Curve] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        rows = list(filter(_made_a_model, _rounds(line)))
        tenth = math.ceil(len(rows) / 10)
        for start in range(0, len(rows), tenth or 1):
            part = rows[start : start + tenth]
            for silo, share in _mean_shares(part, list(line["test"])).items():
                curves[silo][part[-1]["round"]].append(100 * share)
    return curves


_ALGORITHMS = ("fedopt", "fedopt-lorar", "fedavg", "fedavg-lorar", "fedprox", "fedprox-lorar")
_WEIGHTINGS = ("fedopt", "fedopt-lorar", "fedopt-loss-reduction", "fedopt-equal")


def _figures(study: Study, by_setup: Mapping[Group, Sequence[Line]]) -> Iterator[Picture]:
    """The paper's and what Lorar changes, for each point of the grid by itself; of variants, those beside each
    other."""
    if study.variants:
        yield from (figure for figure in _figures_of_rows(by_setup) if any(figure.shown.values()))
        return
    points = _points(by_setup)
    for number, point in enumerate(points, 1):
        at = {setup: lines for (setup, where), lines in by_setup.items() if where == point}
        suffix, title = (f"-{number}", f", {point}") if len(points) > 1 else ("", "")
        yield from (figure for figure in _figures_at(at, suffix, title) if any(figure.shown.values()))


def _figures_of_rows(by_setup: Mapping[Group, Sequence[Line]]) -> Iterator[Picture]:
    named = {row_name(group, 0, 0): lines for group, lines in by_setup.items()}
    for file, shown, unit, curve in (
        ("figure-5", "Exact match over rounds (as figure 5)", "MicroAvg exact match, dev", dev_curve),
        ("figure-5-macro", "Exact match over rounds", "MacroAvg exact match, dev", dev_macro_curve),
        ("figure-5-loss", "Loss over rounds", "loss of a target token on dev, mean of silos", dev_loss_curve),
    ):
        yield Curves(f"{file}.svg", shown, {name: curve(lines) for name, lines in named.items()}, unit)
    for (_, point), (name, lines) in zip(by_setup, named.items(), strict=True):
        told, shares = dev_loss_curves(lines), share_curves(lines)
        yield Curves(f"figure-3-{point}.svg", f"Loss of each silo, {name} (as figures 3 and 4)", told, "loss on dev")
        if any(max(map(max, curve.values())) > 1.01 * min(map(min, curve.values())) for curve in shares.values()):
            told = reduction_curves(lines)  # which counts where shares follow it
            yield Curves(f"figure-4-{point}.svg", f"Loss reduction of each silo, {name}", told, "nats of a token")
            shown = f"Whose update counted in each tenth of the rounds, {name}"
            yield Curves(f"figure-shares-{point}.svg", shown, shares, "percent of the sum of weights")


def _figures_at(at: Mapping[str, Sequence[Line]], suffix: str, point: str) -> Iterator[Picture]:
    alone = {(name, ""): lines for name, lines in at.items()}
    for file, score, shown, unit, scale in (
        ("figure-lorar", "exact_match", "What Lorar adds to exact match on test", "points more than without", 100.0),
        (
            "figure-lorar-loss",
            "loss_per_token",
            "What Lorar adds to loss on test",
            "nats a token more than without",
            1.0,
        ),
    ):
        dots = {
            SETUPS[change.lorar[0]].label: {
                silo: [scale * value for value in values] for silo, values in change.by_silo.items()
            }
            for change in changes(alone, score)
        }
        yield Dots(f"{file}{suffix}.svg", f"{shown}{point}", dots, unit)

    def of(curve: Callable[[Sequence[Line]], Curve], names: Iterable[str]) -> dict[str, Curve]:
        return {SETUPS[name].label: curve(at.get(name, ())) for name in names}

    for number, names, shown in (
        (5, _ALGORITHMS, "With Lorar and without (as the paper's figure 5)"),
        (6, _WEIGHTINGS, "Other weightings of FedOPT (as figure 6)"),
    ):
        yield Curves(
            f"figure-{number}{suffix}.svg", f"{shown}{point}", of(dev_curve, names), "MicroAvg exact match, dev"
        )
        yield Curves(
            f"figure-{number}-loss{suffix}.svg",
            f"{shown}: loss{point}",
            of(dev_loss_curve, names),
            "loss of a target token on dev, mean of silos",
        )
    for name in ("fedopt-lorar", "fedavg-lorar"):
        shown = f"Whose update counted in each tenth of the rounds, {SETUPS[name].label}{point}"
        curves = share_curves(at.get(name, ()))
        yield Curves(f"figure-shares-{name}{suffix}.svg", shown, curves, "percent of the sum of weights")
    for number, name in ((3, "fedopt"), (4, "fedopt-lorar")):
        shown = f"Training loss of each silo, {SETUPS[name].label} (as figure {number}){point}"
        curves = loss_curves(at.get(name, ()))
        yield Curves(
            f"figure-{number}{suffix}.svg", shown, curves, "loss of a target token", "optimizer steps of the silo"
        )
