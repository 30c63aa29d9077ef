"""The tables and pictures of ops/docs that follow from the code: `make docs` writes them, a test compares them.

A page holds its prose, and between `<!-- table: NAME -->` and `<!-- end of table -->` a table that is made here. What a
key means is said once, in the template that an operator edits; what values it takes comes from the pydantic model.
"""

import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from lorica.documentation import bench_tables, docs_commands, rooms
from lorica.documentation.algorithm_table import algorithm_table, mechanism_table
from lorica.documentation.forecasts import at_scale
from lorica.documentation.forecasts.int8_under_masks import masked_int8_table
from lorica.documentation.forecasts.on_lines import lines_table
from lorica.documentation.forecasts.private_plans import forecast_examples
from lorica.documentation.limits_tables import coordinator_mistakes, limits_table, silo_mistakes
from lorica.documentation.markdown import DOCS, markdown_table
from lorica.documentation.metrics_tables import (
    host_metrics_table,
    leadership_metrics_table,
    metrics_table,
    silo_metrics_table,
)
from lorica.documentation.runbook_page import TARGET, write_runbook
from lorica.documentation.semi_supervised_table import semi_supervised_table
from lorica.documentation.settings_tables import (
    family_table,
    federation_table,
    plan_model_table,
    plan_table,
    preset_table,
    silo_table,
)
from lorica.experiments.reports import hostile_report
from lorica.privacy_utility.pages import aim_table, cost_picture, cost_table, ideas_table, joint_table

