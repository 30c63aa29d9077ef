"""A plan whose coordinator's machine is lost in a round: another one, with an empty folder, a bucket, the database and
the vault of keys, goes on with the same round to the same model.

The bucket is moto's, a process on loopback. The database is SQLite in a folder of its own, standing for PostgreSQL: what
matters here is that it is elsewhere.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.kept.block_cipher import MORE_BYTES
from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.kept_in_bucket import KeptInBucket, Leader
from lorica_coordinator.edges.kept.settled import settle
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.rounds.states import Collecting, Finished, Gathering, Stopped, course_of
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import StateError, StorageError
from silo_wire.messages import Order, Train
from silo_wire.plans.plan import PlanBundle
from tests.support.coordinator_service import (
    FEDERATION,
    Running,
    SiloStandIn,
    add_plan,
    load_keys,
    make_coordinator_folder,
    running,
)
from tests.support.s3_server import S3Server, running_moto
from tests.unit.test_rounds_service import QUIET, attending, is_finished, is_train, two_silos, work_together

SCHEDULE = {"rounds": 2, "min_silos": 2}
BLOCK = 1 << 16


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys, and a plan of two rounds with a server optimizer that has state, published in bfloat16."""
    folder = tmp_path_factory.mktemp("coordinator")
    make_coordinator_folder(folder)
    optimizer = {"server_optimizer": "adam", "server_learning_rate": 0.01}
    add_plan(folder, "kept", schedule=SCHEDULE, evaluation=QUIET, aggregation=optimizer, wire={"update": "float32"})
    return folder


class Fallible(Bucket):
    """Refuses to take what `refuses`, an object by its name; `refused` has the names."""

    def __init__(self, name: str, prefix: str, store: Any) -> None:
        super().__init__(name, prefix, store)
        self.refuses: Callable[[str], bool] = lambda name: False
        self.refused: list[str] = []

    def put(self, name: str, content: bytes | memoryview) -> None:
        if self.refuses(name):
            self.refused.append(name)
            raise StorageError("the bucket is away")
        super().put(name, content)


class Machines:
    """Each with a folder of its own; keys, vault and database are elsewhere, and outlast them."""

    def __init__(self, root: Path, made: Path, bucket: Bucket) -> None:
        self.root, self.bucket, self.term = root, bucket, 0
        shutil.copytree(made / "keys", root / "keys")
        self._plans = made / "plans"

    def folder(self, name: str) -> Path:
        return self.root / name

    def with_another_plan(self, name: str) -> str:
        """The machine's folder, so that its bucket is not new; the plan's bundle."""
        other = f"bundles/{'0' * 64}.bundle"
        (self.folder(name) / other).parent.mkdir(parents=True)
        (self.folder(name) / other).write_bytes(b"another plan")
        return other

    @asynccontextmanager
    async def leading(self, name: str, *, with_plans: bool = False) -> AsyncIterator[Running]:
        folder = self.folder(name)
        folder.mkdir(exist_ok=True)
        if not (folder / "keys").exists():
            (folder / "keys").symlink_to(self.root / "keys")
        if with_plans:
            shutil.copytree(self._plans, folder / "plans")
        self.term += 1
        keys, vault = load_keys(folder), SpoolKeys(folder / "spools", self.root / "vault" / "spools", self.term)

        def has_key(update: Path, name: str) -> bool:
            path = vault.path(update, name)
            return path is not None and path.is_file()

        leader = Leader(federation=FEDERATION, term=self.term, identity=keys.identity)
        kept = KeptInBucket(folder, self.bucket, leader, block_bytes=BLOCK)
        settle(kept, folder, has_key)
        store = SqlRoundStore(self.root / "state.sqlite", FEDERATION)
        async with running(folder, store=store, kept=kept, spool_keys=vault) as at_work:
            yield at_work
        kept.close()


def rows(of: tuple[RoundRow, ...]) -> list[tuple[Any, ...]]:
    return [(row.round, row.attempt, row.outcome, row.model, [silo.silo for silo in row.silos]) for row in of]


async def one_update_of(coordinator: Running, silo: SiloStandIn, order: Train, *, is_there: bool = False) -> None:
    """`is_there`: all chunks of it, and only the commit is asked for again."""
    bundle = PlanBundle.decode(await coordinator.service.plan_bundle(order.key.plan), order.key.plan)
    delta = silo.delta(bundle, order.key.round)
    header = silo.header(order.key, order.model, bundle, delta)
    first = header.manifest.chunks if is_there else 0
    await silo.upload(coordinator.service, replace(header, first_chunk=first), delta)


def is_second_train(order: Order) -> bool:
    return isinstance(order, Train) and order.key.round == 2


