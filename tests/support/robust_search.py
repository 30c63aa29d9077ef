"""A search for what hostile silos can send to bring a rule of aggregation beyond what it promises.

It knows the honest deltas and the rule, as the worst attacker does. It begins from attacks that the literature has, and
from there goes on by chance steps of every size, in one silo's delta, in all of them or in one for all (collusion), and
keeps what brings the result further.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from lorica_coordinator.aggregation import krum
from lorica_coordinator.aggregation.centred_clipping import centred_mean, parts
from lorica_coordinator.aggregation.geometric_median import median_shares
from lorica_coordinator.aggregation.neighbour_mixing import mixed, nearest
from lorica_coordinator.aggregation.squared_distances import between, inner_products, to_centre
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.trimmed_mean import trimmed_mean
from lorica_coordinator.aggregation.weighting import SiloSummary, weigh
from lorica_security.identifiers import SiloName
from silo_wire.plans.robust import krum_reach, median_reach, median_trims, mixing_reach
from silo_wire.weightings.equal import EQUAL

Rows = NDArray[np.float32]
Exact = NDArray[np.float64]
Excess = Callable[[Rows, Rows], float]
"""How much of what a rule promises is used up, of honest and hostile deltas: above 1 it is broken."""
MOST = 3e38  # that a float32 can hold, nearly


def names(count: int) -> list[SiloName]:
    return [SiloName(f"silo-{index:02}") for index in range(count)]


# --- the rules, and what they promise


def mean_of(rows: Rows) -> Exact:
    return rows.astype(np.float64).mean(axis=0)


def trimmed_of(rows: Rows, trimmed: int) -> Exact:
    made = trimmed_mean(torch.from_numpy(rows.copy()), trimmed, torch.empty(rows.shape[1]))
    return made.double().numpy()


def beyond_honest_values(rule: Callable[[Rows, int], Exact], honest: Rows, hostile: Rows, trimmed: int) -> float:
    """The trimmed mean's promise: the largest distance of a parameter from the middle of what it may be, over the
    largest that this may be."""
    rows, count = np.concatenate([honest, hostile]), len(hostile)
    values = np.sort(honest.astype(np.float64), axis=0)
    least = values[trimmed - count : len(rows) - trimmed - count].mean(axis=0)
    most = values[trimmed : len(rows) - trimmed].mean(axis=0)
    return float((np.abs(rule(rows, trimmed) - (least + most) / 2) / ((most - least) / 2)).max())


def beyond_neighbours(honest: Rows, hostile: Rows) -> float:
    """Multi-Krum's promise: how far what it keeps of hostile deltas brings the mean from one of honest deltas."""
    rows, count = np.concatenate([honest, hostile]), len(hostile)
    kept = krum.kept(between(names(len(rows)), [rows]), count)
    exact = honest.astype(np.float64)
    moved = [np.linalg.norm(exact - rows[index], axis=1).min() for index in kept if index >= len(honest)]
    apart = sqrt(between(names(len(honest)), [honest]).max())
    return float(sum(moved) / len(kept) / (krum_reach(count, len(rows)) * apart))


def beyond_the_spread(honest: Rows, hostile: Rows) -> float:
    """The promise of nearest-neighbour mixing: how far its result is from the mean of honest deltas."""
    rows, count = np.concatenate([honest, hostile]), len(hostile)
    with_which = nearest(between(names(len(rows)), [rows]), count)
    made = trimmed_of(mixed(torch.from_numpy(rows), with_which, torch.empty(rows.shape)).numpy(), count)
    exact = honest.astype(np.float64)
    spread = sqrt(float((np.linalg.norm(exact - exact.mean(axis=0), axis=1) ** 2).mean()))
    return float(np.linalg.norm(made - exact.mean(axis=0)) / (mixing_reach(count, len(rows)) * spread))


def beyond_the_farthest(honest: Rows, hostile: Rows) -> float:
    """The geometric median's promise, from the mean of honest deltas."""
    rows = np.concatenate([honest, hostile])
    made = np.array(median_shares(inner_products(names(len(rows)), [rows]))) @ rows.astype(np.float64)
    exact = honest.astype(np.float64)
    middle = exact.mean(axis=0)
    farthest = np.linalg.norm(exact - middle, axis=1).max()
    return float(np.linalg.norm(made - middle) / (median_reach(len(hostile), len(rows)) * farthest))


