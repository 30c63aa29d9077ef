"""What the status page says, as values: times, numbers and names in words that a template only places.

It is given what operators and viewers may see anyway (`coordinator status`, `coordinator rounds`). Of a plan under
masks or with differential privacy the rows come without anything of single silos, and no chart or column is made for
it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from lorica_coordinator.edges.status_page.charts import Chart, Points, figure, line_chart, percent, share_chart
from lorica_coordinator.edges.status_page.refusals import SeenRefusal
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_coordinator.service.release_groups import GroupsStanding
from lorica_coordinator.service.views.standing import SiloStanding, Standing
from lorica_security.identifiers import SiloName
from silo_wire.plans.plan import Plan

SOON_S: Final = 2 * 86_400.0
"""A certificate that ends within this time should have been renewed: it is marked."""
ROUNDS_LISTED: Final = 8
_SCORED: Final = ("applied", "zero_weight", "evaluated")
_MEASURED: Final = ("training", "masking", "evaluating")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instant for people and for machines; `words` is "" where there is none."""

    words: str
    iso: str
    soon: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloLine:
    name: str
    state: str
    detail: str
    percent_done: int | None
    last_seen: Moment
    certificate: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine:
    number: str
    outcome: str
    silos: str
    macro: str
    micro: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """A silo's part in the newest round that was summed."""

    silo: str
    outcome: str
    examples: str
    loss: str
    reduction: str
    weight: str
    share: str
    exact_match: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`spent_percent` None where the coordinator does not know: each silo keeps its own ledger."""

    promise: str
    spent: str
    spent_percent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalLine:
    last: Moment
    kind: str
    call: str
    who: str
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateLine:
    of: str
    stage: str
    expires: Moment


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView:
    federation: str
    made_at: Moment
    plan: str
    digest: str
    phase: str
    detail: str
    round: int
    attempt: int
    rounds: int
    time_left: str
    rounds_percent: int
    single_silos: bool
    score: str
    macro: str
    micro: str
    scored_round: str
    silos: tuple[SiloLine, ...]
    at_work: str
    groups: GroupsView | None
    charts: tuple[Chart, ...]
    history: tuple[RoundLine, ...]
    contributions: tuple[Contribution, ...]
    contributions_round: str
    budget: Budget
    refusals: tuple[RefusalLine, ...]
    certificates: tuple[CertificateLine, ...]


def page_view(
    *,
    standing: Standing,
    rows: Sequence[RoundRow],
    plan: Plan | None,
    epsilon: float | None,
    groups: GroupsStanding,
    refusals: Iterable[SeenRefusal],
    authorities: Sequence[AuthorityStanding],
    own_certificate_expires: float,
    now: float,
) -> PageView:
    """`rows` oldest first; `epsilon` is what the coordinator's own releases have cost so far; times are Unix
    seconds."""
    closed = [row for row in rows if row.outcome in _SCORED]
    scored = next((row for row in reversed(closed) if row.micro_exact_match is not None), None)
    summed = next((row for row in reversed(closed) if row.outcome != "evaluated"), None)
    single = standing.shows_single_silos
    return PageView(
        federation=standing.federation,
        made_at=_moment(now, now),
        plan=standing.plan_name,
        digest="" if standing.plan is None else standing.plan[:16],
        phase=standing.phase,
        detail=standing.detail,
        round=standing.round,
        attempt=standing.attempt,
        rounds=standing.rounds,
        time_left="" if standing.seconds_left is None else _span(standing.seconds_left),
        rounds_percent=_rounds_percent(standing),
        single_silos=single,
        score=_capital(standing.score),
        macro="" if scored is None or scored.macro_exact_match is None else percent(scored.macro_exact_match),
        micro="" if scored is None or scored.micro_exact_match is None else percent(scored.micro_exact_match),
        scored_round="" if scored is None else str(scored.round),
        silos=tuple(_silo(item, now, single=single) for item in standing.silos),
        at_work=_at_work(standing.silos),
        groups=_groups(groups, standing.silos),
        charts=tuple(chart for chart in _charts(closed, single=single, score=standing.score) if chart is not None),
        history=tuple(_round(row, single=single) for row in reversed(rows[-ROUNDS_LISTED:])),
        contributions=() if summed is None or not single else tuple(map(_contribution, summed.silos)),
        contributions_round="" if summed is None else str(summed.round),
        budget=_budget(plan, rows, epsilon),
        refusals=tuple(
            RefusalLine(last=_moment(item.last, now), kind=item.kind, call=item.call, who=item.who, times=item.times)
            for item in refusals
        ),
        certificates=(
            CertificateLine(of="coordinator", stage="in use", expires=_until(own_certificate_expires, now)),
            *(
                CertificateLine(of=f"authority {item.name}", stage=item.stage, expires=_until(item.expires_unix_s, now))
                for item in authorities
            ),
        ),
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- charts


def _charts(closed: Sequence[RoundRow], *, single: bool, score: str) -> Iterable[Chart | None]:
    means = {
        "MacroAvg": _means(closed, lambda row: row.macro_exact_match),
        "MicroAvg": _means(closed, lambda row: row.micro_exact_match),
    }
    scores = _by_silo(closed, _exact_match) if single else {}
    yield line_chart("exact-match", f"{_capital(score)} on held-out questions", scores, means=means, share=True)
    if single:
        yield line_chart(
            "loss", "Training loss, least of each round", _by_silo(closed, lambda silo: silo.loss_min, trained=True)
        )
        yield share_chart(
            "shares", "Share of the weighted mean", _by_silo(closed, lambda silo: silo.share, trained=True)
        )
        yield line_chart(
            "loss-reduction",
            "Loss reduction in each round",
            _by_silo(closed, lambda silo: silo.loss_reduction, trained=True),
        )
    else:
        masked = {"sum of weights": _means(closed, lambda row: None if row.masked is None else row.masked.weight_sum)}
        yield line_chart("weight-sum", "Sum of the masked weights", {}, means=masked)


def _means(rows: Sequence[RoundRow], value: Callable[[RoundRow], float | None]) -> Points:
    found = {row.round: value(row) for row in rows}
    return [(at, mean) for at, mean in found.items() if mean is not None]


def _by_silo(
    rows: Sequence[RoundRow], value: Callable[[SiloRow], float | None], *, trained: bool = False
) -> dict[str, Points]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        for silo in row.silos:
            given = None if trained and not silo.examples else value(silo)
            if given is not None:
                found.setdefault(silo.silo, {})[row.round] = given
    return {silo: list(found[silo].items()) for silo in sorted(found)}


def _exact_match(silo: SiloRow) -> float | None:
    return None if silo.evaluation is None else silo.evaluation.exact_matches / silo.evaluation.examples


# --- lines


def _rounds_percent(standing: Standing) -> int:
    if not standing.rounds:
        return 0
    done = standing.round if standing.phase == "finished" else max(0, standing.round - 1)
    return round(100 * min(done, standing.rounds) / standing.rounds)


def _at_work(silos: Sequence[SiloStanding]) -> str:
    present = len(_present(silos))
    enrolled = sum(item.state not in ("invited", "revoked") for item in silos)
    return f"{present} of {enrolled} connected"


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
    return SiloLine(
        name=item.silo,
        state=item.state,
        detail="" if item.detail == item.state else item.detail,
        percent_done=round(100 * item.fraction) if single and item.state in _MEASURED else None,
        last_seen=_moment(item.last_seen_unix_s, now),
        certificate=_until(item.certificate_expires_unix_s, now),
    )


def _round(row: RoundRow, *, single: bool) -> RoundLine:
    committed = sum(silo.outcome == "committed" for silo in row.silos)
    notes = [row.detail] if row.detail else []
    notes += [f"{silo} weighs nothing: its loss did not fall" for silo in row.without_weight if single]
    if row.weight_fallback:
        notes.append("all weights were zero, sizes stood in")
    if row.masked is not None and row.masked.saturated:
        notes.append(f"{row.masked.saturated} of {row.masked.coordinates} coordinates beyond their range")
    return RoundLine(
        number=f"{row.round}.{row.attempt}",
        outcome=row.outcome,
        silos=f"{committed} of {len(row.silos)}" if row.round else "",
        macro="" if row.macro_exact_match is None else percent(row.macro_exact_match),
        micro="" if row.micro_exact_match is None else percent(row.micro_exact_match),
        detail="; ".join(notes),
    )


def _contribution(silo: SiloRow) -> Contribution:
    score = _exact_match(silo)
    return Contribution(
        silo=silo.silo,
        outcome=silo.outcome,
        examples=str(silo.examples or ""),
        loss=f"{figure(silo.loss_max)} to {figure(silo.loss_min)}" if silo.examples else "",
        reduction=figure(silo.loss_reduction) if silo.examples else "",
        weight=figure(silo.weight) if silo.weight else "",
        share=percent(silo.share) if silo.weight else "",
        exact_match="" if score is None else percent(score),
    )


def _budget(plan: Plan | None, rows: Sequence[RoundRow], epsilon: float | None) -> Budget:
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
        return Budget(promise=promise, spent=f"epsilon {figure(epsilon)} spent", spent_percent=part)
    begun = max((row.round for row in rows), default=0)  # not how many rows there are: older ones may be left out
    return Budget(
        promise=promise,
        spent=f"{begun} of {plan.schedule.rounds} rounds begun; each silo keeps the ledger of what they cost it",
        spent_percent=None,
    )


# --- times


def _moment(unix_s: float, now: float) -> Moment:
    """A past one."""
    if not unix_s:
        return Moment(words="never", iso="")
    ago = max(0.0, now - unix_s)
    words = "now" if ago < 5 else f"{_span(ago)} ago"
    return Moment(words=words, iso=_iso(unix_s))


def _until(unix_s: float, now: float) -> Moment:
    """One to come."""
    if not unix_s:
        return Moment(words="", iso="")
    left = unix_s - now
    return Moment(
        words=f"in {_span(left)}" if left > 0 else f"expired {_span(-left)} ago", iso=_iso(unix_s), soon=left < SOON_S
    )


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _span(seconds: float) -> str:
    """In the one or two units that matter."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days = hours // 24
    return f"{days} days" if days < 2 * 365 else f"{days // 365} years"
