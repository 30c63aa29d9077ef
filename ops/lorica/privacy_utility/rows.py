"""Finished trainings of the study, and the file that they are kept in."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from lorica.privacy_utility.silos import HELD_OUT
from lorica_security.errors import ConfigurationError
from lorica_security.host import files

TODAY: Final = "today"
"""The variant that all others are compared with."""
RESULTS: Final = Path(__file__).parent / "results.json"
"""Those that are kept with the code."""
JOINT_RESULTS: Final = RESULTS.with_name("joint.json")
EIGHT: Final = f"eight silos, {HELD_OUT} questions"
"""Of joint.py."""
QUERY_LOGS: Final = f"query logs, {HELD_OUT} questions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training. Fractions are means over the silos, as is `loss_per_token`; `spent` is the dearest silo's.

    `right` has of each silo one character a held-out question, 1 where it was answered exactly; nothing where that was
    not kept.
    """

    data: str
    records: int
    epsilon: float
    seed: int
    exact_match_before: float
    exact_match: float
    loss_per_token_before: float
    loss_per_token: float
    spent: float
    variant: str = TODAY
    right: Mapping[str, str] = field(default_factory=dict)

    @property
    def training(self) -> tuple[object, ...]:
        return self.data, self.records, self.epsilon, self.seed, self.variant


def read_rows(out: Path) -> list[Row]:
    """In order; none where there is no file. Raises ConfigurationError for a file of something else."""
    if not out.exists():
        return []
    try:
        return [Row(**{**row, "epsilon": float(row["epsilon"])}) for row in json.loads(out.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{out} is not what this command writes: name another file with --out") from error


def written(rows: Sequence[Row]) -> bytes:
    """The file's content."""
    shown = [{**asdict(row), "epsilon": str(row.epsilon)} for row in rows]
    return (json.dumps(shown, indent=1) + "\n").encode()


def by_epsilon(rows: Sequence[Row]) -> Iterator[tuple[str, int, float, list[Row]]]:
    """Rows that differ in their seed alone, together: data, records, epsilon, rows."""
    for data, records, epsilon in dict.fromkeys((row.data, row.records, row.epsilon) for row in rows):
        yield (
            data,
            records,
            epsilon,
            [row for row in rows if (row.data, row.records, row.epsilon) == (data, records, epsilon)],
        )


def keep(out: Path, rows: Sequence[Row], console: Console) -> None:
    """Write all of them, and tell of the newest."""
    files.replace(out, written(rows))
    row = rows[-1]
    console.print(
        f"{row.data}, epsilon {row.epsilon:g}, {row.variant}, seed {row.seed}: loss a token "
        f"{row.loss_per_token_before:.3f} -> {row.loss_per_token:.3f}, exact match {row.exact_match_before:.1%} -> "
        f"{row.exact_match:.1%}",
        highlight=False,
    )
