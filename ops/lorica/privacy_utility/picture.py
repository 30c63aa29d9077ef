"""The rows as two small charts, one dot a training, in SVG that needs nothing else."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorica.privacy_utility.rows import Row

_WIDTH, _HEIGHT = 340, 240
_LEFT, _TOP = 60, 50
_INK, _FAINT, _DOT, _LINE = "#1f2933", "#d9dee4", "#1d6fb8", "#1d6fb8"


def picture(rows: "Sequence[Row]") -> str:
    """Exact match, and the loss of a token, over epsilon; what the warm start has is dashed."""
    charts = (
        ("exact match", lambda row: row.exact_match, lambda row: row.exact_match_before, 1.0, "{:.0%}"),
        ("loss of a token", lambda row: row.loss_per_token, lambda row: row.loss_per_token_before, None, "{:.2f}"),
    )
    parts = [_chart(index, rows, *chart) for index, chart in enumerate(charts)]
    width, height = len(charts) * (_WIDTH + 2 * _LEFT), _HEIGHT + 2 * _TOP + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title" font-family="system-ui, sans-serif" font-size="13">\n'
        '<title id="title">What record-level privacy costs: held-out questions after training with each '
        "epsilon</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _chart(
    index: int,
    rows: "Sequence[Row]",
    title: str,
    value: "Callable[[Row], float]",
    before: "Callable[[Row], float]",
    top: float | None,
    form: str,
) -> str:
    left, highest = index * (_WIDTH + 2 * _LEFT) + _LEFT, top or 1.1 * max(max(value(row), before(row)) for row in rows)
    epsilons = sorted({row.epsilon for row in rows})

    def across(epsilon: float) -> float:
        return left + _WIDTH * (epsilons.index(epsilon) + 0.5) / len(epsilons)

    def up(number: float) -> float:
        return _TOP + _HEIGHT * (1 - number / highest)

    parts = [f'<text x="{left}" y="{_TOP - 20}" fill="{_INK}" font-weight="600">{title}, held-out questions</text>']
    for step in range(5):
        number = highest * step / 4
        parts.append(
            f'<line x1="{left}" x2="{left + _WIDTH}" y1="{up(number):.1f}" y2="{up(number):.1f}" stroke="{_FAINT}"/>'
        )
        parts.append(
            f'<text x="{left - 8}" y="{up(number) + 4:.1f}" text-anchor="end" '
            f'fill="{_INK}">{form.format(number)}</text>'
        )
    start = fmean(map(before, rows))
    parts.append(
        f'<line x1="{left}" x2="{left + _WIDTH}" y1="{up(start):.1f}" y2="{up(start):.1f}" stroke="{_INK}" '
        f'stroke-dasharray="5 4"/><text x="{left + _WIDTH}" y="{up(start) - 6:.1f}" text-anchor="end" '
        f'fill="{_INK}">warm start '
        f"{form.format(start)}</text>"
    )
    means = [(epsilon, fmean(value(row) for row in rows if row.epsilon == epsilon)) for epsilon in epsilons]
    points = " ".join(f"{across(epsilon):.1f},{up(mean):.1f}" for epsilon, mean in means)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    for row in rows:
        parts.append(
            f'<circle cx="{across(row.epsilon):.1f}" cy="{up(value(row)):.1f}" r="4" fill="{_DOT}" '
            'fill-opacity="0.55"/>'
        )
    for epsilon, mean in means:
        name = "no privacy" if math.isinf(epsilon) else f"{epsilon:g}"
        parts.append(
            f'<text x="{across(epsilon):.1f}" y="{_TOP + _HEIGHT + 20}" text-anchor="middle" '
            f'fill="{_INK}">{name}</text>'
        )
        parts.append(
            f'<text x="{across(epsilon) + 9:.1f}" y="{up(mean) - 9:.1f}" fill="{_INK}">{form.format(mean)}</text>'
        )
    parts.append(
        f'<text x="{left + _WIDTH / 2}" y="{_TOP + _HEIGHT + 42}" text-anchor="middle" fill="{_INK}">epsilon</text>'
    )
    return "\n".join(parts)
