"""Curves as numbers, an estimate of what is left, and what is kept of rounds that are settled: on real records."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica.bench.made_rounds import add_rounds, enrol
from lorica_coordinator.edges.database import round_history
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.status_page import histories
from lorica_coordinator.edges.status_page.curves import (
    Pieces,
    all_plans_json,
    curves_json,
    point_json,
    point_of,
    silos_json,
)
from lorica_coordinator.edges.status_page.estimate import LONGEST_S, Opening, seconds_left
from lorica_coordinator.edges.status_page.histories import ATTEMPTS_LISTED, ROUNDS_LISTED, Histories, PlanHistory
from lorica_coordinator.edges.status_page.rounds_log import RoundLine, round_line
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest
from tests.support.status_page import MODEL, NAMES, NOW, SHOWN, row, view

# --- numbers


def test_a_figure_that_is_none_is_no_figure_of_a_chart() -> None:
    for strange in (float("nan"), float("inf"), -float("inf"), 1.7e308):
        of_strange = replace(row(1).silos[0], loss_min=strange)
        told = json.loads(silos_json(row(1, silos=(of_strange,)), NAMES[:1]))
        assert told == [1, [0.875], [None], [0.4], [None]], strange
        point = point_of(row(1, micro_exact_match=strange))
        assert point is not None
        assert json.loads(point_json(point)) == [1, 0.6131, None, None]


def test_a_silo_keeps_its_column_when_others_join() -> None:
    book = histories._Book(single=True)
    late, first = SiloName("a-late-one"), row(1)
    book.settle(book.shown([first, row(2, silos=(*first.silos, replace(first.silos[0], silo=late)))]), through=2)
    told = json.loads(curves_json(SHOWN, book.silos, book.curves))
    assert told["silos"] == [*NAMES, late]
    assert [len(piece[1]) for piece in told["rounds"]] == [3, 4]
    assert [measure["name"] for measure in told["measures"]] == ["score", "loss", "share", "reduction"]


def test_an_attempt_that_gave_nothing_has_no_place_on_a_curve() -> None:
    assert point_of(row(3, outcome="abandoned")) is None
    assert point_of(row(3, outcome="running")) is None
    assert point_of(row(0, outcome="evaluated")) is not None


def test_each_plan_says_which_score_it_counts_and_which_way_is_better() -> None:
    rouge = replace(SHOWN, digest=Digest("cd" * 32), score="ROUGE-L", present=False)
    told = json.loads(all_plans_json([(SHOWN, ["[1,0.5,0.5,null]"]), (rouge, [])]))["plans"]
    assert [(plan["score"], plan["better"], len(plan["points"])) for plan in told] == [
        ("Exact match", "higher", 1),
        ("ROUGE-L", "higher", 0),
    ]


# --- time left


def opened(*times: float, done: float | None = None) -> list[Opening]:
    """Rounds 1, 2, ... opened then; the last one `done`."""
    return [
        Opening(round=number, opened_unix_s=at, done_unix_s=done if number == len(times) else at + 1)
        for number, at in enumerate(times, 1)
    ]


def test_what_is_left_is_the_median_of_the_last_rounds_times_those_to_come() -> None:
    rounds = opened(0.0, 100.0, 200.0, 5000.0, 5100.0)  # one took 4800 s
    assert seconds_left(rounds, phase="collecting", rounds=8, now=5140.0) == 4 * 100.0 - 40.0
    assert (
        seconds_left(rounds, phase="collecting", rounds=8, now=99_999.0) == 3 * 100.0
    )  # it takes longer than they did
    assert seconds_left(opened(0.0, 100.0, done=160.0), phase="evaluating", rounds=3, now=170.0) == 80.0


def test_nothing_is_estimated_before_a_round_is_over_or_when_none_runs() -> None:
    assert seconds_left(opened(0.0), phase="collecting", rounds=8, now=50.0) is None
    assert seconds_left([], phase="gathering", rounds=8, now=50.0) is None
    initial = [
        Opening(round=0, opened_unix_s=0.0, done_unix_s=None),
        Opening(round=1, opened_unix_s=9.0, done_unix_s=None),
    ]
    assert seconds_left(initial, phase="collecting", rounds=8, now=50.0) is None  # an evaluation is no round
    for phase in ("finished", "stopped", "idle"):
        assert seconds_left(opened(0.0, 100.0), phase=phase, rounds=8, now=150.0) is None


@given(
    times=st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9),
    done=st.none() | st.floats(-1e12, 1e12),
    now=st.floats(-1e12, 1e12),
    rounds=st.integers(0, 600),
)
def test_no_clock_however_it_is_set_makes_an_estimate_negative_or_endless(
    times: list[float], done: float | None, now: float, rounds: int
) -> None:
    left = seconds_left(opened(*times, done=done), phase="collecting", rounds=rounds, now=now)
    assert left is None or 0.0 <= left <= LONGEST_S * 600


# --- what is kept


@dataclass
class OneStore:
    """What the service does for the page, over a real store: each plan's rows by that plan's own rule. Counts."""

    store: SqlRoundStore
    plans: Sequence[RecordedPlan]
    read: int = 0

    async def recorded_plans(self) -> tuple[RecordedPlan, ...]:
        known = {plan.digest: plan for plan in self.store.plans()}
        return tuple(
            replace(plan, newest_round=it.newest_round, deletions=it.deletions)
            if (it := known.get(plan.digest)) is not None
            else replace(plan, newest_round=None)
            for plan in self.plans
        )

    async def rounds_of(
        self, plan: Digest, *, since: int = 0, until: int | None = None, attempts: int = 0
    ) -> tuple[RoundRow, ...]:
        rows = self.store.rounds(plan, 0, since, until, attempts)
        self.read += len(rows)
        shown = next(one.shows_single_silos for one in self.plans if one.digest == plan)
        return rows if shown else tuple(map(of_all_silos, rows))


OTHER = replace(SHOWN, digest=Digest("cd" * 32), name="before", present=False)


@pytest.fixture(scope="module")
def three_silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("curves") / "state.sqlite"
    SqlRoundStore(path, FederationName("test-net")).close()
    enrol(path, NAMES, NOW)
    put_plans(path, SHOWN, OTHER)
    add_rounds(path, MODEL, range(1, 31), NAMES, begun=NOW - 30 * 330)
    add_rounds(path, OTHER.digest, range(1, 13), NAMES, begun=NOW - 60 * 330, best=0.4)
    return path


def put_plans(path: Path, *plans: RecordedPlan) -> None:
    with sqlite3.connect(path) as database:
        for plan in plans:
            values = (plan.digest, plan.name, plan.begun_unix_s)
            database.execute("INSERT INTO plans (digest, name, begun_at) VALUES (?, ?, ?)", values)


@pytest.fixture
def at(three_silos: Path, tmp_path: Path) -> Iterator[tuple[OneStore, Path]]:
    path = tmp_path / "state.sqlite"
    shutil.copy(three_silos, path)
    store = SqlRoundStore(path, FederationName("test-net"))
    yield OneStore(store, [OTHER, SHOWN]), path
    store.close()


async def whole(records: OneStore) -> tuple[PlanHistory, ...]:
    """Once every plan was read."""
    looks = Histories(records)
    await looks.look()
    return await looks.look()


async def test_only_what_is_new_is_read_again(at: tuple[OneStore, Path]) -> None:
    records, path = at
    looks = Histories(records)
    before, present = await looks.look()
    assert [len(one.pieces) for one in (before, present)] == [12, 30]
    records.read = 0
    assert await looks.look() == (before, present)
    assert records.read == ROUNDS_LISTED
    add_rounds(path, MODEL, [31], NAMES, begun=NOW - 30 * 330)
    records.read = 0
    _, grown = await looks.look()
    assert records.read == ROUNDS_LISTED + 1  # the one that is settled by now
    assert list(grown.pieces)[:-1] == list(present.pieces)
    assert grown.version != present.version
    assert (await whole(records))[1] == grown  # who reads everything finds the same


def try_again(path: Path, number: int, attempts: int) -> None:
    """Attempts 2, 3, ... at a round that was tried once: each abandoned, with every silo."""
    with sqlite3.connect(path) as database:
        for table in ("rounds", "updates"):
            names = [column[1] for column in database.execute(f"PRAGMA table_info({table})")]
            values = ", ".join("?" if name == "attempt" else name for name in names)
            for attempt in range(2, attempts + 1):
                database.execute(
                    f"INSERT INTO {table} SELECT {values} FROM {table} WHERE plan = ? AND round = ? AND attempt = 1",
                    (attempt, MODEL, number),
                )
        database.execute("UPDATE rounds SET outcome = 'abandoned' WHERE plan = ? AND round = ?", (MODEL, number))


@pytest.mark.parametrize("number", [30, 9])
async def test_a_round_that_is_tried_over_and_over_hides_no_other_one(at: tuple[OneStore, Path], number: int) -> None:
    """Neither among the newest nor among those that are settled, and no look reads all of its attempts."""
    records, path = at
    try_again(path, number, 40)
    records.plans = [SHOWN]
    (present,) = await Histories(records).look()
    tried = [1, *range(40 - ATTEMPTS_LISTED + 2, 41)]
    assert records.read == 29 + ATTEMPTS_LISTED
    listed = [(line.round, line.number) for line in present.lines]
    assert [number for number, _ in listed] == sorted([*range(1, 31), *[number] * (ATTEMPTS_LISTED - 1)])
    assert [name for of, name in listed if of == number] == [f"{number}.{attempt}" for attempt in tried]
    told = [note.words for line in present.lines for note in line.notes]
    assert told == [f"attempts before it that are not listed: {40 - ATTEMPTS_LISTED}"]
    entries = view(histories=[present]).entries
    assert sorted({entry.line.round for entry in entries}) == list(range(31 - ROUNDS_LISTED, 31))
    times = [opening for opening in present.openings if opening.round == number]
    assert [(opening.opened_unix_s, opening.done_unix_s) for opening in times] == [
        (present.openings[number - 1].opened_unix_s, None)
    ]


async def test_no_silo_is_read_of_an_attempt_that_is_left_out(
    at: tuple[OneStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, path = at
    try_again(path, 30, 40)
    made: list[SiloRow] = []

    def silo_row(**values: Any) -> SiloRow:
        made.append(SiloRow(**values))
        return made[-1]

    monkeypatch.setattr(round_history, "SiloRow", silo_row)
    rows = records.store.rounds(MODEL, 0, 30, 30, 6)
    assert [one.attempt for one in rows] == [1, 36, 37, 38, 39, 40]
    assert len(made) == 6 * len(NAMES)
    made.clear()
    newest = records.store.rounds(MODEL, 2)
    assert [(one.attempt, len(one.silos)) for one in newest] == [(39, 3), (40, 3)]
    assert len(made) == 2 * len(NAMES)


async def test_no_look_reads_more_than_so_many_settled_rounds(
    at: tuple[OneStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plan with thousands of rounds, or of many plans: the next look goes on, the newest rounds are there at once,
    and nobody waits in line for all of it."""
    monkeypatch.setattr(histories, "ROUNDS_AT_A_LOOK", 10)
    records, _ = at
    without_rounds = replace(OTHER, digest=Digest("01" * 32), name="begun, and replaced")
    records.plans = [OTHER, without_rounds, SHOWN]
    looks = Histories(records)
    read, versions = [], set()
    for _ in range(4):
        records.read = 0
        found = await looks.look()
        assert records.read <= 10 + ROUNDS_LISTED
        read.append([one.read for one in found])
        versions.add(found[-1].version)
        assert [line.round for line in found[-1].lines][-ROUNDS_LISTED:] == list(range(23, 31))
        assert found[-1].summary.newest is not None
        assert found[-1].summary.newest.round == 30
    assert read == [[False, True, False], [False, True, False], [False, True, True], [True, True, True]]
    assert len(versions) == 3
    monkeypatch.undo()
    assert found == await Histories(records).look()
    monkeypatch.setattr(histories, "ROUNDS_AT_A_LOOK", 10)
    assert [len((await looks.of(found[-1].plan)).pieces) for _ in range(2)] == [30, 30]


