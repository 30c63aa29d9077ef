"""`coordinator gc` lets go of what is needed no more, of nothing else, and may die at any step of it."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.models.export_scratch import ExportScratch
from lorica_coordinator.edges.models.held_models import holding_models
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.edges.upkeep.backup import WORK_PREFIX
from lorica_coordinator.edges.upkeep.garbage import DAY_S, GONE_PREFIX, Collector, Garbage
from lorica_coordinator.edges.upkeep.upgrade_copies import copy_of
from lorica_coordinator.rounds.effects import ModelMade, PlanBegun
from lorica_coordinator.rounds.states import Idle
from lorica_coordinator.service.records import PresentPlan
from lorica_coordinator.settings import RetentionSection
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.spool_key import make_key
from lorica_coordinator.vectors.stored_vector import write_record
from silo_wire.canonical import Digest, digest_of
from tests.support.rounds import FEDERATION, PLAN, SIGNATURE, T0, A, B
from tests.unit.test_kept_files import Place
from tests.unit.test_rounds_store import enrol, live, whole_round

LEFT, NEW = Digest(digest_of(b"left")), Digest(digest_of(b"left yesterday"))
MODELS = [Digest(digest_of(b"model %d" % number)) for number in range(3)]
NOW = T0 + 100 * DAY_S
KEPT = RetentionSection(models_days=30, copies_days=30, records_days=60)
FINISHED = PresentPlan(plan=PLAN, models=frozenset({MODELS[1], MODELS[2]}), under_way=False)
UNDER_WAY = PresentPlan(plan=PLAN, models=frozenset({MODELS[2]}), under_way=True)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A plan that has run (PLAN), one that was left long ago and one that was left yesterday; something of each
    kind."""
    folder = tmp_path / "state"
    folder.mkdir()
    store = SqlRoundStore(folder / "state.sqlite", FEDERATION)
    for silo in (A, B):
        enrol(store, silo)
    made = ModelMade(plan=LEFT, model=MODELS[0], round=0, signature=SIGNATURE)
    store.transition(Idle(), [PlanBegun(plan=LEFT, name="left"), made], at=T0, now=0.0)
    store.transition(Idle(), [PlanBegun(plan=NEW, name="new")], at=NOW - DAY_S, now=0.0)
    live(store, Idle(population=frozenset({A, B})), *whole_round())
    store.close()
    for plan in (PLAN, LEFT, NEW):
        for model in MODELS:
            write(folder / "models" / plan / f"{model}.safetensors")
            write(folder / "models" / plan / f"{model}.manifest.json")
            write(folder / "models" / plan / f"{model}.optimizer" / "momentum.f32")
        write(folder / "models" / plan / "spare" / "one.spare")
        write(folder / "spools" / plan / "1-1" / "bank-a.delta")
        make_key(folder / "spools" / plan / "1-1" / "bank-a.key")
        write(folder / "bundles" / f"{plan}.bundle")
    write(folder / "models" / "nobody-knows" / "file")
    write(folder / "exports" / "half" / "model.safetensors")
    write(folder / "privacy" / "ledger")
    write(folder / f"{WORK_PREFIX}abc" / "state.sqlite")
    write(folder / "models" / ".gone-1" / "x.safetensors")
    write(folder / ".state.sqlite.0004-20260101T000000Z.tmp")
    for age in (40, 10):
        write(copy_of(folder / "state.sqlite", "0004", datetime.fromtimestamp(NOW - age * DAY_S, UTC)))
    write(folder / "state.sqlite.0004-99999999T999999Z")  # of no time that there is
    return folder


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(path.name.encode() * 100)


def collect(
    state: Path,
    present: PresentPlan,
    *,
    dry_run: bool = False,
    kept: RetentionSection = KEPT,
    spool_keys: SpoolKeys | None = None,
    elsewhere: KeptFiles = FOLDER_ALONE,
) -> list[Garbage]:
    store = SqlRoundStore(state / "state.sqlite", FEDERATION)
    try:
        scratch = ExportScratch(state / "exports")
        collector = Collector(state, kept, store, scratch, spool_keys=spool_keys, kept=elsewhere)
        return collector.collect(present, NOW, dry_run=dry_run)
    finally:
        store.close()


def contents(state: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(state)): path.read_bytes()
        for path in sorted(state.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and not path.name.startswith("state.sqlite-")
    }


def needed(state: Path, present: PresentPlan) -> dict[str, bytes]:
    """What has to be there whatever happens."""
    models = MODELS if present.under_way else sorted(present.models)
    prefixes = [
        *(f"models/{PLAN}/{model}" for model in models),
        f"models/{NEW}/",
        "models/nobody-knows/",
        "bundles/",
        "privacy/",
        copy_of(Path("state.sqlite"), "0004", datetime.fromtimestamp(NOW - 10 * DAY_S, UTC)).name,
        "state.sqlite.0004-99999999T999999Z",
        *([f"spools/{PLAN}/", f"models/{PLAN}/spare/"] if present.under_way else []),
    ]
    return {name: data for name, data in contents(state).items() if any(name.startswith(prefix) for prefix in prefixes)}


def details(state: Path) -> int:
    with closing(sqlite3.connect(state / "state.sqlite")) as database:
        counts = [
            database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("updates", "evaluations")
        ]
    return sum(counts)


