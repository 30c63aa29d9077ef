"""What of a plan's rounds people are shown, where nothing may be told of single silos: outcomes, sums and averages alone.

Whether that is so, the plan's terms say (`PlanTerms.shows_single_silos`). What is taken away here reaches no command, page, metric or
log line; the records keep it, for the round itself needs it.
"""

from dataclasses import replace

from coordinator.rounds.effects import EvaluationClosed, RoundClosed
from coordinator.service.records import RoundRow, SiloRow
from security.secure_aggregation.parameters import LEAST_COHORT


def closed_of_all_silos(record: RoundClosed) -> RoundClosed:
    return replace(record, result=replace(record.result, weights=()))


def evaluation_of_all_silos(record: EvaluationClosed) -> EvaluationClosed:
    """A mean over fewer silos than may be summed under masks is as good as their own scores, and goes as well."""
    if len(record.reports) < LEAST_COHORT:
        return replace(record, reports=(), score=None, macro=None)
    return replace(record, reports=())


def of_all_silos(row: RoundRow) -> RoundRow:
    """Who took part and with what outcome stays, means of the scores as in `evaluation_of_all_silos`."""
    silos = tuple(SiloRow(silo=silo.silo, outcome=silo.outcome, detail=silo.detail) for silo in row.silos)
    if sum(silo.evaluation is not None for silo in row.silos) < LEAST_COHORT:
        return replace(row, silos=silos, macro_exact_match=None, micro_exact_match=None)
    return replace(row, silos=silos)
