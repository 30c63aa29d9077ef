"""The service on real storage, keys and aggregation: whole plans, restarts, and everything that must be refused."""

import asyncio
import errno
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from structlog.testing import capture_logs

from lorica_coordinator.edges.sums.plan_parts import model_store
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_coordinator.rounds.events import DeadlinePassed
from lorica_coordinator.rounds.states import Collecting, population_of, round_of
from lorica_coordinator.rounds.states import Finished as StateFinished
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.release_groups import EarlierGroups
from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    ConfigurationError,
    Conflict,
    IntegrityError,
    MalformedMessage,
    StateError,
    StorageError,
    WrongTime,
)
from lorica_security.identifiers import Identity, Role, SiloName
from lorica_security.identity import enrolment_token, identity_key
from silo_wire.canonical import Digest, digest_of
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.manifest import Layout, TensorSpec, UpdateDtype, manifest_of
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluate,
    Finished,
    Order,
    Prepare,
    Standby,
    StandbyReason,
    Train,
)
from silo_wire.plans.plan import PlanBundle
from silo_wire.statements import MODEL_DOMAIN, model_statement
from tests.support.coordinator_edges import chunk_of, stored_vector
from tests.support.coordinator_service import (
    FEDERATION,
    NO_PLAN,
    AdjustableClock,
    Running,
    SiloStandIn,
    add_plan,
    load_keys,
    make_coordinator_folder,
    running,
)

SCHEDULE = {"rounds": 2, "min_silos": 2}
QUIET = {"initial": False, "every": 0, "last": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coordinator")
    make_coordinator_folder(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "coordinator"))


@pytest.fixture
async def at_work(folder: Path) -> AsyncIterator[Running]:
    async with running(folder) as coordinator:
        yield coordinator


async def two_silos(coordinator: Running) -> tuple[SiloStandIn, SiloStandIn]:
    return await coordinator.enrolled("bank-b"), await coordinator.enrolled("hospital-a")


async def work_together(service: Federation, *silos: SiloStandIn, until: Callable[[Order], bool]) -> list[list[Order]]:
    return await asyncio.gather(*(silo.work(service, until=until) for silo in silos))


def is_finished(order: Order) -> bool:
    return isinstance(order, Finished)


def is_train(order: Order) -> bool:
    return isinstance(order, Train)


@asynccontextmanager
async def attending(service: Federation, silo: SiloStandIn) -> AsyncIterator[Callable[[type[Any]], Any]]:
    """The silo connected and ready; gives a coroutine that waits for an order of a kind."""
    async with aclosing(service.attend(silo.name, silo.instance, NO_PLAN)) as orders:

        async def wait_for(kind: type[Any]) -> Any:
            async for order in orders:
                if isinstance(order, kind):
                    return order
                if isinstance(order, Prepare):
                    await silo.do(service, order)
            raise AssertionError("the stream of orders ended")

        yield wait_for


@asynccontextmanager
async def in_training(
    coordinator: Running, *, schedule: dict[str, Any] | None = None
) -> AsyncIterator[tuple[SiloStandIn, SiloStandIn, Train, PlanBundle]]:
    """Two silos connected, in round 1, with nothing uploaded."""
    add_plan(coordinator.folder, "second", schedule={**SCHEDULE, **(schedule or {})}, evaluation=QUIET)
    bank, hospital = await two_silos(coordinator)
    digest = (await coordinator.service.start_plan("second")).plan
    async with attending(coordinator.service, bank) as of_bank, attending(coordinator.service, hospital) as of_hospital:
        order, _ = await asyncio.gather(of_bank(Train), of_hospital(Train))
        bundle = PlanBundle.decode(await coordinator.service.plan_bundle(digest), digest)
        yield bank, hospital, order, bundle


# --- whole plans


async def test_two_silos_two_rounds_from_invitation_to_finished(folder: Path) -> None:
    with capture_logs() as logs:
        async with running(folder) as coordinator:
            add_plan(folder, "second", schedule=SCHEDULE, evaluation={"initial": True, "every": 1, "last": True})
            bank, hospital = await two_silos(coordinator)
            bank.examples, bank.loss_max, hospital.exact_matches = 30, 2.0, 8
            started = await coordinator.service.start_plan("second")
            digest = started.plan
            assert started.waits_for.startswith("0 of 2 enrolled silos ready")

            of_bank, of_hospital = await work_together(coordinator.service, bank, hospital, until=is_finished)

            kinds = [type(order) for order in of_bank if not isinstance(order, Standby)]
            assert kinds == [Prepare, Evaluate, Train, Evaluate, Train, Evaluate, Finished]
            finished = of_hospital[-1]
            assert isinstance(finished, Finished)
            rows = await coordinator.service.rounds()
            assert [(row.round, row.attempt, row.outcome) for row in rows] == [
                (0, 1, "evaluated"),
                (1, 1, "applied"),
                (2, 1, "applied"),
            ]
            assert [row.macro_exact_match for row in rows] == [pytest.approx(0.6)] * 3
            assert [row.scored for row in rows] == [2] * 3
            assert finished.final_model == rows[2].model
            assert finished.best_model == rows[2].model  # all are equally good: the latest counts

            # Lorar: |D| dL = 30 (2 - 1) and 10 (3 - 1); shares 0.6 and 0.4, in the records, the logs and the metrics.
            for row in rows[1:]:
                assert [(silo.weight, silo.share) for silo in row.silos] == [(30.0, 0.6), (20.0, 0.4)]
            assert coordinator.metric("lorica_silo_weight_share_ratio", silo="bank-b") == 0.6
            assert coordinator.metric("lorica_rounds_total", outcome="applied") == 2
            assert coordinator.metric("lorica_phase", phase="finished") == 1

            status = await coordinator.service.status()
            assert (status.phase, status.round, status.rounds, status.plan) == ("finished", 2, 2, digest)
    for number in (1, 2):
        weighed = [line for line in logs if line["event"] == "silo weight" and line["round"] == number]
        total = sum(line["examples"] * line["loss_reduction"] for line in weighed)
        assert [line["silo"] for line in weighed] == ["bank-b", "hospital-a"]
        for line in weighed:
            assert line["share"] == pytest.approx(line["examples"] * line["loss_reduction"] / total)
    transitions = [line for line in logs if line["event"] == "transition"]
    assert {line["phase"] for line in transitions} == {
        "idle",
        "gathering",
        "collecting",
        "aggregating",
        "evaluating",
        "finished",
    }
    assert all({"round", "attempt", "phase", "before", "event_type"} <= set(line) for line in transitions)


