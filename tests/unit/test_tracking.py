"""What is told to JSON lines, TensorBoard and MLflow: nothing that people are not shown, each round once, and nothing
that others chose gets beyond a name or a number."""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica.tracking import of_coordinator, of_silo
from lorica.tracking.json_lines import JsonLines
from lorica.tracking.point import Point, Run, finite, instant, name_of
from lorica.tracking.tensorboard import TensorBoard
from lorica.tracking.track import track_on, track_once
from lorica_coordinator.edges.server.operator_servicer import round_record
from lorica_coordinator.service.records import MaskedTotals, RoundRow, SiloRow
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_security.audit.entry import Entry, Event, Particular
from lorica_security.errors import Conflict, IntegrityError, StorageError, Unreachable
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.v1 import operator_pb2

PLAN = "ab" * 32
RUN = Run(plan=PLAN, name="demo", of="coordinator", federation="north")
NAME = re.compile(r"[A-Za-z0-9_./-]{1,120}")


def point(number: int, attempt: int = 1, **values: float) -> Point:
    return Point(
        run=RUN, round=number, attempt=attempt, what="round", outcome="applied", unix_s=1e9 + number, values=values
    )


POINTS = tuple(point(number, seconds=float(number)) for number in range(1, 6))

numbers = st.floats(allow_nan=True, allow_infinity=True)
names = st.text(max_size=200)
evaluations = st.builds(
    Evaluation,
    split=st.just("dev"),
    examples=st.integers(1, 50),
    loss_per_token=st.floats(0, 10),
    exact_matches=st.integers(0, 1),
    executed=st.integers(0, 1),
    execution_matches=st.just(0),
    seconds=st.just(1.0),
)
silo_rows = st.builds(
    SiloRow,
    silo=st.sampled_from([SiloName(name) for name in ("bank", "clinic", "hospital", "insurer")]),
    outcome=st.sampled_from(("committed", "late", "evaluated")),
    examples=st.integers(0, 100),
    loss_max=st.floats(-5, 5),
    loss_min=st.floats(-5, 5),
    weight=st.floats(0, 50),
    share=st.floats(0, 1),
    delta_norm=st.floats(0, 5),
    evaluation=st.none() | evaluations,
)
rows = st.builds(
    RoundRow,
    round=st.integers(0, 20),
    attempt=st.integers(1, 3),
    outcome=st.sampled_from(("applied", "zero_weight", "abandoned", "evaluated", "running")),
    detail=st.text(max_size=20),
    opened_unix_s=st.floats(0, 1e9),
    closed_unix_s=st.none() | st.floats(1e9, 2e9),
    model=st.just(Digest("cd" * 32)),
    weight_fallback=st.booleans(),
    masked=st.none() | st.just(MaskedTotals(weight_sum=3.0, saturated=1, coordinates=4)),
    silos=st.lists(silo_rows, max_size=4, unique_by=lambda row: row.silo).map(tuple),
    macro_exact_match=st.none() | st.floats(0, 1),
    micro_exact_match=st.none() | st.floats(0, 1),
)


def points_of(row: RoundRow, *, score: str = "", phase: str = "finished", more: int = 0) -> Sequence[Point]:
    status = operator_pb2.StatusReply(
        plan_digest=bytes.fromhex(PLAN), plan_name="demo", federation="north", phase=phase
    )
    rounds = operator_pb2.ListRoundsReply(rounds=[round_record(row)] * (1 + more), score=score)
    return tuple(of_coordinator.points_of(status, rounds))


@given(row=rows)
def test_where_no_single_silo_is_shown_none_is_tracked(row: RoundRow) -> None:
    """By the view that every command and page has, whatever stands in the records."""
    for told in points_of(of_all_silos(row)):
        assert not [name for name in told.values if "silo/" in name]
        assert not {"bank", "clinic", "hospital", "insurer"} & set(re.split(r"[^a-z]+", " ".join(told.values)))


