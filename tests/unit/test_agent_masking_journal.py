"""What a silo keeps of secure aggregation over a crash, and what it must not keep."""

import os
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, IntegrityError, PolicyRefusal
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.silo.events import AttemptEnded, OpenAttempt, VectorMasked
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from silo_agent.edges.memory.masking_journal import MaskingJournal
from silo_wire.manifest import manifest_of, masked_layout
from tests.support.secagg_federation import FEDERATION, attempt, entropy, identity_key, opening

SEAL = Seal(identity_key("silo-00"))
VECTOR = VectorMasked(entropy("vector"))


@pytest.fixture
def journal(tmp_path: Path) -> MaskingJournal:
    return MaskingJournal(tmp_path / "masking", FEDERATION, SEAL)


def again(journal: MaskingJournal) -> MaskingJournal:
    """As the next process opens it."""
    return MaskingJournal(journal.vector_file.parent, FEDERATION, SEAL)


def begun() -> OpenAttempt:
    return opening("silo-00", attempt())


def test_an_attempt_is_read_back_as_it_was_written(journal: MaskingJournal) -> None:
    assert journal.events() == ()
    event = begun()
    journal.append(event)
    journal.append(VECTOR)
    first, second = again(journal).events()
    assert isinstance(first, OpenAttempt)
    assert (first.attempt, first.model, first.tensors) == (event.attempt, event.model, event.tensors)
    assert bytes(first.root.buffer) == bytes(event.root.buffer)
    assert second == VECTOR


def test_the_memory_outlives_attempts(journal: MaskingJournal) -> None:
    assert journal.memory() == SiloMemory()
    memory = SiloMemory()
    for change in (SiloMemory.joined, SiloMemory.answered):
        memory = change(memory, attempt())
        journal.remember(memory)
    journal.append(begun())
    journal.erase()
    assert again(journal).memory() == memory


def test_an_event_that_a_crash_tore_is_cut_off_and_the_next_one_follows_what_is_whole(journal: MaskingJournal) -> None:
    journal.append(begun())
    path = journal.vector_file.parent / "attempt"
    whole = path.stat().st_size
    journal.append(VECTOR)
    for torn in (1, 5, path.stat().st_size - whole - 1):
        os.truncate(path, whole + torn)
        (only,) = again(journal).events()
        assert isinstance(only, OpenAttempt)
        assert path.stat().st_size == whole
        again(journal).append(VECTOR)
        assert again(journal).events()[1] == VECTOR


def test_a_journal_that_a_crash_left_half_erased_is_no_attempt_any_more(journal: MaskingJournal) -> None:
    journal.append(begun())
    journal.append(VECTOR)
    path = journal.vector_file.parent / "attempt"
    raw = path.read_bytes()
    for zeros in (4, 40, len(raw)):
        path.write_bytes(bytes(zeros) + raw[zeros:])
        assert again(journal).events() == ()
    again(journal).erase()
    assert not path.exists()
    journal.append(begun())
    assert len(again(journal).events()) == 1


def test_a_damaged_attempt_is_forfeited_and_never_guessed_at(journal: MaskingJournal) -> None:
    journal.append(begun())
    journal.append(VECTOR)
    path = journal.vector_file.parent / "attempt"
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="forfeited"):
        again(journal).events()


def test_a_damaged_or_emptied_memory_is_refused_since_a_silo_could_be_led_into_two_sums(
    journal: MaskingJournal,
) -> None:
    journal.remember(SiloMemory().joined(attempt()))
    path = journal.vector_file.parent / "memory"
    for damage in (b"", path.read_bytes()[:-1], bytes(len(path.read_bytes()))):
        path.write_bytes(damage)
        with pytest.raises(PolicyRefusal, match=r"two sums.*reset-memory") as refusal:
            again(journal).memory()
        assert refusal.value.rule == "masking_memory"


def test_others_can_read_nothing_of_it(journal: MaskingJournal) -> None:
    journal.append(begun())
    journal.remember(SiloMemory())
    journal.keep_manifest(manifest_of(masked_layout(2), [bytes(8)], 4))
    folder = journal.vector_file.parent
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    (folder / "attempt").chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        again(journal).events()


def test_erasing_overwrites_the_root_before_the_file_goes(journal: MaskingJournal, tmp_path: Path) -> None:
    event = begun()
    journal.append(event)
    journal.vector_file.write_bytes(b"masked")
    journal.keep_manifest(manifest_of(masked_layout(2), [bytes(8)], 4))
    folder = journal.vector_file.parent
    os.link(folder / "attempt", tmp_path / "link")  # what was on the disk under that name
    journal.erase()
    assert [path.name for path in folder.iterdir()] == ["spare"]
    left = (tmp_path / "link").read_bytes()
    assert bytes(event.root.buffer) not in left
    assert left == bytes(len(left))
    journal.erase()
    assert journal.events() == ()


def test_the_file_of_a_vector_is_written_over_by_the_next_one(journal: MaskingJournal) -> None:
    assert not journal.new_vector_file().exists()
    journal.vector_file.write_bytes(b"masked")
    file = journal.vector_file.stat().st_ino
    journal.erase()
    assert not journal.vector_file.exists()
    assert journal.new_vector_file().stat().st_ino == file
    assert again(journal).new_vector_file().stat().st_ino == file  # after a crash that left it half written
    journal.erase()
    assert journal.new_vector_file().stat().st_ino == file


def test_the_manifest_of_the_vector_is_read_back_or_refused(journal: MaskingJournal) -> None:
    manifest = manifest_of(masked_layout(2), [bytes(8)], 4)
    journal.keep_manifest(manifest)
    assert again(journal).manifest() == manifest
    (journal.vector_file.parent / "vector.manifest").write_bytes(b"\xff\xff")
    with pytest.raises(IntegrityError, match="forfeited"):
        again(journal).manifest()


def test_the_end_of_an_attempt_is_an_event_like_any_other(journal: MaskingJournal) -> None:
    journal.append(begun())
    journal.append(AttemptEnded(attempt()))
    assert again(journal).events()[1] == AttemptEnded(attempt())
