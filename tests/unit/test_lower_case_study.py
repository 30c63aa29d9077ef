"""SQL in lower case for a study: quotes stay, other fields and bad lines stay, and the practice is of the same form."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica.experiments.data import lower_sql, own_copy
from lorica.experiments.definition import Study
from lorica_security.identifiers import SiloName
from silo_agent.training.data.serialisation import exact_match

QUERY = "SELECT A.NAME FROM AUTHOR AS A WHERE A.NAME = \"Ada O'Hara\" AND A.CITY = 'New York' ;"


def test_what_stands_in_quotes_stays() -> None:
    assert lower_sql(QUERY) == (
        "select a.name from author as a where a.name = \"Ada O'Hara\" and a.city = 'New York' ;"
    )


@given(st.text(st.characters(codec="ascii"), max_size=60))
def test_an_answer_is_right_before_when_it_is_right_after(query: str) -> None:
    assert exact_match(lower_sql(query), query)


def test_silos_are_copied_in_lower_case_and_cut(tmp_path: Path) -> None:
    source = tmp_path / "silos" / "library"
    source.mkdir(parents=True)
    line = {"id": "1", "question": "Which Authors?", "query": QUERY, "db_id": "library"}
    (source / "train.jsonl").write_text("".join(json.dumps({**line, "id": str(n)}) + "\n" for n in range(5)))
    (source / "dev.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(line)}\nno line\n".encode()))
    (source / "schema.json").write_text("{}")
    (library,) = own_copy({SiloName("library"): source}, tmp_path / "own", {"library": 3}, lower_case=True).values()
    made = [json.loads(text) for text in (library / "train.jsonl").read_text().splitlines()]
    assert len(made) == 3
    assert {one["query"] for one in made} == {lower_sql(QUERY)}
    assert {one["question"] for one in made} == {"Which Authors?"}
    first, second = (library / "dev.jsonl").read_text().splitlines()
    assert json.loads(first)["query"] == lower_sql(QUERY)
    assert second == "no line"
    assert not (library / "dev.jsonl.gz").exists()
    assert (library / "schema.json").read_text() == "{}"


def test_a_run_in_lower_case_has_a_key_of_its_own(tmp_path: Path) -> None:
    text = 'name = "s"\nsilos = "silos"\nsetups = ["fedavg"]\n[start]\nsize = "micro"\n'
    keys = set()
    for more in ("", "lower_case = true\n"):
        (tmp_path / "study.toml").write_text(more + text)
        keys |= {run.key for run in Study.read(tmp_path / "study.toml").runs()}
    assert len(keys) == 2


@pytest.mark.parametrize("name", ["small", "small-whole", "small-upper", "small-mini", "small-cold"])
def test_the_small_silos_studies_can_be_read(name: str) -> None:
    import lorica.experiments

    study = Study.read(Path(lorica.experiments.__file__).parent / "studies" / f"{name}.toml")
    assert study.lower_case == (name != "small-upper")
