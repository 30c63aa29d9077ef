"""Rows, plans and histories as the status page is given them, and the page that is made of them."""

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lorica_coordinator.edges.status_page.curves import all_plans_json, curves_json
from lorica_coordinator.edges.status_page.histories import PlanHistory, _Book, _history
from lorica_coordinator.edges.status_page.rounds_log import round_entries
from lorica_coordinator.edges.status_page.view import PageView, page_view
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_coordinator.service.release_groups import GroupsStanding
from lorica_coordinator.service.views.standing import SiloStanding, Standing
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import Plan

NOW = 1_800_000_000.0
DAY = 86_400.0
MODEL = Digest("ab" * 32)
NAMES = (SiloName("bank-b"), SiloName("clinic-c"), SiloName("hospital-a"))
SHOWN = RecordedPlan(
    digest=MODEL,
    name="triage",
    begun_unix_s=NOW - DAY,
    active_unix_s=NOW,
    present=True,
    rounds=10,
    score="exact match",
    shows_single_silos=True,
    newest_round=3,
    deletions=0,
)
HIDDEN = replace(SHOWN, shows_single_silos=False)
_TEMPLATES = Environment(
    loader=PackageLoader("lorica_coordinator.edges.status_page"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def score(matches: int) -> Evaluation:
    return Evaluation(
        split="dev", examples=8, exact_matches=matches, executed=0, execution_matches=0, loss_per_token=1.0, seconds=1.0
    )


def row(number: int, **changes: Any) -> RoundRow:
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
        opened_unix_s=NOW - 600 + 60 * number,
        closed_unix_s=NOW - 560 + 60 * number,
        model=MODEL,
        weight_fallback=False,
        silos=silos,
        macro_exact_match=0.6131,
        micro_exact_match=0.59,
    )
    return replace(whole, **changes)


def silo(name: SiloName, state: str, **changes: Any) -> SiloStanding:
    standing = SiloStanding(
        silo=name,
        state=state,
        detail="",
        last_seen_unix_s=NOW - 90,
        fraction=0.5,
        certificate_expires_unix_s=NOW + 7 * DAY,
        agent_version="0.1.0",
    )
    return replace(standing, **changes)


def standing(**changes: Any) -> Standing:
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
    return replace(value, **changes)


def recorded(rows: Sequence[RoundRow], plan: RecordedPlan = SHOWN, *, settled: int = 0) -> PlanHistory:
    """The history of a plan with these rows, the first `settled` of which are kept and not read again."""
    book = _Book(single=plan.shows_single_silos)
    book.settle(book.shown(rows[:settled]), through=settled)
    return _history(plan, book, tuple(rows[settled:]), read=True)


def view(
    rows: Sequence[RoundRow] | None = None, *, plan: RecordedPlan = SHOWN, plan_: Plan | None = None, **changes: Any
) -> PageView:
    """Of `rows`, or three of them, under `plan`, in full `plan_`; `changes` are arguments of page_view."""
    values: dict[str, Any] = {
        "product": "Lorica 0.1.0, wire 2.0",
        "standing": standing(shows_single_silos=plan.shows_single_silos),
        "histories": [recorded([row(1), row(2), row(3)] if rows is None else rows, plan)],
        "left_out": 0,
        "plan": plan_,
        "epsilon": None,
        "groups": GroupsStanding(stands=None, proposed=None, unsigned=frozenset()),
        "refusals": (),
        "authorities": (),
        "own_certificate_expires": NOW + DAY,
        "now": NOW,
    }
    return page_view(**{**values, **changes})


def rendered(of: PageView) -> str:
    return _TEMPLATES.get_template("page.html.j2").render(view=of)


def everything(of: PageView, histories: Sequence[PlanHistory], rows: Sequence[Sequence[RoundRow]]) -> dict[str, bytes]:
    """What each path of the page answers, of these histories and their `rows`."""
    log, a_round = (_TEMPLATES.get_template(name) for name in ("log.html.j2", "round.html.j2"))
    answers = {
        "/": rendered(of).encode(),
        "/live": _TEMPLATES.get_template("live.html.j2").render(view=of).encode(),
        "/curves": all_plans_json((history.plan, history.pieces) for history in histories),
    }
    for history, of_plan in zip(histories, rows, strict=True):
        plan = history.plan
        answers[f"/curves/{plan.digest}"] = curves_json(plan, history.silos, history.curves)
        answers[f"/log/{plan.digest}"] = log.render(view=of, plan=plan, lines=history.lines[::-1], read=True).encode()
        for number in sorted({one.round for one in of_plan}):
            attempts = [one for one in reversed(of_plan) if one.round == number]
            entries = round_entries(attempts, single=plan.shows_single_silos)
            page = a_round.render(view=of, plan=plan, number=number, entries=entries)
            answers[f"/log/{plan.digest}/{number}"] = page.encode()
    return answers


class Balanced(HTMLParser):
    """Raises AssertionError for an element that is not closed where it was opened; keeps ids and links."""

    VOID = ("meta", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("href", "src") and value]
        assert not [name for name, _ in attrs if name == "style" or name.startswith("on")], "the policy forbids it"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raise AssertionError(f"{tag} closes itself")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
