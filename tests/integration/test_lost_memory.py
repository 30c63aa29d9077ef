"""A silo whose folder lost what it took part in is told so by the coordinator, before it advertises keys."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.messages import Advertisement
from silo_wire.messages import RoundKey
from tests.support.coordinator import FederationTemplate, running
from tests.support.rogue_silos import HONEST, ROGUE, PlayedSilo, honestly, make_rogue_template, played


@pytest.fixture(scope="module")
def rogue_template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    return make_rogue_template(tmp_path_factory.mktemp("rogue") / "coordinator")


async def test_the_coordinator_tells_a_silo_which_keys_it_forgot(
    rogue_template: FederationTemplate, tmp_path: Path
) -> None:
    lost = asyncio.Event()
    made: dict[SiloName, list[bytes]] = {name: [] for name in (ROGUE, *HONEST)}

    async def note(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        if isinstance(message, Advertisement):
            if key.round == 2:
                await lost.wait()
            made[silo.name].append(message.digest)
        await honestly(silo, key, message)

    async with played(rogue_template, tmp_path, note, verify="off") as play:
        for name in HONEST:
            play.silos[name].attack = note
        await play.closed(1)
        rogue = play.rogue
        shutil.rmtree(rogue.folder.masking)
        for file in (rogue.folder.lineages, rogue.folder.release_groups, rogue.folder.peers):
            file.unlink()
        await rogue.restart()
        lost.set()
        row = await play.closed(2)
        assert row.outcome == "applied"
        assert play.of(row).outcome == "declined"
        assert (
            "the coordinator saw keys of this silo that its memory of masked rounds does not have"
            in play.of(row).detail
        )
        assert len(made[ROGUE]) == 1, "it advertised none"
        store = play.at.coordinator.open_store()
        try:
            kept = store.announced()
        finally:
            store.close()
        assert kept == {name: digests[-1] for name, digests in made.items()}
        folder = play.at.coordinator.folder
    async with running(folder) as again:
        assert again.service._announced == kept
