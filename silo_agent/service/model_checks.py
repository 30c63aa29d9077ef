"""Whether a round model is what the last masked sum made: asked before this silo trains from it
(lorica_security.secure_aggregation.model_evidence.evidence).

"spot": some chunks of the newest round, by this silo's own choice. It finds a model that is wrong in many places.
"joint": all chunks, divided among silos that this one's people pinned (verdicts.py); what others leave out it checks
itself.

In both the sum of weights is always among what is checked. Of rounds that this silo missed the masked vectors are gone
and the evidence is replayed. "joint" takes such a round where enough silos that this one's people pinned have signed
for each of its chunks; what survivors sign otherwise binds the model that they began from, and nothing else of a state.
"spot" takes the coordinator's word for it. What this silo found itself it keeps itself: no verdict in its own name is
taken from the coordinator. Memory is one chunk of each vector, and the evidence of two rounds.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import FalseModel, IntegrityError, LoricaError, PolicyRefusal, StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.messages import Advertisement, Identities, check_signed
from lorica_security.secure_aggregation.model_evidence.evidence import (
    VERIFY,
    Checked,
    Evidence,
    Lineage,
    opened,
    refused,
)
from lorica_security.secure_aggregation.model_evidence.verdicts import (
    Verdict,
    beyond_others,
    checkers,
    part_of,
    signed_verdict,
    uncovered,
)
from lorica_security.secure_aggregation.parameters import Parameters
from lorica_security.secure_aggregation.silo.party import Demands
from silo_agent.service.masking import check_promises
from silo_wire.canonical import Digest
from silo_wire.checkable_round import CheckableRound, FalseChunk, Pieces, Proof
from silo_wire.manifest import Manifest
from silo_wire.messages import HeldPieces
from silo_wire.plans.plan import PlanBundle

if TYPE_CHECKING:
    from silo_wire.checked_chunk import CheckedRound, StepRule

Mode = Literal["joint", "spot", "off"]
SPOT_CHUNKS: Final = 1
"""Beside those with the sum of weights: with eight silos a chunk is 12 MiB."""
VERDICTS_S: Final = 60.0
"""So long this silo waits for what others find, then it checks itself what is left."""
_ASK = "nothing was changed; ask the operator why"
_NEW_PLAN = "nothing was changed; have the operator begin a new plan from an exported model that people compare"
_MOST_NAMED = 8
_LEAST: Final[dict[Mode, Checked]] = {"spot": Checked.SPOT, "joint": Checked.JOINT}

Keep = Callable[[Proof], None]


class EvidencePort(Protocol):
    """The coordinator. Raises what it says."""

    async def fetch_evidence(self, plan: Digest, model: Digest) -> CheckableRound: ...

    async def fetch_pieces(
        self, plan: Digest, model: Digest, chunk: int, held: HeldPieces, most: int
    ) -> Sequence[bytes]:
        """Those that are `held` may come empty."""

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        """All verdicts on the model, once they are others than `known` stands for."""

    async def fetch_verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        """Those that were kept with the evidence of a model, also of an older one."""


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

    def bind(self, evidence: Evidence) -> None:
        """Note that this is what the coordinator showed of its attempt. Raises PolicyRefusal where it showed something
        else before."""

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        """What was drawn for this evidence: once, and never again."""

    def found(self, evidence: bytes, chunks: Collection[int]) -> Collection[int]:
        """Note that this silo found these chunks of this evidence right; all that it ever found, until the model is
        accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckParty:
    """This silo and whom it knows. `keys`: of each silo, its own among them, the key that is pinned, and those before
    it, newest first.

    `by_hand`: those whose keys people compared. `removed`: keys whose pins people removed, newest first.
    """

    silo: SiloName
    identity_key: Ed25519PrivateKey
    keys: Mapping[SiloName, Sequence[Ed25519PublicKey]]
    by_hand: Collection[SiloName]
    demands: Demands
    coordinator: Ed25519PublicKey
    removed: Mapping[SiloName, Sequence[Ed25519PublicKey]] = field(default_factory=dict)

    def against(self, colluders: int) -> "CheckParty":
        """With at least so many colluders as the plan allows for, whatever this silo's own policy says."""
        return replace(self, demands=replace(self.demands, colluders=max(self.demands.colluders, colluders)))

    @property
    def checkers(self) -> int:
        return checkers(self.demands.colluders)

    def identities_in(self, evidence: Evidence) -> Identities:
        """The key of each silo that the attempt was signed with: it may have named a successor since.

        A key that was removed is read where this silo is a survivor alone: it signed for that roster, hence had the key
        pinned.
        """
        removed = self.removed if self.silo in evidence.survivors.silos else {}
        found = {silo: of_silo[0] for silo, of_silo in self.keys.items()}
        for event in evidence.journal:
            if isinstance(event, Advertisement):
                for key in (*self.keys.get(event.silo, ()), *removed.get(event.silo, ())):
                    if _signed(event, key):
                        found[event.silo] = key
                        break
        return found

    def vouching(self, evidence: Evidence) -> Mapping[SiloName, Sequence[Ed25519PublicKey]]:
        """By which keys a verdict of another silo counts: of a survivor the one that it signed this attempt with, and
        those after it.

        Of others the pinned one. Whoever found a key that was given up before vouches for nothing. The evidence was
        opened before: a message of who is no survivor proves no key, since the replay may have refused it.
        """
        signed, survivors = self.identities_in(evidence), evidence.survivors.silos
        return {
            silo: _since(self.keys[silo], signed[silo]) if silo in survivors else self.keys[silo][:1]
            for silo in self.by_hand
            if silo != self.silo
        }


