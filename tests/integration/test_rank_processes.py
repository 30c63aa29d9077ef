"""A silo's ranks as processes: the bytes of one process, whoever is killed or hangs, and nobody left behind."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lorica_coordinator.edges.sums.plan_parts import base_store
from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.ranks import frames, rank_group, rank_trainer
from silo_agent.edges.ranks.rank_trainer import RankTrainer
from silo_agent.service.ports import RoundModel, WorkCancelled
from tests.support.coordinator_edges import Workplace, content_of, make_plan
from tests.support.killed_ranks import launched
from tests.support.rank_silo import TRAINING, RankSilo
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAIT_S = 120.0
DROPOUT = {"dropout": 0.2}
"""Of tests that compare ranks with ranks: what is gone on from has random states of each."""


def hellos(silo: RankSilo) -> dict[int, frames.Hello]:
    found = (frames.Hello.read(path) for path in silo.ranks.glob("group-*/hello-*.json"))
    return {hello.rank: hello for hello in found if hello is not None}


def wait_until_gone(pids: list[int]) -> None:
    until(lambda: not any(map(lives, pids)), lambda: None, WAIT_S)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def at(fraction: float, do: Callable[[], None]) -> Callable[[float], None]:
    """Progress that does it once, when so much is done."""
    done: list[bool] = []

    def progress(now: float) -> None:
        if now >= fraction and not done:
            done.append(True)
            do()

    return progress


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def undisturbed(root: Path) -> bytes:
    """The update of two ranks that draw dropout."""
    silo = RankSilo(root, 2, DROPOUT)
    with closing(silo) as trainer:
        trainer.prepare(silo.bundle, None)
        silo.train(trainer)
    return silo.update.read_bytes()


class closing:  # noqa: N801 - as contextlib's
    def __init__(self, silo: RankSilo) -> None:
        self._trainer = silo.trainer()

    def __enter__(self) -> RankTrainer:
        return self._trainer

    def __exit__(self, *_: object) -> None:
        self._trainer.close()


@pytest.fixture(autouse=True)
def nothing_left(root: Path) -> Iterator[None]:
    yield
    assert not list(root.glob("ranks/group-*")), "a group that ended leaves no frames"
    for path in root.glob("updates-*/*"):
        path.unlink()


def test_two_ranks_write_the_bytes_of_one_process_and_hear_loopback_alone(root: Path) -> None:
    one, two = RankSilo(root), RankSilo(root, 2)
    own = one.workshop()
    own.prepare(one.bundle, None)
    expected = one.train(own)
    with closing(two) as trainer:
        assert trainer.prepare(two.bundle, None).train_examples == 18
        heard = {
            connection.laddr.ip
            for hello in hellos(two).values()
            for connection in psutil.Process(hello.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert heard == {"127.0.0.1"}
        for group in two.ranks.iterdir():
            assert group.stat().st_mode & 0o777 == 0o700
            assert {path.stat().st_mode & 0o077 for path in group.iterdir()} == {0} or no_meeting(group)
        told: list[float] = []
        update = two.train(trainer, progress=told.append)
        assert told[-1] == 1.0
        assert update.manifest == expected.manifest
        assert two.update.read_bytes() == one.update.read_bytes()
        before = hellos(two)
        # Nothing is left of it that a second training could take for its own.
        with pytest.raises(WorkCancelled):
            two.train(trainer, cancelled=lambda: True)
        assert two.train(trainer).manifest == expected.manifest
        assert hellos(two) == before, "the same ranks trained all three"
        pids = [hello.pid for hello in before.values()]
    wait_until_gone(pids)


def test_ranks_of_adapters_read_their_base_and_write_the_bytes_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch)
    plan: dict[str, Any] = {
        **{f"training.{name}": value for name, value in TRAINING.items()},
        "training.epochs": 1,
        "adapters.rank": 4,
        "adapters.layers": ["q", "v", "wo"],
    }
    bundle = make_plan(tmp_path / "state", overrides=plan)
    place = Workplace.at(tmp_path / "state", bundle)
    store = base_store(place.state, bundle)
    assert store is not None
    models = []
    for name, vector in (
        ("model", place.models.vector(place.models.initial())),
        ("base", store.vector(store.initial())),
    ):
        (tmp_path / name).write_bytes(content_of(vector))
        models.append(RoundModel(file=tmp_path / name, manifest=vector.manifest))
    silos = [RankSilo(tmp_path / "silo", processes) for processes in (0, 2)]
    for silo in silos:
        silo.bundle, silo.model = bundle, models[0]
    own = silos[0].workshop()
    own.prepare(bundle, models[1])
    silos[0].train(own)
    with closing(silos[1]) as trainer:
        trainer.prepare(bundle, models[1])
        silos[1].train(trainer)
    assert silos[1].update.read_bytes() == silos[0].update.read_bytes()
    assert any(silos[0].update.read_bytes())


def no_meeting(group: Path) -> bool:
    """Torch makes the file of its own by the process's umask; the folder keeps others from it."""
    others = [path.name for path in group.iterdir() if path.stat().st_mode & 0o077]
    return others == ["meeting"]


