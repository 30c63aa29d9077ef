"""Whatever bytes a data file has, an import tells what is wrong with them, or makes lines that the agent reads.

A fixed number of cases, the same in every run; `FUZZ_CASES=100000 pytest tests/fuzz` looks further.
"""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorica_security.errors import DataError
from silo_agent.edges.data_import.examples import Choices, Importer
from silo_agent.edges.data_import.findings import Findings
from silo_agent.edges.data_import.schemas import Schemas, schemas_of
from silo_agent.edges.data_import.sources import Format, Source, SourceFile
from silo_agent.edges.data_import.splits import Division
from silo_agent.edges.data_import.templates import Templates
from silo_agent.edges.data_import.written import write_folder
from tests.fuzz.mutations import spoilt_bytes, spoilt_json
from tests.unit.test_data_import_lines import SCHEMA, TABLES

CASES = int(os.environ.get("FUZZ_CASES", "100"))
fuzz = settings(
    max_examples=CASES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
ROWS = [{"id": f"e{n}", "question": f"wer ist {n} ü?", "query": f"SELECT a FROM t WHERE b = '{n}'"} for n in range(3)]
CSV = 'id,question,query\n1,"a, ""b""\nü",SELECT 1\n2,c,SELECT 2\n'
VALID: dict[Format, list[bytes]] = {
    Format.CSV: [CSV.encode(code) for code in ("utf-8", "utf-8-sig", "utf-16", "utf-16-be")],
    Format.TSV: [CSV.replace(",", "\t").encode()],
    Format.JSONL: ["\r\n".join(map(json.dumps, ROWS)).encode(code) for code in ("utf-8", "utf-16")],
    Format.JSON: [json.dumps(ROWS, indent=1).encode(), json.dumps(ROWS).encode()],
}
spoilt_files = st.sampled_from(list(VALID)).flatmap(
    lambda kind: st.tuples(st.just(kind), spoilt_bytes(st.sampled_from(VALID[kind])) | st.sampled_from(VALID[kind]))
)


@fuzz
@given(spoilt_files)
def test_a_file_of_rows(file: tuple[Format, bytes]) -> None:
    kind, content = file
    with TemporaryDirectory() as root:
        path = Path(root) / "rows"
        path.write_bytes(content)
        findings = Findings()
        importer = Importer(Source(files=()), Choices(columns={}), Schemas({SCHEMA.db_id: SCHEMA}, {}), findings)
        importer.read(SourceFile(path, path.name, kind))
        assert all(line.isprintable() for line in findings.shown())
        if content in VALID[kind]:
            assert not findings.problems
        if not importer.examples:
            assert findings.problems
            return
        dev = [replace(example, id=f"dev-{example.id}") for example in importer.examples]
        division = Division(splits={"train": importer.examples, "dev": dev}, how="", leaks=())
        write_folder(Path(root) / "out", division, [SCHEMA])  # which reads it back


@fuzz
@given(spoilt_json([TABLES], lambda value: json.dumps(value).encode()))
def test_a_file_of_tables(content: bytes) -> None:
    with TemporaryDirectory() as root, contextlib.suppress(DataError):
        path = Path(root) / "tables.json"
        path.write_bytes(content)
        source = Source(files=(), tables=(path,))
        schemas = schemas_of(source, file=None, database=None, db_id=None, findings=Findings())
        for name in schemas.names:
            assert schemas.of(name).tables


@fuzz
@given(
    st.text(max_size=60)
    | spoilt_bytes(st.just(ROWS[0]["query"].encode())).map(lambda raw: raw.decode("utf-8", "replace"))
)
def test_a_statement(sql: str) -> None:
    assert isinstance(Templates().of(sql), str)
