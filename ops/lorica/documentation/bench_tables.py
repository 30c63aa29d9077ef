"""The tables of benchmarks.md, from the JSON files of ops/docs/benchmarks: what `make bench` and its kind wrote, with
OUT, the last time that somebody ran them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lorica.bench.figures import Measured, read_figures
from lorica.documentation.markdown import DOCS, markdown_table

FIGURES = DOCS / "benchmarks"
_Rows = tuple[Sequence[str], list[Sequence[str]]]


def table(name: str, rows: Callable[[Any], _Rows]) -> str:
    """Of ops/docs/benchmarks/NAME.json, and below it where and when it was measured."""
    measured, found = read_figures(FIGURES / f"{name}.json")
    return f"{markdown_table(*rows(found))}\n{_told(measured)}\n"


def _told(one: Measured) -> str:
    began, ended = one.load_average
    return (
        f"Measured at commit `{one.commit}`, {one.when[:10]}, on {one.cores} cores and {one.memory_gb} GB; the load "
        f"average was\n{began:g} before and {ended:g} after."
    )


def rounds(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench`: below each first system of a size the others, with what multiple of its figures theirs are."""
    names = ("silos", "parameters", "system", "wall s", "CPU s", "coordinator peak MB", "agent peak MB", "wire MB")
    rows: list[Sequence[str]] = []
    for one in found:
        size = (one["silos"], one["parameters"])
        first = next(other for other in found if (other["silos"], other["parameters"]) == size)
        cell = partial(_cell, one, first)
        rows.append(
            (
                f"{size[0]}",
                f"{size[1]:,}",
                one["system"],
                cell("wall_s", 2),
                cell("cpu_s", 2),
                *(cell(key, 0, 1e6) for key in ("coordinator_peak_bytes", "agent_peak_bytes", "wire_bytes")),
            )
        )
    return names, rows


def _cell(one: Mapping[str, Any], first: Mapping[str, Any], key: str, digits: int, unit: float = 1) -> str:
    """A figure of `one`, in units, and what multiple it is of that of `first`, where they are two and there is one.

    Memory is beyond that of the process as it began, of which the kernel may have taken pages back.
    """
    if one[key] < 0:
        return "less than at its start"
    text = f"{one[key] / unit:,.{digits}f}"
    return text if one is first or first[key] <= 0 else f"{text} ({one[key] / first[key]:.1f} x)"


