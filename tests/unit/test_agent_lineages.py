"""A silo that forgot what it masked notices: masking/memory and lineages.json stand apart, and each shows the other's loss."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from security.errors import PolicyRefusal
from security.pki.seal import Seal, unsealed
from security.secure_aggregation.silo_memory import Forgotten, SiloMemory
from silo_agent.edges.lineages import Lineages
from silo_agent.edges.masking_journal import MaskingJournal
from silo_agent.policy import beginnings
from silo_wire.canonical import Digest
from silo_wire.secure_codec import memory_to_bytes
from tests.support.federation_peer import small_bundle
from tests.support.secagg_federation import FEDERATION, attempt, identity_key

SEAL = Seal(identity_key("silo-00"))
BUNDLE = small_bundle(
    aggregation={"secure_aggregation": True, "max_weight": 100.0}, schedule={"rounds": 9, "min_silos": 3}
)
PLAN = bytes.fromhex(BUNDLE.plan.digest)
MODEL = BUNDLE.plan.initial_model


def journal(folder: Path) -> MaskingJournal:
    """As each process opens it."""
    return MaskingJournal(folder / "masking", FEDERATION, SEAL)


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
    (lineage,) = Lineages(tmp_path / "lineages.json", SEAL).all()
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
    refused(tmp_path, r"lineages\.json is damaged")


def test_attack_a_damaged_memory_beside_no_list_is_not_taken_for_a_fresh_silos(tmp_path: Path) -> None:
    masked(tmp_path, 1)
    (tmp_path / "lineages.json").unlink()
    (tmp_path / "masking" / "memory").write_bytes(b"")
    refused(tmp_path, "masking/memory cannot be believed")


def sealed(name: str, content: bytes) -> bytes:
    return SEAL.sealed(name, content)


def test_attack_an_old_memory_in_place_of_a_newer_one(tmp_path: Path) -> None:
    old = SiloMemory(masked(tmp_path / "other", 1).plans)
    masked(tmp_path, 1, 2)
    (tmp_path / "masking" / "memory").write_bytes(sealed("memory", memory_to_bytes(old)))
    refused(tmp_path, "comes from a backup")


@pytest.mark.parametrize("edited", ["masking/memory", "lineages.json"])
@pytest.mark.parametrize("how", ["no seal", "another key's", "another file's", "of another content"])
def test_attack_what_somebody_else_wrote_is_not_believed_until_people_take_it_over(
    tmp_path: Path, edited: str, how: str
) -> None:
    """Who can write the folder, and has not the identity key: or an earlier release, which sealed nothing."""
    memory = masked(tmp_path, 1, 2)
    file = tmp_path / edited
    content, name = unsealed(file.read_bytes()), file.name
    wrong = {
        "no seal": content,
        "another key's": Seal(identity_key("silo-01")).sealed(name, content),
        "another file's": sealed("accepted.json", content),
        "of another content": content + sealed(name, content[:-1])[len(content) - 1 :],
    }[how]
    assert wrong != sealed(name, content) == file.read_bytes()
    file.write_bytes(wrong)
    refused(tmp_path, "no seal of this silo's" if how == "no seal" else "it was edited")
    taken = journal(tmp_path).reset()
    assert journal(tmp_path).memory() == taken
    assert taken.sequence > memory.sequence
    known = taken.of(PLAN)
    assert known is not None
    assert (known.round, known.answered) == (2, True)


def test_another_identity_key_seals_what_the_one_before_did_and_nothing_else(tmp_path: Path) -> None:
    memory = masked(tmp_path, 1)
    successor = Seal(identity_key("silo-00 anew"))

    def under_the_successor() -> MaskingJournal:
        return MaskingJournal(tmp_path / "masking", FEDERATION, successor)

    assert under_the_successor().problem() is not None
    for _ in range(2):  # and again after a crash
        journal(tmp_path).seal_anew(successor)
        assert under_the_successor().memory() == memory
    (tmp_path / "lineages.json").write_bytes(unsealed((tmp_path / "lineages.json").read_bytes()))
    under_the_successor().seal_anew(SEAL)
    assert "no seal" in str(journal(tmp_path).problem())


def test_what_others_saw_and_this_silo_forgot_stands_until_its_people_decide(tmp_path: Path) -> None:
    memory = masked(tmp_path, 1)
    journal(tmp_path).remember(memory.with_announced(bytes(32)))
    forgotten = Forgotten({b"n" * 32: "silo bank-b and silo clinic-c", b"o" * 32: "the coordinator"})
    journal(tmp_path).forgot(forgotten)
    for _ in range(2):
        refused(tmp_path, "silo bank-b and silo clinic-c and the coordinator saw keys of this silo")
        masked_on = SiloMemory.joined(memory, attempt(plan=PLAN, round=5))
        journal(tmp_path).remember(masked_on)  # an attempt that was under way does not make up for it
    journal(tmp_path).reset()
    memory = journal(tmp_path).memory()
    memory.check_remembers({"anybody": b"n" * 32, "the coordinator": b"o" * 32})
    with pytest.raises(Forgotten):
        memory.check_remembers({"anybody": b"p" * 32})


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
    lineages = Lineages(tmp_path / "lineages.json", SEAL)
    other = Digest("ab" * 32)
    for model in (MODEL, other, MODEL):
        lineages.saw(BUNDLE, model)
    (lineage,) = lineages.all()
    assert (lineage.models, lineage.layout, lineage.round) == ({MODEL, other}, BUNDLE.whole_layout.digest, 0)
    assert lineage.begins == {BUNDLE.plan.model.initial, BUNDLE.plan.model.initial_bfloat16}


def test_a_plan_that_an_earlier_release_noted_says_nothing_of_what_it_begins_from_until_it_goes_on(
    tmp_path: Path,
) -> None:
    lineages = Lineages(tmp_path / "lineages.json", SEAL)
    lineages.saw(BUNDLE, MODEL)
    content = json.loads(unsealed(lineages.path.read_bytes()))
    del content["plans"][BUNDLE.plan.digest]["begins"]
    lineages.path.write_bytes(sealed("lineages.json", json.dumps(content).encode()))
    (old,) = lineages.all()
    assert (old.layout, old.begins) == (None, None)
    lineages.saw(BUNDLE, MODEL)
    (noted,) = lineages.all()
    assert (noted.layout, noted.begins) == (BUNDLE.whole_layout.digest, beginnings(BUNDLE.plan))
