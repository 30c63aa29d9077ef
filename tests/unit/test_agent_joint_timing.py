"""What a coordinator sees of time under joint noise: never when the gradients of a sample were done, whatever it orders
meanwhile.

How long they take says how many records were drawn, and no ledger counts it.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from lorica_security.errors import DataError
from lorica_security.secure_aggregation.attempt import ATTEMPT_ID_BYTES, Attempt
from silo_agent.policy.rules import PolicyRules
from silo_agent.rounds.states import Holding
from silo_agent.service.ports import TrainedUpdate
from silo_agent.service.work import joint_timing, progress_reports
from silo_wire.messages import DeclineReason, Mask, Prepare, RoundKey, Standby, StandbyReason, Train
from tests.support.federation_peer import FEDERATION, FederationPeer, OfferedModel, small_bundle, vector_of
from tests.unit.test_agent_service import NET, Silo
from tests.unit.test_agent_service import peer as peer

ANSWER_AFTER_S, LATE_S = 0.8, 0.6
BUNDLE = small_bundle(
    schedule={"rounds": 3, "min_silos": 3},
    aggregation={"secure_aggregation": True, "weighting": "equal", "max_delta_norm": 0.0},
    training={"max_grad_norm": 0.5, "epochs": 1, "dropout": 0.0},
    evaluation={"initial": False, "every": 0, "last": False},
    privacy={
        "level": "record",
        "noise": "joint",
        "steps": 1,
        "nominal_records": 400,
        "expected_batch_size": 100,
        "noise_multiplier": 4.0,
        "answer_after_s": ANSWER_AFTER_S,
    },
)
PLAN = BUNDLE.plan.digest


@pytest.fixture
def silo(peer: FederationPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Silo:
    monkeypatch.setattr(joint_timing, "LATE_S", LATE_S)
    monkeypatch.setattr(progress_reports, "PROGRESS_S", 0.0)
    made = Silo(tmp_path / "silo", NET.credentials(peer.address))
    made.rules = PolicyRules(max_epsilon=1e3, max_epsilon_alone=1e3)
    return made


@pytest.fixture
def model(peer: FederationPeer) -> OfferedModel:
    return peer.offer(BUNDLE, vector_of(BUNDLE.layout, 0))


def train(of: OfferedModel, attempt: int = 1) -> Train:
    key = RoundKey(federation=FEDERATION, plan=PLAN, round=1, attempt=attempt)
    return Train(key=key, model=of.digest, seconds_left=60.0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def under_way(peer: FederationPeer, silo: Silo, of: OfferedModel, attempt: int = 1) -> float:
    """The silo works on its gradients; when it began."""
    silo.trainer.began.clear()
    await peer.order(train(of, attempt))
    await silo.training_began()
    return now()


async def prepared(peer: FederationPeer) -> None:
    await peer.order(Prepare(PLAN))
    await peer.until(lambda: bool(peer.readiness))
    assert peer.readiness[-1][1:] == (True, "")


def left(silo: Silo) -> list[bytes]:
    return [path.read_bytes() for path in silo.folder.updates.glob("*.delta")]


async def test_no_report_of_progress_says_when_the_gradients_are_done(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    async with silo.running():
        await prepared(peer)
        silo.trainer.hold = True
        await under_way(peer, silo, model)
        await peer.until(lambda: any(phase == "training" for _, phase, _ in peer.progress))
        before = len(peer.progress)
        silo.trainer.go.set()
        await peer.until(lambda: bool(peer.trained))
        assert [phase for _, phase, _ in peer.progress[before:]] == []


@pytest.mark.parametrize("done", [False, True], ids=["at work", "done"])
async def test_other_orders_do_not_tell_whether_the_gradients_are_done(
    peer: FederationPeer, silo: Silo, model: OfferedModel, done: bool
) -> None:
    """The next attempt is begun no sooner than if nothing had been called off, and the sum that serves nobody is
    erased."""
    async with silo.running():
        await prepared(peer)
        silo.trainer.hold = not done
        began = await under_way(peer, silo, model)
        seen = len(peer.ledger_reports)
        for attempt in (2, 3, 4):  # whoever waits for the first is itself called off
            await asyncio.sleep(0.05)
            await peer.order(train(model, attempt))
        silo.trainer.hold = False
        await peer.until(lambda: len(peer.ledger_reports) > seen)
        assert now() - began > ANSWER_AFTER_S + 0.8 * LATE_S
        assert not any(any(content) for content in left(silo))
        assert not peer.trained
        await peer.until(lambda: bool(peer.trained))
        assert [key.attempt for _, key, _ in peer.trained] == [4]


async def test_a_failure_is_told_when_an_answer_is_due(peer: FederationPeer, silo: Silo, model: OfferedModel) -> None:
    async with silo.running():
        await prepared(peer)
        silo.trainer.failure = DataError("a record is too long for this machine")
        began = await under_way(peer, silo, model)
        await peer.until(lambda: bool(peer.declined))
        assert now() - began > 0.8 * ANSWER_AFTER_S


async def test_who_is_late_does_not_tell_by_how_much(peer: FederationPeer, silo: Silo, model: OfferedModel) -> None:
    async with silo.running():
        await prepared(peer)
        silo.trainer.hold = True
        began = await under_way(peer, silo, model)
        await peer.until(lambda: bool(peer.declined))
        assert now() - began > ANSWER_AFTER_S * 0.8
        ((_, reason, _),) = peer.declined
        assert reason is DeclineReason.TRAINING_FAILED
        assert silo.service.agent.failures == 1  # people hear of it after three, whatever is ordered meanwhile
        seen = len(peer.ledger_reports)
        await peer.order(train(model, 2))
        await peer.until(lambda: len(peer.ledger_reports) > seen)
        assert now() - began > ANSWER_AFTER_S + 0.8 * LATE_S
    assert silo.trainer.cancelled


async def test_who_is_late_says_so_though_its_gradients_do_not_end(
    peer: FederationPeer, silo: Silo, model: OfferedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of its refusal would be that of the records it works on."""
    stop, whole = threading.Event(), silo.trainer.train

    def deaf(**named: Any) -> TrainedUpdate:
        silo.trainer.began.set()
        stop.wait(20)
        return whole(**named)

    monkeypatch.setattr(silo.trainer, "train", deaf)
    async with silo.running():
        await prepared(peer)
        await under_way(peer, silo, model)
        await peer.until(lambda: bool(peer.declined), within_s=10)
        assert not stop.is_set()
        stop.set()
    assert not any(any(content) for content in left(silo))


