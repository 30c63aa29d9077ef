"""ops/docs/results: every table there follows from the lines of results that lie beside it."""

from pathlib import Path

import pytest

from lorica.experiments.definition import SETUPS, Study
from lorica.experiments.reports.report import PAGE, report_text
from lorica.experiments.reports.tables import require_done
from lorica.experiments.results_file import RESULTS

OPS = Path(__file__).resolve().parents[2] / "ops"
RESULTS_PAGE = OPS / "docs" / "results.md"
PUBLISHED = sorted(path.parent for path in (OPS / "docs" / "results").glob(f"*/{RESULTS}"))


def study_of(folder: Path) -> Study:
    return Study.read(OPS / "lorica" / "experiments" / "studies" / f"{folder.name}.toml")


def test_some_study_is_published() -> None:
    assert PUBLISHED


def test_every_row_of_results_that_names_a_set_up_stands_in_a_published_page() -> None:
    pages = "".join((folder / PAGE).read_text(encoding="utf-8") for folder in PUBLISHED).splitlines()
    labels = {setup.label for setup in SETUPS.values()}
    rows = [row for row in RESULTS_PAGE.read_text(encoding="utf-8").splitlines() if row.split(" | ")[0][2:] in labels]
    assert rows
    assert [row for row in rows if row not in pages] == []


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_a_published_page_is_what_its_results_say(folder: Path) -> None:
    assert (folder / PAGE).read_text(encoding="utf-8") == report_text(study_of(folder), folder), (
        f"lorica experiment studies/{folder.name}.toml --out {folder.name} --report writes it"
    )


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_results_are_of_the_study_as_it_is_now_and_of_committed_code(folder: Path) -> None:
    study = study_of(folder)
    done = require_done(study, folder)
    assert len(done) == len((folder / RESULTS).read_text(encoding="utf-8").splitlines()), "none is of another study"
    assert len({line["run"] for line in done}) == len(done), "none is there twice"
    assert all(line["commit"] and not line["commit"].endswith("+") for line in done)
    assert {line["setup"] for line in done} <= set(SETUPS)
