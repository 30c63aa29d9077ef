import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_t5 import SCHEMA

from lorica_security.errors import DataError
from silo_agent.training.data.schema import Schema, Table
from silo_agent.training.data.text_to_sql_data import DataLimits, UnitOwnsHalf, load_silo_data


def line(number: int, **changes: Any) -> bytes:
    entry = {
        "id": f"e-{number}",
        "question": f"question {number} ?",
        "query": "SELECT 1 ;",
        "db_id": "places",
        **changes,
    }
    return json.dumps({key: value for key, value in entry.items() if value is not None}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_bytes(SCHEMA.to_json())
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(line(n) for n in range(10)) + b"\n")
    (tmp_path / "dev.jsonl").write_bytes(line(100))
    return tmp_path


def test_splits_schema_and_database_are_read(folder: Path) -> None:
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(line(200)))
    (folder / "db.sqlite.gz").write_bytes(b"")
    data = load_silo_data(folder)
    assert [len(data.train), len(data.dev), len(data.test)] == [10, 1, 1]
    assert data.train[3].question == "question 3 ?"
    assert data.schema == SCHEMA
    assert data.database == folder / "db.sqlite.gz"
    assert data.bad_lines == ()


def test_only_the_test_split_may_be_absent(folder: Path) -> None:
    assert load_silo_data(folder).test == ()
    (folder / "dev.jsonl").unlink()
    with pytest.raises(DataError, match=r"dev\.jsonl is missing"):
        load_silo_data(folder)


