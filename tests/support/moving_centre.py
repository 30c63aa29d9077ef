"""What masked sums tell of one silo where each silo cuts its delta around the mean of the round before.

No agent does that: silo_wire/plans/robust.py refuses such a plan, and ADR 26 says why. Here honest silos do it, with
real machines and masks, and a coordinator that works with one silo reads a delta out of the sums. It knows the sums,
the centres, which are means that it published, and what its own silo sent.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lorica_security.secure_aggregation.groups.release_groups import Partition, Promise, first_link
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, Ranges
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import party as silo_party
from tests.support.secagg_federation import (
    FEDERATION,
    MODEL,
    Federation,
    Silo,
    attempt,
    encoded,
    opening,
    party,
    silo_names,
    terms,
)

Vector = NDArray[np.float64]
BOUND = 64.0
"""Of a coordinate of a delta: what the colluder's centres need."""
ROUNDING = 1e-4
"""Below this a reaction is rounding, in lengths of deltas of about 1."""
NEAR = 1e-3
"""Pushes that differ by less of their length are not told apart."""


def cut(delta: Vector, centre: Vector, radius: float) -> Vector:
    """What a silo would put in: its delta as far as it is within `radius` of `centre`."""
    apart = delta - centre
    return np.asarray(centre + apart * min(1.0, radius / max(float(np.linalg.norm(apart)), 1e-300)))


def sum_around(centre: Vector, radius: float, deltas: Sequence[Vector]) -> Vector:
    return np.asarray(np.sum([cut(delta, centre, radius) for delta in deltas], axis=0))


Cut = Callable[[Vector, Vector], Vector]
"""From a delta and the centre to what a silo puts in."""


@dataclass
class PlainRounds:
    """Rounds of the same deltas of honest silos, and of one silo that sends what it likes. `centre` is the mean of the
    round before, zero at first."""

    honest: list[Vector]
    cut: Cut
    centre: Vector = field(init=False)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.centre = np.zeros_like(self.honest[0])

    def round(self, colluder: Vector) -> Vector:
        """The sum over honest silos, as the coordinator finds it."""
        self.rounds += 1
        total = self.summed([*(self.cut(delta, self.centre) for delta in self.honest), colluder])
        self.centre = total / (len(self.honest) + 1)
        return np.asarray(total - colluder)

    def summed(self, parts: list[Vector]) -> Vector:
        return np.asarray(np.sum(parts, axis=0))


@dataclass
class _Silo(Silo):
    part: Vector = field(default_factory=lambda: np.zeros(0))

    def mask(self, effect: silo_effects.MaskVector) -> bytes:
        self.encoded = encoded(effect.fixed_point, effect.rounding, self.part.astype("<f4"), 1.0)
        self.masked = self.encoded.copy()
        effect.masks.apply(self.masked, 0, mask_stream.Workspace())
        effect.erase()
        return blake3(self.masked.tobytes()).digest()


class _Federation(Federation):
    """One attempt over vectors of any length."""

    def begin(self, *, model: bytes = MODEL) -> None:
        super().begin(model=model)

    def tell_silo(self, name: Any, event: Any) -> None:
        if isinstance(event, silo_events.OpenAttempt):
            event = opening(name, self.attempt, sizes=self.terms.ranges.sizes)
        super().tell_silo(name, event)


class MaskedRounds(PlainRounds):
    """The same by real machines, under one release group of all silos that holds against one colluder."""

    def summed(self, parts: list[Vector]) -> Vector:
        names = silo_names(len(parts))
        link = first_link(FEDERATION, Partition.of([names]), Promise(colluders=1, smallest_group=3))
        more = {"link": link, "approved": frozenset(link.atoms), "demands": silo_party.Demands(colluders=1)}
        ranges = Ranges.of(sizes=(len(parts[0]),), largest_delta=(BOUND,), largest_weight=1.0)
        federation = _Federation(
            len(parts),
            of=attempt(round=self.rounds),
            terms_=terms(ranges=ranges, link=link, colluders=1),
            silos={name: _Silo(party(name, names, **more), part=part) for name, part in zip(names, parts, strict=True)},
        ).run()
        words = federation.sum()[:-EXTRA_WORDS]
        assert federation.unmask is not None
        return words.view("<i4") * (BOUND / federation.unmask.fixed_point.levels)


@dataclass(frozen=True)
class Found:
    delta: Vector
    rounds: int


def one_delta(
    world: PlainRounds, radius: float, directions: Iterable[Vector], *, most_rounds: int = 200
) -> Found | None:
    """What a coordinator makes of its sums, whose silo pushes the centre along `directions`; None: nothing.

    A first round around zero, with a radius that honest deltas keep within, cuts nobody: it shows their plain sum. The
    centre is then pushed until the sum is another one. As long as one silo alone is cut, what is missing from the sum
    has the direction of that silo's delta from the centre, and the length by which it is beyond the radius: so the
    delta is known. Two centres that give the same delta show that it was one silo alone. Where two silos are cut at
    almost the same push, another direction tells them apart.
    """
    honest, silos = world.round(np.zeros_like(world.centre)), len(world.honest) + 1
    for direction in directions:
        nobody, somebody, pushed = 0.0, math.inf, radius
        before: Vector | None = None
        while somebody - nobody > NEAR * nobody:
            if world.rounds >= most_rounds:
                return None
            world.round(silos * pushed * direction - honest)  # so that the next centre is about there
            centre = world.centre
            missing = world.round(np.zeros_like(direction)) - honest
            beyond = float(np.linalg.norm(missing))
            if beyond < ROUNDING:
                nobody = pushed
            else:
                somebody = pushed
                seen = centre - (radius + beyond) * missing / beyond
                if before is not None and np.linalg.norm(seen - before) < 10 * ROUNDING * (1 + np.linalg.norm(seen)):
                    return Found(seen, world.rounds)
                before = seen
            pushed = 2 * pushed if math.isinf(somebody) else (nobody + somebody) / 2
    return None


def all_deltas(
    sums: list[Vector], centres: list[Vector], radius: float, silos: int, generator: np.random.Generator
) -> Vector | None:
    """The deltas of so many silos, a row each, whose sums around `centres` are `sums`, by least squares (Levenberg and
    Marquardt) from where chance says; None: not found."""
    elements = len(sums[0])

    def residual(rows: Vector) -> Vector:
        return np.concatenate(
            [sum_around(centre, radius, list(rows)) - total for centre, total in zip(centres, sums, strict=True)]
        )

    def slope(delta: Vector, centre: Vector) -> Vector:
        apart = delta - centre
        length = float(np.linalg.norm(apart))
        whole = np.eye(elements)
        return whole if length <= radius else radius / length * (whole - np.outer(apart, apart) / length**2)

    for _ in range(20):
        rows, damping = generator.normal(size=(silos, elements)), 1e-2
        left = residual(rows)
        for _ in range(80):
            slopes = np.block([[slope(delta, centre) for delta in rows] for centre in centres])
            normal = slopes.T @ slopes + damping * np.eye(silos * elements)
            tried = rows + np.linalg.solve(normal, -slopes.T @ left).reshape(rows.shape)
            if np.linalg.norm(residual(tried)) < np.linalg.norm(left):
                rows, left, damping = tried, residual(tried), max(damping / 5, 1e-12)
            else:
                damping *= 4
        if np.linalg.norm(left) < 1e-8:
            return np.asarray(rows)
    return None
