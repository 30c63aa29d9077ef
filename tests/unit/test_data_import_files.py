"""Files as people have them, read to rows: encodings, line ends, separators, and everything wrong with its line in one
run."""

import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.data_import import text_files
from silo_agent.edges.data_import.findings import KEPT, Findings
from silo_agent.edges.data_import.sources import Format, SourceFile, find_source
from silo_agent.edges.data_import.tables import Reading, Row
from silo_agent.edges.data_import.text_files import checked_encoding

TABLE = 'question,query\nwho ?,SELECT 1\n"a, b\nc",SELECT 2\nüber,SELECT 3\n'
ROWS = [
    Row(2, {"question": "who ?", "query": "SELECT 1"}),
    Row(3, {"question": "a, b\nc", "query": "SELECT 2"}),
    Row(5, {"question": "über", "query": "SELECT 3"}),
]


def read(
    path: Path, content: bytes, kind: Format = Format.CSV, *, encoding: str = "utf-8"
) -> tuple[list[Row], Findings]:
    path.write_bytes(content)
    findings = Findings()
    required = {"question": "question", "query": "query"}
    reading = Reading(findings=findings, encoding=encoding, required=required, wanted=frozenset(required.values()))
    return list(SourceFile(path, path.name, kind).rows(reading)), findings


def problems(findings: Findings) -> list[str]:
    return list(findings.shown())


# --- encodings and line ends


@pytest.mark.parametrize(
    ("content", "remark"),
    [
        (TABLE.encode(), ""),
        (TABLE.encode("utf-8-sig"), "UTF-8 with a byte order mark"),
        (TABLE.encode("utf-16"), "UTF-16 with a byte order mark"),
        (b"\xfe\xff" + TABLE.encode("utf-16-be"), "UTF-16 with a byte order mark"),
        (TABLE.encode("utf-16-le"), "UTF-16 without a byte order mark"),
        (TABLE.encode("utf-16-be"), "UTF-16 without a byte order mark"),
    ],
)
def test_the_encoding_is_found_and_told(tmp_path: Path, content: bytes, remark: str) -> None:
    rows, findings = read(tmp_path / "x.csv", content)
    assert rows == ROWS
    assert problems(findings) == []
    assert findings.remarks == ([f"x.csv is {remark}: it is written as UTF-8 with LF"] if remark else [])


@pytest.mark.parametrize(("end", "name"), [("\r\n", "CRLF"), ("\r", "CR")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_line_ends_of_other_systems_are_told_and_count_as_one_line(
    tmp_path: Path, end: str, name: str, encoding: str
) -> None:
    rows, findings = read(tmp_path / "x.csv", TABLE.replace("\n", end).encode(encoding))
    assert [row.line for row in rows] == [2, 3, 5]
    assert rows[2].values == ROWS[2].values
    assert findings.remarks[0].startswith("x.csv is UTF-16" if encoding == "utf-16" else "x.csv has lines")
    assert f"has lines that end in {name}: " in findings.remarks[0]


def test_every_byte_that_is_not_of_the_encoding_is_a_problem_with_its_line(tmp_path: Path) -> None:
    content = "question,query\nüber,SELECT 1\nwho,SELECT 2\ngrün,SELECT 3\n".encode("cp1252")
    rows, findings = read(tmp_path / "x.csv", content)
    assert problems(findings) == [
        "x.csv:2: not UTF-8: if Excel wrote the file, give --encoding cp1252 (byte 0xFC at column 1)",
        "x.csv:4: not UTF-8: if Excel wrote the file, give --encoding cp1252 (byte 0xFC at column 3)",
    ]
    rows, findings = read(tmp_path / "x.csv", content, encoding="cp1252")
    assert [row.values["question"] for row in rows] == ["über", "who", "grün"]
    assert problems(findings) == []


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "cp1251"])
@pytest.mark.parametrize("kind", [Format.CSV, Format.JSONL, Format.JSON])
def test_utf_8_that_is_read_as_another_encoding_is_a_problem(tmp_path: Path, encoding: str, kind: Format) -> None:
    values = [{"question": f"{'x' * 5000} über", "query": "é"}] * 2
    contents = {
        Format.CSV: "question,query\n" + "".join(f"{row['question']},{row['query']}\n" for row in values),
        Format.JSONL: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values),
        Format.JSON: json.dumps(values, ensure_ascii=False),
    }
    for name, content in (
        ("x", contents[kind].encode()),
        ("x.gz", gzip.compress(contents[kind].encode())),
    ):
        assert problems(read(tmp_path / name, content, kind, encoding=encoding)[1]) == [
            f"{name}: looks like UTF-8, not {encoding.upper()}: leave --encoding out; "
            f"if it is {encoding.upper()}, save it as UTF-8"
        ]
    one_other_byte = contents[kind].encode().replace(b"\xc3\xa9", b"\xe9", 1)
    plain = contents[kind].replace("ü", "u").replace("é", "e").encode()
    for content in (one_other_byte, plain, contents[kind].encode("utf-16")):
        assert problems(read(tmp_path / "x", content, kind, encoding=encoding)[1]) == []


