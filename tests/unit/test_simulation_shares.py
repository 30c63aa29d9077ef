"""How silos are shared out among workers, and what goes through their pipes; the processes run in
tests/integration/test_simulation.py."""

import pickle

import pytest

from lorica.simulation.workers.shares import shared_out, threads_of_a_worker
from lorica.simulation.workers.worker_messages import Raised
from lorica_security.errors import EXIT_CODES, LoricaError, PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.service.ports import WorkCancelled

SIZES = {SiloName(name): size for name, size in (("a", 10), ("b", 70), ("c", 20), ("d", 30), ("e", 20))}


def test_the_largest_silo_is_given_away_first_each_to_whoever_has_least() -> None:
    assert shared_out(SIZES, 1) == (("b", "d", "c", "e", "a"),)
    assert shared_out(SIZES, 2) == (("b", "a"), ("d", "c", "e"))
    assert shared_out(SIZES, 3) == (("b",), ("d", "a"), ("c", "e"))


def test_no_worker_is_without_a_silo() -> None:
    assert shared_out(SIZES, 9) == (("b",), ("d",), ("c",), ("e",), ("a",))
    assert shared_out(dict.fromkeys(SIZES, 0), 2) == (("a", "c", "e"), ("b", "d"))


def test_workers_share_the_cores_unless_they_are_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(7)))
    assert [threads_of_a_worker(0, workers) for workers in (1, 2, 3, 8)] == [0, 3, 2, 1]
    assert threads_of_a_worker(5, 8) == 5


@pytest.mark.parametrize("kind", [*EXIT_CODES, TrainingDiverged])
def test_an_error_comes_out_of_a_pipe_as_it_went_in(kind: type[LoricaError]) -> None:
    error = PolicyRefusal("max_rounds", "too many") if kind is PolicyRefusal else kind("too many")
    error.told_by_peer = True
    found = pickle.loads(pickle.dumps(Raised.of(error))).error()
    assert type(found) is kind
    assert str(found) == "too many"
    assert found.told_by_peer
    assert getattr(found, "rule", None) == ("max_rounds" if kind is PolicyRefusal else None)


def test_that_work_was_cancelled_comes_out_of_a_pipe_too() -> None:
    assert isinstance(pickle.loads(pickle.dumps(Raised.of(WorkCancelled()))).error(), WorkCancelled)
