"""`coordinator gc` beside a coordinator that runs: what a plan left goes, the round under way ends with its model."""

import asyncio
import threading
import time
from pathlib import Path

from lorica_coordinator.cli import main
from lorica_coordinator.edges.upkeep.garbage import DAY_S
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.service.records import PresentPlan
from silo_wire.messages import Evaluate, Train
from silo_wire.v1 import operator_pb2
from tests.support.command_line import run_command
from tests.support.coordinator import BANK, HOSPITAL, PLAN, FederationTemplate, Silo, federation_template, running

__all__ = ["federation_template"]


async def test_what_a_plan_left_goes_while_another_one_runs(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    shelf = Coordinator.load(folder).shelf
    first = shelf.compile(PLAN).plan.digest
    state = folder.root / "state"
    async with running(folder, offer=PLAN) as at:
        await at.service.stop_plan()
        text = (shelf.folder(PLAN) / "plan.toml").read_text()
        assert "seed = 0" in text
        (shelf.folder(PLAN) / "plan.toml").write_text(text.replace("seed = 0", "seed = 1", 1))
        second = (await at.service.start_plan(PLAN, leave=PLAN)).plan
        assert second != first
        async with (
            Silo(at, federation_template.silos[HOSPITAL]) as hospital,
            Silo(at, federation_template.silos[BANK]) as bank,
        ):
            for silo in (hospital, bank):
                await silo.join(second)
            layout = at.coordinator.shelf.bundle(second).layout
            await hospital.upload(hospital.update(await hospital.order(Train, 1), layout))
            assert {path.name for path in (state / "models").iterdir() if path.is_dir()} == {first, second}

            def left_long_ago() -> None:
                store = at.coordinator.open_store()
                with store._transaction() as connection:
                    connection.exec_driver_sql(
                        "UPDATE plans SET begun_at = ? WHERE digest = ?", (time.time() - 31 * DAY_S, first)
                    )
                store.close()

            await asyncio.to_thread(left_long_ago)
            async with at.operator() as operator:
                told = await operator.CollectGarbage(operator_pb2.CollectGarbageRequest(dry_run=True))
                assert (state / "models" / first).is_dir()
                done = await operator.CollectGarbage(operator_pb2.CollectGarbageRequest())
            assert list(told.items) == list(done.items)
            (item,) = done.items
            assert (item.kind, item.what) == ("models", f"models/{first}")
            assert item.bytes > 100_000
            assert {path.name for path in (state / "models").iterdir() if path.is_dir()} == {second}
            await bank.upload(bank.update(await bank.order(Train, 1), layout))
            assert (await hospital.order(Evaluate, 1)).model
    printed = await asyncio.to_thread(
        run_command, main, "gc", "--dir", folder.root
    )  # without the coordinator, under its lock
    assert (printed.code, printed.out) == (0, "there is nothing to delete\n")


async def test_no_plan_begins_while_a_collection_goes_on_that_nobody_waits_for(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """Its caller was cut off; what it has found to be of no plan must not be of one by the time that it is deleted."""
    begun, go_on = threading.Event(), threading.Event()

    def collect(_: PresentPlan) -> None:
        begun.set()
        go_on.wait(30)

    async with running(federation_template.copy(tmp_path / "coordinator")) as at:
        asked = asyncio.create_task(at.service.collect_garbage(collect))
        await asyncio.to_thread(begun.wait)
        asked.cancel()
        await asyncio.wait({asked})
        assert asked.cancelled()
        starting = asyncio.create_task(at.service.start_plan(PLAN))
        try:
            done, _ = await asyncio.wait({starting}, timeout=1)
            assert not done
        finally:
            go_on.set()
        await starting
