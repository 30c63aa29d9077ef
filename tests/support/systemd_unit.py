"""What a unit's sandbox lets a process call, put on a process without systemd: system calls, address families, memory.

systemd-analyze expands the unit's sets and libseccomp loads the filter, as systemd itself would.
"""

import ctypes.util
import errno
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CAN = shutil.which("systemd-analyze") is not None and ctypes.util.find_library("seccomp") is not None
WHY_NOT = "needs systemd-analyze (Debian: systemd) and libseccomp (libseccomp2)"

_ENTER = """
import ctypes, json, os, sys
given = json.loads(sys.argv[1])
library, call = ctypes.CDLL("libseccomp.so.2"), ctypes.CDLL(None).prctl
class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]
library.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(library.seccomp_init(0x00050000 | given["errno"]))
for name in given["calls"]:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number >= 0 and name != "socket":
        assert library.seccomp_rule_add_array(context, 0x7FFF0000, number, 0, None) == 0, name
for family in given["families"]:
    compare = Compare(0, 4, family, 0)
    number = library.seccomp_syscall_resolve_name(b"socket")
    assert library.seccomp_rule_add_array(context, 0x7FFF0000, number, 1, ctypes.byref(compare)) == 0
assert library.seccomp_load(context) == 0
assert not given["no_exec_gain"] or call(65, 1, 0, 0, 0) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""


def settings(name: str) -> dict[str, list[str]]:
    """Every assignment of ops/systemd/NAME.service, in order."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "ops" / "systemd" / f"{name}.service").read_text(encoding="utf-8").splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith(("#", "[")):
            found.setdefault(key, []).append(value)
    return found


@cache
def expanded(*names: str) -> frozenset[str]:
    """System calls by name, sets (@...) opened all the way down."""
    calls: set[str] = set()
    for name in names:
        if not name.startswith("@"):
            calls.add(name)
            continue
        listed = subprocess.run(["systemd-analyze", "syscall-filter", name], check=True, capture_output=True, text=True)
        lines = [line.strip() for line in listed.stdout.splitlines()[1:]]
        calls |= expanded(*(line for line in lines if line and not line.startswith("#")))
    return frozenset(calls)


def allowed_calls(lines: Sequence[str]) -> set[str]:
    """As systemd.exec(5) reads SystemCallFilter=: the first line allows, one with ~ takes away, another adds."""
    assert not lines[0].startswith("~")
    calls = set(expanded("@default"))
    for line in lines:
        change = expanded(*line.removeprefix("~").split())
        calls = calls - change if line.startswith("~") else calls | change
    return calls


def sandboxed(words: Sequence[str], *, unit: str) -> list[str]:
    """`words` with the unit's filter over them; the first is a path."""
    said = settings(unit)
    given = {
        "calls": sorted(allowed_calls(said["SystemCallFilter"])),
        "errno": getattr(errno, said["SystemCallErrorNumber"][-1]),
        "families": [getattr(socket, family).value for family in said["RestrictAddressFamilies"][-1].split()],
        "no_exec_gain": said.get("MemoryDenyWriteExecute") == ["yes"],
    }
    return [sys.executable, "-I", "-c", _ENTER, json.dumps(given), *words]
