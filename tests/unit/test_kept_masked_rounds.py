"""What shows that a masked sum made a model comes with the model to another machine: evidence, verdicts, the masked
vectors and the state before, of which every chunk is made again."""

from dataclasses import replace
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_security.errors import StateError
from silo_wire.canonical import Digest
from tests.support.masked_round import LAYOUT, PLAN, MaskedPlace
from tests.support.secagg_federation import FEDERATION, silo_names
from tests.unit.test_coordinator_evidence import OPTIMIZERS, digest_of_evidence, next_round, verdict
from tests.unit.test_kept_files import Place

CHUNKS = range(3)


def masked_place(machine: Place, begin: MaskedPlace) -> tuple[MaskedPlace, RoundEvidence]:
    """A plan's models, spools and evidence on this machine, kept in the bucket."""
    models = ModelStore(
        machine.root / "models" / PLAN,
        layout=LAYOUT,
        model_layout=LAYOUT.as_type("bfloat16"),
        initial=begin.models._initial,
        initial_file=begin.models._initial_file,
        kept=machine.kept,
    )
    spools = Spools(machine.root / "spools", keys=machine.keys, kept=machine.kept)
    evidence = RoundEvidence(
        machine.root / "models" / PLAN,
        federation=FEDERATION,
        plan=Digest(PLAN),
        models=models,
        spools=spools,
        kept=machine.kept,
    )
    return replace(begin, state=machine.root, models=models, spools=spools), evidence


def on_machine(root: Path, store: MemoryStore, term: int, vault: Path) -> Place:
    root.mkdir(exist_ok=True)
    machine = Place(root, store, term, block_bytes=1 << 20)
    machine.keys = SpoolKeys(root / "spools", vault, term)
    return machine


def test_a_masked_round_is_made_again_chunk_by_chunk_on_another_machine(tmp_path: Path) -> None:
    bucket, vault = MemoryStore(), tmp_path / "vault" / "spools"
    begin = MaskedPlace.at(tmp_path / "begin", OPTIMIZERS[1], published="bfloat16")
    first = on_machine(tmp_path / "first", bucket, 1, vault)
    first.settle()
    place, evidence = masked_place(first, begin)
    initial = place.models.initial()
    _, model = next_round(place, evidence, 1, initial)
    of = verdict(digest_of_evidence(evidence, model), silo_names(4)[1], CHUNKS)
    evidence.keep_verdict(model, of)
    expected = {chunk: evidence.pieces(model, chunk) for chunk in CHUNKS}
    assert all(any(piece for piece in pieces) for pieces in expected.values())

    second = on_machine(tmp_path / "second", bucket, 2, vault)
    second.settle()
    place, taken_over = masked_place(second, begin)
    assert taken_over.read(model) == evidence.read(model)
    assert taken_over.verdicts(model) == (of,)
    assert taken_over.kept() == evidence.kept()
    assert {chunk: taken_over.pieces(model, chunk) for chunk in CHUNKS} == expected

    taken_over.let_go(model)
    place.spools.discard(place.key(1))
    place.models.retain({model})
    third = on_machine(tmp_path / "third", bucket, 3, vault)
    third.settle()
    place, last = masked_place(third, begin)
    assert last.read(model) == evidence.read(model), "evidence stays as long as the plan's models"
    assert last.kept() == ()
    assert place.models.exists(model)
    assert not place.models.exists(initial)
    with pytest.raises(StateError, match="are there no more"):
        last.pieces(model, 0)
    assert not list(vault.rglob("*.key"))
