"""`silo-agent import` as people use it: shown, asked, written whole or not at all, and then a folder that `silo-agent
check` passes."""

import asyncio
import gzip
import io
import json
import pickle
import re
import shlex
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorica_security.errors import EXIT_CODES, ConfigurationError, DataError, StateError
from silo_agent.cli import main
from silo_agent.edges.data_import import arrow_files
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.training.data.text_to_sql_data import SPLITS, load_silo_data
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT
from tests.support.command_line import Done, run_command
from tests.support.federation_peer import FederationPeer, TestNet
from tests.unit.test_data_import_lines import SCHEMA, spider

QUESTIONS = (
    ("wie viele Patienten wohnen in {}", "SELECT count(*) FROM patient WHERE city = '{}'"),
    ("Namen der Patienten aus {}", "SELECT name FROM patient WHERE city = '{}'"),
    ("der älteste Patient in {}", "SELECT name FROM patient WHERE city = '{}' ORDER BY age DESC LIMIT 1"),
    ("Städte außer {}", "SELECT DISTINCT city FROM patient WHERE NOT city = '{}'"),
)
TOWNS = ("Leeds", "Köln", "Graz", "Bern", "Lyon")


@pytest.fixture(autouse=True)
def _at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORICA_SILO_DIR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A table as a spreadsheet of Windows exports it, and the database beside it."""
    rows = [f'"{q.format(town)}";"{sql.format(town)}";{n}' for n, town in enumerate(TOWNS) for q, sql in QUESTIONS]
    path = tmp_path / "fragen.csv"
    path.write_bytes("\r\n".join(["Frage;SQL;Patient", *rows, ""]).encode("utf-16"))
    with sqlite3.connect(tmp_path / "clinic.sqlite") as database:
        database.execute("CREATE TABLE patient (id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER)")
    return path


def run(*arguments: str | Path, answer: str = "", out: str = "out") -> Done:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(answer))
        return run_command(main, "import", *arguments, "--out", out)


def refused(done: Done, *words: str) -> None:
    """For one problem of one file."""
    assert done.code == EXIT_CODES[DataError]
    assert done.out == ""
    told, summary = done.err.splitlines()
    assert summary.endswith("has 1 problem, told above: nothing was written; correct the data and import again")
    for word in words:
        assert word in told


@contextmanager
def coordinator(net: TestNet) -> Iterator[FederationPeer]:
    """One that answers from a thread of its own: a command has this thread, and a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        peer = FederationPeer(net)
        asyncio.run_coroutine_threadsafe(peer.__aenter__(), loop).result()
        try:
            yield peer
        finally:
            asyncio.run_coroutine_threadsafe(peer.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


MAPPED = ("--map", "question=Frage", "query=SQL", "--database", "sqlite:///clinic.sqlite")


def ids(folder: Path) -> dict[str, set[str]]:
    data = load_silo_data(folder)
    return {
        name: {e.id for e in lines} for name, lines in (("train", data.train), ("dev", data.dev), ("test", data.test))
    }


@contextmanager
def terminal_of(encoding: str) -> Iterator[io.BytesIO]:
    """Stdout as it is where neither the locale nor PYTHONIOENCODING says UTF-8."""
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("y\n"))
        patch.setattr(sys, "stdout", out)
        yield written
    out.detach()


def test_questions_are_shown_and_written_whatever_letters_the_terminal_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f'"сколько в {n}?","SELECT {"a, " * n}b FROM Stadt"\n' for n in range(4))
    (tmp_path / "rows.csv").write_text(f"question,query\n{rows}")
    with sqlite3.connect(tmp_path / "x.sqlite") as database:
        database.execute("CREATE TABLE Stadt (a TEXT, b TEXT)")
    arguments = ("import", "rows.csv", "--database", "sqlite:///x.sqlite", "--out", "out")
    monkeypatch.setattr(sys, "argv", ["silo-agent", *arguments])
    with terminal_of("latin-1") as written, pytest.raises(SystemExit, match=r"^0$"):
        main()
    assert rb"\u0441\u043a" in written.getvalue()
    assert "сколько" in (tmp_path / "out" / "train.jsonl").read_text()


