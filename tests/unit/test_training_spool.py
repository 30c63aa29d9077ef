"""What memory does not hold: records come back as they went in, and hashes find what comparing every pair finds."""

import errno
import os
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import StorageError
from silo_agent.training.data.repeats import Names, UnitKeys, repeats
from silo_agent.training.data.spool import Records, Spool, SpoolPlace
from silo_agent.training.data.stored import Stored


def records_of(content: Sequence[bytes], place: SpoolPlace) -> Records:
    spool = Spool(place, "the lines of a test")
    for record in content:
        spool.append(record)
    return spool.finish()


def open_files() -> set[str]:
    """What this process's descriptors lead to, those of a spool among them."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(os.readlink(entry))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


# --- the spool


@given(
    content=st.lists(st.binary(max_size=40), max_size=70),
    memory=st.integers(0, 200),
    reads=st.lists(st.integers(0, 69), max_size=20),
)
def test_any_records_come_back_whole_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], memory: int, reads: list[int]
) -> None:
    place = SpoolPlace(tmp_path_factory.getbasetemp() / "spool", memory)
    records = records_of(content, place)
    assert records.in_file == (sum(map(len, content)) > memory)
    assert list(records) == content
    assert [records.length(number) for number in range(len(records))] == list(map(len, content))
    assert records.total_bytes == sum(map(len, content))
    for number in reads:
        if number < len(content):
            assert records[number] == content[number]
        else:
            with pytest.raises(IndexError):
                records[number]
    with pytest.raises(IndexError):
        records[-1]


def test_a_spools_file_has_no_name_and_is_gone_with_its_reader(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    before = open_files()
    records = records_of([b"private"] * 40, SpoolPlace(folder, 100))
    (opened,) = open_files() - before
    assert opened.startswith(str(folder))
    assert opened.endswith("(deleted)")
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert isinstance(records._held, int)
    held = os.fstat(records._held)
    assert (stat.S_IMODE(held.st_mode), held.st_nlink) == (0o600, 0)
    del records
    assert open_files() == before


def test_a_file_system_without_nameless_files_keeps_no_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network file systems are: the name is taken away at once, and what a kill leaves is one that `sweep` knows."""
    opened: list[Path] = []
    real = os.open

    def without(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        opened.append(Path(path))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", without)
    records = records_of([b"private"] * 40, SpoolPlace(tmp_path, 100))
    monkeypatch.undo()
    assert list(records) == [b"private"] * 40
    assert list(tmp_path.iterdir()) == []
    assert [path.parent for path in opened] == [tmp_path]


_FULL = """
import os, resource, sys
from pathlib import Path
from lorica_security.errors import StorageError
from silo_agent.training.data.spool import Spool, SpoolPlace
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
spool = Spool(SpoolPlace(Path(sys.argv[1]), 1 << 20), "the lines of train.jsonl")
before = len(os.listdir("/proc/self/fd"))
try:
    for _ in range(8):
        spool.append(bytes(1 << 20))
except StorageError as error:
    print(len(os.listdir("/proc/self/fd")) - before, error)
other = os.open(Path(sys.argv[1]) / "of somebody else", os.O_RDWR | os.O_CREAT)  # has the number that was freed
for further in (lambda: spool.append(bytes(2 << 20)), spool.finish):
    try:
        further()
    except StorageError as error:
        print(error)
print(os.fstat(other).st_size)
"""


def test_a_disk_that_takes_no_more_is_named_and_gets_its_room_back(tmp_path: Path) -> None:
    """A real limit on files, in a process of its own."""
    said = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    first, *refused, written = said.splitlines()
    left, _, error = first.partition(" ")
    assert left == "0", "the file is closed, so that its blocks are free"
    assert error.startswith(f"the lines of train.jsonl do not fit into memory, and {tmp_path} could not take them (")
    assert "free some space there" in error
    assert refused == [f"the lines of train.jsonl were not taken whole by {tmp_path}: read them anew"] * 2
    assert written == "0"


def test_a_disk_that_does_not_give_a_record_back_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    """Whoever is root can still cut a file without a name; a map of memory would end in a signal."""
    records = records_of([b"private"] * 40, SpoolPlace(tmp_path, 100))
    assert isinstance(records._held, int)
    os.truncate(f"/proc/self/fd/{records._held}", 70)
    assert records[9] == b"private"
    with pytest.raises(StorageError, match=r"the lines of a test in .* could not be read back at byte 70"):
        records[10]
    with pytest.raises(StorageError, match="bytes are missing"):
        list(records)


# --- sequences over it


@given(
    content=st.lists(st.binary(max_size=9), max_size=40),
    chosen=st.lists(st.integers(0, 39), max_size=12),
    begin=st.integers(-50, 50),
    end=st.integers(-50, 50),
    step=st.sampled_from([1, 2, -1, 7]),
)
def test_a_stored_sequence_is_the_tuple_of_its_values(
    content: list[bytes], chosen: list[int], begin: int, end: int, step: int
) -> None:
    records = records_of(content, SpoolPlace(None, 1 << 20))
    some = [number for number in chosen if number < len(content)]
    strided = range(1, len(content), 3)
    for numbers in (None, strided, np.asarray(some, dtype=np.int64)):
        stored = Stored(records, bytes.hex, numbers)
        values = tuple(content[number].hex() for number in (range(len(content)) if numbers is None else numbers))
        assert tuple(stored) == values == stored
        assert stored[begin:end:step] == values[begin:end:step]
        assert (stored == (*values, "")) is False
        assert [2 * stored.stored_bytes(index) for index in range(len(stored))] == list(map(len, values))
        if values:
            assert (stored[-1], stored.index(values[0])) == (values[-1], values.index(values[0]))


# --- what stands twice, and whose it is


@given(splits=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=14), min_size=1, max_size=3), few=st.booleans())
def test_repeats_are_those_that_a_set_of_all_names_finds(splits: list[list[str]], few: bool) -> None:
    """Also where names share a hash that are not the same."""
    hashes = (lambda name: ord(name) % 3) if few else hash
    names = [Names(np.asarray([hashes(name) for name in split], dtype=np.int64), split.__getitem__) for split in splits]
    seen: dict[str, tuple[int, int]] = {}
    wanted = set()
    for at, split in enumerate(splits):
        for number, name in enumerate(split):
            first = seen.setdefault(name, (at, number))
            if at == len(splits) - 1 and first != (at, number):
                wanted.add((number, *first))
    assert {(one.number, one.among, one.first) for one in repeats(names[-1], names[:-1])} == wanted


@given(owners=st.lists(st.sampled_from(["", "a", "b", "patient 7", "\ud800"]), max_size=40))
def test_units_are_those_of_a_dictionary_of_owners_in_its_order(owners: list[str]) -> None:
    by_owner: defaultdict[str, list[int]] = defaultdict(list)
    keys = UnitKeys()
    for number, owner in enumerate(owners):
        by_owner[owner].append(number)
        keys.append(owner)
    units = keys.units()
    if not any(owners):
        assert units is None
        return
    assert units is not None
    assert list(units) == list(map(tuple, by_owner.values()))
    assert len(units[units.largest()]) == max(map(len, units))
    assert units.largest() == [len(unit) for unit in units].index(max(map(len, units)))
