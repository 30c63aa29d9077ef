"""Working ahead: the order stays, errors come out where the items are wanted, and no thread is left."""

import threading
from collections.abc import Generator

import pytest
import torch

from lorica_coordinator.vectors.slab_buffers import Closed, SlabBuffer, SlabBuffers, ahead

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")),
]


def left() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slabs"]


def numbers(count: int) -> Generator[int, None, None]:
    yield from range(count)


def test_items_come_in_order_from_a_thread_of_their_own() -> None:
    def where() -> Generator[int, None, None]:
        while True:
            yield threading.get_ident()

    pool = SlabBuffers(0, 1, torch.device("cpu"))
    assert list(ahead(numbers(1000), pool.close)) == list(range(1000))
    assert (
        next(ahead((ident for ident, _ in zip(where(), range(3), strict=False)), pool.close)) != threading.get_ident()
    )
    assert left() == []


def test_an_error_comes_after_the_items_before_it() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise KeyError("here")

    items = ahead(failing(), lambda: None)
    assert next(items) == 1
    with pytest.raises(KeyError, match="here"):
        next(items)
    assert left() == []


def test_who_stops_early_ends_a_thread_that_waits_for_a_buffer() -> None:
    pool = SlabBuffers(2, 4, torch.device("cpu"))

    def taking() -> Generator[SlabBuffer, None, None]:
        while True:
            yield pool.take()

    items = ahead(taking(), pool.close)
    next(items)
    items.close()
    assert left() == []
    with pytest.raises(Closed):
        pool.take()


def test_stages_in_a_row_pass_on_what_a_few_buffers_hold() -> None:
    pool = SlabBuffers(3, 4, torch.device("cpu"))

    def made() -> Generator[SlabBuffer, None, None]:
        for number in range(500):
            buffer = pool.take()
            buffer.values(1, torch.float32).fill_(number)
            yield buffer

    def doubled() -> Generator[SlabBuffer, None, None]:
        for buffer in ahead(made(), pool.close):
            buffer.values(1, torch.float32).mul_(2)
            yield buffer

    seen = []
    for buffer in ahead(doubled(), pool.close):
        seen.append(float(buffer.values(1, torch.float32)))
        pool.give(buffer)
    assert seen == [2.0 * number for number in range(500)]
    assert left() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_a_buffer_goes_to_the_device_and_comes_back(device: str, dtype: torch.dtype) -> None:
    buffer = SlabBuffer(1 << 16, torch.device(device))
    elements = 1000
    given = torch.arange(elements, dtype=torch.float32).to(dtype)
    content = buffer.content(elements, dtype)
    assert len(content) == elements * dtype.itemsize
    content[:] = given.view(torch.uint8).numpy().data
    buffer.send()
    values = buffer.values(elements, dtype)
    assert values.device.type == device
    values.add_(1)
    buffer.mark()
    buffer.fetch()
    assert bytes(buffer.content(elements, dtype)) == (given + 1).view(torch.uint8).numpy().tobytes()
    buffer.settle()
