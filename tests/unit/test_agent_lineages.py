"""A silo that forgot what it masked notices: masking/memory and lineages.json stand apart, and each shows the other's
loss."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError, PolicyRefusal
from lorica_security.host.files import write_private
from lorica_security.identifiers import SiloName
from lorica_security.identity.seal import Seal, unsealed
from lorica_security.secure_aggregation.groups.release_groups import (
    Link,
    Partition,
    SignedLink,
    first_link,
    signature_of,
    successor,
)
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import Forgotten, SiloMemory
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.group_chain import GroupChain
from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
from silo_agent.edges.memory.identity_succession import seal_anew
from silo_agent.edges.memory.lineages import MORE_MODELS, Lineages
from silo_agent.edges.memory.masking_journal import MaskingJournal, masking_journal
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.record import beginnings
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.canonical import Digest
from silo_wire.codecs.groups_codec import GroupsOffer, KnownIdentity
from silo_wire.codecs.secure_journals_codec import memory_to_bytes
from tests.support.federation_peer import TestNet, small_bundle
from tests.support.secagg_federation import FEDERATION, attempt, identity_key, opening, party, silo_names

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


@pytest.mark.parametrize("before", ["two models were seen", "people reset it"])
def test_attack_a_memory_that_was_deleted_before_anything_was_masked_is_missed(tmp_path: Path, before: str) -> None:
    if before == "people reset it":
        journal(tmp_path).reset()
    else:
        for number in range(2):
            journal(tmp_path).saw(BUNDLE, Digest(f"{number:064x}"))
    (tmp_path / "masking" / "memory").unlink()
    refused(tmp_path, "masking/memory is missing")


def test_attack_a_lost_list_of_lineages_is_not_taken_for_a_fresh_silos(tmp_path: Path) -> None:
    masked(tmp_path, 1)
    (tmp_path / "lineages.json").unlink()
    refused(tmp_path, r"lineages\.json is missing or comes from a backup")
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
    folder = SiloFolder(tmp_path)
    for path in (folder.release_groups, folder.accepted, folder.approvals):
        write_private(path, sealed(path.name, b"content"))

    def under_the_successor() -> MaskingJournal:
        return MaskingJournal(tmp_path / "masking", FEDERATION, successor)

    with pytest.raises(PolicyRefusal):
        under_the_successor().memory()
    for _ in range(2):  # and again after a crash
        seal_anew(folder, SEAL, successor)
        assert under_the_successor().memory() == memory
        for path in (folder.release_groups, folder.accepted, folder.approvals):
            assert successor.opened(path.name, path.read_bytes()) == b"content"
    folder.lineages.write_bytes(unsealed(folder.lineages.read_bytes()))
    seal_anew(folder, successor, SEAL)
    assert "no seal" in str(journal(tmp_path).problem())


def test_what_others_saw_and_this_silo_forgot_stands_until_its_people_decide(tmp_path: Path) -> None:
    memory = masked(tmp_path, 1).with_announced(bytes(32))
    journal(tmp_path).remember(memory)
    forgotten = Forgotten({b"n" * 32: "silo bank-b and silo clinic-c", b"o" * 32: "the coordinator"})
    journal(tmp_path).forgot(forgotten)
    for _ in range(2):
        refused(tmp_path, "silo bank-b and silo clinic-c and the coordinator saw keys of this silo")
        masked_on = memory.joined(attempt(plan=PLAN, round=5))
        with pytest.raises(PolicyRefusal, match="saw keys of this silo"):
            journal(tmp_path).remember(masked_on)  # an attempt that was under way does not make up for it
        with pytest.raises(PolicyRefusal, match="saw keys of this silo"):
            journal(tmp_path).saw(BUNDLE, Digest("ab" * 32))
    journal(tmp_path).reset()
    memory = journal(tmp_path).memory()
    memory.check_remembers({"anybody": b"n" * 32, "the coordinator": b"o" * 32})
    with pytest.raises(Forgotten):
        memory.check_remembers({"anybody": b"p" * 32})


def test_a_kill_between_the_two_files_costs_nothing(tmp_path: Path) -> None:
    """At any of a round's steps, whichever of the two is written first: as the machine takes them, one change each."""
    names = silo_names(3)
    each, folder = party("silo-00", names), tmp_path / "silo"
    masked(folder, 1)
    for number in range(2, 12):
        journal(folder).saw(BUNDLE, Digest(f"{number:064x}"))
        memory = journal(folder).memory()
        _, effects = silo_machine.step(
            silo_states.Resting(memory), opening("silo-00", attempt(plan=PLAN, round=number)), each
        )
        (joined,) = [effect.memory for effect in effects if isinstance(effect, silo_effects.Remember)]
        answered = joined.answered(attempt(plan=PLAN, round=number))
        for before, after in ((memory, joined), (joined, answered)):
            journal(folder).remember(before)  # makes up for what the kill before left
            with killed_before(Lineages, "mark"):
                journal(folder).remember(after)
            assert journal(folder).memory() == after
        with killed_before(Lineages, "mark"):
            journal(folder).remember(answered)  # while it is made up for
        journal(folder).remember(answered)
        with killed_before(MaskingJournal, "_write"):
            journal(folder).saw(BUNDLE, Digest(f"{number + 1:064x}"))
        assert journal(folder).memory() == answered


