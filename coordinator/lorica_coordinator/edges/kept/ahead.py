"""One that stands by has the leader's files ahead: to take over is then no download.

It looks at the bucket again and again, brings what its folder lacks or has otherwise, and deletes what it brought once
the bucket has that no more. It puts nothing, and deletes nothing in the bucket. The leader goes on meanwhile, so what
is missing may have been retired between two looks. What is wrong there is told once and tried again: who takes over is
refused by it.
"""

import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.kept_file import AFTER_ALL_TERMS
from lorica_coordinator.edges.kept.kept_in_bucket import WORK, KeptInBucket, Leader, Seen
from lorica_coordinator.edges.kept.settled import HasKey, is_of_use, turn_of
from lorica_security.errors import LoricaError

_log = structlog.get_logger(__name__)

LOOK_S: Final = 5.0
"""Between two looks at the bucket."""


class Ahead:
    """Into the state folder `root`, whose lock this process holds; by one thread."""

    def __init__(
        self, root: Path, bucket: Bucket, federation: str, identity: Ed25519PrivateKey, has_key: HasKey
    ) -> None:
        """`has_key` as for `settle`."""
        self._root, self._has_key = root, has_key
        nobody = Leader(federation=federation, term=AFTER_ALL_TERMS, identity=identity, prove=_puts_nothing)
        self._kept = KeptInBucket(root, bucket, nobody)
        self._brought: set[str] = set()
        self._torn: set[str] = set()
        self._failed: set[str] = set()
        self._told: set[tuple[str, ...]] = set()
        self.over = threading.Event()

    @property
    def seen(self) -> Mapping[str, Seen]:
        return self._kept.seen

    def end(self) -> None:
        self.over.set()
        self._kept.close()

    def turn(self) -> None:
        """One look, and what it takes."""
        try:
            self._kept.look()
            paths = sorted(self._kept.paths(), key=turn_of)
            if paths:  # one that is emptied at once is not a leader's doing
                self._let_go(self._brought.difference(paths))
        except (LoricaError, OSError) as error:
            self._tell(error)
            return
        count, failed = 0, set[str]()
        for path in paths:
            if self.over.is_set():
                break
            try:
                if is_of_use(path, self._root, self._has_key) and self._kept.bring(path):
                    self._brought.add(path)
                    count += 1
            except (LoricaError, OSError) as error:
                failed.add(path)
                if path in self._failed:  # in one look alone it may have been retired meanwhile
                    self._tell(error, path)
        self._failed = failed
        torn = self._kept.torn.intersection(paths)
        for path in sorted(torn & self._torn):
            self._say(
                "the bucket lacks blocks of a file that this folder has: who takes over puts it again", path, file=path
            )
        self._torn = torn  # in one look alone it may have been under way
        if count:
            _log.info("brought ahead of a take-over", files=count)

    def run(self) -> None:
        """Until `end`."""
        shutil.rmtree(self._root / WORK, ignore_errors=True)  # of a process that was killed in a file
        while not self.over.is_set():
            try:
                self.turn()
            except (CancelledError, RuntimeError):  # its workers were stopped
                if not self.over.is_set():
                    raise
            self.over.wait(LOOK_S)

    def _let_go(self, paths: set[str]) -> None:
        for path in sorted(paths):
            file = self._root / path
            file.unlink(missing_ok=True)
            self._brought.discard(path)
            self._kept.seen.pop(path, None)
            with suppress(OSError):  # it has other files
                file.parent.rmdir()

    def _tell(self, error: Exception, path: str = "") -> None:
        said = "what the bucket has cannot be brought ahead, it is tried again"
        self._say(said, path, type(error).__name__, error=str(error))

    def _say(self, said: str, *once_for: str, **of_what: str) -> None:
        if (said, *once_for) not in self._told:
            self._told.add((said, *once_for))
            _log.warning(said, **of_what)


@contextmanager
def running(ahead: Ahead) -> Iterator[None]:
    """At work for the length of the block."""
    thread = threading.Thread(target=ahead.run, name="brings ahead")
    thread.start()
    try:
        yield
    finally:
        ahead.end()
        thread.join()


def _puts_nothing() -> None:
    raise AssertionError("one that stands by puts and deletes nothing")
