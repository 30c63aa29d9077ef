"""What goes between a simulation and its worker processes: calls one way, what comes of them the other.

One call is under way at a time. Within it the simulation says at most Stop, and the worker whatever it has to tell,
then Done or Raised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from lorica_security.identifiers import SiloName
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.settings import Settings
from silo_wire.canonical import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSilo:
    """What a worker needs of a silo: where its data are, what it allows, a folder for a database that has to be
    unpacked, a file for its losses."""

    settings: Settings
    policy: SiloPolicy
    scratch: Path
    losses: Path

    def on(self, device: str) -> Self:
        """The same silo, trained on `device`."""
        training = self.settings.training.model_copy(update={"device": device})
        return replace(self, settings=self.settings.model_copy(update={"training": training}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A verb of TrainerPort at `silo`. `bundle` is a plan bundle's bytes, None for the one that was prepared last, of
    digest `plan`."""

    silo: SiloName
    verb: Literal["prepare", "train", "evaluate"]
    plan: Digest
    bundle: bytes | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """The call that is under way is to end; of no account once it has."""


@dataclass(frozen=True, slots=True)
class Progressed:
    fraction: float


@dataclass(frozen=True, slots=True)
class Noticed:
    event: str
    detail: str


@dataclass(frozen=True, slots=True)
class Done:
    result: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """An error in parts: one whose class is made from something else than its text could not be put together again
    otherwise."""

    kind: type[Exception]
    args: tuple[Any, ...]
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Self:
        return cls(type(error), error.args, dict(vars(error)))

    def error(self) -> Exception:
        error = self.kind.__new__(self.kind)
        error.args = self.args
        vars(error).update(self.fields)
        return error


Told = Progressed | Noticed | Done | Raised
