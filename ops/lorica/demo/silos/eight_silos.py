"""Eight generated silos with the names and the proportions of those of Zhang et al. (2023), for where theirs are not at
hand.

Each has tables and words of its own; their questions ask for counts, names and comparisons, `<` among them. The same
arguments give the same bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Final

from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, SPLITS

SIZES: Final[Mapping[str, tuple[int, int, int]]] = {
    "academic": (120, 38, 38),
    "advising": (2629, 229, 573),
    "atis": (4347, 486, 447),
    "geoquery": (549, 49, 279),
    "imdb": (79, 26, 26),
    "restaurants": (228, 76, 74),
    "scholar": (499, 100, 218),
    "yelp": (78, 26, 24),
}
"""Questions in train, dev and test of the paper's silos."""
_TABLES: Final[Mapping[str, tuple[str, str, str]]] = {
    "academic": ("author", "journal", "keyword"),
    "advising": ("course", "student", "program"),
    "atis": ("flight", "airport", "fare"),
    "geoquery": ("river", "state", "lake"),
    "imdb": ("movie", "actor", "genre"),
    "restaurants": ("restaurant", "location", "region"),
    "scholar": ("paper", "venue", "dataset"),
    "yelp": ("business", "review", "checkin"),
}
_TEXTS: Final = ("name", "city", "category", "status")
_NUMBERS: Final = ("year", "rating", "number")
_WORDS: Final = ("north", "green", "spring", "market", "stone", "harbor", "maple", "silver", "summit", "river")


def write_eight_silos(folder: Path, *, largest: int) -> dict[str, Path]:
    """The silos' folders by name; the largest has so many training examples, the others their share of it, but at least
    4."""
    return {silo: _write(folder / silo, silo, largest / SIZES["atis"][0]) for silo in SIZES}


def _write(folder: Path, silo: str, share: float) -> Path:
    folder.mkdir(parents=True)
    random = Random(f"eight silos {silo}")
    for split, size in zip(SPLITS, SIZES[silo], strict=True):
        lines = []
        for number in range(max(4, round(size * share))):
            question, query = _asked(silo, random)
            example = {"id": f"{silo}-{split}-{number}", "question": question, "query": query, "db_id": silo}
            lines.append(json.dumps(example) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / SCHEMA_FILE).write_bytes(_schema(silo).to_json())
    return folder


def _asked(silo: str, random: Random) -> tuple[str, str]:
    table, text, number = random.choice(_TABLES[silo]), random.choice(_TEXTS), random.choice(_NUMBERS)
    value, limit = " ".join(random.sample(_WORDS, 2)), random.randrange(1, 3000)
    alias = f"{table.upper()}alias0"
    source = f"FROM {table.upper()} AS {alias}"
    return random.choice(
        (
            (
                f"how many {table}s have {text} {value} ?",
                f'SELECT COUNT( * ) {source} WHERE {alias}.{text.upper()} = "{value}" ;',
            ),
            (
                f"which {table}s have a {number} below {limit} ?",
                f"SELECT DISTINCT {alias}.NAME {source} WHERE {alias}.{number.upper()} < {limit} ;",
            ),
            (
                f"what is the {number} of the {table} {value} ?",
                f'SELECT {alias}.{number.upper()} {source} WHERE {alias}.NAME = "{value}" ;',
            ),
            (
                f"list each {text} of {table}s with {number} at most {limit} and count them",
                f"SELECT {alias}.{text.upper()} , COUNT( * ) {source} WHERE {alias}.{number.upper()} <= {limit} "
                f"GROUP BY {alias}.{text.upper()} ;",
            ),
        )
    )


def _schema(silo: str) -> Schema:
    def column(name: str, kind: ColumnType) -> Column:
        sql_type = "INTEGER" if kind is ColumnType.NUMBER else "TEXT"
        return Column(name=name, sql_type=sql_type, type=kind, primary_key=False, foreign_key=False)

    columns = (
        *(column(name, ColumnType.TEXT) for name in _TEXTS),
        *(column(name, ColumnType.NUMBER) for name in _NUMBERS),
    )
    return Schema(silo, "generated", tuple(Table(name, columns) for name in _TABLES[silo]))
