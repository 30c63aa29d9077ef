"""What one that stands by brings from a bucket before it has to lead: the leader's files, and nothing that stays.

The leader chooses what it keeps and lets go of between two looks, and who writes the bucket every byte of it. Both are
searched over. The store is obstore's own in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from lorica_coordinator.edges.kept.ahead import Ahead, running
from lorica_coordinator.edges.kept.kept_file import INDEX, KINDS
from lorica_coordinator.edges.kept.kept_in_bucket import WORK, KeptInBucket, Leader
from lorica_coordinator.edges.kept.settled import Settled, settle
from lorica_security.errors import IntegrityError, StorageError
from tests.support.coordinator_edges import FEDERATION
from tests.unit.test_kept_files import (
    BLOCK,
    BUNDLE_PATH,
    EVIDENCE_PATH,
    KEY,
    MODEL_PATH,
    RECORD_PATH,
    SPOOL_PATH,
    STATE_PATH,
    VERDICTS_PATH,
    MemoryBucket,
    Place,
    keep_record,
)

ANOTHER_PATH = f"bundles/{'ef' * 32}.bundle"
PATHS = (MODEL_PATH, STATE_PATH, BUNDLE_PATH, EVIDENCE_PATH, VERDICTS_PATH)


class ReadOnly(MemoryBucket):
    """Of one that stands by; `read` has the names of what it got."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__("s3://lorica/north/", "north/", store)
        self.read: list[str] = []

    def get(self, name: str, most: int) -> memoryview | None:
        self.read.append(name)
        return super().get(name, most)

    def put(self, name: str, content: bytes | memoryview) -> None:
        raise AssertionError(f"it put {name}")

    def delete(self, names: object) -> None:
        raise AssertionError("it deleted")


@dataclass
class Two:
    """One that leads, and one that stands by."""

    leader: Place
    store: MemoryStore
    root: Path
    bucket: ReadOnly
    ahead: Ahead = field(init=False)

    @classmethod
    def at(cls, folder: Path) -> "Two":
        store = MemoryStore()
        (folder / "leader").mkdir(parents=True)
        (folder / "standby").mkdir()
        two = cls(Place(folder / "leader", store, 1), store, folder / "standby", ReadOnly(store))
        two.ahead = Ahead(two.root, two.bucket, FEDERATION, KEY, two.as_standby().has_key)
        two.leader.settle()
        two.leader.keep(ANOTHER_PATH, b"stays")
        return two

    def as_standby(self, term: int = 2) -> Place:
        return Place(self.root, self.store, term)

    @property
    def files(self) -> dict[str, bytes]:
        """Of the one that stands by, but for the one that always is there."""
        return _but_another(self.as_standby())

    @property
    def leaders(self) -> dict[str, bytes]:
        return _but_another(self.leader)

    def take_over(self) -> tuple[Settled, list[str]]:
        """And which objects that read."""
        self.ahead.end()
        self.bucket.read.clear()
        leader = Leader(federation=FEDERATION, term=2, identity=KEY)
        bucket = MemoryBucket("s3://lorica/north/", "north/", self.store)
        kept = KeptInBucket(self.root, bucket, leader, seen=self.ahead.seen, block_bytes=BLOCK)
        bucket.get = self.bucket.get  # type: ignore[method-assign]
        return settle(kept, self.root, self.as_standby().has_key), self.bucket.read


def _but_another(place: Place) -> dict[str, bytes]:
    found = place.files()
    found.pop(ANOTHER_PATH, None)
    return found


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two.at(tmp_path)


Step = Callable[[Two], None]


def _keep(path: str, content: bytes) -> Step:
    return lambda two: two.leader.keep(path, content)


def _forget(path: str) -> Step:
    def forget(two: Two) -> None:
        two.leader.kept.forget(two.leader.root / path)
        (two.leader.root / path).unlink(missing_ok=True)

    return forget


def _look(two: Two) -> None:
    two.ahead.turn()