async def test_a_silo_that_weighs_nothing_is_told_in_the_log_and_counted(folder: Path) -> None:
    """One whose loss did not fall; where nobody's did, sizes stand in and nobody weighs nothing."""
    with capture_logs() as logs:
        async with running(folder) as coordinator:
            add_plan(folder, "second", schedule={**SCHEDULE, "rounds": 1}, evaluation=QUIET)
            bank, hospital = await two_silos(coordinator)
            hospital.loss_max = 1.0
            await coordinator.service.start_plan("second")
            await work_together(coordinator.service, bank, hospital, until=is_finished)
            (row,) = [row for row in await coordinator.service.rounds() if row.round]
            assert [(silo.silo, silo.weight > 0.0) for silo in row.silos] == [("bank-b", True), ("hospital-a", False)]
            assert coordinator.metric("lorica_zero_weights_total") == 1
    (told,) = [line for line in logs if line["event"] == "silo weighs nothing"]
    assert (told["silo"], told["log_level"], told["round"]) == ("hospital-a", "warning", 1)


@dataclass
class Huge(SiloStandIn):
    """Its delta is finite, and leaves float32's range in a step of twice its length."""

    def delta(self, bundle: PlanBundle, round_number: int) -> bytes:
        return np.full(bundle.layout.parameters, 2e38, "<f4").tobytes()


@pytest.mark.parametrize("level", ["none", "record"])
async def test_what_is_wrong_with_a_private_update_is_in_no_log(folder: Path, level: str) -> None:
    """Its norm is a single silo's: whoever gets the coordinator's logs would have it."""
    private = {"noise_multiplier": 1.5} if level == "record" else {}
    with capture_logs() as logs:
        async with running(folder) as coordinator:
            add_plan(
                folder,
                "second",
                schedule={"rounds": 1, "min_silos": 1},
                evaluation=QUIET,
                training={"dropout": 0.0, "epochs": 1},
                aggregation={
                    "weighting": "equal",
                    "server_optimizer": "sgd",
                    "momentum": 0.0,
                    "server_learning_rate": 2.0,
                    "max_delta_norm": 0.0,
                },
                privacy={"level": level, **private},
            )
            token, _ = await coordinator.service.enrolment.invite("bank-b", 3600)
            bank = Huge(SiloName("bank-b"))
            await bank.enrol(coordinator.service, token)
            await coordinator.service.start_plan("second")
            async with attending(coordinator.service, bank) as of_bank:
                await bank.do(coordinator.service, await of_bank(Train))
                await of_bank(Train)  # of the attempt after the one that came to nothing
            row, _ = await coordinator.service.rounds()
    (told,) = [line for line in logs if "cannot be used" in line["event"]]
    assert (told["event"], told["kind"]) == ("update of silo bank-b cannot be used", "IntegrityError")
    assert (row.outcome, row.silos[0].outcome) == ("abandoned", "refused")
    norm = "has norm"
    assert [norm in text for text in (str(logs), row.detail, row.silos[0].detail)] == [level == "none"] * 3


async def test_the_final_model_is_the_weighted_mean_added_to_the_initial_one(folder: Path) -> None:
    async with running(folder) as coordinator:
        plan = add_plan(
            folder,
            "second",
            schedule={**SCHEDULE, "rounds": 1},
            aggregation={"server_optimizer": "sgd", "momentum": 0.0},
            evaluation=QUIET,
        )
        bank, hospital = await two_silos(coordinator)
        bank.examples = 30
        await coordinator.service.start_plan("second")
        (finished, *_), _ = [
            orders[::-1] for orders in await work_together(coordinator.service, bank, hospital, until=is_finished)
        ]
        assert isinstance(finished, Finished)
        bundle = PlanShelf(folder).bundle(plan.digest)
        models = model_store(folder, bundle)
        first, second = (np.frombuffer(silo.delta(bundle, 1), "<f4") for silo in (bank, hospital))
        initial = stored_vector(models, models.initial()).astype(np.float64)
        expected = initial + 0.75 * first + 0.25 * second
        np.testing.assert_allclose(stored_vector(models, finished.final_model), expected, atol=1e-6)


async def test_models_are_handed_out_with_the_coordinators_signature(at_work: Running) -> None:
    async with in_training(at_work) as (_, _, order, bundle):
        source = await at_work.service.model(order.key.plan, order.model)
        assert source.header.round == 0
        assert source.header.manifest.digest == order.model
        statement = model_statement(
            federation=FEDERATION, plan=bundle.plan.digest, round_number=0, model=source.header.manifest.digest
        )
        public_key = identity_key.public_key_from_bytes(load_keys(at_work.folder).identity_public_key)
        identity_key.verify(
            public_key, domain=MODEL_DOMAIN.encode(), payload=statement, signature=source.header.signature
        )
        with pytest.raises(MalformedMessage, match="outside"):
            await source.piece(source.header.manifest.chunks)
        with pytest.raises(WrongTime, match="not handed out"):
            await at_work.service.model(order.key.plan, digest_of(b"another model"))


async def test_an_offered_plan_starts_when_ready(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule={**SCHEDULE, "start_when_ready": True}, evaluation=QUIET)
    await at_work.service.offer_plan("second")
    bank, hospital = await two_silos(at_work)
    orders = await work_together(at_work.service, bank, hospital, until=is_finished)
    assert all(is_finished(of_silo[-1]) for of_silo in orders)


async def test_without_start_when_ready_an_offered_plan_waits_for_the_operator(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule=SCHEDULE, evaluation=QUIET)
    bank, hospital = await two_silos(at_work)
    await at_work.service.offer_plan("second")
    async with attending(at_work.service, bank) as of_bank, attending(at_work.service, hospital) as of_hospital:
        await asyncio.gather(of_bank(Standby), of_hospital(Standby))
        status = await at_work.service.status()
        assert status.detail == "2 of 2 enrolled silos ready to train; waiting for `coordinator plan start second`"
        await at_work.service.start_plan("second")
        await asyncio.gather(of_bank(Train), of_hospital(Train))


# --- restarts


async def test_a_coordinator_stopped_between_rounds_goes_on_to_the_same_model(folder: Path, made: Path) -> None:
    async def run_plan(place: Path, *, stop_at: tuple[int, ...]) -> Digest:
        silos: list[SiloStandIn] = []
        for number in (*stop_at, None):

            def until(order: Order, number: int | None = number) -> bool:
                return is_finished(order) or (isinstance(order, Train) and order.key.round == number)

            async with running(place) as coordinator:
                if not silos:
                    silos = list(await two_silos(coordinator))
                    await coordinator.service.start_plan("second")
                orders = await work_together(coordinator.service, *silos, until=until)
        final = orders[0][-1]
        assert isinstance(final, Finished)
        return final.final_model

    plans = {"schedule": {**SCHEDULE, "rounds": 3}, "evaluation": QUIET}
    add_plan(folder, "second", **plans)
    undisturbed = Path(shutil.copytree(made, folder.parent / "undisturbed"))
    add_plan(undisturbed, "second", **plans)
    assert await run_plan(folder, stop_at=(2, 3)) == await run_plan(undisturbed, stop_at=())


