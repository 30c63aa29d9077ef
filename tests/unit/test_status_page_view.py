"""What the page says, from rows as the service gives them: words, what must not be shown, markup, links."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from importlib.resources import files
from typing import get_args

import pytest

from lorica.documentation.runbook_page import runbook_html
from lorica_coordinator.edges.server.gate import DEFECT, Refusal
from lorica_coordinator.edges.status_page import runbook
from lorica_coordinator.edges.status_page.curves import Pieces, curves_json
from lorica_coordinator.edges.status_page.refusals import KEPT, STRANGER, RecentRefusals
from lorica_coordinator.edges.status_page.rounds_log import PARTS_LISTED, SiloPart
from lorica_coordinator.plans.presets import preset
from lorica_coordinator.rounds.states import Running
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_coordinator.service.records import MaskedTotals, RoundRow, SiloRow
from lorica_coordinator.service.release_groups import GroupsStanding
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_security.errors import EXIT_CODES
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan
from tests.support.status_page import (
    DAY,
    HIDDEN,
    NAMES,
    NOW,
    SHOWN,
    Balanced,
    recorded,
    rendered,
    row,
    silo,
    standing,
    view,
)

TELLING = ("1234", "3.25", "1.125", "2.125", "77.5", "40.0%", "87.5%")
"""Every number of one silo in the rows below."""
PAGE = files("lorica_coordinator.edges.status_page")


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
    assert shown.deadline == "12 min"
    assert shown.about_left == "about 7 min"  # a minute for each of the rounds 4 to 10
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
    shown = view([row(1), row(2), gone])
    assert [entry.line.outcome for entry in shown.entries] == ["abandoned", "applied", "applied"]
    assert shown.scored_round == "2"
    assert "too few updates" in rendered(shown)
    assert [json.loads(piece)[0] for piece in recorded([row(1), row(2), gone]).pieces] == [1, 2]


def test_who_only_told_a_score_was_not_asked_for_an_update() -> None:
    scored_alone = replace(row(1).silos[0], silo=SiloName("zeta"), outcome="evaluated", examples=0)
    late = replace(row(1).silos[0], silo=SiloName("late"), outcome="late", examples=0)
    lines = [
        entry.line.silos
        for entry in view([row(1, silos=()), row(2, silos=(*row(1).silos, late, scored_alone))]).entries
    ]
    assert lines == ["3 of 4", ""]  # of the older one the records have deleted who


def test_a_look_goes_over_no_round_but_the_newest() -> None:
    """However many rounds a plan has: what the event loop does is the same."""

    class Untouched(Pieces):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("a look goes over rounds that are settled")

    history = recorded([row(number) for number in range(1, 13)], settled=4)
    untouched = Untouched(["[1]"] * 12, 12)
    shown = view(histories=[replace(history, pieces=untouched, curves=untouched)])
    assert (shown.scored_round, shown.plans[0].best) == ("12", "59.0% (round 1)")


def test_everything_a_silo_brought_is_shown_where_it_may_be() -> None:
    text = rendered(view())
    for figure in TELLING:
        assert figure in text, figure


def test_who_weighs_nothing_is_named_where_single_silos_are_shown() -> None:
    weightless = row(2)
    first, *others = weightless.silos
    weightless = replace(weightless, silos=(replace(first, loss_max=1.0, loss_min=1.0, weight=0.0, share=0.0), *others))
    note = f"{NAMES[0]} weighs nothing: its loss did not fall"
    (newest, before) = view([row(1), weightless]).entries
    assert [[one.words for one in entry.line.notes] for entry in (newest, before)] == [[note], []]
    assert note in rendered(view([weightless]))
    assert "weighs nothing" not in rendered(view([weightless], plan=HIDDEN))
    assert view([replace(weightless, outcome="abandoned")]).entries[0].line.notes == ()


def test_a_round_that_a_clock_was_set_back_in_took_no_time_that_is_shown() -> None:
    (entry,) = view([row(1, closed_unix_s=NOW - 99_999)]).entries
    assert (entry.line.opened, entry.line.took) == ("2027-01-15 07:51:00Z", "")
    assert "took" not in rendered(view([row(1, closed_unix_s=NOW - 99_999)]))


def test_silos_of_older_rounds_are_on_their_own_page_where_there_are_many() -> None:
    many = tuple(
        replace(row(1).silos[0], silo=SiloName(f"silo-{number:03}")) for number in range(PARTS_LISTED // 2 + 1)
    )
    newest, before = view([row(1, silos=many), row(2, silos=many)]).entries
    assert newest.parts is not None
    assert (len(newest.parts), before.parts) == (len(many), None)
    text = rendered(view([row(1, silos=many), row(2, silos=many)]))
    assert f'<a href="/log/{SHOWN.digest}/1">Silos of round 1</a>' in text
    huge = tuple(replace(row(1).silos[0], silo=SiloName(f"silo-{number:03}")) for number in range(2 * PARTS_LISTED))
    assert view([row(1, silos=huge)]).entries[0].parts is not None  # of the newest round all, however many


def test_plans_are_listed_newest_first_with_their_own_score() -> None:
    earlier = replace(SHOWN, digest=Digest("cd" * 32), name="words", score="ROUGE-L", present=False)
    histories = [recorded([row(1), row(2, micro_exact_match=0.7), row(3)], earlier), recorded([row(1)])]
    newest, before = view(histories=histories, left_out=2).plans
    assert (newest.name, newest.present, newest.rounds, newest.score) == ("triage", True, "1 of 10", "Exact match")
    assert (before.score, before.newest, before.best) == ("ROUGE-L", "59.0% (round 3)", "70.0% (round 2)")
    text = rendered(view(histories=histories, left_out=2))
    assert "2 before them are not listed" in text
    assert f'href="/log/{earlier.digest}"' in text


# --- what must not be shown


@pytest.mark.parametrize("masked", [MaskedTotals(weight_sum=511.25, saturated=3, coordinates=900), None])
def test_of_masked_and_private_plans_nothing_of_single_silos_is_on_the_page(masked: MaskedTotals | None) -> None:
    rows = [of_all_silos(row(number, masked=masked)) for number in (1, 2, 3)]
    assert_nothing_of_single_silos(rows)
    history = recorded(rows, HIDDEN)
    assert [json.loads(piece)[3] for piece in history.pieces] == [None if masked is None else 511.25] * 3
    assert "61.3%" in rendered(view(rows, plan=HIDDEN))  # the mean over three


def test_rows_that_came_with_single_silos_are_not_shown_either() -> None:
    """The service strips them; the page does not lean on it."""
    assert_nothing_of_single_silos([row(1), row(2), row(3)])


def assert_nothing_of_single_silos(rows: list[RoundRow]) -> None:
    text = rendered(view(rows, plan=HIDDEN))
    history = recorded(rows, HIDDEN, settled=1)
    curves = curves_json(HIDDEN, history.silos, history.curves).decode()
    for figure in TELLING:
        assert figure not in text, figure
    for name in NAMES:
        assert name not in curves
    assert (history.silos, list(history.curves)) == ((), [])
    for entry in view(rows, plan=HIDDEN).entries:
        assert entry.parts == tuple(SiloPart(silo=name, outcome="committed", detail="") for name in NAMES)
    assert "Progress of" not in text


def test_an_earlier_plan_is_shown_by_its_own_rule() -> None:
    """A masked plan's rounds stay covered when the plan under way is plain, and the other way round."""
    masked = replace(HIDDEN, digest=Digest("cd" * 32), name="covered", present=False)
    covered = view(histories=[recorded([row(1), row(2)], masked), recorded([])])
    assert [plan.told for plan in covered.plans] == ["each silo", "sums and means alone"]
    assert covered.single_silos
    for figure in TELLING:
        assert figure not in rendered(covered), figure


