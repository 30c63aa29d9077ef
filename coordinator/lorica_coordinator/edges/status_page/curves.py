"""Rounds as the numbers of charts: JSON that the page's script draws, and nothing else reads.

A round's piece is rendered once: what is asked for again and again is joined from pieces. A plan whose terms show no
single silo has means and sums alone: no series, name or count of silos is in what is made of it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import eq
from typing import Final

from lorica_coordinator.edges.status_page.words import capital, drawable
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_security.identifiers import SiloName

SCORED: Final = ("applied", "zero_weight", "evaluated")
"""Outcomes of attempts that have figures; of one round at most one attempt has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What all silos of a round came to. Scores are 0 to 1, None where there are none; `weight_sum` of a masked one."""

    round: int
    macro: float | None
    micro: float | None
    weight_sum: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is drawn of each silo. `better`: which way is better, "" where neither is."""

    name: str
    title: str
    better: str
    of: Callable[[SiloRow], float | None]


class Pieces:
    """The first `kept` of a list that only grows, and `fresh` ones behind them: nothing is copied for it."""

    def __init__(self, of: Sequence[str] = (), kept: int = 0, fresh: tuple[str, ...] = ()) -> None:
        self._of, self._kept, self._fresh = of, kept, fresh

    def __len__(self) -> int:
        return self._kept + len(self._fresh)

    def __iter__(self) -> Iterator[str]:
        yield from islice(self._of, self._kept)
        yield from self._fresh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list


def score_of(silo: SiloRow) -> float | None:
    """0 to 1, by whatever the plan counts; None for a silo that told of none."""
    return None if silo.evaluation is None else silo.evaluation.exact_matches / silo.evaluation.examples


def _trained(value: Callable[[SiloRow], float]) -> Callable[[SiloRow], float | None]:
    return lambda silo: value(silo) if silo.examples else None


SCORE: Final = Measure(name="score", title="", better="higher", of=score_of)
"""Its title is the plan's own score."""
MEASURES: Final = (
    SCORE,
    Measure(
        name="loss", title="Training loss, least of each round", better="lower", of=_trained(lambda it: it.loss_min)
    ),
    Measure(name="share", title="Share of the weighted mean", better="", of=_trained(lambda it: it.share)),
    Measure(
        name="reduction",
        title="Loss reduction in each round",
        better="",
        of=_trained(lambda it: it.loss_reduction),
    ),
)


def point_of(row: RoundRow) -> Point | None:
    """None for an attempt that gave no figures."""
    if row.outcome not in SCORED:
        return None
    return Point(
        round=row.round,
        macro=drawable(row.macro_exact_match),
        micro=drawable(row.micro_exact_match),
        weight_sum=None if row.masked is None else drawable(row.masked.weight_sum),
    )


def point_json(point: Point) -> str:
    """[round, MacroAvg, MicroAvg, sum of masked weights]."""
    figures = (point.macro, point.micro, point.weight_sum)
    return f"[{point.round},{','.join(map(_number, figures))}]"


def with_silos_of(names: Sequence[SiloName], row: RoundRow) -> tuple[SiloName, ...]:
    """`names` with the silos of `row` that are not among them behind: a column stays where it is."""
    known = set(names)
    return (*names, *sorted(silo.silo for silo in row.silos if silo.silo not in known))


def silos_json(row: RoundRow, names: Sequence[SiloName]) -> str:
    """[round, [[a figure for each of `names`] for each of MEASURES]]; names that come later are left out."""
    of = {silo.silo: silo for silo in row.silos}
    silos = [of.get(name) for name in names]
    columns = (
        ",".join("null" if silo is None else _number(drawable(measure.of(silo))) for silo in silos)
        for measure in MEASURES
    )
    return f"[{row.round},{','.join(f'[{column}]' for column in columns)}]"


def all_plans_json(plans: Iterable[tuple[RecordedPlan, Iterable[str]]]) -> bytes:
    """Of every plan its name, its score, and the pieces of its points."""
    return f'{{"plans":[{",".join(_plan_json(plan, pieces) for plan, pieces in plans)}]}}'.encode()


def curves_json(plan: RecordedPlan, names: Sequence[SiloName], pieces: Iterable[str]) -> bytes:
    """Of one plan what its silos brought; without names, pieces and measures where its terms show no single silo."""
    shown = plan.shows_single_silos
    measures = [
        {"name": it.name, "title": it.title or score_title(plan), "better": it.better} for it in MEASURES if shown
    ]
    head = json.dumps(
        {"digest": plan.digest, "silos": list(names) if shown else [], "measures": measures}, separators=(",", ":")
    )
    return f'{head[:-1]},"rounds":[{",".join(pieces) if shown else ""}]}}'.encode()


def score_title(plan: RecordedPlan) -> str:
    return f"{capital(plan.score or 'score')} on held-out questions"


def _plan_json(plan: RecordedPlan, pieces: Iterable[str]) -> str:
    head = {
        "digest": plan.digest,
        "name": plan.name,
        "present": plan.present,
        "rounds": plan.rounds,
        "score": capital(plan.score),
        "better": SCORE.better,
        "silos": plan.shows_single_silos,
    }
    return f'{json.dumps(head, separators=(",", ":"))[:-1]},"points":[{",".join(pieces)}]}}'


def _number(value: float | None) -> str:
    """Six figures that count."""
    return "null" if value is None else f"{value:.6g}"
