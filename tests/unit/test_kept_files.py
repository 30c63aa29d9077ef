"""Files kept in a bucket: what was put comes back byte for byte, or it is refused by its name.

Whoever writes the bucket chooses every byte of it, which objects there are, and what is deleted when; a leader that was
overtaken chooses when it goes on. Both are searched over. The store is obstore's own in memory; over servers:
tests/integration/test_buckets.py.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from lorica_coordinator.edges.kept.block_cipher import MORE_BYTES, NONCE_BYTES, BlockCipher
from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.kept_file import INDEX, KeptFile, ObjectName, is_kept_kind
from lorica_coordinator.edges.kept.kept_in_bucket import WORK, KeptInBucket, Leader, Listed
from lorica_coordinator.edges.kept.settled import Settled, meanwhile, settle
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.service.ports import Overtaken
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.key_place import marked
from lorica_coordinator.vectors.spool_key import make_key
from lorica_coordinator.vectors.stored_vector import write_record
from lorica_security.errors import IntegrityError, StorageError
from lorica_security.identity import identity_key
from silo_wire.canonical import canonical_json
from tests.support.coordinator_edges import FEDERATION

KEY = identity_key.new_identity_key()
BLOCK = 64
PLAN, MODEL = "ab" * 32, "cd" * 32
MODEL_PATH = f"models/{PLAN}/{MODEL}.safetensors"
STATE_PATH = f"models/{PLAN}/{MODEL}.optimizer/m.f32"
BUNDLE_PATH = f"bundles/{PLAN}.bundle"
EVIDENCE_PATH = f"models/{PLAN}/evidence/{MODEL}.evidence"
VERDICTS_PATH = f"models/{PLAN}/evidence/{MODEL}.verdicts"
SPOOL_PATH = f"spools/{PLAN}/3-1/clinic-c.delta"
RECORD_PATH = f"spools/{PLAN}/3-1/clinic-c.json"
PATHS = (MODEL_PATH, STATE_PATH, BUNDLE_PATH, VERDICTS_PATH)


class MemoryBucket(Bucket):
    """obstore's memory keeps no copy of what it is given, as a server does, but the very memory."""

    def put(self, name: str, content: bytes | memoryview) -> None:
        super().put(name, bytes(content))


class Place:
    """A coordinator's folder on a machine of its own, in one term, over a store that all share."""

    def __init__(
        self,
        root: Path,
        store: MemoryStore,
        term: int,
        key: Ed25519PrivateKey = KEY,
        *,
        block_bytes: int = BLOCK,
        bucket: Bucket | None = None,
    ) -> None:
        self.root = root
        self.bucket = bucket or MemoryBucket("s3://lorica/north/", "north/", store)
        leader = Leader(
            federation=FEDERATION,
            term=term,
            identity=key,
        )
        self.kept = KeptInBucket(root, self.bucket, leader, block_bytes=block_bytes)
        self.keys = SpoolKeys(root / "spools", root / "attempt-keys" / "spools", term)

    def write(self, path: str, content: bytes) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def keep(self, path: str, content: bytes) -> None:
        self.kept.keep(self.write(path, content))

    def settle(self) -> Settled:
        return settle(self.kept, self.root, self.has_key)

    def has_key(self, update: Path, name: str) -> bool:
        path = self.keys.path(update, name)
        return path is not None and path.is_file()

    def files(self) -> dict[str, bytes]:
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }

    @property
    def objects(self) -> set[str]:
        return set(self.bucket.names())


Makes = Callable[..., Place]


@pytest.fixture
def place(tmp_path: Path) -> Makes:
    store = MemoryStore()

    def make(term: int, name: str | None = None, key: Ed25519PrivateKey = KEY) -> Place:
        root = tmp_path / (name or f"of-term-{term}")
        root.mkdir(exist_ok=True)
        return Place(root, store, term, key)

    return make


