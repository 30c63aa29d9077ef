"""Files of the state folder, kept in a bucket beside a database that another coordinator may take over.

A leader puts in its own term alone, and deletes by name what a transition of its own retired, of its own term and of
those before: one that was overtaken and goes on neither overwrites nor deletes what a later term has. An index is put
after its blocks and deleted before them, so what an index names is there.
"""

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import structlog
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_coordinator.edges.kept.aside import Aside, LeftOut
from lorica_coordinator.edges.kept.block_cipher import MORE_BYTES, BlockCipher
from lorica_coordinator.edges.kept.bucket import Bucket, Called
from lorica_coordinator.edges.kept.kept_file import (
    BLOCK_BYTES,
    INDEX,
    MOST_INDEX_BYTES,
    KeptFile,
    ObjectName,
    digest_of_block,
    is_encrypted,
    is_kept_kind,
)
from lorica_security.errors import IntegrityError, LoricaError, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from lorica_security.identity import identity_key

R = TypeVar("R")
_ForEach = Callable[[Iterable[int], Callable[[int], Any]], list[Any]]
_log = structlog.get_logger(__name__)

AT_ONCE: Final = 4
"""Blocks on their way, and in memory, whatever the number of files; and one of what is put aside."""
_PIECE_BYTES: Final = 256 << 10
"""Read and digested together: as much as stays in a core's own cache."""
WORK: Final = "bringing"
"""The folder, in the state folder, of what is being brought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Whose files: of the coordinator with this `identity` key, in its `term`."""

    federation: str
    term: int
    identity: Ed25519PrivateKey
    prove: Callable[[], None] = lambda: None
    """Raises where another one leads by now: asked before an index is put, and before anything is deleted."""

    def sign(self, domain: str, statement: bytes) -> bytes:
        return identity_key.sign(self.identity, domain=domain.encode(), payload=statement)


@dataclass(frozen=True, slots=True)
class Listed:
    """The latest term that has files in a bucket, 0 where none has, and the paths of those that have an index. Who can
    write there chooses both."""

    term: int = 0
    paths: frozenset[str] = frozenset()

    @classmethod
    def of(cls, bucket: Bucket) -> Self:
        """Raises StorageError."""
        found = [one for one in map(ObjectName.parse, bucket.names()) if one is not None]
        paths = frozenset(one.path for one in found if one.part == INDEX)
        return cls(max((one.term for one in found), default=0), paths)


@dataclass(frozen=True, slots=True)
class Seen:
    """A file of the folder that was what an index with this digest says, as long as its mark is the same."""

    index: str
    mark: FileMark


class _Memory(threading.local):
    """Of a worker: a block as it is, and as it is sent. Fresh memory for each would cost more than to encrypt it."""

    def __init__(self) -> None:
        self.plain = memoryview(bytearray(BLOCK_BYTES))
        self.sealed = memoryview(bytearray(BLOCK_BYTES + MORE_BYTES))


