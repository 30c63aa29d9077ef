"""What parent and worker say to each other: JSON behind a four-byte big-endian length, over pipes.

JSON and not pickle, because the worker runs hostile SQL: nothing that it sends may be able to make an object here.
"""

import json
import math
import os
import select
import struct
import time
from collections.abc import Mapping

_HEADER = struct.Struct(">I")


class FrameTimeout(Exception):
    """The other side said nothing, or not enough, before the deadline."""


class FrameEnd(Exception):
    """The other side closed the pipe, or sent what is not a frame."""


def write_frame(fd: int, message: Mapping[str, object], *, deadline: float | None = None) -> None:
    """Send `message`; a `deadline` (time.monotonic) needs a non-blocking `fd`. Raises FrameTimeout, FrameEnd."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii")
    rest = memoryview(_HEADER.pack(len(body)) + body)
    while rest:
        if deadline is not None:
            _wait(fd, select.POLLOUT, deadline)
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            continue
        except BrokenPipeError as error:
            raise FrameEnd("pipe closed") from error


def read_frame(fd: int, *, most: int, deadline: float | None = None) -> dict[str, object]:
    """The next message of at most `most` bytes. Raises FrameTimeout, FrameEnd."""
    (length,) = _HEADER.unpack(_read_exactly(fd, _HEADER.size, deadline))
    if length > most:
        raise FrameEnd(f"frame of {length} bytes, {most} allowed")
    try:
        message = json.loads(_read_exactly(fd, length, deadline), parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise FrameEnd("frame is not JSON") from error
    if not isinstance(message, dict):
        raise FrameEnd("frame is not a JSON object")
    return message


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):  # as 1e999 is
        raise ValueError(f"{digits} is beyond a float")
    return number


def _read_exactly(fd: int, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if deadline is not None:
            _wait(fd, select.POLLIN, deadline)
        part = os.read(fd, min(count - len(parts), 2**20))
        if not part:
            raise FrameEnd("pipe closed")
        parts += part
    return bytes(parts)


def _wait(fd: int, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, events)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(max(1, left * 1000)):
        raise FrameTimeout("no answer before the deadline")
