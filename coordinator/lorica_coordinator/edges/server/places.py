"""Places for transfers, so that the memory they need does not grow with the number of silos.

A transfer on the move costs the coordinator some 10 MB: messages that gRPC assembles or encrypts, the window before
them, chunks on their way to the disk. More of them at once than the machine can work at are no faster, so each takes a
place first. One that waits for its peer needs next to nothing: it gives its place up, and silos on slow lines transfer
side by side.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar

T = TypeVar("T")

TIDY_BYTES: Final = 32 << 20
"""So much may have been transferred before memory is tidied: of small models that is once in many rounds."""

PLACES: Final = max(2, os.cpu_count() or 1)
PATIENCE_S: Final = 0.02
"""A peer that takes longer for each chunk of 1 MiB is slower than 400 Mbit/s."""
MOST_PATIENCE_S: Final = 0.2
"""For once, with a peer that was quick before: its machine may be busy."""
TURN_S: Final = 10.0
"""After which a transfer lets those in that wait, and queues again behind them."""


class Places:
    """Used from one event loop alone. First come, first served."""

    def __init__(
        self,
        number: int = PLACES,
        *,
        tidy: Callable[[], None] = lambda: None,
        patience_s: float = PATIENCE_S,
        most_patience_s: float = MOST_PATIENCE_S,
        turn_s: float = TURN_S,
    ) -> None:
        """`tidy` is called at the end of a transfer, where TIDY_BYTES were transferred since the last time."""
        self._free = asyncio.Semaphore(number)
        self.under_way = 0
        """Transfers that have begun and not ended; some of them may wait for a place."""
        self._tidy = tidy
        self._untidy_bytes = 0
        self._patience_s = patience_s
        self._most_patience_s = most_patience_s
        self._turn_s = turn_s

    @asynccontextmanager
    async def place(self) -> "AsyncIterator[Place]":
        """Around the chunks of a transfer: waits until there is a place for it."""
        place = Place(
            self._free, patience_s=self._patience_s, most_patience_s=self._most_patience_s, turn_s=self._turn_s
        )
        self.under_way += 1
        try:
            await place.keep()
            yield place
        finally:
            self.under_way -= 1
            place.give_up()
            self._untidy_bytes += place.moved_bytes
            if self._untidy_bytes >= TIDY_BYTES:
                self._untidy_bytes = 0
                self._tidy()


class Place:
    """One transfer's, made by `Places`."""

    def __init__(self, free: asyncio.Semaphore, *, patience_s: float, most_patience_s: float, turn_s: float) -> None:
        self._free = free
        self._least_patience_s = patience_s
        self._most_patience_s = most_patience_s
        self._patience_s = patience_s
        self._turn_s = turn_s
        self.moved_bytes = 0
        """Of chunks, as whoever holds the place adds them up."""
        self._loop = asyncio.get_running_loop()
        self._held = False
        self._until = 0.0

    @contextmanager
    def waiting_for_peer(self) -> Iterator[None]:
        """Around what only the peer can end: the place is given up when that takes long. `keep` it afterwards."""
        began = self._loop.time()
        timer = self._loop.call_later(self._patience_s, self.give_up)
        try:
            yield
        finally:
            timer.cancel()
            left = self._patience_s - (self._loop.time() - began) + self._least_patience_s
            self._patience_s = min(max(left, self._least_patience_s), self._most_patience_s)

    async def next(self, pieces: AsyncIterator[T]) -> T | None:
        """What the peer sends next, once there is a place to work at it; None after its last."""
        with self.waiting_for_peer():
            piece = await anext(pieces, None)
        if piece is not None:
            await self.keep()
        return piece

    async def keep(self) -> None:
        """Before work on a chunk: wait for a place if this transfer has none any more, or had it for its turn."""
        if self._held and self._loop.time() > self._until:
            self.give_up()
        if not self._held:
            await self._free.acquire()
            self._held = True
            self._until = self._loop.time() + self._turn_s

    def give_up(self) -> None:
        if self._held:
            self._held = False
            self._free.release()
