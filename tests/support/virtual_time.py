"""An event loop whose time passes only while everything waits: hours in a moment, and the same ones each time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """What would be done in a thread is done at once, in this one. What waits for ever raises."""

    def __init__(self) -> None:
        self._passed = 0.0
        super().__init__(_Hurrying(self._pass))

    def time(self) -> float:
        return self._passed

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # as a thread hands it on
            done.set_exception(error)
        return done

    def _pass(self, seconds: float) -> None:
        self._passed += seconds


class _Hurrying(selectors.DefaultSelector):  # select() itself takes no descriptor from 1,024 on
    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and for nothing that time brings")
            self._passes(timeout)
        return ready


def in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
