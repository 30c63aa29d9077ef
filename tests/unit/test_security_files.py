"""Private files stay private, replaced files are whole."""

import errno
import os
import stat
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_files_are_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write_private(tmp_path / "key", b"secret")
        files.make_private_folder(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode(tmp_path / "key") == 0o600
    assert mode(tmp_path / "keys") == 0o700
    assert files.read_private(tmp_path / "key") == b"secret"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_key_that_others_can_reach_is_refused_with_the_remedy(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    path.chmod(bits)
    with pytest.raises(ConfigurationError, match=rf"key has mode {bits:04o}: .*chmod 600"):
        files.read_private(path)


def test_a_key_folder_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        files.make_private_folder(tmp_path / "keys")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent is missing"):
        files.read_private(tmp_path / "absent")


def test_replacing_leaves_the_new_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.replace(path, b"one")
    files.replace(path, b"two")
    assert path.read_bytes() == b"two"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_keeps_the_old_file_and_no_litter(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    (folder / "inside").mkdir(parents=True)  # a folder stands where the file should go: the rename fails
    with pytest.raises(StorageError, match="file cannot be written"):
        files.replace(folder, b"new")
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    with pytest.raises(StorageError, match="/dev/full/x cannot be written"):
        files.replace(Path("/dev/full/x"), b"new")


# --- secrets that are over ----------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    files.write_private(path, b"secret")
    return path


@pytest.fixture
def inode(secret: Path) -> Path:
    """What a disk keeps of it when the name is gone."""
    link = secret.with_name("link")
    os.link(secret, link)
    return link


class PowerCut(BaseException):
    """Nothing is written from here on."""


def test_a_key_is_overwritten_durably_before_it_is_deleted(
    secret: Path, inode: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, bytes]] = []
    fsync, unlink = os.fsync, Path.unlink

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), inode.stat()):
            done.append(("fsync", inode.read_bytes()))

    def unlinked(path: Path, *, missing_ok: bool = False) -> None:
        done.append(("unlink", inode.read_bytes()))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    files.erase(secret)
    assert done == [("fsync", bytes(6)), ("unlink", bytes(6))]
    assert not secret.exists()
    files.erase(secret)


def test_a_key_whose_deletion_was_cut_off_is_known_for_erased(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not files.was_erased(secret)

    def cut(path: Path, *, missing_ok: bool = False) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", cut)
        with pytest.raises(PowerCut):
            files.erase(secret)
    assert files.was_erased(secret)
    files.erase(secret)
    assert not files.was_erased(secret)


@pytest.mark.parametrize("bits", [0o600, 0o400])
def test_a_key_that_is_replaced_is_overwritten_where_it_lay(secret: Path, inode: Path, bits: int) -> None:
    secret.chmod(bits)
    files.replace_secret(secret, b"another")
    assert (secret.read_bytes(), mode(secret)) == (b"another", 0o600)
    assert inode.read_bytes() == bytes(6)


def test_a_key_that_cannot_be_replaced_is_not_overwritten(
    secret: Path, inode: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="key cannot be written: No space left"):
        files.replace_secret(secret, b"another")
    assert secret.read_bytes() == b"secret"


def test_a_key_that_is_replaced_while_it_is_read_is_read_whole(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command reads the operator's pair while the coordinator makes another one."""
    fstat, times = os.fstat, 0

    def meanwhile(descriptor: int) -> os.stat_result:
        nonlocal times
        found = fstat(descriptor)
        times += 1
        if times == 1:
            files.replace_secret(secret, b"another")  # between the opening and the reading
        return found

    monkeypatch.setattr(os, "fstat", meanwhile)
    assert files.read_private(secret) == b"another"


def test_a_link_that_leads_nowhere_is_there_and_named_when_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert not files.is_there(file)
    with pytest.raises(ConfigurationError, match="file is missing"):
        files.read_private(file)
    file.symlink_to(tmp_path / "elsewhere")
    assert files.is_there(file)
    with pytest.raises(ConfigurationError, match=r"is a link to .*elsewhere, which is missing"):
        files.read_private(file)
    (tmp_path / "elsewhere").write_bytes(b"here")
    (tmp_path / "elsewhere").chmod(0o600)
    assert files.read_private(file) == b"here"


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o702])
def test_an_empty_folder_that_everybody_may_write_to_is_no_new_one(tmp_path: Path, bits: int) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(bits)
    with (
        pytest.raises(ConfigurationError, match=rf"out has mode {bits:04o}: everybody can write to it.*chmod o-w"),
        files.new_folder(tmp_path / "out"),
    ):
        pass
    (tmp_path / "out").chmod(0o775)
    with files.new_folder(tmp_path / "out") as work:
        (work / "new").write_text("new")


def test_folders_that_people_keep_beside_one_that_is_made_stay(tmp_path: Path) -> None:
    kept = [tmp_path / f".data-{name}" for name in ("20261125", "archived", "0123456789abcdef")]
    for folder in kept:
        folder.mkdir()
        (folder / "patients.csv").write_text("kept")
    left = tmp_path / f".data-{'0' * 16}.tmp"
    left.mkdir()
    with files.new_folder(tmp_path / "data") as work:
        (work / "new").write_text("new")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "data"]), (
        "what a kill left is gone, and nothing else"
    )
    assert [(folder / "patients.csv").read_text() for folder in kept] == ["kept"] * 3


def test_a_mark_that_cannot_be_made_is_told_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere/\.init cannot be written"):
        files.mark(tmp_path / "nowhere" / ".init")
