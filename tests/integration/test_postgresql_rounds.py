"""A coordinator's service whose database goes away in a round, and whose keys do: rounds go on, and nothing is lost."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.sealing.key_vault import FolderKeyVault
from lorica_coordinator.rounds.states import Collecting
from lorica_security.errors import StorageError
from tests.support.coordinator_service import FEDERATION, make_coordinator_folder, running
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.unit.test_rounds_service import in_training


@pytest.fixture
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


def store_of(server: PostgresqlServer, folder: Path) -> SqlRoundStore:
    place = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/postgres?host={server.folder}", folder)
    return SqlRoundStore(PostgresqlDatabase(place), FEDERATION, FolderKeyVault(folder / "attempt-keys", 1))


async def test_a_round_goes_on_when_its_database_is_back(server: PostgresqlServer, tmp_path: Path) -> None:
    """Gone between two updates: one is counted, the other is refused, sent again, and counted once."""
    folder = tmp_path / "coordinator"
    make_coordinator_folder(folder)
    shutil.rmtree(folder / "spools", ignore_errors=True)
    async with (
        running(folder, store=store_of(server, folder)) as coordinator,
        in_training(coordinator) as (bank, hospital, order, bundle),
    ):
        deltas = {silo.name: silo.delta(bundle, 1) for silo in (bank, hospital)}
        headers = {
            silo.name: silo.header(order.key, order.model, bundle, deltas[silo.name]) for silo in (bank, hospital)
        }
        counted = await bank.upload(coordinator.service, headers[bank.name], deltas[bank.name])
        await asyncio.to_thread(server.stop)
        with pytest.raises(StorageError, match="postgresql:///postgres cannot be read or written"):
            await hospital.upload(coordinator.service, headers[hospital.name], deltas[hospital.name])
        with pytest.raises(StorageError, match="rounds go on then"):
            await coordinator.service.rounds()
        state = coordinator.service._loop.state
        assert isinstance(state, Collecting)
        assert [update.silo for update in state.updates] == [bank.name]
        await asyncio.to_thread(server.start_again)
        again = await hospital.upload(coordinator.service, headers[hospital.name], deltas[hospital.name])
        await coordinator.reaches(lambda state: not isinstance(state, Collecting))
        await coordinator.reaches(lambda state: state.phase != "aggregating")
        rows = await coordinator.service.rounds()
        row = next(it for it in rows if it.round == 1)
        assert row.outcome == "applied"
        assert {silo.silo for silo in row.silos} == {bank.name, hospital.name}
        assert {counted, again} == {
            await asyncio.to_thread(coordinator.store.committed_update, order.key, silo.name)
            for silo in (bank, hospital)
        }
