"""Whether a round model is what the last masked sum made: asked before this silo trains from it (security.secure_aggregation.evidence).

"spot": some chunks of the newest round, by this silo's own choice. It finds a model that is wrong in many places.
"joint": all chunks, divided among silos that this one's people pinned (verdicts.py); what others leave out it checks itself.

In both the sum of weights is always among what is checked. Of rounds that this silo missed the evidence is replayed and no chunk is
checked: those that trained from their models did. Memory is one chunk of each vector.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from security.errors import IntegrityError, LoricaError, PolicyRefusal, StateError
from security.identifiers import SiloName
from security.secure_aggregation import mask_stream
from security.secure_aggregation.evidence import VERIFY, Evidence, Lineage, opened, refused
from security.secure_aggregation.messages import Advertisement, Identities, check_signed
from security.secure_aggregation.silo_machine import Demands
from security.secure_aggregation.verdicts import Verdict, beyond_others, checkers, part_of, signed_verdict, uncovered
from silo_wire.canonical import Digest
from silo_wire.checked_chunk import CheckableRound, CheckedRound, FalseChunk, Pieces, Proof, StepRule
from silo_wire.manifest import Manifest
from silo_wire.messages import HeldPieces
from silo_wire.plan import PlanBundle

Mode = Literal["joint", "spot", "off"]
SPOT_CHUNKS: Final = 1
"""Beside those with the sum of weights: with eight silos a chunk is 12 MiB."""
VERDICTS_S: Final = 60.0
"""So long this silo waits for what others find, then it checks itself what is left."""
_ASK = "nothing was changed; ask the operator why"

Keep = Callable[[Proof], None]


class EvidencePort(Protocol):
    """The coordinator. Raises what it says."""

    async def fetch_evidence(self, plan: Digest, model: Digest) -> CheckableRound: ...

    async def fetch_pieces(self, plan: Digest, model: Digest, chunk: int, held: HeldPieces) -> Sequence[bytes]:
        """Those that are `held` may come empty."""

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        """All verdicts on the model, this silo's own among them, once they are others than `known` stands for."""


class OwnCopies(Protocol):
    """What this silo still has of the round: each chunk is as its manifest says, or None."""

    def vector(self, manifest: Manifest, chunk: int) -> bytes | None:
        """Of the vector that it masked last."""

    def model(self, manifest: Manifest, chunk: int) -> bytes | None:
        """Of a round model that it was handed."""


