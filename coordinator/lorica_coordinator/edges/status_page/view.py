"""What the status page says, as values: times, numbers and names in words that a template only places.

It is given what operators and viewers may see anyway (`coordinator status`, `coordinator rounds`). Of a plan under
masks or with differential privacy the rows come without anything of single silos, and no curve or column is made for
it: each plan by its own terms, whichever plan is under way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lorica_coordinator.edges.status_page import runbook
from lorica_coordinator.edges.status_page.curves import SCORE, Point
from lorica_coordinator.edges.status_page.estimate import seconds_left
from lorica_coordinator.edges.status_page.histories import PlanHistory
from lorica_coordinator.edges.status_page.refusals import SeenRefusal
from lorica_coordinator.edges.status_page.rounds_log import RoundEntry, listed_entries
from lorica_coordinator.edges.status_page.words import Moment, capital, figure, past, percent, span, until
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_coordinator.service.release_groups import GroupsStanding
from lorica_coordinator.service.views.standing import SiloStanding, Standing
from lorica_security.identifiers import SiloName
from silo_wire.plans.plan import Plan

_MEASURED: Final = ("training", "masking", "evaluating")
_NEARLY_PERCENT: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloLine:
    """`agent`: the release of its agent, "" where it has not said."""

    name: str
    state: str
    anchor: str
    detail: str
    percent_done: int | None
    last_seen: Moment
    certificate: Moment
    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """A plan of the table. `best` is the MicroAvg that was highest, with its round; "" where there is none, and where
    its rounds are `unread`."""

    name: str
    digest: str
    present: bool
    unread: bool
    begun: Moment
    rounds: str
    score: str
    newest: str
    best: str
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`spent_percent` None where the coordinator does not know: each silo keeps its own ledger."""

    promise: str
    spent: str
    spent_percent: int | None
    anchor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalLine:
    last: Moment
    kind: str
    anchor: str
    call: str
    who: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
    of: str
    stage: str
    expires: Moment
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """Silos that enter a masked sum together or not at all; `absent` says who keeps the others of the group out now."""

    silos: str
    absent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsView:
    """`number` "" where no release groups stand; `proposed` "" where none are proposed, `unsigned` whose signatures are
    awaited."""

    number: str
    lines: tuple[GroupLine, ...]
    proposed: str
    unsigned: str
    anchor: str = runbook.KEPT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    """`deadline` is how long the phase may still take, `about_left` an estimate of when the last round is over; ""
    where there is none. `states` counts the silos in each state. `curves` names what the charts are drawn of: another
    name, other curves."""

    product: str
    federation: str
    made_at: Moment
    plan: str
    digest: str
    whole_digest: str
    phase: str
    anchor: str
    detail: str
    round: int
    attempt: int
    rounds: int
    deadline: str
    about_left: str
    rounds_percent: int
    single_silos: bool
    score: str
    better: str
    macro: str
    micro: str
    scored_round: str
    silos: tuple[SiloLine, ...]
    states: tuple[tuple[str, int], ...]
    at_work: str
    groups: GroupsView | None
    plans: tuple[PlanLine, ...]
    plans_left_out: int
    entries: tuple[RoundEntry, ...]
    curves: str
    budget: Budget
    refusals: tuple[RefusalLine, ...]
    certificates: tuple[CertificateLine, ...]


def page_view(
    *,
    product: str,
    standing: Standing,
    histories: Sequence[PlanHistory],
    left_out: int,
    plan: Plan | None,
    epsilon: float | None,
    groups: GroupsStanding,
    refusals: Iterable[SeenRefusal],
    authorities: Sequence[AuthorityStanding],
    own_certificate_expires: float,
    now: float,
) -> PageView:
    """`histories` oldest first, `left_out` plans before them; `epsilon` is what the coordinator's own releases have
    cost so far; times are Unix seconds."""
    present = next((history for history in histories if history.plan.present), None)
    scored = None if present is None else present.summary.newest
    openings = () if present is None else present.openings
    left = seconds_left(openings, phase=standing.phase, rounds=standing.rounds, now=now)
    single = standing.shows_single_silos
    return PageView(
        product=product,
        federation=standing.federation,
        made_at=past(now, now),
        plan=standing.plan_name,
        digest="" if standing.plan is None else standing.plan[:16],
        whole_digest=standing.plan or "",
        phase=standing.phase,
        anchor=runbook.PHASES.get(standing.phase, ""),
        detail=standing.detail,
        round=standing.round,
        attempt=standing.attempt,
        rounds=standing.rounds,
        deadline="" if standing.seconds_left is None else span(max(0.0, standing.seconds_left)),
        about_left="" if left is None else _about(left),
        rounds_percent=_rounds_percent(standing),
        single_silos=single,
        score=capital(standing.score),
        better=SCORE.better,
        macro="" if scored is None else percent(scored.macro),
        micro="" if scored is None else percent(scored.micro),
        scored_round="" if scored is None else str(scored.round),
        silos=tuple(_silo(item, now, single=single) for item in standing.silos),
        states=_states(standing.silos),
        at_work=_at_work(standing.silos),
        groups=_groups(groups, standing.silos),
        plans=tuple(_plan(history, now) for history in reversed(histories)),
        plans_left_out=left_out,
        entries=() if present is None else _entries(present, single=single),
        curves=" ".join(history.version for history in histories),
        budget=_budget(plan, 0 if not openings else openings[-1].round, epsilon),
        refusals=tuple(
            RefusalLine(
                last=past(item.last, now),
                kind=item.kind,
                anchor=runbook.KINDS.get(item.kind, ""),
                call=item.call,
                who=item.who,
                times=item.times,
            )
            for item in refusals
        ),
        certificates=(
            CertificateLine(
                of="coordinator",
                stage="in use",
                expires=until(own_certificate_expires, now),
                anchor=runbook.OWN_CERTIFICATE,
            ),
            *(
                CertificateLine(
                    of=f"authority {item.name}",
                    stage=item.stage,
                    expires=until(item.expires_unix_s, now),
                    anchor=runbook.AUTHORITY,
                )
                for item in authorities
            ),
        ),
    )


