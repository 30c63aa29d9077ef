"""What a worker that hostile SQL has taken over can still do: nothing that the kernel has a say in."""

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lorica_security.errors import DataError
from silo_agent.sql_sandbox import (
    JailMissing,
    Limits,
    Sandbox,
    SqliteTarget,
    Walls,
    landlock,
    probe_jail,
    run_select,
    sandbox,
    seccomp,
)
from tests.support import systemd_unit, taken_worker

LIMITS = Limits(seconds=30, memory_bytes=64 * 2**20)
pytestmark = pytest.mark.skipif(
    not landlock.version() or seccomp.library() is None,
    reason="needs Landlock (Linux 5.13, among the kernel's lsm=) and libseccomp (libseccomp2): the jail is not tested",
)


def make_database(path: Path, *, rows: int = 1) -> SqliteTarget:
    connection = sqlite3.connect(path)
    connection.executescript(
        f"CREATE TABLE t (a); INSERT INTO t VALUES {', '.join(f'({i})' for i in range(1, rows + 1))};"
    )
    connection.close()
    return SqliteTarget(path)


@dataclass(frozen=True)
class Taken:
    """A worker that was taken over, a key of the silo beside its database, and a socket that answers."""

    box: Sandbox
    database: Path
    key: Path
    socket: Path

    def outcome(self, attack: str, argument: object = "") -> object:
        return taken_worker.outcome(self.box, attack, argument)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taken]:
    folder = tmp_path_factory.mktemp("silo")
    key = folder / "identity.key"
    key.write_text("secret")
    target = make_database(folder / "one.db")
    with socket.socket(socket.AF_UNIX) as server, taken_worker.taken_over(target, LIMITS) as box:
        server.bind(str(folder / "answers"))
        server.listen()
        yield Taken(box, target.path, key, folder / "answers")


# What is read and written


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/status", "/dev/zero", taken_worker.__file__])
def test_no_other_file_is_read(taken: Taken, path: str) -> None:
    assert taken.outcome("read", path) in taken_worker.DENIED


def test_no_other_file_is_read_while_the_database_is_opened(taken: Taken) -> None:
    """A hostile file may take the worker over then already."""
    assert taken.outcome(taken_worker.AT_OPENING) in taken_worker.DENIED


def test_the_silos_keys_are_not_read_even_where_they_lie_beside_the_database(taken: Taken) -> None:
    assert taken.outcome("read", taken.key) in taken_worker.DENIED


def test_the_database_is_read(taken: Taken) -> None:
    """What shows that the others are denied for what they are."""
    assert taken.outcome("read", taken.database) == taken_worker.DONE


@pytest.mark.parametrize("attack", ["write into", "delete", "rename", "link", "change mode", "change owner", "change times", "set an attribute", "cut short"])  # fmt: skip
@pytest.mark.parametrize("of", ["database", "key"])
def test_nothing_is_changed(taken: Taken, attack: str, of: str) -> None:
    assert taken.outcome(attack, getattr(taken, of)) in taken_worker.DENIED


@pytest.mark.parametrize("attack", ["write beside", "make a folder", "make a fifo"])
def test_nothing_is_made(taken: Taken, attack: str) -> None:
    assert taken.outcome(attack, taken.database.with_name("loot")) in taken_worker.DENIED
    assert taken.outcome(attack, f"{taken.key}.loot") in taken_worker.DENIED


@pytest.mark.parametrize("of", ["/", "database"])
def test_no_folder_is_listed(taken: Taken, of: str) -> None:
    assert taken.outcome("list", taken.database.parent if of == "database" else of) in taken_worker.DENIED


# What is reached


def test_no_socket_is_reached(taken: Taken) -> None:
    assert taken.outcome("connect", taken.socket) in taken_worker.DENIED


@pytest.mark.parametrize("attack", taken_worker.WITHOUT_A_FILE)
def test_denied(taken: Taken, attack: str) -> None:
    assert taken.outcome(attack) in taken_worker.DENIED


def test_it_has_one_thread_and_lives(taken: Taken) -> None:
    """The filter is a thread's own; and none of the attacks above has ended the worker or the agent."""
    assert taken.box._process is not None
    status = Path(f"/proc/{taken.box._process.pid}/status").read_text()
    assert "\nThreads:\t1\n" in status
    assert "\nNoNewPrivs:\t1\n" in status
    assert os.getppid() > 0


# The walls


def planted(code: str) -> str:
    """A worker's start with `code` in it, before it does anything."""
    return f"import sys; sys.path[:0] = sys.argv[1:]; {code}; from silo_agent.sql_sandbox.worker import main; main()"


NO_LANDLOCK = planted("from silo_agent.sql_sandbox import landlock; landlock.version = lambda: 0")
NO_SECCOMP = planted("from silo_agent.sql_sandbox import seccomp; seccomp._LIBRARY = 'libnowhere.so.2'")


def test_both_walls_stand_here_and_the_probe_has_tried_them() -> None:
    assert probe_jail() == Walls(landlock.version(), seccomp=True)