@dataclass(frozen=True)
class Centred:
    """Centred clipping's promise: how far hostile deltas bring the mean from where the others take it."""

    centre: Rows
    radius: float

    def __call__(self, honest: Rows, hostile: Rows) -> float:
        rows = np.concatenate([honest, hostile])
        without = self.centre + self._clipped(honest).sum(axis=0) / len(rows)
        return float(np.linalg.norm(self.of(rows) - without) / (self.radius * len(hostile) / len(rows)))

    def of(self, rows: Rows) -> Exact:
        silos = names(len(rows))
        told = [
            SiloSummary(silo=silo, examples=1, loss_reduction=0.0, optimizer_steps=1, delta_norm=1.0) for silo in silos
        ]
        cohort = weigh(told, weighting=EQUAL)
        counted = parts(to_centre(silos, [(rows, self.centre)]).tolist(), self.radius)
        named = zip(silos, torch.from_numpy(rows).unbind(0), strict=True)
        scratch = Scratch.of(rows.shape[1], torch.device("cpu"))
        return centred_mean(named, torch.from_numpy(self.centre), cohort, counted, scratch).double().numpy()

    def _clipped(self, rows: Rows) -> Exact:
        apart = rows.astype(np.float64) - self.centre
        return apart * np.minimum(1.0, self.radius / np.linalg.norm(apart, axis=1))[:, None]


PROMISES: dict[str, Excess] = {
    "trimmed_mean": lambda honest, hostile: beyond_honest_values(trimmed_of, honest, hostile, len(hostile)),
    "median": lambda honest, hostile: beyond_honest_values(
        trimmed_of, honest, hostile, median_trims(len(honest) + len(hostile))
    ),
    "multi_krum": beyond_neighbours,
    "centred_clipping": Centred(np.array([0.5, 0.5, 0.0, 0.0], dtype=np.float32), 1.5),
    "nearest_neighbour_mixing": beyond_the_spread,
    "geometric_median": beyond_the_farthest,
}
WITHOUT_RULE: Excess = lambda honest, hostile: beyond_honest_values(  # noqa: E731
    lambda rows, trimmed: mean_of(rows), honest, hostile, len(hostile)
)
"""The same search against the plain mean, which promises nothing."""


# --- the search


def known_attacks(honest: Rows, count: int) -> Iterator[Rows]:
    """What the literature has: scaling and sign flips, inner product, a little is enough, mimicry, and one point far
    off."""
    mean, spread = honest.mean(axis=0), honest.std(axis=0)
    for factor in (-1e30, -10.0, -1.0, -0.1, 2.0, 10.0, 1e30):
        yield np.repeat((factor * mean)[None], count, axis=0)
    for z in (0.3, 1.0, 1.5, 3.0):
        yield np.repeat((mean - z * spread)[None], count, axis=0)
    yield np.repeat(honest[:1], count, axis=0)
    farthest = honest[np.linalg.norm(honest - mean, axis=1).argmax()]
    yield np.repeat((mean + 1.2 * (farthest - mean))[None], count, axis=0)
    yield np.full((count, honest.shape[1]), MOST, dtype=np.float32)


def worst_found(excess: Excess, honest: Rows, count: int, *, steps: int, seed: int) -> float:
    """The most that the search uses up of what a rule promises, with `count` hostile silos."""
    generator = torch.Generator().manual_seed(seed)
    began = sorted(((excess(honest, it), index, it) for index, it in enumerate(known_attacks(honest, count))))
    worst, _, hostile = began[-1]
    for attack in (hostile, began[-2][2], began[len(began) // 2][2]):
        best, kept = excess(honest, attack), attack
        for _ in range(steps):
            tried = _changed(kept, honest, generator)
            found = excess(honest, tried)
            if found >= best:
                best, kept = found, tried
        worst = max(worst, best)
    return worst


def _changed(hostile: Rows, honest: Rows, generator: torch.Generator) -> Rows:
    """A step by chance, of any size between a thousandth and a thousand times how far honest deltas lie apart."""
    size = 10.0 ** (6.0 * float(torch.rand(1, generator=generator)) - 3.0) * float(honest.std())
    step = torch.randn(hostile.shape, generator=generator).numpy() * size
    match int(torch.randint(4, (1,), generator=generator)):
        case 0:  # one silo
            chosen = torch.randint(len(hostile), (1,), generator=generator).item()
            step[[index for index in range(len(hostile)) if index != chosen]] = 0.0
        case 1:  # one for all
            step[:] = step[0]
        case 2:  # one parameter
            chosen = torch.randint(hostile.shape[1], (1,), generator=generator).item()
            step[:, [index for index in range(hostile.shape[1]) if index != chosen]] = 0.0
    with np.errstate(over="ignore"):
        return np.clip(hostile.astype(np.float64) + step, -MOST, MOST).astype(np.float32)
