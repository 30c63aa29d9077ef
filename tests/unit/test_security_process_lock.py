"""One process to a folder, and a holder that is believed only while it holds."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lorica_security.errors import Conflict
from lorica_security.host.process_lock import ProcessLock, holder

HOLD = """
import sys
from pathlib import Path
from lorica_security.host.process_lock import ProcessLock
with ProcessLock(Path(sys.argv[1]), "test", brief=len(sys.argv) > 2):
    print("held", flush=True)
    sys.stdin.read()
"""


def start(path: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with start(path) as process:
        assert holder(path) == process.pid
        with pytest.raises(Conflict, match=rf"another test \(process {process.pid}\)"), ProcessLock(path, "test"):
            pass
        process.communicate("")
    assert holder(path) is None
    with ProcessLock(path, "test"):
        assert holder(path) == os.getpid()


def test_a_brief_holder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    with start(path, "brief") as process:
        assert process.stdin is not None
        assert holder(path) is None, "nobody who could be asked"
        looked = []

        def sleep(seconds: float) -> None:
            looked.append(seconds)
            process.communicate("")

        monkeypatch.setattr("time.sleep", sleep)
        with ProcessLock(path, "test"):
            assert holder(path) == os.getpid()
        assert len(looked) == 1


def test_a_brief_holder_that_never_ends_is_told_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorica_security.host.process_lock.PATIENCE_S", 0.1)
    path = tmp_path / "lock"
    with start(path, "brief") as process:
        with pytest.raises(Conflict, match=rf"\(process {process.pid}\)"), ProcessLock(path, "test"):
            pass
        process.communicate("")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]", b'{"pid": "1", "started": 1.0}', b'{"brief": true}'])
def test_a_holder_that_has_not_named_itself_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    path = tmp_path / "lock"
    with start(path) as process:
        path.write_bytes(content)
        monkeypatch.setattr("time.sleep", lambda _: process.communicate(""))
        with ProcessLock(path, "test"):
            assert holder(path) == os.getpid()


def test_a_killed_holder_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with start(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert holder(path) is None
        with ProcessLock(path, "test"):
            pass


def test_a_stranger_with_the_same_process_id_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"pid": os.getpid(), "started": 1.0}))
    assert holder(path) is None
    path.write_text("nonsense")
    assert holder(path) is None