# --- privacy


def test_the_budget_says_what_is_promised_and_what_is_known_to_be_spent() -> None:
    assert "no differential privacy" in view(plan_=plan()).budget.promise
    record = view(plan_=plan(level="record", noise_multiplier=1.0, unit_field="patient")).budget
    assert "epsilon 8 at dp_delta 1e-05" in record.promise
    assert "all records of one 'patient'" in record.promise
    assert record.spent.startswith("3 of ")
    assert record.spent_percent is None
    newest = [row(number) for number in range(301, 501)]
    assert view(newest, plan_=plan(level="record", noise_multiplier=1.0)).budget.spent.startswith("500 of ")
    silo_level = view(plan_=plan(level="silo", noise_multiplier=1.0), epsilon=2.0).budget
    assert (silo_level.spent, silo_level.spent_percent, silo_level.anchor) == ("epsilon 2 spent", 25, "")
    nearly = view(plan_=plan(level="silo", noise_multiplier=1.0), epsilon=7.0).budget
    assert nearly.anchor == runbook.BUDGET_NEARLY_SPENT


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
        plan=replace(SHOWN, name=HOSTILE, score=HOSTILE),
        plan_=plan(level="record", noise_multiplier=1.0, unit_field=HOSTILE),
    )
    text = rendered(shown)
    assert "<script>" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 5
    Balanced(text)