def test_what_is_kept_comes_back_on_an_empty_folder_and_the_folder_alone_keeps_nothing(
    place: Makes, tmp_path: Path
) -> None:
    first = place(1)
    assert first.settle() == Settled(0, 0)
    contents = {path: bytes([number]) * (BLOCK * number + 1) for number, path in enumerate(PATHS)}
    for path, content in contents.items():
        first.keep(path, content)
    before = first.objects
    first.kept.keep(*(first.root / path for path in PATHS))
    assert first.objects == before

    second = place(2)
    assert second.settle() == Settled(len(PATHS), 0)
    assert second.files() == contents
    assert second.settle() == Settled(0, 0), "the same again is a look alone"
    assert not (second.root / WORK).exists()
    assert second.kept.below(second.root / "models") == {second.root / path for path in PATHS if "models" in path}

    alone: KeptFiles = FOLDER_ALONE
    alone.keep(tmp_path / "nothing")
    alone.forget(tmp_path / "nothing")
    assert alone.below(tmp_path) == frozenset()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5 * BLOCK + 1), min_size=1, max_size=4),
    put_at_most=st.integers(0, 12),
    rewritten=st.lists(st.integers(0, 3), max_size=4),
)
def test_any_sizes_and_a_bucket_that_goes_away_after_any_put(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], put_at_most: int, rewritten: list[int]
) -> None:
    """Whatever came through before it went away: what is there opens, and trying again ends with all of it."""
    folder, store = tmp_path_factory.mktemp("any"), MemoryStore()
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    first = Place(folder / "a", store, 1)
    first.settle()
    puts, real = 0, first.bucket.put

    def put(name: str, content: bytes | memoryview) -> None:
        nonlocal puts
        puts += 1
        if puts > put_at_most:
            raise StorageError("the bucket went away")
        real(name, content)

    first.bucket.put = put  # type: ignore[method-assign]
    contents = {path: bytes((size + at) % 251 for at in range(size)) for path, size in zip(PATHS, sizes, strict=False)}
    kept = set()
    try:
        for path, content in contents.items():
            first.keep(path, content)
            kept.add(path)
    except StorageError:
        pass
    second = Place(folder / "b", store, 2)
    second.settle()
    assert second.files() == {path: contents[path] for path in kept}

    first.bucket.put = real  # type: ignore[method-assign]
    for number in rewritten:
        path = PATHS[number % len(contents)]
        contents[path] = contents[path][::-1] + b"!"
    for path, content in contents.items():
        first.keep(path, content)
    first.kept.forget(folder / "a" / "nothing")
    (folder / "c").mkdir()
    third = Place(folder / "c", store, 3)
    third.settle()
    assert third.files() == contents
    named = {name for path in contents for name in _named(first, path)}
    assert first.objects == named, "nothing else is left of what was tried and written over"


def _named(place: Place, path: str, term: int = 1) -> set[str]:
    index = str(ObjectName(term, path, INDEX))
    raw = place.bucket.get(index, 1 << 20)
    assert raw is not None
    kept = KeptFile.parse(raw, KEY.public_key(), federation=FEDERATION, path=path, term=term, where=index)
    return {index, *(kept.block(number) for number in range(len(kept.blocks)))}


# --- who writes the bucket


HOSTILE = (
    "cut",
    "longer",
    "flipped",
    "deleted",
    "of another block",
)


def test_the_bucket_has_nothing_of_a_file_but_its_size_and_digests(place: Makes) -> None:
    """Evidence has what silos revealed for a sum: who reads the bucket, or its versions, must not. Updates are
    encrypted where they lie."""
    first = place(1)
    first.settle()
    content = bytes(range(BLOCK)) * 2
    for path in (MODEL_PATH, EVIDENCE_PATH, RECORD_PATH):
        first.keep(path, content)
    stored = [bytes(found) for name in first.objects if (found := first.bucket.get(name, 1 << 20)) is not None]
    assert len(stored) == 9
    pieces = [content[at : at + 12] for at in range(0, BLOCK, 4)]
    assert not [piece for raw in stored for piece in pieces if piece in raw]
    blocks = [raw for raw in stored if not raw.startswith(b"{")]
    assert len({raw[:NONCE_BYTES] for raw in blocks}) == len(blocks) == 6, "each has a nonce of its own"


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=100), name=st.text(max_size=40), spare=st.integers(0, 20), data=st.data())
def test_a_block_opens_under_its_own_name_key_and_bytes_alone(
    content: bytes, name: str, spare: int, data: st.DataObject
) -> None:
    def cipher(key: Ed25519PrivateKey, federation: str = "north") -> BlockCipher:
        return BlockCipher.of(key, federation)

    sealed = bytes(cipher(KEY).seal(name, content, memoryview(bytearray(len(content) + MORE_BYTES + spare))))
    assert cipher(KEY).open(name, sealed, "it") == content, "the key comes again from the same identity"
    place = data.draw(st.integers(0, len(sealed) - 1))
    flipped = sealed[:place] + bytes([sealed[place] ^ data.draw(st.integers(1, 255))]) + sealed[place + 1 :]
    for other, at, raw in (
        (cipher(KEY), name, flipped),
        (cipher(KEY), name, sealed[: data.draw(st.integers(0, len(sealed) - 1))]),
        (cipher(KEY), name + "x", sealed),
        (cipher(identity_key.new_identity_key()), name, sealed),
        (cipher(KEY, "south"), name, sealed),
    ):
        with pytest.raises(IntegrityError, match=r"^it is not what was kept"):
            other.open(at, raw, "it")


def test_one_that_was_overtaken_puts_no_index_and_deletes_nothing(place: Makes) -> None:
    """It was stopped while it put a model, and goes on when the next one has retired that: an index of its would name
    blocks that are gone, and keep everybody from leading."""
    stale = place(7)
    stale.settle()
    stale.keep(BUNDLE_PATH, b"kept in time")
    before = stale.objects

    def overtaken() -> None:
        raise Overtaken("another coordinator leads")

    object.__setattr__(stale.kept._leader, "prove", overtaken)
    with pytest.raises(Overtaken):
        stale.keep(MODEL_PATH, b"too late")
    assert not [name for name in stale.objects - before if name.endswith(INDEX)]
    with pytest.raises(Overtaken):
        stale.kept.forget(stale.root / BUNDLE_PATH)
    assert before <= stale.objects
    after = place(8)
    after.settle()
    assert after.files() == {BUNDLE_PATH: b"kept in time"}


