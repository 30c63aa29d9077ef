"""The same work for every peer: a known model, a constant in the place of training, and a check of what came out.

Silo i of n adds `step(i, n)` to every value. The steps differ, so that no two silos send the same bytes (flwr stores a
chunk once, by its digest, however many send it); their mean is 1, so that after r rounds of plain FedAvg every value
has grown by r.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Tensor = tuple[str, tuple[int, ...]]

_PERIOD = 1_048_573
"""A prime, so that no two chunks or equal tensors hold the same bytes."""
_SCALE = np.float32(2.0**-20)


def read_layout(file: str | Path) -> list[Tensor]:
    """Names and shapes, as `lorica.bench.peers.layout` wrote them."""
    return [(name, tuple(shape)) for name, shape in json.loads(Path(file).read_text(encoding="utf-8"))]


def initial(layout: Sequence[Tensor]) -> Iterable[tuple[str, Vector]]:
    """Float32 values in [0, 1) that differ from tensor to tensor; exact, and still so after some rounds."""
    start = 0
    for name, shape in layout:
        size = int(np.prod(shape))
        yield name, ((np.arange(start, start + size) % _PERIOD).astype(np.float32) * _SCALE).reshape(shape)
        start += size


def step(silo: int, silos: int) -> np.float32:
    """What silo `silo` (from 0) of `silos` adds to each value in a round: between 0.5 and 1.5, 1 on average."""
    return np.float32(1 + (2 * silo - (silos - 1)) / (2 * silos))


def difference(layout: Sequence[Tensor], tensors: Iterable[Vector], rounds: int) -> str:
    """Why these are not the initial values plus `rounds`; empty when they are."""
    compared = 0
    for (name, start), now in zip(initial(layout), tensors, strict=True):
        if now.shape != start.shape or now.dtype != start.dtype:
            return f"{name} is {now.dtype} {now.shape}, not {start.dtype} {start.shape}"
        worst = float(np.max(np.abs(now - start - np.float32(rounds))))
        if not worst <= 2.0**-12:
            return f"{name} is off by up to {worst} after {rounds} rounds"
        compared += 1
    return "" if compared == len(layout) else f"{compared} of {len(layout)} tensors came out"


def relative_error(layout: Sequence[Tensor], tensors: Iterable[Vector], rounds: int) -> float:
    """L2 norm of what these are off by, beside that of the growth by `rounds` in every value."""
    off = size = 0.0
    for (_, start), now in zip(initial(layout), tensors, strict=True):
        wrong = now.astype(np.float64) - start - rounds
        off += float(np.square(wrong).sum())
        size += wrong.size * float(rounds) ** 2
    return float(np.sqrt(off / size))


def note(costs: str | Path, name: str, value: float) -> None:
    """One line of a file that is read in the end."""
    with open(costs, "a", encoding="utf-8") as file:
        file.write(f"{name} {value}\n")


def mark(marks: str | Path, *words: object) -> None:
    """One line to whoever measures, with this process's id: it is read as it is written."""
    line = " ".join(str(word).replace("\n", " ") for word in (os.getpid(), *words))
    with open(marks, "w", encoding="utf-8") as pipe:
        pipe.write(f"{line}\n")
