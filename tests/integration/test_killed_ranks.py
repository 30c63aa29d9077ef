"""A rank, its launcher or the agent, killed at each step of a training, and in the middle of it: the same bytes; with
record-level privacy an update that has all of its noise, and no file before it.

Some of the points here; LORICA_EVERY_KILL=1 takes them all (`make soak`).
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_private_rank_processes import PRIVATE, TRAINING, deviations
from tests.support.killed_ranks import POINTS, Kill, launched
from tests.support.rank_silo import EPOCHS, STEPS_PER_EPOCH, RankSilo, require_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVERY = bool(os.environ.get("LORICA_EVERY_KILL"))
DROPOUT = {"dropout": 0.2}
"""What is gone on from has random states of each rank."""
SHARDS = {"sharded": True}
Case = tuple[str, int, int, str]
"""Of a Kill: point, number, rank, who."""

WHO = ("rank", "launcher", "agent")
PLAIN: list[Case] = [
    *(
        (point, number, rank, who)
        for number in range(1, STEPS_PER_EPOCH * EPOCHS + 1)
        for point in ("sum", "summed")
        for rank in (0, 1)
        for who in WHO
    ),
    *(
        (point, 1, 0, who)
        for point in ("checkpoint", "checkpoint-begun", "checkpoint-half", "checkpoint-written", "checkpoint-renamed")
        for who in WHO
    ),
    ("checkpoint-renamed", 1, 1, "rank"),
    *(
        (point, 1, rank, who)
        for point in ("update", "update-written", "update-synced")
        for rank in (0, 1)
        for who in WHO
    ),
]
PRIVATELY: list[Case] = [
    (point, 1, rank, who)
    for point in ("clipped", "noise", "noised", "released", "update", "update-synced")
    for rank in (0, 1)
    for who in WHO
]
SHARDED: list[Case] = [
    *(
        (point, number, rank, "rank")
        for number in range(1, STEPS_PER_EPOCH * EPOCHS + 1)
        for point in ("gathered", "scattered")
        for rank in (0, 1)
    ),
    *(("scattered", number, 1, who) for number in (2, 5) for who in ("launcher", "agent")),
    *(
        (point, 1, 0, who)
        for point in ("checkpoint", "checkpoint-half", "checkpoint-committed", "checkpoint-renamed")
        for who in WHO
    ),
    *(
        (point, 1, rank, who)
        for point in ("checkpoint-part", "pieces-written", "pieces-read", "update", "update-written", "update-synced")
        for rank in (0, 1)
        for who in WHO
    ),
    *(("checkpoint-written", 2, 0, who) for who in WHO),  # what commits, after the part
    *(("piece", number, rank, "rank") for number in (1, 9) for rank in (0, 1)),
]
SOME_PLAIN: list[Case] = [("checkpoint-half", 1, 0, "launcher")]
SOME_SHARDED: list[Case] = [("checkpoint-written", 2, 0, "rank")]
SOME_PRIVATELY: list[Case] = [("noised", 1, 1, "rank")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed-ranks")


@pytest.fixture(autouse=True)
def nothing_left(root: Path) -> Iterator[None]:
    yield
    require_nothing_left(root)


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> bytes:
    """The update of two ranks that draw dropout."""
    return undisturbed_update(RankSilo(root, 2, DROPOUT))


@pytest.fixture(scope="module")
def undisturbed_shards(root: Path) -> bytes:
    """The same of ranks that hold a part of the model each."""
    return undisturbed_update(RankSilo(root, 2, DROPOUT, own=SHARDS))


def undisturbed_update(silo: RankSilo) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        launched(patch)
        trained(silo)
    made = silo.update.read_bytes()
    for path in silo.updates.iterdir():
        path.unlink()
    return made


def trained(silo: RankSilo) -> None:
    trainer = silo.trainer()
    try:
        trainer.prepare(silo.bundle, None)
        silo.train(trainer)
    finally:
        trainer.close()


def killed(silo: RankSilo, patch: pytest.MonkeyPatch, case: Case, marker: Path) -> list[list[str]]:
    """Train, and have somebody killed; what lay beside the update at each start of ranks."""
    kill = Kill(*case, marker)
    found: list[list[str]] = []
    launched(patch, kill, lambda: found.append(sorted(path.name for path in silo.updates.iterdir())))
    if kill.who == "agent":
        agent = os.fork()
        if agent == 0:
            trained(silo)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) == -signal.SIGKILL
    trained(silo)
    assert marker.exists(), "nobody was killed"
    started = [event for event, _ in silo.notices].count("ranks-started-again")
    assert started == (kill.who != "agent")
    return found


@pytest.mark.parametrize("case", PLAIN if EVERY else SOME_PLAIN)
def test_whoever_is_killed_at_whatever_step_the_bytes_are_the_same(
    case: Case, root: Path, undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = RankSilo(root, 2, DROPOUT)
    killed(silo, monkeypatch, case, tmp_path / "killed")
    assert silo.update.read_bytes() == undisturbed


@pytest.mark.parametrize("case", SHARDED if EVERY else SOME_SHARDED)
def test_whoever_is_killed_the_bytes_of_shards_are_the_same(
    case: Case, root: Path, undisturbed_shards: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = RankSilo(root, 2, DROPOUT, own=SHARDS)
    killed(silo, monkeypatch, case, tmp_path / "killed")
    assert silo.update.read_bytes() == undisturbed_shards


@pytest.mark.parametrize("case", PRIVATELY if EVERY else SOME_PRIVATELY)
def test_whoever_is_killed_a_private_update_has_all_of_its_noise(
    case: Case, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the training that was cut off there is neither an update nor a checkpoint that the next one could go on from."""
    silo = RankSilo(root, 2, TRAINING, sections=PRIVATE)
    found = killed(silo, monkeypatch, case, tmp_path / "killed")
    assert abs(deviations(silo.update) - 1).max() < 0.03
    assert [path.name for path in silo.updates.iterdir()] == ["update"]
    if case[3] != "agent":
        assert found == [[], []]
        assert "training begins anew" in dict(silo.notices)["ranks-started-again"]


def test_the_points_are_there() -> None:
    assert {case[0] for case in (*PLAIN, *SHARDED, *PRIVATELY)} == set(POINTS)
