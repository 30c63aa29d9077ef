"""WikiSQL in a study: its silos, whose lines have tables of their own, and the rows of FedParsing's table."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lorica.experiments.data import merged, own_copy
from lorica.experiments.definition import Study
from lorica.experiments.practice.wikisql_silos import HELD_OUT, write_wikisql_silos
from lorica.experiments.results_file import results
from lorica.experiments.run import quorum, run_study
from lorica.simulation.run import silos_in
from lorica_coordinator.plans.plan_folder import require_valid
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError, DataError
from lorica_security.identifiers import SiloName
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_agent.training.tasks.wikisql_query import METRICS

STUDIES = Path(__file__).resolve().parents[2] / "ops" / "lorica" / "experiments" / "studies"
SQL = {"agg": 0, "sel": 1, "conds": [[0, 0, "paris"]]}


def line(id_: str, **more: Any) -> dict[str, Any]:
    return {"id": id_, "question": f"what of {id_} ?", "header": ["City", "Size"], "types": ["text", "real"], **more}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three clients of eight questions each."""
    folder = tmp_path / "wikisql"
    folder.mkdir()
    clients = [(client, f"q-{client}-{number}") for number in range(8) for client in range(3)]
    contents = {
        "server_labelled": [line(f"s-{number}", sql=SQL) for number in range(4)],
        "dev": [line("d-0", sql=SQL)],
        "test": [line("t-0", sql=SQL)],
        "clients_unlabelled": [line(id_, client=client) for client, id_ in clients],
        "clients_gold": [{"id": id_, "client": client, "sql": SQL} for client, id_ in clients],
    }
    for name, lines in contents.items():
        text = "".join(f"{json.dumps(one)}\n" for one in lines)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_clients_are_dealt_to_silos_and_keep_their_answers(source: Path, tmp_path: Path) -> None:
    write_wikisql_silos(source, tmp_path / "silos", silos=2)
    silos = silos_in(tmp_path / "silos")
    assert list(silos) == ["server", "ward-000", "ward-001"]
    read = {name: WIKISQL.data(folder) for name, folder in silos.items()}
    assert {name: (len(one.train), len(one.dev), len(one.test)) for name, one in read.items()} == {
        "server": (4, 1, 1),
        "ward-000": (16 - 2 * HELD_OUT, HELD_OUT, HELD_OUT),
        "ward-001": (8 - 2 * HELD_OUT, HELD_OUT, HELD_OUT),
    }
    ids = [example.id for one in read.values() for example in (*one.train, *one.dev, *one.test)]
    assert len(set(ids)) == len(ids) == 4 + 2 + 24
    server = read[SiloName("server")]
    assert [example.id for example in (*server.dev, *server.test)] == ["d-0", "t-0"], "WikiSQL's own"
    assert all(example.query for example in read["ward-000"].train)
    unread = WIKISQL.data(silos[SiloName("ward-000")], labelled=False)
    assert [example.query for example in unread.train] == [""] * 12


@pytest.mark.parametrize(
    ("changed", "silos", "said"),
    [
        (None, 4, "4 silos for 3 clients"),
        (None, 0, "0 silos for 3 clients"),
        ({"clients_gold": []}, 2, "clients_gold"),
        ({"clients_gold": [{"id": "other", "sql": SQL}]}, 2, "no answer to q-0-0"),
        ({"dev": [{"id": "d"}]}, 2, "dev.jsonl.gz, line 1 lacks"),
        ({"test": ["[]"]}, 2, "test.jsonl.gz, line 1 lacks"),
    ],
)
def test_what_is_no_wikisql_is_refused_and_nothing_is_written(
    source: Path, tmp_path: Path, changed: dict[str, list[Any]] | None, silos: int, said: str
) -> None:
    for name, lines in (changed or {}).items():
        text = "".join(f"{json.dumps(one)}\n" for one in lines)
        (source / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ConfigurationError, match=said):
        write_wikisql_silos(source, tmp_path / "silos", silos=silos)
    assert not (tmp_path / "silos" / "ward-000").exists()


def test_lines_with_tables_of_their_own_are_cut_and_merged(source: Path, tmp_path: Path) -> None:
    """One id that two silos have is told apart."""
    write_wikisql_silos(source, tmp_path / "silos", silos=2)
    silos = silos_in(tmp_path / "silos")
    train = silos[SiloName("ward-001")] / "train.jsonl"
    train.write_text(f"{json.dumps(line('s-0', sql=SQL))}\n{train.read_text()}")
    cut = own_copy(silos, tmp_path / "cut", {"ward-000": 5})
    assert len(WIKISQL.data(cut[SiloName("ward-000")]).train) == 5
    whole = WIKISQL.data(merged(cut, tmp_path / "all"))
    assert (len(whole.train), whole.bad_lines) == (4 + 5 + 5, ())
    assert {example.id for example in whole.train} >= {"s-0", "ward-001/s-0"}
    (silos[SiloName("server")] / "schema.json").write_text("[]")
    with pytest.raises(DataError, match="and others have one"):
        merged(silos, tmp_path / "mixed")


