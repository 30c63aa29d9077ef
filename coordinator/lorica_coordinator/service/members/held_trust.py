"""What everybody who has a certificate of ours certainly holds: what was sent counts once a call with its certificate
was let in.

An answer may get lost, or its receiver be killed before it has kept what came. Who went by what was sent would go over
to an authority that the receiver does not know, and could never send it again.
"""

from collections.abc import Callable, Mapping

from lorica_coordinator.service.ports import RoundStore
from lorica_coordinator.service.records import HeldTrust
from lorica_coordinator.service.threads import Threads
from lorica_security.identifiers import Identity


class HeldTrusts:
    """`on_arrived` are told, at the gate, that something sent was used for the first time; `known` then stores it."""

    def __init__(self, *, store: RoundStore, threads: Threads) -> None:
        self._store = store
        self._threads = threads
        self._sent: dict[Identity, str] = {}
        self._arrived: dict[Identity, str] = {}
        self.on_arrived: list[Callable[[], None]] = []

    async def load(self) -> None:
        """Take up what was on its way when the coordinator ended."""
        found = await self._threads.store(self._store.held_trust)
        self._sent = {identity: held.sent for identity, held in found.items() if held.sent}

    def sent(self, identity: Identity, serial: str) -> None:
        """A certificate of this serial is on its way, and stored as sent. The last one counts."""
        self._sent[identity] = serial

    def admitted(self, identity: Identity, serial: str) -> None:
        """A call with this certificate was let in."""
        if self._sent.get(identity) == serial:
            self._arrived[identity] = self._sent.pop(identity)
            for told in self.on_arrived:
                told()

    async def known(self) -> Mapping[Identity, HeldTrust]:
        """By the store, with what has arrived; raises StorageError, and then it is stored with the next call."""
        for identity, serial in tuple(self._arrived.items()):
            await self._threads.store(self._store.has_arrived, identity, serial)
            if self._arrived.get(identity) == serial:
                del self._arrived[identity]
        return await self._threads.store(self._store.held_trust)