class AcceptedPort(Protocol):
    """What this silo accepted before. Each call is durable when it returns."""

    def lineage(self, bundle: PlanBundle) -> Lineage: ...

    def save(self, lineage: Lineage) -> None: ...

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        """What was drawn for this evidence: once, and never again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckParty:
    """This silo and whom it knows. `keys`: of each silo, its own among them, the key that is pinned, and the one before it.

    `by_hand`: those whose keys people compared.
    """

    silo: SiloName
    identity_key: Ed25519PrivateKey
    keys: Mapping[SiloName, Sequence[Ed25519PublicKey]]
    by_hand: Identities
    demands: Demands
    coordinator: Ed25519PublicKey

    @property
    def checkers(self) -> int:
        return checkers(self.demands.colluders)


def identities_in(evidence: Evidence, keys: Mapping[SiloName, Sequence[Ed25519PublicKey]]) -> Identities:
    """The key of each silo that the evidence was signed with: it may have named a successor since. `keys` as CheckParty has them."""
    found = {silo: of_silo[0] for silo, of_silo in keys.items()}
    for event in evidence.journal:
        if isinstance(event, Advertisement):
            for key in keys.get(event.silo, ()):
                if _signed(event, key):
                    found[event.silo] = key
                    break
    return found


def _signed(event: Advertisement, key: Ed25519PublicKey) -> bool:
    try:
        check_signed(event, {event.silo: key})
    except LoricaError:
        return False
    return True


class ModelChecks:
    """`keep` keeps a proof, durably, before the coordinator hears that its model is refused; `checked` is told of chunks."""

    def __init__(
        self,
        mode: Mode,
        *,
        coordinator: EvidencePort,
        accepted: AcceptedPort,
        own: OwnCopies,
        party: Callable[[], CheckParty],
        keep: Keep,
        checked: Callable[[int], None] = lambda chunks: None,
        patience_s: float = VERDICTS_S,
    ) -> None:
        self._mode = mode
        self._coordinator = coordinator
        self._accepted = accepted
        self._own = own
        self._party = party
        self._keep = keep
        self._checked = checked
        self._patience_s = patience_s

    async def require(self, bundle: PlanBundle, model: Digest) -> None:
        """Return once `model` is one that this silo may train from.

        Raises PolicyRefusal by the rule `verify`, IntegrityError for evidence that the coordinator did not sign, FalseChunk for a model
        that is not what its sum makes, and what the coordinator says.
        """
        if self._mode == "off" or not bundle.plan.aggregation.secure_aggregation:
            return
        lineage = await asyncio.to_thread(self._accepted.lineage, bundle)
        if lineage.holds(bytes.fromhex(model)):
            return
        led = await self.led_to(model, plan=bundle.plan.digest, rule=StepRule.of(bundle), lineage=lineage)
        await asyncio.to_thread(self._accepted.save, led)

    async def led_to(self, model: Digest, *, plan: Digest, rule: StepRule, lineage: Lineage) -> Lineage:
        """`lineage` with the rounds that led to `model`, which it does not hold yet; raises what `require` does."""
        party = await asyncio.to_thread(self._party)
        *missed, newest = await self._path(plan, lineage, model, party)
        for checkable in missed:
            with _Check(rule, checkable, party, lineage):
                lineage = lineage.after(checkable.evidence, checked=False)
        with _Check(rule, newest, party, lineage) as check:
            await self._check(plan, model, newest, check, party)
        return lineage.after(newest.evidence)

    async def _path(self, plan: Digest, lineage: Lineage, model: Digest, party: CheckParty) -> Sequence[CheckableRound]:
        """The rounds that led from an accepted state to `model`, oldest first, as the coordinator signed them."""
        path: list[CheckableRound] = []
        wanted = model
        while True:
            try:
                checkable = await self._coordinator.fetch_evidence(plan, wanted)
            except StateError as error:
                raise _refused_model(wanted, f"the coordinator shows no evidence ({error})") from error
            checkable.signed.check(party.coordinator)
            evidence = checkable.evidence
            if evidence.after.model.hex() != wanted:
                raise _refused_model(wanted, "the evidence that came is of another model or state")
            path.insert(0, checkable)
            if lineage.begins(evidence) or not evidence.before.steps:
                return path
            wanted = Digest(evidence.before.model.hex())

    async def _check(
        self, plan: Digest, model: Digest, newest: CheckableRound, check: CheckedRound, party: CheckParty
    ) -> None:
        evidence = newest.evidence

        async def make_again(chunks: Iterable[int]) -> None:
            for chunk in chunks:
                await self._make_again(plan, model, newest, check, chunk, party.silo)

        if self._mode == "spot":
            drawn = await asyncio.to_thread(self._accepted.drawn, evidence.digest, lambda: _draw(check))
            await make_again(sorted({*drawn, *check.tail_chunks}))
            return
        each, survivors = party.checkers, evidence.survivors.silos
        chunks = len(check.chunks)
        own = {
            *part_of(party.silo, survivors, chunks, each=each),
            *beyond_others(party.silo, survivors, chunks, pinned=party.by_hand, each=each),
            *check.tail_chunks,
        }
        await make_again(sorted(own))
        until, known = time.monotonic() + self._patience_s, 0
        while True:
            verdict = signed_verdict(evidence.digest, party.silo, own, party.identity_key)
            others, known = await self._coordinator.share_verdict(plan, model, verdict, known)
            left = uncovered(own, others, evidence=evidence.digest, chunks=chunks, pinned=party.by_hand, each=each)
            if not left:
                return
            if time.monotonic() >= until:
                await make_again(sorted(left))
                own |= left

    async def _make_again(
        self, plan: Digest, model: Digest, newest: CheckableRound, check: CheckedRound, chunk: int, silo: SiloName
    ) -> None:
        vector, master = await asyncio.to_thread(self._own_pieces, newest, chunk, silo)
        held = HeldPieces(vector_of=None if vector is None else silo, master=master is not None)
        try:
            sent = await self._coordinator.fetch_pieces(plan, model, chunk, held)
        except StateError as error:
            raise _refused_model(model, f"the coordinator shows nothing of chunk {chunk} ({error})") from error
        pieces = Pieces.of(newest, sent, vector=None if vector is None else (silo, vector), master=master)
        try:
            await asyncio.to_thread(_made_again, check, chunk, pieces)
        except FalseChunk:
            await asyncio.to_thread(self._keep, Proof(checkable=newest, chunk=chunk, pieces=pieces))
            raise
        except IntegrityError as error:
            raise _refused_model(
                model, f"what came of chunk {chunk} is not what the evidence names ({error})"
            ) from error
        self._checked(1)

    def _own_pieces(self, newest: CheckableRound, chunk: int, silo: SiloName) -> tuple[bytes | None, bytes | None]:
        """Of this silo's masked vector, and of the master before where that is the model that was handed out."""
        masked, before = newest.masked.get(silo), newest.before
        vector = None if masked is None else self._own.vector(masked, chunk)
        if before.master.digest != before.model.digest or chunk >= before.master.chunks:
            return vector, None
        return vector, self._own.model(before.model, chunk)


class _Check:
    """A round whose evidence was replayed; its masks are erased at the end."""

    def __init__(self, rule: StepRule, checkable: CheckableRound, party: CheckParty, lineage: Lineage) -> None:
        evidence = checkable.evidence
        lineage.require_next(evidence)
        self._opened = opened(evidence, identities_in(evidence, party.keys), party.demands)
        try:
            self._check = CheckedRound(rule, checkable, self._opened)
        except BaseException:
            self._opened.unmask.masks.erase()
            raise

    def __enter__(self) -> CheckedRound:
        return self._check

    def __exit__(self, *_: object) -> None:
        self._opened.unmask.masks.erase()


def _made_again(check: CheckedRound, chunk: int, pieces: Pieces) -> None:
    workspace = mask_stream.Workspace()
    try:
        check.check(chunk, pieces, workspace)
    finally:
        workspace.erase()


def _draw(check: CheckedRound) -> Sequence[int]:
    return secrets.SystemRandom().sample(check.chunks, min(SPOT_CHUNKS, len(check.chunks)))


def _refused_model(model: Digest, why: str) -> PolicyRefusal:
    refusal = refused(f"model {model[:12]}", why, _ASK)
    assert refusal.rule == VERIFY
    return refusal