STEPS = st.one_of(
    st.builds(_keep, st.sampled_from(PATHS), st.binary(max_size=3 * BLOCK)),
    st.builds(_forget, st.sampled_from(PATHS)),
    st.just(_look),
)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(STEPS, max_size=12))
def test_after_a_look_the_folder_has_what_the_leader_keeps_and_taking_over_reads_no_block(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[Step]
) -> None:
    two = Two.at(tmp_path_factory.mktemp("two"))
    for step in (*steps, _look):
        step(two)
    assert two.files == two.leaders
    assert not (two.root / WORK).exists() or not list((two.root / WORK).iterdir())
    settled, read = two.take_over()
    assert settled == Settled(0, 0)
    assert all(name.endswith(INDEX) for name in read)
    assert two.files == two.leaders


def test_what_was_brought_and_changed_since_is_brought_again(two: Two) -> None:
    """By somebody on the machine, or by the leader in the bucket: it is compared once more."""
    two.leader.keep(MODEL_PATH, b"m" * BLOCK)
    two.leader.keep(VERDICTS_PATH, b"one")
    two.ahead.turn()
    (two.root / MODEL_PATH).write_bytes(b"x" * BLOCK)
    two.leader.keep(VERDICTS_PATH, b"two")
    assert two.take_over()[0] == Settled(2, 0)
    assert two.files == {MODEL_PATH: b"m" * BLOCK, VERDICTS_PATH: b"two"}


