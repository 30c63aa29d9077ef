"""The folder of `[storage] attempt_keys`, which several coordinators see, of several federations it may be: what one of
them puts there no other one takes away, however late it goes on."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.database.open_store import key_vault
from lorica_coordinator.edges.database.postgresql import newest as module
from lorica_coordinator.edges.database.postgresql.newest import SharedNewest
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.models.spool import SPOOLS
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.settings import settings_text
from lorica_coordinator.vectors.key_place import MARK, marked
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import federation_name

PLAN = "a" * 64


def line(number: int) -> tuple[int, str, bytes]:
    return number, f"{number:064x}", b"line %d\n" % number


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    folder = tmp_path / "mount"
    folder.mkdir(mode=0o700)
    marked(folder, "")
    return folder


def newest_of(mount: Path) -> SharedNewest:
    return SharedNewest(mount / "ab" / "audit", mount)


def known(mount: Path) -> list[bytes]:
    return [content for _, content in newest_of(mount).known()]


# --- the newest rows


def test_the_newest_line_is_known_to_whoever_comes_and_earlier_ones_go(mount: Path) -> None:
    first, second = newest_of(mount), newest_of(mount)
    assert known(mount) == []
    first.keep(*line(9))
    second.keep(*line(10))
    assert known(mount) == [b"line 10\n"]
    (path,) = (mount / "ab" / "audit").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    (path.parent / "1-x").write_text("")
    second.forget()
    assert second.known() == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    late=st.integers(1, 12),
    meanwhile=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=6),
    before=st.lists(st.integers(1, 12), max_size=2),
)
def test_one_that_goes_on_late_takes_no_later_line_away(
    tmp_path_factory: pytest.TempPathFactory, late: int, meanwhile: list[tuple[int, int]], before: list[int]
) -> None:
    """Its row is there, and it stands still before or after any step with which it makes that known; others keep
    theirs meanwhile. Whatever they do, the newest of all is known, and so is each that nobody has followed."""
    mount = tmp_path_factory.mktemp("shared") / "mount"
    mount.mkdir(mode=0o700)
    marked(mount, "")
    stale, leader = newest_of(mount), newest_of(mount)
    for number in before:
        leader.keep(*line(number))
    steps = [0]

    def others() -> None:
        at, steps[0] = steps[0], steps[0] + 1
        for when, number in meanwhile:
            if when == at:
                leader.keep(*line(number))

    write, delete = files.write_private, module._delete

    def slowly(step: Callable[..., None]) -> Callable[..., None]:
        def one(path: Path, *given: bytes) -> None:
            if path.is_relative_to(mount) and own[0]:
                own[0] = False
                others()
                step(path, *given)
                others()
                own[0] = True
            else:
                step(path, *given)

        return one

    own = [True]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "write_private", slowly(write))
        patched.setattr(module, "_delete", slowly(delete))
        stale.keep(*line(late))
    kept = [late, *before, *(number for when, number in meanwhile if when < steps[0])]
    assert b"line %d\n" % max(kept) in known(mount)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(3))
def test_a_kill_at_any_step_leaves_the_line_before_or_the_new_one(
    mount: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Of: its file, and those of before."""
    first = newest_of(mount)
    first.keep(*line(3))
    left = [at]

    def step(done: Callable[..., None]) -> Callable[..., None]:
        def one(*given: Path | bytes) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            done(*given)

        return one

    monkeypatch.setattr(files, "write_private", step(files.write_private))
    monkeypatch.setattr(module, "_delete", step(module._delete))
    with suppress(Killed):
        first.keep(*line(4))
    assert known(mount)[-1:] == [b"line 3\n" if at < 1 else b"line 4\n"]


def test_a_folder_that_is_not_mounted_is_named_and_not_made(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    there = SharedNewest(mount / "ab" / "audit", mount)
    for use in (there.prepare, there.known, there.forget):
        with pytest.raises(StorageError, match="/mount"):
            use()
    assert not mount.exists()
    mount.mkdir(mode=0o750)
    for use in (there.prepare, there.known):
        with pytest.raises(StorageError, match="mount it"):
            use()  # the empty folder that is there while nothing is mounted
    marked(mount, "")
    with pytest.raises(ConfigurationError, match="mount has mode 0750: it will hold private keys"):
        there.prepare()


# --- keys of two federations


def coordinator_of(folder: Path, mount: Path) -> Coordinator:
    KeyStore.create(folder / "keys", federation_name("north"), datetime.now(UTC))
    text = settings_text("north", ["localhost"], database="postgresql+psycopg://owner@/lorica?host=/run")
    text = text.replace('attempt_keys = ""', f'attempt_keys = "{mount}"')
    text = text.replace('blobs = ""', 'blobs = "s3://lorica/north?endpoint=https://s3.example.org"')
    (folder / "federation.toml").write_text(text)
    return Coordinator.load(CoordinatorFolder(folder))


def test_two_federations_with_one_folder_of_keys_destroy_nothing_of_each_other(tmp_path: Path, mount: Path) -> None:
    """Whose terms are what they are, and whose names may be the same."""
    one, other = (coordinator_of(tmp_path / name, mount) for name in ("one", "other"))
    key, secret = key_vault(one.settings, one.identity, 3).make()
    spools = one.settings.state_folder / SPOOLS
    ours = one.spool_keys
    update = spools / PLAN / "3-1" / "clinic-c"
    ours.provide(update.parent)
    path = ours.path(update, "0.0123456789abcdef")
    assert path is not None
    files.write_private(path, bytes(32))
    theirs = key_vault(other.settings, other.identity, 9)
    assert theirs.newest_term() == 0
    assert theirs.read(key) is None
    theirs.destroy(key)
    theirs.destroy_earlier(None)
    assert other.spool_keys.names() == set()
    other.spool_keys.destroy_below(other.settings.state_folder / SPOOLS / PLAN)
    assert key_vault(one.settings, one.identity, 4).read(key) == secret
    assert path.read_bytes() == bytes(32)
    assert ours.names() == {PLAN}
    assert {folder.name for folder in mount.iterdir()} == {one.identity, MARK}
