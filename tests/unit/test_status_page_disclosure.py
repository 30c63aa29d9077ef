"""Nothing of one silo is on the page of a plan that shows none: a search over plans, histories, and what a silo told.

Whoever looks at the page chooses when, which path, and which plan is under way; a silo, or whoever works with it,
chooses every number that it tells, when it joins, and in which order its rows lie in the records. Two histories that
differ in these alone, within plans under masks or with privacy, must give the same bytes on every path. It is held of
the page by itself: rows reach it both as the service strips them and as they are in the records.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.status_page.curves import curves_json
from lorica_coordinator.edges.status_page.histories import ROUNDS_LISTED, PlanHistory
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.records import MaskedTotals, RoundRow, SiloRow
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from tests.support.status_page import SHOWN, everything, recorded, row, silo, standing, view

POOL = tuple(SiloName(f"silo-{letter}") for letter in "abcde")
KINDS = ("plain", "masked", "record", "silo")
ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True)
SCORES = st.none() | st.floats(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plan, what its records have, and how many of its rounds are kept from an earlier look."""

    plan: RecordedPlan
    rows: tuple[RoundRow, ...]
    settled: int


@st.composite
def told(draw: st.DrawFn, name: SiloName, outcome: str) -> SiloRow:
    """Whatever one silo may have told."""
    examples = draw(st.integers(1, 10**6))
    scored = Evaluation(
        split="dev",
        examples=examples,
        exact_matches=draw(st.integers(0, examples)),
        executed=0,
        execution_matches=0,
        loss_per_token=draw(st.floats(0, 9)),
        seconds=1.0,
    )
    return SiloRow(
        silo=name,
        outcome=outcome,
        examples=draw(st.integers(0, 10**6)),
        loss_max=draw(ANY_NUMBER),
        loss_min=draw(ANY_NUMBER),
        weight=draw(ANY_NUMBER),
        share=draw(ANY_NUMBER),
        delta_norm=draw(ANY_NUMBER),
        evaluation=draw(st.none() | st.just(scored)),
    )


@st.composite
def attempt(draw: st.DrawFn, number: int, *, masked: bool) -> RoundRow:
    outcome = draw(st.sampled_from(("applied", "applied", "applied", "zero_weight", "abandoned", "running")))
    names = draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=4, unique=True))
    silos = [draw(told(name, draw(st.sampled_from(("committed", "late", "declined"))))) for name in names]
    return row(
        number,
        outcome=outcome,
        detail=draw(st.sampled_from(("", "too few updates"))),
        silos=tuple(silos),
        masked=MaskedTotals(weight_sum=draw(st.floats(0, 1e6)), saturated=1, coordinates=90) if masked else None,
        macro_exact_match=None if masked else draw(SCORES),
        micro_exact_match=draw(SCORES),
        weight_fallback=draw(st.booleans()),
    )