@pytest.mark.parametrize("present", [FINISHED, UNDER_WAY], ids=["finished", "under-way"])
def test_what_is_needed_stays_and_the_rest_goes(state: Path, present: PresentPlan) -> None:
    kept = needed(state, present)
    assert len(kept) >= 15
    found = collect(state, present)
    after = contents(state)
    after.pop("state.sqlite")
    assert after == kept
    assert {item.kind for item in found} == {"models", "spools", "exports", "copies", "records", "remains"}
    assert all(item.bytes > 0 or item.kind == "records" for item in found)
    assert details(state) == 0
    store = SqlRoundStore(state / "state.sqlite", FEDERATION)
    assert store.has_rounds(PLAN), "a plan that has run is not begun again"
    assert [row.outcome for row in store.rounds(PLAN, 0)] == ["applied"]
    assert store.signed_model(LEFT, MODELS[0]) is not None
    store.close()
    assert collect(state, present) == []


def test_a_dry_run_names_the_same_and_deletes_nothing(state: Path) -> None:
    before = contents(state)
    told = collect(state, FINISHED, dry_run=True)
    assert {name: data for name, data in contents(state).items() if name != "state.sqlite"} == {
        name: data for name, data in before.items() if name != "state.sqlite"
    }
    assert details(state) > 0
    free = sum(path.stat().st_blocks * 512 for path in state.rglob("*"))
    done = collect(state, FINISHED)
    assert done == told
    gone = free - sum(
        path.stat().st_blocks * 512 for path in state.rglob("*") if not path.name.startswith("state.sqlite-")
    )
    assert gone >= sum(item.bytes for item in done) - (1 << 16), (
        "what it says is what it frees, but for the database's own log"
    )


def test_zero_days_keep_for_good(state: Path) -> None:
    found = collect(state, UNDER_WAY, kept=RetentionSection(models_days=0, copies_days=0, records_days=0))
    assert {item.kind for item in found} == {"spools", "exports", "remains"}
    assert details(state) > 0


def test_while_a_backup_copies_models_they_stay(state: Path) -> None:
    before = {name: data for name, data in contents(state).items() if name.startswith(("models/", WORK_PREFIX))}
    with holding_models(state / "models"):
        collect(state, FINISHED)
    assert {name: data for name, data in contents(state).items() if name.startswith(("models/", WORK_PREFIX))} == before
    assert any(item.kind == "models" for item in collect(state, FINISHED))


def test_records_of_a_round_that_is_young_stay(state: Path) -> None:
    before = details(state)
    collect(state, FINISHED, kept=RetentionSection(records_days=101))
    assert details(state) == before


class Killed(BaseException):
    """Nothing catches it, and nothing after it is done."""


def dying_at(step: int, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From now on the process dies at its `step`-th change of a folder, or made durable; how many there were."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count >= step:
                raise Killed
            return real(*arguments, **more)

        return call

    for name in ("unlink", "rmdir", "rename", "replace", "fsync"):
        patch.setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def test_killed_at_every_step_it_harms_nothing_and_the_next_one_ends_it(state: Path, tmp_path: Path) -> None:
    kept, step = needed(state, FINISHED), 0
    while True:
        step += 1
        again = tmp_path / "again"
        shutil.copytree(state, again)
        with pytest.MonkeyPatch.context() as patch:
            died = dying_at(step, patch)
            try:
                collect(again, FINISHED)
            except Killed:
                pass
            else:
                assert died() < step
                break
        assert needed(again, FINISHED) == kept
        for model in again.glob(f"models/{PLAN}/*.safetensors"):
            whole = model.with_suffix(".manifest.json").exists() and model.with_suffix(".optimizer").exists()
            assert whole, f"a model that is there is whole, after death at step {step}: a backup copies it"
        for spool in again.glob("spools/**/*.delta"):
            key = spool.with_suffix(".key")
            assert GONE_PREFIX not in str(spool) or not key.exists(), (
                "keys are destroyed before anything else of a spool"
            )
        collect(again, FINISHED)
        after = contents(again)
        after.pop("state.sqlite")
        assert after == kept, f"after death at step {step}"
        shutil.rmtree(again)
    assert step > 40


@pytest.mark.parametrize("present", [FINISHED, UNDER_WAY], ids=["finished", "under-way"])
def test_what_goes_from_the_folder_goes_from_its_bucket_and_so_do_keys_elsewhere(
    state: Path, present: PresentPlan
) -> None:
    machine = Place(state, MemoryStore(), 1)
    for plan in (PLAN, LEFT, NEW):
        delta, name = state / "spools" / plan / "1-1" / "bank-a", machine.keys.fresh()
        machine.keys.provide(delta.parent)
        path = machine.keys.path(delta, name)
        assert path is not None
        make_key(path)
        write_record(delta.with_suffix(".json"), {"manifest": {}, "norm": 1.0, "key": name})
    machine.settle()
    before = machine.kept.below(state)
    assert len([path for path in before if path.suffix == ".delta"]) == 3
    collect(state, present, dry_run=True, spool_keys=machine.keys, elsewhere=machine.kept)
    assert machine.kept.below(state) == before
    collect(state, present, spool_keys=machine.keys, elsewhere=machine.kept)
    assert machine.kept.below(state) == {path for path in before if path.is_file()}
    assert machine.kept.below(state) != before
    assert machine.keys.names() == ({PLAN} if present.under_way else set())
