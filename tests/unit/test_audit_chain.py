"""An audit log: what was written verifies, and whatever is done to it afterwards is found, with the first entry that is
wrong."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorica_security.audit.chain import NO_ENTRY, Head
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.audit.repeats import OTHERS, Repeats
from lorica_security.audit.signed_head import SignedHead, check_one_history, heads_from_lines
from lorica_security.audit.verification import (
    CLOCK_TOLERANCE_S,
    SEAL_EVERY,
    SEAL_WITHIN_S,
    Known,
    Position,
    Verification,
    seal_particulars,
)
from lorica_security.daemon import sealed_log
from lorica_security.errors import IntegrityError, MalformedMessage, StorageError
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.log_file import AuditLog, LogFiles, lines, segment
from lorica_security.on_disk.log_place import Line
from lorica_security.on_disk.reading import read_log

KEY, OTHER_KEY = new_identity_key(), new_identity_key()
WRITER = "spiffe://north/silo/hospital-a"
FEW = settings(max_examples=25, deadline=None)
EVENTS = st.sampled_from([Event.TRAINED, Event.UPDATE_LEAVES, Event.REFUSED, Event.SCORES_LEAVE])
DETAILS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.one_of(st.text(max_size=20), st.integers(min_value=-(1 << 60), max_value=1 << 60)),
    max_size=3,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def chain(*told: tuple[Event, dict[str, Any]], seal_each: int = 3, key: Any = KEY, seed: int = 0) -> list[bytes]:
    """The lines of a log that tells of these, and is sealed after each `seal_each`; `seed` makes it another history."""
    position, out = Position(), []

    def add(event: Event, who: str, details: dict[str, Any]) -> None:
        nonlocal position
        entry = Entry(
            sequence=position.head.sequence + 1,
            previous=position.head.digest,
            at=1_800_000_000 + seed + len(out),
            event=event,
            who=who,
            details=details,
            salt="5a" * 16,
        )
        out.append(entry.line())
        position = position.after(entry)

    for event, details in told:
        add(event, "local", details)
        if position.unsealed >= seal_each:
            add(Event.SEALED, WRITER, seal_particulars(SignedHead.sign(key, writer=WRITER, head=position.head)))
    return out


def verified(log: Sequence[bytes], *known: Known) -> Verification:
    walk = Verification(writer=WRITER, keys=[KEY.public_key()])
    for number, line in enumerate(log, 1):
        walk.take(line, f"log line {number}")
    walk.check_known(known, "log")
    return walk


def heads(log: Sequence[bytes]) -> list[Head]:
    return [entry_from_line(line, "").head for line in log]


LOGS = st.lists(st.tuples(EVENTS, DETAILS), min_size=3, max_size=14).map(lambda told: chain(*told))


# --- what was written


@FEW
@given(LOGS)
def test_what_was_written_verifies_and_is_read_back(log: list[bytes]) -> None:
    walk = verified(log, *(Known(head=head, by="the coordinator") for head in heads(log)))
    assert walk.entries == len(log)
    assert [entry_from_line(line, "").line() for line in log] == log


@pytest.mark.parametrize("details", [{"A": 1}, {"a": 1.5}, {"a": True}, {"a": None}, {"": 1}, {"a": "x" * 100_001}])
def test_particulars_are_texts_and_whole_numbers(details: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="audit entry"):
        Entry(sequence=1, previous=NO_ENTRY, at=1, event=Event.STARTED, who="local", details=details, salt="")


# --- attacks on a log


@FEW
@given(LOGS, st.data())
def test_a_single_edited_byte_is_found_in_its_line(log: list[bytes], data: Any) -> None:
    number = data.draw(st.integers(0, len(log) - 1))
    line = bytearray(log[number])
    position = data.draw(st.integers(0, len(line) - 2))  # its newline belongs to the file's own tests
    line[position] ^= data.draw(st.integers(1, 255))
    changed = [*log[:number], bytes(line), *log[number + 1 :]]
    with pytest.raises(IntegrityError, match=f"^log line {number + 1}\\b"):
        verified(changed)


@FEW
@given(LOGS, st.data())
def test_entries_that_change_places_are_found_at_the_first(log: list[bytes], data: Any) -> None:
    first = data.draw(st.integers(0, len(log) - 2))
    second = data.draw(st.integers(first + 1, len(log) - 1))
    swapped = list(log)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(
        IntegrityError, match=f"^log line {first + 1}: entry {second + 1} stands where entry {first + 1}"
    ):
        verified(swapped)


@FEW
@given(LOGS, st.data())
def test_a_deleted_entry_is_found_where_it_is_missing(log: list[bytes], data: Any) -> None:
    number = data.draw(st.integers(0, len(log) - 2))
    with pytest.raises(
        IntegrityError, match=f"^log line {number + 1}: entry {number + 2} stands where entry {number + 1}"
    ):
        verified([*log[:number], *log[number + 1 :]])


@FEW
@given(LOGS, LOGS, st.data())
def test_an_entry_that_is_put_in_is_found_where_it_stands(log: list[bytes], other: list[bytes], data: Any) -> None:
    number = data.draw(st.integers(0, len(log) - 1))
    foreign = data.draw(st.sampled_from([line for line in other if line != log[number]]))
    with pytest.raises(IntegrityError, match=f"^log line ({number + 1}|{number + 2})\\b") as found:
        verified([*log[:number], foreign, *log[number:]])
    assert str(found.value).startswith(f"log line {number + 1}:") or entry_from_line(foreign, "").sequence == number + 1


@FEW
@given(LOGS, st.data())
def test_a_log_that_was_cut_is_found_by_a_head_that_somebody_holds(log: list[bytes], data: Any) -> None:
    kept = data.draw(st.integers(0, len(log) - 1))
    known = heads(log)[data.draw(st.integers(kept, len(log) - 1))]
    with pytest.raises(
        IntegrityError,
        match=f"log ends with entry {kept}, the coordinator knows entry {known.sequence}: entry {kept + 1} ",
    ):
        verified(log[:kept], Known(head=known, by="the coordinator"))


@FEW
@given(st.lists(st.tuples(EVENTS, DETAILS), min_size=4, max_size=12), st.data())
def test_a_history_that_was_written_anew_with_the_key_is_found_by_a_head(told: list[Any], data: Any) -> None:
    """A fork: the two share a beginning, and both verify by themselves."""
    log = chain(*told)
    fork = data.draw(st.integers(0, len(told) - 1))
    again = chain(*told[:fork], *((event, {**details, "edited": 1}) for event, details in told[fork:]))
    walk = verified(again)
    assert walk.entries == len(log)
    shared = sum(one == other for one, other in zip(log, again, strict=True))
    known = [Known(head=head, by="a receipt") for head in heads(log)]
    with pytest.raises(
        IntegrityError, match=f"another entry {shared + 1} than a receipt knows: .* from an entry after {shared} on"
    ):
        verified(again, *known)


@FEW
@given(st.lists(st.tuples(EVENTS, DETAILS), min_size=4, max_size=12), st.data())
def test_who_writes_anew_without_the_key_fails_at_the_next_seal(told: list[Any], data: Any) -> None:
    again = chain(*told, key=OTHER_KEY)
    with pytest.raises(
        IntegrityError, match=r"^log line 4: entry 4 is no seal of .*: one of entries 1 to 4 was edited"
    ):
        verified(again)


def test_an_entry_edited_with_its_digest_made_anew_is_named_by_the_one_that_follows() -> None:
    log = chain(*[(Event.TRAINED, {"round": number}) for number in range(6)])
    edited = entry_from_line(log[1], "")
    log[1] = replace(edited, details={"round": 7}).line()
    with pytest.raises(IntegrityError, match=r"^log line 3: .* entry 2 was edited or replaced"):
        verified(log)


def test_the_beginning_of_a_log_cannot_be_cut_off() -> None:
    log = chain(*[(Event.TRAINED, {})] * 4)
    first = replace(entry_from_line(log[2], ""), sequence=1)
    with pytest.raises(IntegrityError, match="the beginning of the log was cut off"):
        verified([first.line()])


def test_a_seal_of_another_log_is_none() -> None:
    """Signed by the right key, for another place."""
    log = chain(*[(Event.TRAINED, {})] * 3)
    seal = entry_from_line(log[3], "")
    foreign = SignedHead.sign(KEY, writer="spiffe://north/silo/bank-b", head=Head(3, seal.previous))
    elsewhere = SignedHead.sign(KEY, writer=WRITER, head=Head(2, seal.previous))
    for details in (seal_particulars(foreign), seal_particulars(elsewhere), {"signature": "xx"}, {}):
        with pytest.raises(IntegrityError, match="entry 4 is no seal"):
            verified([*log[:3], replace(seal, details=details).line()])
    with pytest.raises(IntegrityError, match="it is of spiffe://north/silo/bank-b"):
        verified([*log[:3], replace(seal, who="spiffe://north/silo/bank-b").line()])


def test_seals_that_were_left_out_are_missed() -> None:
    many = chain(*[(Event.TRAINED, {})] * (SEAL_EVERY + 1), seal_each=1000)
    with pytest.raises(IntegrityError, match=f"entry {SEAL_EVERY + 1} has more than {SEAL_EVERY} entries before it"):
        verified(many)
    first, second = (entry_from_line(line, "") for line in chain((Event.TRAINED, {}), (Event.TRAINED, {})))
    late = replace(second, at=first.at + SEAL_WITHIN_S + CLOCK_TOLERANCE_S + 1)
    with pytest.raises(IntegrityError, match="entry 2 comes 361 s after one that no seal covers"):
        verified([first.line(), late.line()])


def test_time_that_goes_back_is_found_unless_the_log_says_so() -> None:
    first, second = (entry_from_line(line, "") for line in chain((Event.TRAINED, {}), (Event.TRAINED, {})))
    verified([first.line(), replace(second, at=first.at - CLOCK_TOLERANCE_S).line()])
    with pytest.raises(IntegrityError, match="entry 2 is 301 s before the one before it"):
        verified([first.line(), replace(second, at=first.at - CLOCK_TOLERANCE_S - 1).line()])
    told = replace(second, at=first.at - 9000, event=Event.CLOCK_WENT_BACK)
    assert verified([first.line(), told.line()]).clock_went_back == 1


@pytest.mark.parametrize(
    "line", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 5000, b'{"details":[]}', b'{"sequence":1}', b"x" * (1 << 21)]
)
def test_lines_that_are_no_entries(line: bytes) -> None:
    with pytest.raises(IntegrityError, match="log line 1 is no entry of an audit log"):
        verified([line + b"\n"])


# --- heads in the hands of the other side


def signed(head: Head, key: Any = KEY, writer: str = WRITER) -> SignedHead:
    return SignedHead.sign(key, writer=writer, head=head)


def test_a_head_comes_back_from_a_line_and_from_an_entry() -> None:
    one, two = signed(Head()), signed(Head(7, "ab" * 32))
    assert heads_from_lines(one.line() + two.line(), "heads") == (one, two)
    assert SignedHead.from_particulars({**two.particulars(), "round": 1}) == two
    assert SignedHead.from_particulars({"round": 1}) is None
    two.check(OTHER_KEY.public_key(), KEY.public_key())
    with pytest.raises(IntegrityError, match="is not signed by its identity key"):
        two.check(OTHER_KEY.public_key())
    with pytest.raises(IntegrityError, match="is not signed"):
        replace(two, head=Head(8, two.head.digest)).check(KEY.public_key())


@pytest.mark.parametrize(
    "head", [Head(0, "ab" * 32), Head(1, NO_ENTRY), Head(1, "AB" * 32), Head(1, "ab"), Head(-1, NO_ENTRY)]
)
def test_what_is_no_head_of_any_log(head: Head) -> None:
    with pytest.raises(MalformedMessage, match="audit head"):
        SignedHead(writer=WRITER, head=head, signature=bytes(64))


@pytest.mark.parametrize("raw", [b"x\n", b"{}\n", b"[1]\n", signed(Head()).line()[:-3] + b"\n", b"[" * 5000])
def test_a_file_that_holds_no_heads_is_named(raw: bytes) -> None:
    with pytest.raises(IntegrityError, match="heads line 2 is no signed head"):
        heads_from_lines(signed(Head()).line() + raw, "heads")


def test_a_writer_that_goes_back_or_keeps_two_histories_proves_it_itself() -> None:
    check_one_history([signed(Head(n, f"{n:02x}" * 32)) for n in (1, 2, 2, 9)], "log")
    with pytest.raises(IntegrityError, match="showed entry 4 of its log after entry 9"):
        check_one_history([signed(Head(9, "aa" * 32)), signed(Head(4, "bb" * 32))], "log")
    with pytest.raises(IntegrityError, match="signed two entries 9 of its log"):
        check_one_history([signed(Head(9, "aa" * 32)), signed(Head(9, "bb" * 32))], "log")


# --- floods


def test_a_flood_is_counted_and_not_written() -> None:
    repeats = Repeats(period_s=60, each=2, kinds=2)
    written = [repeats.is_news("a", now) for now in range(50)]
    assert written == [True, True] + [False] * 48
    assert repeats.ended(59.0) == []
    assert repeats.ended(60.0) == [("a", 48)]
    assert repeats.ended(60.0) == []
    assert repeats.is_news("a", 61.0)


def test_a_flood_of_kinds_is_one_kind() -> None:
    repeats = Repeats(period_s=60, each=2, kinds=2)
    assert sum(repeats.is_news(f"stranger {number}", 1.0) for number in range(100)) == 4
    assert repeats.ended(2.0, stopping=True) == [(OTHERS, 96)]


def test_a_clock_that_is_set_back_ends_the_period() -> None:
    repeats = Repeats(period_s=60, each=1)
    assert [repeats.is_news("a", 1000.0), repeats.is_news("a", 1000.0)] == [True, False]
    assert repeats.ended(10.0) == [("a", 1)]


@pytest.fixture
def restless_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_counting_and_telling_at_once_loses_nothing(restless_threads: None) -> None:
    """The gate counts in the event loop while the thread that seals tells what was counted."""
    repeats = Repeats(each=1, kinds=1000)
    written, told, over = 0, 0, threading.Event()

    def tell() -> None:
        nonlocal told
        while not over.is_set():
            told += sum(count for _, count in repeats.ended(0.0, stopping=True))

    with ThreadPoolExecutor(1) as threads:
        telling = threads.submit(tell)
        for number in range(30_000):
            written += repeats.is_news(f"kind {number % 100}", 0.0)
        over.set()
        telling.result()
    told += sum(count for _, count in repeats.ended(0.0, stopping=True))
    assert written + told == 30_000


async def test_sealing_goes_on_after_a_defect_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_log, "SEAL_WITHIN_S", 0.01)
    troubles: list[Exception] = []
    again = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Counts:
        def tell_counts(self, *, stopping: bool = False) -> None:
            if not troubles:
                raise RuntimeError("dictionary changed size during iteration")
            loop.call_soon_threadsafe(again.set)

    disk = Disk(tmp_path / "audit")
    async with sealed_log.kept_log(disk.log, Counts(), troubles.append), asyncio.timeout(20):
        await again.wait()
    assert [str(error) for error in troubles] == ["dictionary changed size during iteration"]
    assert disk.events()[-2:] == [Event.STOPPED, Event.SEALED]


# --- on disk


class Disk:
    def __init__(self, folder: Path, *, segment_bytes: int = 1 << 20) -> None:
        self.clock, self.folder, self.segment_bytes = Clock(), folder, segment_bytes
        self.log = self.process()

    def process(self) -> AuditLog:
        """Another one, as after a restart, or as a command beside the daemon."""
        return AuditLog(
            LogFiles(self.folder, segment_bytes=self.segment_bytes), writer=WRITER, key=KEY, clock=self.clock
        )

    def read(self) -> list[Line]:
        return list(lines(self.folder))

    def events(self) -> list[Event]:
        return [entry_from_line(line.content, line.where).event for line in self.read()]

    def verified(self) -> Verification:
        return verified([line.content for line in self.read()])


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "audit")


def test_a_log_on_disk_is_private_sealed_and_verifies(disk: Disk) -> None:
    head = disk.log.append(Event.STARTED, who="local", round=3, detail="two\nlines")
    disk.log.seal()
    disk.log.seal()  # nothing is left to sign
    assert disk.events() == [Event.STARTED, Event.SEALED]
    assert disk.verified().digest_of(1) == head.digest
    assert disk.log.signed_head().head == disk.process().head()
    assert {path.stat().st_mode & 0o077 for path in disk.folder.iterdir()} == {0}
    assert disk.folder.stat().st_mode & 0o077 == 0


def test_a_command_beside_the_daemon_adds_to_the_same_log(disk: Disk) -> None:
    other = disk.process()
    for turn in range(6):
        (disk.log if turn % 2 else other).append(Event.TRAINED, round=turn)
    assert disk.verified().entries == 6
    other.seal()
    disk.log.append(Event.STOPPED)
    assert disk.verified().entries == 8


def test_seals_come_by_number_and_by_time(disk: Disk) -> None:
    for _ in range(SEAL_EVERY):
        disk.log.append(Event.TRAINED)
    assert disk.events()[-1] is Event.SEALED
    disk.log.append(Event.TRAINED)
    disk.log.seal_if_due()
    assert disk.events()[-1] is Event.TRAINED
    disk.clock.now += SEAL_WITHIN_S
    disk.log.seal_if_due()
    assert disk.events()[-1] is Event.SEALED
    disk.log.append(Event.TRAINED)
    disk.clock.now += 100_000  # the process died, or the machine slept
    disk.process().append(Event.STARTED)
    assert disk.events()[-3:] == [Event.TRAINED, Event.SEALED, Event.STARTED]
    disk.verified()


def test_a_clock_that_was_set_back_is_told_of(disk: Disk) -> None:
    disk.log.append(Event.TRAINED)
    disk.clock.now -= 100_000
    disk.log.append(Event.TRAINED)
    assert Event.CLOCK_WENT_BACK in disk.events()
    assert disk.verified().clock_went_back == 1


def test_files_follow_each_other_and_none_can_be_left_out(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "audit", segment_bytes=2000)
    for number in range(40):
        (disk.process() if number % 7 == 0 else disk.log).append(Event.TRAINED, round=number)
        disk.clock.now += 1
    files = sorted(path.name for path in disk.folder.glob("log.*"))
    assert files[:3] == ["log.000001", "log.000002", "log.000003"]
    walk = disk.verified()
    assert walk.entries == len(disk.read())
    assert all(path.stat().st_size < 3000 for path in disk.folder.glob("log.*"))
    segment(disk.folder, 2).unlink()
    with pytest.raises(IntegrityError, match=r"log\.000002 is missing"):
        disk.verified()
    for later in disk.folder.glob("log.*"):
        if later.name > "log.000001":
            later.unlink()
    with pytest.raises(IntegrityError, match="was cut off"):
        verified([line.content for line in disk.read()], Known(head=walk.position.head, by="the coordinator"))


def test_equal_entries_have_other_digests(disk: Disk) -> None:
    """The other side learns digests: without salt it could guess what an entry says, and see that it guessed right."""
    for _ in range(2):
        disk.log.append(Event.TRAINED, round=1)
    one, two = (entry_from_line(line.content, line.where) for line in disk.read())
    assert replace(one, sequence=2, previous=two.previous).digest != two.digest
    assert (one.details, one.at) == (two.details, two.at)


def test_a_line_that_a_crash_tore_was_never_there(disk: Disk) -> None:
    disk.log.append(Event.TRAINED, round=1)
    whole = segment(disk.folder, 1).read_bytes()
    disk.log.append(Event.TRAINED, round=2)
    torn = segment(disk.folder, 1).read_bytes()
    for cut in range(len(whole), len(torn)):
        segment(disk.folder, 1).write_bytes(torn[:cut])
        assert len(disk.read()) == 1
        assert disk.process().head().sequence == 1
    disk.process().append(Event.TRAINED, round=3)
    assert disk.verified().entries == 2
    assert b'"round":3' in segment(disk.folder, 1).read_bytes()


def test_a_crash_that_tears_the_seal_of_a_full_file(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "audit", segment_bytes=1)
    disk.log.append(Event.TRAINED, round=1)
    path = segment(disk.folder, 1)
    path.write_bytes(path.read_bytes()[:-20])
    disk.process().append(Event.TRAINED, round=2)
    assert disk.events() == [Event.TRAINED, Event.TRAINED, Event.SEALED]
    disk.process().append(Event.TRAINED, round=3)
    disk.verified()
    assert segment(disk.folder, 2).exists()


@pytest.mark.parametrize("crash", ["before the first line is whole", "after it"])
def test_a_crash_at_the_beginning_of_a_file(tmp_path: Path, crash: str) -> None:
    disk = Disk(tmp_path / "audit", segment_bytes=1)
    disk.log.append(Event.TRAINED, round=1)
    disk.log.append(Event.TRAINED, round=2)
    content = segment(disk.folder, 2).read_bytes()
    keep = 10 if crash.startswith("before") else content.index(b"\n") + 1
    segment(disk.folder, 2).write_bytes(content[:keep])
    disk.process().append(Event.TRAINED, round=3)
    disk.verified()


@pytest.mark.parametrize("harm", ["edited", "emptied"])
def test_a_log_that_was_harmed_is_not_added_to(tmp_path: Path, harm: str) -> None:
    disk = Disk(tmp_path / "audit", segment_bytes=1)
    disk.log.append(Event.TRAINED, round=1)
    disk.log.append(Event.TRAINED, round=2)
    path = segment(disk.folder, 2 if harm == "edited" else 1)
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":9') if harm == "edited" else b"")
    before = {file.name: file.read_bytes() for file in disk.folder.glob("log.*")}
    with pytest.raises(IntegrityError, match=path.name):
        disk.process().append(Event.TRAINED, round=3)
    assert {file.name: file.read_bytes() for file in disk.folder.glob("log.*")} == before


def test_a_full_disk_leaves_the_log_as_it_was(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.log.append(Event.TRAINED, round=1)
    before = segment(disk.folder, 1).read_bytes()
    real = os.pwrite

    def full(descriptor: int, data: Any, at: int) -> int:
        if at > len(before):
            raise OSError(28, "No space left on device")
        return real(descriptor, bytes(data)[:20], at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"log\.000001 cannot be written \(No space left on device\)"):
            disk.log.append(Event.TRAINED, round=2)
    assert segment(disk.folder, 1).read_bytes() == before
    disk.log.append(Event.TRAINED, round=3)
    assert disk.verified().entries == 2


OPERATIONS = st.lists(
    st.sampled_from(["append", "seal", "restart", "tick", "tear", "later", "much later", "back"]), max_size=30
)


@given(OPERATIONS)
@example(["append"] * 5 + ["tear", "append"])  # a file that is full
@settings(max_examples=40, deadline=None)
def test_whatever_a_writer_lives_through_its_log_verifies(operations: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder) / "audit", segment_bytes=1500)
        steps: dict[str, Callable[[], Any]] = {
            "append": lambda: disk.log.append(Event.TRAINED, round=1),
            "seal": lambda: disk.log.seal(),
            "restart": lambda: setattr(disk, "log", disk.process()),
            "tick": lambda: disk.log.seal_if_due(),
            "tear": lambda: _tear(disk),
            "later": lambda: setattr(disk.clock, "now", disk.clock.now + 40),
            "much later": lambda: setattr(disk.clock, "now", disk.clock.now + 9000),
            "back": lambda: setattr(disk.clock, "now", disk.clock.now - 4000),
        }
        for operation in operations:
            steps[operation]()
            disk.verified()


def _tear(disk: Disk) -> None:
    """A crash in the midst of an append."""
    newest = max(disk.folder.glob("log.*"), default=None)
    if newest is not None:
        with newest.open("ab") as file:
            file.write(b'{"at":18')
    disk.log = disk.process()


def test_no_text_however_it_is_spelt_makes_a_line_that_is_not_read_again(tmp_path: Path) -> None:
    """A coordinator that names its tensors so could otherwise destroy the evidence against itself."""
    log = AuditLog(tmp_path / "audit", writer=WRITER, key=KEY, clock=lambda: 1_000_000.0)
    log.append(Event.PLAN_RECEIVED, tensor_names="\U0001f600" * 100_000, more="\u00e9" * 100_000)
    log.append(Event.STOPPED)
    again = AuditLog(tmp_path / "audit", writer=WRITER, key=KEY, clock=lambda: 1_000_001.0)
    again.append(Event.STARTED)
    again.seal()
    assert read_log(tmp_path / "audit", writer=WRITER, keys=[KEY.public_key()])