async def test_a_silo_that_its_people_stop_waits_for_nothing(
    peer: FederationPeer, silo: Silo, model: OfferedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_timing, "LATE_S", 1e6)
    async with silo.running():
        await prepared(peer)
        silo.trainer.hold = True
        await under_way(peer, silo, model)
        await peer.order(Standby(StandbyReason.NO_PLAN))
        await asyncio.to_thread(silo.trainer.gave_up.wait, 20)
    assert silo.run.done()
    assert silo.run.exception() is None


async def test_a_sum_that_an_earlier_process_left_is_erased_when_its_attempt_is_over(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    """Though the present one has not looked at its plan."""
    async with silo.killed():
        await prepared(peer)
        await peer.order(train(model))
        await peer.until(lambda: bool(peer.trained))
        await peer.order(open_masking(model))
        await peer.until(lambda: bool(peer.answers))
        await silo.notes.until(lambda: silo.service.waiting == (0, 0))
    assert any(any(content) for content in left(silo))
    await peer.order(Standby(StandbyReason.NO_PLAN))
    async with silo.running() as service:
        assert isinstance(service.agent.phase, Holding)
        await silo.notes.until(lambda: not isinstance(service.agent.phase, Holding))
    assert not any(any(content) for content in left(silo))


def open_masking(of: OfferedModel) -> Mask:
    order = train(of)
    attempt = Attempt(
        federation=FEDERATION,
        plan=bytes.fromhex(PLAN),
        round=order.key.round,
        number=order.key.attempt,
        id=bytes(ATTEMPT_ID_BYTES),
    )
    return Mask(key=order.key, model=of.digest, seconds_left=60.0, attempt=attempt)
