"""A silo that forgot what it masked notices: masking/memory and lineages.json stand apart, and each shows the other's loss."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from security.errors import ConfigurationError, PolicyRefusal
from security.secure_aggregation.silo_memory import SiloMemory
from silo_agent.edges.lineages import Lineages
from silo_agent.edges.masking_journal import MaskingJournal
from silo_wire.canonical import Digest
from silo_wire.secure_codec import memory_to_bytes
from tests.support.federation_peer import small_bundle
from tests.support.secagg_federation import FEDERATION, attempt

BUNDLE = small_bundle(
    aggregation={"secure_aggregation": True, "max_weight": 100.0}, schedule={"rounds": 9, "min_silos": 3}
)
PLAN = bytes.fromhex(BUNDLE.plan.digest)
MODEL = BUNDLE.plan.initial_model


def journal(folder: Path) -> MaskingJournal:
    """As each process opens it."""
    return MaskingJournal(folder / "masking", FEDERATION)


def masked(folder: Path, *rounds: int) -> SiloMemory:
    """This silo takes part in these rounds, and shows its shares in each."""
    memory = journal(folder).memory()
    for number in rounds:
        journal(folder).saw(BUNDLE, MODEL)
        for change in (SiloMemory.joined, SiloMemory.answered):
            memory = change(memory, attempt(plan=PLAN, round=number))
            journal(folder).remember(memory)
    return memory


def refused(folder: Path, says: str) -> None:
    for _ in range(2):  # and still in the next process
        with pytest.raises(PolicyRefusal, match=says) as refusal:
            journal(folder).memory()
        assert refusal.value.rule == "masking_memory"
        assert "restore both" in str(refusal.value)
        assert "silo-agent trust reset-memory" in str(refusal.value)


def test_a_new_silo_has_an_empty_memory_and_a_whole_one_is_read_back(tmp_path: Path) -> None:
    assert journal(tmp_path).memory() == SiloMemory()
    assert journal(tmp_path).problem() is None
    journal(tmp_path).saw(BUNDLE, MODEL)  # a model was handed out, nothing was masked
    assert journal(tmp_path).memory() == SiloMemory()
    memory = masked(tmp_path, 1, 2)
    assert journal(tmp_path).memory() == memory
    (lineage,) = Lineages(tmp_path / "lineages.json").all()
    assert (lineage.plan, lineage.round, lineage.models) == (BUNDLE.plan.digest, 2, {MODEL})


def test_attack_a_memory_that_was_deleted_is_not_taken_for_a_fresh_silos(tmp_path: Path) -> None:
    masked(tmp_path, 1)
    (tmp_path / "masking" / "memory").unlink()
    refused(tmp_path, "masking/memory is missing, and lineages.json says that this silo has masked")
    shutil.rmtree(tmp_path / "masking")
    refused(tmp_path, "masking/memory is missing")


def test_attack_a_lost_list_of_lineages_is_not_taken_for_a_fresh_silos(tmp_path: Path) -> None:
    masked(tmp_path, 1)
    (tmp_path / "lineages.json").unlink()
    refused(tmp_path, "lineages.json is missing or comes from a backup")
    (tmp_path / "lineages.json").write_text("{")
    (tmp_path / "lineages.json").chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"lineages\.json is damaged"):
        journal(tmp_path).memory()


def test_attack_a_damaged_memory_beside_no_list_is_not_taken_for_a_fresh_silos(tmp_path: Path) -> None:
    masked(tmp_path, 1)
    (tmp_path / "lineages.json").unlink()
    (tmp_path / "masking" / "memory").write_bytes(b"")
    refused(tmp_path, "masking/memory does not parse")


def test_attack_a_memory_of_an_earlier_release_in_place_of_a_newer_one(tmp_path: Path) -> None:
    old = SiloMemory(masked(tmp_path / "other", 1).plans)
    masked(tmp_path, 1, 2)
    (tmp_path / "masking" / "memory").write_bytes(memory_to_bytes(old))
    refused(tmp_path, "comes from a backup")


def test_a_memory_of_an_earlier_release_is_taken_once_and_marked(tmp_path: Path) -> None:
    old = SiloMemory(masked(tmp_path / "other", 1).plans)
    journal(tmp_path)
    (tmp_path / "masking" / "memory").write_bytes(memory_to_bytes(old))
    (tmp_path / "masking" / "memory").chmod(0o600)
    assert journal(tmp_path).memory() == old
    (tmp_path / "masking" / "memory").unlink()
    refused(tmp_path, "masking/memory is missing")


def test_a_crash_between_the_two_files_costs_nothing(tmp_path: Path) -> None:
    masked(tmp_path, 1)
    before = (tmp_path / "lineages.json").read_bytes()
    newer = journal(tmp_path).memory().joined(attempt(plan=PLAN, round=2))
    journal(tmp_path).remember(newer)
    (tmp_path / "lineages.json").write_bytes(before)
    assert journal(tmp_path).memory() == newer
    masked(tmp_path, 3)


@settings(max_examples=25, deadline=None)
@given(rounds=st.integers(2, 5), back=st.integers(1, 4), which=st.sampled_from(["masking/memory", "lineages.json"]))
def test_whichever_of_the_two_files_goes_back_by_a_round_is_found_out(
    tmp_path_factory: pytest.TempPathFactory, rounds: int, back: int, which: str
) -> None:
    folder = tmp_path_factory.mktemp("silo")
    kept = None
    for number in range(1, rounds + 1):
        masked(folder, number)
        if number == max(1, rounds - back):
            kept = (folder / which).read_bytes()
    assert kept is not None
    (folder / which).write_bytes(kept)
    refused(folder, "comes from a backup")


@pytest.mark.parametrize("lose", ["masking/memory", "lineages.json"])
def test_people_let_a_silo_go_on_and_every_round_that_is_known_of_counts_as_answered(tmp_path: Path, lose: str) -> None:
    masked(tmp_path, 1, 2)
    (tmp_path / lose).unlink()
    assert journal(tmp_path).problem() is not None
    journal(tmp_path).reset()
    memory = journal(tmp_path).memory()
    known = memory.of(PLAN)
    assert known is not None
    assert (known.round, known.answered) == (2, True)
    for number in (1, 2):
        with pytest.raises(PolicyRefusal):
            memory.check_may_join(attempt(plan=PLAN, round=number))
    memory.check_may_join(attempt(plan=PLAN, round=3))


def test_models_of_plans_are_kept_and_each_once(tmp_path: Path) -> None:
    lineages = Lineages(tmp_path / "lineages.json")
    other = Digest("ab" * 32)
    for model in (MODEL, other, MODEL):
        lineages.saw(BUNDLE, model)
    (lineage,) = lineages.all()
    assert (lineage.models, lineage.layout, lineage.round) == ({MODEL, other}, BUNDLE.layout.digest, 0)