def test_an_update_lies_in_the_bucket_as_it_lies_in_the_folder_and_comes_back(place: Makes) -> None:
    """It is encrypted already, and its key stays elsewhere."""
    first, second = place(1), place(2)
    first.settle()
    content = bytes(range(BLOCK)) * 2 + b"end"
    keep_record(first, second)
    first.keep(SPOOL_PATH, content)
    raw = {name: first.bucket.get(name, 1 << 20) for name in first.objects if f"{SPOOL_PATH}/0" in name}
    assert sorted(map(bytes, filter(None, raw.values()))) == sorted([content[:BLOCK], content[:BLOCK], b"end"])
    second.settle()
    assert second.files()[SPOOL_PATH] == content


def test_memory_of_a_request_that_was_given_up_is_not_written_to(place: Makes) -> None:
    """The library may send on from it after it said that it failed."""
    one = place(1)
    one.settle()
    held: list[memoryview] = []
    real = one.bucket.put

    def fail(name: str, content: bytes | memoryview) -> None:
        assert isinstance(content, memoryview)
        held.append(content)
        raise StorageError("it was given up")

    one.bucket.put = fail  # type: ignore[method-assign]
    for path in (MODEL_PATH, SPOOL_PATH):
        with pytest.raises(StorageError, match="given up"):
            one.keep(path, b"a" * BLOCK)
    before = [bytes(content) for content in held]
    one.bucket.put = real  # type: ignore[method-assign]
    for path in (MODEL_PATH, SPOOL_PATH):
        one.keep(path, b"b" * 9 * BLOCK)
    assert [bytes(content) for content in held] == before


THREE_BLOCKS = b"a" * BLOCK + b"b" * BLOCK + b"c" * 10


def block_of(place: Place, path: str, number: int) -> str:
    """The name of its object."""
    return min(one for one in place.objects if f"{path}/{number:06}-" in one)


def keep_record(place: Place, *others: Place) -> None:
    """Of the update at SPOOL_PATH, whose key is in each place."""
    stem, name = SPOOL_PATH.removesuffix(".delta"), place.keys.fresh()
    for one in (place, *others):
        key = one.keys.path(one.root / stem, name)
        assert key is not None
        one.keys.provide((one.root / stem).parent)
        make_key(key)
    write_record(place.write(RECORD_PATH, b""), {"manifest": {}, "norm": 1.0, "key": name})
    place.kept.keep(place.root / RECORD_PATH)


def harm(first: Place, name: str, how: str) -> None:
    """The object of this name, in one of the HOSTILE ways."""
    content = first.bucket.get(name, 1 << 20)
    assert content is not None
    raw = bytes(content)
    if how == "deleted":
        first.bucket.delete([name])
    else:
        other = {
            "cut": raw[:-1],
            "longer": raw + b"x",
            "flipped": bytes([raw[0] ^ 1]) + raw[1:],
            "of another block": b"z" * len(raw),
        }[how]
        first.bucket.put(name, other)


@pytest.mark.parametrize(
    "path", [MODEL_PATH, STATE_PATH, BUNDLE_PATH, EVIDENCE_PATH], ids=["model", "state", "bundle", "evidence"]
)
@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("block", [0, 2])
def test_a_block_that_is_missing_cut_or_another_one_is_refused_by_its_name(
    place: Makes, path: str, how: str, block: int
) -> None:
    first, second = place(1), place(2)
    first.settle()
    first.keep(path, THREE_BLOCKS)
    name = block_of(first, path, block)
    harm(first, name, how)
    with pytest.raises(IntegrityError, match="restore") as caught:
        second.settle()
    assert name in str(caught.value)
    assert path not in second.files()
    if how == "deleted":
        said = (
            rf"start the coordinator that led, whose folder has {path} .*bucket's versions.*where both are lost delete"
        )
        assert re.search(said, str(caught.value))


