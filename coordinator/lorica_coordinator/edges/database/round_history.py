"""Rounds as they are looked back at: read from the tables of one transaction."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Subquery, Table, and_, exists, func, or_, select

from lorica_coordinator.edges.database.round_tables import evaluations, plans, rounds, updates
from lorica_coordinator.service.records import COMPLETED, BegunPlan, MaskedTotals, RoundRow, SiloRow
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation

_OF_SILO: Final = (
    updates.c.round,
    updates.c.attempt,
    updates.c.silo,
    updates.c.outcome,
    updates.c.detail,
    updates.c.examples,
    updates.c.loss_max,
    updates.c.loss_min,
    updates.c.weight,
    updates.c.share,
    updates.c.delta_norm,
)
_OF_SCORE: Final = (
    evaluations.c.round,
    evaluations.c.silo,
    evaluations.c.split,
    evaluations.c.examples,
    evaluations.c.exact_matches,
    evaluations.c.executed,
    evaluations.c.execution_matches,
    evaluations.c.loss_per_token,
    evaluations.c.seconds,
)


def read_plans(connection: Connection) -> tuple[BegunPlan, ...]:
    """As RoundStore.plans; of each plan no more rounds are looked at than its newest, and those that are open."""
    of_plan = select(rounds).where(rounds.c.plan == plans.c.digest).correlate(plans)
    newest_first = rounds.c.round.desc(), rounds.c.attempt.desc()
    newest = of_plan.with_only_columns(rounds.c.round).order_by(*newest_first).limit(1)
    closed = of_plan.with_only_columns(rounds.c.closed_at).where(rounds.c.closed_at.is_not(None))
    closed = closed.order_by(*newest_first).limit(1)
    columns = newest.scalar_subquery().label("newest"), closed.scalar_subquery().label("closed")
    return tuple(
        BegunPlan(
            digest=Digest(row.digest),
            name=row.name,
            begun_unix_s=row.begun_at,
            active_unix_s=max(row.begun_at, row.closed or 0.0),
            newest_round=row.newest,
            deletions=row.deletions,
        )
        for row in connection.execute(select(plans, *columns))
    )


def read_rounds(
    connection: Connection, plan: Digest, *, last: int, since: int, until: int | None, attempts: int
) -> tuple[RoundRow, ...]:
    """As RoundStore.rounds; no silo is read of an attempt that is not returned."""
    newest = select(rounds).where(rounds.c.plan == plan, rounds.c.round >= since)
    if until is not None:
        newest = newest.where(rounds.c.round <= until)
    if attempts:
        newest = newest.where(_first_or_newest(plan, attempts))
    newest = newest.order_by(rounds.c.round.desc(), rounds.c.attempt.desc())
    if last:
        newest = newest.limit(last)
    found = list(connection.execute(newest))[::-1]
    if not found:
        return ()
    scored = {(row.round, row.attempt) for row in found if row.outcome in (*COMPLETED, "evaluated")}
    scores = _read_scores(connection, plan, found[0].round, found[-1].round)
    silos = _read_silos(connection, plan, newest.subquery(), scored, scores)
    return tuple(_round_of(row, silos.get((row.round, row.attempt), ()), scores, scored) for row in found)


def _first_or_newest(plan: Digest, attempts: int) -> ColumnElement[bool]:
    """Whether an attempt, which are numbered from 1 on, is its round's first, or of the `attempts` - 1 newest."""
    of_round = rounds.alias()
    newest = select(func.max(of_round.c.attempt)).where(of_round.c.plan == plan, of_round.c.round == rounds.c.round)
    return or_(rounds.c.attempt == 1, rounds.c.attempt > newest.correlate(rounds).scalar_subquery() - (attempts - 1))


_Scores = Mapping[int, Mapping[str, Evaluation]]
"""By round, the silos that told of their held-out questions, in order of their names."""


def _read_scores(connection: Connection, plan: Digest, first: int, last: int) -> _Scores:
    found: dict[int, dict[str, Evaluation]] = {}
    of_plan = select(*_OF_SCORE).where(evaluations.c.plan == plan, evaluations.c.round.between(first, last))
    for number, silo, split, examples, matches, executed, same_result, loss, seconds in connection.execute(
        of_plan.order_by(evaluations.c.silo)
    ):
        found.setdefault(number, {})[silo] = Evaluation(
            split=split,
            examples=examples,
            exact_matches=matches,
            executed=executed,
            execution_matches=same_result,
            loss_per_token=loss,
            seconds=seconds,
        )
    return found


def _read_silos(
    connection: Connection, plan: Digest, of: Subquery, scored: set[tuple[int, int]], scores: _Scores
) -> Mapping[tuple[int, int], Sequence[SiloRow]]:
    """By round and attempt, in order of silos, those who were asked to train, in the attempts `of` the plan."""
    found: dict[tuple[int, int], list[SiloRow]] = {}
    same = and_(updates.c.round == of.c.round, updates.c.attempt == of.c.attempt)
    of_plan = select(*_OF_SILO).join(of, same).where(updates.c.plan == plan)
    for number, attempt, silo, outcome, detail, examples, high, low, weight, share, norm in connection.execute(
        of_plan.order_by(updates.c.silo)
    ):
        key = (number, attempt)
        found.setdefault(key, []).append(
            SiloRow(
                silo=silo,
                outcome=outcome,
                detail=detail,
                examples=examples,
                loss_max=high,
                loss_min=low,
                weight=weight,
                share=share,
                delta_norm=norm,
                evaluation=scores.get(number, {}).get(silo) if key in scored else None,
            )
        )
    return found


def _round_of(row: Row[Any], trained: Sequence[SiloRow], scores: _Scores, scored: set[tuple[int, int]]) -> RoundRow:
    # Whoever only evaluated: round 0, or an evaluation that was done again after a stop, by another cohort.
    further: tuple[SiloRow, ...] = ()
    if (row.round, row.attempt) in scored:
        known = {silo.silo for silo in trained}
        further = tuple(
            SiloRow(silo=SiloName(silo), outcome="evaluated", evaluation=score)
            for silo, score in scores.get(row.round, {}).items()
            if silo not in known
        )
    return RoundRow(
        round=row.round,
        attempt=row.attempt,
        outcome=row.outcome,
        detail=row.detail,
        opened_unix_s=row.opened_at,
        closed_unix_s=row.closed_at,
        model=Digest(row.model),
        weight_fallback=row.weight_fallback,
        masked=None
        if row.coordinates is None
        else MaskedTotals(weight_sum=row.weight_sum, saturated=row.saturated, coordinates=row.coordinates),
        silos=(*trained, *further),
        macro_exact_match=row.macro_exact_match,
        micro_exact_match=row.micro_exact_match,
        scored=row.scored,
    )


def closed_before(table: Table, before: float) -> ColumnElement[bool]:
    """Whether the round of a row was closed before, in whatever attempt; a later one of the same number is not."""
    same = and_(rounds.c.plan == table.c.plan, rounds.c.round == table.c.round)
    return and_(
        exists(select(rounds.c.round).where(same, rounds.c.closed_at < before).correlate(table)),
        ~exists(
            select(rounds.c.round)
            .where(same, or_(rounds.c.closed_at.is_(None), rounds.c.closed_at >= before))
            .correlate(table)
        ),
    )