@contextmanager
def killed_before(kind: type, call: str, *, nth: int = 1) -> Iterator[None]:
    calls, real = count(1), getattr(kind, call)

    def dies(*arguments: object) -> object:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, call, dies)
        try:
            yield
        except KeyboardInterrupt:
            return
    raise AssertionError(f"nobody came to {call}")


@pytest.mark.parametrize("what", ["a model", "what others saw"])
def test_attack_a_list_of_lineages_put_back_to_before_it_noted_something(tmp_path: Path, what: str) -> None:
    """That is no step of the memory's, and is counted all the same."""
    masked(tmp_path, 1)
    copy = (tmp_path / "lineages.json").read_bytes()
    if what == "a model":
        journal(tmp_path).saw(BUNDLE, Digest("22" * 32))
    else:
        journal(tmp_path).forgot(Forgotten({b"n" * 32: "silo bank-b"}))
    (tmp_path / "lineages.json").write_bytes(copy)
    refused(tmp_path, r"lineages\.json is missing or comes from a backup")


@pytest.mark.parametrize("how", ["deleted", "put back"])
@pytest.mark.parametrize("next_is", ["remembers", "sees a model"])
def test_attack_a_list_of_lineages_lost_while_the_agent_runs_is_not_written_anew(
    tmp_path: Path, how: str, next_is: str
) -> None:
    masked(tmp_path, 1)
    running, copy = journal(tmp_path), (tmp_path / "lineages.json").read_bytes()
    masked(tmp_path, 2)
    memory = running.memory()
    if how == "deleted":
        (tmp_path / "lineages.json").unlink()
    else:
        (tmp_path / "lineages.json").write_bytes(copy)
    left = contents(tmp_path)
    change = {
        "remembers": lambda: running.remember(memory.joined(attempt(plan=PLAN, round=3))),
        "sees a model": lambda: running.saw(BUNDLE, Digest("22" * 32)),
    }[next_is]
    with pytest.raises(PolicyRefusal, match=r"lineages\.json is missing or comes from a backup"):
        change()
    assert contents(tmp_path) == left
    with pytest.raises(PolicyRefusal, match=r"lineages\.json is missing or comes from a backup"):
        Lineages(tmp_path / "lineages.json", SEAL).mark(memory.joined(attempt(plan=PLAN, round=3)))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_attack_a_memory_that_people_reset_is_not_written_over_by_who_remembers_another_one(tmp_path: Path) -> None:
    stale = masked(tmp_path, 1, 2)
    (tmp_path / "lineages.json").unlink()
    reset = journal(tmp_path).reset()
    skips = reset.joined(attempt(plan=PLAN, round=3)).joined(attempt(plan=PLAN, round=4))
    for another in (stale.joined(attempt(plan=PLAN, round=3)), skips):
        with pytest.raises(PolicyRefusal, match="was changed by somebody else"):
            journal(tmp_path).remember(another)
        assert journal(tmp_path).memory() == reset


