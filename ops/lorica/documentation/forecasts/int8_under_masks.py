"""What a 16-bit ring would leave of a light silo's delta: rounding errors, from the normal distribution alone.

Under masks a silo adds x = weight x delta / largest weight, rounded at random without bias to steps of range / levels,
and all share range and levels. `reach` is the range over the root mean square of a delta's numbers. With n silos a ring
of 2^16 holds (2^15 - 1) / n - 1 levels, one being for the rounding; int8 has 127.
"""

import math
from typing import Final

from lorica.documentation.markdown import markdown_table

RATIO: Final = 30
"""Of the heaviest silo's weight to the others'."""
_SILOS: Final = 8
_REACHES: Final = (4, 16, 1000)
_MANY_STEPS: Final = 20.0


def masked_int8_table() -> str:
    levels = {
        "int8, 127": 127,
        f"16 bits, {ring_levels(16, _SILOS):,}": ring_levels(16, _SILOS),
        f"32 bits, {ring_levels(32, _SILOS):,}": ring_levels(32, _SILOS),
    }
    rows = []
    for name, count in levels.items():
        for reach in _REACHES:
            weights = (RATIO, *([1] * (_SILOS - 1)))
            light, whole = lightest_error(count, reach), sum_error(count, reach, weights)
            rows.append((name, f"{reach:,}", _shown(RATIO * reach / count), _percent(light), _percent(whole)))
    head = ("ring, levels", "range / rms", "a step / rms of the lightest", "error of the lightest", "error of the sum")
    return markdown_table(head, rows)


def ring_levels(bits: int, silos: int) -> int:
    """The most with which no sum of `silos` rounded numbers wraps around."""
    return ((1 << bits - 1) - 1) // silos - 1


def lightest_error(levels: int, reach: float, ratio: float = RATIO) -> float:
    """Root mean square of what rounding adds to the lightest silo's numbers, over that of the numbers."""
    rms = levels / (reach * ratio)
    return math.sqrt(rounding_variance(rms)) / rms


def sum_error(levels: int, reach: float, weights: tuple[float, ...]) -> float:
    """The same of the sum, where silos' deltas have one length and nothing else in common."""
    sizes = [levels / reach * weight / max(weights) for weight in weights]
    return math.sqrt(sum(map(rounding_variance, sizes)) / sum(size * size for size in sizes))


def rounding_variance(rms: float) -> float:
    """Mean of f (1 - f), f being what a normal variable of mean 0 and this root mean square has behind the point."""
    if rms > _MANY_STEPS:
        return 1 / 6
    return 2 * math.fsum(_between(k, rms) for k in range(math.ceil(12 * rms) + 1))


def _between(k: int, rms: float) -> float:
    """The integral of (x - k) (k + 1 - x) over k < x < k + 1."""
    low, high = k / rms, (k + 1) / rms
    mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
    density = [math.exp(-at * at / 2) / math.sqrt(2 * math.pi) for at in (low, high)]
    first = rms * (density[0] - density[1])
    second = rms * rms * (mass + low * density[0] - high * density[1])
    return -second + (2 * k + 1) * first - k * (k + 1) * mass


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{share:.1f} x"
