"""What silos need to check round models: the evidence of masked rounds, pieces of the newest, and each other's
verdicts.

The masked vectors of the round that made the present model stay until another model takes its place, and so does the
model before. Silos bring verdicts on the present model alone; they stay with its evidence, since a silo that misses the
round has nothing else by which it could tell that the model was checked.
"""

import asyncio
from collections.abc import Collection

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_coordinator.rounds.effects import Aggregate
from lorica_coordinator.service.plan_desk import OpenedPlan, PlanDesk
from lorica_coordinator.service.ports import Keys, Spools
from lorica_security.errors import AuthorisationError, IntegrityError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.model_evidence.evidence import EVIDENCE_DOMAIN, Evidence, SignedEvidence
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from silo_wire.canonical import Digest
from silo_wire.messages import HeldPieces, RoundKey

WAIT_S = 10.0
"""So long a silo that knows all verdicts waits for another one."""


class RoundChecks:
    """Methods that read or write run in worker threads; the verdicts are of one event loop."""

    def __init__(self, *, desk: PlanDesk, keys: Keys, spools: Spools, wait_s: float = WAIT_S) -> None:
        self._desk = desk
        self._keys = keys
        self._spools = spools
        self._wait_s = wait_s
        self._model: Digest | None = None
        self._verdicts: tuple[Verdict, ...] = ()
        self._changes = 0
        self._changed = asyncio.Condition()

    def keep(self, opened: OpenedPlan, command: Aggregate, model: Digest) -> None:
        """Keep what shows that the masked sum of `command` made `model`. Raises StorageError or IntegrityError."""
        assert command.masked is not None, "a sum of updates in the clear has no evidence"
        opened.parts.evidence.make(command.key, command.base_model, command.masked, model, self._sign)

    def _sign(self, evidence: Evidence) -> SignedEvidence:
        return SignedEvidence(evidence=evidence, signature=self._keys.sign(EVIDENCE_DOMAIN.decode(), evidence.digest))

    def is_kept(self, opened: OpenedPlan, key: RoundKey, present: Digest | None) -> bool:
        """Whether the vectors of this attempt are those that the present model can be checked with."""
        return any((it.model, it.key) == (present, key) for it in opened.parts.evidence.kept())

    def let_go(self, opened: OpenedPlan, *, but: Digest | None, under_way: tuple[int, int]) -> None:
        """Nothing but what made the model `but` is made again: vectors of other rounds go.

        Those of the round and attempt `under_way` stay: their model may be there before the round is closed with it,
        and a coordinator that died in between sums them once more.
        """
        for kept in opened.parts.evidence.kept():
            if kept.model != but and (kept.key.round, kept.key.attempt) != under_way:
                opened.parts.evidence.let_go(kept.model)
                self._spools.discard(kept.key)

    def bases(self, opened: OpenedPlan) -> frozenset[Digest]:
        """Models that a check begins from."""
        return frozenset(it.base for it in opened.parts.evidence.kept())

    async def evidence(self, plan: Digest, model: Digest) -> bytes:
        """As it travels; raises StateError where no masked sum made `model`."""
        opened = await self._desk.opened(plan)
        return await asyncio.to_thread(opened.parts.evidence.read, model)

    async def pieces(self, plan: Digest, model: Digest, chunk: int, held: HeldPieces) -> tuple[bytes, ...]:
        opened = await self._desk.opened(plan)
        return await asyncio.to_thread(opened.parts.evidence.pieces, model, chunk, held)

    async def verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        """Those that are kept on `model`, which need not be the present one."""
        opened = await self._desk.opened(plan)
        return await asyncio.to_thread(opened.parts.evidence.verdicts, model)

    async def share(
        self,
        silo: SiloName,
        plan: Digest,
        model: Digest,
        verdict: Verdict,
        known: int,
        *,
        identity_key: Ed25519PublicKey,
    ) -> tuple[Collection[Verdict], int]:
        """Keep the silo's verdict on the present model; all there are, and a number that stands for them.

        It answers at once where that is not `known`, else when there is another one, or after some seconds. Raises
        AuthorisationError for another silo's verdict, IntegrityError for one that its present `identity_key` did not
        sign (the attempt's key, or one after it), StateError for one on other evidence, MalformedMessage, StorageError.
        """
        if verdict.silo != silo:
            raise AuthorisationError(f"silo {silo} brings a verdict of silo {verdict.silo}: only its own is taken")
        try:
            verdict.check(identity_key)
        except IntegrityError:
            raise IntegrityError(
                f"the verdict of silo {silo} on model {model} is not signed by the identity key that it is enrolled "
                "with: it is not kept"
            ) from None
        evidence = (await self._desk.opened(plan)).parts.evidence
        async with self._changed:
            kept = await asyncio.to_thread(evidence.keep_verdict, model, verdict)
            if (self._model, self._verdicts) != (model, kept):
                self._model, self._verdicts = model, kept
                self._changes += 1
                self._changed.notify_all()
            elif self._changes == known:
                try:
                    async with asyncio.timeout(self._wait_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            return (self._verdicts if self._model == model else ()), self._changes