@pytest.mark.parametrize("path", [SPOOL_PATH, RECORD_PATH], ids=["update", "record"])
@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("block", [0, -1])
def test_an_update_that_does_not_open_is_left_out_and_told(
    place: Makes, capsys: pytest.CaptureFixture[str], path: str, how: str, block: int
) -> None:
    """Its silo can send another: nobody waits for it to start. Block -1 stands for the index."""
    first, second = place(1), place(2)
    first.settle()
    keep_record(first, second)
    for other in (SPOOL_PATH, MODEL_PATH):
        first.keep(other, THREE_BLOCKS)
    name = block_of(first, path, block) if block >= 0 else str(ObjectName(1, path, INDEX))
    harm(first, name, how)
    second.settle()
    assert path not in second.files()
    assert second.files()[MODEL_PATH] == THREE_BLOCKS
    if (how, block) != ("deleted", -1):  # then nothing says that it was there
        told = [line for line in capsys.readouterr().out.splitlines() if "the round goes on without it" in line]
        assert len(told) == 1
        assert path in told[0]
    second.kept.forget(second.root / "spools")
    assert not [one for one in second.objects if "/spools/" in one]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_that_the_bucket_lost_are_put_again_from_a_folder_that_has_them(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """By whoever leads next on that folder, in a term of its own: who begins on an empty one has all, after."""
    folder, store = tmp_path_factory.mktemp("lost"), MemoryStore()
    for name in ("a", "b"):
        (folder / name).mkdir()
    first = Place(folder / "a", store, 1)
    first.settle()
    contents = {path: bytes([number]) * (BLOCK * number + 1) for number, path in enumerate(PATHS)}
    for path, content in contents.items():
        first.keep(path, content)
    blocks = sorted(name for name in first.objects if not name.endswith(INDEX))
    lost = data.draw(st.lists(st.sampled_from(blocks), unique=True))
    first.bucket.delete(lost)
    before = first.objects
    torn = {path for path in PATHS if any(f"/{path}/" in name for name in lost)}

    again = Place(folder / "a", store, 2)
    assert again.settle() == Settled(0, len(torn))
    assert again.objects - before == {name for path in torn for name in _named(again, path, 2)}
    assert before <= again.objects, "an index of an earlier term goes with its file"
    elsewhere = Place(folder / "b", store, 3)
    assert elsewhere.settle() == Settled(len(PATHS), 0)
    assert elsewhere.files() == contents
    elsewhere.kept.forget(folder / "b" / "models", folder / "b" / "bundles")
    assert elsewhere.objects == set()


def test_an_update_that_the_bucket_lost_in_part_is_put_again(place: Makes) -> None:
    first, again, elsewhere = place(1, "same"), place(2, "same"), place(3)
    first.settle()
    keep_record(first, elsewhere)
    first.keep(SPOOL_PATH, THREE_BLOCKS)
    first.bucket.delete([block_of(first, SPOOL_PATH, 1)])
    assert again.settle() == Settled(0, 1)
    elsewhere.settle()
    assert elsewhere.files()[SPOOL_PATH] == THREE_BLOCKS


def test_where_putting_again_fails_nobody_leads(place: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = place(1, "same"), place(2, "same")
    first.settle()
    first.keep(MODEL_PATH, THREE_BLOCKS)
    first.bucket.delete([block_of(first, MODEL_PATH, 1)])

    def full(name: str, content: bytes | memoryview) -> None:
        raise StorageError("it is full")

    monkeypatch.setattr(again.bucket, "put", full)
    with pytest.raises(StorageError, match="it is full"):
        again.settle()
    assert not [name for name in again.objects if name.startswith("t0000000002/") and name.endswith(INDEX)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_index_counts_but_one_that_the_coordinator_signed_for_this_place(place: Makes, data: st.DataObject) -> None:
    """Any bytes, any change of a field, an index of another path, term, federation or key."""
    stranger = identity_key.new_identity_key()
    fields = {"federation": FEDERATION, "path": MODEL_PATH, "term": 1, "size": 3, "block_bytes": BLOCK}
    good = KeptFile(**fields, blocks=("00" * 32,))  # type: ignore[arg-type]

    def signed(kept: KeptFile, key: Ed25519PrivateKey = KEY) -> bytes:
        return kept.to_bytes(lambda domain, text: identity_key.sign(key, domain=domain.encode(), payload=text))

    value = json.loads(signed(good))
    changed = data.draw(
        st.one_of(
            st.binary(max_size=200),
            st.just(signed(good, stranger)),
            st.just(signed(replace(good, path=STATE_PATH))),
            st.just(signed(replace(good, term=2))),
            st.just(signed(replace(good, federation="others"))),
            st.just(signed(replace(good, size=BLOCK + 1))),
            st.just(signed(replace(good, block_bytes=0))),
            st.just(signed(replace(good, block_bytes=1 << 30))),
            st.just(signed(replace(good, blocks=("../" * 20,)))),
            st.builds(
                lambda key, new: canonical_json({**value, "file": {**value["file"], key: new}}),
                st.sampled_from(sorted(value["file"])),
                st.one_of(st.none(), st.integers(-1, 9), st.text(max_size=9), st.just([]), st.just(["11" * 32])),
            ),
            st.builds(lambda text: canonical_json({**value, "signature": text}), st.text("0f", max_size=130)),
        )
    )
    with_where = {"federation": FEDERATION, "path": MODEL_PATH, "term": 1, "where": "THERE"}
    if changed == signed(good) or json.loads(signed(good)) == _loaded(changed):
        return
    with pytest.raises(IntegrityError, match="THERE"):
        KeptFile.parse(changed, KEY.public_key(), **with_where)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["path", "term", "federation"])
def test_an_index_is_of_its_own_place_alone(place: Makes, what: str) -> None:
    """Who writes the bucket copies one of this coordinator's own, signed, to another name."""
    first = place(1)
    first.settle()
    first.keep(MODEL_PATH, b"the model")
    index = first.bucket.get(str(ObjectName(1, MODEL_PATH, INDEX)), 1 << 20)
    assert index is not None
    here = {"federation": FEDERATION, "path": MODEL_PATH, "term": 1}
    other = here | {"federation": "others", "path": STATE_PATH, "term": 2}
    KeptFile.parse(index, KEY.public_key(), **here, where="THERE")  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="THERE is the index of another file"):
        KeptFile.parse(index, KEY.public_key(), **{**here, what: other[what]}, where="THERE")  # type: ignore[arg-type]


def _loaded(raw: bytes) -> object:
    try:
        return json.loads(raw)
    except ValueError:
        return None


@given(text=st.text(max_size=120) | st.from_regex(r"t[0-9]{10}/[a-z./-]{1,40}/(index|[0-9]{6}-[0-9a-f]{64})"))
def test_no_name_leads_outside_the_files_that_are_kept(text: str) -> None:
    one = ObjectName.parse(text)
    if one is not None:
        assert is_kept_kind(one.path)
        assert ".." not in one.path.split("/")
        assert str(one) == text


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/cron.d/x", "keys/identity.key", "state.sqlite", "attempt-keys/x.key", "federation.toml",
        f"models/{PLAN}/../../keys/{MODEL}.safetensors", f"spools/{PLAN}/3-1/clinic-c.key", f"bundles/{PLAN}.bundle\n",
        f"models/{PLAN}/spare/0.spare", f"plans/first/{MODEL}.safetensors", "audit/log", "held.lock",
    ],
)  # fmt: skip
def test_what_is_none_of_these_files_is_neither_put_nor_brought(place: Makes, path: str) -> None:
    first = place(1)
    first.settle()
    if ".." not in path:
        with pytest.raises(StorageError, match="is none of the files that are kept"):
            first.keep(path, b"secret")
    if ".." not in path and path.isprintable():  # the library itself lists no other
        first.bucket.put(f"t0000000000/{path}/{INDEX}", b"{}")
    assert ObjectName.parse(f"t0000000000/{path}/{INDEX}") is None
    second = place(2)
    assert second.settle() == Settled(0, 0)
    assert second.files() == {}


