"""Sides of another release: one minor version apart they work together, further apart one is told to be upgraded, and
to what."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lorica_coordinator.cli import main
from lorica_coordinator.edges.server import federation_servicer
from lorica_security.errors import LoricaError, StateError
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.calls import order_stream
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_wire import wire_version
from silo_wire.messages import Standby
from silo_wire.wire_version import OURS, Speaker, WireVersion, require_compatible
from tests.support.command_line import run_command
from tests.support.coordinator import (
    HOSPITAL,
    FederationTemplate,
    RunningCoordinator,
    Silo,
    federation_template,
    running,
)

__all__ = ["federation_template"]


@dataclass(slots=True)
class Agent:
    """The agent's own client, against the real listener."""

    client: GrpcCoordinator
    refusals: asyncio.Queue[LoricaError] = field(default_factory=asyncio.Queue)
    speakers: list[Speaker] = field(default_factory=list)


@asynccontextmanager
async def agent(at: RunningCoordinator, template: FederationTemplate, tmp_path: Path) -> AsyncIterator[Agent]:
    credentials = template.silos[HOSPITAL]
    async with Silo(at, credentials) as silo:
        refusals: asyncio.Queue[LoricaError] = asyncio.Queue()
        client = GrpcCoordinator(
            channel=silo.channel,
            credentials=credentials,
            models=ModelCache(tmp_path / "models", kept=1),
            agent_version="9.9",
            unreachable=lambda problem, seconds: refusals.put_nowait(problem),
            new_backoff=lambda: Backoff(most_s=0.01),
        )
        made = Agent(client, refusals)
        client.on_speaker = made.speakers.append
        yield made


class Apart:
    """Stands in for `wire_version` in one side alone."""

    def __init__(self, minor: int) -> None:
        self.OURS = WireVersion(OURS.major, minor)


def test_one_minor_version_apart_is_the_most() -> None:
    for agent_speaks in range(6):
        for coordinator_speaks in range(6):
            versions = {
                "agent": WireVersion(1, agent_speaks),
                "coordinator": WireVersion(1, coordinator_speaks),
                "silo": "a",
            }
            if abs(agent_speaks - coordinator_speaks) <= 1:
                require_compatible(**versions)  # type: ignore[arg-type]
                continue
            older = "the agent of silo a" if agent_speaks < coordinator_speaks else "the coordinator"
            needed = WireVersion(1, max(agent_speaks, coordinator_speaks) - 1)
            with pytest.raises(StateError, match=f"upgrade {older} to a release that speaks {needed} or newer$"):
                require_compatible(**versions)  # type: ignore[arg-type]
            require_compatible(
                agent=needed, coordinator=WireVersion(1, max(agent_speaks, coordinator_speaks)), silo="a"
            )


@pytest.mark.parametrize("minor", [0, 1])
def test_another_major_version_is_told_to_upgrade(minor: int) -> None:
    """Version 2 has other messages under masks; one that speaks 1 would fail in the midst of a round."""
    old, new = WireVersion(1, minor), WireVersion(2, 0)
    with pytest.raises(StateError, match=r"upgrade the agent of silo a to a release that speaks 2\.0 or newer$"):
        require_compatible(agent=old, coordinator=new, silo="a")
    with pytest.raises(StateError, match=r"upgrade the coordinator to a release that speaks 2\.0 or newer$"):
        require_compatible(agent=new, coordinator=old, silo="a")


async def test_agents_of_other_releases_at_the_real_coordinator(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    folder = federation_template.copy(tmp_path / "coordinator")
    async with running(folder) as at:
        for minor in range(max(0, OURS.minor - 1), OURS.minor + 2):
            monkeypatch.setattr(order_stream, "wire_version", Apart(minor))
            async with agent(at, federation_template, tmp_path) as one:
                async for order in one.client.orders():
                    assert isinstance(order, Standby)
                    break
                assert [speaker.wire for speaker in one.speakers] == [OURS]
                assert one.refusals.empty()
            (standing,) = [silo for silo in (await at.service.status()).silos if silo.silo == HOSPITAL]
            assert (standing.agent_version, standing.agent_wire) == ("9.9", f"{OURS.major}.{minor}")
        monkeypatch.setattr(order_stream, "wire_version", Apart(OURS.minor + 2))
        async with agent(at, federation_template, tmp_path) as far:
            waiting = asyncio.ensure_future(anext(aiter(far.client.orders())))
            problem = await far.refusals.get()
            await far.refusals.get()  # it tries again: nothing has to be restarted when the coordinator was upgraded
            waiting.cancel()
            assert isinstance(problem, StateError)
            assert problem.told_by_peer
            assert "upgrade the coordinator to a release that speaks 2.1 or newer" in str(problem)
        shown = await asyncio.to_thread(run_command, main, "status", "--dir", folder.root)
        assert f"(wire {OURS})" in shown.out
        assert "9.9" in shown.out


async def test_a_coordinator_that_is_too_far_ahead_refuses_and_one_that_does_not_check_is_refused(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    folder = federation_template.copy(tmp_path / "coordinator")
    async with running(folder) as at:
        monkeypatch.setattr(federation_servicer, "wire_version", Apart(OURS.minor + 1))
        async with agent(at, federation_template, tmp_path) as near:
            await anext(aiter(near.client.orders()))
            assert [speaker.wire.minor for speaker in near.speakers] == [OURS.minor + 1]
        monkeypatch.setattr(federation_servicer, "wire_version", Apart(OURS.minor + 2))
        async with agent(at, federation_template, tmp_path) as far:
            waiting = asyncio.ensure_future(anext(aiter(far.client.orders())))
            problem = await far.refusals.get()
            waiting.cancel()
            assert f"upgrade the agent of silo {HOSPITAL} to a release that speaks 2.1 or newer" in str(problem)
        monkeypatch.setattr(federation_servicer, "wire_version", Apart(0))  # of a release that knows no minor versions
        monkeypatch.setattr(federation_servicer, "require_compatible", lambda **_: None)
        monkeypatch.setattr(order_stream, "wire_version", Apart(2))
        async with agent(at, federation_template, tmp_path) as newer:
            waiting = asyncio.ensure_future(anext(aiter(newer.client.orders())))
            problem = await newer.refusals.get()
            waiting.cancel()
            assert isinstance(problem, StateError)
            assert not problem.told_by_peer, "the agent's own finding"
            assert "upgrade the coordinator to a release that speaks 2.1 or newer" in str(problem)
            assert newer.speakers == []
        assert wire_version.OURS == OURS