async def test_a_restart_in_mid_round_keeps_what_was_committed_and_what_was_spooled(folder: Path) -> None:
    async with running(folder) as coordinator, in_training(coordinator) as (bank, hospital, order, bundle):
        delta = bank.delta(bundle, 1)
        await bank.upload(coordinator.service, bank.header(order.key, order.model, bundle, delta), delta)
        half = hospital.delta(bundle, 1)
        header = hospital.header(order.key, order.model, bundle, half)
        upload = await coordinator.service.begin_update(hospital.name, header)
        for index in range(3):
            await upload.write(index, chunk_of(header, half, index))
        await upload.close()

    async with running(folder) as coordinator:
        service = coordinator.service
        assert (await service.status()).phase == "collecting"
        receipt = bank.header(order.key, order.model, bundle, delta).manifest.digest
        assert await service.upload_offset(bank.name, order.key, receipt) == (0, True)
        assert await service.upload_offset(hospital.name, order.key, header.manifest.digest) == (3, False)
        async with attending(service, hospital) as of_hospital:
            again = await of_hospital(Train)
            assert again.key == order.key
            await hospital.upload(service, replace(header, first_chunk=3), half)
            await of_hospital(Prepare)  # it connected anew: for the next round it prepares anew
        await coordinator.reaches(lambda state: round_of(state)[0] == 2)
        (row, *_) = await service.rounds()
        assert (row.round, row.attempt, row.outcome) == (1, 1, "applied")


async def test_kill_between_revocation_in_store_and_in_machine_drops_the_update(folder: Path) -> None:
    async with running(folder) as coordinator, in_training(coordinator) as (bank, _, order, bundle):
        delta = bank.delta(bundle, 1)
        await bank.upload(coordinator.service, bank.header(order.key, order.model, bundle, delta), delta)
        coordinator.store.revoke(Identity(FEDERATION, Role.SILO, bank.name), order.key.round)

    async with running(folder) as coordinator:
        await coordinator.reaches(lambda state: not isinstance(state, Collecting))
        (row, *_) = await coordinator.service.rounds()
        assert (row.outcome, "revoked" in row.detail) == ("abandoned", True), row
        assert {silo.silo: silo.outcome for silo in row.silos}[bank.name] == "refused"