def test_utf_16_that_ends_within_a_character_is_a_problem(tmp_path: Path) -> None:
    assert problems(read(tmp_path / "x.csv", TABLE.encode("utf-16")[:-1])[1]) == [
        "x.csv: ends within a character: copy it again"
    ]
    wrong = TABLE.replace("who", "\ud800").encode("utf-16", "surrogatepass")
    assert problems(read(tmp_path / "x.csv", wrong)[1]) == ["x.csv:2: not UTF-16 (half a character at column 1)"]
    with pytest.raises(DataError, match=r"x\.csv is UTF-32: save it as UTF-8"):
        read(tmp_path / "x.csv", TABLE.encode("utf-32"))


@pytest.mark.parametrize("name", ["utf-9", "zip", "rot13", "base64", "cp037"])
def test_what_is_no_encoding_of_text_files_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--encoding {name} is no encoding of text files"):
        checked_encoding(name)


def test_a_packed_file_is_unpacked_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path / "x.csv.gz", gzip.compress(TABLE.encode()))[0] == ROWS
    with pytest.raises(DataError, match=r"x\.csv\.gz cannot be read .*correct or replace it"):
        read(tmp_path / "x.csv.gz", gzip.compress(TABLE.encode() * 1000)[:-20])
    monkeypatch.setattr(text_files, "MAX_CHARACTERS", 1000)
    with pytest.raises(DataError, match=r"x\.csv\.gz has more than 1,000 characters"):
        read(tmp_path / "x.csv.gz", gzip.compress(TABLE.encode() + b"a,b\n" * 1000))
    monkeypatch.setattr(text_files, "MAX_JSON_CHARACTERS", 1000)
    with pytest.raises(DataError, match=r"x\.json\.gz has more than 1,000 characters: save it as JSON lines"):
        read(tmp_path / "x.json.gz", gzip.compress(b"[" + b"1," * 1000), Format.JSON)


def test_a_line_without_an_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_CHARACTERS", 100)
    content = b'{"question": "a", "query": "b"}\n' + b"x" * 1000 + b"\n" + b'{"question": "c"}\n'
    rows, findings = read(tmp_path / "x.jsonl", content, Format.JSONL)
    assert len(rows) == 1
    assert problems(findings) == ["x.jsonl:2: longer than 100 characters; the rest is not read"]


# --- CSV and TSV


@pytest.mark.parametrize(
    ("kind", "separator"), [(Format.CSV, ","), (Format.CSV, ";"), (Format.CSV, "\t"), (Format.TSV, "\t")]
)
def test_the_separator_is_found_in_the_line_of_names(tmp_path: Path, kind: Format, separator: str) -> None:
    rows, findings = read(tmp_path / "x", f"question{separator}query\na{separator}b\n".encode(), kind)
    assert rows == [Row(2, {"question": "a", "query": "b"})]
    assert problems(findings) == []


