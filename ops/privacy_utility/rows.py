"""Rows of a study: one finished training each, in a JSON file that the next run goes on from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from ops.privacy_utility.comparison import TODAY
from security import files
from security.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training. Fractions are means over the silos, as is `loss_per_token`; `spent` is the dearest silo's.

    `right` has of each silo one character a held-out question, 1 where it was answered exactly; nothing where that was not kept.
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


def read(out: Path) -> list[Row]:
    """What `out` has; raises ConfigurationError where that is something else."""
    if not out.exists():
        return []
    try:
        return [Row(**{**row, "epsilon": float(row["epsilon"])}) for row in json.loads(out.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{out} is not what this command writes: name another file with --out") from error


def keep(out: Path, rows: Sequence[Row], console: Console) -> None:
    """Write all of them, and tell of the newest."""
    shown = [{**asdict(row), "epsilon": str(row.epsilon)} for row in rows]
    files.replace(out, (json.dumps(shown, indent=1) + "\n").encode())
    row = rows[-1]
    console.print(
        f"{row.data}, epsilon {row.epsilon:g}, {row.variant}, seed {row.seed}: loss a token {row.loss_per_token_before:.3f} -> "
        f"{row.loss_per_token:.3f}, exact match {row.exact_match_before:.1%} -> {row.exact_match:.1%}",
        highlight=False,
    )