def test_where_single_silos_are_shown_each_is_tracked() -> None:
    evaluation = Evaluation(
        split="dev", examples=4, loss_per_token=0.5, exact_matches=3, executed=2, execution_matches=1, seconds=1.0
    )
    silo = SiloRow(
        silo=SiloName("bank"),
        outcome="committed",
        examples=9,
        loss_max=2.0,
        loss_min=0.5,
        share=1.0,
        evaluation=evaluation,
    )
    row = RoundRow(
        round=1, attempt=1, outcome="applied", detail="", opened_unix_s=10.0, closed_unix_s=12.0, model=Digest("cd" * 32),
        weight_fallback=False, silos=(silo,), macro_exact_match=0.75, micro_exact_match=0.5,
    )  # fmt: skip
    (told,) = points_of(row, score="ROUGE-L")
    assert told.values == {
        "seconds": 2.0,
        "silos": 1.0,
        "macro_ROUGE-L": 0.75,
        "micro_ROUGE-L": 0.5,
        "silo/bank/examples": 9.0,
        "silo/bank/loss_reduction": 1.5,
        "silo/bank/share": 1.0,
        "silo/bank/delta_norm": 0.0,
        "silo/bank/ROUGE-L": 0.75,
        "silo/bank/execution_accuracy": 0.5,
    }


@given(row=rows, phase=st.sampled_from(("finished", "collecting", "stopped", "evaluating")))
def test_a_round_that_may_change_is_not_told_yet(row: RoundRow, phase: str) -> None:
    """Its scores come after it was closed."""
    told = points_of(row, phase=phase)
    assert len(told) == (phase == "finished" and row.outcome != "running")
    assert len(points_of(row, phase=phase, more=1)) == (row.outcome != "running") * (1 + (phase == "finished"))


@given(values=st.dictionaries(names | st.text("./-a", max_size=12), numbers, max_size=8), seconds=numbers)
def test_whatever_others_chose_is_a_name_and_a_finite_number(values: Mapping[str, float], seconds: float) -> None:
    kept = finite(values)
    assert all(NAME.fullmatch(name) and not {"", ".", ".."} & set(name.split("/")) for name in kept)
    assert all(math.isfinite(value) for value in kept.values())
    assert 0 <= instant(seconds) < 253_402_300_800


paths = st.text("./-a", max_size=12)


@given(name=names | paths, of=names | paths, plan=st.text("0123456789abcdef", min_size=64, max_size=64))
def test_the_folder_of_a_run_stays_where_runs_are(name: str, of: str, plan: str) -> None:
    title = Run(plan=plan, name=name, of=of, federation="north").title
    assert (Path("/runs") / title).resolve().parent == Path("/runs")


runs = st.builds(
    Run,
    plan=st.sampled_from(("ab" * 32, "ac" * 32)),
    name=st.sampled_from(("demo", "a" * 64, "b")),
    of=st.sampled_from(("coordinator", "silo bank", f"silo {'c' * 63}")),
    federation=st.sampled_from(("north", "south")),
)


@given(one=runs, other=runs)
def test_no_two_runs_have_one_folder_or_one_key(one: Run, other: Run) -> None:
    """However long the names are that stand in both; a plan has one name."""
    same = (one.federation, one.of, one.plan) == (other.federation, other.of, other.plan)
    assert (one.title[-16:] == other.title[-16:]) == same
    keys = [replace(point(1), run=run).key for run in (one, other)]
    assert (keys[0] == keys[1]) == same


def test_two_silos_are_told_in_one_file(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "rounds.jsonl")
    of_both = [replace(point(1), run=replace(RUN, of=f"silo {silo}")) for silo in ("bank", "clinic")]
    assert [file.take([each]) for each in of_both] == [1, 1]
    file.close()
    again = JsonLines(tmp_path / "rounds.jsonl")
    assert again.take(of_both) == 0
    again.close()


def test_a_point_of_any_size_leaves_a_file_that_is_read_again(tmp_path: Path) -> None:
    """As a hostile coordinator's silos by the thousand would make it."""
    values = finite({f"silo/{'s' * 60}-{number}/{'v' * 60}": 1e-300 for number in range(20_000)})
    file = JsonLines(tmp_path / "rounds.jsonl")
    file.take([replace(point(1), values=values)])
    file.close()
    JsonLines(tmp_path / "rounds.jsonl").close()


@pytest.mark.parametrize("value", ["1e999", "null", '"x"', "[]"])
def test_a_line_that_no_tracker_wrote_is_named(tmp_path: Path, value: str) -> None:
    line = f'{{"run": {{"plan": "ab", "of": "x", "federation": "y"}}, "round": {value}, "attempt": 1, "what": "round"}}'
    (tmp_path / "rounds.jsonl").write_text(f"{line}\n")
    with pytest.raises(IntegrityError, match="choose another"):
        JsonLines(tmp_path / "rounds.jsonl")