async def test_rounds_become_words_and_numbers_beside_the_event_loop(
    at: tuple[OneStore, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, _ = at
    threads = set()

    def line(*of: Any, **how: Any) -> RoundLine:
        threads.add(threading.current_thread())
        return round_line(*of, **how)

    monkeypatch.setattr(histories, "round_line", line)
    await Histories(records).look()
    assert threads
    assert threading.current_thread() not in threads


async def test_what_was_deleted_of_single_silos_is_not_shown_from_memory(at: tuple[OneStore, Path]) -> None:
    records, _ = at
    looks = Histories(records)
    _, kept = await looks.look()
    assert all(json.loads(piece)[1][0] is not None for piece in kept.curves)
    records.store.forget_details(NOW - 15 * 330)
    _, forgotten = await looks.look()
    figures = [json.loads(piece)[1:] for piece in forgotten.curves]
    gone = [all(value is None for column in one for value in column) for one in figures]
    assert gone[:14] == [True] * 14
    assert not any(gone[16:])
    assert forgotten.pieces == kept.pieces  # sums and averages stay
    assert forgotten.version != kept.version
    before, _ = await looks.look()
    assert json.loads(curves_json(before.plan, *of(before)))["silos"] == []


@pytest.mark.parametrize(("scored", "shown"), [(3, True), (2, False), (None, False)])
async def test_means_of_a_plan_that_hides_silos_stay_when_details_are_deleted(
    at: tuple[OneStore, Path], scored: int | None, shown: bool
) -> None:
    """Over as many silos as may be summed, and no fewer; of records from before it was written down nobody knows."""
    records, path = at
    with sqlite3.connect(path) as database:
        database.execute("UPDATE rounds SET scored = ?", (scored,))
    records.plans = [replace(plan, shows_single_silos=False) for plan in records.plans]
    before = await whole(records)
    looks = Histories(records)
    kept = await looks.look()
    assert kept == before
    records.store.forget_details(NOW)
    forgotten = await looks.look()
    for one, other in zip(kept, forgotten, strict=True):
        assert one.version != other.version
        with_means = [json.loads(piece)[1] is not None for piece in other.pieces]
        assert with_means == [shown] * len(one.pieces)
        assert (list(one.pieces) == list(other.pieces)) == (shown or scored == 2)


def of(history: PlanHistory) -> tuple[tuple[SiloName, ...], Pieces]:
    return history.silos, history.curves


async def test_a_plan_that_comes_to_hide_single_silos_loses_what_was_kept(at: tuple[OneStore, Path]) -> None:
    """Its terms cannot be read any more: nothing of a silo is shown, whatever was."""
    records, _ = at
    looks = Histories(records)
    await looks.look()
    records.plans = [replace(plan, shows_single_silos=False) for plan in records.plans]
    for _ in range(2):
        histories_now = await looks.look()
    for history in histories_now:
        assert (history.silos, list(history.curves)) == ((), [])
        assert [note for line in history.lines for note in line.notes] == []


async def test_a_plan_that_was_left_is_read_to_its_end(at: tuple[OneStore, Path]) -> None:
    records, _ = at
    looks = Histories(records)
    await looks.look()
    records.plans = [replace(SHOWN, present=False), replace(OTHER, present=True)]
    left, now_present = (await looks.look())[0], (await looks.look())[1]
    assert (len(left.pieces), left.newest) == (30, ())
    assert (len(now_present.pieces), len(now_present.newest)) == (12, ROUNDS_LISTED)


async def test_the_oldest_plans_are_counted(at: tuple[OneStore, Path]) -> None:
    records, _ = at
    records.plans = [
        *(replace(OTHER, digest=Digest(f"{number:064x}")) for number in range(histories.MOST_PLANS + 2)),
        SHOWN,
    ]
    looks = Histories(records)
    assert (len(await looks.look()), looks.left_out) == (histories.MOST_PLANS, 3)
