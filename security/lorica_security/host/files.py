"""Files that must be private, or whole: written atomically, and refused when others could read them.

`replace` is temp -> fsync -> rename -> fsync of the folder, so a crash leaves the old file or the new one, never a
part. Private files are 0600 inside a 0700 folder; reading one with looser permissions is refused, not mended, because
somebody may have read it already.

A file or folder in the making is held by a lock that the kernel lets go however its writer ends. So what a kill left is
known from what is being written, and `sweep` or the next writer deletes it.

What replaces or deletes a secret writes zeros over the old one first, as far as a program can: a disk that keeps old
blocks (flash, copy on write, snapshots) keeps it all the same, and a crash right after the rename leaves the old blocks
as they were.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import ballast

_BLOCK = 1 << 20
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_WORK = re.compile(r"[0-9a-f]{16}\.tmp")
PRIVATE_FILE_MODE = 0o600
PRIVATE_FOLDER_MODE = 0o700


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes, mode: int = 0o644, *, entry: bool = True) -> None:
    """Write `content` to `path` atomically and durably, on a full disk in place of its ballast; raises StorageError
    naming the file.

    Without `entry` the folder's entry becomes durable with the next `sync_folder`, which is the caller's to see to.
    """
    try:
        ballast.with_room(path, lambda: _replace(path, content, mode, entry=entry))
    except OSError as error:
        remedy = ": free some space on its disk" if error.errno in ballast.FULL else ""
        raise StorageError(f"{path} cannot be written: {error.strerror or error}{remedy}") from error


def _replace(path: Path, content: bytes, mode: int, *, entry: bool) -> None:
    """Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            hold(descriptor)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
            os.replace(temporary, path)
        if entry:
            sync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def hold(descriptor: int) -> None:
    """Mark an open file or folder as one that is being written, until it is closed."""
    with suppress(OSError):  # a file system without locks; what a kill leaves there stays
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_abandoned(path: Path) -> bool:
    """Whether nobody writes this file or folder any more; False for one that is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def is_temporary(path: Path) -> bool:
    """Whether `replace` names its files in the making so."""
    return _TEMPORARY.fullmatch(path.name) is not None


def sweep(folder: Path) -> None:
    """Erase what a kill left of `replace` in `folder` and below: it may hold a secret. Raises StorageError naming the
    file."""
    for inside, _, names in os.walk(folder):
        for path in filter(is_temporary, (Path(inside, name) for name in names)):
            with suppress(FileNotFoundError):  # its writer was quicker
                # An empty one may have been made this moment, and be held in the next.
                if path.lstat().st_size and is_abandoned(path):
                    erase(path)


def write_at(descriptor: int, data: bytes | memoryview, position: int) -> None:
    """Write all of `data` from byte `position` of an open file on; raises OSError."""
    left = memoryview(data)
    while len(left):
        written = os.pwrite(descriptor, left, position)
        position, left = position + written, left[written:]


def append_private(path: Path, data: bytes, at: int | None = None, *, remedy: str = "") -> None:
    """Write `data` durably behind byte `at` of a file of mode 0600, which is made if it is not there; None: behind its
    end.

    What lies behind `at` was left by a crash and is cut off. A write that fails is taken back as far as the disk lets
    it be. On a full disk it takes the place of the ballast. Raises StorageError naming the file, with `remedy`.
    """
    try:
        ballast.with_room(path, lambda: _append_private(path, data, at))
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error}){remedy and f': {remedy}'}") from error


def _append_private(path: Path, data: bytes, at: int | None) -> None:
    """Raises OSError."""
    fresh = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE_MODE)
    try:
        begin = os.fstat(descriptor).st_size if at is None else at
        os.ftruncate(descriptor, begin)
        try:
            write_at(descriptor, data, begin)
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, begin)
            raise
    finally:
        os.close(descriptor)
    if fresh:
        sync_folder(path.parent)


def write_private(path: Path, content: bytes, *, entry: bool = True) -> None:
    """Write a key or a secret: mode 0600, atomically. `entry` as for `replace`."""
    replace(path, content, PRIVATE_FILE_MODE, entry=entry)


def mark(path: Path) -> None:
    """An empty file of mode 0600, durably; raises StorageError naming it."""
    try:
        ballast.with_room(path, lambda: path.touch(mode=PRIVATE_FILE_MODE))
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def require_free(folder: Path) -> None:
    """Raises ConfigurationError where `folder` is there and holds anything, is no folder, or is everybody's."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{folder} is not an empty folder: choose another one, nothing is overwritten")
    require_not_everybodys(folder)


def require_not_everybodys(folder: Path) -> None:
    """Raises ConfigurationError where `folder` is there and everybody may write to it."""
    if folder.exists() and (mode := stat.S_IMODE(folder.stat().st_mode)) & stat.S_IWOTH:
        raise ConfigurationError(
            f"{folder} has mode {mode:04o}: everybody can write to it, and exchange what will be in it; chmod o-w it, "
            "or choose another folder"
        )


