"""Which version of the wire each side speaks, and how far apart they may be.

A major version changes what calls mean; a minor one adds what the other side may leave out. Sides one minor version
apart work together, so that a federation is upgraded one host after the other, in any order. Each side checks: one that
does not know yet that there are minor versions speaks 0 of them, and leaves it to the other.
"""

import re
from dataclasses import dataclass
from typing import Final

from lorica_security.errors import MalformedMessage, StateError
from silo_wire.messages import WIRE_VERSION

MINORS_APART: Final = 1
_RELEASE: Final = re.compile(r"[0-9A-Za-z.+_-]{0,40}")


@dataclass(frozen=True, slots=True, order=True)
class WireVersion:
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OURS: Final = WireVersion(WIRE_VERSION, 0)


@dataclass(frozen=True, slots=True)
class Speaker:
    """The program at one end: its release, "" where it does not say, and the wire that it speaks."""

    release: str
    wire: WireVersion

    @classmethod
    def from_wire(cls, release: str, *, major: int, minor: int) -> "Speaker":
        """Raises MalformedMessage for a release that is no version of anything."""
        if not _RELEASE.fullmatch(release):
            raise MalformedMessage(
                "the release that the other side names is none: digits, letters, '.', '+', '_' and '-', 40 at most"
            )
        return cls(release, WireVersion(major, minor))


def require_compatible(*, agent: WireVersion, coordinator: WireVersion, silo: str) -> None:
    """Raises StateError that names the side to upgrade, and to what, where the two are too far apart."""
    if agent.major == coordinator.major and abs(agent.minor - coordinator.minor) <= MINORS_APART:
        return
    newer = max(agent, coordinator)
    needed = WireVersion(newer.major, max(0, newer.minor - MINORS_APART))
    older = f"the agent of silo {silo}" if agent < coordinator else "the coordinator"
    raise StateError(
        f"the agent of silo {silo} speaks wire version {agent}, the coordinator {coordinator}, and one minor "
        f"version apart is the most: upgrade {older} to a release that speaks {needed} or newer"
    )
