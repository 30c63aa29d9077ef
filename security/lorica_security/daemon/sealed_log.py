"""A daemon's audit log while it runs: its start and its stop stand in it, what was added is sealed soon, and all of it
at the end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from lorica_security.audit.entry import Event
from lorica_security.audit.verification import SEAL_WITHIN_S
from lorica_security.errors import LoricaError
from lorica_security.on_disk.log_file import AuditLog


class Counting(Protocol):
    """Who holds counts of what came in floods."""

    def tell_counts(self, *, stopping: bool = False) -> None: ...


@asynccontextmanager
async def kept_log(log: AuditLog, counting: Counting, on_trouble: Callable[[Exception], None]) -> AsyncIterator[None]:
    """Raises StorageError or IntegrityError at once for a log that cannot be added to; later `on_trouble` hears of it.

    Whoever adds an entry then gets the error, too: nothing goes on that the log cannot tell of.
    """

    def settle() -> None:
        counting.tell_counts()
        log.seal_if_due()

    async def keep_sealed() -> None:
        while True:
            await asyncio.sleep(SEAL_WITHIN_S / 2)
            try:
                await asyncio.to_thread(settle)
            except Exception as error:  # noqa: BLE001  # a defect, too, is told and ends no sealing
                on_trouble(error)

    log.append(Event.STARTED)
    sealing = asyncio.create_task(keep_sealed())
    try:
        yield
    finally:
        sealing.cancel()
        await asyncio.gather(sealing, return_exceptions=True)
        try:
            counting.tell_counts(stopping=True)
            log.append(Event.STOPPED)
            log.seal()
        except LoricaError as error:
            on_trouble(error)
