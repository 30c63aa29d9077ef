"""The gold queries of the two silos that have a database, run in the sandbox: the counts that the data's README
gives."""

import gzip
import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from silo_agent.sql_sandbox import ExecutionOutcome, QueryFailed, Sandbox, SqliteTarget, execution_match
from silo_agent.training.data.schema import Schema

DATA = Path(os.environ.get("LORICA_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data") / "text2sql"

pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(
        not DATA.is_dir(), reason=f"{DATA} is missing: set LORICA_SHARED_DATA to the folder that holds text2sql"
    ),
]


def gold_queries(silo: str) -> list[str]:
    lines = [
        line
        for split in ("train", "dev", "test")
        for line in (DATA / silo / f"{split}.jsonl").read_text("utf-8").splitlines()
    ]
    return [json.loads(line)["query"] for line in lines]


def unpacked(silo: str, folder: Path) -> SqliteTarget:
    path = folder / f"{silo}.db"
    path.write_bytes(gzip.decompress((DATA / silo / "db.sqlite.gz").read_bytes()))
    return SqliteTarget(path)


@pytest.mark.parametrize(
    ("silo", "counts"),
    [
        ("geoquery", {"rows": 836, "empty": 29, "null_or_zero": 7, "failed": 5}),
        ("restaurants", {"rows": 171, "empty": 195, "null_or_zero": 12}),
    ],
)
def test_gold_results_are_as_many_as_the_data_says(silo: str, counts: dict[str, int], tmp_path: Path) -> None:
    target = unpacked(silo, tmp_path)
    before = target.path.read_bytes()
    found: Counter[str] = Counter()
    with Sandbox(target) as box:
        for query in gold_queries(silo):
            try:
                found[box.run(query).kind.value] += 1
            except QueryFailed:
                found["failed"] += 1
    assert found == counts
    assert target.path.read_bytes() == before


def test_every_gold_query_matches_itself_and_its_neighbours_seldom(tmp_path: Path) -> None:
    queries = sorted(set(gold_queries("geoquery")))[::4]
    with Sandbox(unpacked("geoquery", tmp_path)) as box:
        own = Counter(execution_match(box, gold_sql=query, predicted_sql=query).outcome for query in queries)
        other = Counter(execution_match(box, gold_sql=a, predicted_sql=b).outcome for a, b in pairwise(queries))
    assert set(own) <= {ExecutionOutcome.MATCH, ExecutionOutcome.GOLD_ERROR}
    assert own[ExecutionOutcome.MATCH] >= len(queries) - 2
    assert other[ExecutionOutcome.MATCH] < len(queries) / 4


@pytest.mark.parametrize("silo", ["academic", "advising", "atis", "geoquery", "imdb", "restaurants", "scholar", "yelp"])
def test_each_schema_is_read_and_written_back_byte_for_byte(silo: str) -> None:
    path = DATA / silo / "schema.json"
    assert Schema.from_json(path.read_bytes(), path).to_json() == path.read_bytes()