# --- terms


def test_a_leader_that_was_overtaken_neither_overwrites_nor_deletes_what_a_later_one_has(place: Makes) -> None:
    stale, leader = place(7), place(8)
    stale.settle()
    stale.keep(MODEL_PATH, b"of term 7")
    leader.settle()
    leader.keep(MODEL_PATH, b"of term 8")
    leader.keep(VERDICTS_PATH, b"of term 8")
    before = {name for name in leader.objects if name.startswith("t0000000008/")}
    stale.keep(MODEL_PATH, b"of term 7, late")
    stale.kept.forget(stale.root / "models")
    assert {name for name in leader.objects if name.startswith("t0000000008/")} == before
    assert not [name for name in leader.objects if name.startswith("t0000000007/")]
    after = place(9)
    after.settle()
    assert after.files() == {MODEL_PATH: b"of term 8", VERDICTS_PATH: b"of term 8"}


def test_a_model_that_an_earlier_term_kept_is_kept_anew_when_it_is_made_again(place: Makes) -> None:
    """The earlier leader may still let its own go."""
    stale, leader = place(7), place(8)
    stale.settle()
    stale.keep(MODEL_PATH, b"the model")
    leader.settle()
    (leader.root / MODEL_PATH).unlink()
    leader.keep(MODEL_PATH, b"the model")
    stale.kept.forget(stale.root / "models")
    after = place(9)
    after.settle()
    assert after.files() == {MODEL_PATH: b"the model"}


def test_what_is_retired_goes_from_all_terms_until_this_one(place: Makes) -> None:
    for term in (1, 2):
        one = place(term)
        one.settle()
        one.keep(MODEL_PATH, b"%d" % term)
    last = place(3)
    last.settle()
    last.keep(BUNDLE_PATH, b"stays")
    last.kept.forget(last.root / "models" / PLAN)
    assert {name.split("/")[1] for name in last.objects} == {"bundles"}
    assert last.kept.below(last.root) == {last.root / BUNDLE_PATH}


def test_what_could_not_be_deleted_goes_with_what_is_retired_next(place: Makes) -> None:
    one = place(1)
    one.settle()
    one.keep(MODEL_PATH, b"x" * 3 * BLOCK)
    one.keep(BUNDLE_PATH, b"y")
    real = one.bucket.delete

    def refuse(names: object) -> None:
        raise StorageError("it may not delete")

    one.bucket.delete = refuse  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="it may not delete"):
        one.kept.forget(one.root / MODEL_PATH)
    one.bucket.delete = real  # type: ignore[method-assign]
    one.keep(MODEL_PATH, b"x" * BLOCK)  # what is put again meanwhile stays
    one.kept.forget(one.root / BUNDLE_PATH)
    after = place(2)
    after.settle()
    assert after.files() == {MODEL_PATH: b"x" * BLOCK}
    assert one.objects == _named(one, MODEL_PATH)