@pytest.mark.parametrize("which", ["masking/memory", "lineages.json"])
def test_attack_a_file_of_the_same_change_that_says_less(tmp_path: Path, which: str) -> None:
    """As a memory that was wound back leaves it: counts agree, rounds do not."""
    masked(tmp_path, 3)
    masked(tmp_path / "other", 1)
    (tmp_path / which).write_bytes((tmp_path / "other" / which).read_bytes())
    refused(tmp_path, f"{which} comes from a backup: .* round 3")


def test_attack_a_list_of_lineages_of_the_same_change_knows_another_plan(tmp_path: Path) -> None:
    """Of a silo with the same key, which did as much: only what was masked under is another plan."""
    masked(tmp_path, 1)
    other = small_bundle(
        aggregation={"secure_aggregation": True, "max_weight": 100.0}, schedule={"rounds": 8, "min_silos": 3}
    )
    elsewhere = journal(tmp_path / "other")
    elsewhere.saw(other, other.plan.initial_model)
    memory = elsewhere.memory()
    for change in (SiloMemory.joined, SiloMemory.answered):
        memory = change(memory, attempt(plan=bytes.fromhex(other.plan.digest), round=1))
        elsewhere.remember(memory)
    (tmp_path / "lineages.json").write_bytes((tmp_path / "other" / "lineages.json").read_bytes())
    refused(tmp_path, f"it does not know of plan {BUNDLE.plan.digest[:16]}")


def test_attack_a_memory_put_back_to_before_models_were_noted(tmp_path: Path) -> None:
    """It says no less of rounds, and is not the newest."""
    masked(tmp_path, 1)
    copy = (tmp_path / "masking" / "memory").read_bytes()
    for number in range(2):
        journal(tmp_path).saw(BUNDLE, Digest(f"{number:064x}"))
    (tmp_path / "masking" / "memory").write_bytes(copy)
    refused(tmp_path, "masking/memory comes from a backup")


def test_attack_a_memory_of_the_same_change_knows_of_no_plan(tmp_path: Path) -> None:
    memory = masked(tmp_path, 3)
    less = sealed("memory", memory_to_bytes(replace(memory, plans=()), lineages=1))
    assert sealed("memory", memory_to_bytes(memory, lineages=1)) == (tmp_path / "masking" / "memory").read_bytes()
    (tmp_path / "masking" / "memory").write_bytes(less)
    refused(tmp_path, "knows of round 3 of plan .*, it of none")


@pytest.mark.parametrize("damage", [b"{", b"", b"[]"])
def test_a_list_of_lineages_that_does_not_parse_is_as_good_as_none_for_people_who_decide(
    tmp_path: Path, damage: bytes
) -> None:
    masked(tmp_path, 1, 2)
    (tmp_path / "lineages.json").write_bytes(damage)
    refused(tmp_path, r"lineages\.json is damaged")
    journal(tmp_path).reset()
    known = journal(tmp_path).memory().of(PLAN)
    assert known is not None
    assert (known.round, known.answered) == (2, True)
    (lineage,) = Lineages(tmp_path / "lineages.json", SEAL).all()
    assert lineage.layout is None, "of which models it was is not known any more"


@pytest.mark.parametrize("elsewhere", [("masking/memory",), ("lineages.json",), ("masking/memory", "lineages.json")])
def test_attack_a_link_that_leads_nowhere_is_not_taken_for_a_fresh_silos(
    tmp_path: Path, elsewhere: tuple[str, ...]
) -> None:
    """A disk that is not mounted."""
    masked(tmp_path, 1)
    for name in elsewhere:
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to(f"/not/mounted/{name}")
    refused(tmp_path, f"is a link to /not/mounted/{elsewhere[0]}, which is missing")
    with pytest.raises(ConfigurationError, match="which is missing"):
        journal(tmp_path).reset()


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


