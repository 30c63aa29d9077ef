"""Landlock (landlock(7)): a process gives up every file but those that it names, without any privilege, for good.

What a kernel can take away grew with its version of Landlock. All that it knows is taken away. The numbers are those of
linux/landlock.h; the three system calls have the same number on every machine, and the C library has no function for
them.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1
_PR_SET_NO_NEW_PRIVS = 38
_READ_FILE = 1 << 2
_FILES = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Rights over files by the version that brought them: the first thirteen, to move across folders, to cut short, to
control devices."""
_NETWORK_SINCE, _NETWORK = 4, 0b11  # bind and connect of TCP
_SCOPE_SINCE, _SCOPE = 6, 0b11  # abstract sockets, and signals, of processes that are not below this one
_ABSENT = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Not built in; built in and not switched on; kept away by a filter around this process."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Which Landlock this kernel has; 0 for none. Raises OSError where it cannot be told."""
    try:
        return _call("syscall", _CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError as error:
        if error.errno in _ABSENT:
            return 0
        raise


def give_up_files(known: int, *, but: Iterable[Path]) -> None:
    """From here on this thread opens none but the files `but`, for reading; one that is gone is left out. `known` is
    `version()`. Raises OSError."""
    rules = _Ruleset(
        files=sum(rights for since, rights in _FILES.items() if since <= known),
        network=_NETWORK if known >= _NETWORK_SINCE else 0,
        scope=_SCOPE if known >= _SCOPE_SINCE else 0,
    )
    # Kernels refuse fields that they do not know, unless these are zero.
    ruleset = _call("syscall", _CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    try:
        for path in but:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path)
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(allowed=_READ_FILE, parent=file)
        _call("syscall", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(file)


def _call(name: str, first: int, *rest: object) -> int:
    arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in rest]
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(ctypes.c_long(first), *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