def masks(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench-secagg`: what cryptography costs by itself."""
    names = (
        "silos",
        "masking a silo, CPU s",
        "unmasking, CPU s",
        "with two silos lost",
        "aggregation, masked / plain",
        "relative L2 error",
        "memory of either side MB",
    )
    return names, [
        (
            f"{one['silos']}",
            f"{one['mask_cpu_s']:.2f}",
            f"{one['unmask_cpu_s']:.2f}",
            "" if one["lost_unmask_cpu_s"] is None else f"{one['lost_unmask_cpu_s']:.2f}",
            f"{one['aggregate_cpu_s']:.2f} / {one['plain_aggregate_cpu_s']:.2f}",
            f"{one['relative_l2_error']:.1e}",
            f"{one['mask_peak_bytes'] / 1e6:.0f}, {one['unmask_peak_bytes'] / 1e6:.0f}",
        )
        for one in found
        if one["mask_cpu_s"] is not None
    ]


def masked_rounds(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of its whole rounds: what each way takes more than the one in the clear of the same run."""
    names = ("way", "wall s", "more", "CPU s", "more", "coordinator peak MB", "wire MB")
    whole = [one for one in found if one["wall_s"] is not None]
    rows: list[Sequence[str]] = []
    for one in whole:
        cell = partial(_cell, one, whole[0])
        more = ("", "") if one is whole[0] else tuple(f"{one[key] - whole[0][key]:.1f}" for key in ("wall_s", "cpu_s"))
        wall, cpu = cell("wall_s", 1), cell("cpu_s", 1)
        peak, wire = (cell(key, 0, 1e6) for key in ("coordinator_peak_bytes", "wire_bytes"))
        rows.append((one["system"], wall, more[0], cpu, more[1], peak, wire))
    return names, rows


def elsewhere(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench` with a database: below each way what it is with state and files there."""
    names = (
        "silos",
        "way",
        "wall s",
        "CPU s",
        "coordinator's CPU s",
        "more, a silo",
        "coordinator peak MB",
    )
    rows: list[Sequence[str]] = []
    for one in found:
        cell = partial(_cell, one, found[0])
        more = (one["coordinator_cpu_s"] - found[0]["coordinator_cpu_s"]) / one["silos"]
        rows.append(
            (
                f"{one['silos']}",
                one["system"],
                cell("wall_s", 2),
                cell("cpu_s", 2),
                cell("coordinator_cpu_s", 2),
                "" if one is found[0] else f"{more:.2f}",
                cell("coordinator_peak_bytes", 0, 1e6),
            )
        )
    return names, rows


def log_entries(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench-log`."""
    names = ("an entry in", "wall ms", "CPU ms")
    return names, [(one["place"], *(_cell(one, found[0], key, 2) for key in ("wall_ms", "cpu_ms"))) for one in found]


def many(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> _Rows:
    """Of the rounds of `lorica bench-many`."""
    names = (
        "parameters",
        "silos",
        "system",
        "wall s",
        "a silo's CPU s",
        "coordinator's CPU s",
        "its memory MB",
        "masking s",
        "aggregating s",
    )
    return names, [
        (
            f"{one['parameters']:,}",
            f"{one['silos']}",
            one["system"],
            f"{one['wall_s']:.1f}",
            f"{one['agent_cpu_s']:.2f}",
            f"{one['coordinator_cpu_s']:.1f}",
            f"{one['coordinator_peak_bytes'] / 1e6:.0f}",
            "" if one["masking_s"] is None else f"{one['masking_s']:.1f}",
            f"{one['aggregate_s']:.1f}",
        )
        for one in found["rounds"]
    ]


def simulations(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench-simulation`."""
    from lorica.bench.simulation.stopwatch import FORWARD, PARTS

    names = ("share of a round", *(f"{one['size']}, {one['examples']:,} examples" for one in found))
    rows: list[Sequence[str]] = [
        (what, *(f"{one['shares'][part]:.1%}" for one in found)) for part, what in PARTS.items()
    ]
    outside = (1 - sum(one["shares"][part] for part in FORWARD) for one in found)
    rows.append(("**outside forward and backward**", *(f"**{share:.1%}**" for share in outside)))
    rows.append(("seconds of a round", *(f"{one['round_s']:.2f}" for one in found)))
    rows.append(("training examples a second", *(f"{one['examples_per_s']:,.0f}" for one in found)))
    return names, rows


def trainers(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench-training`."""
    names = (
        "size",
        "trainer",
        "examples a second",
        "examples a CPU second",
        "step s",
        "CPU s",
        "peak MB",
        "time (all turns)",
        "CPU (all turns)",
        "loss after",
    )
    rows: list[Sequence[str]] = [
        (
            one["size"],
            one["way"],
            f"{one['examples_per_s']:.2f}",
            f"{one['examples_per_cpu_s']:.2f}",
            f"{one['step_s']:.2f}",
            f"{one['cpu_s']:.2f}",
            f"{one['peak_bytes'] / 1e6:,.0f}",
            _ratios(one["time_ratios"]),
            _ratios(one["cpu_ratios"]),
            f"{one['loss']:.3f}",
        )
        for one in found
    ]
    return names, rows


def private(found: Sequence[Mapping[str, Any]]) -> _Rows:
    """Of `lorica bench-dp`."""
    names = ("size", "records a step, at a time", "way", "step s", "CPU s", "peak MB", "CPU", "memory", "beside")
    rows: list[Sequence[str]] = [
        (
            one["size"],
            f"{one['batch']}, {one['physical']}",
            one["way"],
            f"{one['step_s']:.2f}",
            f"{one['cpu_s']:.2f}",
            f"{one['peak_bytes'] / 1e6:,.0f}",
            *("" if one[key] is None else f"{one[key]:.2f} x" for key in ("cpu_ratio", "memory_ratio")),
            one["beside"] or "",
        )
        for one in found
    ]
    return names, rows


def _ratios(one: Sequence[float] | None) -> str:
    """A median, and from what to what."""
    return "" if one is None else f"{one[0]:.2f} x ({one[1]:.2f} to {one[2]:.2f})"
