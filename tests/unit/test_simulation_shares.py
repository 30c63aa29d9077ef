"""How silos are shared out among workers, and what goes through their pipes; the processes run in
tests/integration/test_simulation.py."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica.simulation.silo import settings_of
from lorica.simulation.workers.shares import devices_in_turn, shared_out, threads_of_a_worker
from lorica.simulation.workers.worker_messages import Raised, WorkerSilo
from lorica.simulation.workers.worker_pool import on_their_devices
from lorica_security.errors import EXIT_CODES, ConfigurationError, LoricaError, PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_agent.policy.silo_policy import SiloPolicy
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


@given(devices=st.lists(st.sampled_from(["cpu", "cpu:0", "cpu:1"]), min_size=1, max_size=9), more=st.integers(0, 9))
def test_workers_get_the_devices_in_turn_and_no_device_is_without_a_worker(devices: list[str], more: int) -> None:
    workers = len(devices) + more
    found = devices_in_turn(devices, device="auto", workers=workers)
    assert len(found) == workers
    assert list(found[: len(devices)]) == devices
    assert all(found[number] == found[number - len(devices)] for number in range(len(devices), workers))


def test_one_device_is_of_all_workers() -> None:
    assert devices_in_turn((), device="cuda:3", workers=2) == ("cuda:3", "cuda:3")


@pytest.mark.parametrize(
    ("devices", "device", "workers", "said"),
    [
        (["cpu", "cpu"], "cpu", 2, "--device cpu is of all workers, and --devices of each"),
        (["cpu", "cpu"], "auto", 1, "names 2 devices, and 1 of them would have a worker"),
        (["cpu", "cuda:99"], "auto", 2, "device = 'cuda:99' is not there"),
        (["cpu", ""], "auto", 2, "device = '': give auto, cpu, cuda or cuda:N"),
    ],
)
def test_devices_that_workers_cannot_have_are_refused(devices: list[str], device: str, workers: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        devices_in_turn(devices, device=device, workers=workers)


def test_a_silo_is_on_the_device_of_its_worker(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, device="auto", threads=3)
    policy = SiloPolicy(rules=settings.policy, silo=SiloName("a"))
    silo = WorkerSilo(settings=settings, policy=policy, scratch=tmp_path, losses=tmp_path / "losses.jsonl")
    placed = on_their_devices(dict.fromkeys(SIZES, silo), shared_out(SIZES, 2), ["cuda:0", "cuda:1"])
    found = {name: (one.settings.training.device, one.settings.training.threads) for name, one in placed.items()}
    first, second = ("cuda:0", 3), ("cuda:1", 3)
    assert found == {"b": first, "a": first, "d": second, "c": second, "e": second}


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