def test_deleting_that_is_cut_off_leaves_no_file_without_its_blocks(place: Makes) -> None:
    one = place(1)
    one.settle()
    one.keep(MODEL_PATH, b"x" * 3 * BLOCK)
    one.keep(BUNDLE_PATH, b"y")
    real, calls = one.bucket.delete, 0

    def once(names: Iterable[str]) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise StorageError("the process was killed")
        real(names)

    one.bucket.delete = once  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="was killed"):
        one.kept.forget(one.root / MODEL_PATH)
    assert len(one.objects) == 5, "blocks of the model are left, and all of the bundle"
    after = place(2)
    after.settle()
    assert after.files() == {BUNDLE_PATH: b"y"}
    after.kept.forget(after.root / "models")
    assert len(after.objects) == 2


def test_files_of_a_term_that_is_not_over_are_refused(place: Makes) -> None:
    """The database was brought back from an earlier instant: nobody can say which of the two is right."""
    place(5).keep(MODEL_PATH, b"x")
    for term in (4, 5):
        with pytest.raises(StorageError, match=r"term 5.*the database was brought back.*name a new prefix"):
            place(term, name=f"late-{term}").settle()


@given(
    terms=st.lists(st.integers(0, 10**10 - 1), max_size=6),
    others=st.lists(st.text("a1-", min_size=1, max_size=9), max_size=3),
)
def test_the_newest_term_is_that_of_the_files_there_whatever_else_lies_there(
    terms: list[int], others: list[str]
) -> None:
    store = MemoryStore()
    bucket = MemoryBucket("s3://lorica/north/", "north/", store)
    for term in terms:
        bucket.put(str(ObjectName(term, MODEL_PATH, INDEX)), b"")
    for number, other in enumerate(others):
        store.put(f"north/{10**9}/x{number}/{other}", b"")
    assert Listed.of(bucket).term == max(terms, default=0)


# --- a folder that is not empty


def test_what_another_leader_wrote_since_takes_the_place_of_what_the_folder_has(place: Makes) -> None:
    here, there = place(1, "here"), place(2, "there")
    here.settle()
    here.keep(VERDICTS_PATH, b"one verdict, here")
    there.settle()
    there.keep(VERDICTS_PATH, b"more verdicts there")
    again = place(3, "here")
    assert again.settle() == Settled(1, 0)
    assert again.files() == {VERDICTS_PATH: b"more verdicts there"}


def test_a_folder_is_put_into_a_new_bucket_but_for_updates_that_nobody_can_read(place: Makes) -> None:
    one = place(1)
    one.write(MODEL_PATH, b"m")
    one.write(f"models/{PLAN}/spare/0.spare", b"noise")
    for silo, norm, has_key in (("bank-a", 1.0, True), ("bank-b", None, True), ("clinic-c", 1.0, False)):
        delta = one.write(f"spools/{PLAN}/3-1/{silo}.delta", b"ciphertext")
        name = one.keys.fresh()
        write_record(delta.with_suffix(".json"), {"manifest": {}, "norm": norm, "key": name})
        if has_key:
            key = one.keys.path(delta.with_suffix(""), name)
            assert key is not None
            one.keys.provide(delta.parent)
            make_key(key)
    assert one.settle() == Settled(0, 3)
    put = {str(path.relative_to(one.root)) for path in one.kept.below(one.root)}
    assert put == {MODEL_PATH, *(f"spools/{PLAN}/3-1/bank-a.{kind}" for kind in ("delta", "json"))}
    assert not [name for name in one.objects if ".key" in name]

    without_keys = place(2)
    assert without_keys.settle() == Settled(2, 0)
    assert not [path for path in without_keys.files() if path.endswith(".delta")], "nobody could read it"


def test_a_leader_that_was_overtaken_destroys_no_key_of_a_later_one(tmp_path: Path) -> None:
    """It shares the folder of keys, and may open the same silo's update anew, or end every plan that it knows."""
    vault, update = tmp_path / "vault" / "spools", Path(PLAN) / "3-1" / "clinic-c"

    def of_term(term: int) -> SpoolKeys:
        spools = tmp_path / f"machine-{term}" / "spools"
        return SpoolKeys(spools, vault, term)

    made = {}
    for term in (6, 7, 8):
        keys = of_term(term)
        name = keys.fresh()
        path = keys.path(keys.spools / update, name)
        assert path is not None
        keys.provide((keys.spools / update).parent)
        make_key(path)
        made[term] = (name, path)
    stale = of_term(7)
    stale.destroy(stale.spools / update, made[8][0])
    assert made[8][1].exists()
    stale.destroy_below(stale.spools)
    assert {term: path.exists() for term, (_, path) in made.items()} == {6: False, 7: False, 8: True}
    assert stale.names() == {PLAN}
    of_term(8).destroy_below(of_term(8).spools / PLAN)
    assert stale.names() == set()


@pytest.mark.parametrize(
    "name", ["", "../../x", "8", "8.../etc/passwd", "8.0123456789ABCDEF", f"{'9' * 16}.{'0' * 16}"]
)
def test_a_record_names_no_key_outside_its_place(tmp_path: Path, name: str) -> None:
    keys = SpoolKeys(tmp_path / "spools", tmp_path / "vault" / "spools", 8)
    assert keys.path(tmp_path / "spools" / PLAN / "3-1" / "clinic-c", name) is None
    assert SpoolKeys(tmp_path / "spools").path(tmp_path / "spools" / PLAN / "3-1" / "clinic-c", "8.x") is None