def test_what_was_taken_over_is_not_read_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.leader.keep(MODEL_PATH, b"m" * 3 * BLOCK)
    two.ahead.turn()
    two.ahead.turn()

    def read(*arguments: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(KeptInBucket, "_read", read)
    assert two.take_over()[0] == Settled(0, 0)


def test_an_update_is_brought_where_its_key_is_and_goes_with_its_attempt(two: Two) -> None:
    keep_record(two.leader, two.as_standby())
    two.leader.keep(SPOOL_PATH, b"ciphertext")
    two.ahead.turn()
    assert two.files[SPOOL_PATH] == b"ciphertext"
    two.leader.kept.forget(two.leader.root / "spools")
    two.ahead.turn()
    assert not {SPOOL_PATH, RECORD_PATH} & two.files.keys()
    assert not (two.root / SPOOL_PATH).parent.exists()


def test_an_update_that_nobody_here_can_read_is_not_brought(two: Two) -> None:
    keep_record(two.leader)
    two.leader.keep(SPOOL_PATH, b"ciphertext")
    two.ahead.turn()
    assert two.files.keys() == {RECORD_PATH}


@settings(max_examples=30, deadline=None)
@given(
    own=st.sets(st.sampled_from(PATHS)),
    theirs=st.sets(st.sampled_from(PATHS)),
    harm=st.sampled_from(["deleted", "cut", "flipped", "swapped"]),
    data=st.data(),
)
def test_who_writes_the_bucket_takes_nothing_from_the_folder_and_puts_nothing_there(
    tmp_path_factory: pytest.TempPathFactory, own: set[str], theirs: set[str], harm: str, data: st.DataObject
) -> None:
    """What the folder had by itself stays, whatever is deleted in the bucket; what comes is what the leader signed."""
    two = Two.at(tmp_path_factory.mktemp("two"))
    contents = {path: path.encode() * 3 for path in PATHS}
    for path in own:
        two.as_standby().write(path, contents[path])
    for path in theirs:
        two.leader.keep(path, contents[path])
    if data.draw(st.booleans()):
        two.ahead.turn()
    store = two.leader.bucket
    for name in data.draw(st.lists(st.sampled_from(sorted(two.leader.objects)), unique=True)) if theirs else ():
        raw = store.get(name, 1 << 20)
        assert raw is not None
        changed = {"cut": raw[:-1], "flipped": bytes([raw[0] ^ 1]) + raw[1:], "swapped": b"z" * len(raw)}
        if harm == "deleted":
            store.delete([name])
        else:
            store.put(name, bytes(changed[harm]))
    two.ahead.turn()
    two.ahead.turn()
    found = two.files
    assert own <= found.keys() <= own | theirs
    assert found.items() <= contents.items()


def test_a_file_that_the_folder_had_stays_when_the_bucket_has_it_no_more(two: Two) -> None:
    """It led before: who empties the bucket empties no folder."""
    for place in (two.as_standby(), two.leader):
        place.write(MODEL_PATH, b"the model")
    two.leader.kept.keep(two.leader.root / MODEL_PATH)
    two.ahead.turn()
    two.leader.bucket.delete({name for name in two.leader.objects if ANOTHER_PATH not in name})
    two.ahead.turn()
    assert two.files == {MODEL_PATH: b"the model"}


def test_a_bucket_that_is_empty_at_once_takes_nothing_that_was_brought(two: Two) -> None:
    two.leader.keep(MODEL_PATH, b"the model")
    two.ahead.turn()
    two.leader.bucket.delete(two.leader.objects)
    two.ahead.turn()
    assert two.files == {MODEL_PATH: b"the model"}


def test_what_is_wrong_in_the_bucket_is_told_once_and_refuses_the_take_over(
    two: Two, capsys: pytest.CaptureFixture[str]
) -> None:
    two.leader.keep(MODEL_PATH, b"m" * BLOCK)
    two.leader.keep(BUNDLE_PATH, b"bundle")
    block = next(name for name in two.leader.objects if f"{MODEL_PATH}/0" in name)
    two.leader.bucket.put(block, b"z" * 50)
    two.ahead.turn()
    two.ahead.turn()
    assert two.files == {BUNDLE_PATH: b"bundle"}, "the rest is brought"
    assert capsys.readouterr().out.count("cannot be brought ahead") == 1
    with pytest.raises(IntegrityError, match="is not what was kept"):
        two.take_over()


def test_one_that_stands_by_tells_what_the_bucket_lacks_and_who_takes_over_puts_it_again(
    two: Two, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, when a second look says so too: while the leader puts a file a look may see its index alone."""
    two.leader.keep(MODEL_PATH, b"m" * 3 * BLOCK)
    two.ahead.turn()
    two.leader.bucket.delete([next(name for name in two.leader.objects if f"{MODEL_PATH}/000001" in name)])
    before = two.leader.objects
    two.ahead.turn()
    assert "lacks" not in capsys.readouterr().out
    for _ in range(2):
        two.ahead.turn()
    told = [line for line in capsys.readouterr().out.splitlines() if "lacks blocks" in line]
    assert len(told) == 1
    assert MODEL_PATH in told[0]
    assert two.leader.objects == before
    assert two.take_over()[0] == Settled(0, 1)
    two.as_standby(3).settle()


def test_a_bucket_that_is_away_is_told_and_looked_at_again(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    two.leader.keep(BUNDLE_PATH, b"bundle")
    real = two.bucket.names

    def away(below: str = "") -> object:
        raise StorageError("the bucket is away")

    two.bucket.names = away  # type: ignore[method-assign, assignment]
    two.ahead.turn()
    two.bucket.names = real  # type: ignore[method-assign]
    assert capsys.readouterr().out.count("the bucket is away") == 1
    two.ahead.turn()
    assert two.files == {BUNDLE_PATH: b"bundle"}


def test_it_brings_while_another_one_leads_and_ends_in_the_middle_of_a_file(tmp_path: Path) -> None:
    two = Two.at(tmp_path)
    two.leader.keep(BUNDLE_PATH, b"bundle")
    two.leader.keep(MODEL_PATH, b"m" * 40 * BLOCK)
    real = two.bucket.get

    def ends_at_the_model(name: str, most: int) -> memoryview | None:
        if f"{MODEL_PATH}/000003" in name:
            two.ahead.over.set()
            two.ahead._kept._workers.shutdown(wait=False, cancel_futures=True)
        return real(name, most)

    two.bucket.get = ends_at_the_model  # type: ignore[method-assign]
    with running(two.ahead):
        two.ahead.over.wait()
    assert MODEL_PATH not in two.files or two.files[MODEL_PATH] == b"m" * 40 * BLOCK
    two.bucket.get = real  # type: ignore[method-assign]
    two.take_over()
    assert two.files == two.leaders


def test_every_kind_of_file_that_is_kept_is_tried_here() -> None:
    tried = (*PATHS, RECORD_PATH, SPOOL_PATH)
    assert [kind.pattern for kind in KINDS if not any(map(kind.fullmatch, tried))] == []
