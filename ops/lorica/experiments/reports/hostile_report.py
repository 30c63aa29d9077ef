"""What a study with hostile silos found: attacks x rules, of honest silos alone, from its lines of results.

Scores are means over the silos that the study never has hostile, then over seeds. What a rule is held against is its
difference from `equal`, the plain mean with equal weights, without an attack: of the same seeds, silos and questions.
An interval is of a paired bootstrap over seeds and questions (intervals.py).
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lorica.experiments.definition import VARIANT, Study
from lorica.experiments.reports.intervals import Difference, Right, paired, right_of
from lorica.experiments.results_file import lines_of
from lorica.hostile.named import NOBODY
from lorica_security.errors import ConfigurationError

STUDIES: Final = Path(__file__).parents[1] / "studies"
PUBLISHED: Final = ("robust", "robust-one")
"""With two hostile silos of eight, and with one."""
REFERENCE: Final = "equal"
"""The variant that others are held against."""
Line = Mapping[str, Any]
_BAR: Final = "-"
"""Where no run is done."""


@dataclass(frozen=True, slots=True)
class Found:
    """The runs of a study that are done, by rule and attack, with the names of both in the study's order."""

    lines: Mapping[tuple[str, str], Sequence[Line]]
    rules: Sequence[str]
    attacks: Sequence[str]

    @classmethod
    def of(cls, study: Study, *files: Path) -> "Found":
        """Raises ConfigurationError where `files` have no run of the study."""
        runs = {run.key: run for run in study.runs()}
        named = () if study.hostile is None else study.hostile.silos
        by_cell: dict[tuple[str, str], list[Line]] = {}
        for line in lines_of(*files):
            if line["run"] in runs:
                by_cell.setdefault(_cell(line), []).append(_of_others(line, named))
        if not by_cell:
            where = ", ".join(map(str, files)) or "the folder"
            raise ConfigurationError(f"{where} has no run of study {study.name}: run it first")
        cells = [_cell(run.point) for run in runs.values()]
        return cls(
            by_cell,
            [rule for rule in dict.fromkeys(rule for rule, _ in cells) if any(rule == it for it, _ in by_cell)],
            [
                attack
                for attack in dict.fromkeys(attack for _, attack in cells)
                if any(attack == it for _, it in by_cell)
            ],
        )

    def at(self, rule: str, attack: str) -> Sequence[Line]:
        return self.lines.get((rule, attack), ())


def _of_others(line: Line, named: Sequence[str]) -> Line:
    """Without the scores of silos that the study names as hostile, so that all cells are of the same silos."""
    if "test" not in line:
        return line
    return {**line, "test": {silo: score for silo, score in line["test"].items() if silo not in named}}


def _cell(point: Mapping[str, Any]) -> tuple[str, str]:
    return str(point.get(VARIANT, REFERENCE)), str(point.get("hostile.attack", NOBODY))


def difference(lines: Sequence[Line], others: Sequence[Line]) -> Difference | None:
    """`lines` less `others`, over the seeds that both have and the silos that were honest in both; None without one.

    A federation that was brought to an end answers nothing.
    """
    by_seed = {line["seed"]: line for line in others if "test" in line}
    pairs = (
        (line, by_seed[line["seed"]])
        for line in sorted(lines, key=lambda it: int(it["seed"]))
        if line["seed"] in by_seed
    )
    return paired([(_right(line, other), right_of(other["test"])) for line, other in pairs])


def _right(line: Line, other: Line) -> Right:
    """Of the silos that are honest in `line`."""
    return {
        silo: line["test"][silo]["right"] if "test" in line else "0" * len(score["right"])
        for silo, score in other["test"].items()
        if silo not in line["hostile"]
    }


def cost_rows(found: Found) -> Iterable[Sequence[str]]:
    """What each rule comes to without an attack."""
    yield "rule", "exact match", "less that of `equal`, points", "loss of a token", "seeds"
    for rule in found.rules:
        lines = found.at(rule, NOBODY)
        if lines:
            less = difference(lines, found.at(REFERENCE, NOBODY))
            yield (
                f"`{rule}`",
                f"{100 * _mean(lines, 'exact_match'):.1f} %",
                _BAR if less is None or rule == REFERENCE else str(less),
                f"{_mean(lines, 'loss_per_token'):.3f}",
                str(len(lines)),
            )


def match_rows(found: Found) -> Iterable[Sequence[str]]:
    """What is left under each attack, in points less than `equal` without one."""
    attacks = [attack for attack in found.attacks if attack != NOBODY]
    yield ("rule", *(f"`{attack}`" for attack in attacks))
    for rule in found.rules:
        cells = [difference(found.at(rule, attack), found.at(REFERENCE, NOBODY)) for attack in attacks]
        yield (f"`{rule}`", *(_BAR if cell is None else str(cell) for cell in cells))


def loss_rows(found: Found) -> Iterable[Sequence[str]]:
    yield ("rule", *(f"`{attack}`" for attack in found.attacks))
    for rule in found.rules:
        yield (f"`{rule}`", *(_loss(found.at(rule, attack)) for attack in found.attacks))


def _loss(lines: Sequence[Line]) -> str:
    if not lines:
        return _BAR
    if not all("test" in line for line in lines):
        return "ended"
    return f"{_mean(lines, 'loss_per_token'):.3f}"


def backdoor_rows(found: Found) -> Iterable[Sequence[str]]:
    """How many questions with the trigger get the attacker's SQL."""
    yield "rule", "with the attack", "without"
    for rule in found.rules:
        planted, clean = found.at(rule, "backdoor"), found.at(rule, NOBODY)
        if planted:
            yield (f"`{rule}`", *(f"{100 * _mean(it, 'backdoor'):.1f} %" if it else _BAR for it in (planted, clean)))


def _mean(lines: Sequence[Line], of: str) -> float:
    """Of honest silos, over seeds."""
    return statistics.fmean(statistics.fmean(silo[of] for silo in line["test"].values()) for line in lines)


TABLES: Final[Mapping[str, tuple[str, Callable[[Found], Iterable[Sequence[str]]]]]] = {
    "cost": ("What each rule comes to without an attack", cost_rows),
    "match": ("Points of exact match less than `equal` without an attack", match_rows),
    "loss": ("Loss of a target token on test, in nats", loss_rows),
    "backdoor": ("Questions with the trigger that get the attacker's SQL", backdoor_rows),
}


def report_text(study: Study, *files: Path) -> str:
    """The page of a study with hostile silos; raises ConfigurationError where none of its runs is done."""
    found = Found.of(study, *files)
    done, runs = sum(len(lines) for lines in found.lines.values()), sum(1 for _ in study.runs())
    parts = [f"# Study {study.name}\n", f"{done} of {runs} runs. Silos that are never hostile are scored.\n"]
    for title, rows in TABLES.values():
        parts += [f"## {title}\n", _table(list(rows(found)))]
    return "\n".join(parts)


def published_table(study: str, name: str) -> str:
    """A table of ops/docs/robust.md, without the line that ends it."""
    found = Found.of(Study.read(STUDIES / f"{study}.toml"), STUDIES / f"{study}.jsonl")
    return _table(list(TABLES[name][1](found))).rstrip("\n")


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ("---", *["---:"] * (len(rows[0]) - 1)), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