@contextmanager
def new_folder(folder: Path, mode: int = 0o755) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` at the end of the block: that is made whole or not at all.

    Raises ConfigurationError where `folder` holds anything, StorageError naming it.
    """
    require_free(folder)
    with work_folder(folder.parent, f".{folder.name}-") as work:
        try:
            yield work
            work.chmod(mode)
            os.replace(work, folder)
            sync_folder(folder.parent)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error


@contextmanager
def work_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, of which nothing is left after the block; nor is anything of earlier ones that a kill
    cut off.

    Raises StorageError naming `parent`.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.iterdir():
            # No name that people give: whoever keeps `.data-20261125` beside `data` keeps it.
            if left.name.startswith(prefix) and _WORK.fullmatch(left.name[len(prefix) :]) and is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        work = parent / f"{prefix}{secrets.token_hex(8)}.tmp"
        work.mkdir(mode=PRIVATE_FOLDER_MODE)
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{parent} cannot be written: {error.strerror or error}") from error
    try:
        hold(descriptor)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(descriptor)


def replace_secret(path: Path, content: bytes) -> None:
    """As `write_private`, and the secret that was there before is overwritten; raises StorageError naming the file."""
    _over_secret(path, lambda: write_private(path, content))


def take_place(staged: Path, path: Path) -> None:
    """Give the file `staged` the name `path`, durably; the secret that was there before is overwritten. Raises
    StorageError naming `path`."""

    def rename() -> None:
        os.replace(staged, path)
        sync_folder(path.parent)

    _over_secret(path, rename)


def _over_secret(path: Path, put: Callable[[], None]) -> None:
    """`put` something else at `path`."""
    try:
        before = _open_old(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be replaced: {error.strerror or error}") from error
    if before is None:
        put()
        return
    try:
        put()
        overwrite(before)
    except OSError as error:
        raise StorageError(f"what {path} held before cannot be overwritten: {error.strerror or error}") from error
    finally:
        os.close(before)


def erase(path: Path) -> None:
    """Overwrite a secret and delete it, durably; nothing happens when there is none. Raises StorageError naming the
    file."""
    try:
        if (descriptor := _open_old(path)) is None:
            return
        try:
            overwrite(descriptor)
        finally:
            os.close(descriptor)
        path.unlink()
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be erased: {error.strerror or error}") from error


def was_erased(path: Path) -> bool:
    """Whether `path` was overwritten by `erase`, and a crash came before it could be deleted; raises StorageError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    return bool(content) and not any(content)


def overwrite(descriptor: int) -> None:
    """Zeros over every byte of an open file, durably: only then may it be deleted. Raises OSError."""
    size, zeros = os.fstat(descriptor).st_size, bytes(_BLOCK)
    for position in range(0, size, _BLOCK):
        write_at(descriptor, memoryview(zeros)[: size - position], position)
    os.fsync(descriptor)


def _open_old(path: Path) -> int | None:
    try:
        path.chmod(PRIVATE_FILE_MODE)  # its owner may have made it read-only
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def is_there(path: Path) -> bool:
    """Whether anything has this name. A link that leads nowhere has: what it stands for is elsewhere, and was not
    deleted.

    Raises StorageError where that cannot be told.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path} cannot be looked for: {error.strerror or error}") from error
    return True


def read_private(path: Path, *, handed: bool = False) -> bytes:
    """Read a key or a secret; raises ConfigurationError when others than its owner can read it, or it is missing.

    `handed` is for what a service manager gives to a service: root's file, which a group may read. Kubernetes (fsGroup)
    and systemd (an access list) have no other way to hand a secret to somebody who is not root, and root has chosen
    that group.
    """
    try:
        while True:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                mode = stat.S_IMODE(status.st_mode)
                roots = handed and status.st_uid == 0 != os.geteuid()
                if mode & (0o037 if roots else 0o077):
                    raise ConfigurationError(
                        f"{path} has mode {mode:04o}: others can read this secret; chmod 600 it, and replace it if "
                        "it was exposed"
                    )
                content = file.read()
                if os.path.samestat(status, path.stat()):
                    return content
                # It was replaced meanwhile, and what was read may have been overwritten under our eyes.
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ConfigurationError(
                f"{path} is a link to {path.readlink()}, which is missing: bring back what it leads to, or remove "
                "the link"
            ) from error
        raise ConfigurationError(f"{path} is missing") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def make_private_folder(folder: Path, *, below: Path | None = None) -> None:
    """Create `folder` with mode 0700; an existing one with looser permissions is refused with ConfigurationError.

    With `below`, a folder above it, all from there on have to be private, and that one to be there: it is a mount, or
    another's to make.
    """
    if below is not None and below in folder.parents:
        make_private_folder(folder.parent, below=below)
    try:
        if folder != below:
            folder.mkdir(mode=PRIVATE_FOLDER_MODE, parents=below is None, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise StorageError(f"{folder} cannot be created: {error.strerror or error}") from error
    if mode & 0o077:
        raise ConfigurationError(f"{folder} has mode {mode:04o}: it will hold private keys; chmod 700 it")
