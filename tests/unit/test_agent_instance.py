"""Which process attends: a folder keeps its name, each start has a higher number."""

from contextlib import closing
from pathlib import Path

import pytest

from security.errors import StorageError
from silo_agent.edges.instance import next_instance
from silo_agent.edges.round_journal import RoundJournal
from tests.support.federation_peer import SILO


def journal(folder: Path) -> RoundJournal:
    folder.mkdir(exist_ok=True)
    return RoundJournal(folder / "journal.sqlite", updates=folder, silo=SILO)


def test_each_start_in_a_folder_succeeds_the_one_before(tmp_path: Path) -> None:
    instances = []
    for _ in range(3):
        with closing(journal(tmp_path)) as opened:
            instances.append(next_instance(opened))
    assert [len(instance) for instance in instances] == [16, 16, 16]
    assert len({instance[:8] for instance in instances}) == 1
    assert [int.from_bytes(instance[8:]) for instance in instances] == [1, 2, 3]


def test_two_folders_are_two_agents(tmp_path: Path) -> None:
    with closing(journal(tmp_path / "one")) as one, closing(journal(tmp_path / "two")) as two:
        assert next_instance(one)[:8] != next_instance(two)[:8]


@pytest.mark.parametrize("damaged", [("instance_starts", "many"), ("instance_folder", "xyz")])
def test_a_damaged_count_is_told(tmp_path: Path, damaged: tuple[str, str]) -> None:
    with closing(journal(tmp_path)) as opened:
        next_instance(opened)
        opened.set_fact(*damaged)
        with pytest.raises(StorageError, match="restore the silo's folder"):
            next_instance(opened)