@pytest.mark.parametrize("name", ["fedparsing", "answers"])
def test_each_row_of_the_study_is_a_plan_and_all_make_as_many_server_steps_on_labels(name: str) -> None:
    study = Study.read(STUDIES / f"{name}.toml")
    silos = {
        "fedparsing": [SiloName("server"), *(SiloName(f"ward-{number:03}") for number in range(98))],
        "answers": [SiloName(f"{kind}-{number}") for kind in ("clinic", "insurer") for number in (1, 2)],
    }[name]
    steps = set()
    for run in study.runs():
        overrides = {**run.values, "schedule.min_silos": quorum(run.values, silos)}
        require_valid(name="plan", federation="study", preset=study.preset, seed=run.seed, overrides=overrides)
        turns = (
            "semi_supervised.unlabelled" in run.values
            and run.values.get("semi_supervised.order") != "together"
            and run.values.get("semi_supervised.teacher") != "none"
        )
        rounds = run.values["schedule.rounds"]
        assert isinstance(rounds, int)
        if run.point["variant"] != "floor-long":
            steps.add(rounds // 2 if turns else rounds)
    assert len(steps) == 1


@pytest.mark.parametrize("labels", [300, 100])
def test_studies_of_fewer_labels_are_the_same_but_for_those(labels: int) -> None:
    whole, fewer = (Study.read(STUDIES / f"fedparsing{more}.toml") for more in ("", f"-{labels}"))
    assert fewer == whole.model_copy(update={"name": f"fedparsing-{labels}", "at_most": {"server": labels}})


def test_a_quorum_is_of_the_silos_that_train() -> None:
    silos = [SiloName(name) for name in ("server", "ward-1", "ward-2", "ward-3")]
    of = {"semi_supervised.unlabelled": ["ward-*"]}
    assert quorum({}, silos) == 4
    assert quorum({**of, "semi_supervised.teacher": "none"}, silos) == 1
    assert quorum({**of, "semi_supervised.order": "together"}, silos) == 4
    assert quorum(of, silos) == 3
    assert [quorum({**of, "schedule.cohort_size": drawn}, silos) for drawn in (0, 2, 9)] == [3, 2, 3]


ROWS = """
name = "rows"
silos = "silos"
setups = ["fedavg"]
scored = ["server"]
pseudo_labels = 6
compare_with = "alone"
[start]
size = "micro"
[plan]
"task.kind" = "wikisql"
"training.epochs" = 60
"training.learning_rate" = 1e-2
"training.dropout" = 0.0
"training.max_input_tokens" = 64
"training.max_output_tokens" = 48
[only.fedavg]
"aggregation.weighting" = "equal"
[variants.alone]
"schedule.rounds" = 1
"semi_supervised.unlabelled" = ["ward-*"]
"semi_supervised.teacher" = "none"
[variants.taught]
"schedule.rounds" = 2
"training.overrides.ward-000.epochs" = 1
"training.overrides.ward-001.epochs" = 1
"training.overrides.ward-002.epochs" = 1
"semi_supervised.unlabelled" = ["ward-*"]
"""


def test_a_run_tells_all_metrics_of_the_scored_silo_and_how_many_pseudo_labels_are_right(
    source: Path, tmp_path: Path
) -> None:
    """The model learns the one answer that the server has, which is wrong for the last client of three."""
    gold = source / "clients_gold.jsonl.gz"
    lines = [json.loads(text) for text in gzip.decompress(gold.read_bytes()).splitlines()]
    others = [{**one, "sql": {**SQL, "sel": 0}} if one["client"] == 2 else one for one in lines]
    gold.write_bytes(gzip.compress("".join(f"{json.dumps(one)}\n" for one in others).encode()))
    for split, of in (("dev", ["d-0", "d-1"]), ("test", ["what, and why and when and where,"])):
        text = "".join(f"{json.dumps(line(id_, sql=SQL))}\n" for id_ in of)
        (source / f"{split}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    write_wikisql_silos(source, tmp_path / "silos", silos=3)
    study = parse_toml(Study, ROWS, "study.toml")
    page = run_study(study, tmp_path / "out", data=tmp_path, device="cpu", threads=1).read_text()
    alone, taught = results(tmp_path / "out")
    for run in (alone, taught):
        for split in ("test", "dev"):
            assert list(run[split]) == ["server"], "silos that are not scored have no score"
            assert set(METRICS) <= set(run[split]["server"])
            assert run[split]["server"]["overall"] == run[split]["server"]["exact_match"]
        assert all(set(row["silos"]) <= {"server"} for row in run["rounds"][0])
        assert run["pseudo_labels"] == [{"round": 1, "right": 0.66667}], "of what silos with labels made"
        assert [run[split]["server"]["examples"] for split in ("test", "dev")] == [1, 2]
        of_rounds = [row["silos"].get("server", {}) for row in run["rounds"][0]]
        told = [facts["loss_per_token"] for facts in of_rounds if "loss_per_token" in facts]
        chosen, judged = (run[split]["server"]["loss_per_token"] for split in ("dev", "test"))
        assert chosen in [pytest.approx(loss, rel=1e-4) for loss in told], "rounds are scored on dev"
        assert judged not in [pytest.approx(loss, rel=1e-4) for loss in told], "and not on test"
    assert alone["test"]["server"]["right"] == "1"
    assert [row["round"] for row in taught["rounds"][0]] == [0, 1, 2]
    assert "| alone | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |" in page
    assert "| taught | 1 | 66.7 | 66.7 |" in page
    assert "| alone | 1 | 66.7 | 66.7 | 100.0 |  |" in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"fedavg"]', '"fedavg", "finetuning"]'), "of one federation each: leave finetuning out"),
        (
            ('compare_with = "alone"', 'compare_with = "nobody"'),
            "compare_with = 'nobody' is no variant: use alone, taught",
        ),
    ],
)
def test_a_study_that_compares_with_nothing_is_refused(change: tuple[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_toml(Study, ROWS.replace(*change), "study.toml")