def test_whatever_is_killed_or_hangs_the_bytes_are_the_same(
    root: Path, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank before the first checkpoint; then one that hangs, which is killed, and not waited for any longer than
    [training] rank_timeout_s; after the checkpoint the other rank; last the launcher."""
    monkeypatch.setattr(rank_group, "SAY_S", 0.5)
    monkeypatch.setattr(rank_trainer, "GROUPS", 50)  # a busy machine may make a step last that long, too
    silo = RankSilo(root, 2, DROPOUT, own={"rank_timeout_s": 10.0})
    hit: list[int] = []

    def rank(number: int, how: signal.Signals) -> None:
        hit.append(hellos(silo)[number].pid)
        os.kill(hit[-1], how)

    def launcher() -> None:
        hit.append(hellos(silo)[0].pid)
        os.kill(psutil.Process(hit[-1]).ppid(), signal.SIGKILL)

    faults = [
        at(2 / 6, lambda: rank(0, signal.SIGKILL)),
        at(3 / 6, lambda: rank(1, signal.SIGSTOP)),
        at(5 / 6, lambda: rank(1, signal.SIGKILL)),
        at(4 / 6, launcher),
    ]

    def progress(now: float) -> None:
        faults[min(len(hit), len(faults) - 1)](now)

    with closing(silo) as trainer:
        trainer.prepare(silo.bundle, None)
        silo.train(trainer, progress=progress)
    assert silo.update.read_bytes() == undisturbed
    assert len(set(hit)) == len(faults)
    assert [event for event, _ in silo.notices].count("ranks-started-again") >= len(faults)
    wait_until_gone(hit)


def test_an_agent_that_is_killed_takes_its_ranks_along_and_the_next_comes_to_the_same_bytes(
    root: Path, undisturbed: bytes
) -> None:
    silo = RankSilo(root, 2, DROPOUT)
    agent = os.fork()
    if agent == 0:
        trainer = silo.trainer()
        trainer.prepare(silo.bundle, None)
        silo.train(trainer, progress=at(4 / 6, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) == -signal.SIGKILL
    left = hellos(silo)
    assert set(left) == {0, 1}
    wait_until_gone([hello.pid for hello in left.values()])
    with closing(silo) as trainer:
        trainer.prepare(silo.bundle, None)
        silo.train(trainer)
    assert silo.update.read_bytes() == undisturbed
    assert [event for event, _ in silo.notices] == ["training-resumed"]


def test_what_a_rank_cannot_read_is_said_as_it_says_it(root: Path, tmp_path: Path) -> None:
    """The agent's own reading is right, and the rank's folder is another: as where a mount is missing on a node."""
    silo = RankSilo(tmp_path, 2)
    with closing(silo) as trainer:
        trainer._own.prepare(silo.bundle, None)
        (tmp_path / "data").rename(tmp_path / "moved")
        with pytest.raises(DataError, match="data"):
            trainer._group_of(silo.bundle)
    assert not list(silo.ranks.glob("group-*"))


def test_ranks_do_not_train_on_what_their_agent_never_read(tmp_path: Path) -> None:
    """The file grew while the agent ran, and a group is started again: all its ranks read alike, and not as the agent
    did."""
    silo = RankSilo(tmp_path, 2)
    with closing(silo) as trainer:
        trainer._own.prepare(silo.bundle, None)
        lines = (tmp_path / "data" / "train.jsonl").read_text()
        (tmp_path / "data" / "train.jsonl").write_text(lines + lines.replace('"id": "q', '"id": "later'))
        with pytest.raises(ConfigurationError, match=r"not those of this agent .* start the agent again"):
            trainer._group_of(silo.bundle)
    assert not list(silo.ranks.glob("group-*"))


def test_a_launcher_of_others_starts_ranks_by_their_environment(root: Path) -> None:
    """Two ranks that a shell starts, as srun would on two nodes: each finds its number in what Slurm sets."""
    script = 'for r in 0 1; do SLURM_PROCID=$r SLURM_NTASKS=2 "$@" & done; wait'
    one, two = RankSilo(root), RankSilo(root, 2, own={"launch": ["/bin/sh", "-c", script, "sh"]})
    own = one.workshop()
    own.prepare(one.bundle, None)
    one.train(own)
    with closing(two) as trainer:
        trainer.prepare(two.bundle, None)
        pids = [hello.pid for hello in hellos(two).values()]
        two.train(trainer)
    assert two.update.read_bytes() == one.update.read_bytes()
    wait_until_gone(pids)
