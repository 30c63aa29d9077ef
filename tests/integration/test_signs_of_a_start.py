"""Signs of a coordinator's start end where its loop serves: a thread that went on would speak for a loop that hangs."""

import asyncio
from pathlib import Path

from lorica_coordinator.composition import serve
from lorica_coordinator.edges.telemetry.logs import Whereabouts
from lorica_coordinator.opened import Coordinator, leading
from tests.support.coordinator import FederationTemplate, federation_template

__all__ = ["federation_template"]


async def test_one_that_serves_is_shown_alive_by_its_loop_alone(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    with leading(Coordinator.load(federation_template.copy(tmp_path / "coordinator"))) as leader:
        assert leader.start is not None
        ready = asyncio.Event()
        running = asyncio.create_task(serve(leader, offer="", ready=ready.set, where=Whereabouts()))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
            assert ready.is_set(), running
            await asyncio.to_thread(leader.start._thread.join, 5)
            assert not leader.start._thread.is_alive()
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