def test_a_schema_is_json_whatever_letters_the_terminal_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as database:
        database.execute("CREATE TABLE Größe (Б TEXT, 😀 TEXT)")
    monkeypatch.setattr(sys, "argv", ["silo-agent", "schema", "sqlite:///x.sqlite"])
    for encoding in ("latin-1", "utf-8"):
        with terminal_of(encoding) as written, pytest.raises(SystemExit, match=r"^0$"):
            main()
        (table,) = json.loads(written.getvalue())["tables"]
        assert (table["name"], [column["name"] for column in table["columns"]]) == ("Größe", ["Б", "😀"])
        assert ("Größe".encode() in written.getvalue()) == (encoding == "utf-8")


def test_a_table_of_a_spreadsheet_becomes_a_folder_that_the_check_passes(source: Path, tmp_path: Path) -> None:
    done = run(source, *MAPPED, "patient=Patient", answer="y\n")
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80 + len(str(tmp_path))
    assert done.out.count(", for ") == 10
    for words in (
        "10 of 20 rows, from all over the source:",
        "fragen.csv is UTF-16 with a byte order mark and has lines that end in CRLF: it is written as UTF-8 with LF",
        "divided by template of the SQL (4 templates): 10 train, 5 dev, 5 test",
        "leakage: values of patient that are in dev and in train: 5",
        "write them to out? [y/N] ",
        "out holds 10 train, 5 dev, 5 test examples, and schema.json of database clinic",
    ):
        assert words in done.out
    lines = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert set(lines[0]) == {"id", "question", "query", "db_id", "patient"}
    assert load_silo_data(tmp_path / "out", unit_field="patient", private=True).train[0].unit

    net = TestNet.create()
    folder = SiloFolder(tmp_path / "silo")
    with coordinator(net) as peer:
        store_credentials(folder, net.credentials(peer.address))
        folder.make()
        checked = run_command(
            main, "check", "--dir", folder.root, "--data", "out", "--database", "sqlite:///clinic.sqlite"
        )
    assert checked.code == 0, checked.out
    assert "10 train, 5 dev, 5 test examples" in checked.out
    assert "sqlite:///" in checked.out


@pytest.mark.parametrize("answer", ["", "n\n", "yesterday\n"])
def test_nothing_is_written_unless_somebody_says_so(source: Path, tmp_path: Path, answer: str) -> None:
    before = sorted(tmp_path.iterdir())
    done = run(source, *MAPPED, answer=answer)
    assert done.code == EXIT_CODES[StateError]
    assert done.err == "silo-agent: out was not made: answer y, or give --yes\n"
    assert sorted(tmp_path.iterdir()) == before


def test_the_same_source_gives_the_same_folder(source: Path, tmp_path: Path) -> None:
    assert run(source, *MAPPED, "--yes").code == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out").rename(tmp_path / "first")
    assert run(source, *MAPPED, "--yes").code == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first
    run(source, *MAPPED, "--yes").is_refusal(ConfigurationError, "out is not an empty folder")


def test_a_group_stays_together(source: Path, tmp_path: Path) -> None:
    done = run(source, *MAPPED, "--split-by", "Patient", "--dev", "0.2", "--test", "0.2", "--yes")
    assert "divided by Patient (5 of them): 12 train, 4 dev, 4 test" in done.out
    of = {
        name: {json.loads(line)["Patient"] for line in (tmp_path / "out" / f"{name}.jsonl").open()}
        for name in ("train", "dev", "test")
    }
    assert sorted(value for values in of.values() for value in values) == ["0", "1", "2", "3", "4"]
    assert "leakage: 4 of 4 questions of dev have SQL of a template that train has too" in done.out


