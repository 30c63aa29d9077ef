"""What the coordinator's own files say of its rounds: every chunk that it wrote is the one that a silo makes again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.edges.model_store import MASTER
from coordinator.edges.model_store import OptimizerState as StoredState
from coordinator.edges.stored_vector import StoredVector
from security.identifiers import SiloName
from security.secure_aggregation.coordinator_machine import Unmasked
from security.secure_aggregation.evidence import Evidence, Lineage, opened
from security.secure_aggregation.fixed_point import EXTRA_WORDS
from security.secure_aggregation.mask_stream import Workspace
from security.secure_aggregation.silo_machine import Demands
from silo_wire.canonical import Digest
from silo_wire.checked_chunk import MASTER as MASTER_PART
from silo_wire.checked_chunk import CheckedRound, FalseChunk, Pieces, StateManifests, StepRule
from silo_wire.manifest import ParameterDtype
from silo_wire.plan_optimizer import optimizer_of
from tests.support.masked_round import LAYOUT, PLAN, MaskedPlace, t5_deltas
from tests.support.secagg_federation import FEDERATION, silo_names

OPTIMIZERS: list[dict[str, Any]] = [
    {"server_optimizer": "sgd", "momentum": 0.9},
    {"server_optimizer": "adam", "server_learning_rate": 0.01},
    {"server_optimizer": "yogi", "server_learning_rate": 0.01},
    {"server_optimizer": "adagrad", "server_learning_rate": 0.01},
]


class Files:
    """A model of a store, with what the next step begins from."""

    def __init__(self, place: MaskedPlace, model: Digest) -> None:
        self.state: StoredState = place.models.state(model)
        self.model: StoredVector = place.models.vector(model)
        self.master: StoredVector = place.models.master(model, self.state)
        self.slots = {name: vector for name, vector in self.state.slots.items() if name != MASTER}
        self.manifests = StateManifests(
            model=self.model.manifest,
            master=self.master.manifest,
            slots={name: vector.manifest for name, vector in self.slots.items()},
        )


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=lambda changes: changes["server_optimizer"])
def test_every_chunk_of_the_coordinators_files_is_made_again(
    tmp_path: Path, changes: dict[str, Any], published: ParameterDtype
) -> None:
    """Two rounds of the real aggregator in slabs that are no chunks; in the second one a masked vector is lost."""
    place = MaskedPlace.at(tmp_path / "state", changes, published=published)
    rule = StepRule(optimizer=optimizer_of(place.section), layout=LAYOUT, model_layout=LAYOUT.as_type(published))
    before = Files(place, place.models.initial())
    lineage = Lineage.of_plan(
        federation=FEDERATION,
        plan=bytes.fromhex(PLAN),
        master=bytes.fromhex(before.master.manifest.digest),
        model=bytes.fromhex(before.model.manifest.digest),
    )
    for number in (1, 2):
        drops = {silo_names(4)[2]: "masked input"} if number == 2 else None
        base = before.manifests.model.digest
        federation, digests = place.masked(number, base, t5_deltas(4, number), drops)
        told = place.aggregator(400_004).aggregate_masked(place.key(number), base, federation.sum_of(digests))
        after = Files(place, told.model)
        spools = {silo: place.spools.committed(place.key(number), silo, it) for silo, it in digests.items()}
        total = federation.true_sum()
        assert isinstance(federation.coordinator, Unmasked)
        evidence = Evidence(
            attempt=federation.attempt,
            survivors=federation.coordinator.survivors,
            before=before.manifests.state(before.state.steps),
            after=after.manifests.state(after.state.steps),
            tail=tuple(int(word) for word in total[-EXTRA_WORDS:]),
            journal=tuple(federation.journal),
        )
        lineage = lineage.after(evidence)
        check = CheckedRound(
            rule,
            evidence,
            opened(evidence, federation.identities, Demands()),
            masked={silo: vector.manifest for silo, vector in spools.items()},
            before=before.manifests,
            after=after.manifests,
        )
        assert check.chunks == range(3)
        for chunk in check.chunks:
            check.check(chunk, pieces_of(check, chunk, spools, before, after), Workspace())
        if number == 2:
            # The optimizer's own state, as it was a step before.
            lie = replace(
                evidence, before=replace(evidence.before, steps=0, slots=()), after=replace(evidence.after, steps=1)
            )
            false = CheckedRound(
                rule,
                lie,
                opened(lie, federation.identities, Demands()),
                masked={silo: vector.manifest for silo, vector in spools.items()},
                before=replace(before.manifests, slots={}),
                after=after.manifests,
            )
            with pytest.raises(FalseChunk) as caught:
                false.check(0, replace(pieces_of(check, 0, spools, before, after), slots={}), Workspace())
            assert caught.value.part == MASTER_PART
        before = after


def pieces_of(
    check: CheckedRound, chunk: int, spools: dict[SiloName, StoredVector], before: Files, after: Files
) -> Pieces:
    at = check.model_chunk(chunk)
    return Pieces(
        masked={silo: vector.chunk(chunk) for silo, vector in spools.items()},
        master=before.master.chunk(chunk),
        slots={name: vector.chunk(chunk) for name, vector in before.slots.items()},
        model=None if at is None else after.model.chunk(at),
    )
