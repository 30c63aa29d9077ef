"""What a silo must store, send, compute or erase after an event, in this order."""

from dataclasses import dataclass

from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    MaskedInput,
    Reveal,
    SharedKeys,
)
from lorica_security.secure_aggregation.parameters import Parameters
from lorica_security.secure_aggregation.silo.events import Event
from lorica_security.secure_aggregation.silo.memory import SiloMemory


@dataclass(frozen=True, slots=True)
class Remember:
    """Replace what is remembered, durably, before any later effect."""

    memory: SiloMemory


@dataclass(frozen=True, slots=True)
class Journal:
    """Append to the attempt's journal, durably, before any later effect; OpenAttempt holds the root (mode 0600)."""

    event: Event


@dataclass(frozen=True, slots=True)
class Send:
    """Give this message to the coordinator."""

    message: Advertisement | SharedKeys | Complaint | MaskedInput | Agreement | Reveal


@dataclass(frozen=True, slots=True)
class ShareKeys:
    """Have `shared_keys` make what this silo deals, with fresh encapsulations: gives SharedKeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskVector:
    """Encode the delta with `rounding`, add noise of `noise` where the plan wants it, add `masks`, write to disk: gives
    VectorMasked.

    `parameters` are the roster's. Erase all three when done.
    """

    parameters: Parameters
    rounding: KeyStream
    noise: Secret
    masks: MaskSum

    @property
    def fixed_point(self) -> FixedPoint:
        return self.parameters.fixed_point

    def erase(self) -> None:
        self.rounding.erase()
        self.noise.erase()
        self.masks.erase()


@dataclass(frozen=True, slots=True, kw_only=True)
class Erase:
    """Erase `root` in memory, and the attempt's journal, root and masked vector on disk."""

    attempt: Attempt
    root: Secret


Effect = Remember | Journal | Send | ShareKeys | MaskVector | Erase
