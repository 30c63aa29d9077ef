"""A leader's first deed: the folder and the bucket come to hold the same, before anything is read or written.

What the bucket has is brought where the folder lacks it or has something else: another leader may have written since
this folder was last used. What the folder has and the bucket lacks is put: before anything else where the bucket is
new, else beside the rounds, since most of it may be of an earlier time, and be deleted soon. Of updates on their way
in, those alone whose key is still there: nobody can read the others.
"""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog

from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.kept_file import is_kept_kind
from lorica_coordinator.edges.kept.kept_in_bucket import WORK, KeptInBucket
from lorica_coordinator.vectors.stored_vector import read_record
from lorica_security.errors import IntegrityError, LoricaError, StorageError

_log = structlog.get_logger(__name__)

_FOLDERS: Final = ("bundles", "models", "spools")
SPOOLS: Final = "spools"
PROBE: Final = "probe"
AT_ONCE: Final = 8
"""Files that are looked at together: most are small, and each costs the server's answer."""
_DELTA: Final = ".delta"


@dataclass(frozen=True, slots=True)
class Settled:
    """How many files were brought, and how many put; those that the bucket still lacks."""

    brought: int
    put: int
    lacking: tuple[str, ...] = ()


HasKey = Callable[[Path, str], bool]
"""Whether the key of this name is there that an update (its path, without suffix) is encrypted with."""


def settle(kept: KeptInBucket, root: Path, has_key: HasKey) -> Settled:
    """`has_key` is of updates on their way in.

    What lacks a block in the bucket alone is put again, in this leader's term. Raises IntegrityError for a block that
    is missing or another one, but for those of updates, which are left out; StorageError.
    """
    kept.look()
    try:
        shutil.rmtree(root / WORK, ignore_errors=True)
        paths = kept.paths()
        brought = 0
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bring") as readers:
            for turn in (0, 1):
                some = [path for path in paths if turn_of(path) == turn and is_of_use(path, root, has_key)]
                brought += sum(readers.map(partial(_bring, kept), some))
        shutil.rmtree(root / WORK, ignore_errors=True)
        in_bucket = set(paths)
        lacking = [path for path in _in_folder(root) if path not in in_bucket and _is_whole(path, root, has_key)]
    except OSError as error:
        raise StorageError(f"{root} cannot be read: {error.strerror or error}") from error
    at_once, later = (sorted(kept.torn), lacking) if paths else (lacking, [])
    kept.keep(*(root / path for path in at_once))
    for path in at_once if paths else ():
        _log.warning("the bucket lacked blocks of a file: it was put again", file=path, bucket=kept.name)
    put = len(at_once)
    _log.info(
        "the state folder and the bucket are settled", bucket=kept.name, brought=brought, put=put, later=len(later)
    )
    return Settled(brought, put, tuple(later))


def _bring(kept: KeptInBucket, path: str) -> bool:
    try:
        return kept.bring(path)
    except IntegrityError as error:
        if not path.startswith(f"{SPOOLS}/"):
            raise
        _log.warning("an update does not open: the round goes on without it", file=path, error=str(error))
        return False


def turn_of(path: str) -> int:
    """Files that others are whole by, or are opened with, come in the second turn."""
    return int(path.endswith((".safetensors", _DELTA)))


def is_of_use(path: str, root: Path, has_key: HasKey) -> bool:
    """Of an update on its way in: whether anybody can read it. Its record is brought before."""
    if not (path.startswith(f"{SPOOLS}/") and path.endswith(_DELTA)):
        return True
    record = _record(root / path)
    return record is not None and has_key((root / path).with_suffix(""), str(record.get("key", "")))


def _is_whole(path: str, root: Path, has_key: HasKey) -> bool:
    """Whether it is to be put: of updates on their way in, those that were committed and can be read."""
    if not path.startswith(f"{SPOOLS}/"):
        return True
    delta = (root / path).with_suffix(_DELTA)
    record = _record(delta)
    return (
        record is not None
        and record.get("norm") is not None
        and is_of_use(delta.relative_to(root).as_posix(), root, has_key)
    )


def _record(delta: Path) -> dict[str, Any] | None:
    try:
        return read_record(delta.with_suffix(".json"))
    except (IntegrityError, StorageError):
        return None


def _in_folder(root: Path) -> Iterator[str]:
    """Files of the kinds that are kept; a model's parameters after what belongs to them."""
    found = (
        path.relative_to(root).as_posix()
        for name in _FOLDERS
        for path in (root / name).rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    yield from sorted(filter(is_kept_kind, found), key=lambda path: (path.endswith(".safetensors"), path))


@contextmanager
def meanwhile(beat: Callable[[], None], every_s: float) -> Iterator[None]:
    """`beat` is called every so often by a thread of its own; what it raised last is raised at the end of the block,
    unless that raises itself. StorageError is tried again."""
    over = threading.Event()
    raised: list[LoricaError] = []

    def run() -> None:
        while not over.wait(every_s):
            try:
                beat()
            except StorageError as error:
                _log.error("whether this coordinator leads cannot be told, it is asked again", error=str(error))
            except LoricaError as error:
                raised.append(error)
                return

    thread = threading.Thread(target=run, name="leads meanwhile")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if raised:
        raise raised[0]


def probe(bucket: Bucket) -> None:
    """Put, get, list and delete one small object: whoever may do that may keep files. Raises StorageError."""
    name = f"{PROBE}/{secrets.token_hex(8)}"
    content = name.encode()
    bucket.put(name, content)
    try:
        found = bucket.get(name, len(content))
        if found is None or bytes(found) != content:
            raise StorageError(
                f"{bucket.name} does not give back what was put into it: see what lies before the server"
            )
        if name not in set(bucket.names(PROBE)):
            raise StorageError(
                f"{bucket.name} does not list what was put into it: use a server whose lists are up to date"
            )
    finally:
        bucket.delete([name])