def _since(keys: Sequence[Ed25519PublicKey], key: Ed25519PublicKey) -> Sequence[Ed25519PublicKey]:
    """Of keys, newest first, `key` and those after it; the newest alone where it is none of them."""
    return keys[: keys.index(key) + 1] if key in keys else keys[:1]


def _signed(event: Advertisement, key: Ed25519PublicKey) -> bool:
    try:
        check_signed(event, {event.silo: key})
    except LoricaError:
        return False
    return True


def _unchecked(
    made: Collection[int], verdicts: Iterable[Verdict], evidence: Evidence, check: "CheckedRound", party: CheckParty
) -> frozenset[int]:
    """Chunks of a round that neither this silo, which has `made` some, nor enough others made again."""
    return uncovered(
        made,
        verdicts,
        evidence=evidence.digest,
        chunks=len(check.chunks),
        keys=party.vouching(evidence),
        each=party.checkers,
    )


class _NotShown(PolicyRefusal):
    """The coordinator does not show a chunk: it may have lost the masked vectors, as after a restore."""


@dataclass(frozen=True, kw_only=True)
class CheckedPlan:
    """What rounds of a plan are held to. `promises` raises PolicyRefusal for a roster's parameters that offer less than
    the plan."""

    digest: Digest
    rule: "StepRule"
    rounds: int
    colluders: int
    promises: Callable[[Parameters], None]

    @classmethod
    def of(cls, bundle: PlanBundle) -> "CheckedPlan":
        from silo_wire.checked_chunk import StepRule  # here, not above: torch is for plans with masks

        plan = bundle.plan
        return cls(
            digest=plan.digest,
            rule=StepRule.of(bundle),
            rounds=plan.schedule.rounds,
            colluders=plan.aggregation.colluders,
            promises=lambda offered: check_promises(plan, offered),
        )


