"""Ports for the processes of a federation on this host, chosen before those start."""

import secrets
import socket
from itertools import count, islice

from lorica_security.errors import StateError

# Below the ports that Linux gives to outgoing connections (32768 and up): one of those might take a port before its
# process listens there, or while that process is started again. Below 12000 are well-known servers, and ports that
# browsers refuse.
FIRST, END = 12_000, 32_768

_turns = count(secrets.randbelow(END - FIRST))


def free_ports(wanted: int) -> list[int]:
    """Loopback ports that nothing listens on; the same one is not given twice until all were.

    Each process goes on from a random start of its own: two that choose at the same time hardly ever get the same.
    Raises StateError where there are not so many.
    """
    candidates = (FIRST + turn % (END - FIRST) for turn in islice(_turns, END - FIRST))
    ports = list(islice(filter(_is_free, candidates), wanted))
    if len(ports) < wanted:
        raise StateError(
            f"fewer than {wanted} ports of {FIRST} to {END - 1} are free on 127.0.0.1; end what holds them"
        )
    return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
