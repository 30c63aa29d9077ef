"""Figures of rounds as points in the coordinates of an SVG; the template draws them, and a table says the same in
words.

A chart is WIDTH by HEIGHT units, about as many as a telephone is wide in CSS pixels, so that its letters stay legible
there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 400
HEIGHT: Final = 220
LEFT: Final = 44
RIGHT: Final = 10
TOP: Final = 10
BOTTOM: Final = 26
MOST_SERIES: Final = 10
"""Lines that can be told apart; the table has all."""
STYLES: Final = 8
"""Of series, in order of their names; those after them are for means."""
MEAN_STYLES: Final = (8, 9)
_MOST_MARKS: Final = 40
_TICKS: Final = 4
_ROUND_TICKS: Final = 6
_LARGEST: Final = 1e300
_LEAST: Final = 1e-300
"""Beyond these a scale would overflow, or have no room between two ticks. A silo may say any number of its loss."""
_LEAST_PART: Final = 1e-9
"""Of a value, which a difference has to be to be drawn as one."""

Points = Sequence[tuple[int, float]]
"""(round, value), in order of round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`path` is what SVG's polyline takes; `style` numbers colour and dashes from 0."""

    name: str
    style: int
    path: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One silo's part of the column of a round."""

    style: int
    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`rows` of the table: a round, then one cell for each of `columns`; "" where there is no figure.

    `legend` has the names with their styles; `left_out` counts the series that are in the table alone.
    """

    name: str
    title: str
    description: str
    lines: tuple[Line, ...]
    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: tuple[tuple[str, int], ...]
    left_out: int


def percent(value: float) -> str:
    return f"{value:.1%}"


def figure(value: float) -> str:
    """Four figures that count, for losses and sums."""
    return f"{value:.4g}"


def line_chart(
    name: str,
    title: str,
    series: Mapping[str, Points],
    *,
    means: Mapping[str, Points] | None = None,
    share: bool = False,
) -> Chart | None:
    """Lines over rounds, of `means` first; None where there is nothing to draw. `share`: values from 0 to 1, shown in
    per cent.

    What is no number, or beyond _LARGEST, is left out.
    A series has the style of its place among `series`, so that it looks alike in every chart of the same ones.
    """
    styles = _styles(series, means or {})
    series = {**(means or {}), **series}
    drawn = {label: [(at, value) for at, value in points if abs(value) <= _LARGEST] for label, points in series.items()}
    drawn = {label: points for label, points in drawn.items() if points}
    if not drawn:
        return None
    shown = dict(list(drawn.items())[:MOST_SERIES])
    rounds = _Rounds([at for points in drawn.values() for at, _ in points])
    values = [value for points in shown.values() for _, value in points]
    scale = _Scale(0.0, 1.0) if share else _Scale.around(values)
    words = percent if share else figure
    lines = tuple(
        Line(
            name=label,
            style=styles[label],
            path=" ".join(f"{rounds.x(at)},{scale.y(value)}" for at, value in points),
            marks=tuple(
                Mark(x=rounds.x(at), y=scale.y(value), text=f"{label}, round {at}: {words(value)}")
                for at, value in points
            )
            if len(points) <= _MOST_MARKS
            else (),
        )
        for label, points in shown.items()
    )
    return _chart(name, title, drawn, rounds, scale, words, styles, lines=lines)


def share_chart(name: str, title: str, series: Mapping[str, Points]) -> Chart | None:
    """A column for each round, parted by the shares, which come to 1."""
    styles = _styles(series, {})
    drawn = {label: points for label, points in series.items() if points}
    if not drawn:
        return None
    rounds = _Rounds([at for points in drawn.values() for at, _ in points], columns=True)
    scale = _Scale(0.0, 1.0)
    below: dict[int, float] = {}
    bars = []
    for label, points in list(drawn.items())[:MOST_SERIES]:
        for at, value in points:
            begin = below.get(at, 0.0)
            below[at] = end = min(1.0, begin + value)
            top = scale.y(end)
            bars.append(
                Bar(
                    style=styles[label],
                    x=round(rounds.x(at) - rounds.column / 2, 1),
                    y=top,
                    width=round(rounds.column, 1),
                    height=round(scale.y(begin) - top, 1),
                    text=f"{label}, round {at}: {percent(value)}",
                )
            )
    return _chart(name, title, drawn, rounds, scale, percent, styles, bars=tuple(bars))


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to heights; the least is at the bottom."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> "_Scale":
        """From ticks that people read at a glance."""
        low, high = min(values), max(values)
        size = max(abs(low), abs(high))
        if size < _LEAST or high - low <= size * _LEAST_PART:
            least = 0.0 if low >= 0 else -math.inf  # nothing but the scale would say that a loss could be negative
            room = (1.0 if size < _LEAST else size) / 2
            low, high = max(least, low - room), high + room
        step = _pleasant((high - low) / _TICKS)
        return cls(math.floor(low / step) * step, math.ceil(high / step) * step)

    def y(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - min(1.0, max(0.0, part)) * (HEIGHT - TOP - BOTTOM), 1)

    def ticks(self) -> list[float]:
        step = _pleasant((self.high - self.low) / _TICKS)
        count = round((self.high - self.low) / step)
        return [self.low + step * index for index in range(count + 1)]


class _Rounds:
    """Rounds to places across; a column each, or the first and the last at the edges."""

    def __init__(self, rounds: Sequence[int], *, columns: bool = False) -> None:
        self.first, self.last = min(rounds), max(rounds)
        across = WIDTH - LEFT - RIGHT
        count = self.last - self.first + 1
        self.column = across / count * 0.8
        self._step = across / count if columns else across / max(1, count - 1)
        self._begin = LEFT + (self._step / 2 if columns or count == 1 else 0.0)

    def x(self, at: int) -> float:
        return round(self._begin + (at - self.first) * self._step, 1)

    def ticks(self) -> list[int]:
        step = max(1, math.ceil((self.last - self.first) / _ROUND_TICKS))
        return list(range(self.first, self.last + 1, step))


def _chart(
    name: str,
    title: str,
    series: Mapping[str, Points],
    rounds: _Rounds,
    scale: _Scale,
    words: Callable[[float], str],
    styles: Mapping[str, int],
    *,
    lines: tuple[Line, ...] = (),
    bars: tuple[Bar, ...] = (),
) -> Chart:
    at_round = {label: dict(points) for label, points in series.items()}
    known = sorted({at for points in at_round.values() for at in points})
    names = list(series)
    return Chart(
        name=name,
        title=title,
        description=f"{title}, rounds {rounds.first} to {rounds.last}: {', '.join(names[:MOST_SERIES])}.",
        lines=lines,
        bars=bars,
        x_ticks=tuple(Tick(at=rounds.x(at), text=str(at)) for at in rounds.ticks()),
        y_ticks=tuple(Tick(at=scale.y(value), text=_short(value, words)) for value in scale.ticks()),
        columns=tuple(names),
        rows=tuple(
            (str(at), *(words(at_round[label][at]) if at in at_round[label] else "" for label in names))
            for at in reversed(known)
        ),
        legend=tuple((label, styles[label]) for label in names[:MOST_SERIES]),
        left_out=max(0, len(names) - MOST_SERIES),
    )


def _styles(series: Mapping[str, Points], means: Mapping[str, Points]) -> dict[str, int]:
    of_means = {label: MEAN_STYLES[index % len(MEAN_STYLES)] for index, label in enumerate(means)}
    return {**{label: index % STYLES for index, label in enumerate(series)}, **of_means}


def _short(value: float, words: Callable[[float], str]) -> str:
    return f"{value:.0%}" if words is percent else f"{value:.3g}"


def _pleasant(step: float) -> float:
    """The least of 1, 2, 2.5, 5 and 10 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * (1 - 1e-9))