def test_keys_are_made_in_no_mount_that_is_missing(tmp_path: Path) -> None:
    keys = SpoolKeys(tmp_path / "spools", tmp_path / "mount" / "ab" / "spools", 8, own=False)
    with pytest.raises(StorageError, match="mount it"):
        keys.provide(tmp_path / "spools" / PLAN / "3-1")
    assert not (tmp_path / "mount").exists()
    (tmp_path / "mount").mkdir(mode=0o700)
    marked(tmp_path / "mount", "")
    keys.provide(tmp_path / "spools" / PLAN / "3-1")
    assert (tmp_path / "mount" / "ab" / "spools" / PLAN / "3-1").is_dir()


# --- what no round waits for


@pytest.fixture
def used(place: Makes) -> Place:
    """In a bucket that is not new, which lacks the files of MODEL_PATH, STATE_PATH and VERDICTS_PATH."""
    first = place(1)
    first.settle()
    first.keep(BUNDLE_PATH, b"bundle")
    old = place(2)
    for path in (MODEL_PATH, STATE_PATH, VERDICTS_PATH):
        old.write(path, path.encode())
    assert old.settle() == Settled(1, 0, (STATE_PATH, VERDICTS_PATH, MODEL_PATH))
    return old


def test_what_a_bucket_lacks_that_is_not_new_is_put_aside_unless_it_was_let_go(used: Place, place: Makes) -> None:
    (used.root / STATE_PATH).unlink()
    put = used.bucket.put

    def let_go_meanwhile(name: str, content: bytes | memoryview) -> None:
        put(name, content)
        if name.endswith(f"{VERDICTS_PATH}/{INDEX}"):
            (used.root / VERDICTS_PATH).unlink()

    used.bucket.put = let_go_meanwhile  # type: ignore[method-assign]
    used.kept.keep_aside((STATE_PATH, VERDICTS_PATH, MODEL_PATH))
    assert used.kept.below(used.root) == {used.root / path for path in (BUNDLE_PATH, MODEL_PATH)}
    assert {name.split("/", 1)[1].rsplit("/", 1)[0] for name in used.objects} == {BUNDLE_PATH, MODEL_PATH}
    after = place(3)
    after.settle()
    assert after.files() == {BUNDLE_PATH: b"bundle", MODEL_PATH: MODEL_PATH.encode()}
    after.kept.close()
    after.write(STATE_PATH, b"x")
    after.kept.keep_aside([STATE_PATH])
    assert after.root / STATE_PATH not in after.kept.below(after.root)


def test_one_file_that_cannot_be_put_aside_keeps_no_other_from_it(used: Place) -> None:
    put = used.bucket.put

    def refuse_one(name: str, content: bytes | memoryview) -> None:
        if STATE_PATH in name:
            raise StorageError("the bucket is away")
        put(name, content)

    used.bucket.put = refuse_one  # type: ignore[method-assign]
    used.kept.keep_aside((STATE_PATH, MODEL_PATH))
    assert used.kept.below(used.root) == {used.root / path for path in (BUNDLE_PATH, MODEL_PATH)}


class Held:
    """Of a bucket: puts of objects whose names have `word` wait for `go`; `comes` is set by the first."""

    def __init__(self, place: Place, word: str) -> None:
        self.comes, self.go, self.names = threading.Event(), threading.Event(), list[str]()
        self._put, self._word = place.bucket.put, word
        place.bucket.put = self  # type: ignore[assignment, method-assign]

    def __call__(self, name: str, content: bytes | memoryview) -> None:
        if self._word in name:
            self.comes.set()
            assert self.go.wait(10)
        self.names.append(name)
        self._put(name, content)


def aside(place: Place, *paths: str) -> threading.Thread:
    thread = threading.Thread(target=place.kept.keep_aside, args=(paths,))
    thread.start()
    return thread


def test_no_block_is_put_aside_while_a_round_keeps_its_own(used: Place) -> None:
    used.write(MODEL_PATH, b"m" * 9 * BLOCK)
    held = Held(used, VERDICTS_PATH)
    round_of_its_own = threading.Thread(target=used.keep, args=(VERDICTS_PATH, b"verdicts"))
    round_of_its_own.start()
    assert held.comes.wait(30)
    beside = aside(used, MODEL_PATH)
    beside.join(0.3)
    assert beside.is_alive()
    assert held.names == []
    held.go.set()
    beside.join(30)
    round_of_its_own.join(30)
    assert [VERDICTS_PATH in name for name in held.names] == [True] * 2 + [False] * 10
    assert used.root / MODEL_PATH in used.kept.below(used.root)


