"""Where the pages are, and how a table of theirs is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[2] / "docs"


# --- all of them


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)
