"""What the service tells of plans that came before: each by its own terms, whichever plan is under way now."""

import asyncio
import json
import shutil
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lorica.bench.made_rounds import FEDERATION, MadePlan, add_rounds, begin, database_of, fill, make_folder, silo_names
from lorica.demo.ports import free_ports
from lorica_coordinator.cli import main
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.status_page import page
from lorica_coordinator.edges.status_page.curves import curves_json
from lorica_coordinator.edges.status_page.histories import Histories, PlanHistory
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.plan_desk import READ_AGAIN_S, PlanDesk
from lorica_coordinator.service.ports import PlanParts
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle
from tests.support.command_line import run_command
from tests.support.coordinator import running

NAMES = silo_names(3)
PLAIN = {"schedule.rounds": 4}
MASKED = {
    "schedule.rounds": 4,
    "aggregation.secure_aggregation": True,
    "aggregation.weighting": "equal",
    "aggregation.max_delta_norm": 1.0,
}
PRIVATE = {
    "schedule.rounds": 4,
    "privacy.level": "record",
    "privacy.noise_multiplier": 1.5,
    "evaluation.every": 0,
    "evaluation.initial": False,
    "evaluation.last": False,
    "training.dropout": 0.0,
    "training.epochs": 1,
    "aggregation.weighting": "equal",
    "aggregation.max_delta_norm": 1.0,
}
ROUNDS = range(1, 5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four plans, each with every figure of every silo in its records, and a plain one is under way."""
    root = tmp_path_factory.mktemp("history") / "coordinator"
    folder = make_folder(root, free_ports(4))
    now = time.time()
    kinds = {"open": PLAIN, "covered": MASKED, "noised": PRIVATE, "present": PLAIN}
    fill(folder, [MadePlan(name=name, done=0, values=values) for name, values in kinds.items()], NAMES, now=now)
    coordinator = Coordinator.load(folder)
    for name in kinds:
        bundle = coordinator.shelf.compile(name)
        begin(coordinator, bundle, 4, NAMES, now=now)
        add_rounds(database_of(coordinator), bundle.plan.digest, ROUNDS, NAMES, begun=now)
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> CoordinatorFolder:
    return CoordinatorFolder(Path(shutil.copytree(made, tmp_path / "coordinator")))


async def told(service: Federation) -> dict[str, tuple[bool, bool]]:
    """By plan, whether its terms show single silos, and whether anything of one came with its rounds."""
    found = {}
    for plan in await service.recorded_plans():
        silos = [silo for row in await service.rounds_of(plan.digest) for silo in row.silos]
        assert len(silos) == len(ROUNDS) * len(NAMES)
        figures = any(silo.examples or silo.loss_min or silo.share or silo.weight or silo.evaluation for silo in silos)
        found[plan.name] = plan.shows_single_silos, figures
    return found


async def test_each_plan_is_told_of_by_its_own_rule(folder: CoordinatorFolder) -> None:
    async with running(folder) as at:
        plans = await at.service.recorded_plans()
        assert [plan.present for plan in plans] == [False, False, False, True]
        assert {plan.score for plan in plans} == {"exact match"}
        assert await told(at.service) == {
            "open": (True, True),
            "covered": (False, False),
            "noised": (False, False),
            "present": (True, True),
        }
        assert await at.service.rounds() == await at.service.rounds_of(plans[-1].digest)
        histories = Histories(at.service)
        for _ in plans:
            looked = await histories.look()
        assert {one.plan.name: len(one.silos) for one in looked} == {"open": 3, "covered": 0, "noised": 0, "present": 3}


async def test_a_plan_whose_terms_cannot_be_read_shows_no_single_silo(folder: CoordinatorFolder) -> None:
    """Gone, damaged, or of another release: nobody knows what it promised."""

    def digest(plans: tuple[RecordedPlan, ...], name: str) -> str:
        return next(plan.digest for plan in plans if plan.name == name)

    async with running(folder) as at:
        plans = await at.service.recorded_plans()
    kept = {name: next(folder.root.rglob(f"{digest(plans, name)}.bundle")) for name in ("open", "covered", "noised")}
    kept["open"].unlink()
    kept["covered"].write_bytes(b"damaged")
    async with running(folder) as at:
        assert await told(at.service) == {
            "open": (False, False),
            "covered": (False, False),
            "noised": (False, False),
            "present": (True, True),
        }
        unread = {plan.name: (plan.rounds, plan.score) for plan in await at.service.recorded_plans()}
        assert unread["open"] == unread["covered"] == (0, "")


async def test_a_kept_copy_that_cannot_be_read_is_not_read_at_each_look(folder: CoordinatorFolder) -> None:
    """Its terms stay unknown meanwhile; one that was restored is found after a time."""

    class Counting(PlanShelf):
        reads = 0

        def bundle(self, plan: Digest) -> PlanBundle:
            self.reads += 1
            return super().bundle(plan)

    def open_plan(bundle: PlanBundle) -> PlanParts:
        raise AssertionError("terms need no model")

    now = 0.0
    coordinator = Coordinator.load(folder)
    shelf = Counting(coordinator.settings.state_folder)
    desk = PlanDesk(federation=FEDERATION, shelf=shelf, open_plan=open_plan, steady=lambda: now)
    digest = coordinator.shelf.compile("covered").plan.digest
    kept = next(folder.root.rglob(f"{digest}.bundle"))
    whole = kept.read_bytes()
    for damage in (kept.unlink, lambda: kept.write_bytes(b"damaged")):
        damage()
        before = shelf.reads
        assert [await desk.terms(digest) for _ in range(5)] == [None] * 5
        assert shelf.reads == before + 1
        now += READ_AGAIN_S
    kept.write_bytes(whole)
    terms = await desk.terms(digest)
    assert terms is not None
    assert not terms.shows_single_silos
    reads = shelf.reads
    assert await desk.terms(digest) == terms
    assert shelf.reads == reads


async def test_rounds_are_read_in_ranges(folder: CoordinatorFolder) -> None:
    async with running(folder) as at:
        plan = (await at.service.recorded_plans())[-1].digest
        whole = await at.service.rounds_of(plan)
        assert [row.round for row in whole] == list(ROUNDS)
        assert await at.service.rounds_of(plan, since=2, until=3) == whole[1:3]
        assert await at.service.rounds_of(plan, since=3) == whole[2:]
        assert (await at.service.rounds(last=1)) == whole[3:]
        assert await at.service.rounds_of(plan, since=9) == ()
        assert [one.newest_round for one in await at.service.recorded_plans()] == [ROUNDS[-1]] * 4


async def test_the_page_tells_of_a_covered_plan_nothing_that_its_records_have(folder: CoordinatorFolder) -> None:
    """On every path of a real page, while a plain plan is under way."""
    async with running(folder) as at:
        assert at.serving.page is not None
        ask = partial(get, at.serving.page.port)
        plans = await at.service.recorded_plans()
        for plan in plans:
            pages = [await ask(f"/curves/{plan.digest}"), await ask(f"/log/{plan.digest}/2")]
            told = [b"clinic-001" in pages[0], b"training loss" in pages[1]]
            assert told == [plan.shows_single_silos] * 2, plan.name
            assert b"clinic-001" in pages[1]  # that it took part
        assert {plan.name for plan in plans if not plan.shows_single_silos} == {"covered", "noised"}


async def test_rounds_show_execution_where_something_was_executed(folder: CoordinatorFolder) -> None:
    """Of text no answer runs: a column of dashes would say that it failed."""
    async with running(folder) as at:
        newest = (await at.service.recorded_plans())[-1].digest
        ask = partial(asyncio.to_thread, run_command, main, "rounds", "--dir", folder.root)
        without = await ask()
        (first, *_) = json.loads((await ask("--json")).out)
        with sqlite3.connect(folder.root / "state" / "state.sqlite") as database:
            database.execute("UPDATE evaluations SET executed = 4, execution_matches = 3 WHERE plan = ?", (newest,))
        shown = await ask()
    assert ("execution" in without.out, "execution" in shown.out, "75.0%" in shown.out) == (False, True, True)
    assert "exact match" in without.out
    assert first["score"] == "exact match"


async def test_log_and_curves_of_a_plan_are_made_once_of_each_look(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And curves no more often than there is something new: however many ask, on whatever path."""
    made: list[str] = []

    def curves(plan: RecordedPlan, *rest: Any) -> bytes:
        made.append(plan.name)
        return curves_json(plan, *rest)

    async def of(histories: Histories, plan: RecordedPlan) -> PlanHistory:
        made.append("looked at")
        return await looked_at(histories, plan)

    looked_at = Histories.of
    monkeypatch.setattr(Histories, "of", of)
    monkeypatch.setattr(page, "curves_json", curves)
    async with running(folder) as at:
        assert at.serving.page is not None
        ask = partial(get, at.serving.page.port)
        plans = await at.service.recorded_plans()
        paths = [f"/{what}/{plans[-1].digest}" for what in ("curves", "log")]
        monkeypatch.setattr(page, "FRESH_S", 1e9)
        first = [await ask(path) for path in paths]
        assert [await ask(path) for path in paths] == first
        assert made == ["looked at", "present", "looked at"]
        monkeypatch.setattr(page, "FRESH_S", 0.0)
        made.clear()
        assert [await ask(paths[0]) for _ in range(3)] == [first[0]] * 3
        assert made == ["looked at"] * 3
        add_rounds(folder.root / "state" / "state.sqlite", plans[-1].digest, [5], NAMES, begun=time.time())
        grown = await ask(paths[0])
        assert len(grown) > len(first[0])
        monkeypatch.setattr(page, "MOST_CURVES", 2)
        made.clear()
        for plan in (*plans, *plans):
            await ask(f"/curves/{plan.digest}")
        assert [name for name in made if name != "looked at"] == [plan.name for plan in (*plans, *plans)]
        monkeypatch.setattr(page, "MOST_CURVES_BYTES", len(grown) // 2)  # larger than all that may be kept
        made.clear()
        earlier = next(plan for plan in plans if plan.name == "open")
        for _ in range(2):
            await ask(f"/curves/{earlier.digest}")
        assert [name for name in made if name != "looked at"] == ["open", "open"]


async def get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200"), reply[:200]
    return reply