def test_blocks_that_are_put_aside_go_one_by_one_before_a_rounds_own(used: Place) -> None:
    """A round never waits for more than the one that is on its way."""
    used.write(MODEL_PATH, b"m" * 9 * BLOCK)
    held = Held(used, f"{MODEL_PATH}/000003")
    beside = aside(used, MODEL_PATH)
    assert held.comes.wait(30)
    used.keep(VERDICTS_PATH, b"verdicts")
    assert [VERDICTS_PATH in name for name in held.names] == [False] * 3 + [True] * 2
    held.go.set()
    beside.join(30)
    assert len(held.names) == 12


@pytest.mark.parametrize("at", ["000000", INDEX])
def test_a_file_that_a_round_keeps_meanwhile_is_the_rounds(used: Place, place: Makes, at: str) -> None:
    """What was read of it before is not put over it, nor takes its blocks away."""
    held = Held(used, f"{VERDICTS_PATH}/{at}")
    beside = aside(used, VERDICTS_PATH)
    assert held.comes.wait(30)
    fresh = used.write(f"{VERDICTS_PATH}.fresh", b"of the round" * 20)
    fresh.replace(used.root / VERDICTS_PATH)
    used.bucket.put = held._put  # type: ignore[method-assign]  # only what is on its way is held
    keeping = threading.Thread(target=used.kept.keep, args=(used.root / VERDICTS_PATH,))
    keeping.start()
    keeping.join(0.3)
    held.go.set()
    keeping.join(30)
    beside.join(30)
    used.kept.forget()
    after = place(3)
    after.settle()
    assert after.files()[VERDICTS_PATH] == b"of the round" * 20


def test_a_file_that_a_round_has_kept_is_not_put_once_more_as_it_was(used: Place, place: Makes) -> None:
    def keep_meanwhile() -> None:
        used.kept._leader = leader
        fresh = used.write(f"{VERDICTS_PATH}.fresh", b"of the round" * 20)
        fresh.replace(used.root / VERDICTS_PATH)
        used.kept.keep(used.root / VERDICTS_PATH)

    leader = used.kept._leader
    used.kept._leader = replace(leader, prove=keep_meanwhile)
    used.kept.keep_aside([VERDICTS_PATH])
    after = place(3)
    after.settle()
    assert after.files()[VERDICTS_PATH] == b"of the round" * 20


def test_nothing_more_is_put_aside_of_a_file_that_was_let_go(used: Place) -> None:
    file = used.write(MODEL_PATH, b"m" * 9 * BLOCK)
    held = Held(used, f"{MODEL_PATH}/000003")
    beside = aside(used, MODEL_PATH)
    assert held.comes.wait(30)
    file.unlink()
    used.kept.forget(file)
    held.go.set()
    beside.join(30)
    assert len(held.names) == 4
    assert not [name for name in used.objects if MODEL_PATH in name]


def test_a_file_that_is_let_go_while_it_is_ended_with_leaves_no_index_without_blocks(used: Place) -> None:
    """Nobody could lead with what a kill then leaves."""
    file = used.root / VERDICTS_PATH
    held = Held(used, f"{VERDICTS_PATH}/{INDEX}")
    beside = aside(used, VERDICTS_PATH)
    assert held.comes.wait(30)
    file.unlink()
    forgetting = threading.Thread(target=used.kept.forget, args=(file,))
    forgetting.start()
    forgetting.join(0.5)
    has_blocks = any(VERDICTS_PATH in name for name in used.objects)
    held.go.set()
    beside.join(30)
    forgetting.join(30)
    assert has_blocks
    assert not [name for name in used.objects if VERDICTS_PATH in name]


def test_whoever_waits_for_room_to_put_aside_ends_with_the_leader(used: Place) -> None:
    held = Held(used, VERDICTS_PATH)
    keeping = threading.Thread(target=used.keep, args=(VERDICTS_PATH, b"verdicts"))
    keeping.start()
    assert held.comes.wait(30)
    beside = aside(used, MODEL_PATH)
    threading.Timer(0.1, held.go.set).start()
    used.kept._aside.close()
    beside.join(30)
    keeping.join(30)
    assert used.root / MODEL_PATH not in used.kept.below(used.root)


# --- while folder and bucket are settled


def test_the_leader_proves_that_it_leads_meanwhile_whatever_a_proof_says() -> None:
    beats, third = [], threading.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            third.set()
        if len(beats) == 1:
            raise StorageError("the server is away")

    with meanwhile(beat, 0.001):
        assert third.wait(30)
    done = len(beats)
    assert not [thread for thread in threading.enumerate() if thread.name == "leads meanwhile"]
    assert len(beats) == done


def test_what_a_kill_left_of_bringing_goes_at_the_next_start(place: Makes) -> None:
    one = place(1)
    one.write(f"{WORK}/0123456789abcdef", b"half a model")
    one.settle()
    assert one.files() == {}


def test_one_that_was_overtaken_meanwhile_does_not_go_on() -> None:
    said = threading.Event()

    def beat() -> None:
        said.set()
        raise Overtaken("another coordinator leads")

    with pytest.raises(Overtaken), meanwhile(beat, 0.001):
        assert said.wait(30)
    with pytest.raises(IntegrityError, match="its own"), meanwhile(beat, 0.001):
        raise IntegrityError("what the block found is its own")