def test_an_attempt_that_was_under_way_is_gone_after_a_reset(tmp_path: Path) -> None:
    """It was begun under another memory, and its root would make the same keys again."""
    masked(tmp_path, 1)
    journal(tmp_path).append(opening("silo-00", attempt(plan=PLAN, round=2)))
    assert journal(tmp_path).events()
    journal(tmp_path).reset()
    assert journal(tmp_path).events() == ()


@pytest.mark.parametrize("put_back", ["masking/memory", "lineages.json"])
def test_of_a_file_that_was_put_back_people_go_on_from_the_later_round_of_the_two(
    tmp_path: Path, put_back: str
) -> None:
    masked(tmp_path, 1)
    copy = (tmp_path / put_back).read_bytes()
    masked(tmp_path, 2, 3)
    (tmp_path / put_back).write_bytes(copy)
    journal(tmp_path).reset()
    known = journal(tmp_path).memory().of(PLAN)
    assert known is not None
    assert (known.round, known.answered) == (3, True)


def test_attack_a_memory_of_before_a_reset_is_put_back_after_it(tmp_path: Path) -> None:
    """It is of the same round, and does not say that this silo answered."""
    journal(tmp_path).saw(BUNDLE, MODEL)
    joined = journal(tmp_path).memory().joined(attempt(plan=PLAN, round=1))
    journal(tmp_path).remember(joined)
    copy = (tmp_path / "masking" / "memory").read_bytes()
    journal(tmp_path).remember(joined.answered(attempt(plan=PLAN, round=1)))
    (tmp_path / "masking" / "memory").unlink()
    journal(tmp_path).reset()
    (tmp_path / "masking" / "memory").write_bytes(copy)
    refused(tmp_path, "masking/memory comes from a backup")


def test_after_a_reset_the_model_after_a_round_may_be_another_one_and_that_one_stays(tmp_path: Path) -> None:
    """Of a round that comes now nothing has left: people go on with what the coordinator has."""
    first, second = Digest("ab" * 32), Digest("cd" * 32)
    masked(tmp_path, 1)
    journal(tmp_path).saw(BUNDLE, first, 1)
    journal(tmp_path).reset()
    journal(tmp_path).saw(BUNDLE, second, 1)
    with pytest.raises(PolicyRefusal, match=f"{first} is handed out .* after round 1, where"):
        journal(tmp_path).saw(BUNDLE, first, 1)


def test_models_of_plans_are_kept_and_each_once(tmp_path: Path) -> None:
    lineages = Lineages(tmp_path / "lineages.json", SEAL)
    other = Digest("ab" * 32)
    for model in (MODEL, other, MODEL):
        lineages.saw(BUNDLE, model)
    (lineage,) = lineages.all()
    assert (lineage.models, lineage.layout, lineage.round) == ({MODEL, other}, BUNDLE.whole_layout.digest, 0)
    assert lineage.begins == {BUNDLE.plan.model.initial, BUNDLE.plan.model.initial_bfloat16}


def test_a_change_of_lineages_reads_the_file_once_and_what_is_known_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineages = Lineages(tmp_path / "lineages.json", SEAL)
    assert not lineages.hold_pins(0)
    assert not (tmp_path / "lineages.json").exists(), "no file is made to say nothing"
    assert lineages.hold_pins(1)
    reads: list[Path] = []

    def counted(path: Path) -> bytes:
        reads.append(path)
        return path.read_bytes()

    monkeypatch.setattr("silo_agent.edges.disk.private_record.read_private", counted)
    before = (tmp_path / "lineages.json").stat().st_mtime_ns
    assert not lineages.hold_pins(1)
    assert (tmp_path / "lineages.json").stat().st_mtime_ns == before
    assert lineages.hold_pins(2)
    assert len(reads) == 2, "one of each call"


