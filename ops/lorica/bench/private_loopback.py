"""A network namespace of the benchmark's own, so that nobody else's traffic is counted."""

import ctypes
import fcntl
import socket
import struct

_CLONE_NEWNET = 0x40000000  # unshare(2)
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # netdevice(7)
_IFF_UP = 0x1


def enter() -> bool:
    """Move this thread, and the threads and processes that it starts from now on, to a namespace with loopback alone.

    Call it from the main thread before it starts others, and after everything that needs the network. Without the
    right to do so (root has it) everything stays where it is, and the answer is False.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xH", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    return True