def test_a_missing_schema_is_named_with_its_remedy(folder: Path) -> None:
    (folder / "schema.json").unlink()
    with pytest.raises(DataError, match=r"schema\.json is missing: make it with 'silo-agent schema URL'"):
        load_silo_data(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent is not a folder"):
        load_silo_data(tmp_path / "absent")


def test_packed_and_plain_of_one_split_are_ambiguous(folder: Path) -> None:
    (folder / "dev.jsonl.gz").write_bytes(gzip.compress(line(200)))
    with pytest.raises(DataError, match=r"holds both dev\.jsonl and dev\.jsonl\.gz"):
        load_silo_data(folder)


BAD = {
    "not json": (b'{"id": ', "not JSON"),
    "an array": (b"[1]", "a list, expected an object"),
    "not utf-8": (b'{"id": "\xff"}', "not UTF-8 at byte 8"),
    "deep nesting": (b"[" * 100_000, "not JSON"),
    "key missing": (line(0, id="x", query=None), "key query is missing"),
    "wrong type": (line(0, id=7), "id is a int, expected text"),
    "empty question": (line(0, id="x", question="  "), "question is empty"),
    "half a surrogate pair": (
        b'{"id":"x","question":"\\ud800","query":"q","db_id":"places"}',
        "question holds half of a surrogate",
    ),
    "duplicate id": (line(3), "id 'e-3' stands already at train.jsonl:4"),
    "other database": (line(0, id="x", db_id="elsewhere"), "db_id 'elsewhere' is not the 'places' of schema.json"),
    "over-long": (line(0, id="x", question="?" * 200_000), "longer than 150000 bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_reported_with_file_line_and_reason_and_the_rest_is_kept(folder: Path, kind: str) -> None:
    raw, reason = BAD[kind]
    (folder / "dev.jsonl").write_bytes(line(100) + b"\n" + raw + b"\n" + line(101))
    data = load_silo_data(folder, DataLimits(max_bad_fraction=0.5, max_line_bytes=150_000))
    assert [example.id for example in data.dev] == ["e-100", "e-101"]
    (bad,) = data.bad_lines
    assert (bad.file, bad.line) == (folder / "dev.jsonl", 2)
    assert bad.reason.startswith(reason)
    assert str(bad).startswith(f"{folder / 'dev.jsonl'}:2: ")


def test_more_bad_lines_than_the_limit_refuse_the_silo(folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"\n".join([*(line(n) for n in range(8)), b"?", b"?"]))
    assert len(load_silo_data(folder, DataLimits(max_bad_fraction=0.2)).bad_lines) == 2
    with pytest.raises(DataError, match=r"train\.jsonl has 2 bad lines of 10, .* the first: line 9: not JSON"):
        load_silo_data(folder, DataLimits(max_bad_fraction=0.19))


def test_the_limit_holds_for_each_file_by_itself(folder: Path) -> None:
    (folder / "dev.jsonl").write_bytes(line(100) + b"\n?")
    with pytest.raises(DataError, match=r"dev\.jsonl has 1 bad lines of 2"):
        load_silo_data(folder, DataLimits(max_bad_fraction=0.2))


def test_blank_lines_are_no_lines(folder: Path) -> None:
    (folder / "dev.jsonl").write_bytes(b"\n" + line(100) + b"\n\n \n")
    assert len(load_silo_data(folder, DataLimits(max_bad_fraction=0)).dev) == 1


def test_an_empty_split_is_refused(folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"\n")
    with pytest.raises(DataError, match=r"train\.jsonl holds no example"):
        load_silo_data(folder)


@pytest.mark.parametrize(
    "content",
    [b"not gzip", gzip.compress(line(100))[:-9], gzip.compress(line(100))[:12] + b"\0" * 40],
    ids=["not gzip", "cut off", "zeros within"],
)
def test_a_damaged_gzip_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "dev.jsonl").unlink()
    (folder / "dev.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"dev\.jsonl\.gz cannot be read"):
        load_silo_data(folder)


def test_attack_gzip_bomb_is_read_in_pieces_and_stopped(folder: Path) -> None:
    (folder / "dev.jsonl").unlink()
    (folder / "dev.jsonl.gz").write_bytes(gzip.compress(line(100) + b"\n" + b"\n" * 5_000))
    with pytest.raises(DataError, match="more than 1000 lines"):
        load_silo_data(folder, DataLimits(max_lines=1000))


@pytest.mark.real_data
def test_all_eight_silos_of_the_paper_load_without_a_bad_line(shared_text2sql: Path) -> None:
    counts = {}
    for silo in sorted(path for path in shared_text2sql.iterdir() if path.is_dir()):
        data = load_silo_data(silo, DataLimits(max_bad_fraction=0))
        assert data.bad_lines == ()
        counts[silo.name] = (len(data.train), len(data.dev), len(data.test), data.database is not None)
    assert counts == {
        "academic": (120, 38, 38, False),
        "advising": (2629, 229, 573, False),
        "atis": (4347, 486, 447, False),
        "geoquery": (549, 49, 279, True),
        "imdb": (79, 26, 26, False),
        "restaurants": (228, 76, 74, True),
        "scholar": (499, 100, 218, False),
        "yelp": (78, 26, 24, False),
    }


def test_lines_are_grouped_by_the_key_that_a_plan_names(folder: Path) -> None:
    owners = ["ann", "bob", "ann", 7, 7]
    (folder / "train.jsonl").write_bytes(b"\n".join(line(n, patient=owner) for n, owner in enumerate(owners)))
    data = load_silo_data(folder, unit_field="patient")
    assert [example.unit for example in data.train] == ["ann", "bob", "ann", "7", "7"]
    assert [example.unit for example in data.dev] == [""], "only training lines are grouped"
    assert [example.unit for example in load_silo_data(folder).train] == [""] * 5


@pytest.mark.parametrize("owner", [None, "", " ", 1.5, ["ann"], True])
def test_a_line_that_does_not_say_whom_it_belongs_to_is_a_bad_one(folder: Path, owner: object) -> None:
    (folder / "train.jsonl").write_bytes(
        b"\n".join([line(0, patient=owner), *(line(n, patient="ann") for n in range(1, 10))])
    )
    data = load_silo_data(folder, DataLimits(max_bad_fraction=0.5), unit_field="patient")
    assert len(data.train) == 9
    assert "patient" in data.bad_lines[0].reason


def test_a_unit_that_owns_half_of_the_lines_is_refused_by_name_where_training_is_private(folder: Path) -> None:
    train = folder / "train.jsonl"
    for owners, refused in (("aabc", True), ("aaaa", True), ("a", True), ("aabcd", False), ("abcd", False)):
        train.write_bytes(b"\n".join(line(n, patient=owner) for n, owner in enumerate(owners)))
        assert len(load_silo_data(folder, unit_field="patient").train) == len(owners)
        assert len(load_silo_data(folder, private=True).train) == len(owners), "each line is a unit of its own"
        if refused:
            with pytest.raises(
                UnitOwnsHalf, match=rf"patient 'a' has {owners.count('a')} of {len(owners)} training lines"
            ):
                load_silo_data(folder, unit_field="patient", private=True)
        else:
            assert len(load_silo_data(folder, unit_field="patient", private=True).train) == len(owners)


def test_attack_line_that_takes_the_id_of_another_one_does_not_remove_it_from_private_training(folder: Path) -> None:
    """One record more would be one record less of somebody else's."""
    before = [line(n, patient=str(n)) for n in range(10)]
    (folder / "train.jsonl").write_bytes(b"\n".join([line(3, patient="intruder"), *before]))
    private = load_silo_data(folder, DataLimits(max_bad_fraction=0.5), unit_field="patient", private=True)
    assert [example.unit for example in private.train] == ["intruder", *(str(n) for n in range(10))]
    assert not private.bad_lines
    assert len(load_silo_data(folder, DataLimits(max_bad_fraction=0.5)).train) == 10


def test_a_silo_may_ask_several_databases(folder: Path) -> None:
    other = Schema("roads", "test", (Table("ROAD", SCHEMA.tables[0].columns),))
    both = [json.loads(schema.to_json()) for schema in (SCHEMA, other)]
    (folder / "schema.json").write_text(json.dumps(both))
    (folder / "dev.jsonl").write_bytes(line(100) + b"\n" + line(101, db_id="roads") + b"\n")
    data = load_silo_data(folder)
    assert (data.schema, data.schemas) == (SCHEMA, (SCHEMA, other))
    assert [example.db_id for example in data.dev] == ["places", "roads"]
    (folder / "dev.jsonl").write_bytes(line(100, db_id="rivers"))
    with pytest.raises(DataError, match=r"db_id 'rivers' is not the 'places, roads' of schema\.json"):
        load_silo_data(folder)


@pytest.mark.parametrize(("content", "said"), [([], "is an empty list"), (["same", "same"], "db_id .*places")])
def test_a_list_of_schemas_without_a_schema_or_with_one_twice_is_refused(
    folder: Path, content: list[str], said: str
) -> None:
    (folder / "schema.json").write_text(json.dumps([json.loads(SCHEMA.to_json()) for _ in content]))
    with pytest.raises(DataError, match=said):
        load_silo_data(folder)