def test_attack_a_second_model_in_the_place_of_one_is_refused_for_good(tmp_path: Path) -> None:
    """Also where the journal of rounds was lost, which knows the same."""
    first, second = Digest("ab" * 32), Digest("cd" * 32)
    for _ in range(2):
        journal(tmp_path).saw(BUNDLE, MODEL, 0)
        journal(tmp_path).saw(BUNDLE, first, 1)
    left = contents(tmp_path)
    for model, number in ((second, 1), (MODEL, 1), (first, 0)):
        with pytest.raises(PolicyRefusal, match=f"{model} is handed out .* after round {number}, where") as refusal:
            journal(tmp_path).saw(BUNDLE, model, number)
        assert refusal.value.rule == "one_model"
    assert contents(tmp_path) == left
    journal(tmp_path).saw(BUNDLE, second, 2)
    journal(tmp_path).saw(BUNDLE, second)
    (lineage,) = Lineages(tmp_path / "lineages.json", SEAL).all()
    assert lineage.models == {MODEL, first, second}


def test_attack_a_plan_has_no_more_models_than_it_can_have(tmp_path: Path) -> None:
    lineages = Lineages(tmp_path / "lineages.json", SEAL)
    room = BUNDLE.plan.schedule.rounds + 1 + MORE_MODELS
    for number in range(room):
        lineages.saw(BUNDLE, Digest(f"{number:064x}"))
    size = lineages.path.stat().st_size
    with pytest.raises(PolicyRefusal, match=f"model {room + 1} of plan .* more than there can be") as refusal:
        lineages.saw(BUNDLE, Digest("ab" * 32))
    assert refusal.value.rule == "one_model"
    assert lineages.path.stat().st_size == size
    assert not lineages.saw(BUNDLE, Digest(f"{0:064x}"))


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


# --- release groups, of which lineages.json notes each change
# -----------------------------------------------------------

NAMES = silo_names(6)
EVERYBODY = first_link(FEDERATION, Partition.of([NAMES]))
NEWCOMERS = [
    successor(EVERYBODY, Partition.of([NAMES, [SiloName(f"{letter}-{index}") for index in range(3)]]))
    for letter in "xy"
]
"""Two successors, of which neither needs people's word."""


def chain(folder: Path) -> GroupChain:
    """As each process opens it."""
    keys = {name: identity_key(name).public_key() for name in NAMES}
    return GroupChain(
        folder / "release-groups.json",
        federation=FEDERATION,
        silo=NAMES[0],
        own_key=keys.pop(NAMES[0]),
        pinned=lambda: keys,
        smallest_group=3,
        colluders=0,
        seal=SEAL,
        keeper=journal(folder),
    )


def offered(proposed: Link | None = None, *held: Link) -> GroupsOffer:
    links = tuple(
        SignedLink(link=link, signatures=tuple((name, signature_of(link, identity_key(name))) for name in NAMES))
        for link in held or (EVERYBODY,)
    )
    return GroupsOffer(links=links, proposed=None if proposed is None else SignedLink(link=proposed), identities=())


def test_release_groups_are_noted_and_a_kill_before_they_are_costs_nothing(tmp_path: Path) -> None:
    with killed_before(Lineages, "hold", nth=2):
        chain(tmp_path).take(offered())
    assert chain(tmp_path).head == EVERYBODY
    assert journal(tmp_path).problem() is None
    with killed_before(Lineages, "hold"):
        chain(tmp_path).take(offered(NEWCOMERS[0]))  # while it is made up for
    with killed_before(Lineages, "hold", nth=2):
        chain(tmp_path).take(offered(NEWCOMERS[0]))
    assert journal(tmp_path).problem() is None
    assert chain(tmp_path).take(offered(NEWCOMERS[0])).to_sign == (NEWCOMERS[0],)
    with killed_before(MaskingJournal, "_write"):
        chain(tmp_path).withdraw(NEWCOMERS[0].digest.hex())
    assert chain(tmp_path).take(offered(NEWCOMERS[1])).to_sign == (NEWCOMERS[1],)
    assert chain(tmp_path).head == EVERYBODY
    assert journal(tmp_path).problem() is None
    before = contents(tmp_path)
    chain(tmp_path).take(offered(NEWCOMERS[1]))
    assert contents(tmp_path) == before, "nothing new is nothing written"