def test_a_file_that_is_taken_away_is_said_to_be(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "rounds.jsonl")
    (tmp_path / "rounds.jsonl").unlink()
    with pytest.raises(StorageError, match="taken away"):
        file.take(POINTS)
    file.close()


def entry(event: Event, **details: Particular) -> Entry:
    return Entry(
        sequence=1, previous="", at=1_000_000_000, event=event, who="spiffe://north/silo/bank", details=details, salt=""
    )


LEFT: Mapping[str, Particular] = {"plan": PLAN, "round": 1, "attempt": 1, "bytes": 64}
LOSSES = "max 2.5 min 0.5 first 2.5 last 0.75"
SCORES: Mapping[str, Particular] = {
    "plan": PLAN,
    "round": 1,
    "attempt": 1,
    "examples": 4,
    "exact_matches": 3,
    "executed": 0,
    "execution_matches": 0,
    "loss_per_token": "0.25",
}


def test_a_silo_is_told_what_left_it_in_the_clear() -> None:
    training, evaluation = of_silo.points_of(
        [
            entry(Event.PLAN_RECEIVED, plan=PLAN, name="demo"),
            entry(Event.PLAN_ALLOWED, plan=PLAN, promise="in the clear"),
            entry(Event.UPDATE_LEAVES, **LEFT, covered_by="in the clear", examples=9, optimizer_steps=3, losses=LOSSES),
            entry(Event.SCORES_LEAVE, **SCORES),
            entry(Event.ROUND_ENDED, plan=PLAN, round=1, attempt=1, work="training", outcome="uploaded"),
        ]
    )
    assert training.run == Run(plan=PLAN, name="demo", of="silo bank", federation="north")
    assert training.values == {
        "bytes": 64.0,
        "examples": 9.0,
        "optimizer_steps": 3.0,
        "loss_max": 2.5,
        "loss_min": 0.5,
        "loss_first": 2.5,
        "loss_last": 0.75,
    }
    assert evaluation.values == {"score": 0.75, "loss_per_token": 0.25}


@given(
    promise=st.sampled_from(
        ("masked", "in the clear, noised: epsilon 8 for a record", "masked, noised", "not allowed")
    ),
    event=st.sampled_from((Event.UPDATE_LEAVES, Event.MASKED_UPDATE_LEAVES)),
)
def test_of_what_left_under_masks_or_privacy_a_silo_is_told_that_it_did(promise: str, event: Event) -> None:
    told = of_silo.points_of(
        [
            entry(Event.PLAN_ALLOWED, plan=PLAN, promise=promise),
            entry(event, **LEFT, covered_by=promise, examples=9, optimizer_steps=3, losses=LOSSES),
            entry(Event.SCORES_LEAVE, **SCORES),
            entry(Event.ROUND_ENDED, plan=PLAN, round=1, attempt=1, work="evaluation", outcome="evaluated"),
        ]
    )
    assert [(one.what, one.outcome, one.values) for one in told] == [
        ("training", "left", {"bytes": 64.0}),
        ("evaluation", "evaluated", {}),
    ]


def keys_in(path: Path) -> list[tuple[int, int]]:
    return [(line["round"], line["attempt"]) for line in map(json.loads, path.read_text().splitlines())]


