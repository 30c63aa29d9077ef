"""How long models and updates take on a silo's line, and which types on the wire would shorten a round; pure
arithmetic.

A silo fetches a model, trains, and sends its update: none of the three overlaps with another. What TLS and gRPC add is
left out, and so are waits for other silos. Silos that share the coordinator's line need as many times its speed there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from pydantic import ValidationError

from lorica.simulation.forecast.traffic import Traffic
from silo_wire.manifest import ITEM_BYTES, ParameterDtype, UpdateDtype
from silo_wire.plans.plan import Plan, PlanBundle

LINES: Final = {"10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
"""Bits a second, the same both ways."""
LEAST_SHARE: Final = 0.1
"""Of a round: less is not worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorter:
    """`[wire] key = dtype` shortens a round by LEAST_SHARE or more on lines slower than `below`, in bits a second;
    None: on every line."""

    key: Literal["model", "update"]
    dtype: UpdateDtype
    below: float | None


def seconds(traffic: Traffic, line: float) -> float:
    """Of `traffic` on a line of so many bits a second."""
    return (traffic.down + traffic.up) * 8 / line


def shorter(bundle: PlanBundle, *, round_s: float, traffic: Traffic) -> tuple[Shorter, ...]:
    """For models and for updates the type of the fewest bytes that goes with the plan, where it has fewer than the
    plan's own; nothing where neither would pay on any line.

    `round_s` is what the slowest silo computes in a round, `traffic` a round's as the plan has it.
    """
    found = []
    for key, dtype, saved in _fewest(bundle):
        # saved / (round + all) is the least share, each in seconds on the line.
        bits = 8 * (saved - LEAST_SHARE * (traffic.down + traffic.up))
        if bits > 0:
            found.append(Shorter(key=key, dtype=dtype, below=bits / (LEAST_SHARE * round_s) if round_s else None))
    return tuple(found)


def _fewest(bundle: PlanBundle) -> Iterator[tuple[Literal["model", "update"], UpdateDtype, int]]:
    """With the bytes that each saves in a round."""
    now = {"model": bundle.model_layout, "update": bundle.update_layout}
    kinds: tuple[tuple[Literal["model", "update"], tuple[UpdateDtype, ...]], ...] = (
        ("model", get_args(ParameterDtype)),
        ("update", get_args(UpdateDtype)),
    )
    for key, dtypes in kinds:
        for dtype in sorted(dtypes, key=lambda one: ITEM_BYTES[one]):
            saved = now[key].total_bytes - bundle.layout.as_type(dtype).total_bytes
            if saved > 0 and _goes(bundle.plan, key, dtype):
                yield key, dtype, saved
                break


def _goes(plan: Plan, key: str, dtype: UpdateDtype) -> bool:
    values = plan.model_dump(mode="json")
    try:
        Plan.model_validate({**values, "wire": {**values["wire"], key: dtype}})
    except ValidationError:
        return False
    return True


def line_text(bits: float) -> str:
    """A line's speed, rounded to two digits."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{float(f'{bits / size:.2g}'):g} {unit}"
    return f"{bits:.2g} bit/s"
