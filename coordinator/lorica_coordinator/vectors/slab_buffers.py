"""Memory for slabs on their way from files to the device that computes and back, and threads that work ahead of each
other.

The same few buffers serve a whole aggregation, so memory depends neither on the model's size nor on the number of
silos. On the CPU a buffer is one piece of memory. With a GPU it is two: pinned memory for the files, and memory of the
GPU; each copy between them goes through the buffer's own stream, so that it overlaps with the arithmetic on the other
buffers.
"""

import queue
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class SlabBuffer:
    """`host` holds bytes for files, `device` those that are computed with: the same tensor where the device is the
    CPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.device = torch.empty(size, dtype=torch.uint8, device=device) if on_gpu else self.host
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._used = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def content(self, elements: int, dtype: torch.dtype) -> memoryview:
        """The first `elements` of `host`, as bytes."""
        return self.host[: elements * dtype.itemsize].numpy().data

    def values(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The first `elements` of `device`."""
        return self.device[: elements * dtype.itemsize].view(dtype)

    def send(self) -> None:
        """Copy `host` to `device`; done when this returns."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self.device.copy_(self.host, non_blocking=True)
            self._stream.synchronize()

    def mark(self) -> None:
        """What this thread has asked the GPU to do until now comes before `fetch` and before the buffer's next use."""
        if self._used is not None:
            self._used.record()

    def fetch(self) -> None:
        """Copy `device` to `host`; done when this returns."""
        if self._stream is not None and self._used is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._used)
                self.host.copy_(self.device, non_blocking=True)
            self._stream.synchronize()

    def settle(self) -> None:
        """Wait for what was asked before the last `mark`."""
        if self._used is not None:
            self._used.synchronize()


class Closed(Exception):
    """There is nothing to work for any more."""


class SlabBuffers:
    """`count` buffers of `size` bytes. Any thread may give back; one takes."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self._free: queue.SimpleQueue[SlabBuffer | None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(SlabBuffer(size, device))

    def take(self) -> SlabBuffer:
        """A buffer that nobody uses, as soon as there is one; raises Closed when the pool is closed."""
        buffer = self._free.get()
        if buffer is None:
            self._free.put(None)
            raise Closed
        buffer.settle()
        return buffer

    def give(self, *buffers: SlabBuffer) -> None:
        for buffer in buffers:
            self._free.put(buffer)

    def close(self) -> None:
        """Let a thread that waits, or will wait, for a buffer end. May be repeated."""
        self._free.put(None)


def ahead(source: Generator[T, None, None], stop: Callable[[], None]) -> Generator[T, None, None]:
    """The items of `source`, which runs in a thread of its own; what it raises is raised here, after the items before
    it.

    Nothing bounds how far ahead it is but what it waits for itself. `stop` makes it end soon; it is called when nobody
    wants further items.
    """
    made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            with closing(source):
                for item in source:
                    made.put((item,))
        except BaseException as error:  # noqa: BLE001  # raised where the items are wanted
            made.put(error)
        else:
            made.put(None)

    thread = threading.Thread(target=run, name="slabs")
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        stop()
        thread.join()
