"""Private files stay private, replaced files are whole."""

import os
import stat
from pathlib import Path

import pytest

from security import files
from security.errors import ConfigurationError, StorageError


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