@pytest.mark.parametrize("how", ["deleted", "put back", "another's"])
def test_attack_release_groups_that_were_lost_sign_no_second_successor(tmp_path: Path, how: str) -> None:
    chain(tmp_path).take(offered())
    file = tmp_path / "release-groups.json"
    copy = file.read_bytes()
    assert chain(tmp_path).take(offered(NEWCOMERS[0])).to_sign == (NEWCOMERS[0],)
    if how == "deleted":
        file.unlink()
    else:
        file.write_bytes(copy if how == "put back" else unsealed(copy))
    says = "no seal" if how == "another's" else r"release-groups\.json is missing or comes from a backup"
    left = contents(tmp_path)
    for call in (lambda: chain(tmp_path).take(offered(NEWCOMERS[1])), lambda: chain(tmp_path).head):
        with pytest.raises(ConfigurationError if how == "another's" else PolicyRefusal, match=says):
            call()
    assert contents(tmp_path) == left
    problem = journal(tmp_path).problem()
    assert problem is not None
    assert problem.rule == "masking_memory"
    assert "silo-agent trust reset-memory" in str(problem)

    journal(tmp_path).reset()  # by its people
    assert journal(tmp_path).problem() is None
    assert not chain(tmp_path).is_new, "no key is taken on first use any more"
    with pytest.raises(PolicyRefusal, match="has signed"):
        chain(tmp_path).take(offered(NEWCOMERS[1]))
    assert chain(tmp_path).take(offered(NEWCOMERS[0])).to_sign == (NEWCOMERS[0],)
    assert chain(tmp_path).head == EVERYBODY


@pytest.mark.parametrize("how", ["deleted", "put back"])
def test_attack_of_two_successors_that_were_signed_the_last_stays_the_only_one_after_a_reset(
    tmp_path: Path, how: str
) -> None:
    """People took the first one back, and others may have taken the second."""
    first = GroupsOffer(links=(), proposed=SignedLink(link=EVERYBODY), identities=())
    assert chain(tmp_path).take(first).to_sign == (EVERYBODY,)
    assert chain(tmp_path).take(offered(NEWCOMERS[0])).to_sign == (NEWCOMERS[0],)
    file = tmp_path / "release-groups.json"
    copy = file.read_bytes()
    chain(tmp_path).withdraw(NEWCOMERS[0].digest.hex())
    assert chain(tmp_path).take(offered(NEWCOMERS[1])).to_sign == (NEWCOMERS[1],)
    if how == "deleted":
        file.unlink()
    else:
        file.write_bytes(copy)
    journal(tmp_path).reset()
    with pytest.raises(PolicyRefusal, match=f"has signed {NEWCOMERS[1].digest.hex()[:16]} in their place"):
        chain(tmp_path).take(offered(NEWCOMERS[0]))
    assert chain(tmp_path).take(offered(NEWCOMERS[1])).to_sign == (NEWCOMERS[1],)


def test_attack_links_before_the_one_that_was_lost_are_not_held_again(tmp_path: Path) -> None:
    chain(tmp_path).take(offered(None, EVERYBODY, NEWCOMERS[0]))
    assert chain(tmp_path).head == NEWCOMERS[0]
    (tmp_path / "release-groups.json").unlink()
    journal(tmp_path).reset()
    chain(tmp_path).take(offered())
    assert chain(tmp_path).head is None
    chain(tmp_path).take(offered(None, EVERYBODY, NEWCOMERS[0]))
    assert chain(tmp_path).head == NEWCOMERS[0]


def test_attack_the_other_two_files_lost_beside_release_groups_are_not_taken_for_a_fresh_silos(tmp_path: Path) -> None:
    chain(tmp_path).take(offered())
    chain(tmp_path).take(offered(NEWCOMERS[0]))
    shutil.rmtree(tmp_path / "masking")
    (tmp_path / "lineages.json").unlink()
    assert "lineages.json is missing" in str(journal(tmp_path).problem())
    journal(tmp_path).reset()
    assert journal(tmp_path).problem() is None
    assert chain(tmp_path).head == EVERYBODY


