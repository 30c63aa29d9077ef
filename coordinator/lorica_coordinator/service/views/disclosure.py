"""What of a plan's rounds people are shown, where nothing may be told of single silos: outcomes, sums and averages
alone.

Whether that is so, the plan's terms say (`PlanTerms.shows_single_silos`). What is taken away here reaches no command,
page, metric or log line; the records keep it, for the round itself needs it.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from lorica_coordinator.rounds.effects import EvaluationClosed, RoundClosed
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_security.secure_aggregation.parameters import LEAST_COHORT


def closed_of_all_silos(record: RoundClosed) -> RoundClosed:
    return replace(record, result=replace(record.result, weights=()))


def evaluation_of_all_silos(record: EvaluationClosed) -> EvaluationClosed:
    """A mean over fewer silos than may be summed under masks is as good as their own scores, and goes as well.

    What came as a sum under masks is of all of them anyway.
    """
    if record.scores is not None:
        return record
    if len(record.reports) < LEAST_COHORT:
        return replace(record, reports=(), score=None, macro=None)
    return replace(record, reports=())


def of_all_silos(row: RoundRow) -> RoundRow:
    """Who took part and with what outcome stays, means of the scores as in `evaluation_of_all_silos`."""
    silos = tuple(SiloRow(silo=silo.silo, outcome=silo.outcome, detail=silo.detail) for silo in row.silos)
    if row.macro_exact_match is None:  # nothing, or a sum under masks, of which no mean over silos can be taken
        return replace(row, silos=silos)
    # Scores that were deleted since are still what the mean was taken over.
    scored = sum(silo.evaluation is not None for silo in row.silos) if row.scored is None else row.scored
    if scored < LEAST_COHORT:
        return replace(row, silos=silos, macro_exact_match=None, micro_exact_match=None)
    return replace(row, silos=silos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Over the silos of a round, each counting the same; None for what nobody may know, or does."""

    loss_reduction: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    weight: float | None = None


def means_of(record: RoundClosed, terms: PlanTerms) -> Means:
    """Under silo-level privacy nothing: a mean without noise is promised to nobody. Under masks the sum of weights is
    all that is seen.

    Under record-level privacy the loss reductions have their noise, and first and last loss are not told.
    """
    silos = len(record.updates) if record.masked is None else len(record.masked)
    if terms.silo_level or not silos:
        return Means()
    if terms.secure_aggregation:
        return Means(weight=record.result.weight_sum / silos) if silos >= LEAST_COHORT else Means()
    if not terms.shows_single_silos and silos < LEAST_COHORT:
        return Means()
    summaries = [update.summary for update in record.updates]
    told = not terms.record_level
    return Means(
        loss_reduction=fmean(it.loss_reduction for it in summaries),
        loss_first=fmean(it.loss_first for it in summaries) if told else None,
        loss_last=fmean(it.loss_last for it in summaries) if told else None,
        weight=sum(item.weight for item in record.result.weights) / silos,
    )