class ModelChecks:
    """`keep` keeps a proof, durably, before the coordinator hears that its model is refused; `checked` is told of
    chunks.

    `goes_back` is told where this silo is led back: of the plan, the model, its round, and the later round that was
    accepted.
    """

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
        goes_back: Callable[[Digest, Digest, int, int], None] = lambda plan, model, made, newest: None,
        patience_s: float = VERDICTS_S,
    ) -> None:
        self._mode = mode
        self._coordinator = coordinator
        self._accepted = accepted
        self._own = own
        self._party = party
        self._keep = keep
        self._checked = checked
        self._goes_back = goes_back
        self._patience_s = patience_s

    async def require(self, bundle: PlanBundle, model: Digest) -> None:
        """Return once `model` is one that this silo may train from.

        Raises PolicyRefusal by the rule `verify`, or by one that the plan promises to keep, IntegrityError for evidence
        that the coordinator did not sign, FalseModel for a model that is not what its sum makes, and what the
        coordinator says.
        """
        if self._mode == "off" or not bundle.plan.aggregation.secure_aggregation:
            return
        lineage = await asyncio.to_thread(self._accepted.lineage, bundle)
        if not lineage.holds(bytes.fromhex(model), _LEAST[self._mode]):
            lineage = await self.led_to(model, of=CheckedPlan.of(bundle), lineage=lineage)
            await asyncio.to_thread(self._accepted.save, lineage)
        if lineage.newest.state.model.hex() != model:
            await asyncio.to_thread(self._tell_back, bundle.plan.digest, lineage, model)

    async def led_to(self, model: Digest, *, of: CheckedPlan, lineage: Lineage) -> Lineage:
        """`lineage` with the rounds that led to `model`, which it does not hold yet; raises what `require` does."""
        party = (await asyncio.to_thread(self._party)).against(of.colluders)
        checkable, later = await self._path(of, lineage, model, party)
        if lineage.goes_back(checkable.evidence) and not lineage.knows(checkable.evidence):
            began = Digest(checkable.evidence.before.model.hex())
            await asyncio.to_thread(self._tell_back, of.digest, lineage, began)
        for wanted, evidence in later:
            with _Check(of, checkable, party, lineage, self._from) as check:
                checked = await self._missed(of.digest, checkable.evidence, check, party)
            lineage = lineage.after(checkable.evidence, checked)
            checkable = await self._shown(of.digest, wanted, party)
            if checkable.evidence.digest != evidence:
                raise _refused_model(wanted, "the coordinator showed other evidence of it a moment ago")
        with _Check(of, checkable, party, lineage, self._from) as check:
            await self._check(of.digest, model, checkable, check, party)
        return lineage.after(checkable.evidence, _LEAST[self._mode])

    def _tell_back(self, plan: Digest, lineage: Lineage, model: Digest) -> None:
        rounds = [one.round for one in lineage.accepted if one.state.model.hex() == model]
        if rounds:
            self._goes_back(plan, model, max(rounds), lineage.newest.round)

    @property
    def _from(self) -> Checked:
        """How far a state has to be checked for a round to begin there."""
        return Checked.JOINT if self._mode == "joint" else Checked.REPLAYED

    async def _path(
        self, of: CheckedPlan, lineage: Lineage, model: Digest, party: CheckParty
    ) -> tuple[CheckableRound, Sequence[tuple[Digest, bytes]]]:
        """The round that leads on from an accepted state, and the later ones that lead to `model`, oldest first, each
        as its model and evidence.

        The later ones are let go of, since evidence may be large, and there may be as many as the plan has rounds.
        """
        later: list[tuple[Digest, bytes]] = []
        wanted, next_state, next_round = model, None, of.rounds + 1
        while True:
            checkable = await self._shown(of.digest, wanted, party)
            evidence = checkable.evidence
            if next_state not in (None, evidence.after):
                raise _refused_model(
                    wanted, "the evidence that came leads to another state than the next round begins from"
                )
            if not evidence.attempt.round < next_round:
                raise _refused_model(
                    wanted,
                    f"the evidence that came is of round {evidence.attempt.round}, and has to be of one before "
                    f"round {next_round}",
                )
            if lineage.begins(evidence, self._from) or not evidence.before.steps:
                return checkable, later
            later.insert(0, (wanted, evidence.digest))
            wanted = Digest(evidence.before.model.hex())
            next_state, next_round = evidence.before, evidence.attempt.round

    async def _shown(self, plan: Digest, model: Digest, party: CheckParty) -> CheckableRound:
        """What the coordinator signed of the round that made `model`."""
        try:
            checkable = await self._coordinator.fetch_evidence(plan, model)
        except StateError as error:
            raise _refused_model(model, f"the coordinator shows no evidence ({error})") from error
        checkable.signed.check(party.coordinator)
        if checkable.evidence.after.model.hex() != model:
            raise _refused_model(model, "the evidence that came is of another model or state")
        return checkable

    async def _missed(self, plan: Digest, evidence: Evidence, check: "CheckedRound", party: CheckParty) -> Checked:
        """How far a round is checked of which the coordinator has the evidence alone. Raises PolicyRefusal where that
        is not enough."""
        await asyncio.to_thread(self._accepted.bind, evidence)
        if self._mode == "spot":
            return Checked.REPLAYED
        made = await asyncio.to_thread(self._accepted.found, evidence.digest, ())
        left, signers = await self._left(made, plan, evidence, check, party)
        if left:
            some = ", ".join(map(str, sorted(left)[:_MOST_NAMED])) + (" and more" if len(left) > _MOST_NAMED else "")
            raise refused(
                evidence.attempt,
                f"this silo did not check it then, and of its {len(check.chunks)} chunks {len(left)} (number "
                f"{some}) have not the signatures of {party.checkers} silos whose keys its people compared (there are "
                f"verdicts of {', '.join(signers) or 'nobody'})",
                _NEW_PLAN,
            )
        return Checked.JOINT

    async def _left(
        self, made: Collection[int], plan: Digest, evidence: Evidence, check: "CheckedRound", party: CheckParty
    ) -> tuple[frozenset[int], Sequence[SiloName]]:
        """Chunks that neither this silo, which has `made` some, nor enough others made again; and who says that it
        did."""
        try:
            verdicts = await self._coordinator.fetch_verdicts(plan, Digest(evidence.after.model.hex()))
        except StateError:
            verdicts = ()
        left = _unchecked(made, verdicts, evidence, check, party)
        return left, sorted({verdict.silo for verdict in verdicts} - {party.silo})

    async def _check(
        self, plan: Digest, model: Digest, newest: CheckableRound, check: "CheckedRound", party: CheckParty
    ) -> None:
        evidence = newest.evidence
        made = set[int]()

        async def make_again(chunks: Iterable[int]) -> None:
            for chunk in chunks:
                await self._make_again(plan, model, newest, check, chunk, party.silo)
                made.add(chunk)

        await asyncio.to_thread(self._accepted.bind, evidence)
        if self._mode == "spot":
            drawn = await asyncio.to_thread(self._accepted.drawn, evidence.digest, lambda: _draw(check))
            await make_again(sorted({*drawn, *check.tail_chunks}))
            return
        made.update(await asyncio.to_thread(self._accepted.found, evidence.digest, ()))
        each, survivors = party.checkers, evidence.survivors.silos
        chunks = len(check.chunks)
        own = {
            *part_of(party.silo, survivors, chunks, each=each),
            *beyond_others(party.silo, survivors, chunks, pinned=party.by_hand, each=each),
            *check.tail_chunks,
        }
        try:
            await make_again(sorted(own - made))
            until, known = time.monotonic() + self._patience_s, 0
            while True:
                await asyncio.to_thread(self._accepted.found, evidence.digest, made)
                verdict = signed_verdict(evidence.digest, party.silo, made, party.identity_key)
                others, known = await self._coordinator.share_verdict(plan, model, verdict, known)
                left = _unchecked(made, others, evidence, check, party)
                if not left:
                    return
                if time.monotonic() >= until:
                    await make_again(sorted(left))
        except _NotShown:
            await asyncio.to_thread(self._accepted.found, evidence.digest, made)
            left, _ = await self._left(made, plan, evidence, check, party)
            if left:
                raise

    async def _make_again(
        self, plan: Digest, model: Digest, newest: CheckableRound, check: "CheckedRound", chunk: int, silo: SiloName
    ) -> None:
        vector, master = await asyncio.to_thread(self._own_pieces, newest, chunk, silo)
        held = HeldPieces(vector_of=None if vector is None else silo, master=master is not None)
        try:
            sent = await self._coordinator.fetch_pieces(plan, model, chunk, held, Pieces.most(newest))
        except StateError as error:
            why = f"the coordinator shows nothing of chunk {chunk} ({error})"
            raise _NotShown(VERIFY, str(_refused_model(model, why))) from error
        pieces = Pieces.of(newest, sent, vector=None if vector is None else (silo, vector), master=master)
        try:
            await asyncio.to_thread(_made_again, check, chunk, pieces)
        except FalseChunk as false:
            proof = Proof(checkable=newest, chunk=chunk, pieces=pieces)
            try:
                await asyncio.to_thread(self._keep, proof)
            except (LoricaError, OSError) as error:
                raise FalseModel(f"{false}; its proof could not be kept: {error}") from false
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

    def __init__(
        self, of: CheckedPlan, checkable: CheckableRound, party: CheckParty, lineage: Lineage, least: Checked
    ) -> None:
        from silo_wire.checked_chunk import CheckedRound

        evidence = checkable.evidence
        lineage.require_next(evidence, least)
        self._opened = opened(evidence, party.identities_in(evidence), party.demands)
        try:
            of.promises(self._opened.roster.parameters)
            self._check = CheckedRound(of.rule, checkable, self._opened)
        except BaseException:
            self._opened.unmask.masks.erase()
            raise

    def __enter__(self) -> "CheckedRound":
        return self._check

    def __exit__(self, *_: object) -> None:
        self._opened.unmask.masks.erase()


def _made_again(check: "CheckedRound", chunk: int, pieces: Pieces) -> None:
    workspace = mask_stream.Workspace()
    try:
        check.check(chunk, pieces, workspace)
    finally:
        workspace.erase()


def _draw(check: "CheckedRound") -> Sequence[int]:
    return secrets.SystemRandom().sample(check.chunks, min(SPOT_CHUNKS, len(check.chunks)))


def _refused_model(model: Digest, why: str) -> PolicyRefusal:
    refusal = refused(f"model {model[:12]}", why, _ASK)
    assert refusal.rule == VERIFY
    return refusal
