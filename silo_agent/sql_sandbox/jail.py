"""What the worker gives up before it meets anything hostile, so that a flaw in SQLite or libpq is worth nothing.

Two walls of the kernel that need no privilege: Landlock for files, seccomp for everything else (docs: ADR 21). Behind
them are limits on resources. Nothing is given back, and no code can be loaded any more: whatever the worker needs is
loaded before.
"""

import fcntl
import mmap
import os
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from silo_agent.sql_sandbox import landlock, seccomp
from silo_agent.sql_sandbox.results import JailMissing, Limits
from silo_agent.sql_sandbox.seccomp import Allowed, Argument, Holds

_OPEN_FILES = 64

_NO_CODE = (Argument(2, Holds.NO_BIT_OF, mmap.PROT_EXEC),)
_LOCKS_AND_FLAGS = (
    fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_DUPFD_CLOEXEC,
)  # fmt: skip
"""Of fcntl(2). F_SETOWN and F_SETSIG, which signal another process, are not among them."""
_EACH = (
    *map(Allowed, (
        "read", "readv", "write", "writev", "close", "brk", "munmap", "mremap", "madvise", "futex", "getrandom",
        "exit", "exit_group", "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday",
        "time", "sched_yield", "restart_syscall", "getpid", "getppid", "gettid", "getuid", "geteuid", "getgid",
        "getegid", "getrusage", "times", "sysinfo", "uname", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn",
        "sigaltstack", "rseq",
    )),
    Allowed("mmap", _NO_CODE),
    Allowed("mprotect", _NO_CODE),
    # The time that a statement may compute; setrlimit and prlimit of this process alone.
    Allowed("prlimit64", (Argument(0, Holds.EQUAL, 0), Argument(1, Holds.EQUAL, resource.RLIMIT_CPU))),
    *(Allowed("fcntl", (Argument(1, Holds.EQUAL, command),)) for command in _LOCKS_AND_FLAGS),
)  # fmt: skip
"""Memory without code in it, the clock, what is open already; nothing that makes a process, a thread or a socket, or
names another."""
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_READ = (
    # Where there is no Landlock, nothing is emptied or made either: RLIMIT_FSIZE lets files be cut short.
    Allowed("open", (Argument(1, Holds.NO_BIT_OF, _TO_WRITE),)),
    Allowed("openat", (Argument(2, Holds.NO_BIT_OF, _TO_WRITE),)),
    *map(Allowed, (
        "pread64", "lseek", "stat", "fstat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
        "readlink", "readlinkat", "getcwd", "fadvise64",
    )),
)  # fmt: skip
"""To open a file for reading; which one is for Landlock to say. None that changes a name, an owner or a mode, which
Landlock does not cover."""
_TALK = tuple(map(Allowed, (
    "recvfrom", "recvmsg", "sendto", "sendmsg", "poll", "ppoll", "select", "pselect6", "getsockopt", "shutdown",
    "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait", "rt_sigpending", "rt_sigtimedwait",
)))  # fmt: skip
"""Over sockets that are connected already."""


@dataclass(frozen=True, slots=True)
class Walls:
    """Which of the two stand: the version of Landlock, 0 for none, and whether system calls are filtered."""

    landlock: int
    seccomp: bool

    @property
    def standing(self) -> str:
        """What stands, for people."""
        found = [f"files by Landlock (version {self.landlock})"] if self.landlock else []
        return " and ".join(found + ["system calls by seccomp"] * self.seccomp) or "limits on resources alone"

    @property
    def missing(self) -> str:
        """What stands in no worker on this machine, with the remedy; empty if both stand."""
        found = []
        if not self.landlock:
            found.append("no Landlock for files (Linux 5.13 or newer, with landlock among the kernel's lsm=)")
        if not self.seccomp:
            found.append("no filter of system calls (install libseccomp2)")
        return ", ".join(found)


def enter(limits: Limits, *, readable: Iterable[Path], connected: bool = False) -> Walls:
    """Give everything up but to read `readable` and to talk over what is open already, sockets too if `connected`.

    A wall that the kernel lacks is left out, or raises JailMissing if `limits.require_jail`. One that it has and that
    does not stand raises it whatever was required.
    """
    known, library = landlock.version(), seccomp.library()
    walls = Walls(known, library is not None)
    if walls.missing and limits.require_jail:
        raise JailMissing(
            f"SQL sandbox did not start: this machine has {walls.missing}; mend that, or set [sql] require_jail = false"
        )
    _take_resources_away(limits)
    try:
        if known:
            landlock.give_up_files(known, but=readable)
        if library is not None:
            seccomp.give_up_calls(library, but=(*_EACH, *(_TALK if connected else _READ)))
    except OSError as error:
        raise JailMissing(
            f"SQL sandbox did not start: a wall of its jail does not stand ({error.strerror}); see what confines "
            "this process"
        ) from error
    return walls


def prove() -> Walls:
    """Enter with nothing readable and try what each wall is for; a wall counts if what went before is denied
    afterwards."""
    if _denied(_open) or _denied(_pair):
        raise JailMissing("the jail of SQL cannot be tried: this process opens no file or no socket as it is")
    walls = enter(Limits(), readable=())
    calls = _denied(_pair) and _denied(_fork) and _denied(lambda: os.kill(os.getppid(), 0))
    return Walls(walls.landlock if _denied(_open) else 0, walls.seccomp and calls)


def _denied(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


def _open() -> None:
    os.close(os.open(__file__, os.O_RDONLY))


def _pair() -> None:
    for one in socket.socketpair():
        one.close()


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _take_resources_away(limits: Limits) -> None:
    """No file may grow, no core be dumped, no process or thread be made; memory is what is mapped now plus the
    limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
