"""Training losses of simulated silos by optimizer step: what a figure draws, and what a kill leaves of it."""

import math
from pathlib import Path

import pytest

from lorica.simulation.losses import MOST_POINTS, append, curve
from lorica_security.errors import StorageError


def test_steps_are_counted_through_the_rounds(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    append(file, 1, [3.0, 2.0])
    append(file, 2, [1.5])
    assert curve(file) == [(1, 3.0), (2, 2.0), (3, 1.5)]


def test_a_round_that_was_trained_again_counts_once_and_a_torn_line_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    append(file, 1, [3.0, 2.0])
    append(file, 1, [2.0])  # went on from a checkpoint: its later epochs alone
    with file.open("a") as lines:
        lines.write("[2, [1.")
    assert curve(file) == [(1, 3.0), (2, 2.0)]


def test_a_long_training_is_a_curve_of_means(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    append(file, 1, [float(step) for step in range(2 * MOST_POINTS + 1)])
    points = curve(file)
    assert len(points) <= MOST_POINTS
    assert points[0] == (3, 1.0)
    assert points[-1][0] == 2 * MOST_POINTS + 1
    assert points[-1][1] == pytest.approx(2 * MOST_POINTS - 0.5)


def test_where_steps_have_no_loss_to_tell_there_is_no_curve(tmp_path: Path) -> None:
    append(tmp_path / "losses.jsonl", 1, [math.nan])
    assert curve(tmp_path / "losses.jsonl") == []


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    append(file, 1, [3.0])
    with file.open("a") as lines:
        lines.write("\n[2, [1.")
    append(file, 2, [1.5])
    assert curve(file) == [(1, 3.0), (2, 1.5)]


def test_a_full_disk_is_named_with_its_file() -> None:
    with pytest.raises(StorageError, match="/dev/full cannot be written: No space left on device"):
        append(Path("/dev/full"), 1, [3.0])
