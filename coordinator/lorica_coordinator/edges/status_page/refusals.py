"""What was refused of late, for people who look: kinds, calls and names from closed sets, nobody's own words."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lorica_coordinator.edges.server.gate import Refusal

KEPT: Final = 20
STRANGER: Final = "a stranger"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRefusal:
    """`kind`: class of the error; `last` in Unix seconds; `who`: an identity that a certificate proved, or STRANGER."""

    kind: str
    call: str
    who: str
    times: int
    last: float


class RecentRefusals:
    """The KEPT that came last, equal ones counted: a flood of one kind does not push the others out. Since the
    start."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str, str], SeenRefusal] = OrderedDict()

    def add(self, refusal: Refusal) -> None:
        call = refusal.method.rpartition("/")[2]
        who = "/".join(refusal.peer.split("/")[3:]) if refusal.peer.startswith("spiffe://") else STRANGER
        key = (refusal.kind, call, who)
        before = self._seen.pop(key, None)
        times = 1 if before is None else before.times + 1
        self._seen[key] = SeenRefusal(kind=refusal.kind, call=call, who=who, times=times, last=self._clock())
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)

    def newest_first(self) -> tuple[SeenRefusal, ...]:
        return tuple(reversed(self._seen.values()))
