"""A folder of keys that several coordinators see is told from the empty one that lies where it is not mounted.

Who can write the folder chooses every byte of its mark, and who can write the database what is expected of it: both are
searched over.
"""

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.database.sealing.attempt_keys import AttemptKey
from lorica_coordinator.edges.database.sealing.key_vault import FolderKeyVault
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.vectors.key_place import MARK, marked, require_marked
from lorica_security.errors import StorageError

ONE, OTHER = "0123456789abcdef" * 2, "f" * 32
TEXTS = st.sampled_from([ONE, OTHER]) | st.text(max_size=40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mount"
    path.mkdir(mode=0o700)
    return path


def test_the_first_leader_marks_it_and_later_ones_know_it_again(folder: Path) -> None:
    text = marked(folder, "")
    assert re.fullmatch("[0-9a-f]{32}", text)
    assert (folder / MARK).stat().st_mode & 0o777 == 0o600
    assert marked(folder, text) == marked(folder, "") == text, "also where the first one's commit was lost"


@settings(max_examples=60)
@given(raw=st.binary(max_size=60) | TEXTS.map(str.encode) | TEXTS.map(lambda text: f"{text}\n".encode()), known=TEXTS)
@example(raw=ONE.encode(), known=ONE)
@example(raw=f"{ONE}\n\n".encode(), known=ONE)
@example(raw=b"", known="")
def test_no_folder_is_taken_for_the_one_that_the_database_knows(
    raw: bytes, known: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mount")
    (folder / MARK).write_bytes(raw)
    text = raw.removesuffix(b"\n").decode("latin-1")
    if re.fullmatch("[0-9a-f]{32}", text) and known in ("", text):
        assert marked(folder, known) == text
    else:
        with pytest.raises(StorageError, match=re.escape(str(folder / MARK))):
            marked(folder, known)
    assert (folder / MARK).read_bytes() == raw, "and it is left as it is"


def test_an_empty_folder_is_refused_with_the_remedy_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    text = marked(folder, "")
    with pytest.raises(StorageError, match=r"missing of \[storage\] attempt_keys is not there: make it"):
        marked(tmp_path / "missing", text)
    empty = tmp_path / "empty"
    empty.mkdir()
    for _ in range(3):
        with pytest.raises(StorageError, match=rf"{MARK} is not there.* knows .* by '{text}': mount it .* write that"):
            marked(empty, text)
    assert not list(empty.iterdir())
    (empty / MARK).write_text(text)  # as the remedy says
    assert marked(empty, text) == text


def test_no_key_is_made_or_missed_where_the_mount_went_away(folder: Path, tmp_path: Path) -> None:
    marked(folder, "")
    vault = FolderKeyVault(folder, 2, own=False)
    spools = SpoolKeys(tmp_path / "spools", folder / "spools", 2, own=False)
    key, secret = vault.make()
    spools.provide(tmp_path / "spools/plan/1-1")
    mounted = tmp_path / "mounted-elsewhere"
    folder.rename(mounted)
    folder.mkdir(mode=0o700)  # the mount point
    for use in (vault.make, vault.newest_term, lambda: vault.read(AttemptKey(1, "0" * 32)), lambda: vault.read(key)):
        with pytest.raises(StorageError, match=rf"is not the folder that keys are in \({MARK} is missing\): mount it"):
            use()
    with pytest.raises(StorageError, match="mount it"):
        spools.provide(tmp_path / "spools/plan/1-2")
    assert not list(folder.iterdir())
    shutil.rmtree(folder)
    mounted.rename(folder)
    assert vault.read(key) == secret
    require_marked(folder / "spools")