def test_first_use_is_over_for_a_silo_that_masked_also_where_nothing_of_its_groups_is_left(tmp_path: Path) -> None:
    assert chain(tmp_path).is_new
    masked(tmp_path, 1)
    (tmp_path / "masking" / "memory").unlink()
    journal(tmp_path).reset()
    assert not chain(tmp_path).is_new


async def test_attack_lost_release_groups_do_not_open_first_use_again(tmp_path: Path) -> None:
    """A coordinator that then comes with silos of its own making finds nobody pinned by itself."""
    credentials = TestNet.create().credentials("127.0.0.1:1", NAMES[0])
    folder, rules = SiloFolder(tmp_path / "silo"), PolicyRules(trust_on_first_use=True)
    folder.make()
    pins = trust_store(folder, credentials, first_use=True)

    async def asked(*silos: SiloName) -> set[SiloName]:
        wire = OfferingOnly(silos)
        policy = SiloPolicy(rules=rules, silo=NAMES[0])
        chain = group_chain(folder, credentials, policy)
        await ReleaseGroups(chain, pins, credentials, client=wire, first_use=True).sync()
        return {peer.silo for peer in pins.peers()}

    assert await asked(*NAMES[:3]) == set(NAMES[1:3]), "it needs no pin of itself"
    policy = SiloPolicy(rules=rules, silo=NAMES[0])
    first = first_link(credentials.federation, Partition.of([NAMES[:3]]))
    keys = {NAMES[0]: credentials.identity_key, **{name: identity_key(name) for name in NAMES[1:3]}}
    signatures = tuple((name, signature_of(first, key)) for name, key in sorted(keys.items()))
    held = SignedLink(link=first, signatures=signatures)
    group_chain(folder, credentials, policy).take(GroupsOffer(links=(held,), proposed=None, identities=()))
    assert not group_chain(folder, credentials, policy).is_new
    folder.release_groups.unlink()
    with pytest.raises(PolicyRefusal, match="release-groups\\.json is missing"):
        await asked(NAMES[3])
    masking_journal(folder, credentials).reset()
    assert await asked(NAMES[3]) == set(NAMES[1:3])


async def test_groups_that_promise_less_than_policy_end_in_a_refusal_that_says_so(tmp_path: Path) -> None:
    credentials = TestNet.create().credentials("127.0.0.1:1", NAMES[0])
    folder, policy = SiloFolder(tmp_path / "silo"), SiloPolicy(rules=PolicyRules(colluders=1), silo=NAMES[0])
    folder.make()
    wire = OfferingOnly(())
    proposed = SignedLink(link=first_link(credentials.federation, Partition.of([NAMES])))
    wire.offer = GroupsOffer(links=(), proposed=proposed, identities=())
    groups = ReleaseGroups(
        group_chain(folder, credentials, policy), trust_store(folder, credentials), credentials, client=wire
    )
    with pytest.raises(PolicyRefusal, match="colluders 0 instead of 1") as refusal:
        await groups.sync()
    assert refusal.value.rule == "release_groups"


class OfferingOnly:
    """A coordinator that has silos and no release groups."""

    def __init__(self, silos: Iterable[SiloName]) -> None:
        known = (KnownIdentity(silo=name, key=identity_key(name).public_key()) for name in silos)
        self.offer = GroupsOffer(links=(), proposed=None, identities=tuple(known))

    async def fetch_groups(self, after: int, *, held: Sequence[SignedLink] = ()) -> GroupsOffer:
        return self.offer

    async def sign_groups(self, link: bytes, signature: bytes) -> None:
        raise AssertionError("nothing is proposed")


def test_a_silo_that_is_behind_signs_no_release_groups(tmp_path: Path) -> None:
    chain(tmp_path).take(offered())
    journal(tmp_path).forgot(Forgotten({b"n" * 32: "silo bank-b"}))
    with pytest.raises(PolicyRefusal, match="saw keys of this silo"):
        chain(tmp_path).take(offered(NEWCOMERS[0]))
    assert chain(tmp_path).head == EVERYBODY
