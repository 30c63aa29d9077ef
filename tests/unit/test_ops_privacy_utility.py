"""Rows of make privacy-utility: what is kept, what is not done again, and the picture."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ops.privacy_utility.picture import picture
from ops.privacy_utility.run import NO_PRIVACY, Row, by_epsilon, run_utility
from security.errors import ConfigurationError


def row(epsilon: float, seed: int, exact_match: float = 0.5) -> Row:
    return Row(
        data="query logs",
        records=20_000,
        epsilon=epsilon,
        seed=seed,
        exact_match_before=0.1,
        exact_match=exact_match,
        loss_per_token_before=0.9,
        loss_per_token=0.2,
        spent=0.0 if math.isinf(epsilon) else epsilon,
    )


ROWS = [row(epsilon, seed, 0.4 + seed / 10) for epsilon in (NO_PRIVACY, 8.0, 1.0) for seed in (1, 2)]


def written(path: Path) -> Path:
    from dataclasses import asdict

    path.write_text(json.dumps([{**asdict(one), "epsilon": str(one.epsilon)} for one in ROWS]))
    return path


def test_trainings_that_the_file_has_are_not_done_again(tmp_path: Path) -> None:
    svg = tmp_path / "picture.svg"
    rows = run_utility(
        tmp_path / "work",
        epsilons=[NO_PRIVACY, 8.0, 1.0],
        seeds=[1, 2],
        records=20_000,
        real=None,
        out=written(tmp_path / "rows.json"),
        svg=svg,
        console=Console(quiet=True),
    )
    assert rows == ROWS
    assert not (tmp_path / "work").exists()
    assert svg.read_text() == picture(ROWS)


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    other = tmp_path / "rows.json"
    other.write_text('{"something": "else"}')
    with pytest.raises(ConfigurationError, match="not what this command writes"):
        run_utility(
            tmp_path, epsilons=[], seeds=[], records=1000, real=None, out=other, svg=None, console=Console(quiet=True)
        )
    assert other.read_text() == '{"something": "else"}'


def test_a_real_silo_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no train\.jsonl"):
        run_utility(
            tmp_path,
            epsilons=[],
            seeds=[],
            records=1000,
            real=tmp_path / "absent",
            out=tmp_path / "rows.json",
            svg=None,
            console=Console(quiet=True),
        )


def test_rows_that_differ_in_their_seed_alone_go_together() -> None:
    assert [(epsilon, [one.seed for one in rows]) for _, _, epsilon, rows in by_epsilon(ROWS)] == [
        (NO_PRIVACY, [1, 2]),
        (8.0, [1, 2]),
        (1.0, [1, 2]),
    ]


def test_the_picture_is_svg_with_a_dot_for_each_training_in_each_chart() -> None:
    root = ElementTree.fromstring(picture(ROWS))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 2 * len(ROWS)
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts.count("no privacy") == 2
    assert "warm start 10%" in texts
