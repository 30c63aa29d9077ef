"""Files that are put into the bucket beside those of the rounds: one that a round keeps meanwhile is the round's to
put, and no block of another one goes on its way while a round's do."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

R = TypeVar("R")


class LeftOut(Exception):
    """The file is not to be put aside any more."""


class Aside:
    """May be used from several threads. `for_each` and `ending` raise LeftOut."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._at_work = 0
        self._over = False
        self._changed = threading.Condition()
        self._ending = threading.Lock()

    def add(self, paths: Iterable[str]) -> None:
        with self._changed:
            self._paths.update(paths)

    def leave_out(self, paths: Collection[str]) -> None:
        """They are kept otherwise, or needed no more."""
        with self._changed:
            self._paths.difference_update(paths)
            self._changed.notify_all()

    def let_go(self, is_below: Callable[[str], bool]) -> None:
        """Those that are needed no more; none of them is ended with from then on."""
        with self._ending, self._changed:
            self._paths = {path for path in self._paths if not is_below(path)}
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @contextmanager
    def gives_way(self, paths: Collection[str]) -> Iterator[None]:
        """To a round, which keeps `paths` in the block."""
        with self._ending:  # what it ends with does not come after what is put in the block
            self.leave_out(paths)
        with self._changed:
            self._at_work += 1
        try:
            yield
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def for_each(self, path: str, numbers: Iterable[int], work: Callable[[int], R]) -> list[R]:
        """What `work` says of each block of `path`, one by one, each when no round is at work."""
        return [self._in_turn(path, number, work) for number in numbers]

    def _in_turn(self, path: str, number: int, work: Callable[[int], R]) -> R:
        with self._changed:
            self._changed.wait_for(lambda: self._at_work == 0 or self._is_left_out(path))
            self._require(path)
        return work(number)

    @contextmanager
    def ending(self, path: str) -> Iterator[None]:
        """`path` is whole with what is put in the block; nobody keeps it meanwhile."""
        with self._ending:
            with self._changed:
                self._require(path)
            yield
        self.leave_out([path])

    def _require(self, path: str) -> None:
        if self._is_left_out(path):
            raise LeftOut

    def _is_left_out(self, path: str) -> bool:
        return self._over or path not in self._paths
