"""The sandbox's worker, as it is after hostile SQL has taken it over: what it is asked for is not SQL, but one of the
attacks below.

The worker itself is the real one, and so is everything that it does before it has opened its database.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from silo_agent.sql_sandbox import (
    DatabaseTarget,
    Limits,
    Rows,
    Sandbox,
    postgresql_session,
    sandbox,
    sqlite_session,
    worker,
)

_START = "import sys; sys.path[:0] = sys.argv[1:]; from tests.support.taken_worker import main; main()"
AT_OPENING = "what was read at the opening"
DONE, DENIED = "done", {"EPERM", "EACCES"}

_LIBC = ctypes.CDLL(None, use_errno=True)
_PTRACE_SEIZE, _CLONE_NEWUSER = 0x4206, 0x10000000
_IO_URING_SETUP, _PIDFD_OPEN = 425, 434  # the same on every machine


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*(ctypes.c_long(argument) for argument in arguments)) < 0:
        raise OSError(ctypes.get_errno(), name)


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _thread() -> None:
    try:
        threading.Thread(target=int).start()
    except RuntimeError as error:  # Python's word for whatever the kernel said
        raise PermissionError(errno.EPERM, "thread") from error


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def _undo_limit() -> None:
    none = (ctypes.c_uint64 * 2)(resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    _call("setrlimit", resource.RLIMIT_FSIZE, ctypes.addressof(none))


def _executable_memory() -> None:
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def _memory_made_executable() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _call("mprotect", address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)


WITH_A_FILE: dict[str, Callable[[str], object]] = {
    "read": lambda path: os.read(os.open(path, os.O_RDONLY), 1),
    "write beside": lambda path: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "write into": lambda path: os.open(path, os.O_RDWR),
    "list": os.listdir,
    "delete": os.unlink,
    "rename": lambda path: os.rename(path, f"{path}.moved"),
    "link": lambda path: os.link(path, f"{path}.linked"),
    "make a folder": lambda path: os.mkdir(f"{path}.folder"),
    "make a fifo": lambda path: os.mkfifo(f"{path}.fifo"),
    "change mode": lambda path: os.chmod(path, 0o777),
    "change owner": lambda path: os.chown(path, 0, 0),
    "change times": lambda path: os.utime(path, (0, 0)),
    "set an attribute": lambda path: os.setxattr(path, "user.loot", b"x"),
    "cut short": lambda path: os.truncate(path, 0),
    "connect": _connect,
}
"""On a path."""
WITHOUT_A_FILE: dict[str, Callable[[str], object]] = {
    "read the parent's environment": lambda _: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "read the parent's memory": lambda _: os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY),
    "read the parent's command line": lambda _: Path(f"/proc/{os.getppid()}/cmdline").read_bytes(),
    "open an own file anew": lambda _: os.open("/proc/self/fd/2", os.O_WRONLY),
    "internet socket": lambda _: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "datagram socket": lambda _: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "netlink socket": lambda _: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "pair of sockets": lambda _: socket.socketpair(),
    "fork": lambda _: _fork(),
    "thread": lambda _: _thread(),
    "run a program": lambda _: subprocess.run(["/bin/true"], check=False),
    "become a program": lambda _: os.execv("/bin/true", ["true"]),
    "trace the parent": lambda _: _call("ptrace", _PTRACE_SEIZE, os.getppid(), 0, 0),
    "read from the parent's memory": lambda _: _call("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0),
    "signal the parent": lambda _: os.kill(os.getppid(), 0),
    "signal everybody": lambda _: os.kill(-1, 0),
    "signal through a pipe": lambda _: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()),
    "hold the parent": lambda _: _call("syscall", _PIDFD_OPEN, os.getppid(), 0),
    "limit the parent": lambda _: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE),
    "limit the parent's time": lambda _: resource.prlimit(os.getppid(), resource.RLIMIT_CPU),
    "slow the parent down": lambda _: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    "undo a limit": lambda _: _undo_limit(),
    "executable memory": lambda _: _executable_memory(),
    "memory made executable": lambda _: _memory_made_executable(),
    "nameless file": lambda _: os.memfd_create("loot"),
    "namespace of its own": lambda _: _call("unshare", _CLONE_NEWUSER),
    "ring of calls": lambda _: _call("syscall", _IO_URING_SETUP, 1, 0),
    "other user": lambda _: os.setuid(os.getuid()),
    "type at the terminal": lambda _: fcntl.ioctl(1, 0x5412, b"x"),
}


@contextmanager
def taken_over(target: DatabaseTarget, limits: Limits) -> Iterator[Sandbox]:
    """A sandbox whose worker, as long as it lives, is asked by `outcome`."""
    box = Sandbox(target, limits)
    with patch.object(sandbox, "_START", _START):
        box.__enter__()
    try:
        yield box
    finally:
        box.close()


def outcome(box: Sandbox, attack: str, argument: object = "") -> object:
    """DONE, or the name of the error that the kernel gave."""
    ((value,),) = box.run(f"{attack} | {argument}").rows
    return value


class _Taken:
    """Runs attacks, one of them as soon as there is a session, before the database is opened."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._at_opening = self.run("read | /etc/passwd")
        super().__init__(*arguments, **named)

    def run(self, text: str) -> Rows:
        if text == f"{AT_OPENING} | ":
            return self._at_opening
        name, _, argument = text.partition(" | ")
        try:
            (WITH_A_FILE | WITHOUT_A_FILE)[name](argument)
        except OSError as error:
            return Rows(("outcome",), ((errno.errorcode[error.errno or 0],),))
        return Rows(("outcome",), ((DONE,),))


def main() -> None:
    """As the worker's."""
    for module, name in ((sqlite_session, "SqliteSession"), (postgresql_session, "PostgresqlSession")):
        base = getattr(module, name)
        setattr(module, name, type("Taken", (_Taken, base), {}))
    worker.main()