_TABLE = re.compile(r"(<!-- table: ([a-z-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def write_pages(folder: Path = DOCS) -> list[Path]:
    """Bring the tables of every page up to date; the pages that changed."""
    changed = []
    for page in sorted(folder.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (current := rendered(text)) != text:
            page.write_text(current, encoding="utf-8")
            changed.append(page)
    return changed


def write_pictures(folder: Path = DOCS) -> None:
    for name, drawn in PICTURES.items():
        (folder / name).write_text(drawn(), encoding="utf-8")


def rendered(page: str) -> str:
    """The page with every table as the code now has it; raises KeyError for a table that nobody makes."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[4]}", page)


def tables_of(page: str) -> list[str]:
    """The names of the tables that the page asks for."""
    return [match[2] for match in _TABLE.finditer(page)]


# --- commands


def commands_table(program: str) -> str:
    return markdown_table(("command", "what it does", "options"), list(docs_commands.rows(program)))


# --- studies


def study_table(study: str, heading: str) -> str:
    """The first table under a heading of the study's published report."""
    report = (DOCS / "results" / study / "report.md").read_text(encoding="utf-8")
    lines = report.split(f"\n{heading}\n", 1)[1].splitlines()
    from_table = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    return "\n".join(itertools.takewhile(lambda line: line.startswith("|"), from_table))


_STUDY_TABLES: Final = {
    "ladder-scores": ("ladder", "## Exact match on test"),
    "ladder-by-macro": ("ladder", "### By the model with the best MacroAvg on dev"),
    "ladder-without": ("ladder", "### MacroAvg without one silo"),
    "ladder-differences": ("ladder", "## Paired differences"),
    "ladder-loss": ("ladder", "## Loss per target token on test, in nats"),
    "ladder-equal": ("ladder-equal", "## Exact match on test"),
    "ladder-equal-differences": ("ladder-equal", "## Paired differences"),
    "ladder-long": ("ladder-long", "## Exact match on test"),
    "ladder-long-differences": ("ladder-long", "## Paired differences"),
    "ladder-mislabelled": ("ladder-mislabelled", "## Exact match on test"),
    "ladder-mislabelled-differences": ("ladder-mislabelled", "## Paired differences"),
    "ladder-server": ("ladder-server", "## Exact match on test"),
    "fedparsing-test": ("fedparsing", "## Parts of an answer on test"),
    "fedparsing-dev": ("fedparsing", "## Parts of an answer on dev, which chose the model"),
    "fedparsing-differences": ("fedparsing", "## Points more than alone"),
    "fedparsing-fewer-test": ("fedparsing-300", "## Parts of an answer on test"),
    "fedparsing-fewer-differences": ("fedparsing-300", "## Points more than alone"),
    "fedparsing-fewest-test": ("fedparsing-100", "## Parts of an answer on test"),
    "fedparsing-fewest-differences": ("fedparsing-100", "## Points more than alone"),
    "fedparsing-cohort-test": ("fedparsing-cohort", "## Parts of an answer on test"),
    "fedparsing-cohort-differences": ("fedparsing-cohort", "## Points more than alone"),
    "fedparsing-rounds": ("fedparsing", "## Right answers among those that a teacher begins a round with"),
    "fedparsing-shares": ("fedparsing", "## Right answers of teachers, and points more than alone"),
    "wire-losses": ("wire", "## Loss per target token on dev, in nats"),
    "wire-differences": ("wire", "## Nats more than float32 after the last round"),
    "answers-scores": ("answers", "## Exact match on test"),
    "answers-differences": ("answers", "## Points more than floor"),
}


# --- rooms


def rooms_table(package: str) -> str:
    return markdown_table(("room", "what it is for"), list(rooms.rows(package)))


TABLES: Final[dict[str, Callable[[], str]]] = {
    "bench-peers": partial(bench_tables.table, "peers", bench_tables.rounds),
    "bench-base-peers": partial(bench_tables.table, "base-peers", bench_tables.rounds),
    "bench-elsewhere": partial(bench_tables.table, "elsewhere", bench_tables.elsewhere),
    "bench-log": partial(bench_tables.table, "log", bench_tables.log_entries),
    "bench-many": partial(bench_tables.table, "many", bench_tables.many),
    "bench-masks": partial(bench_tables.table, "masks", bench_tables.masks),
    "bench-masked-base": partial(bench_tables.table, "masked-base", bench_tables.masked_rounds),
    "bench-masked": partial(bench_tables.table, "masked", bench_tables.masked_rounds),
    "bench-silos": partial(bench_tables.table, "silos", bench_tables.rounds),
    "bench-simulation": partial(bench_tables.table, "simulation", bench_tables.simulations),
    "bench-simulation-few": partial(bench_tables.table, "simulation-few", bench_tables.simulations),
    "bench-private": partial(bench_tables.table, "private", bench_tables.private),
    "bench-training": partial(bench_tables.table, "training", bench_tables.trainers),
    "bench-training-base": partial(bench_tables.table, "training-base", bench_tables.trainers),
    "bench-small": partial(bench_tables.table, "small", bench_tables.rounds),
    "plan": plan_table,
    "plan-model": plan_model_table,
    "algorithms": algorithm_table,
    "mechanisms": mechanism_table,
    "family": family_table,
    "presets": preset_table,
    "semi-supervised": semi_supervised_table,
    "federation": federation_table,
    "silo": silo_table,
    "privacy-forecast": forecast_examples,
    "first-limit": at_scale.first_limit_table,
    "hundreds-of-silos": at_scale.hundreds_table,
    "sums-by-range": at_scale.ranges_table,
    "regions-and-graph": at_scale.regions_table,
    "lines": lines_table,
    "ring-levels": masked_int8_table,
    "metrics": metrics_table,
    "silo-metrics": silo_metrics_table,
    "host-metrics": host_metrics_table,
    "leadership-metrics": leadership_metrics_table,
    "limits": limits_table,
    "coordinator-mistakes": coordinator_mistakes,
    "silo-mistakes": silo_mistakes,
    "help": docs_commands.help_block,
    "utility-cost": cost_table,
    "utility-aim": aim_table,
    "utility-ideas": ideas_table,
    "utility-joint": joint_table,
    **{name: partial(study_table, *where) for name, where in _STUDY_TABLES.items()},
    **{
        f"{study}-{name}": partial(hostile_report.published_table, study, name)
        for study in hostile_report.PUBLISHED
        for name in hostile_report.TABLES
    },
    **{f"commands-{program}": partial(commands_table, program) for program in docs_commands.PROGRAMS},
    **{f"rooms-{package.replace('_', '-')}": partial(rooms_table, package) for package in rooms.PACKAGES},
}

PICTURES: Final[dict[str, Callable[[], str]]] = {"pictures/privacy-utility.svg": cost_picture}


if __name__ == "__main__":
    write_pictures()
    if write_runbook():
        sys.stdout.write(f"{TARGET.relative_to(DOCS.parent.parent)} brought up to date\n")
    for page in write_pages():
        sys.stdout.write(f"{page.relative_to(DOCS.parent.parent)} brought up to date\n")
