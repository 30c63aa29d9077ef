"""What the kill tests and the soak compare runs by tells everything apart but times."""

from dataclasses import replace

import pytest

from lorica.soak.comparison import Result, differences
from lorica_coordinator.service.records import MaskedTotals, RoundRow, SiloRow
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation

SCORE = Evaluation(
    split="dev", examples=4, exact_matches=1, executed=0, execution_matches=0, loss_per_token=0.5, seconds=1.0
)
SILO = SiloRow(silo=SiloName("clinic-a"), outcome="committed", examples=8, weight=2.0, share=1.0, evaluation=SCORE)
ROW = RoundRow(
    round=1,
    attempt=1,
    outcome="applied",
    detail="",
    opened_unix_s=1.0,
    closed_unix_s=2.0,
    model=Digest("a" * 64),
    weight_fallback=False,
    silos=(SILO,),
    macro_exact_match=0.25,
    micro_exact_match=0.25,
)
RESULT = Result(plan=Digest("b" * 64), model=Digest("a" * 64), rounds=(ROW,))


def test_times_do_not_tell_runs_apart() -> None:
    later = replace(SILO, evaluation=replace(SCORE, seconds=9.0))
    slower = replace(ROW, opened_unix_s=5.0, closed_unix_s=70.0, silos=(later,))
    assert differences(RESULT, replace(RESULT, rounds=(slower,))) == []


@pytest.mark.parametrize(
    "changed",
    [
        replace(RESULT, plan=Digest("c" * 64)),
        replace(RESULT, model=Digest("c" * 64)),
        replace(RESULT, rounds=()),
        replace(RESULT, rounds=(ROW, replace(ROW, attempt=2))),
        replace(RESULT, rounds=(replace(ROW, model=Digest("c" * 64)),)),
        replace(RESULT, rounds=(replace(ROW, silos=(SILO, SILO)),)),
        replace(RESULT, rounds=(replace(ROW, silos=(replace(SILO, weight=2.5),)),)),
        replace(RESULT, rounds=(replace(ROW, silos=(replace(SILO, evaluation=replace(SCORE, exact_matches=2)),)),)),
    ],
    ids=["plan", "model", "no-round", "second-attempt", "model-of-a-round", "counted-twice", "weight", "score"],
)
def test_anything_else_does(changed: Result) -> None:
    assert len(differences(RESULT, changed)) == 1


MASKED = replace(
    RESULT,
    rounds=(
        replace(
            ROW,
            masked=MaskedTotals(weight_sum=24.0, saturated=0, coordinates=600),
            silos=(SiloRow(silo=SiloName("clinic-a"), outcome="committed", evaluation=SCORE),),
        ),
    ),
)
(MASKED_ROW,) = MASKED.rounds
COMMITTED = MASKED_ROW.silos[0]


def test_masked_runs_with_draws_of_their_own_differ_in_numbers_alone() -> None:
    scored = replace(COMMITTED, evaluation=replace(SCORE, exact_matches=2))
    other = replace(
        MASKED_ROW,
        model=Digest("c" * 64),
        masked=MaskedTotals(weight_sum=25.0, saturated=1, coordinates=600),
        micro_exact_match=0.5,
        silos=(scored,),
    )
    changed = replace(MASKED, model=Digest("c" * 64), rounds=(other,))
    assert differences(MASKED, changed, drawn_anew=True) == []
    assert len(differences(MASKED, changed)) == 2


@pytest.mark.parametrize(
    "changed",
    [
        replace(MASKED, plan=Digest("c" * 64)),
        replace(MASKED, rounds=(replace(MASKED_ROW, attempt=2),)),
        replace(MASKED, rounds=(replace(MASKED_ROW, outcome="zero_weight"),)),
        replace(MASKED, rounds=(replace(MASKED_ROW, masked=None),)),
        replace(MASKED, rounds=(replace(MASKED_ROW, silos=()),)),
        replace(MASKED, rounds=(replace(MASKED_ROW, silos=(replace(COMMITTED, outcome="late"),)),)),
        replace(MASKED, rounds=(replace(MASKED_ROW, silos=(replace(COMMITTED, detail="bad share"),)),)),
    ],
    ids=["plan", "second-attempt", "outcome", "in-the-clear", "nobody", "late", "named"],
)
def test_but_not_in_who_is_in_which_sum(changed: Result) -> None:
    assert differences(MASKED, changed, drawn_anew=True)
