"""What a transition records of plans, rounds, updates and evaluations, written into the tables of one transaction."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table, and_, insert, update

from lorica_coordinator.edges.database.round_tables import checkpoints, evaluations, plans, rounds, updates
from lorica_coordinator.rounds.effects import (
    EvaluationAbandoned,
    EvaluationAccepted,
    EvaluationClosed,
    EvaluationOpened,
    MaskedAccepted,
    ModelMade,
    PlanBegun,
    Record,
    RoundAbandoned,
    RoundClosed,
    RoundOpened,
    SiloDropped,
    UpdateAccepted,
)
from lorica_coordinator.service.records import COMPLETED
from lorica_security.identifiers import SiloName
from silo_wire.messages import RoundKey


def put_row(connection: Connection, table: Table, identity: Mapping[str, object], values: Mapping[str, object]) -> None:
    """Update the row with this identity or insert it."""
    matches = [table.c[name] == value for name, value in identity.items()]
    if connection.execute(update(table).where(*matches).values(**values)).rowcount == 0:
        connection.execute(insert(table).values(**identity, **values))


def _identity(key: RoundKey) -> dict[str, object]:
    return {"plan": key.plan, "round": key.round, "attempt": key.attempt}


def of_attempt(table: Table, key: RoundKey) -> list[Any]:
    return [table.c[name] == value for name, value in _identity(key).items()]


def write_record(connection: Connection, record: Record, at: float) -> None:
    match record:
        case PlanBegun():
            put_row(connection, plans, {"digest": record.plan}, {"name": record.name, "begun_at": at})
        case ModelMade():
            put_row(
                connection,
                checkpoints,
                {"plan": record.plan, "model": record.model},
                {"round": record.round, "signature": record.signature, "made_at": at},
            )
        case RoundOpened():
            _open(connection, record, at)
            for silo in record.cohort:
                connection.execute(insert(updates).values(**_identity(record.key), silo=silo, outcome="training"))
        case UpdateAccepted():
            _accept(connection, record, at)
        case MaskedAccepted():
            _of_silo(
                connection,
                record.key,
                record.vector.silo,
                outcome="committed",
                update_digest=record.vector.digest,
                signature=record.signature,
                committed_at=at,
            )
        case SiloDropped():
            _of_silo(connection, record.key, record.silo, outcome=record.outcome, detail=record.detail)
        case RoundClosed():
            _close(
                connection,
                record.key,
                at,
                outcome=record.result.outcome.value,
                model=record.result.model,
                weight_fallback=record.result.fallback,
                **_of_masked_sum(record),
            )
            for silo in record.masked or ():  # also of those who fell silent, or lied, when their vectors were counted
                _of_silo(connection, record.key, silo, outcome="committed")
            for item in record.result.weights:
                _of_silo(connection, record.key, item.silo, weight=item.weight, share=item.share, capped=item.capped)
        case RoundAbandoned():
            _close(connection, record.key, at, outcome="abandoned", detail=record.reason)
        case EvaluationOpened():
            if record.key.round == 0:  # later ones belong to the row of the round that made the model
                _open(connection, record, at)
        case EvaluationAccepted():
            _score(connection, record, at)
        case EvaluationClosed():
            _average(connection, record, at)
        case EvaluationAbandoned():
            if record.key.round == 0:
                _close(connection, record.key, at, outcome="abandoned", detail=record.reason)


def _of_masked_sum(record: RoundClosed) -> dict[str, object]:
    result = record.result
    if record.masked is None:
        return {}
    return {"weight_sum": result.weight_sum, "saturated": result.saturated, "coordinates": result.coordinates}


def _open(connection: Connection, record: RoundOpened | EvaluationOpened, at: float) -> None:
    connection.execute(
        insert(rounds).values(**_identity(record.key), outcome="running", opened_at=at, model=record.model)
    )


def _close(connection: Connection, key: RoundKey, at: float, **values: object) -> None:
    connection.execute(update(rounds).where(*of_attempt(rounds, key)).values(closed_at=at, **values))


def _of_silo(connection: Connection, key: RoundKey, silo: SiloName, **values: object) -> None:
    connection.execute(update(updates).where(*of_attempt(updates, key), updates.c.silo == silo).values(**values))


def _accept(connection: Connection, record: UpdateAccepted, at: float) -> None:
    summary = record.update.summary
    _of_silo(
        connection,
        record.key,
        record.update.silo,
        outcome="committed",
        update_digest=record.update.digest,
        signature=record.signature,
        examples=summary.examples,
        loss_max=summary.loss_max,
        loss_min=summary.loss_min,
        loss_first=summary.loss_first,
        loss_last=summary.loss_last,
        optimizer_steps=summary.optimizer_steps,
        seconds=summary.seconds,
        delta_norm=record.update.delta_norm,
        committed_at=at,
    )


def _score(connection: Connection, record: EvaluationAccepted, at: float) -> None:
    scored = record.report.evaluation
    put_row(
        connection,
        evaluations,
        {"plan": record.key.plan, "round": record.key.round, "silo": record.report.silo},
        {
            "attempt": record.key.attempt,
            "model": record.model,
            "split": scored.split,
            "examples": scored.examples,
            "exact_matches": scored.exact_matches,
            "executed": scored.executed,
            "execution_matches": scored.execution_matches,
            "loss_per_token": scored.loss_per_token,
            "seconds": scored.seconds,
            "reported_at": at,
        },
    )


def _average(connection: Connection, record: EvaluationClosed, at: float) -> None:
    averages = {
        "macro_exact_match": record.macro,
        "scored": len(record.reports) if record.scores is None else None,
        "micro_exact_match": None if record.score is None else record.score.micro_average,
    }
    if record.key.round == 0:
        _close(connection, record.key, at, outcome="evaluated", **averages)
    else:
        made_the_model = and_(
            rounds.c.plan == record.key.plan, rounds.c.round == record.key.round, rounds.c.outcome.in_(COMPLETED)
        )
        connection.execute(update(rounds).where(made_the_model).values(**averages))