@st.composite
def records(draw: st.DrawFn) -> list[Recorded]:
    """Some plans, the last of which is under way."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    found = []
    for place, kind in enumerate(kinds):
        plan = replace(
            SHOWN,
            digest=Digest(f"{place + 1:064x}"),
            name=f"plan-{place}",
            present=place == len(kinds) - 1,
            shows_single_silos=kind == "plain",
        )
        rows = tuple(draw(attempt(number + 1, masked=kind == "masked")) for number in range(draw(st.integers(0, 3))))
        found.append(Recorded(plan, rows, draw(st.integers(0, len(rows)))))
    return found


@st.composite
def twins(draw: st.DrawFn) -> tuple[list[Recorded], list[Recorded], tuple[float, float]]:
    """Records, and records in which silos of covered plans told something else, in another order."""
    first = draw(records())
    second = [
        one if one.plan.shows_single_silos else replace(one, rows=draw(told_otherwise(one.rows))) for one in first
    ]
    return first, second, draw(st.tuples(st.floats(0, 1), st.floats(0, 1)))


@st.composite
def told_otherwise(draw: st.DrawFn, rows: Sequence[RoundRow]) -> tuple[RoundRow, ...]:
    return tuple(
        replace(one, silos=tuple(draw(st.permutations([draw(told(it.silo, it.outcome)) for it in one.silos]))))
        for one in rows
    )


def answers(found: Sequence[Recorded], fraction: float, *, stripped: bool) -> dict[str, bytes]:
    shown = [
        tuple(map(of_all_silos, one.rows)) if stripped and not one.plan.shows_single_silos else one.rows
        for one in found
    ]
    histories = [recorded(rows, one.plan, settled=one.settled) for one, rows in zip(found, shown, strict=True)]
    present = found[-1].plan
    at_work = tuple(silo(name, "training", fraction=fraction) for name in POOL[:3])
    page = view(
        histories=histories,
        standing=standing(plan=present.digest, silos=at_work, shows_single_silos=present.shows_single_silos),
    )
    return everything(page, histories, shown)


@given(twins())
@settings(max_examples=150, deadline=None)
def test_no_path_says_anything_that_one_silo_told_under_masks_or_privacy(
    pair: tuple[list[Recorded], list[Recorded], tuple[float, float]],
) -> None:
    """By value, by order or by the length of anything; also of earlier plans, whichever plan is under way."""
    first, second, (here, there) = pair
    if first[-1].plan.shows_single_silos:
        there = here
    assert_alike(answers(first, here, stripped=False), answers(second, there, stripped=False))


@given(twins())
@settings(max_examples=60, deadline=None)
def test_nor_do_they_as_the_service_strips_what_silos_told(
    pair: tuple[list[Recorded], list[Recorded], tuple[float, float]],
) -> None:
    """The service's own rule leaves a mean out where fewer silos told of scores than may be summed: no more differs."""
    first, second, _ = pair
    alike = [
        replace(one, rows=tuple(_same_scorers(a, b) for a, b in zip(one.rows, other.rows, strict=True)))
        for one, other in zip(first, second, strict=True)
    ]
    assert_alike(answers(alike, 0.0, stripped=True), answers(second, 0.0, stripped=True))


def _same_scorers(one: RoundRow, other: RoundRow) -> RoundRow:
    """`one`, with scores of as many silos as `other` has."""
    scored = [it.evaluation for it in other.silos]
    return replace(one, silos=tuple(replace(it, evaluation=score) for it, score in zip(one.silos, scored, strict=True)))


@given(records(), st.data())
@settings(max_examples=80, deadline=None)
def test_no_curve_has_a_series_a_name_or_a_length_of_silos_that_are_covered(
    found: list[Recorded], data: st.DataObject
) -> None:
    """Whoever takes part, under whatever name, however many: the numbers of charts are the same."""

    def curves(of: Sequence[Recorded]) -> list[tuple[str, bytes, tuple[str, ...]]]:
        histories: list[PlanHistory] = [recorded(one.rows, one.plan, settled=one.settled) for one in of]
        return [
            (it.version, curves_json(it.plan, it.silos, it.curves), tuple(it.pieces))
            for it in histories
            if not it.plan.shows_single_silos
        ]

    others = [replace(one, rows=tuple(data.draw(of_others(it)) for it in one.rows)) for one in found]
    assert curves(found) == curves(others)


@st.composite
def of_others(draw: st.DrawFn, of: RoundRow) -> RoundRow:
    names = draw(st.lists(st.sampled_from([*POOL, SiloName("zeta"), SiloName("alpha")]), max_size=7, unique=True))
    return replace(of, silos=tuple(draw(told(name, "committed")) for name in names))


def assert_alike(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    differing = [path for path in one if one[path] != other.get(path)]
    assert (sorted(one), differing) == (sorted(other), [])


def test_the_search_would_see_a_difference_in_a_plain_plan() -> None:
    """What it compares does say what silos told, where that may be said."""
    rows = tuple(row(number) for number in range(1, ROUNDS_LISTED + 1))
    changed = (*rows[:-1], replace(rows[-1], silos=(replace(rows[-1].silos[0], loss_min=0.5), *rows[-1].silos[1:])))
    one, other = (answers([Recorded(SHOWN, of, 2)], 0.0, stripped=False) for of in (rows, changed))
    assert {path for path in one if one[path] != other[path]} == {
        "/",
        "/live",
        f"/curves/{SHOWN.digest}",
        f"/log/{SHOWN.digest}/{ROUNDS_LISTED}",
    }