@pytest.mark.parametrize(
    ("start", "walls", "missing"),
    [
        (NO_LANDLOCK, Walls(0, True), "no Landlock"),
        (NO_SECCOMP, Walls(landlock.version(), False), "install libseccomp2"),
    ],
)
def test_a_wall_that_the_machine_lacks_is_told_and_refused_where_the_jail_is_required(
    start: str, walls: Walls, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_START", start)
    assert probe_jail() == walls
    assert missing in walls.missing
    target = make_database(tmp_path / "one.db")
    assert run_select(target, "SELECT a FROM t", LIMITS).rows == ((1,),)
    with pytest.raises(JailMissing, match=f"{missing}.*require_jail = false"):
        run_select(target, "SELECT a FROM t", replace(LIMITS, require_jail=True))


@pytest.mark.parametrize(
    "code",
    [
        "from silo_agent.sql_sandbox import landlock; landlock._RESTRICT_SELF = 9999",
        "from silo_agent.sql_sandbox import landlock; landlock._PR_SET_NO_NEW_PRIVS = 9999",
        "from silo_agent.sql_sandbox import seccomp; seccomp._FAIL = 0x12345678",
    ],
)
def test_no_statement_runs_where_a_wall_that_the_machine_has_does_not_stand(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_START", planted(code))
    with pytest.raises(JailMissing, match="did not start: a wall of its jail does not stand"):
        run_select(make_database(tmp_path / "one.db"), "SELECT a FROM t", LIMITS)


@pytest.mark.skipif(not systemd_unit.CAN, reason=systemd_unit.WHY_NOT)
def test_both_stand_under_the_systemd_unit_of_the_agent() -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:]; from silo_agent.sql_sandbox import probe_jail; print(probe_jail().missing or 'none')"
    words = systemd_unit.sandboxed([sys.executable, "-I", "-c", code, *sandbox.CODE], unit="lorica-silo-agent")
    assert subprocess.check_output(words, text=True) == "none\n"


def test_a_wall_that_is_claimed_and_lets_through_is_not_told_as_standing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START", planted("from silo_agent.sql_sandbox import jail; jail._READ = "
                                                   "(*jail._READ, jail.Allowed('socketpair')); "
                                                   "jail.landlock.give_up_files = lambda *a, **k: None"))  # fmt: skip
    assert probe_jail() == Walls(0, seccomp=False)


# A database whose files come and go


_ALONE = """
import os, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from silo_agent.sql_sandbox import jail, landlock, seccomp
from silo_agent.sql_sandbox.results import Limits
missing = {"landlock": (landlock, "version", lambda: 0), "seccomp": (seccomp, "library", lambda: None)}
setattr(*missing[sys.argv[1]])
path = Path(sys.argv[2])
jail.enter(Limits(), readable=[path])
os.close(os.open(path, os.O_RDONLY))
for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_CREAT):
    try:
        os.open(path.with_name("made") if flags & os.O_CREAT else path, flags, 0o600)
    except PermissionError:
        continue
    sys.exit(f"opened with {flags}")
"""


@pytest.mark.parametrize("missing", ["landlock", "seccomp"])
def test_each_wall_alone_keeps_files_from_being_emptied_or_made(missing: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("a record")

    run = subprocess.run(
        [sys.executable, "-I", "-c", _ALONE, missing, str(kept), *sandbox.CODE],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, run.stderr) == (0, "")
    assert kept.read_text() == "a record"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_log_that_a_writer_begins_later_is_read(tmp_path: Path) -> None:
    target = make_database(tmp_path / "one.db")
    with closing(sqlite3.connect(target.path)) as writer, Sandbox(target, LIMITS) as box:
        assert box.run("SELECT a FROM t").rows == ((1,),)
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO t VALUES (2)")
        writer.commit()
        assert box.run("SELECT a FROM t").rows == ((1,), (2,))


def test_a_database_that_was_put_in_the_place_of_another_is_read(tmp_path: Path) -> None:
    target = make_database(tmp_path / "one.db")
    with Sandbox(target, LIMITS) as box:
        assert box.run("SELECT count(*) FROM t").rows == ((1,),)
        make_database(tmp_path / "two.db", rows=2).path.replace(target.path)
        assert box.run("SELECT count(*) FROM t").rows == ((2,),)


def test_a_database_that_a_link_leads_to_is_read_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target = make_database(tmp_path / "far" / "one.db")
    link = tmp_path / "link.db"
    link.symlink_to(target.path)
    with closing(sqlite3.connect(target.path)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("INSERT INTO t VALUES (2)")
        writer.commit()
        assert run_select(SqliteTarget(link), "SELECT a FROM t", LIMITS).rows == ((1,), (2,))


def test_a_journal_that_cannot_be_rolled_back_costs_one_more_worker_and_is_told(tmp_path: Path) -> None:
    target = make_database(tmp_path / "one.db")
    with Sandbox(target, LIMITS) as box:
        box.run("SELECT a FROM t")
        (tmp_path / "one.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
        with pytest.raises(DataError, match="cannot be opened for reading only"):
            box.run("SELECT a FROM t")
        (tmp_path / "one.db-journal").unlink()
        assert box.run("SELECT a FROM t").rows == ((1,),)
