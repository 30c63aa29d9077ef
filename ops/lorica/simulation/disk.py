"""A simulation does not wait for the disk. A federation has to outlive a power cut, and pays for that with every file
and every transaction.

What is written is there for the process that goes on after a kill, since the kernel has it. After a power cut a
simulation is to be begun anew.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.pool import Pool


@contextmanager
def not_waited_for() -> Iterator[None]:
    """While inside, this whole process takes what it writes for durable once it is written."""
    wait = os.fsync
    os.fsync = _go_on
    event.listen(Pool, "checkout", _relax)
    try:
        yield
    finally:
        event.remove(Pool, "checkout", _relax)
        os.fsync = wait


def _go_on(fd: Any) -> None:
    return


def _relax(connection: Any, record: Any, _proxy: Any) -> None:
    """At the checkout, not at the connection: there the stores themselves ask for more."""
    if not record.info.get(_relax):
        connection.execute("PRAGMA synchronous=OFF")
        record.info[_relax] = True