def test_every_row_that_is_none_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    text = 'question,query\na,b,c\n\nd,e\n"f"g,h\ni\nj,k\n'
    rows, findings = read(tmp_path / "x.csv", text.encode())
    assert [row.line for row in rows] == [4, 7]
    cells = "not 2 cells as in the line of column names: put quotation marks around text with separators or line ends"
    assert problems(findings) == [
        f"x.csv:2: {cells} (3 cells)",
        "x.csv:5: a quotation mark that is out of place, or never closed (',' expected after '\"')",
        f"x.csv:6: {cells} (1 cells)",
    ]


def test_a_quotation_mark_that_is_never_closed_is_told_where_it_opens(tmp_path: Path) -> None:
    text = 'question,query\na,b\n"c,d\n' + "e,f\n" * 100
    (told,) = problems(read(tmp_path / "x.csv", text.encode())[1])
    assert told.startswith("x.csv:3: a quotation mark that is out of place, or never closed")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            "nl,sql",
            ["question' is missing, the columns are 'nl', 'sql': give --map question=nl", "give --map query=sql"],
        ),
        (
            "Question,a",
            [
                "give --map question=Question",
                "'query' is missing, the columns are 'Question', 'a': give --map query=COLUMN",
            ],
        ),
        ("question,query,query", ["column 'query' stands twice: rename one of them"]),
        ("", ["the columns are none", "the columns are none"]),
    ],
)
def test_columns_that_are_missing_are_told_once_each_with_what_to_give(
    tmp_path: Path, names: str, told: Sequence[str]
) -> None:
    rows, findings = read(tmp_path / "x.csv", f"{names}\na,b,c\n".encode())
    assert rows == []
    assert findings.problems == len(told)
    for line, words in zip(problems(findings), told, strict=True):
        assert words in line


def test_of_one_kind_few_problems_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    findings = read(tmp_path / "x.csv", b"question,query\n" + b"a\n" * 5000)[1]
    assert findings.problems == 5000
    lines = problems(findings)
    assert len(lines) == KEPT + 1
    assert lines[-1].endswith(": 4,990 more lines")


# --- JSON


def test_json_lines_and_a_list_of_objects_give_the_same_rows(tmp_path: Path) -> None:
    values = [{"question": f"q {n}", "query": {"a": [n]}} for n in range(3)]
    lines = "\n\n".join(map(json.dumps, values))
    assert read(tmp_path / "x", lines.encode(), Format.JSONL)[0] == [Row(2 * n + 1, values[n]) for n in range(3)]
    indented = json.dumps(values, indent=1)
    rows, findings = read(tmp_path / "x", b"\n " + indented.encode(), Format.JSON)
    assert [row.values for row in rows] == values
    assert [(row.line, row.element) for row in rows] == [(3, 1), (11, 2), (19, 3)]
    assert problems(findings) == []


def test_every_line_that_is_no_object_is_told(tmp_path: Path) -> None:
    good = '{"question": "a", "query": "b"}'
    lines = [good, "{broken", "[1]", '{"a": 1, "a": 2}', "[" * 5000, "1" * 5000, good]
    rows, findings = read(tmp_path / "x", "\n".join(lines).encode(), Format.JSONL)
    assert [row.line for row in rows] == [1, 7]
    told = problems(findings)
    assert [line.partition(":")[2][:1] for line in told] == ["2", "3", "4", "5", "6"]
    assert "not JSON (Expecting property name" in told[0]
    assert "not an object (list)" in told[1]
    assert "a key stands twice" in told[2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[{"question": 1},\n{"question" 2},\n{}]', "x:2: not JSON; the rest is not read (Expecting ':' delimiter)"),
        ('[{"question": 1}\n{"question": 2}]', "x:2: not JSON; the rest is not read (expected , or ])"),
        ('[{"question": 1},\n7]', "x:2: not an object (int)"),
        ('[{"question": 1}]\n{"question": 2}', "x:1: something follows the list; it is not read"),
        ("[\n" + "[" * 100_000, "x:2: not JSON; the rest is not read"),
    ],
)
def test_a_list_is_read_up_to_where_it_breaks_and_that_line_is_told(tmp_path: Path, text: str, told: str) -> None:
    rows, findings = read(tmp_path / "x", text.encode(), Format.JSON)
    assert len(rows) == text.startswith("[{")
    (line,) = problems(findings)
    assert line.startswith(told)


