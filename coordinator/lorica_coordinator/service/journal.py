"""Each transition as one log line, each record as what the observer is told. Both after the transition is persisted."""

from collections.abc import Sequence
from dataclasses import asdict

import structlog

from lorica_coordinator.rounds.cohorts.whole_groups import awaited_groups
from lorica_coordinator.rounds.effects import (
    EvaluationClosed,
    MaskedAccepted,
    Record,
    RoundAbandoned,
    RoundClosed,
    RoundOpened,
    SiloDropped,
    UpdateAccepted,
)
from lorica_coordinator.rounds.events import Event
from lorica_coordinator.rounds.states import Masking, State, course_of, round_of
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.service.ports import Observer
from lorica_coordinator.service.views.disclosure import Means, closed_of_all_silos, evaluation_of_all_silos, means_of
from silo_wire.messages import RoundKey

_log = structlog.get_logger(__name__)


class Journal:
    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._opened: dict[RoundKey, float] = {}

    def resumed(self, state: State) -> None:
        round_number, attempt = round_of(state)
        _log.info("resumed", phase=state.phase, round=round_number, attempt=attempt)
        self._observer.phase_changed(state.phase, round_number=round_number, attempt=attempt)

    def transition(self, before: State, event: Event, after: State, records: Sequence[Record]) -> None:
        round_number, attempt = round_of(after)
        silo = getattr(event, "silo", None)
        _log.info(
            "transition",
            event_type=type(event).__name__,
            before=before.phase,
            phase=after.phase,
            round=round_number,
            attempt=attempt,
            **({} if silo is None else {"silo": silo}),
        )
        if (lacking := awaited_groups(after)) is not None and lacking != awaited_groups(before):
            _log.warning("no masked sum can come out", absent=list(lacking.absent), detail=lacking.in_words)
        course = course_of(after)
        for record in records:
            self._record(record, before, None if course is None else course.terms, event.now)
        if (before.phase, *round_of(before)) != (after.phase, round_number, attempt):
            self._observer.phase_changed(after.phase, round_number=round_number, attempt=attempt)

    def _record(self, record: Record, before: State, terms: PlanTerms | None, now: float) -> None:
        """Unless the terms show single silos, what one tells of its training and its scores goes into no log and no
        metric."""
        single_silos = terms is not None and terms.shows_single_silos
        match record:
            case RoundOpened():
                self._opened[record.key] = now
                _log.info("round opened", **_where(record.key), cohort=list(record.cohort), model=record.model)
                self._observer.round_opened(record.key, record.cohort)
            case UpdateAccepted() if not single_silos:
                update = record.update
                _log.info("update committed", **_where(record.key), silo=update.silo, update=update.digest)
            case UpdateAccepted():
                update = record.update
                _log.info(
                    "update committed",
                    **_where(record.key),
                    silo=update.silo,
                    examples=update.examples,
                    loss_reduction=update.loss_reduction,
                    delta_norm=update.delta_norm,
                    update=update.digest,
                )
                self._observer.update_committed(update)
            case MaskedAccepted():
                _log.info(
                    "masked vector committed",
                    **_where(record.key),
                    silo=record.vector.silo,
                    vector=record.vector.digest,
                )
            case SiloDropped():
                _log.warning(
                    "silo dropped",
                    **_where(record.key),
                    silo=record.silo,
                    outcome=record.outcome,
                    detail=record.detail,
                )
                self._observer.silo_dropped(record.silo, record.outcome, _phase(before))
            case RoundClosed():
                means = Means() if terms is None else means_of(record, terms)
                self._closed(record if single_silos else closed_of_all_silos(record), means, now)
            case RoundAbandoned():
                _log.warning("round abandoned", **_where(record.key), cause=record.cause.value, reason=record.reason)
                self._observer.round_abandoned(record.cause, seconds=self._seconds(record.key, now))
            case EvaluationClosed():
                self._evaluated(record if single_silos else evaluation_of_all_silos(record))
            case _:
                pass

    def _closed(self, record: RoundClosed, means: Means, now: float) -> None:
        result = record.result
        updates = {update.silo: update for update in record.updates}
        for item in result.weights:
            _log.info(
                "silo weight",
                **_where(record.key),
                silo=item.silo,
                examples=updates[item.silo].examples,
                loss_reduction=updates[item.silo].loss_reduction,
                weight=item.weight,
                share=item.share,
                capped=item.capped,
                left_out=item.left_out,
            )
            if item.nothing:
                _log.warning(
                    "silo weighs nothing",
                    **_where(record.key),
                    silo=item.silo,
                    detail="its loss did not fall in this round: its update is in the model with a share of 0",
                )
        log = _log.warning if result.fallback or result.saturated else _log.info
        log(
            "round closed",
            **_where(record.key),
            outcome=result.outcome.value,
            model=result.model,
            weight_fallback=result.fallback,
            step_length=result.step_length,
            **_masked(record),
        )
        self._observer.round_closed(result, means, seconds=self._seconds(record.key, now))

    def _evaluated(self, record: EvaluationClosed) -> None:
        if record.score is None:
            _log.warning("evaluation without a mean that may be shown", **_where(record.key))
            self._observer.evaluated(record.key, reports=(), scores=None, macro=None, micro=None)
            return
        scores = {
            report.silo: report.evaluation.exact_matches / report.evaluation.examples for report in record.reports
        }
        _log.info(
            "evaluated",
            **_where(record.key),
            macro_exact_match=record.macro,
            micro_exact_match=record.score.micro_average,
            **({"silos": scores} if scores else {}),
            **({} if record.scores is None else asdict(record.scores)),
            quorum=record.counted,
            best=record.is_best,
        )
        self._observer.evaluated(
            record.key,
            reports=[(report.silo, report.evaluation) for report in record.reports],
            scores=record.scores,
            macro=record.macro,
            micro=record.score.micro_average,
        )

    def _seconds(self, key: RoundKey, closed_at: float) -> float:
        # A round that was opened before a restart counts from the restart: the observer's clock began there too.
        return max(0.0, closed_at - self._opened.pop(key, closed_at))


def _masked(record: RoundClosed) -> dict[str, object]:
    """How many silos are in the model; of a masked sum, what nobody but their sum says."""
    result = record.result
    if record.masked is None:
        return {"silos": len(record.updates)}
    return {
        "silos": len(record.masked),
        "weight_sum": result.weight_sum,
        "saturated": result.saturated,
        "coordinates": result.coordinates,
    }


def _phase(state: State) -> str:
    """The phase, or that of secure aggregation within it."""
    if isinstance(state, Masking) and state.secure is not None:
        return state.secure.state.phase.replace(" ", "_")
    return state.phase


def _where(key: RoundKey) -> dict[str, int]:
    return {"round": key.round, "attempt": key.attempt}
