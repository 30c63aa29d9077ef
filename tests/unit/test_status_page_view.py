"""What the page says, and where its lines run, from rows as the service gives them."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from jinja2 import Environment, PackageLoader, StrictUndefined

from lorica_coordinator.edges.server.gate import Refusal
from lorica_coordinator.edges.status_page import charts
from lorica_coordinator.edges.status_page.charts import MOST_SERIES, line_chart, share_chart
from lorica_coordinator.edges.status_page.refusals import KEPT, STRANGER, RecentRefusals
from lorica_coordinator.edges.status_page.view import PageView, page_view
from lorica_coordinator.plans.presets import preset
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_coordinator.service.records import MaskedTotals, RoundRow, SiloRow
from lorica_coordinator.service.release_groups import GroupsStanding
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_coordinator.service.views.standing import SiloStanding, Standing
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import Plan

NOW = 1_800_000_000.0
DAY = 86_400.0
MODEL = Digest("ab" * 32)
NAMES = (SiloName("bank-b"), SiloName("clinic-c"), SiloName("hospital-a"))
TELLING = ("1234", "3.25", "1.125", "2.125", "77.5", "40.0%", "87.5%")
"""Every number of one silo in the rows below."""


def score(matches: int) -> Evaluation:
    return Evaluation(
        split="dev", examples=8, exact_matches=matches, executed=0, execution_matches=0, loss_per_token=1.0, seconds=1.0
    )


def row(number: int, **changes: object) -> RoundRow:
    silos = tuple(
        SiloRow(
            silo=name,
            outcome="committed",
            examples=1234,
            loss_max=3.25,
            loss_min=1.125,
            weight=77.5,
            share=(0.4, 0.35, 0.25)[index],
            delta_norm=9.0,
            evaluation=score(7),
        )
        for index, name in enumerate(NAMES)
    )
    whole = RoundRow(
        round=number,
        attempt=1,
        outcome="applied",
        detail="",
        opened_unix_s=NOW - 60,
        closed_unix_s=NOW,
        model=MODEL,
        weight_fallback=False,
        silos=silos,
        macro_exact_match=0.6131,
        micro_exact_match=0.59,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def silo(name: SiloName, state: str, **changes: object) -> SiloStanding:
    standing = SiloStanding(
        silo=name,
        state=state,
        detail="",
        last_seen_unix_s=NOW - 90,
        fraction=0.5,
        certificate_expires_unix_s=NOW + 7 * DAY,
    )
    return replace(standing, **changes)  # type: ignore[arg-type]


def standing(**changes: object) -> Standing:
    value = Standing(
        federation=FederationName("test-net"),
        plan_name="triage",
        plan=MODEL,
        phase="collecting",
        detail="1 of 3 updates in",
        round=4,
        attempt=2,
        rounds=10,
        seconds_left=754.0,
        silos=(silo(NAMES[0], "training"), silo(NAMES[1], "absent"), silo(NAMES[2], "ready")),
        model=MODEL,
        best_model=MODEL,
        shows_single_silos=True,
    )
    return replace(value, **changes)  # type: ignore[arg-type]


def view(**changes: object) -> PageView:
    values: dict[str, object] = {
        "standing": standing(),
        "rows": [row(1), row(2), row(3)],
        "plan": None,
        "epsilon": None,
        "groups": GroupsStanding(stands=None, proposed=None, unsigned=frozenset()),
        "refusals": (),
        "authorities": (),
        "own_certificate_expires": NOW + DAY,
        "now": NOW,
    }
    return page_view(**{**values, **changes})  # type: ignore[arg-type]


def rendered(of: PageView) -> str:
    templates = Environment(
        loader=PackageLoader("lorica_coordinator.edges.status_page"), autoescape=True, undefined=StrictUndefined
    )
    return templates.get_template("page.html.j2").render(view=of, charts=charts)


class Balanced(HTMLParser):
    """Raises AssertionError for an element that is not closed where it was opened."""

    VOID = ("meta", "link")
    EMPTY = ("line", "rect", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        assert not [name for name, _ in attrs if name == "style" or name.startswith("on")], "the policy forbids it"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.EMPTY

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def plan(**privacy: object) -> Plan:
    digest = "0" * 64
    files = {"config.json": digest, "layout.json": digest}
    values = preset("default")
    values["training"] |= {"dropout": 0.0, "epochs": 1}
    values["aggregation"] |= {"weighting": "equal", "max_delta_norm": 1.0}
    values["evaluation"] |= {"every": 0, "initial": False, "last": False}
    model = {"source": "size:mini", "parameters": 1, "layout": digest, "initial": digest, "files": files}
    return Plan.model_validate(
        {"name": "triage", "federation": "test-net", **values, "model": model, "privacy": privacy}
    )


# --- words


def test_where_the_plan_stands_is_in_words() -> None:
    shown = view()
    assert (shown.phase, shown.round, shown.rounds, shown.attempt) == ("collecting", 4, 10, 2)
    assert shown.time_left == "12 min"
    assert shown.rounds_percent == 30
    assert shown.at_work == "2 of 3 connected"
    assert (shown.macro, shown.micro, shown.scored_round) == ("61.3%", "59.0%", "3")
    training, absent, _ = shown.silos
    assert (training.percent_done, absent.percent_done) == (50, None)
    assert training.last_seen.words == "1 min 30 s ago"


@pytest.mark.parametrize(
    ("left_s", "words", "soon"),
    [
        (7 * DAY, "in 7 days", False),
        (DAY, "in 24 h 0 min", True),
        (-3 * DAY, "expired 3 days ago", True),
        (3650 * DAY, "in 10 years", False),
    ],
)
def test_certificates_that_end_soon_stand_out(left_s: float, words: str, soon: bool) -> None:
    authority = AuthorityStanding(
        name="ca", stage="issuing", subject="", pin="", digest="", begins_unix_s=0.0, expires_unix_s=NOW + left_s
    )
    shown = view(authorities=(authority,), own_certificate_expires=NOW + left_s)
    for line in shown.certificates:
        assert (line.expires.words, line.expires.soon) == (words, soon)
    assert ('class="soon"' in rendered(shown)) is soon


def test_groups_are_whole_or_kept_out_by_who_is_absent() -> None:
    first = first_link(FederationName("test-net"), Partition.of([NAMES]))
    nothing = view()
    assert nothing.groups is None
    assert 'id="groups"' not in rendered(nothing)
    waits = view(groups=GroupsStanding(stands=None, proposed=first, unsigned=frozenset(NAMES[1:])))
    assert "No release groups stand" in rendered(waits)
    assert "Signatures are awaited of clinic-c, hospital-a" in rendered(waits)
    stands = view(groups=GroupsStanding(stands=first, proposed=None, unsigned=frozenset()))
    assert stands.groups is not None
    (line,) = stands.groups.lines
    assert (line.silos, line.absent) == ("bank-b, clinic-c, hospital-a", "clinic-c")
    Balanced(rendered(stands))
    text = " ".join(rendered(stands).split())
    assert "kept out</span> by clinic-c" in text
    assert "Proposed to follow" not in text
    here = standing(silos=tuple(silo(name, "ready") for name in NAMES))
    whole = view(standing=here, groups=GroupsStanding(stands=first, proposed=None, unsigned=frozenset()))
    assert "whole</td>" in rendered(whole)
    assert "kept out" not in rendered(whole)


def test_an_attempt_that_was_abandoned_gives_no_figures() -> None:
    gone = row(3, outcome="abandoned", detail="too few updates", silos=(), macro_exact_match=None)
    shown = view(rows=[row(1), row(2), gone])
    assert shown.contributions_round == "2"
    assert [line.outcome for line in shown.history] == ["abandoned", "applied", "applied"]
    assert shown.charts[0].rows[0][0] == "2"


def test_everything_a_silo_brought_is_shown_where_it_may_be() -> None:
    text = rendered(view())
    for figure in TELLING:
        assert figure in text, figure


def test_who_weighs_nothing_is_named_where_single_silos_are_shown() -> None:
    weightless = row(2)
    first, *others = weightless.silos
    weightless = replace(weightless, silos=(replace(first, loss_max=1.0, loss_min=1.0, weight=0.0, share=0.0), *others))
    note = f"{NAMES[0]} weighs nothing: its loss did not fall"
    assert [line.detail for line in view(rows=[row(1), weightless]).history] == [note, ""]
    assert note in rendered(view(rows=[weightless]))
    hidden = view(standing=standing(shows_single_silos=False), rows=[weightless])
    assert "weighs nothing" not in rendered(hidden)
    abandoned = replace(weightless, outcome="abandoned")
    assert [line.detail for line in view(rows=[abandoned]).history] == [""]


# --- what must not be shown


@pytest.mark.parametrize("masked", [MaskedTotals(weight_sum=511.25, saturated=3, coordinates=900), None])
def test_of_masked_and_private_plans_nothing_of_single_silos_is_on_the_page(masked: MaskedTotals | None) -> None:
    rows = [of_all_silos(row(number, masked=masked)) for number in (1, 2, 3)]
    shown = view(standing=standing(shows_single_silos=False), rows=rows)
    text = rendered(shown)
    for figure in TELLING:
        assert figure not in text, figure
    assert "Progress of" not in text
    assert shown.contributions == ()
    assert {line.name for chart in shown.charts for line in chart.lines} <= {"MacroAvg", "MicroAvg", "sum of weights"}
    assert "61.3%" in text  # the mean over three
    assert ("511.2" in text) is (masked is not None)


def test_rows_that_came_with_single_silos_are_not_shown_either() -> None:
    """The service strips them; the page does not lean on it."""
    text = rendered(view(standing=standing(shows_single_silos=False)))
    for figure in TELLING:
        assert figure not in text, figure


# --- privacy


def test_the_budget_says_what_is_promised_and_what_is_known_to_be_spent() -> None:
    assert "no differential privacy" in view(plan=plan()).budget.promise
    record = view(plan=plan(level="record", noise_multiplier=1.0, unit_field="patient")).budget
    assert "epsilon 8 at dp_delta 1e-05" in record.promise
    assert "all records of one 'patient'" in record.promise
    assert record.spent.startswith("3 of ")
    assert record.spent_percent is None
    newest = [row(number) for number in range(301, 501)]  # of more rounds than the page is given
    assert view(plan=plan(level="record", noise_multiplier=1.0), rows=newest).budget.spent.startswith("500 of ")
    silo_level = view(plan=plan(level="silo", noise_multiplier=1.0), epsilon=2.0).budget
    assert (silo_level.spent, silo_level.spent_percent) == ("epsilon 2 spent", 25)


# --- refusals


def test_refusals_are_counted_by_kind_and_a_flood_of_one_pushes_no_other_out() -> None:
    now = [NOW]
    recent = RecentRefusals(lambda: now[0])
    stranger = Refusal(
        kind="AuthenticationError", method="/silo_wire.v1.Federation/Attend", peer="ipv4:10.0.0.9", detail="x"
    )
    silo_call = replace(stranger, kind="WrongTime", peer="spiffe://test-net/silo/bank-b")
    recent.add(silo_call)
    for _ in range(1000):
        now[0] += 1
        recent.add(stranger)
    flood, other = recent.newest_first()
    assert (flood.kind, flood.call, flood.who, flood.times, flood.last) == (
        *("AuthenticationError", "Attend", STRANGER, 1000),
        NOW + 1000,
    )
    assert (other.who, other.times) == ("silo/bank-b", 1)
    for number in range(2 * KEPT):
        recent.add(replace(stranger, method=f"/silo_wire.v1.Federation/Call{number}"))
    assert len(recent.newest_first()) == KEPT
    text = rendered(view(refusals=recent.newest_first()))
    assert "10.0.0.9" not in text


# --- markup


HOSTILE = "<script>alert(1)</script>\"'&"


def test_whatever_is_said_is_text() -> None:
    shown = view(
        standing=standing(
            detail=HOSTILE, plan_name=HOSTILE, phase="collecting", silos=(silo(NAMES[0], "declined", detail=HOSTILE),)
        ),
        rows=[row(1, detail=HOSTILE), row(2, silos=(SiloRow(silo=SiloName(HOSTILE), outcome=HOSTILE, examples=1),))],
        plan=plan(level="record", noise_multiplier=1.0, unit_field=HOSTILE),
    )
    text = rendered(shown)
    assert "<script>" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 5
    Balanced(text)


def test_the_page_is_well_formed_and_its_ids_are_single() -> None:
    for shown in (
        view(),
        view(standing=standing(shows_single_silos=False)),
        view(rows=[], standing=standing(silos=())),
    ):
        found = Balanced(rendered(shown)).ids
        assert len(found) == len(set(found))


# --- charts


def test_lines_run_from_the_first_round_to_the_last_and_no_further() -> None:
    chart = line_chart("loss", "Loss", {"a": [(2, 5.0), (4, 1.0)], "b": [(3, 2.0)]})
    assert chart is not None
    first, second = chart.lines
    begin, end = (tuple(map(float, point.split(","))) for point in first.path.split())
    assert begin[0] == charts.LEFT
    assert end[0] == charts.WIDTH - charts.RIGHT
    assert begin[1] < end[1]  # a loss that falls goes down
    assert begin[1] >= charts.TOP
    assert end[1] <= charts.HEIGHT - charts.BOTTOM
    assert float(second.path.split(",")[0]) == (begin[0] + end[0]) / 2
    assert chart.rows == (("4", "1", ""), ("3", "", "2"), ("2", "5", ""))
    assert [mark.text for mark in first.marks] == ["a, round 2: 5", "a, round 4: 1"]


def test_shares_fill_their_column() -> None:
    chart = share_chart("shares", "Shares", {"a": [(1, 0.25), (2, 1.0)], "b": [(1, 0.75)]})
    assert chart is not None
    of_first = [bar for bar in chart.bars if bar.x == chart.bars[0].x]
    assert sum(bar.height for bar in of_first) == pytest.approx(charts.HEIGHT - charts.TOP - charts.BOTTOM, abs=0.2)
    assert of_first[1].y + of_first[1].height == pytest.approx(of_first[0].y, abs=0.1)


ANY_VALUES = [[0.0], [0.0, 0.0], [1e-9, 2e-9], [1e12], [-3.0, 7.0], [5.0, 5.0], [1e300], [0.0, 1e300], [1e308, 2.0]]
NEARLY_ONE = [[0.0, 5e-324], [5e-324], [1e-310, 0.0], [1.981873005287253e-11, 1.9818730052872534e-11]]


@pytest.mark.parametrize("values", [*ANY_VALUES, *NEARLY_ONE])
def test_any_values_have_a_scale_with_room_for_them(values: list[float]) -> None:
    chart = line_chart("x", "X", {"a": list(enumerate(values))})
    assert chart is not None
    assert 2 <= len(chart.y_ticks) <= 7
    for mark in chart.lines[0].marks:
        assert charts.TOP <= mark.y <= charts.HEIGHT - charts.BOTTOM
    if min(values) >= 0:
        assert not any(tick.text.startswith("-") for tick in chart.y_ticks)


def test_what_is_not_a_number_is_left_out_and_more_than_can_be_told_apart_is_in_the_table() -> None:
    assert line_chart("x", "X", {"a": [(1, float("nan")), (2, float("inf")), (3, 1.7e308)]}) is None
    assert share_chart("x", "X", {}) is None
    many = {f"silo-{number:02}": [(1, float(number))] for number in range(MOST_SERIES + 5)}
    chart = line_chart("x", "X", many)
    assert chart is not None
    assert len(chart.lines) == len(chart.legend) == MOST_SERIES
    assert len(chart.columns) == MOST_SERIES + 5
    assert chart.left_out == 5
