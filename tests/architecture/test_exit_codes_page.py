"""ops/docs/exit-codes.md and lorica_security.errors.EXIT_CODES agree, both ways."""

import re
from pathlib import Path

from lorica_security.errors import EXIT_CODES

PAGE = Path(__file__).resolve().parents[2] / "ops" / "docs" / "exit-codes.md"
ROW = re.compile(r"\| (\d+) \| (\w*) ?\|(.*)\|")
ROWS = [match for line in PAGE.read_text(encoding="utf-8").splitlines() if (match := ROW.fullmatch(line))]


def test_the_page_has_each_code_once_under_its_name() -> None:
    on_page = [(int(row[1]), row[2]) for row in ROWS if row[2]]
    assert sorted(on_page) == sorted((code, kind.__name__) for kind, code in EXIT_CODES.items())


def test_the_codes_that_are_nobodys_error_are_explained() -> None:
    assert [int(row[1]) for row in ROWS if not row[2]] == [0, 1, 2]


def test_every_error_has_a_cause_a_remedy_and_an_example() -> None:
    for row in ROWS:
        if row[2]:
            cells = [cell.strip() for cell in row[3].split(" | ")]
            assert len(cells) == 3, row[0]
            assert all(cells), row[0]
