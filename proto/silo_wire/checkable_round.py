"""A masked round as others can check it: evidence with its manifests, the pieces of a chunk, the proof of a false
one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lorica_security.errors import FalseModel, MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.model_evidence.evidence import (
    Evidence,
    ModelState,
    SignedEvidence,
)
from silo_wire.manifest import Manifest


class FalseChunk(FalseModel):
    """Chunk `chunk` of `part` is not what the sum and the step make: the coordinator's evidence is false."""

    def __init__(self, evidence: Evidence, chunk: int, part: str, detail: str) -> None:
        super().__init__(
            f"chunk {chunk} of the {part} of {evidence.attempt} is not what its sum makes ({detail}): the "
            "coordinator handed out a false model; keep the proof, and stop the federation until its operator has "
            "explained it"
        )
        self.evidence, self.chunk, self.part = evidence, chunk, part


@dataclass(frozen=True, kw_only=True)
class StateManifests:
    """The manifests that a ModelState names."""

    model: Manifest
    master: Manifest
    slots: Mapping[str, Manifest]

    def state(self, steps: int) -> ModelState:
        """What they are the manifests of."""
        return ModelState(
            steps=steps,
            model=bytes.fromhex(self.model.digest),
            master=bytes.fromhex(self.master.digest),
            slots=tuple((name, bytes.fromhex(self.slots[name].digest)) for name in sorted(self.slots)),
        )


@dataclass(frozen=True, kw_only=True)
class CheckableRound:
    """Evidence, and the manifests of all that it names."""

    signed: SignedEvidence
    masked: Mapping[SiloName, Manifest]
    before: StateManifests
    after: StateManifests

    @property
    def evidence(self) -> Evidence:
        return self.signed.evidence


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What one chunk is checked with. `model` is of the model handed out after the step; None where that is the master.

    `master` and `slots` are empty where `chunk` has words of the tail alone.
    """

    masked: Mapping[SiloName, bytes]
    master: bytes
    slots: Mapping[str, bytes]
    model: bytes | None = None

    @property
    def in_order(self) -> tuple[bytes, ...]:
        """As they travel: masked by silo, master, slots by name, model."""
        masked = (self.masked[silo] for silo in sorted(self.masked))
        slots = (self.slots[name] for name in sorted(self.slots))
        return (*masked, self.master, *slots, *(() if self.model is None else (self.model,)))

    @staticmethod
    def most(checkable: CheckableRound) -> int:
        """So many pieces at most are of one chunk."""
        return len(checkable.masked) + 1 + len(checkable.before.slots) + 1

    @classmethod
    def of(
        cls,
        checkable: CheckableRound,
        in_order: Sequence[bytes],
        *,
        vector: tuple[SiloName, bytes] | None = None,
        master: bytes | None = None,
    ) -> "Pieces":
        """What `in_order` gave, with what came empty since it is held: `vector` of a silo, `master`.

        Raises MalformedMessage for another number of pieces than this round has.
        """
        silos, names = sorted(checkable.masked), sorted(checkable.before.slots)
        least = len(silos) + 1 + len(names)
        if not least <= len(in_order) <= least + 1:
            raise MalformedMessage(
                f"{len(in_order)} pieces came of a chunk of {checkable.evidence.attempt}: it has {least}"
            )
        own = {} if vector is None else dict([vector])
        return cls(
            masked={**dict(zip(silos, in_order, strict=False)), **own},
            master=in_order[len(silos)] if master is None else master,
            slots=dict(zip(names, in_order[len(silos) + 1 :], strict=False)),
            model=in_order[least] if len(in_order) > least else None,
        )


@dataclass(frozen=True, kw_only=True)
class Proof:
    """That chunk `chunk` of signed evidence is false: whoever has the plan and the keys can see for itself
    (`examined`)."""

    checkable: CheckableRound
    chunk: int
    pieces: Pieces
