"""The training loss of each optimizer step at a simulated silo: a file beside its journal, which nothing but a study's
figures reads.

A silo tells a federation the largest and the least of a round. Here nobody is to be protected from the curve between
them, since the simulation has the data; under record-level privacy there is none.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from lorica_security.errors import StorageError

LOSSES_FILE = "losses.jsonl"
MOST_POINTS = 50


def append(file: Path, round_number: int, losses: Sequence[float]) -> None:
    """One line; of a round that is trained again after a kill there are several, the last of which may have its later
    epochs alone.

    Raises StorageError naming the file.
    """
    if not losses or not all(map(math.isfinite, losses)):
        return
    try:
        with file.open("a", encoding="utf-8") as lines:
            # Its end of line comes first: what a kill or a full disk left of the line before does not spoil this one.
            lines.write("\n" + json.dumps([round_number, [round(loss, 4) for loss in losses]]))
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}; free some space") from error


def curve(file: Path) -> list[tuple[int, float]]:
    """Optimizer steps since the first round, and the mean loss of those up to each since the one before: at most
    MOST_POINTS."""
    rounds: dict[int, list[float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            number, losses = json.loads(line)
        except ValueError:
            continue  # torn by a kill
        if len(losses) >= len(rounds.get(number, ())):
            rounds[number] = losses
    steps = [loss for number in sorted(rounds) for loss in rounds[number]]
    window = max(1, math.ceil(len(steps) / MOST_POINTS))
    starts = range(0, len(steps), window)
    return [
        (min(start + window, len(steps)), round(math.fsum(part) / len(part), 4))
        for start in starts
        if (part := steps[start : start + window])
    ]
