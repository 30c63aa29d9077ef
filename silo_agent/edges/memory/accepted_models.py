"""Which round models this silo accepted under masks, by which evidence, in `accepted.json` of its folder; and proofs,
in `proofs`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lorica_security.console.strict_toml import Section
from lorica_security.host import files
from lorica_security.identifiers import FederationName
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.model_evidence.evidence import (
    Accepted,
    Checked,
    Evidence,
    Lineage,
    ModelState,
    refused,
)
from lorica_security.secure_aggregation.model_evidence.verdicts import MAX_CHUNKS, bits_of, numbers_of
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_wire.checkable_round import Proof
from silo_wire.codecs.evidence_codec import proof_to_bytes
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.model import DigestText


class _State(Section):
    steps: Annotated[int, Field(ge=0)]
    model: DigestText
    master: DigestText
    slots: dict[str, DigestText] = Field(default_factory=dict)


class _Accepted(Section):
    round: Annotated[int, Field(ge=0)]
    state: _State
    evidence: DigestText
    checked: bool
    joint: bool = False  # every chunk, by this silo or enough others; a file of an earlier release does not say so

    @property
    def how_far(self) -> Checked:
        if self.joint:
            return Checked.JOINT
        return Checked.SPOT if self.checked else Checked.REPLAYED


BitsText = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=MAX_CHUNKS // 4)]


class _Content(Section):
    version: Literal[1] = 1
    plans: dict[DigestText, list[_Accepted]] = Field(default_factory=dict)
    shown: dict[DigestText, DigestText] = Field(default_factory=dict)  # attempts, and the one evidence of each
    drawn: dict[DigestText, list[int]] = Field(default_factory=dict)  # of each evidence, the chunks; for good
    found: dict[DigestText, BitsText] = Field(default_factory=dict)  # of each evidence that is not accepted yet


class AcceptedModels:
    """Each call reads the file. Raises ConfigurationError naming it when it is damaged or edited, StorageError."""

    def __init__(self, path: Path, federation: FederationName, seal: Seal) -> None:
        self._federation = federation
        self._record = PrivateRecord(
            path,
            _Content,
            check=lambda _content: None,
            remedy="restore it from a backup, or remove it: the rounds since the plan began are then replayed",
            seal=seal,
        )

    def lineage(self, bundle: PlanBundle) -> Lineage:
        """With what the plan begins from alone, where nothing was accepted yet."""
        model = bundle.plan.model
        first = Lineage.of_plan(
            federation=self._federation,
            plan=bytes.fromhex(bundle.plan.digest),
            master=bytes.fromhex(model.initial),
            model=bytes.fromhex(str(bundle.plan.initial_model)),
        )
        known = self._record.read().plans.get(bundle.plan.digest, [])
        accepted = (
            Accepted(
                round=one.round,
                state=ModelState(
                    steps=one.state.steps,
                    model=bytes.fromhex(one.state.model),
                    master=bytes.fromhex(one.state.master),
                    slots=tuple((name, bytes.fromhex(vector)) for name, vector in sorted(one.state.slots.items())),
                ),
                evidence=bytes.fromhex(one.evidence),
                checked=one.how_far,
            )
            for one in known
        )
        return Lineage(federation=first.federation, plan=first.plan, accepted=(*first.accepted, *accepted))

    def save(self, lineage: Lineage) -> None:
        kept = [
            _Accepted(
                round=one.round,
                state=_State(
                    steps=one.state.steps,
                    model=one.state.model.hex(),
                    master=one.state.master.hex(),
                    slots={name: vector.hex() for name, vector in one.state.slots},
                ),
                evidence=one.evidence.hex(),
                checked=one.checked.is_at_least(Checked.SPOT),
                joint=one.checked.is_at_least(Checked.JOINT),
            )
            for one in lineage.accepted
            if one.round  # what the plan begins from follows from the plan
        ]
        joint = {one.evidence for one in kept if one.joint}

        def edit(content: _Content) -> _Content:
            found = {evidence: bits for evidence, bits in content.found.items() if evidence not in joint}
            return content.model_copy(update={"plans": {**content.plans, lineage.plan.hex(): kept}, "found": found})

        self._record.change(edit)

    def bind(self, evidence: Evidence) -> None:
        """Note that this is the evidence of its attempt. Raises PolicyRefusal where the coordinator showed other
        evidence of it before."""
        attempt, digest = evidence.attempt, evidence.digest.hex()

        def edit(content: _Content) -> _Content:
            before = content.shown.get(attempt.digest.hex(), digest)
            if before != digest:
                raise refused(
                    attempt,
                    f"the coordinator signed two that differ, {before[:12]} before and {digest[:12]} now",
                    "nothing was changed; compare both with the other silos, and stop until its operator has "
                    "explained it",
                )
            return content.model_copy(update={"shown": {**content.shown, attempt.digest.hex(): digest}})

        self._record.change(edit)

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        """What `draw` gave when it was asked for this evidence first: noted before anybody can know of it, and never
        forgotten."""
        chunks: Sequence[int] = ()

        def edit(content: _Content) -> _Content:
            nonlocal chunks
            chunks = content.drawn.get(evidence.hex()) or list(draw())
            return content.model_copy(update={"drawn": {**content.drawn, evidence.hex(): list(chunks)}})

        self._record.change(edit)
        return chunks

    def found(self, evidence: bytes, chunks: Collection[int]) -> Collection[int]:
        """All chunks that this silo ever found right, these among them. It is forgotten once every chunk of this
        evidence was checked."""
        found = frozenset(chunks)

        def edit(content: _Content) -> _Content:
            nonlocal found
            found |= numbers_of(bytes.fromhex(content.found.get(evidence.hex(), "")))
            if not found:
                return content
            return content.model_copy(update={"found": {**content.found, evidence.hex(): bits_of(found).hex()}})

        self._record.change(edit)
        return found


def keep_proof(folder: Path, proof: Proof) -> Path:
    """Write `proof` into `folder`, where nothing is deleted; the file, one for each evidence and chunk. Raises
    StorageError."""
    evidence = proof.checkable.evidence
    plan, made = evidence.attempt.plan.hex()[:16], evidence.attempt.round
    path = folder / f"{plan}-round-{made}-chunk-{proof.chunk}-{evidence.digest.hex()[:16]}.proof"
    files.make_private_folder(folder)
    files.write_private(path, proof_to_bytes(proof))
    return path
