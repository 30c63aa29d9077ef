"""Which agents are connected, one seat per silo. Volatile: a restart empties it.

A second live agent with the same identity is refused. The same agent that comes back, over a new connection or
restarted in the same folder, takes its old seat over, since its old stream may be dead without the coordinator knowing.
"""

import asyncio
from dataclasses import dataclass, field

from lorica_security.errors import Conflict
from lorica_security.identifiers import SiloName
from silo_wire.messages import AgentPhase

_FOLDER_BYTES = 8


def succeeds(instance: bytes, held: bytes) -> bool:
    """Whether `instance` is the agent that `held` is, or a later start in its folder (AttendRequest.agent_instance)."""
    return instance[:_FOLDER_BYTES] == held[:_FOLDER_BYTES] and instance >= held


@dataclass(eq=False)
class Seat:
    """A connected agent; `wake` is set when its order may have changed or the seat was taken over.

    `restarted`: it took the seat of an earlier start, whose readiness is not its own.
    """

    silo: SiloName
    instance: bytes
    restarted: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    taken_over: bool = False
    unready_reason: str = ""
    phase: AgentPhase | None = None
    fraction: float = 0.0


class Attendance:
    def __init__(self) -> None:
        self._seats: dict[SiloName, Seat] = {}

    def take(self, silo: SiloName, instance: bytes) -> Seat:
        """A seat for this agent; raises Conflict while another agent of the silo holds it."""
        held = self._seats.get(silo)
        if held is not None:
            if not succeeds(instance, held.instance):
                raise Conflict(
                    f"silo {silo} already has a connected agent: stop the other one, or wait until its connection "
                    "is gone"
                )
            held.taken_over = True
            held.wake.set()
        seat = Seat(silo, instance, restarted=held is not None and held.instance != instance)
        self._seats[silo] = seat
        return seat

    def leave(self, seat: Seat) -> bool:
        """Give the seat up; whether the silo is gone by that, not merely connected anew."""
        if self._seats.get(seat.silo) is not seat:
            return False
        del self._seats[seat.silo]
        return True

    def seat(self, silo: SiloName) -> Seat | None:
        return self._seats.get(silo)

    @property
    def connected(self) -> frozenset[SiloName]:
        return frozenset(self._seats)

    def wake_all(self) -> None:
        for seat in self._seats.values():
            seat.wake.set()