@given(data=st.data())
def test_a_killed_tracker_goes_on_and_each_round_is_in_the_file_once(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut at any byte."""
    path = tmp_path_factory.mktemp("track") / "rounds.jsonl"
    first = JsonLines(path)
    told = data.draw(st.just(len(POINTS)) | st.integers(0, len(POINTS)), label="told before")
    first.take(POINTS[:told])
    first.close()
    size = path.stat().st_size
    os.truncate(path, data.draw(st.integers(max(0, size - 20), size) | st.integers(0, size), label="cut at"))
    second = JsonLines(path)
    second.take([replace(one, values={}) for one in POINTS])  # shorter than what may be left of a line
    assert second.take(POINTS) == 0
    second.close()
    assert keys_in(path) == [(one.round, one.attempt) for one in POINTS]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@given(text=st.binary(min_size=1, max_size=60))
def test_a_file_of_somebody_else_is_refused_and_left_as_it_was(
    text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("track") / "notes"
    path.write_bytes(text)
    if b'{"run": {"plan": "'.startswith(text):
        return
    with pytest.raises(IntegrityError, match="choose another"):
        JsonLines(path)
    assert path.read_bytes() == text


def test_no_link_and_no_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing/rounds.jsonl"):
        with pytest.raises(StorageError):
            JsonLines(tmp_path / name)


def test_two_trackers_do_not_write_one_file(tmp_path: Path) -> None:
    first = JsonLines(tmp_path / "rounds.jsonl")
    with pytest.raises(Conflict, match="another tracker"):
        JsonLines(tmp_path / "rounds.jsonl")
    first.close()
    JsonLines(tmp_path / "rounds.jsonl").close()


def test_tensorboard_has_a_folder_for_each_run_and_each_point_once(tmp_path: Path) -> None:
    """What the event files hold is read back by TensorBoard itself: tests/end_to_end/test_tracked_rounds.py."""
    other = Point(
        run=Run(plan="cd" * 32, name="../../x", of="silo bank", federation="north"),
        round=1, attempt=1, what="training", outcome="left", unix_s=1e9, values={"bytes": 1.0},
    )  # fmt: skip
    for _ in range(2):  # a second tracker, after the first has ended
        sink = TensorBoard(tmp_path / "runs")
        sink.take((*POINTS, other))
        sink.close()
    folders = sorted(path for path in tmp_path.rglob("*") if path.is_dir())
    assert [path.parent for path in folders[1:]] == [tmp_path / "runs"] * 2
    assert [len(list(path.glob("events.*"))) for path in folders[1:]] == [1, 1]


def test_rounds_of_one_second_are_each_in_an_event_file_of_their_own(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path / "runs")
    assert [sink.take(POINTS[:told]) for told in range(1, len(POINTS) + 1)] == [1] * len(POINTS)
    sink.close()
    files = list(tmp_path.rglob("events.*"))
    assert len(files) == len(POINTS)
    for number in range(1, len(POINTS) + 1):
        step = b"\x10" + bytes([number])  # field 2 of an Event
        assert any(step in file.read_bytes() for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = TensorBoard(tmp_path / "runs")
    with monkeypatch.context() as full:

        def no_space(self: object, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("tensorboardX.record_writer.RecordWriter.write", no_space)
        with pytest.raises(StorageError, match="free some space"):
            sink.take(POINTS)
    assert list(tmp_path.rglob("events.*")) == []
    assert sink.take(POINTS) == len(POINTS)
    sink.close()


def test_no_link_is_followed_into_anothers_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / RUN.title).symlink_to(tmp_path / "elsewhere")
    sink = TensorBoard(tmp_path / "runs")
    with pytest.raises(StorageError, match="is a link"):
        sink.take(POINTS)
    sink.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


class Ends(Exception):
    """The test's end."""


class Looks:
    """A source that is not there at first, and then has one point more at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def points(self) -> Sequence[Point]:
        self.looks += 1
        if self.looks == 1:
            raise Unreachable("it starts")
        if self.looks == len(POINTS) + 2:
            raise Ends
        return POINTS[: self.looks - 1]


class Broken:
    where = "a broken tool"

    def take(self, points: Sequence[Point]) -> int:
        raise Unreachable("away")


def test_a_tool_that_is_away_keeps_no_other_from_its_points(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "rounds.jsonl")
    said: list[str] = []
    with pytest.raises(Ends):
        track_on(Looks(), (Broken(), file), said.append, every_s=0)
    assert keys_in(tmp_path / "rounds.jsonl") == [(one.round, one.attempt) for one in POINTS]
    assert said.count("a broken tool: away; trying again") == 1
    source = Looks()
    source.looks = len(POINTS)
    with pytest.raises(Unreachable):
        track_once(source, (Broken(), file), said.append)
    assert said[-1] == f"{file.where}: 0 new points"


def test_names_keep_what_every_tool_takes() -> None:
    assert name_of("exact match") == "exact_match"
    assert name_of("ROUGE-L") == "ROUGE-L"
    assert name_of("../../etc") == "etc"
    assert name_of("\n") == "_"