def test_all_problems_of_all_files_are_told_in_one_run_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.csv").write_bytes(
        b"\xef\xbb\xbfid,question,query\r\n1,who,SELECT 1\r\n1,gr\xfcn,SELECT 2\r\n2,,SELECT 3\r\n"
    )
    (tmp_path / "in" / "test.csv.gz").write_bytes(gzip.compress(b"id,question,query\n9,q,SELECT 1\n")[:-9])
    (tmp_path / "in" / "dev.csv").write_text('id,question,sql\n1,"a\x1b[2J,SELECT 1\n')
    (tmp_path / "schema.json").write_bytes(SCHEMA.to_json())
    done = run("in", "--schema", "schema.json", "--yes")
    assert done.code == 7
    assert done.err.splitlines() == [
        "train.csv is UTF-8 with a byte order mark and has lines that end in CRLF: it is written as UTF-8 with LF",
        "dev.csv: column 'query' is missing, the columns are 'id', 'question', 'sql': give --map query=sql",
        "test.csv.gz: cannot be read (Compressed file ended before the end-of-stream marker was reached): correct "
        "or replace it",
        "train.csv:3: not UTF-8: if Excel wrote the file, give --encoding cp1252 (byte 0xFC at column 5)",
        "train.csv:3: id stands twice: correct it, or give --new-ids ('1', first at train.csv:2)",
        "train.csv:4: question is empty",
        "silo-agent: in has 5 problems, told above: nothing was written; correct the data and import again",
    ]
    assert not (tmp_path / "out").exists()
    assert done.out == ""