# --- rounds and plans


def _entries(present: PlanHistory, *, single: bool) -> tuple[RoundEntry, ...]:
    shown = single and present.plan.shows_single_silos
    return listed_entries(present.newest[::-1], single=shown)


def _plan(history: PlanHistory, now: float) -> PlanLine:
    plan, summary = history.plan, history.summary
    done = summary.done
    return PlanLine(
        name=plan.name,
        digest=plan.digest,
        present=plan.present,
        unread=not history.read,
        begun=past(plan.begun_unix_s, now),
        rounds=f"{min(done, plan.rounds)} of {plan.rounds}" if plan.rounds else str(done),
        score=capital(plan.score),
        newest=_scored(summary.newest),
        best=_scored(summary.best) if history.read else "",
        told="each silo" if plan.shows_single_silos else "sums and means alone",
    )


def _scored(point: Point | None) -> str:
    return "" if point is None else f"{percent(point.micro)} (round {point.round})"


def _about(seconds: float) -> str:
    """In steps that promise no more than an estimate can hold."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 3600:
        return f"about {round(seconds / 60)} min"
    if seconds < 48 * 3600:
        hours, minutes = divmod(round(seconds / 600) * 10, 60)
        return f"about {hours} h {minutes} min" if minutes else f"about {hours} h"
    return f"about {round(seconds / 86_400)} days"


def _rounds_percent(standing: Standing) -> int:
    if not standing.rounds:
        return 0
    done = standing.round if standing.phase == "finished" else max(0, standing.round - 1)
    return round(100 * min(done, standing.rounds) / standing.rounds)


# --- silos


def _at_work(silos: Sequence[SiloStanding]) -> str:
    present = len(_present(silos))
    enrolled = sum(item.state not in ("invited", "revoked") for item in silos)
    return f"{present} of {enrolled} connected"


def _states(silos: Sequence[SiloStanding]) -> tuple[tuple[str, int], ...]:
    names = [item.state for item in silos]
    return tuple((name, names.count(name)) for name in sorted(set(names)))


def _present(silos: Iterable[SiloStanding]) -> frozenset[SiloName]:
    return frozenset(item.silo for item in silos if item.state not in ("invited", "enrolled", "revoked", "absent"))


def _groups(groups: GroupsStanding, silos: Iterable[SiloStanding]) -> GroupsView | None:
    """None where masks were never asked for."""
    stands, proposed = groups.stands, groups.proposed
    if stands is None and proposed is None:
        return None
    present = _present(silos)
    parts = () if stands is None else stands.partition.groups
    return GroupsView(
        number="" if stands is None else str(stands.number),
        lines=tuple(
            GroupLine(silos=", ".join(group), absent=", ".join(silo for silo in group if silo not in present))
            for group in parts
        ),
        proposed="" if proposed is None else "; ".join(", ".join(group) for group in proposed.partition.groups),
        unsigned=", ".join(sorted(groups.unsigned)),
    )


def _silo(item: SiloStanding, now: float, *, single: bool) -> SiloLine:
    certificate = until(item.certificate_expires_unix_s, now)
    anchor = runbook.SILO_STATES.get(item.state, runbook.SILO_CERTIFICATE if certificate.soon else "")
    return SiloLine(
        name=item.silo,
        state=item.state,
        anchor=anchor,
        detail="" if item.detail == item.state else item.detail,
        percent_done=round(100 * item.fraction) if single and item.state in _MEASURED else None,
        last_seen=past(item.last_seen_unix_s, now),
        certificate=certificate,
        agent=item.agent_version,
    )


# --- privacy


def _budget(plan: Plan | None, begun: int, epsilon: float | None) -> Budget:
    """`begun`: the number of the newest round."""
    if plan is None:
        return Budget(promise="No plan, no promise.", spent="", spent_percent=None)
    section = plan.privacy
    if section.level == "none":
        return Budget(promise="This plan promises no differential privacy.", spent="", spent_percent=None)
    record = f"all records of one {section.unit_field!r}" if section.unit_field else "a record"
    unit = "a silo with all of its records" if section.level == "silo" else record
    promise = (
        f"epsilon {section.target_epsilon:g} at dp_delta {section.dp_delta:g} for all rounds; unit: {unit} "
        f"({section.neighbouring_relation.replace('_', ' ')})"
    )
    if epsilon is not None:
        part = round(100 * min(1.0, epsilon / section.target_epsilon))
        anchor = runbook.BUDGET_NEARLY_SPENT if part > _NEARLY_PERCENT else ""
        spent = f"epsilon {figure(epsilon)} spent"
        return Budget(promise=promise, spent=spent, spent_percent=part, anchor=anchor)
    return Budget(
        promise=promise,
        spent=f"{begun} of {plan.schedule.rounds} rounds begun; each silo keeps the ledger of what they cost it",
        spent_percent=None,
    )
