"""What full disks and damaged files cost: the story is that of tests/support/fault_story.py."""

import os

import pytest

from lorica.soak.federation import COORDINATOR
from lorica_coordinator.edges.server.told import OWN_FILES
from tests.support.fault_story import CLINIC, HOSPITAL, INSURER, KILLS, LAST_ROUND, SHAPE, Told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small disks that this needs"),
]


def test_a_full_disk_at_a_silo_names_the_file_and_costs_it_the_round(told: Told) -> None:
    told.check_made_by(1, CLINIC, HOSPITAL)
    assert told.silo(1, INSURER).outcome == "declined"
    (failure,) = [record for record in told.story.logged(INSURER, "work-failed") if record["work"] == "FetchModel"][:1]
    assert failure["error"] == "StorageError"
    assert str(told.story.cache.folder) in failure["detail"]
    assert "No space left on device" in failure["detail"]
    assert str(told.story.root) not in told.silo(1, INSURER).detail, "a path of the silo was told to the coordinator"


def test_a_full_disk_at_the_coordinator_names_the_file_and_costs_the_silo_the_round(told: Told) -> None:
    told.check_made_by(2, CLINIC, HOSPITAL)
    assert told.silo(2, INSURER).outcome == "declined"
    refused = [record for record in told.story.logged(COORDINATOR, "call refused") if record["kind"] == "StorageError"]
    assert refused
    for record in refused:
        assert f"{INSURER}.delta" in record["error"]
        assert str(told.story.spools.folder) in record["error"]
        assert "No space left on device" in record["error"]
    heard = [record["detail"] for record in told.story.logged(INSURER, "work-failed")]
    assert any(OWN_FILES in detail for detail in heard)
    assert not any(str(told.story.spools.folder) in detail for detail in heard)


def test_a_full_disk_for_the_model_is_named_and_the_sum_waits_until_there_is_room(told: Told) -> None:
    told.check_made_by(1, CLINIC, HOSPITAL)
    complaints = told.story.failed_sums("No space left on device")
    assert complaints
    assert all(str(told.story.models.folder) in complaint for complaint in complaints)


def test_a_damaged_spool_is_named_and_left_out(told: Told) -> None:
    told.check_made_by(3, CLINIC, HOSPITAL)
    row = told.silo(3, INSURER)
    assert row.outcome == "refused"
    assert str(told.story.damaged[3].path) in row.detail


def test_a_damaged_base_of_a_sum_is_named_and_the_sum_waits_until_it_is_restored(told: Told) -> None:
    told.check_made_by(4, *SHAPE.silos)
    complaints = told.story.failed_sums("damaged")
    assert complaints
    assert all(str(told.story.damaged[4].path) in complaint for complaint in complaints)


def test_a_damaged_model_is_named_and_handed_out_once_it_is_restored(told: Told) -> None:
    path = str(told.story.damaged[5].path)
    refused = [record for record in told.story.logged(COORDINATOR, "call refused") if path in record["error"]]
    assert refused
    assert {record["kind"] for record in refused} == {"IntegrityError"}
    first = told.row(5, attempt=1)
    assert first.outcome == "abandoned"
    assert OWN_FILES in first.detail, "silos say what they were told"
    assert path not in first.detail
    assert told.row(5).outcome == "applied"
    outcomes = [silo.outcome for silo in told.row(5).silos]
    assert len(outcomes) >= 2, "agents start again one after the other: two are a quorum"
    assert set(outcomes) == {"committed"}


def test_everybody_is_in_again_afterwards_and_the_coordinator_never_fell(told: Told) -> None:
    told.check_made_by(LAST_ROUND, *SHAPE.silos)
    assert [death.kill for death in told.run.deaths] == list(KILLS)
    assert len(told.story.logged(COORDINATOR, "serving")) == 1 + sum(kill.process == COORDINATOR for kill in KILLS)