def test_what_a_row_holds_moves_no_cursor_and_long_text_is_cut(tmp_path: Path) -> None:
    rows = [{"question": f"\x1b[2J\u202e {n}\n" + "x" * 400, "query": f"SELECT {n}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "schema.json").write_bytes(SCHEMA.to_json())
    done = run("rows.jsonl", "--schema", "schema.json", "--split-by", "id", "--yes")
    assert done.code == 0, done.err
    assert r"\x1b[2J\u202e 0\n" in done.out
    assert all(line.isprintable() for line in done.out.splitlines())
    assert "(408" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_the_databases_of_spider_may_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "spider").mkdir()
    table = {"db_id": "concerts", "table_names_original": ["a"], "column_names_original": [[-1, "*"], [0, "b"]]}
    table |= {"column_types": ["text", "text"], "primary_keys": [], "foreign_keys": []}
    spider(tmp_path / "spider", {**table, "db_id": "concerts"}, {**table, "db_id": "pets"}, {"db_id": "broken"})
    rows = [{"db_id": "pets", "question": f"pets {n}", "query": f"SELECT a FROM b WHERE c = {n}"} for n in range(3)]
    rows += [{"db_id": "broken", "question": "b", "query": "SELECT 1"}]
    (tmp_path / "spider" / "train_spider.json").unlink()
    (tmp_path / "spider" / "train_others.json").write_text(json.dumps(rows))
    (tmp_path / "spider" / "dev.json").write_text(json.dumps(rows[:1]))
    done = run("spider", "--yes")
    assert done.code == 7
    assert "schema: " in done.err
    assert "db_id 'broken' is not as in the tables.json" in done.err
    run("spider", "--only", "concerts", "--yes").is_refusal(
        DataError, "spider holds no question to concerts: correct --only"
    )
    assert run("spider", "--only", "pets", "--yes").code == 0
    assert ids(tmp_path / "out") == {"train": {f"train_others-{n}" for n in (1, 2, 3)}, "dev": {"dev-1"}, "test": set()}
    assert [schema.db_id for schema in load_silo_data(tmp_path / "out").schemas] == ["pets"]


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "ops" / "docs" / "importing.md").read_text(encoding="utf-8")
    for name, text in zip(("questions", "more"), re.findall(r"```csv\n(.*?)```", page, re.DOTALL), strict=True):
        (tmp_path / f"{name}.csv").write_text(text)
    with sqlite3.connect("hospital.sqlite") as database:
        database.execute("CREATE TABLE patient (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, city TEXT)")
    shown = re.findall(r"```console\n\$ silo-agent import (.*?) --out (\w+)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 2
    for arguments, out, printed in shown:
        done = run(*shlex.split(arguments), answer="y\n", out=out)
        assert (done.out + done.err).replace("[y/N] ", "[y/N] y\n") == printed


# --- Parquet and Arrow


ROWS: dict[str, list[Any]] = {
    "nl": [f"question {n}" for n in range(8)],
    "query": [f"SELECT {', '.join('a' * (n // 2 + 1))} FROM t WHERE b = {n}" for n in range(8)],
    "person": [n % 4 for n in range(8)],
    "vector": [[0.5] * n for n in range(8)],
}


@pytest.fixture
def schema(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "schema.json").write_bytes(SCHEMA.to_json())
    return ("--schema", "schema.json", "--map", "question=nl", "person=person", "--yes")


@pytest.fixture
def arrow() -> Iterator[Any]:
    return pytest.importorskip("pyarrow", reason="pyarrow is not installed: make install")


def test_a_parquet_file_is_imported(tmp_path: Path, schema: tuple[str, ...], arrow: Any) -> None:
    from pyarrow import parquet

    table = arrow.table(
        {**ROWS, "query": arrow.array(ROWS["query"]).dictionary_encode()}
    )  # as of a column of categories
    parquet.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    done = run("rows.parquet", *schema)
    assert done.code == 0, done.err
    assert set().union(*ids(tmp_path / "out").values()) == {f"rows-{n}" for n in range(1, 9)}
    data = load_silo_data(tmp_path / "out", unit_field="person")
    assert {example.query for example in (*data.train, *data.dev, *data.test)} == set(ROWS["query"])
    assert {example.unit for example in data.train} <= {"0", "1", "2", "3"}


def test_a_data_set_of_hugging_face_is_imported_with_its_splits(
    tmp_path: Path, schema: tuple[str, ...], arrow: Any
) -> None:
    """As save_to_disk writes it: a stream of batches for each split, beside what earlier calls have cached."""
    table = arrow.table(ROWS)
    for split, part in (("train", table.slice(0, 6)), ("validation", table.slice(6))):
        folder = tmp_path / "set" / split
        folder.mkdir(parents=True)
        for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
            with arrow.ipc.new_stream(str(folder / name), table.schema) as file:
                file.write_table(part, max_chunksize=4)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    done = run("set", *schema)
    assert done.code == 0, done.err
    assert "divided as the source is: 6 train, 2 dev" in done.out
    assert ids(tmp_path / "out")["dev"] == {"validation-data-00000-of-00001-1", "validation-data-00000-of-00001-2"}


def test_what_is_wrong_in_a_parquet_file_is_told_by_row(tmp_path: Path, schema: tuple[str, ...], arrow: Any) -> None:
    from pyarrow import parquet

    wrong = {**ROWS, "nl": ["a", None, "", *["b"] * 5], "person": [None, *range(7)]}
    parquet.write_table(arrow.table(wrong), tmp_path / "rows.parquet")
    assert run("rows.parquet", *schema).err.splitlines()[:3] == [
        "rows.parquet:1: person is missing",
        "rows.parquet:2: question is missing",
        "rows.parquet:3: question is empty",
    ]
    parquet.write_table(arrow.table({**ROWS, "nl": ROWS["vector"]}), tmp_path / "rows.parquet")
    assert "rows.parquet:2: question is no text ('[0.5]')" in run("rows.parquet", *schema).err
    parquet.write_table(arrow.table({"sql": ["a"]}), tmp_path / "rows.parquet")
    assert "column 'query' is missing, the columns are 'sql': give --map query=sql" in run("rows.parquet", *schema).err


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_damaged_file_is_refused_whatever_is_wrong_in_it(
    tmp_path: Path, schema: tuple[str, ...], arrow: Any, name: str
) -> None:
    from pyarrow import parquet

    path = tmp_path / name
    table = arrow.table(ROWS)
    if name.endswith("parquet"):
        parquet.write_table(table, path, compression="none")
    else:
        with arrow.ipc.new_stream(str(path), table.schema) as file:
            file.write_table(table)
    whole = path.read_bytes()
    for at in (len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 8]) + whole[at + 8 :])
        assert run(name, *schema[:-1]).code in (4, 7)  # not --yes: some change of a letter harms nothing
    path.write_bytes(whole[: len(whole) // 2])
    refused(run(name, *schema), f"{name}: cannot be read (", "): replace it")
    assert not (tmp_path / "out").exists()


def test_offsets_that_lead_out_of_the_text_are_not_followed(
    tmp_path: Path, schema: tuple[str, ...], arrow: Any
) -> None:
    offsets = arrow.array([0, 1, 1 << 30, 3, 4, 5, 6, 7, 8], arrow.int32()).buffers()[1]
    led = arrow.StringArray.from_buffers(8, offsets, arrow.py_buffer(b"abcdefgh"))
    table = arrow.table({**ROWS, "nl": led})
    with arrow.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    refused(run("rows.arrow", *schema), "rows.arrow: cannot be read (In column ", "Offset invariant failure")


def test_a_file_that_ends_its_reader_does_not_end_the_import(
    tmp_path: Path, schema: tuple[str, ...], arrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "_START", "import os; os.abort()")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    refused(run("rows.parquet", *schema), "rows.parquet: cannot be read (its reader ended, exit code -6): replace it")


def test_a_small_file_that_unpacks_to_much_is_refused(
    tmp_path: Path, schema: tuple[str, ...], arrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    text = "x" * 200_000
    bomb = {key: values[:1] * 256 for key, values in {**ROWS, "nl": [text]}.items()}
    parquet.write_table(arrow.table(bomb), tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size < 100_000
    monkeypatch.setattr(arrow_files, "MAX_BYTES", 1_000_000)
    refused(run("rows.parquet", *schema), "rows.parquet: holds more than 1,000,000 characters: divide it")
    monkeypatch.setattr(arrow_files, "MAX_ROW_BYTES", 100_000)
    refused(run("rows.parquet", *schema), "rows.parquet: cannot be read (its reader ended")
    monkeypatch.setattr(arrow_files, "MAX_MEMORY", 30_000_000)
    refused(run("rows.parquet", *schema), "rows.parquet: cannot be read (", "failed): replace it")


class Payload:
    """What a pickled type of a column could do; old releases of pyarrow unpickled it to learn the column's type."""

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (Path("unpickled"),)


def test_no_type_of_a_file_is_unpickled(tmp_path: Path, schema: tuple[str, ...], arrow: Any) -> None:
    pickled = pickle.dumps(Payload())
    marks = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled}
    table = arrow.table(ROWS)
    fields = [field.with_metadata(marks) if field.name == "nl" else field for field in table.schema]
    with arrow.ipc.new_stream(str(tmp_path / "rows.arrow"), arrow.schema(fields)) as file:
        file.write_table(table.cast(arrow.schema(fields)))
    run("rows.arrow", *schema)
    assert not (tmp_path / "unpickled").exists()
    pickle.loads(pickled)
    assert (tmp_path / "unpickled").exists()  # had somebody unpickled it, that would have been there


def test_without_pyarrow_what_to_install_is_named(
    tmp_path: Path, schema: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    run("rows.parquet", *schema).is_refusal(
        ConfigurationError, "pyarrow is not installed: install Lorica's wheel with [silo,import]"
    )


# --- inputs and targets

NOTES = "Note;Summary;Patient\n" + "".join(f"seen for {n % 7} days of fever;fever {n % 7};{n}\n" for n in range(20))
TEXT = ("--task", "text-to-text")


def test_inputs_and_targets_become_a_folder_that_the_agent_reads(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text(NOTES)
    done = run("notes.csv", *TEXT, "--yes", "--map", "input=Note", "target=Summary", "patient=Patient")
    assert done.code == 0, done.err
    assert "divided by input (7 of them)" in done.out
    assert "schema.json" not in done.out
    data = TEXT_TO_TEXT.data(tmp_path / "out", unit_field="patient")
    splits = {name: {line.question for line in data.split(name)} for name in SPLITS}
    assert sum(len(data.split(name)) for name in SPLITS) == 20
    assert not splits["train"] & (splits["dev"] | splits["test"]), "what is asked in one split is asked in no other"
    assert all(line.query == f"fever {line.question.split()[2]}" for line in data.train)
    assert not (tmp_path / "out" / "schema.json").exists()


@pytest.mark.parametrize("option", ["--schema", "--database", "--db-id", "--only"])
def test_what_lines_without_a_database_have_no_use_for_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "notes.csv").write_text(NOTES)
    done = run("notes.csv", *TEXT, option, "x")
    assert done.code == EXIT_CODES[ConfigurationError]
    assert f"{option} says what questions are to" in done.err


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    lines = [{"input": f"note {n}", "target": n % 2} for n in range(10)]
    (tmp_path / "notes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert run("notes.jsonl", *TEXT, "--yes").code == 0
    assert {line.query for line in TEXT_TO_TEXT.data(tmp_path / "out").train} == {"0", "1"}
