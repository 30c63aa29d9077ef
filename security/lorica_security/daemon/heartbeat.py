"""A sign of life that costs nothing to look at: a file that the event loop touches, and systemd's watchdog where
systemd asks for it.

A loop that hangs touches nothing, also where threads beside it still answer. Whoever looks (a container's health check)
asks the file's age alone: no command is started, no port and no key is needed.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from lorica_security.daemon.beside import beside

BEAT_S: Final = 10.0
"""The health checks of ops/ take a file of a minute for stale (`find -mmin -1`)."""


@asynccontextmanager
async def beating(file: Path) -> AsyncIterator[None]:
    """`file`, which is there, is touched every BEAT_S while inside, and a service manager is told: ready, alive,
    stopping."""
    tell_systemd("READY=1")
    try:
        async with beside(_beat(file)):
            yield
    finally:
        tell_systemd("STOPPING=1")


async def _beat(file: Path) -> None:
    while True:
        is_alive(file)
        await asyncio.sleep(BEAT_S)


def is_alive(file: Path) -> None:
    """One such sign, for whoever has no event loop yet: `file` is touched and systemd is told."""
    with suppress(OSError):  # a file that grows old says so itself
        os.utime(file)
    tell_systemd("WATCHDOG=1")


def tell_systemd(word: str) -> None:
    """sd_notify(3): one datagram to the socket that systemd names; nothing where it names none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:  # its watchdog notices silence
        to.sendto(word.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
