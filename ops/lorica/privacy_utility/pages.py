"""The study's rows as tables of ops/docs/privacy.md."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from lorica.privacy_utility.comparison import VARIANTS, Comparison, Difference, comparisons
from lorica.privacy_utility.picture import picture
from lorica.privacy_utility.rows import EIGHT, JOINT_RESULTS, QUERY_LOGS, RESULTS, TODAY, Row, by_epsilon, read_rows

_NOT_YET = "not measured yet"
_PAID, _AIM = 1.0, 4.0
"""The epsilon of an idea, and the epsilon of today's training whose accuracy it is to reach."""
WAYS_IN_WORDS = {
    TODAY: "each silo's own, four rounds of twenty steps",
    "own, a step a round": "each silo's own, eighty rounds of one step",
    "joint": "joint, eighty rounds of one step",
}
"""Of joint.py."""


def cost_table(rows: Sequence[Row] | None = None) -> str:
    """What each epsilon costs: means over seeds, with the intervals of those means."""
    found = [row for row in _rows(rows) if row.variant == TODAY]
    lines = [
        "| epsilon, at dp_delta 1e-5 | seeds | loss of a token before | after | exact match before | after | spent |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    of_each = sorted(by_epsilon(found), key=lambda one: -one[2])
    lines += [_cost(epsilon, some) for _, _, epsilon, some in of_each] or [f"| {_NOT_YET} | | | | | | |"]
    return "\n".join(lines) + "\n"


def _cost(epsilon: float, rows: Sequence[Row]) -> str:
    loss, match = Difference.of([row.loss_per_token for row in rows]), Difference.of([row.exact_match for row in rows])
    cells = (
        "no privacy" if math.isinf(epsilon) else f"{epsilon:g}",
        str(len(rows)),
        f"{fmean(row.loss_per_token_before for row in rows):.3f}",
        f"{loss.mean:.3f}{_half(loss, 3)}",
        f"{fmean(row.exact_match_before for row in rows):.1%}".replace("%", " %"),
        f"{100 * match.mean:.1f}{_half(match, 1, 100)} %",
        "" if math.isinf(epsilon) else f"{max(row.spent for row in rows):.2f}",
    )
    return f"| {' | '.join(cells)} |"


def cost_picture(rows: Sequence[Row] | None = None) -> str:
    """What each epsilon costs, a dot a training: SVG."""
    return picture([row for row in _rows(rows) if row.variant == TODAY])


def ideas_table(rows: Sequence[Row] | None = None) -> str:
    """Each idea less today's at the same epsilon and seed."""
    found = {one.variant: one for one in comparisons(_rows(rows))}
    lines = [
        "| variant | what the plan has | epsilon | seeds | loss of a token | exact match | over questions alone |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *_ideas(found),
    ]
    return "\n".join(lines) + "\n"


def aim_table(rows: Sequence[Row] | None = None) -> str:
    """Today's training and each idea at epsilon 1, less today's training at epsilon 4 with the same seed: the aim is no
    difference."""
    found = {one.variant: one for one in comparisons(_rows(rows), beside=_AIM) if one.epsilon == _PAID}
    lines = [
        f"| at epsilon {_PAID:g} | seeds | loss of a token | exact match | over questions alone |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(f"| `{one.variant}` | {' | '.join(_differences(one))} |" for one in found.values()),
    ]
    return "\n".join(lines) + "\n"


def _ideas(found: dict[str, Comparison]) -> Iterator[str]:
    for variant, settings in VARIANTS.items():
        if variant == TODAY:
            continue
        plan = ", ".join(f"`{key} = {value}`" for key, value in settings.items())
        one = found.get(variant)
        if one is None:
            yield f"| `{variant}` | {plan} | {_NOT_YET} | | | | |"
        else:
            yield f"| `{variant}` | {plan} | {one.epsilon:g} | {' | '.join(_differences(one))} |"


def _differences(one: Comparison) -> tuple[str, ...]:
    loss, match, asked = one.loss_per_token, one.exact_match, one.exact_match_over_questions
    return (
        str(len(one.seeds)),
        f"{loss.mean:+.3f}{_half(loss, 3)}",
        f"{100 * match.mean:+.1f}{_half(match, 1, 100)} points",
        _half(asked, 1, 100).strip(),
    )


def joint_table(rows: Sequence[Row] | None = None) -> str:
    """Ways of noise of eight silos: each one's means, and its loss less that of noise of each silo's own in rounds of
    twenty steps."""
    found = [row for row in (read_rows(JOINT_RESULTS) if rows is None else rows) if row.data == EIGHT]
    beside = {one.variant: one for one in comparisons(found)}
    lines = [
        "| noise | seeds | loss of a token before | after | exact match after | loss, less the first's |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for way, text in WAYS_IN_WORDS.items():
        some = [row for row in found if row.variant == way]
        if not some:
            lines.append(f"| {text} | {_NOT_YET} | | | | |")
            continue
        loss = Difference.of([row.loss_per_token for row in some])
        match = Difference.of([row.exact_match for row in some])
        less = beside[way].loss_per_token if way in beside else None
        cells = (
            str(len(some)),
            f"{fmean(row.loss_per_token_before for row in some):.3f}",
            f"{loss.mean:.3f}{_half(loss, 3)}",
            f"{100 * match.mean:.1f}{_half(match, 1, 100)} %",
            "" if less is None else f"{less.mean:+.3f}{_half(less, 3)}",
        )
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _half(of: Difference, digits: int, times: float = 1.0) -> str:
    """Nothing where one seed tells no interval."""
    return "" if math.isinf(of.half) else f" ± {times * of.half:.{digits}f}"


def _rows(rows: Sequence[Row] | None) -> list[Row]:
    return [row for row in (read_rows(RESULTS) if rows is None else rows) if row.data == QUERY_LOGS]
