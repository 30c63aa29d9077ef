"""Which round models this silo accepted under masks, by which evidence, in `accepted.json` of its folder; and proofs, in `proofs`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from security import files
from security.identifiers import FederationName
from security.pki.seal import Seal
from security.secure_aggregation.evidence import Accepted, Lineage, ModelState
from silo_agent.edges.private_record import PrivateRecord
from silo_wire.checked_chunk import Proof
from silo_wire.evidence_codec import proof_to_bytes
from silo_wire.plan import DigestText, PlanBundle
from silo_wire.strict_toml import Section

_MOST_DRAWS = 64


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


class _Content(Section):
    version: Literal[1] = 1
    plans: dict[DigestText, list[_Accepted]] = Field(default_factory=dict)
    drawn: dict[DigestText, list[int]] = Field(default_factory=dict)


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
                checked=one.checked,
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
                checked=one.checked,
            )
            for one in lineage.accepted
            if one.round  # what the plan begins from follows from the plan
        ]
        self._record.change(
            lambda content: content.model_copy(update={"plans": {**content.plans, lineage.plan.hex(): kept}})
        )

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        """What `draw` gave when it was asked for this evidence first: noted before anybody can know of it."""
        chunks: Sequence[int] = ()

        def edit(content: _Content) -> _Content:
            nonlocal chunks
            chunks = content.drawn.get(evidence.hex()) or list(draw())
            newest = dict(list(content.drawn.items())[-_MOST_DRAWS:])
            return content.model_copy(update={"drawn": {**newest, evidence.hex(): list(chunks)}})

        self._record.change(edit)
        return chunks


def keep_proof(folder: Path, proof: Proof) -> Path:
    """Write `proof` into `folder`, where nothing is deleted; the file. Raises StorageError."""
    attempt = proof.checkable.evidence.attempt
    path = folder / f"{attempt.plan.hex()[:16]}-round-{attempt.round}-chunk-{proof.chunk}.proof"
    files.make_private_folder(folder)
    files.write_private(path, proof_to_bytes(proof))
    return path