def test_the_page_is_well_formed_and_its_ids_are_single() -> None:
    for shown in (
        view(),
        view(plan=HIDDEN),
        view([], standing=standing(silos=())),
        view(histories=[]),
    ):
        found = Balanced(rendered(shown)).ids
        assert len(found) == len(set(found))


# --- the runbook


RUNBOOK = Balanced((PAGE / "static" / "runbook.html").read_text(encoding="utf-8"))


def test_every_link_into_the_runbook_leads_to_a_section() -> None:
    assert set(RUNBOOK.ids) >= runbook.ANCHORS
    assert len(RUNBOOK.ids) == len(set(RUNBOOK.ids))
    assert {link[1:] for link in RUNBOOK.links if link.startswith("#")} <= set(RUNBOOK.ids)
    assert {link for link in RUNBOOK.links if not link.startswith("#")} == {"/", "/icon.svg", "/page.css"}


def test_every_phase_and_every_kind_of_refusal_has_its_section() -> None:
    assert runbook.PHASES.keys() == {"idle", *(state.phase for state in get_args(Running))}
    assert runbook.KINDS.keys() == {kind.__name__ for kind in EXIT_CODES if kind.__name__ != "LoricaError"} | {DEFECT}


def test_what_stands_out_links_to_what_to_do_about_it() -> None:
    refused = RecentRefusals(lambda: NOW)
    refused.add(Refusal(kind="WrongTime", method="/x/Attend", peer="ipv4:10.0.0.9", detail="x"))
    late = silo(NAMES[2], "ready", certificate_expires_unix_s=NOW + 60)
    shown = view(
        [row(1, outcome="abandoned", detail="too few")],
        standing=standing(silos=(silo(NAMES[0], "declined"), silo(NAMES[1], "absent"), late)),
        refusals=refused.newest_first(),
    )
    links = {link.partition("#")[2] for link in Balanced(rendered(shown)).links if link.startswith("/runbook.html#")}
    assert links == {
        "phase-collecting",
        runbook.SILO_STATES["declined"],
        runbook.SILO_STATES["absent"],
        runbook.SILO_CERTIFICATE,
        runbook.OWN_CERTIFICATE,
        runbook.ROUND_WARNINGS["abandoned"],
        runbook.KINDS["WrongTime"],
    }


# --- what is vendored


def test_the_chart_library_is_the_one_that_is_written_down() -> None:
    """Bytes that somebody else wrote run in an operator's browser: none other than those that were looked at."""
    written = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", (PAGE / "static/VENDORED.md").read_text(), re.M))
    there = {file.name for file in (PAGE / "static").iterdir() if file.name.startswith("uPlot")}
    assert written.keys() == there
    assert len(there) == 3
    for name, digest in written.items():
        assert sha256((PAGE / "static" / name).read_bytes()).hexdigest() == digest, name


def test_the_served_runbook_is_that_of_the_docs() -> None:
    """`make docs` brings it up to date."""
    assert (PAGE / "static" / "runbook.html").read_text(encoding="utf-8") == runbook_html()
