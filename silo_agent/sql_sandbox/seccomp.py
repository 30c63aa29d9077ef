"""A list of system calls that are left to a process (seccomp(2)); every other one fails with EPERM, for good.

By libseccomp, which knows the numbers of every machine. It is part of Debian and its kin, of Fedora and its kin.
"""

import ctypes
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_LIBRARY = "libseccomp.so.2"
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM


class Holds(IntEnum):
    """How an argument is compared, by libseccomp's numbers: it is `value`; none of the bits of `value` is set in it."""

    EQUAL = 4
    NO_BIT_OF = 7


@dataclass(frozen=True, slots=True)
class Argument:
    """What has to be so of argument `position` of a call, from 0, for the call to be allowed."""

    position: int
    holds: Holds
    value: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """A system call, where all of `arguments` are so."""

    call: str
    arguments: tuple[Argument, ...] = ()


class _Compare(ctypes.Structure):
    _fields_ = (
        ("position", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def library() -> ctypes.CDLL | None:
    """libseccomp, where this machine has it."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def give_up_calls(seccomp: ctypes.CDLL, *, but: Iterable[Allowed]) -> None:
    """From here on this thread makes the calls `but` and no others. Raises OSError."""
    seccomp.seccomp_init.restype = ctypes.c_void_p
    if (made := seccomp.seccomp_init(_FAIL)) is None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    filter_ = ctypes.c_void_p(made)
    try:
        for allowed in but:
            # Below zero: this kind of machine, or this release of the library, has no call of that name.
            if (number := seccomp.seccomp_syscall_resolve_name(allowed.call.encode())) >= 0:
                given = (_Compare(one.position, one.holds, one.value, 0) for one in allowed.arguments)
                compared = (_Compare * len(allowed.arguments))(*given)
                _require(seccomp.seccomp_rule_add_array(filter_, _ALLOW, number, len(compared), compared))
        _require(seccomp.seccomp_load(filter_))
    finally:
        seccomp.seccomp_release(filter_)


def _require(result: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