# --- which files


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_splits_are_read_from_the_names_of_files_and_folders(tmp_path: Path) -> None:
    names = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/validation-00000.parquet")
    source = find_source(make(tmp_path, *names, "test/0000.parquet", "README.md", ".cache/dev.parquet", "run.py"), None)
    assert {file.shown: file.split for file in source.files} == {
        names[0]: "train",
        names[1]: "train",
        names[2]: "dev",
        "test/0000.parquet": "test",
    }


def test_of_a_folder_that_datasets_wrote_the_files_of_its_state_are_taken(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        folder = make(tmp_path / split, "data-00000-of-00001.arrow", "cache-0123.arrow", "dataset_info.json")
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_files": None}
        (folder / "state.json").write_text(json.dumps(state))
    make(tmp_path, "dataset_dict.json")
    assert {file.shown: file.split for file in find_source(tmp_path, None).files} == {
        "train/data-00000-of-00001.arrow": "train",
        "validation/data-00000-of-00001.arrow": "dev",
    }


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("{}", "is not as save_to_disk of datasets writes it"),
        ("[" * 9999, "is not as save_to_disk of datasets writes it"),
        ('{"_data_files": [{"filename": "../secret.arrow"}]}', "names a file '../secret.arrow' that is not beside it"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "names a file 'gone.arrow' that is not beside it"),
        ('{"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}', r"after flatten_indices\(\)"),
    ],
)
def test_a_state_that_leads_elsewhere_is_refused(tmp_path: Path, state: str, told: str) -> None:
    make(tmp_path, "secret.arrow", "data/x.arrow")
    (tmp_path / "data" / "state.json").write_text(state)
    with pytest.raises(DataError, match=told):
        find_source(tmp_path / "data", None)


@pytest.mark.parametrize("name", ["train.csv", "test/train.jsonl.gz", "state.json"])
def test_what_is_no_file_is_refused_and_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make(tmp_path, "dev.csv", "test/test.csv")

    def opened(path: Path, *_: object) -> None:
        raise AssertionError(f"{path} would be waited for")

    monkeypatch.setattr(Path, "open", opened)
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=rf"{re.escape(name)} is no file, but a pipe.*: move it away"):
        find_source(tmp_path, None)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(DataError, match=r"a link that leads nowhere"):
        find_source(tmp_path, None)


@pytest.mark.parametrize("name", ["tables.json", "train_tables.json"])
def test_schemas_that_are_no_file_are_not_taken(tmp_path: Path, name: str) -> None:
    make(tmp_path, "train.json")
    os.mkfifo(tmp_path / name)
    source = find_source(tmp_path, None)
    assert source.tables == ()
    assert [file.shown for file in source.files] == ["train.json"]


def test_a_folder_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file of data"):
        find_source(make(tmp_path / "none", "readme.md", "schema.json"), None)
    with pytest.raises(ConfigurationError, match=r"several formats \(csv, jsonl\): say with --format"):
        find_source(make(tmp_path / "two", "train.csv", "dev.jsonl"), None)
    with pytest.raises(DataError, match=r"the name of more\.csv says not whether it is train, dev or test"):
        find_source(make(tmp_path / "three", "train.csv", "more.csv"), None)
    with pytest.raises(ConfigurationError, match="is neither a file nor a folder"):
        find_source(tmp_path / "absent", None)
    with pytest.raises(ConfigurationError, match=r"x\.txt has none of the suffixes"):
        find_source(make(tmp_path / "four", "x.txt") / "x.txt", None)
    assert find_source(tmp_path / "four" / "x.txt", Format.TSV).files[0].format is Format.TSV
    assert [file.shown for file in find_source(tmp_path / "two", Format.CSV).files] == ["train.csv"]
