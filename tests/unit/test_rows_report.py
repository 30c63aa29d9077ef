"""The page of a study of rows, from made-up lines: every figure by hand, and which runs it is of."""

from collections.abc import Mapping
from typing import Any

import pytest

from lorica.experiments.definition import Run, Study
from lorica.experiments.reports.dev_losses import interval
from lorica.experiments.reports.rows_report import rows_text
from lorica.experiments.reports.tables import difference
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError
from silo_agent.training.tasks.wikisql_query import METRICS

STUDY = """
name = "rows"
silos = "silos"
seeds = [1, 2]
setups = ["fedavg"]
scored = ["server"]
pseudo_labels = 8
compare_with = "alone"
[start]
size = "micro"
[variants.alone]
"semi_supervised.unlabelled" = ["ward-*"]
"semi_supervised.teacher" = "none"
[variants.taught]
"semi_supervised.unlabelled" = ["ward-*"]
"""
ANSWERS = {("alone", 1): "1000", ("alone", 2): "0000", ("taught", 1): "1110", ("taught", 2): "1000"}
SHARES = {("alone", 1): [0.5], ("alone", 2): [0.25], ("taught", 1): [0.5, 0.75], ("taught", 2): [0.5, 0.125]}
DEV = {"alone": 0.5, "taught": 1.0}


def scored(share: float) -> dict[str, float]:
    return {"examples": 4, "exact_match": share, **dict.fromkeys(METRICS, share)}


def line(run: Run) -> Mapping[str, Any]:
    row = str(run.point["variant"])
    right, shares = ANSWERS[row, run.seed], SHARES[row, run.seed]
    return {
        "run": run.key,
        "setup": run.setup,
        "seed": run.seed,
        "point": dict(run.point),
        "commit": "abc",
        "seconds": 1.0,
        "test": {"server": {**scored(right.count("1") / 4), "right": right}},
        "dev": {"server": scored(DEV[row])},
        "pseudo_labels": [{"round": 2 * number + 1, "right": share} for number, share in enumerate(shares)],
    }


def page(*, but: tuple[str, int] | None = None) -> str:
    study = parse_toml(Study, STUDY, "study.toml")
    runs = [run for run in study.runs() if (run.point["variant"], run.seed) != but]
    return rows_text(study, [line(run) for run in runs])


def test_the_page_of_two_rows_by_hand() -> None:
    told = page()
    on_test, on_dev = told.split("## Parts of an answer on dev")
    assert "| alone | 12.5 ± 17.7 |" in on_test
    assert "| taught | 50.0 ± 35.4 |" in on_test
    assert "| alone | 50.0 ± 0.0 |" in on_dev
    assert "| taught | 100.0 ± 0.0 |" in on_dev
    differences = told.split("## Points more than alone")[1].split("## Right answers among")[0]
    rows = [row for row in differences.splitlines() if row.startswith(("| alone", "| taught"))]
    assert len(rows) == 1, "alone is what others are compared with"
    assert [cell.split(" [")[0].strip() for cell in rows[0].split("|")[2:5]] == ["+50.0", "+25.0", "+37.5"]
    by_round, by_run = told.split("## Right answers among")[1].split("## Right answers of teachers")
    assert "| alone | 37.5 ± 17.7 |" in by_round
    assert "| taught | 50.0 ± 0.0 | 43.8 ± 44.2 |" in by_round
    assert "| alone | 1 | 50.0 | 50.0 | 25.0 |  |" in by_run
    assert "| taught | 1 | 62.5 | 75.0 | 75.0 | +50.0 [" in by_run
    assert "| taught | 2 | 31.2 | 12.5 | 25.0 | +25.0 [" in by_run


def test_a_row_that_lacks_a_seed_says_so_and_is_compared_by_the_others() -> None:
    told = page(but=("taught", 1))
    assert "| taught (1 of 2 seeds) | 25.0 |" in told
    assert "| taught (1 of 2 seeds) |  | +25.0 [" in told
    without_measure = page(but=("alone", 1))
    assert "| taught |  | +25.0 [" in without_measure, "seed 1 has nothing to be compared with"


def test_losses_on_dev_by_round_and_by_how_much_they_differ() -> None:
    """Two silos: of "alone" 1.0 and 2.0, then 0.5 each; "taught" has 0.1 and 0.3 more in the end."""
    study = parse_toml(Study, STUDY.replace('with = "alone"', 'with = "alone"\ncompare_losses = true'), "study.toml")
    more = {("taught", 1): 0.1, ("taught", 2): 0.3}
    lines = []
    for run in study.runs():
        last = 0.5 + more.get((str(run.point["variant"]), run.seed), 0.0)
        rounds = [
            {"round": 1, "silos": {"a": {"loss_per_token": 1.0}, "b": {"loss_per_token": 2.0}}},
            {"round": 2, "silos": {"a": {"examples": 3}, "b": {"examples": 3}}},
            {"round": 3, "silos": {"a": {"loss_per_token": last - 0.1}, "b": {"loss_per_token": last + 0.1}}},
        ]
        lines.append({**line(run), "rounds": [rounds]})
    told = rows_text(study, lines).split("## Loss per target token on dev, in nats")[1].split("## Right answers")[0]
    assert "| row | round 1 | round 3 |" in told
    assert "| alone | 1.500 ± 0.000 | 0.500 ± 0.000 |" in told
    assert "| taught | 1.500 ± 0.000 | 0.700 ± 0.141 |" in told
    half = 12.706 * 0.1  # of two seeds: t of one degree of freedom, times the standard error
    assert f"| taught | +0.100 | +0.300 | +0.200 [{0.2 - half:+.3f}, {0.2 + half:+.3f}] |" in told
    assert interval([0.5]) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (STUDY.replace('compare_with = "alone"', "compare_losses = true"), "needs the row to compare with"),
        (
            STUDY.replace('["fedavg"]', '["finetuning"]\ncompare_losses = true').replace("pseudo_labels = 8\n", ""),
            "leave finetuning out",
        ),
    ],
)
def test_losses_are_of_one_federation_and_a_row_to_compare_with(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse_toml(Study, text, "study.toml")


def test_pairs_are_of_one_seed_however_lines_stand() -> None:
    """Seed 1 answers all, seed 2 nothing, in both rows: neither row is better."""
    one, two, three = (
        {"seed": seed, "test": {"server": {"right": right}}} for seed, right in ((1, "1111"), (2, "0000"), (3, "1111"))
    )
    for lines, others in (([one, two], [two, one]), ([two], [one, two, three]), ([two, three], [one, two, three])):
        found = difference(lines, others)
        assert found is not None
        assert (found.mean, found.least, found.most) == (0.0, 0.0, 0.0)
    assert difference([one], [two, three]) is None