async def test_revoking_again_after_a_failed_transition_drops_the_silo(
    at_work: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full between the register and the machine: the operator types the same again."""

    def full(*_: Any, **__: Any) -> None:
        raise StorageError("no space left")

    async with in_training(at_work) as (bank, _, order, bundle):
        delta = bank.delta(bundle, 1)
        await bank.upload(at_work.service, bank.header(order.key, order.model, bundle, delta), delta)
        with monkeypatch.context() as patch:
            patch.setattr(at_work.store, "transition", full)
            with pytest.raises(StorageError):
                await at_work.service.revoke(Role.SILO, bank.name)
        assert bank.name in population_of(at_work.service._loop.state)
        await at_work.service.revoke(Role.SILO, bank.name)
        assert bank.name not in population_of(at_work.service._loop.state)
        (row, *_) = await at_work.service.rounds()
        assert {silo.silo: silo.outcome for silo in row.silos}[bank.name] == "refused"


async def test_operator_who_goes_away_in_the_middle_has_revoked_all_the_same(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, _, _):
        asked = asyncio.create_task(at_work.service.revoke(Role.SILO, bank.name))
        await asyncio.sleep(0)  # it has begun
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await at_work.reaches(lambda state: bank.name not in population_of(state))


async def test_a_plan_under_way_needs_its_folder_no_more(folder: Path) -> None:
    async with running(folder) as coordinator:
        add_plan(folder, "second", schedule=SCHEDULE, evaluation=QUIET)
        silos = await two_silos(coordinator)
        await coordinator.service.start_plan("second")
        await work_together(
            coordinator.service, *silos, until=lambda order: isinstance(order, Train) and order.key.round == 2
        )
    shutil.rmtree(folder / "plans" / "second")
    async with running(folder) as coordinator:
        orders = await work_together(coordinator.service, *silos, until=is_finished)
        assert is_finished(orders[0][-1])


async def test_stop_and_start_by_the_operator(at_work: Running) -> None:
    async with in_training(at_work):
        stopped = await at_work.service.stop_plan()
        assert stopped == "stopped by the operator; `coordinator plan start` goes on with plan second"
        assert (await at_work.service.status()).phase == "stopped"
        await at_work.service.start_plan("second")
        status = await at_work.service.status()
        assert (status.phase, status.round, status.attempt) == ("collecting", 1, 2)
        first, second = await at_work.service.rounds()
        assert (first.outcome, first.detail) == ("abandoned", "the operator stopped the plan")
        assert second.outcome == "running"


async def test_a_round_beyond_the_plans_last_is_named_as_the_closing_one(
    at_work: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_training(at_work):
        (row,) = await at_work.service.rounds()
        assert row.detail == ""
        rows = [replace(row, round=2), replace(row, round=3), replace(row, round=3, detail="too late")]
        monkeypatch.setattr(at_work.store, "rounds", lambda plan, last, since, until, attempts: tuple(rows))
        assert [it.detail for it in await at_work.service.rounds()] == [
            "",
            "closing round, in which nobody trains",
            "closing round, in which nobody trains; too late",
        ]


# --- who attends


async def test_a_second_agent_with_the_same_identity_is_refused(at_work: Running) -> None:
    bank = await at_work.enrolled("bank-b")
    async with aclosing(at_work.service.attend(bank.name, b"1" * 16, NO_PLAN)) as first:
        await anext(first)
        with pytest.raises(Conflict, match="already has a connected agent"):
            await anext(at_work.service.attend(bank.name, b"2" * 16, NO_PLAN))
        assert at_work.metric("lorica_silos", state="connected") == 1
    async with aclosing(at_work.service.attend(bank.name, b"2" * 16, NO_PLAN)) as second:
        await anext(second)  # the first is gone: its place is free


async def test_a_silo_was_seen_last_when_it_left_also_after_a_restart(folder: Path) -> None:
    clock = AdjustableClock()
    async with running(folder, clock=clock) as coordinator:
        bank = await coordinator.enrolled("bank-b")
        async with aclosing(coordinator.service.attend(bank.name, bank.instance, NO_PLAN)) as orders:
            await anext(orders)
            clock.ahead += 3 * 86_400.0
            left = clock()
        clock.ahead += 600.0
        seen = (await coordinator.service.status()).silos[0].last_seen_unix_s
        assert left <= seen < left + 60
    async with running(folder, clock=clock) as coordinator:
        assert (await coordinator.service.status()).silos[0].last_seen_unix_s == seen
        assert coordinator.metric("lorica_enrolled_silo_last_seen_timestamp_seconds", silo="bank-b") == seen


async def test_the_same_agent_takes_over_its_old_stream_and_stays_ready(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule=SCHEDULE, evaluation=QUIET)
    bank, _ = await two_silos(at_work)
    await at_work.service.start_plan("second")
    old = at_work.service.attend(bank.name, bank.instance, NO_PLAN)
    await bank.do(at_work.service, await anext(old))
    assert isinstance(await anext(old), Standby)
    async with aclosing(at_work.service.attend(bank.name, bank.instance, NO_PLAN)) as new:
        order = await anext(new)
        assert isinstance(order, Standby)
        assert order.reason is StandbyReason.GATHERING
        with pytest.raises(StopAsyncIteration):
            await anext(old)
        assert (await at_work.service.status()).silos[0].state == "ready"


async def test_a_restarted_agent_takes_over_a_stream_that_nobody_saw_end_and_prepares_anew(at_work: Running) -> None:
    """As after a power cut: the old connection looks alive until its keepalive fails."""
    add_plan(at_work.folder, "second", schedule=SCHEDULE, evaluation=QUIET)
    bank, _ = await two_silos(at_work)
    await at_work.service.start_plan("second")
    folder, start = bank.instance[:8], int.from_bytes(bank.instance[8:])
    old = at_work.service.attend(bank.name, bank.instance, NO_PLAN)
    await bank.do(at_work.service, await anext(old))
    assert isinstance(await anext(old), Standby)
    restarted = at_work.service.attend(bank.name, folder + (start + 1).to_bytes(8), NO_PLAN)
    async with aclosing(restarted) as new:
        order = await anext(new)
        while not isinstance(order, Prepare):  # what the process before had prepared, this one has not
            order = await anext(new)
        with pytest.raises(StopAsyncIteration):
            await anext(old)
        for another in (bank.instance, b"elsewhere"[:8] + (start + 2).to_bytes(8)):
            with pytest.raises(Conflict, match="already has a connected agent"):
                await anext(at_work.service.attend(bank.name, another, NO_PLAN))


async def test_a_silo_that_was_never_enrolled_cannot_attend(at_work: Running) -> None:
    with pytest.raises(AuthorisationError, match="not enrolled"):
        await anext(at_work.service.attend(SiloName("stranger"), b"1" * 16, NO_PLAN))


async def test_readiness_needs_the_present_plan_and_a_connection(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule=SCHEDULE)
    bank, _ = await two_silos(at_work)
    with pytest.raises(WrongTime, match="none is"):
        await at_work.service.declare_readiness(bank.name, digest_of(b"plan"), ready=True)
    digest = (await at_work.service.start_plan("second")).plan
    with pytest.raises(WrongTime, match="not under way"):
        await at_work.service.declare_readiness(bank.name, digest_of(b"plan"), ready=True)
    with pytest.raises(WrongTime, match="not attending"):
        await at_work.service.declare_readiness(bank.name, digest, ready=True)
    with pytest.raises(WrongTime, match="not under way"):
        await at_work.service.plan_bundle(digest_of(b"plan"))


async def test_the_operator_sees_what_each_silo_does(at_work: Running) -> None:
    await at_work.service.enrolment.invite("clinic-c", 60)
    async with in_training(at_work) as (bank, hospital, order, _):
        at_work.service.report_progress(bank.name, AgentPhase.FETCHING, 0.25)
        await at_work.service.decline(hospital.name, order.key, DeclineReason.DATA, "no lines left")
        status = await at_work.service.status()
        assert [(silo.silo, silo.state) for silo in status.silos] == [
            ("bank-b", "ready"),  # the round was abandoned: a quorum was impossible
            ("clinic-c", "invited"),
            ("hospital-a", "preparing"),
        ]
        assert (status.phase, status.attempt, status.seconds_left) == ("gathering", 2, None)
        with pytest.raises(MalformedMessage):
            at_work.service.report_progress(bank.name, AgentPhase.FETCHING, float("nan"))
    status = await at_work.service.status()
    assert {silo.state for silo in status.silos} == {"absent", "invited"}
    with pytest.raises(WrongTime):
        at_work.service.report_progress(bank.name, AgentPhase.FETCHING, 0.5)


async def test_a_silo_of_which_nothing_is_asked_is_connected(at_work: Running) -> None:
    bank = await at_work.enrolled("bank-b")
    async with aclosing(at_work.service.attend(bank.name, bank.instance, NO_PLAN)) as orders:
        assert await anext(orders) == Standby(StandbyReason.NO_PLAN)
        assert [silo.state for silo in (await at_work.service.status()).silos] == ["connected"]


# --- updates that must be refused


async def test_an_update_signed_by_another_silo_is_refused(at_work: Running) -> None:
    async with in_training(at_work) as (bank, hospital, order, bundle):
        forged = replace(
            bank.header(order.key, order.model, bundle, bank.delta(bundle, 1)),
            signature=hospital.header(order.key, order.model, bundle, bank.delta(bundle, 1)).signature,
        )
        with pytest.raises(IntegrityError, match="signature for client-update"):
            await at_work.service.begin_update(bank.name, forged)


async def test_a_summary_changed_after_signing_is_refused(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        header = bank.header(order.key, order.model, bundle, bank.delta(bundle, 1))
        with pytest.raises(IntegrityError):
            await at_work.service.begin_update(
                bank.name, replace(header, summary=replace(header.summary, examples=10_000))
            )


async def test_an_update_for_another_round_attempt_or_plan_is_refused(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        for key in (
            replace(order.key, round=2),
            replace(order.key, attempt=2),
            replace(order.key, plan=digest_of(b"another")),
            replace(order.key, federation="other-net"),
        ):
            with pytest.raises(WrongTime):
                await at_work.service.begin_update(
                    bank.name, bank.header(key, order.model, bundle, bank.delta(bundle, 1))
                )


async def test_a_replay_of_last_rounds_update_is_refused(at_work: Running) -> None:
    async with in_training(at_work) as (bank, hospital, order, bundle):
        old = bank.header(order.key, order.model, bundle, bank.delta(bundle, 1))
        for silo in (bank, hospital):
            await silo.do(at_work.service, order)
        await at_work.reaches(lambda state: round_of(state)[0] == 2)
        model = (await at_work.service.status()).model
        assert model is not None
        with pytest.raises(IntegrityError):  # the signature binds it to round 1
            await at_work.service.begin_update(bank.name, replace(old, key=replace(order.key, round=2), model=model))


async def test_an_update_from_another_base_model_is_refused(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        with pytest.raises(WrongTime, match="the round's is"):
            await at_work.service.begin_update(
                bank.name, bank.header(order.key, digest_of(b"other"), bundle, bank.delta(bundle, 1))
            )


async def test_an_update_of_the_wrong_model_shape_is_refused(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        other = Layout("float32", (TensorSpec("weight", (4,)),))
        header = replace(
            bank.header(order.key, order.model, bundle, bank.delta(bundle, 1)),
            manifest=manifest_of(other, [bytes(16)]),
        )
        with pytest.raises(MalformedMessage, match="wrong model shape"):
            await at_work.service.begin_update(bank.name, header)


async def test_nan_in_an_update_is_refused_and_the_round_goes_on(at_work: Running) -> None:
    async with in_training(at_work) as (bank, hospital, order, bundle):
        spoiled = bytearray(bank.delta(bundle, 1))
        spoiled[8:12] = np.float32("nan").tobytes()
        with pytest.raises(MalformedMessage, match="NaN"):
            await bank.upload(
                at_work.service, bank.header(order.key, order.model, bundle, bytes(spoiled)), bytes(spoiled)
            )
        assert (await at_work.service.status()).detail.startswith("0 of 2 updates in")
        for silo in (bank, hospital):
            await silo.do(at_work.service, order)
        await at_work.reaches(lambda state: round_of(state)[0] == 2)


async def test_a_damaged_chunk_is_refused_and_the_upload_goes_on_behind_the_last_good_one(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        delta = bank.delta(bundle, 1)
        header = bank.header(order.key, order.model, bundle, delta)
        upload = await at_work.service.begin_update(bank.name, header)
        await upload.write(0, chunk_of(header, delta, 0))
        await upload.write(1, bytes(len(chunk_of(header, delta, 1))))
        for _ in range(2):
            with pytest.raises(IntegrityError, match="chunk 1"):
                await upload.commit()
            with pytest.raises(IntegrityError, match="chunk 1"):
                await upload.write(1, chunk_of(header, delta, 1))
        await upload.close()
        assert await at_work.service.upload_offset(bank.name, order.key, header.manifest.digest) == (1, False)
        skipping = await at_work.service.begin_update(bank.name, replace(header, first_chunk=1))
        await skipping.write(5, chunk_of(header, delta, 5))
        with pytest.raises(MalformedMessage, match=r"chunk 5 .* came where 1 is expected"):
            await skipping.commit()
        short = await at_work.service.begin_update(bank.name, replace(header, first_chunk=1))
        with pytest.raises(MalformedMessage, match="not complete"):
            await short.commit()
        with pytest.raises(WrongTime, match="goes on at chunk 1, not at 0"):
            await at_work.service.begin_update(bank.name, header)
        await bank.upload(at_work.service, replace(header, first_chunk=1), delta)


async def test_a_committed_update_may_be_sent_again_and_no_other_may_take_its_place(at_work: Running) -> None:
    async with in_training(at_work) as (bank, hospital, order, bundle):
        delta = bank.delta(bundle, 1)
        header = bank.header(order.key, order.model, bundle, delta)
        receipt = await bank.upload(at_work.service, header, delta)
        again = await at_work.service.begin_update(bank.name, replace(header, first_chunk=header.manifest.chunks))
        assert (await again.commit()).update == receipt
        with pytest.raises(Conflict, match="committed"):
            await again.write(0, b"")
        other = hospital.delta(bundle, 1)
        with pytest.raises(Conflict, match="has committed update"):
            await at_work.service.begin_update(bank.name, bank.header(order.key, order.model, bundle, other))
        await hospital.do(at_work.service, order)
        await at_work.reaches(lambda state: round_of(state)[0] == 2)
        # The round is closed: the receipt is still given, for an agent whose last acknowledgement was lost.
        assert await at_work.service.upload_offset(bank.name, order.key, receipt) == (0, True)
        (row, *_) = await at_work.service.rounds()
        assert [silo.examples for silo in row.silos] == [10, 10]


async def test_a_newer_upload_of_the_same_silo_ends_the_older_one(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        delta = bank.delta(bundle, 1)
        header = bank.header(order.key, order.model, bundle, delta)
        older = await at_work.service.begin_update(bank.name, header)
        await older.write(0, chunk_of(header, delta, 0))
        assert await at_work.service.upload_offset(bank.name, order.key, header.manifest.digest) == (1, False)
        with pytest.raises(Conflict, match="newer upload"):
            await older.write(1, chunk_of(header, delta, 1))
        await bank.upload(at_work.service, replace(header, first_chunk=1), delta)
        with pytest.raises(Conflict, match="newer upload"):
            await older.write(1, chunk_of(header, delta, 1))
        with pytest.raises(Conflict, match="newer upload"):
            await older.commit()


async def test_a_second_update_that_comes_while_the_first_commits_cannot_delete_it(at_work: Running) -> None:
    async with in_training(at_work) as (bank, hospital, order, bundle):
        delta, other = bank.delta(bundle, 1), bank.delta(bundle, 9)
        header = bank.header(order.key, order.model, bundle, delta)
        upload = await at_work.service.begin_update(bank.name, header)
        for index in range(header.manifest.chunks):
            await upload.write(index, chunk_of(header, delta, index))
        receipt, refusal = await asyncio.gather(
            upload.commit(),
            at_work.service.begin_update(bank.name, bank.header(order.key, order.model, bundle, other)),
            return_exceptions=True,
        )
        assert isinstance(receipt, UpdateReceipt)
        assert receipt.update == header.manifest.digest
        assert isinstance(refusal, Conflict)
        await hospital.do(at_work.service, order)
        await at_work.reaches(lambda state: round_of(state)[0] == 2)
        assert [silo.outcome for silo in (await at_work.service.rounds())[0].silos] == ["committed", "committed"]


@pytest.mark.parametrize(
    ("model", "update"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "int8")],
)
async def test_models_and_updates_travel_in_the_types_of_the_plan(at_work: Running, model: str, update: str) -> None:
    plan = add_plan(
        at_work.folder, "second", schedule=SCHEDULE, evaluation=QUIET, wire={"model": model, "update": update}
    )
    bank, hospital = await two_silos(at_work)
    await at_work.service.start_plan("second")
    orders, _ = await work_together(at_work.service, bank, hospital, until=is_finished)
    bundle = PlanShelf(at_work.folder).bundle(plan.digest)
    trained = [order for order in orders if isinstance(order, Train)]
    finished = orders[-1]
    assert isinstance(finished, Finished)
    models = model_store(at_work.folder, bundle)
    assert models.manifest(finished.final_model).layout_digest == bundle.model_layout.digest
    assert trained[0].included_update is None
    first = bank.header(trained[0].key, trained[0].model, bundle, bank.delta(bundle, 1))
    assert trained[1].included_update == first.manifest.digest
    others = {bundle.layout.as_type(dtype).digest for dtype in get_args(UpdateDtype) if dtype != update}
    assert first.manifest.layout_digest == bundle.update_layout.digest
    assert len(others | {bundle.update_layout.digest}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
async def test_an_update_in_another_type_than_the_plans_is_refused(at_work: Running, dtype: UpdateDtype) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        short = bundle.layout.as_type(dtype)
        header = bank.header(order.key, order.model, bundle, bank.delta(bundle, 1))
        header = replace(header, manifest=manifest_of(short, [bytes(short.total_bytes)]))
        with pytest.raises(MalformedMessage, match="another layout"):
            await bank.upload(at_work.service, header, bytes(short.total_bytes))


async def test_a_plan_in_bfloat16_goes_on_after_a_stop_and_a_restart(folder: Path) -> None:
    wire = {"model": "bfloat16", "update": "bfloat16"}
    async with running(folder) as coordinator:
        add_plan(folder, "second", schedule=SCHEDULE, evaluation=QUIET, wire=wire)
        bank, hospital = await two_silos(coordinator)
        await coordinator.service.start_plan("second")
        until = is_second_round
        await work_together(coordinator.service, bank, hospital, until=until)
        await coordinator.service.stop_plan()
    async with running(folder) as coordinator:
        await coordinator.service.start_plan("second")
        orders, _ = await work_together(coordinator.service, bank, hospital, until=is_finished)
        assert isinstance(orders[-1], Finished)
        rows = await coordinator.service.rounds()
        assert [row.outcome for row in rows if row.outcome != "abandoned"] == ["applied", "applied"]


def is_second_round(order: Order) -> bool:
    return isinstance(order, Train) and order.key.round == 2


async def test_files_to_write_over_are_kept_between_rounds_and_go_with_the_plan(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule={**SCHEDULE, "rounds": 3}, evaluation=QUIET)
    bank, hospital = await two_silos(at_work)
    await at_work.service.start_plan("second")
    await work_together(at_work.service, bank, hospital, until=is_second_round)
    assert len(list((at_work.folder / "spools").rglob("*.spare"))) == 2
    await work_together(at_work.service, bank, hospital, until=is_finished)
    await at_work.settled()
    assert not list(at_work.folder.rglob("*.spare"))
    assert not list((at_work.folder / "spools").iterdir())


async def test_a_silo_outside_the_cohort_may_not_upload(at_work: Running) -> None:
    async with in_training(at_work) as (_, _, order, bundle):
        late = await at_work.enrolled("clinic-c")
        with pytest.raises(WrongTime, match="not in the cohort"):
            await at_work.service.begin_update(
                late.name, late.header(order.key, order.model, bundle, late.delta(bundle, 1))
            )


# --- deadlines, failures


async def test_at_the_deadline_the_round_is_abandoned_and_tried_again(at_work: Running) -> None:
    schedule = {"training_deadline_s": 2.0, "gathering_deadline_s": 2.0}
    async with in_training(at_work, schedule=schedule) as (bank, _, order, bundle):
        delta = bank.delta(bundle, 1)
        header = bank.header(order.key, order.model, bundle, delta)
        upload = await at_work.service.begin_update(bank.name, header)
        await at_work.reaches(lambda state: round_of(state) > (1, order.key.attempt))
        with pytest.raises(WrongTime):
            await upload.write(0, chunk_of(header, delta, 0))
        await upload.close()
        first, *_ = await at_work.service.rounds()
        assert (first.outcome, [silo.outcome for silo in first.silos]) == ("abandoned", ["late", "late"])
        assert at_work.metric("lorica_dropped_silos_total", phase="collecting", outcome="late") >= 2
        assert not list((at_work.folder / "spools" / order.key.plan).glob("1-1/*"))


async def test_an_update_damaged_on_the_coordinators_disk_is_left_out_and_the_others_are_summed(
    at_work: Running,
) -> None:
    add_plan(at_work.folder, "second", schedule={**SCHEDULE, "rounds": 1}, evaluation=QUIET)
    silos = [await at_work.enrolled(name) for name in ("bank-b", "clinic-c", "hospital-a")]
    await at_work.service.start_plan("second")

    async def spoil_after_commit(silo: SiloStandIn) -> list[Order]:
        orders = await silo.work(at_work.service, until=is_train)
        assert isinstance(orders[-1], Train)
        await silo.do(at_work.service, orders[-1])
        (spool,) = (at_work.folder / "spools").rglob(f"{silo.name}.delta")
        content = bytearray(spool.read_bytes())
        content[100] ^= 1
        spool.write_bytes(content)
        spoiled.set()
        return orders

    async def after_that(silo: SiloStandIn) -> list[Order]:
        orders = await silo.work(at_work.service, until=is_train)
        await spoiled.wait()
        await silo.do(at_work.service, orders[-1])
        return await silo.work(at_work.service)

    spoiled = asyncio.Event()
    await asyncio.gather(spoil_after_commit(silos[0]), *(after_that(silo) for silo in silos[1:]))
    (row,) = await at_work.service.rounds()
    assert row.outcome == "applied"
    assert [(silo.silo, silo.outcome, silo.share) for silo in row.silos] == [
        ("bank-b", "refused", 0.0),
        ("clinic-c", "committed", 0.5),
        ("hospital-a", "committed", 0.5),
    ]
    assert at_work.metric("lorica_errors_total", kind="IntegrityError") == 1


async def test_a_silo_whose_update_finds_no_room_on_the_disk_is_left_out_at_the_deadline(
    at_work: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plan(at_work.folder, "second", schedule={**SCHEDULE, "rounds": 1}, evaluation=QUIET)
    silos = [await at_work.enrolled(name) for name in ("bank-b", "clinic-c", "hospital-a")]
    await at_work.service.start_plan("second")
    allocate = os.posix_fallocate

    def nearly_full(descriptor: int, begin: int, size: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "bank-b.delta":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", nearly_full)

    async def refused(silo: SiloStandIn) -> None:
        orders = await silo.work(at_work.service, until=is_train)
        with pytest.raises(StorageError, match=r"spools/.*/bank-b\.delta cannot be used: No space left on device"):
            await silo.do(at_work.service, orders[-1])

    async def commits(silo: SiloStandIn) -> None:
        orders = await silo.work(at_work.service, until=is_train)
        await silo.do(at_work.service, orders[-1])

    await asyncio.gather(refused(silos[0]), *(commits(silo) for silo in silos[1:]))
    state = at_work.service._loop.state
    assert isinstance(state, Collecting)
    await at_work.service._loop.post(DeadlinePassed(now=state.deadline, deadline=state.deadline))
    await at_work.reaches(lambda now: isinstance(now, StateFinished))
    (row,) = await at_work.service.rounds()
    assert [(silo.silo, silo.outcome) for silo in row.silos] == [
        ("bank-b", "late"),
        ("clinic-c", "committed"),
        ("hospital-a", "committed"),
    ]


async def test_a_full_disk_refuses_the_commit_and_a_later_one_succeeds(at_work: Running) -> None:
    async with in_training(at_work) as (bank, _, order, bundle):
        with sqlite3.connect(at_work.folder / "state.sqlite") as database:
            database.execute(
                "CREATE TRIGGER full BEFORE UPDATE ON machine BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            )
        with pytest.raises(StorageError, match=r"state\.sqlite.*disk is full"):
            await bank.do(at_work.service, order)
        assert (await at_work.service.status()).detail.startswith("0 of 2 updates in")
        with sqlite3.connect(at_work.folder / "state.sqlite") as database:
            database.execute("DROP TRIGGER full")
        delta = bank.delta(bundle, 1)
        header = bank.header(order.key, order.model, bundle, delta)
        held, committed = await at_work.service.upload_offset(bank.name, order.key, header.manifest.digest)
        assert (held, committed) == (header.manifest.chunks, False)
        await bank.upload(at_work.service, replace(header, first_chunk=held), delta)
        assert (await at_work.service.status()).detail.startswith("1 of 2 updates in")


async def test_an_aggregation_without_its_model_is_tried_again_until_it_is_back(at_work: Running) -> None:
    async with in_training(at_work) as (bank, hospital, order, _):
        await bank.do(at_work.service, order)
        models = at_work.folder / "models" / order.key.plan
        away = at_work.folder / "away"
        delta = hospital.delta(bundle := PlanShelf(at_work.folder).bundle(order.key.plan), 1)
        models.rename(away)
        await hospital.upload(at_work.service, hospital.header(order.key, order.model, bundle, delta), delta)
        while "is missing" not in (await at_work.service.status()).detail:  # nothing changes, so nothing tells
            await asyncio.sleep(0.01)
        assert (await at_work.service.status()).phase == "aggregating"
        if models.exists():
            shutil.rmtree(models)
        away.rename(models)
        await at_work.reaches(lambda state: round_of(state)[0] == 2)
        assert (await at_work.service.rounds())[0].outcome == "applied"


async def test_a_report_repeated_after_the_evaluation_has_closed_is_acknowledged(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule=SCHEDULE)
    bank, hospital = await two_silos(at_work)
    await at_work.service.start_plan("second")
    orders, _ = await work_together(at_work.service, bank, hospital, until=is_train)
    evaluate = next(order for order in orders if isinstance(order, Evaluate))
    await at_work.service.report_evaluation(bank.name, evaluate.key, evaluate.model, bank.evaluation())
    bank.exact_matches = 9
    with pytest.raises(WrongTime):
        await at_work.service.report_evaluation(bank.name, evaluate.key, evaluate.model, bank.evaluation())


# --- plans that cannot be started


async def test_a_quorum_larger_than_the_population_is_refused(at_work: Running) -> None:
    add_plan(at_work.folder, "second", schedule={"rounds": 1, "min_silos": 3})
    await two_silos(at_work)
    with pytest.raises(StateError, match="min_silos = 3 and 2 silos are enrolled"):
        await at_work.service.start_plan("second")
    assert (await at_work.service.status()).phase == "idle"


async def test_a_plan_of_another_federation_is_refused(at_work: Running) -> None:
    add_plan(at_work.folder, "second", federation="other-net")
    with pytest.raises(ConfigurationError, match="is for federation 'other-net'"):
        await at_work.service.start_plan("second")


async def test_a_second_plan_waits_for_the_first_to_stop_and_the_first_is_not_begun_twice(at_work: Running) -> None:
    async with in_training(at_work):
        add_plan(at_work.folder, "third", schedule=SCHEDULE)
        with pytest.raises(StateError, match=r"plan second \(.{16}\) is running"):
            await at_work.service.start_plan("third")
        await at_work.service.stop_plan()
        await at_work.service.start_plan("third", leave="second")
        await at_work.service.stop_plan()
        with pytest.raises(StateError, match="second has run before"):
            await at_work.service.start_plan("second")  # not that it wants --leave, which would be for nothing


async def test_without_a_name_the_plan_that_is_there_starts_whatever_became_of_its_folder(at_work: Running) -> None:
    """Never the default one, which would leave it for good."""
    add_plan(at_work.folder, "default", schedule=SCHEDULE)
    async with in_training(at_work) as (_, _, order, _):
        assert (await at_work.service.start_plan()).plan == order.key.plan, "it runs"
        await at_work.service.stop_plan()
        shutil.rmtree(at_work.folder / "plans" / "second")
        started = await at_work.service.start_plan()
        assert (started.plan, started.name) == (order.key.plan, "second")
        assert (await at_work.service.status()).phase == "collecting"


async def test_without_a_name_the_plan_that_was_offered_starts_as_its_folder_has_it_now(at_work: Running) -> None:
    add_plan(at_work.folder, "default", schedule=SCHEDULE)
    add_plan(at_work.folder, "second", schedule=SCHEDULE, evaluation=QUIET)
    await two_silos(at_work)
    await at_work.service.offer_plan("second")
    shutil.rmtree(at_work.folder / "plans" / "second")
    add_plan(at_work.folder, "second", schedule={**SCHEDULE, "rounds": 5}, evaluation=QUIET)
    assert (await at_work.service.start_plan()).name == "second"
    assert (await at_work.service.status()).rounds == 5


async def test_without_a_name_the_default_plan_starts_where_none_ever_was(at_work: Running) -> None:
    add_plan(at_work.folder, "default", schedule=SCHEDULE)
    await two_silos(at_work)
    with pytest.raises(StateError, match="this one leaves none"):
        await at_work.service.start_plan(leave="second")
    assert (await at_work.service.start_plan()).name == "default"


async def test_a_stopped_plan_is_left_by_its_name_alone_and_no_model_is_stored_before(at_work: Running) -> None:
    async with in_training(at_work) as (_, _, order, _):
        await at_work.service.stop_plan()
        add_plan(at_work.folder, "default", schedule=SCHEDULE)

        def stored() -> set[Path]:
            return {path for path in (at_work.folder / "models").rglob("*") if path.is_file()}

        models = stored()
        for leave in ("", "default", "secon"):
            with pytest.raises(StateError) as refused:
                await at_work.service.start_plan("default", leave=leave)
            assert "plan second " in str(refused.value)
            assert "stopped in round 1 of 2" in str(refused.value)
            assert "`coordinator plan start` goes on with it" in str(refused.value)
            assert "`coordinator plan start default --leave second` leaves it for good" in str(refused.value)
        with pytest.raises(StateError, match="this one leaves none"):
            await at_work.service.start_plan("second", leave="second")
        assert stored() == models
        assert (await at_work.service.start_plan()).plan == order.key.plan, "it was left for nothing"


async def test_a_stopped_plan_whose_folder_was_edited_is_another_plan(at_work: Running) -> None:
    async with in_training(at_work) as (_, _, order, _):
        await at_work.service.stop_plan()
        shutil.rmtree(at_work.folder / "plans" / "second")
        add_plan(at_work.folder, "second", schedule={**SCHEDULE, "rounds": 5}, evaluation=QUIET)
        with pytest.raises(StateError, match="--leave second"):
            await at_work.service.start_plan("second")
        assert (await at_work.service.start_plan("second", leave="second")).plan != order.key.plan


async def test_stopping_without_a_plan_is_wrong_time(at_work: Running) -> None:
    with pytest.raises(WrongTime, match="phase idle"):
        await at_work.service.stop_plan()


# --- enrolment


async def test_each_invitation_has_a_256_bit_secret_of_its_own(at_work: Running) -> None:
    tokens = [(await at_work.service.enrolment.invite("bank-b", 60))[0] for _ in range(4)]
    held = [enrolment_token.decode(token).secret for token in tokens]
    assert {len(secret) for secret in held} == {32}
    assert len(set(held)) == 4


async def test_a_replayed_token_is_refused(at_work: Running) -> None:
    token, _ = await at_work.service.enrolment.invite("bank-b", 60)
    await SiloStandIn(SiloName("bank-b")).enrol(at_work.service, token)
    thief = SiloStandIn(SiloName("bank-b"))
    with pytest.raises(AuthenticationError, match="the token of silo bank-b was used at"):
        await thief.enrol(at_work.service, token)


async def test_of_two_agents_with_one_token_only_one_enrols(at_work: Running) -> None:
    token, _ = await at_work.service.enrolment.invite("bank-b", 60)
    outcomes = await asyncio.gather(
        *(SiloStandIn(SiloName("bank-b")).enrol(at_work.service, token) for _ in range(4)), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["AuthenticationError"] * 3 + ["Issued"]


async def test_an_expired_token_is_refused(folder: Path) -> None:
    clock = AdjustableClock()
    async with running(folder, clock=clock) as coordinator:
        token, _ = await coordinator.service.enrolment.invite("bank-b", 60)
        clock.ahead = 61
        with pytest.raises(AuthenticationError, match="expired at"):
            await SiloStandIn(SiloName("bank-b")).enrol(coordinator.service, token)
        assert not coordinator.service.enrolment.invitations_open()


async def test_a_token_with_another_secret_is_refused_and_the_invitation_stays(at_work: Running) -> None:
    older, _ = await at_work.service.enrolment.invite("bank-b", 60)
    newer, _ = await at_work.service.enrolment.invite("bank-b", 60)
    bank = SiloStandIn(SiloName("bank-b"))
    with pytest.raises(AuthenticationError, match="newest token"):
        await bank.enrol(at_work.service, older)
    await bank.enrol(at_work.service, newer)


async def test_a_csr_for_another_silos_name_is_refused_and_the_token_is_not_spent(at_work: Running) -> None:
    token, _ = await at_work.service.enrolment.invite("bank-b", 60)
    bank = SiloStandIn(SiloName("bank-b"))
    with pytest.raises(AuthorisationError, match="hospital-a"):
        await bank.enrol(at_work.service, token, name_in_request="hospital-a")
    issued = await bank.enrol(at_work.service, token)
    assert issued.coordinator_identity_key == load_keys(at_work.folder).identity_public_key


async def test_an_invitation_of_one_silo_does_not_enrol_another(at_work: Running) -> None:
    token, _ = await at_work.service.enrolment.invite("bank-b", 60)
    await at_work.service.enrolment.invite("hospital-a", 60)
    with pytest.raises(AuthenticationError):
        await SiloStandIn(SiloName("hospital-a")).enrol(at_work.service, token)


async def test_enrolling_again_replaces_the_keys_and_the_old_key_signs_no_update(at_work: Running) -> None:
    """Not in the round under way, of which the silo is no part any more, and not in the next."""
    async with in_training(at_work, schedule={"min_silos": 1}) as (bank, hospital, order, _):
        token, _ = await at_work.service.enrolment.invite(bank.name, 60)
        renewed = SiloStandIn(bank.name)
        await renewed.enrol(at_work.service, token)
        for keys in (bank, renewed):
            with pytest.raises(Conflict, match="has declined round 1"):
                await keys.do(at_work.service, order)
        async with attending(at_work.service, replace(renewed, instance=b"i" * 8 + b"j" * 8)) as of_bank:
            await hospital.do(at_work.service, order)
            later = await of_bank(Train)
            assert later.key.round == 2
            with pytest.raises(IntegrityError):
                await bank.do(at_work.service, later)
            await renewed.do(at_work.service, later)
        assert len((await at_work.service.status()).silos) == 2


async def test_invitations_outlive_a_restart_and_open_and_close_the_listener(folder: Path) -> None:
    clock = AdjustableClock()
    async with running(folder, clock=clock) as coordinator:
        enrolment = coordinator.service.enrolment
        opening = asyncio.create_task(enrolment.until_open())
        token, _ = await enrolment.invite("bank-b", 3600)
        await opening
    async with running(folder, clock=clock) as coordinator:
        enrolment = coordinator.service.enrolment
        assert enrolment.invitations_open()
        closing = asyncio.create_task(enrolment.until_closed())
        await SiloStandIn(SiloName("bank-b")).enrol(coordinator.service, token)
        await closing
        await enrolment.invite("hospital-a", 1)
        await enrolment.until_closed()  # it expires
        assert not enrolment.invitations_open()


async def test_names_and_lifetimes_of_invitations_are_checked(at_work: Running) -> None:
    for name, seconds in (("Bank B", 60), ("bank-b", 0), ("bank-b", 91 * 86_400)):
        with pytest.raises(ConfigurationError):
            await at_work.service.enrolment.invite(name, seconds)


# --- masked plans whose release groups lack silos


async def test_a_masked_plan_whose_groups_lack_a_silo_waits_says_for_whom_and_opens_once_others_are_proposed(
    folder: Path,
) -> None:
    masked = {"secure_aggregation": True, "max_weight": 1000.0}
    with capture_logs() as logs:
        async with running(folder) as coordinator:
            service = coordinator.service
            add_plan(folder, "masked", schedule={"rounds": 1, "min_silos": 3}, aggregation=masked, evaluation=QUIET)
            silos = [await coordinator.enrolled(name) for name in ("bank-a", "bank-b", "clinic-c", "clinic-d")]
            await service.start_plan("masked")
            async with AsyncExitStack() as there:
                waits = [await there.enter_async_context(attending(service, silo)) for silo in silos[:3]]
                for wait in waits:
                    assert (await wait(Standby)).reason is StandbyReason.GATHERING
                status = await service.status()
                assert status.seconds_left is None
                assert "bank-a,bank-b,clinic-c,clinic-d lacks clinic-d" in status.detail
                assert coordinator.metric("lorica_release_groups_absent_silos") == 1
                assert not await service.rounds()
                await service.groups.propose([[silo.name for silo in silos[:3]]])
                await coordinator.settled()
                assert (await service.status()).seconds_left is not None, "the deadline of gathering runs"
                service.groups.stood = EarlierGroups(number=1, digest="d" * 64, groups=(("bank-a", "clinic-d"),))
                assert "waiting for clinic-d; where nobody has them" in (await service.status()).detail
                assert coordinator.metric("lorica_release_groups_absent_silos") == 0
    (said,) = [line for line in logs if line["event"] == "no masked sum can come out"]
    assert said["absent"] == ["clinic-d"]


async def test_rounds_say_what_each_silo_does_and_that_an_attempt_is_over_brought_nothing(at_work: Running) -> None:
    coordinator = at_work
    service = coordinator.service
    add_plan(coordinator.folder, "second", schedule={**SCHEDULE, "min_silos": 2}, evaluation=QUIET)
    bank, hospital = await two_silos(coordinator)

    async def outcomes() -> list[list[str]]:
        return [[silo.outcome for silo in row.silos] for row in await service.rounds()]

    await service.start_plan("second")
    async with attending(service, hospital) as of_hospital:
        async with attending(service, bank) as of_bank:
            await asyncio.gather(of_bank(Train), of_hospital(Train))
            assert await outcomes() == [["training", "training"]]
        await coordinator.settled()
        assert await outcomes() == [["absent", "training"]]
        await service.stop_plan()
        assert await outcomes() == [["no update", "no update"]]
