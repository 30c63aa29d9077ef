"""The journal: what it records is there for the next process, whole or not at all."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_security.errors import StorageError
from silo_agent.edges.disk import round_journal
from silo_agent.edges.disk.round_journal import LastModel, RoundJournal
from silo_agent.rounds.effects import (
    Activity,
    JournalActivity,
    JournalModel,
    JournalOutcome,
    JournalPlan,
    JournalUpdate,
    Outcome,
)
from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey, TrainingSummary
from tests.support.federation_peer import FEDERATION, SILO, small_bundle, vector_of

BUNDLE = small_bundle()
DATA = vector_of(BUNDLE.layout, 3)
PLAN = BUNDLE.plan.digest
MODEL = Digest("ab" * 32)
KEY = RoundKey(federation=FEDERATION, plan=PLAN, round=3, attempt=2)
UPDATE = SavedUpdate(
    key=KEY,
    model=MODEL,
    manifest=manifest_of(BUNDLE.layout, [DATA], 1024),
    summary=TrainingSummary(
        examples=9, loss_max=3.1, loss_min=1.2, loss_first=3.1, loss_last=1.2, optimizer_steps=7, seconds=2.5
    ),
)


def opened(folder: Path) -> RoundJournal:
    (folder / "updates").mkdir(exist_ok=True)
    return RoundJournal(folder / "journal.sqlite", updates=folder / "updates", silo=SILO)


def test_an_empty_journal_knows_nothing(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    assert (journal.paused(), journal.saved_update(), journal.last_model()) == (False, None, None)
    assert list(journal.history(10)) == []
    journal.close()


def test_what_was_recorded_is_there_for_the_next_process(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalPlan(PLAN))
    journal.record(JournalPlan(PLAN))
    journal.record(JournalModel(PLAN, MODEL))
    journal.record(JournalUpdate(UPDATE))
    journal.record(JournalOutcome(key=KEY, evaluation=False, outcome=Outcome.UPLOADED))
    journal.record(JournalOutcome(key=KEY, evaluation=True, outcome=Outcome.DECLINED, detail="data: gone"))
    journal.record(JournalActivity(Activity.TRAINING, KEY))
    journal.set_paused(True)
    journal.close()
    again = opened(tmp_path)
    assert again.saved_update() == UPDATE
    assert again.last_model() == LastModel(plan=PLAN, model=MODEL)
    assert again.fact("plan") == PLAN
    assert again.fact("activity") == "training round 3 attempt 2"
    assert again.paused()
    told = [(o.round, o.attempt, o.work, o.outcome, o.detail) for o in again.history(10)]
    assert told == [(3, 2, "training", "uploaded", ""), (3, 2, "evaluation", "declined", "data: gone")]
    assert [o.outcome for o in again.history(1)] == ["declined"]
    again.close()


def test_after_what_may_be_lost_all_else_is_durable_as_before(tmp_path: Path) -> None:
    """What the agent is at is of no use after a power cut, and waits for no disk; the next record does."""
    journal, seen = opened(tmp_path), list[str]()

    def noted(statement: str) -> None:
        if statement.startswith(("INSERT", "PRAGMA")):
            seen.append(statement.split("(")[0].strip())

    def synchronous() -> int:
        return int(journal._connection.execute("PRAGMA synchronous").fetchone()[0])

    journal._connection.set_trace_callback(noted)
    journal.record(JournalActivity(Activity.TRAINING, KEY))
    journal._connection.set_trace_callback(None)
    assert seen == [
        "PRAGMA synchronous = NORMAL",
        "INSERT INTO facts VALUES",
        "PRAGMA synchronous = FULL",
    ]
    assert synchronous() == 2
    with sqlite3.connect(tmp_path / "journal.sqlite") as other:
        other.execute("CREATE TRIGGER full BEFORE UPDATE ON facts BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    with pytest.raises(StorageError, match="disk is full"):
        journal.record(JournalActivity(Activity.TRAINING, KEY))
    assert synchronous() == 2
    journal.close()


def test_only_the_newest_update_is_kept(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    newer = replace(UPDATE, key=replace(KEY, attempt=3))
    for update in (UPDATE, newer):
        journal.update_file(update.key).write_bytes(DATA)
        journal.record(JournalUpdate(update))
    assert journal.saved_update() == newer
    assert list((tmp_path / "updates").iterdir()) == [journal.update_file(newer.key)]
    journal.close()


def test_an_update_that_cannot_be_recorded_leaves_the_one_before(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalUpdate(UPDATE))
    unwritable = replace(UPDATE, key=replace(KEY, attempt=3), masked=None)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=r"cannot be used: NOT NULL constraint failed: updates\.masked"):
        journal.record(JournalUpdate(unwritable))
    assert journal.saved_update() == UPDATE
    journal.set_paused(True)
    assert journal.paused(), "that transaction is over"
    journal.close()


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    journal = opened(tmp_path)

    def write(number: int) -> None:
        journal.set_fact(f"fact {number}", str(number))
        journal.record_refusal("rule", str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(40)))
    assert [journal.fact(f"fact {number}") for number in range(40)] == [str(number) for number in range(40)]
    assert {int(refusal.detail) for refusal in journal.refusals(100)} == set(range(40))
    journal.close()


def test_a_private_update_is_kept_for_another_attempt_under_its_name(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    private = replace(UPDATE, private=True)
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalUpdate(private))
    later = replace(private, key=replace(KEY, attempt=3))
    journal.update_file(later.key).write_bytes(b"what a crash left")
    journal.record(JournalUpdate(later, made_for=KEY))
    journal.close()
    again = opened(tmp_path)
    assert again.saved_update() == later
    assert [file.read_bytes() for file in (tmp_path / "updates").iterdir()] == [DATA]
    again.close()


def test_a_crash_while_it_is_kept_leaves_it_to_the_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    private = replace(UPDATE, private=True)
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalUpdate(private))
    later = replace(private, key=replace(KEY, attempt=3))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RoundJournal, "_record_update", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.record(JournalUpdate(later, made_for=KEY))
    journal.close()
    again = opened(tmp_path)
    assert again.saved_update() == private
    again.record(JournalUpdate(later, made_for=KEY))
    assert again.saved_update() == later
    assert again.update_file(later.key).read_bytes() == DATA
    again.close()


def test_an_update_whose_file_is_gone_cannot_be_kept(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    with pytest.raises(StorageError, match="cannot be kept for attempt 3 of round 3"):
        journal.record(JournalUpdate(replace(UPDATE, key=replace(KEY, attempt=3)), made_for=KEY))
    journal.close()


def test_an_update_is_written_over_the_one_before_which_is_forgotten_first(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    inodes = set()
    for number in range(1, 4):
        update = replace(UPDATE, key=replace(KEY, round=number))
        file = journal.new_update_file(update.key)
        assert file == journal.update_file(update.key)
        assert journal.saved_update() is None, "a kill from here on finds no update that is half another"
        with file.open("r+b" if file.exists() else "wb") as opened_file:
            opened_file.write(DATA)
        journal.record(JournalUpdate(update))
        assert journal.saved_update() == update
        assert list((tmp_path / "updates").iterdir()) == [file]
        inodes.add(file.stat().st_ino)
    assert len(inodes) == 1
    journal.close()


def test_what_a_killed_training_wrote_is_written_over_by_the_next(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.new_update_file(KEY).write_bytes(DATA)
    again = journal.new_update_file(KEY)
    assert again.read_bytes() == DATA
    later = journal.new_update_file(replace(KEY, round=4))
    assert later.read_bytes() == DATA
    assert list((tmp_path / "updates").iterdir()) == [later]
    journal.close()


@pytest.mark.parametrize("kept", ["residual", "control"])
def test_another_plan_ends_what_is_kept_of_updates_and_the_same_plan_does_not(kept: str, tmp_path: Path) -> None:
    journal = opened(tmp_path)
    mine = tmp_path / "updates" / f"{PLAN[:32]}-{MODEL}.{kept}"
    part = tmp_path / "updates" / f"new.{kept}.part"
    for path in (mine, part):
        path.write_bytes(b"what is kept")
    journal.record(JournalPlan(PLAN))
    assert mine.exists()
    journal.record(JournalPlan(Digest("00" * 32)))
    assert list((tmp_path / "updates").iterdir()) == []
    journal.close()


def test_a_checkpoint_is_kept_until_another_model_or_the_update_is_recorded(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    checkpoint, other = journal.checkpoint_file(MODEL), journal.checkpoint_file(Digest("cd" * 32))
    halves = [path.with_name(f"{path.name}.part") for path in (checkpoint, other)]
    parts = [path.with_name(f"{path.name}.12-1") for path in (checkpoint, other)]
    for path in (checkpoint, other, *halves, *parts):
        path.write_bytes(b"state")
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(
        JournalModel(PLAN, MODEL)
    )  # as an agent does that was restarted in the round, or began its next attempt
    assert set((tmp_path / "updates").iterdir()) == {checkpoint, parts[0], journal.update_file(KEY)}
    journal.record(JournalUpdate(UPDATE))
    assert set((tmp_path / "updates").iterdir()) == {journal.update_file(KEY)}
    checkpoint.write_bytes(b"state")
    journal.record(JournalModel(PLAN, Digest("cd" * 32)))
    assert set((tmp_path / "updates").iterdir()) == {journal.update_file(KEY)}
    journal.close()


@pytest.mark.parametrize("left", [None, b"", DATA[:-1]])
def test_an_update_whose_file_is_not_whole_is_none(tmp_path: Path, left: bytes | None) -> None:
    journal = opened(tmp_path)
    if left is not None:
        journal.update_file(KEY).write_bytes(left)
    journal.record(JournalUpdate(UPDATE))
    assert journal.saved_update() is None
    journal.close()


def test_two_processes_share_it(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    one.set_paused(True)
    assert other.paused()
    other.set_paused(False)
    assert not one.paused()
    one.close()
    other.close()


def test_it_is_private(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert (tmp_path / "journal.sqlite").stat().st_mode & 0o777 == 0o600


def test_many_that_begin_it_at_once_find_one_that_is_whole(tmp_path: Path) -> None:
    """An agent that starts, and commands that look."""
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        begin = threading.Barrier(6)

        def open_it(folder: Path = folder, begin: threading.Barrier = begin) -> None:
            begin.wait()
            opened(folder).close()

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(open_it) for _ in range(6)]:
                done.result()
        assert {path.name for path in folder.iterdir()} - {"journal.sqlite-wal", "journal.sqlite-shm"} == {
            "journal.sqlite",
            "updates",
        }


def test_a_begin_that_is_cut_off_leaves_nothing_that_the_next_one_stumbles_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as cut:
        cut.setattr(round_journal, "_make", lambda connection: _end_of_power())
        with pytest.raises(ZeroDivisionError):
            opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["updates"]
    opened(tmp_path).close()


def _end_of_power() -> None:
    raise ZeroDivisionError


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StorageError, match=r"journal\.sqlite cannot be used: file is not a database"):
        opened(tmp_path)


@pytest.mark.parametrize(("version", "remedy"), [("99", "or a newer one"), ("2", "run the agent that wrote it")])
def test_a_journal_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path, version: str, remedy: str) -> None:
    journal = opened(tmp_path)
    journal.set_fact("schema_version", version)
    journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("DROP TABLE refusals")
    with pytest.raises(StorageError, match=f"schema version {version}, this agent works with 3: .*{remedy}"):
        opened(tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        assert "refusals" not in {name for (name,) in database.execute("SELECT name FROM sqlite_master")}


def test_what_an_update_holds_is_overwritten_and_it_still_counts_as_saved(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.erase_update(KEY)  # of none nothing is left
    assert not journal.update_file(KEY).exists()
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalUpdate(UPDATE))
    journal.erase_update(KEY)
    assert journal.update_file(KEY).read_bytes() == bytes(len(DATA))
    journal.close()
    again = opened(tmp_path)
    assert again.saved_update() == UPDATE
    again.close()
