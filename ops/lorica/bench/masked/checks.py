"""What it costs a silo to check the model of a masked round, by the silo's own checks over the coordinator's own files.

Messages arrive at once, so transport is not in it: whole rounds have that. What the coordinator does to show a chunk is
measured apart. The other silos of a joint check have signed what they are to check.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica.bench.masked.costs import Cost, measured
from lorica.secure_aggregation.in_memory import FEDERATION, PLAN, ROUND, AttemptInMemory
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.model_evidence.evidence import (
    Evidence,
    Lineage,
    SignedEvidence,
    signed_evidence,
)
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict, checkers, part_of, signed_verdict
from lorica_security.secure_aggregation.silo.party import Demands
from silo_agent.service.model_checks import CheckedPlan, CheckParty, Mode, ModelChecks
from silo_wire.canonical import Digest
from silo_wire.checkable_round import CheckableRound
from silo_wire.checked_chunk import StepRule
from silo_wire.codecs.evidence_codec import checkable_from_bytes
from silo_wire.manifest import Manifest
from silo_wire.messages import HeldPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """Of one silo. `shown` is the coordinator's CPU time for it, in seconds; `fetched_bytes` is evidence and pieces."""

    silo: Cost
    shown_cpu_s: float
    chunks: int
    fetched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A masked round whose model is `model`, made of `base`, and where its evidence is kept."""

    rule: StepRule
    models: ModelStore
    base: Digest
    model: Digest
    evidence: RoundEvidence
    attempt: AttemptInMemory
    vectors: Mapping[SiloName, StoredVector]

    @property
    def lineage(self) -> Lineage:
        """Of a silo that has accepted nothing but the plan's own model."""
        master = self.models.master(self.base, self.models.state(self.base)).manifest
        return Lineage.of_plan(
            federation=FEDERATION,
            plan=bytes.fromhex(PLAN),
            master=bytes.fromhex(master.digest),
            model=bytes.fromhex(self.models.manifest(self.base).digest),
        )


class Coordinator:
    """The key that signs evidence."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()

    def sign(self, evidence: Evidence) -> SignedEvidence:
        return signed_evidence(evidence, self.key)


def checked_by(silo: SiloName, shown: Shown, coordinator: Coordinator, mode: Mode) -> ModelCheck:
    """`silo` checks the model, "spot" or "joint"; raises what a silo does of a model that is not its sum's."""
    keys = shown.attempt.keys
    known = {name: key.public_key() for name, key in keys.items()}
    party = CheckParty(
        silo=silo,
        identity_key=keys[silo],
        keys={name: (key,) for name, key in known.items()},
        by_hand=[name for name in known if name != silo],
        demands=Demands(),
        coordinator=coordinator.key.public_key(),
    )
    port = _Port(shown)
    checks = ModelChecks(
        mode,
        coordinator=port,
        accepted=_Fresh(),
        own=_Own(shown.vectors[silo], shown.models.vector(shown.base)),
        party=lambda: party,
        keep=lambda proof: None,
        checked=port.count,
    )
    _, cost = measured(lambda: asyncio.run(checks.led_to(shown.model, of=_plan(shown.rule), lineage=shown.lineage)))
    return ModelCheck(
        silo=Cost(cpu_s=cost.cpu_s - port.cpu_s, wall_s=cost.wall_s, peak_bytes=cost.peak_bytes),
        shown_cpu_s=port.cpu_s,
        chunks=port.chunks,
        fetched_bytes=port.fetched,
    )


def _plan(rule: StepRule) -> CheckedPlan:
    return CheckedPlan(digest=Digest(PLAN), rule=rule, rounds=ROUND, colluders=0, promises=lambda _offered: None)


@dataclass
class _Port:
    """The coordinator, in this process; what it does for the silo is counted in `cpu_s`."""

    shown: Shown
    cpu_s: float = 0.0
    fetched: int = 0
    chunks: int = 0
    _checkable: list[CheckableRound] = field(default_factory=list)

    def count(self, chunks: int) -> None:
        self.chunks += chunks

    async def fetch_evidence(self, plan: Digest, model: Digest) -> CheckableRound:
        with self._coordinators():
            content = self.shown.evidence.read(model)
        self.fetched += len(content)
        self._checkable.append(checkable_from_bytes(content, FEDERATION))
        return self._checkable[-1]

    async def fetch_pieces(
        self, plan: Digest, model: Digest, chunk: int, held: HeldPieces, most: int
    ) -> Sequence[bytes]:
        with self._coordinators():
            pieces = self.shown.evidence.pieces(model, chunk, held)
        self.fetched += sum(map(len, pieces))
        return pieces

    async def fetch_verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        return ()  # it has missed no round

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        with self._coordinators():
            others = [self._verdict(name, verdict.evidence) for name in self.shown.attempt.keys if name != verdict.silo]
        return (*others, verdict), known + 1

    def _verdict(self, name: SiloName, evidence: bytes) -> Verdict:
        (checkable,) = self._checkable
        survivors = checkable.evidence.survivors.silos
        part = part_of(name, survivors, checkable.masked[name].chunks, each=checkers(Demands().colluders))
        return signed_verdict(evidence, name, part, self.shown.attempt.keys[name])

    @contextmanager
    def _coordinators(self) -> Iterator[None]:
        before = time.process_time()
        yield
        self.cpu_s += time.process_time() - before


@dataclass(frozen=True)
class _Own:
    """What the silo has of the round: what it masked, and the model that it trained from."""

    masked: StoredVector
    before: StoredVector

    def vector(self, manifest: Manifest, chunk: int) -> bytes | None:
        return self.masked.chunk(chunk)

    def model(self, manifest: Manifest, chunk: int) -> bytes | None:
        return self.before.chunk(chunk)


class _Fresh:
    """Where a silo keeps what it accepted: this one has accepted nothing yet."""

    def lineage(self, bundle: object) -> Lineage:
        raise AssertionError("it is given")

    def save(self, lineage: Lineage) -> None:
        raise AssertionError("it is returned")

    def bind(self, evidence: Evidence) -> None:
        pass

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        return draw()

    def found(self, evidence: bytes, chunks: Collection[int]) -> Collection[int]:
        return chunks
