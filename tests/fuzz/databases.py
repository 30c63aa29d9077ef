"""SQLite files that no honest program writes, by kind and number: the same number gives the same bytes.

Damage is done to files that were whole; what is hostile is written by SQLite itself, into the table where it keeps its
schema.
"""

import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

HEADER = 100
PAGE_HEADER = 12
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
LOG_MAGIC = 0x377F0682
EXTREMES = (0, 1, 2, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
ENDLESS = "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x)"


@dataclass(frozen=True, slots=True)
class Files:
    """A database and what lies beside it, empty for nothing."""

    database: bytes
    log: bytes = b""
    shared: bytes = b""
    journal: bytes = b""


@cache
def whole(page_size: int, encoding: str = "UTF-8", vacuum: str = "NONE") -> bytes:
    """A database with something of everything: overflow pages, freed pages, indexes, views, triggers, three kinds of
    virtual tables."""
    return _made(
        f"PRAGMA page_size = {page_size}; PRAGMA encoding = '{encoding}'; PRAGMA auto_vacuum = {vacuum};",
        """
        CREATE TABLE patient (id INTEGER PRIMARY KEY, name TEXT COLLATE NOCASE, age REAL, picture BLOB,
            initial TEXT GENERATED ALWAYS AS (substr(name, 1, 1)) VIRTUAL, old INT AS (age > 60) STORED);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200)
            INSERT INTO patient (name, age, picture) SELECT 'name ' || (i * 37 % 101), i / 2.0, zeroblob(i * i % 9000) FROM n;
        DELETE FROM patient WHERE id % 5 = 0;
        CREATE INDEX by_name ON patient (name, age DESC);
        CREATE INDEX by_half ON patient (abs(age) / 2) WHERE age > 3;
        CREATE TABLE visit (patient INT REFERENCES patient, day TEXT, PRIMARY KEY (patient, day)) WITHOUT ROWID;
        INSERT INTO visit SELECT id, '2026-01-' || (id % 28) FROM patient;
        CREATE VIEW adult AS SELECT name, age FROM patient WHERE age >= 18;
        CREATE TRIGGER seen AFTER INSERT ON visit BEGIN UPDATE patient SET age = age + 1 WHERE id = new.patient; END;
        CREATE VIRTUAL TABLE note USING fts5(body, tokenize = 'porter unicode61');
        INSERT INTO note SELECT 'a cough and ' || name FROM patient LIMIT 50;
        CREATE VIRTUAL TABLE letter USING fts4(body);
        INSERT INTO letter SELECT 'a fever and ' || name FROM patient LIMIT 50;
        CREATE VIRTUAL TABLE place USING rtree(id, x0, x1, y0, y1);
        INSERT INTO place SELECT id, age, age + 1, age, age + 2 FROM patient LIMIT 60;
        ANALYZE;
        """,
    )


def _made(*scripts: str) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "made.db"
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for script in scripts:
                connection.executescript(script)
        return path.read_bytes()


def _any_whole(draw: Random) -> bytes:
    return whole(
        *draw.choice(
            ((512, "UTF-8", "NONE"), (1024, "UTF-8", "FULL"), (1024, "UTF-16le", "NONE"), (4096, "UTF-8", "NONE"))
        )
    )


# Damage


def flipped(draw: Random) -> Files:
    """Bits turned over, anywhere."""
    data = bytearray(_any_whole(draw))
    for _ in range(draw.choice((1, 3, 30, 300))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return Files(bytes(data))


def cut(draw: Random) -> Files:
    """Cut short, at a page or within one, or with something behind its end."""
    data = _any_whole(draw)
    size = page_size(data)
    end = draw.choice(
        (draw.randrange(len(data)), size * draw.randrange(len(data) // size), draw.randrange(HEADER * 2), len(data))
    )
    return Files(data[:end] + draw.choice((b"", b"\0" * size, draw.randbytes(size // 2))))


def headed(draw: Random) -> Files:
    """The header says something else: size and count of pages, list of free pages, format, encoding, versions."""
    data = bytearray(_any_whole(draw))
    pages = len(data) // page_size(bytes(data))
    for _ in range(draw.randint(1, 3)):
        at, size = draw.choice(((16, 2), (18, 1), (19, 1), (20, 1), (21, 1), (24, 4), (28, 4), (32, 4), (36, 4), (40, 4), (44, 4), (52, 4), (56, 4), (64, 4), (92, 4)))  # fmt: skip
        value = draw.choice((*EXTREMES, pages, draw.getrandbits(32)))
        data[at : at + size] = (value % 256**size).to_bytes(size, "big")
    return Files(bytes(data))


def paged(draw: Random) -> Files:
    """Pages that are another kind, point elsewhere, hold cells beyond their end, or are another page's."""
    data = bytearray(_any_whole(draw))
    size = page_size(bytes(data))
    pages = len(data) // size
    for _ in range(draw.randint(1, 6)):
        page = draw.randrange(pages)
        start = page * size + (HEADER if page == 0 else 0)
        match draw.choice(("kind", "count", "pointer", "right", "swap", "blank", "cell")):
            case "kind":
                data[start] = draw.choice((0, 2, 5, 10, 13, 255))
            case "count":
                data[start + 3 : start + 5] = struct.pack(">H", draw.choice(EXTREMES[:10]))
            case "pointer":
                at = start + PAGE_HEADER + 2 * draw.randrange(8)
                data[at : at + 2] = struct.pack(
                    ">H", draw.choice((0, 1, size - 1, draw.randrange(size), *EXTREMES[:4])) % 65536
                )
            case "right":
                data[start + 8 : start + 12] = struct.pack(
                    ">I", draw.choice((0, 1, page + 1, pages, pages + 1, 2**32 - 1))
                )
            case "swap":
                other = draw.randrange(pages) * size
                data[page * size : page * size + size] = data[other : other + size]
            case "blank":
                data[start : page * size + size] = bytes([draw.choice((0, 255))]) * (page * size + size - start)
            case _:
                at = page * size + draw.randrange(size - 16)
                data[at : at + 9] = draw.choice((b"\xff" * 9, b"\x81" * 8 + b"\x00", b"\x00" * 9, draw.randbytes(9)))
    return Files(bytes(data))


def logged(draw: Random) -> Files:
    """A write-ahead log, its index and a journal of any content beside a database that says it has a log."""
    data = bytearray(_any_whole(draw))
    size = page_size(bytes(data))
    data[18:20] = b"\2\2"
    frames = b"".join(
        struct.pack(">6I", draw.choice((0, 1, 2, 2**32 - 1)), draw.choice((0, 1, 9)), 1, 2, draw.getrandbits(32), 0)
        + draw.randbytes(size)
        for _ in range(draw.randint(0, 2))
    )
    head = struct.pack(
        ">8I", LOG_MAGIC + draw.randint(0, 1), 3007000, size, 0, 1, 2, draw.getrandbits(32), draw.getrandbits(32)
    )
    return Files(
        bytes(data),
        log=draw.choice((head + frames, head, draw.randbytes(99))),
        shared=draw.choice((b"", b"\0" * 32768, draw.randbytes(32768), draw.randbytes(100))),
        journal=draw.choice((b"", b"\0" * 600, JOURNAL_MAGIC + draw.randbytes(600), draw.randbytes(100))),
    )


# What SQLite itself wrote

FUNCTIONS = (
    "load_extension('/tmp/evil.so')",
    "fts3_tokenizer('simple', x'4141414141414141')",
    "readfile('/etc/passwd')",
    "writefile('/tmp/loot', 'x')",
    "randomblob(1000000000)",
    "zeroblob(2147483647)",
    "printf('%.*c', 1000000000, 'x')",
    "(SELECT count(*) FROM pragma_table_info('patient'))",
    "(SELECT count(*) FROM sqlite_dbpage)",
    "json_extract('" + "[" * 900 + "]" * 900 + "', '$[0][0]')",
    "replace(hex(zeroblob(100000)), '00', hex(zeroblob(100000)))",
    f"({ENDLESS} SELECT max(n) FROM x)",
    "abs(-9223372036854775808)",
    "likelihood(1, 2.0)",
    "unknown_function(1)",
    "'a' GLOB '" + "*a" * 400 + "b'",
    "(" * 900 + "1" + ")" * 900,
)
VIEWS = (
    "SELECT * FROM trap",
    "SELECT * FROM trap2, trap",
    "SELECT {function} AS a",
    "SELECT {function} AS a FROM patient",
    "SELECT (SELECT {function}) AS a FROM patient, patient, patient, patient",
    "SELECT 1 AS a FROM " + ", ".join(["patient"] * 63),
    f"{ENDLESS} SELECT n AS a FROM x",
    f"{ENDLESS} SELECT n AS a FROM x ORDER BY random()",
    "WITH t(s) AS (SELECT 'a' UNION ALL SELECT s || s FROM t) SELECT length(s) AS a FROM t",
    " UNION ALL ".join(["SELECT 1 AS a"] * 499),
    "VALUES " + ", ".join(["(1)"] * 5000),
    "SELECT sum(a) OVER (ORDER BY a ROWS BETWEEN 9223372036854775807 PRECEDING AND CURRENT ROW) AS a FROM (SELECT "
    "age AS a FROM patient)",
)
VIRTUAL = (
    "fts5(a, content='patient')",
    "fts5(a, content='trap', content_rowid='a')",
    "fts5(a, tokenize='unicode61 categories x')",
    'fts4(a, tokenize=unicode61 "tokenchars=\x01")',
    'fts4(a, content="sqlite_master")',
    "fts3tokenize(simple)",
    "fts4aux(letter)",
    "fts5vocab(note, row)",
    "fts5vocab(main, trap, row)",
    "rtree(id, x0, x1, y0, y1, z0, z1, a0, a1, b0, b1)",
    "dbstat",
    "sqlite_stmt",
    "json_each",
    "csv(filename='/etc/passwd')",
    "no_such_module",
)
SHADOWS = (
    "UPDATE note_data SET block = randomblob({size})",
    "UPDATE note_data SET block = x'00000000' WHERE id = 10",
    "UPDATE note_config SET v = 99",
    "UPDATE note_idx SET pgno = {size}",
    "DELETE FROM note_docsize",
    "UPDATE letter_segdir SET root = randomblob({size})",
    "UPDATE letter_segdir SET start_block = 1, end_block = 9223372036854775807",
    "UPDATE letter_stat SET value = randomblob({size})",
    "DELETE FROM letter_content",
    "UPDATE place_node SET data = randomblob({size})",
    "UPDATE place_node SET data = x'ffffffff' || substr(data, 5)",
    "UPDATE sqlite_stat1 SET stat = '0 0 0 0 0 0 99999999999999999999 unordered sz=1'",
    "UPDATE sqlite_stat1 SET stat = '{size} 1 1', idx = 'nowhere'",
    "UPDATE sqlite_stat1 SET stat = zeroblob(1000)",
)
ROWS = (
    "('table', 'trap', 'trap', 0, 'CREATE TABLE trap (a)')",
    "('table', 'trap', 'trap', -1, 'CREATE TABLE trap (a)')",
    "('table', 'trap', 'trap', 1, 'CREATE TABLE trap (a)')",
    "('table', 'trap', 'trap', 2, 'CREATE TABLE trap (a, b, c) WITHOUT ROWID')",
    "('table', 'trap', 'trap', 4294967295, 'CREATE TABLE trap (a)')",
    "('table', 'trap', 'trap', 'two', 'CREATE TABLE trap (a PRIMARY KEY)')",
    "('table', 'trap', 'trap', 2, NULL)",
    "('table', 'trap', 'trap', 2, x'00ff')",
    "('table', 'trap', 'trap', 2, 'SELECT 1')",
    "('table', 'trap', 'trap', 2, 'ATTACH ''/etc/passwd'' AS trap')",
    "('table', 'trap', 'trap', 2, 'CREATE TABLE trap AS SELECT 1 AS a')",
    "('table', 'trap', 'trap', 2, 'CREATE TEMP TABLE trap (a)')",
    "('table', NULL, NULL, 2, 'CREATE TABLE trap (a)')",
    "('table', 'sqlite_master', 'sqlite_master', 2, 'CREATE TABLE sqlite_master (a)')",
    "('table', 'trap' || char(0, 27, 34), 'trap', 2, 'CREATE TABLE trap (a)')",
    "('table', 'trap', 'trap', 2, 'CREATE TABLE trap (a ' || hex(zeroblob(400000)) || ')')",
    "('index', 'trap', 'patient', 2, 'CREATE INDEX trap ON patient (age)')",
    "('index', 'sqlite_autoindex_patient_1', 'patient', 3, '')",
    "('trigger', 'trap', 'patient', 0, 'CREATE TRIGGER trap BEFORE UPDATE ON patient BEGIN SELECT trap(); END')",
    "('nothing', 'trap', 'trap', 2, 'CREATE TABLE trap (a)')",
    "(1, 2, 3, 4, 5)",
)


def schemed(draw: Random) -> Files:
    """A schema that no CREATE makes: what calls and recursion views, columns and indexes hide, modules, rows that
    lie."""
    function = draw.choice(FUNCTIONS)
    quoted = function.replace("'", "''")
    view = draw.choice(VIEWS).replace("{function}", function).replace("'", "''")
    module = draw.choice(VIRTUAL).replace("'", "''")
    added = draw.choice(
        (
            f"('view', 'trap', 'trap', 0, 'CREATE VIEW trap AS {view}')",
            f"('table', 'trap', 'trap', 2, 'CREATE TABLE trap (id INTEGER PRIMARY KEY, a AS ({quoted}), b AS (a) "
            "STORED)')",
            f"('table', 'trap', 'trap', 2, 'CREATE TABLE trap (a DEFAULT ({quoted}), CHECK ({quoted}))')",
            f"('index', 'trap', 'patient', 3, 'CREATE INDEX trap ON patient ({quoted})')",
            f"('index', 'trap', 'patient', 3, 'CREATE INDEX trap ON patient (age) WHERE {quoted}')",
            f"('table', 'trap', 'trap', 0, 'CREATE VIRTUAL TABLE trap USING {module}')",
            draw.choice(ROWS),
        )
    )
    return Files(_rewritten(_any_whole(draw), f"INSERT INTO sqlite_master VALUES {added}"))


def crowded(draw: Random) -> Files:
    """Very many tables, columns, or virtual tables."""
    count = draw.choice((10, 300, 2500))
    what = draw.choice(
        (
            "INSERT INTO sqlite_master SELECT 'table', 't' || id, 't' || id, 2, 'CREATE TABLE t' || id || ' (a)' "
            f"FROM n LIMIT {count}",
            "INSERT INTO sqlite_master SELECT 'table', 't' || id, 't' || id, 0, 'CREATE VIRTUAL TABLE t' || id || "
            f"' USING fts5(a)' FROM n LIMIT {count // 10}",
            "INSERT INTO sqlite_master SELECT 'table', 'trap', 'trap', 2, 'CREATE TABLE trap (a' || "
            f"group_concat(', c' || id, '') || ')' FROM (SELECT id FROM n LIMIT {count})",
            "INSERT INTO sqlite_master SELECT 'index', 'i' || id, 'patient', 3, 'CREATE INDEX i' || id || ' ON "
            f"patient (age)' FROM n LIMIT {count}",
        )
    )
    return Files(
        _rewritten(_any_whole(draw), f"WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) {what}")
    )


def shadowed(draw: Random) -> Files:
    """What virtual tables and the planner keep in tables of their own, spoilt."""
    changes = (
        draw.choice(SHADOWS).replace("{size}", str(draw.choice((0, 1, 4, 20, 900)))) for _ in range(draw.randint(1, 3))
    )
    return Files(_rewritten(_any_whole(draw), *changes))


def _rewritten(data: bytes, *statements: str) -> bytes:
    """`data` after each statement that SQLite takes, with its schema and shadow tables open to writing."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rewritten.db"
        path.write_bytes(data)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("SELECT count(*) FROM sqlite_master")
            for statement in statements:
                connection.execute(statement)
        return path.read_bytes()


def page_size(data: bytes) -> int:
    """As the header has it."""
    (size,) = struct.unpack(">H", data[16:18])
    return 65536 if size == 1 else int(size)


KINDS: dict[str, Callable[[Random], Files]] = {
    make.__name__: make for make in (flipped, cut, headed, paged, logged, schemed, crowded, shadowed)
}


def files(kind: str, number: int) -> Files:
    """The files of this number."""
    return KINDS[kind](Random(f"{kind} {number}"))