@pytest.fixture(scope="module")
def undisturbed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """Its rounds."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("undisturbed") / "coordinator"))

    async def work() -> list[tuple[Any, ...]]:
        async with running(folder) as coordinator:
            silos = await two_silos(coordinator)
            await coordinator.service.start_plan("kept")
            await work_together(coordinator.service, *silos, until=is_finished)
            return rows(await coordinator.service.rounds())

    return asyncio.run(work())


async def test_another_machine_goes_on_with_the_round_to_the_same_model(
    moto: S3Server, made: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    machines = Machines(tmp_path, made, moto.bucket("north"))
    async with machines.leading("first", with_plans=True) as coordinator:
        bank, hospital = await two_silos(coordinator)
        await coordinator.service.start_plan("kept")
        await work_together(coordinator.service, bank, hospital, until=is_second_train)
        async with attending(coordinator.service, bank) as of_bank, attending(coordinator.service, hospital):
            order = await of_bank(Train)
            assert order.key.round == 2
            await one_update_of(coordinator, bank, order)
        state = coordinator.service._loop.state
        assert isinstance(state, Collecting)
        assert [update.silo for update in state.updates] == [bank.name]
    committed = {name for name in machines.bucket.names() if "/spools/" in name}
    assert {name.rsplit("/", 2)[1] for name in committed} == {f"{bank.name}.delta", f"{bank.name}.json"}
    shutil.rmtree(machines.folder("first"))

    async with machines.leading("second") as coordinator:
        assert not (coordinator.folder / "plans").exists()
        await work_together(coordinator.service, bank, hospital, until=is_finished)
        assert isinstance(coordinator.service._loop.state, Finished)
        assert rows(await coordinator.service.rounds()) == undisturbed
    await nothing_is_left_but_the_newest(machines)


async def nothing_is_left_but_the_newest(machines: Machines) -> None:
    names = set(machines.bucket.names())
    assert not [name for name in names if "/spools/" in name]
    models = {name.rsplit("/", 2)[1] for name in names if name.rsplit("/", 2)[1].endswith(".safetensors")}
    kept = {path.name for path in machines.folder("second").rglob("*.safetensors")}
    assert models == kept
    assert len(models) <= 2, "the newest and the best"
    assert not list((machines.root / "vault").rglob("*.key"))


async def is_stopped(coordinator: Running) -> None:
    loop, changed = coordinator.service._loop, asyncio.Event()
    loop.on_change.append(changed.set)
    while not isinstance(loop.state, Stopped):
        changed.clear()
        await asyncio.wait_for(changed.wait(), 60)


@pytest.mark.parametrize("part", [".safetensors", ".optimizer/state.json"])
async def test_a_plan_whose_model_is_not_there_is_stopped_and_goes_on_when_it_is(
    moto: S3Server, made: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]], part: str
) -> None:
    """The index of a file of the present model goes in the bucket, with the machine: no silo trains for nothing, no
    other model goes, and nothing is lost once it is back."""
    machines = Machines(tmp_path, made, moto.bucket("no-model" if part == ".safetensors" else "no-state"))
    async with machines.leading("first", with_plans=True) as coordinator:
        bank, hospital = await two_silos(coordinator)
        await coordinator.service.start_plan("kept")
        await work_together(coordinator.service, bank, hospital, until=is_second_train)
        present = course_of(coordinator.service._loop.state).model  # type: ignore[union-attr]
    shutil.rmtree(machines.folder("first"))
    (index,) = [name for name in machines.bucket.names() if name.endswith(f"/{present}{part}/index")]
    content = machines.bucket.get(index, BLOCK)
    assert content is not None
    machines.bucket.delete([index])

    others = [name for name in machines.bucket.names() if "/models/" in name]
    async with machines.leading("second") as coordinator:
        await is_stopped(coordinator)
        said = f"model {present} of plan kept, from which it goes on, is not whole: "
        standing = await coordinator.service.status()
        assert standing.detail.startswith(f"stopped: {said}")
        assert "start another plan with --leave kept" in standing.detail
        assert coordinator.metric("lorica_phase_failing") == 1
        assert said in (await coordinator.service.rounds())[-1].detail
        assert coordinator.metric("lorica_abandoned_rounds_total", cause="model_missing") == 1
        for _ in range(2):
            said = rf"model {present} of plan kept.*{present}{part}.*is stored nowhere.*versions.*--leave kept"
            with pytest.raises(StateError, match=said):
                await coordinator.service.start_plan()
    assert set(others) <= set(machines.bucket.names())

    machines.bucket.put(index, bytes(content))
    async with machines.leading("third") as coordinator:
        assert coordinator.metric("lorica_phase_failing") == 1, "until it is started again"
        await coordinator.service.start_plan()
        assert coordinator.metric("lorica_phase_failing") == 0
        await work_together(coordinator.service, bank, hospital, until=is_finished)
        found = [row for row in rows(await coordinator.service.rounds()) if row[2] == "applied"]
        assert [(row[0], row[3]) for row in found] == [(row[0], row[3]) for row in undisturbed]


async def test_no_round_opens_before_its_plan_is_where_another_machine_finds_it(
    moto: S3Server, made: Path, tmp_path: Path
) -> None:
    """The folder has a plan that the bucket lacks; whoever takes over in the first round goes on with it."""
    bucket = Fallible.at(moto.place("lacks"))
    machines = Machines(tmp_path, made, bucket)
    other = machines.with_another_plan("first")
    async with machines.leading("first", with_plans=True) as coordinator:
        bank, hospital = await two_silos(coordinator)
        await coordinator.service.start_plan("kept")
    bucket.delete([name for name in bucket.names() if other not in name])

    bucket.refuses = lambda name: True
    async with machines.leading("first") as coordinator:
        with pytest.raises(StorageError, match="the bucket is away"):
            await work_together(coordinator.service, bank, hospital, until=is_train)
        assert isinstance(coordinator.service._loop.state, Gathering)
        bucket.refuses = lambda name: False
        await work_together(coordinator.service, bank, hospital, until=is_train)
    shutil.rmtree(machines.folder("first"))
    async with machines.leading("second") as coordinator:
        await work_together(coordinator.service, bank, hospital, until=is_finished)


async def test_a_plan_that_the_bucket_lacks_is_kept_before_a_silo_comes(
    moto: S3Server, made: Path, tmp_path: Path
) -> None:
    bucket = moto.bucket("lacks-too")
    machines = Machines(tmp_path, made, bucket)
    other = machines.with_another_plan("first")
    async with machines.leading("first", with_plans=True) as coordinator:
        await two_silos(coordinator)
        await coordinator.service.start_plan("kept")
    kept = {name for name in bucket.names() if other not in name}
    bucket.delete(kept)
    async with machines.leading("first") as coordinator:
        await asyncio.gather(*coordinator.service._unattended)
    assert {name.partition("/")[2] for name in bucket.names()} >= {name.partition("/")[2] for name in kept}


@pytest.mark.parametrize("lost", ["vault", "block"])
async def test_without_the_vault_or_a_block_the_round_goes_on_without_that_update(
    moto: S3Server, made: Path, tmp_path: Path, lost: str
) -> None:
    machines = Machines(tmp_path, made, moto.bucket(f"no-{lost}"))
    async with machines.leading("first", with_plans=True) as coordinator:
        bank, hospital = await two_silos(coordinator)
        await coordinator.service.start_plan("kept")
        async with attending(coordinator.service, bank) as of_bank, attending(coordinator.service, hospital) as other:
            order, _ = await asyncio.gather(of_bank(Train), other(Train))
            await one_update_of(coordinator, bank, order)
        content = b"".join(
            path.read_bytes() for path in machines.folder("first").rglob("*.key") if "keys" not in path.parts
        )
        assert content == b""
        keys = [path.read_bytes() for path in (machines.root / "vault").rglob("*.key")]
        assert [len(key) for key in keys] == [32]
    for name in machines.bucket.names():
        found = machines.bucket.get(name, BLOCK + MORE_BYTES)
        assert found is not None
        assert keys[0] not in bytes(found), "a key of an update is in no bucket"
    shutil.rmtree(machines.folder("first"))
    if lost == "vault":
        shutil.rmtree(machines.root / "vault")
    else:
        machines.bucket.delete([next(name for name in machines.bucket.names() if f"/{bank.name}.delta/0" in name)])
    async with machines.leading("second") as coordinator:
        await asyncio.gather(*(silo.work(coordinator.service, until=is_finished) for silo in (bank, hospital)))
        found_rows = await coordinator.service.rounds()
        assert [row.outcome for row in found_rows if row.outcome == "applied"] == ["applied"] * 2


async def test_a_round_goes_on_when_its_bucket_is_back(
    moto: S3Server, made: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    """Away as an update is committed and as the model is made: refused by name, tried again, nothing lost."""
    bucket = Fallible.at(moto.place("away"))
    machines = Machines(tmp_path, made, bucket)
    async with machines.leading("first", with_plans=True) as coordinator:
        bank, hospital = await two_silos(coordinator)
        await coordinator.service.start_plan("kept")
        async with attending(coordinator.service, bank) as of_bank, attending(coordinator.service, hospital) as other:
            order, _ = await asyncio.gather(of_bank(Train), other(Train))
            bucket.refuses = lambda name: True
            with pytest.raises(StorageError, match="the bucket is away"):
                await one_update_of(coordinator, bank, order)
            state = coordinator.service._loop.state
            assert isinstance(state, Collecting)
            assert state.updates == ()
            bucket.refuses = lambda name: False
            await one_update_of(coordinator, bank, order, is_there=True)
            bucket.refused.clear()
            bucket.refuses = lambda name: "/models/" in name and not bucket.refused
            await one_update_of(coordinator, hospital, order)
        await work_together(coordinator.service, bank, hospital, until=is_finished)
        assert len(bucket.refused) == 1
        assert coordinator.metric("lorica_errors_total", kind="StorageError") >= 1
        assert rows(await coordinator.service.rounds()) == undisturbed
