"""Which process attends: a folder keeps its name, each start has a higher number."""

import shutil
from pathlib import Path

import pytest

from lorica_security.errors import StorageError
from silo_agent.edges.disk.instance import next_instance
from silo_agent.edges.disk.round_journal import RoundJournal
from tests.support.federation_peer import SILO


def start(folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    journal = RoundJournal(folder / "journal.sqlite", updates=folder, silo=SILO)
    try:
        return next_instance(journal, folder)
    finally:
        journal.close()


def test_each_start_in_a_folder_succeeds_the_one_before(tmp_path: Path) -> None:
    instances = [start(tmp_path / "silo") for _ in range(3)]
    assert [len(instance) for instance in instances] == [16, 16, 16]
    assert len({instance[:8] for instance in instances}) == 1
    assert [int.from_bytes(instance[8:]) for instance in instances] == [1, 2, 3]


def test_a_folder_that_was_moved_is_the_same_agent(tmp_path: Path) -> None:
    before = start(tmp_path / "silo")
    after = start((tmp_path / "silo").rename(tmp_path / "elsewhere"))
    assert after[:8] == before[:8]
    assert after > before


def test_two_folders_are_two_agents_also_when_one_is_a_copy(tmp_path: Path) -> None:
    one = start(tmp_path / "one")
    assert start(tmp_path / "two")[:8] != one[:8]
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert start(tmp_path / "copy")[:8] != one[:8]


@pytest.mark.parametrize("damaged", ["many", "-7", str(1 << 70)])
def test_a_damaged_count_is_told(tmp_path: Path, damaged: str) -> None:
    start(tmp_path)
    journal = RoundJournal(tmp_path / "journal.sqlite", updates=tmp_path, silo=SILO)
    journal.set_fact("instance_starts", damaged)
    journal.close()
    with pytest.raises(StorageError, match="was damaged"):
        start(tmp_path)