class KeptInBucket:
    """Implements `KeptFiles` for the state folder `root`. `look` at the bucket first."""

    def __init__(
        self,
        root: Path,
        bucket: Bucket,
        leader: Leader,
        *,
        seen: Mapping[str, Seen] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """`seen` by this process, by path below `root`: not digested again."""
        self._root = root
        self.seen = dict(seen or {})
        self._block_bytes = block_bytes
        self._bucket = bucket
        self._leader = leader
        self._cipher = BlockCipher.of(leader.identity, leader.federation)
        self._objects: dict[str, set[ObjectName]] = {}  # by path
        self._marks: dict[str, FileMark] = {}
        self.torn: set[str] = set()
        """Paths of files that are whole in the folder, and were not in the bucket when they were brought: `keep` puts
        them again."""
        self._unneeded: set[ObjectName] = set()
        self._lock = threading.Lock()  # over what is known
        self._aside = Aside()
        self._deleting = threading.Lock()
        self._workers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bucket")
        self._memory = _Memory()

    @property
    def name(self) -> str:
        return self._bucket.name

    def tell(self, called: Called) -> None:
        """`called` hears of each call of the bucket from here on."""
        self._bucket.called = called

    def close(self) -> None:
        self._aside.close()
        self._workers.shutdown(cancel_futures=True)

    def look(self) -> None:
        """List what is kept. Raises StorageError where a later term than this leader's has been there."""
        found: dict[str, set[ObjectName]] = {}
        for name in self._bucket.names():
            one = ObjectName.parse(name)
            if one is None:
                continue
            if one.term >= self._leader.term:
                raise StorageError(
                    f"{self.name} has files of term {one.term}, and this coordinator leads in term "
                    f"{self._leader.term}: the database was brought back from an earlier instant, or another "
                    "coordinator has this prefix; bring the bucket back of the same instant, or name a new prefix in "
                    "[storage] blobs where the state folder has every file"
                )
            found.setdefault(one.path, set()).add(one)
        with self._lock:
            self._objects = found

    # --- KeptFiles

    def keep(self, *paths: Path) -> None:
        with self._aside.gives_way([self._relative(path) for path in paths]):
            for path in paths:
                self._keep(path, self._for_each)

    def forget(self, *paths: Path) -> None:
        roots = tuple(map(self._relative, paths))
        self._aside.let_go(lambda path: any(_is_below(path, root) for root in roots))
        with self._lock:
            for path in paths:
                for kept in self._below(path):
                    self._unneeded |= self._objects.pop(kept)
                    self._marks.pop(kept, None)
        self._delete_unneeded()

    def keep_aside(self, paths: Sequence[str]) -> None:
        """Keep files that no round waits for, by their paths below the state folder; until `close`. One that is kept
        or let go meanwhile is left out, and one that cannot be kept is told of in the log."""
        self._aside.add(paths)
        for path in paths:
            file = self._root / path
            if not file.exists():
                continue
            try:
                self._keep(file, partial(self._aside.for_each, path), self._aside.ending(path))
            except LeftOut:
                pass
            except LoricaError as error:
                _log.warning("what the bucket lacks cannot be put", file=path, error=str(error))
            try:
                if not file.exists():  # blocks that were on their way
                    self.forget(file)
            except LoricaError as error:
                _log.warning("what was let go cannot be deleted in the bucket", file=path, error=str(error))

    def below(self, folder: Path) -> frozenset[Path]:
        with self._lock:
            return frozenset(self._root / path for path in self._below(folder) if self._newest(path) is not None)

    # --- from the bucket

    def paths(self) -> tuple[str, ...]:
        """Of the files that are kept, below the state folder; a model's parameters come last."""
        with self._lock:
            kept = [path for path in self._objects if self._newest(path) is not None]
        return tuple(sorted(kept, key=lambda path: (path.endswith(".safetensors"), path)))

    def bring(self, path: str) -> bool:
        """Have the file at `path` in the folder as it is kept; whether that took more than a look at it.

        Raises IntegrityError for a block or index that is missing, cut or another one, StorageError.
        """
        with self._lock:
            newest = self._newest(path)
        assert newest is not None
        raw = self._bucket.get(str(newest), MOST_INDEX_BYTES)
        where = f"{self.name}{newest}"
        if raw is None:
            raise IntegrityError(f"{where} is gone: somebody deletes there; restore it from the bucket's versions")
        leader = self._leader
        kept = KeptFile.parse(
            raw, leader.identity.public_key(), federation=leader.federation, path=path, term=newest.term, where=where
        )
        target, index = self._root / path, digest_of_block(raw)
        is_torn = self._is_torn(kept)
        mark = self._same(target, kept, self.seen.get(path), index)
        brought = mark is None
        if mark is None:
            mark = self._fetch(kept, target)
        with self._lock:
            self.seen[path] = Seen(index, mark)
            if is_torn and not brought:
                self._marks.pop(path, None)
                self.torn.add(path)
            else:
                self._marks[path] = mark
                self.torn.discard(path)
        return brought

    def _is_torn(self, kept: KeptFile) -> bool:
        """Whether a block that its index names was not there at the last look."""
        with self._lock:
            there = {str(one) for one in self._objects.get(kept.path, ())}
        return any(kept.block(number) not in there for number in range(len(kept.blocks)))

    def _fetch(self, kept: KeptFile, target: Path) -> FileMark:
        work = self._root / WORK / secrets.token_hex(8)
        try:
            work.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, kept.size)
                self._for_each(range(len(kept.blocks)), lambda number: self._fetch_block(kept, number, descriptor))
                os.fsync(descriptor)
                mark = FileMark.of(descriptor)
            finally:
                os.close(descriptor)
            target.parent.mkdir(parents=True, exist_ok=True)
            work.rename(target)
            files.sync_folder(target.parent)
            return mark
        except OSError as error:
            raise StorageError(f"{target} cannot be brought: {error.strerror or error}") from error
        finally:
            work.unlink(missing_ok=True)

    def _fetch_block(self, kept: KeptFile, number: int, descriptor: int) -> None:
        name = kept.block(number)
        encrypted = is_encrypted(kept.path)
        content: bytes | memoryview | None
        content = self._bucket.get(name, kept.size_of(number) + (0 if encrypted else MORE_BYTES))
        if content is None:
            raise IntegrityError(
                f"{self.name}{name} is missing: start the coordinator that led, whose folder has {kept.path} and puts "
                "it again, or copy that file from there; else restore that object from the bucket's versions; where "
                f"both are lost delete what is below {self.name}{kept.index.removesuffix(INDEX)} to go on without that "
                "file"
            )
        if not encrypted:
            content = self._cipher.open(name, content, f"{self.name}{name}")
        kept.check(number, content, f"{self.name}{name}")
        files.write_at(descriptor, content, number * kept.block_bytes)

    def _same(self, target: Path, kept: KeptFile, seen: Seen | None, index: str) -> FileMark | None:
        """The file's mark where it holds what is kept; `index`: the digest of what says so."""
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            mark = FileMark.of(descriptor)
            if seen == Seen(index, mark):
                return mark
            if mark.size != kept.size:
                return None
            found = self._for_each(
                range(len(kept.blocks)),
                lambda number: (
                    self._read(descriptor, number * kept.block_bytes, kept.size_of(number))[1] == kept.blocks[number]
                ),
            )
            return mark if all(found) else None
        except OSError:
            return None  # an unreadable one is brought
        finally:
            os.close(descriptor)

    # --- into the bucket

    def _keep(self, path: Path, for_each: _ForEach, ending: AbstractContextManager[None] | None = None) -> None:
        relative = self._relative(path)
        if not is_kept_kind(relative):
            raise StorageError(f"{path} is none of the files that are kept: it is not put into {self.name}")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            mark = FileMark.of(descriptor)
            with self._lock:
                if self._marks.get(relative) == mark:
                    return
            count = -(-mark.size // self._block_bytes)
            digests = for_each(range(count), lambda number: self._put_block(relative, descriptor, number, mark))
            if FileMark.of(descriptor) != mark:
                raise StorageError(f"{path} was written while it was put into {self.name}: it is put again")
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        finally:
            os.close(descriptor)
        leader = self._leader
        kept = KeptFile(
            federation=leader.federation,
            path=relative,
            term=leader.term,
            size=mark.size,
            block_bytes=self._block_bytes,
            blocks=tuple(digests),
        )
        leader.prove()
        with ending or nullcontext():
            self._put(ObjectName(leader.term, relative, INDEX), kept.to_bytes(leader.sign))
            named = {kept.index, *(kept.block(number) for number in range(count))}
            with self._lock:
                objects = self._objects.setdefault(relative, set())
                objects.add(ObjectName(leader.term, relative, INDEX))
                former = {one for one in objects if one.term == leader.term and str(one) not in named}
                objects -= former
                self._unneeded |= former
                self._marks[relative] = mark
                self.torn.discard(relative)

    def _put_block(self, path: str, descriptor: int, number: int, mark: FileMark) -> str:
        begin = number * self._block_bytes
        content, digest = self._read(descriptor, begin, min(self._block_bytes, mark.size - begin))
        name = ObjectName(self._leader.term, path, f"{number:06}-{digest}")
        with self._lock:
            is_there = name in self._objects.get(path, ())  # of this term, so an earlier try came so far
        if not is_there:
            if not is_encrypted(path):
                content = self._cipher.seal(str(name), content, self._memory.sealed)
            self._put(name, content)
        with self._lock:
            self._objects.setdefault(path, set()).add(name)
        return digest

    def _put(self, name: ObjectName, content: bytes | memoryview) -> None:
        with self._lock:
            is_doomed = name in self._unneeded
        if is_doomed:
            with self._deleting, self._lock:  # not while it is being deleted
                self._unneeded.discard(name)
        try:
            self._bucket.put(str(name), content)
        except BaseException:
            self._memory = _Memory()  # a request that was given up may still be reading from it
            raise

    def _read(self, descriptor: int, begin: int, size: int) -> tuple[memoryview, str]:
        """`size` bytes of an open file from `begin` on, in this worker's memory, and their digest."""
        content, digest = self._memory.plain[:size], blake3()
        done = 0
        while done < size:
            count = os.preadv(descriptor, [content[done : done + _PIECE_BYTES]], begin + done)
            if count == 0:
                raise OSError("it was cut while it was read")
            digest.update(content[done : done + count])
            done += count
        return content, digest.hexdigest()

    def _for_each(self, numbers: Iterable[int], work: Callable[[int], R]) -> list[R]:
        """What `work` says of each, by AT_ONCE workers; the first error ends it, once none is at work any more."""
        tasks: list[Future[R]] = [self._workers.submit(work, number) for number in numbers]
        try:
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                if not task.cancelled():
                    task.exception()

    # --- what is retired

    def _delete_unneeded(self) -> None:
        """An index before its blocks. What cannot be deleted now is tried again with what is retired next."""
        with self._deleting:
            with self._lock:
                gone = sorted(self._unneeded, key=lambda one: (one.part != INDEX, one.path))
            assert all(one.term <= self._leader.term for one in gone)
            if gone:
                self._leader.prove()
            indices = [one for one in gone if one.part == INDEX]
            for some in (indices, gone[len(indices) :]):
                if some:
                    self._bucket.delete(map(str, some))
                    with self._lock:
                        self._unneeded -= set(some)

    def _newest(self, path: str) -> ObjectName | None:
        """Its index of the latest term. Holds the lock."""
        return max(
            (one for one in self._objects.get(path, ()) if one.part == INDEX), key=lambda one: one.term, default=None
        )

    def _below(self, path: Path) -> list[str]:
        """Holds the lock."""
        relative = self._relative(path)
        return [kept for kept in self._objects if _is_below(kept, relative)]

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_below(path: str, root: str) -> bool:
    """Or the same; `root` is "." for all."""
    return root in (".", path) or path.startswith(f"{root}/")
