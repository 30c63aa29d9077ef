"""Masked rounds in the round machine, with real silo machines: what opens, closes, is abandoned, and who is left
out."""

from dataclasses import replace

import numpy as np
import pytest

from lorica_coordinator.edges.database.state_json import STATE_VERSION, journal_of, state_from_json, state_to_json
from lorica_coordinator.rounds.cohorts.whole_groups import awaited_groups
from lorica_coordinator.rounds.effects import (
    Aggregate,
    DiscardUpdates,
    EvaluationAccepted,
    EvaluationClosed,
    MaskedAccepted,
    ModelMade,
    OpenMasking,
    RetainModels,
    RoundAbandoned,
    RoundClosed,
    SiloDropped,
)
from lorica_coordinator.rounds.events import (
    AggregationFailed,
    DeadlinePassed,
    MaskAnswered,
    PlanStopped,
    Resumed,
    SiloLeft,
)
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import waiting_for
from lorica_coordinator.rounds.phases.masking import check_may_send_masked
from lorica_coordinator.rounds.states import (
    Aggregating,
    Barred,
    Collecting,
    Finished,
    Gathering,
    Idle,
    Masking,
    State,
    Stopped,
    course_of,
)
from lorica_coordinator.rounds.updates import Outcome
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_coordinator.service.views.round_rows import as_they_stand
from lorica_security.errors import Conflict, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from lorica_security.secure_aggregation.messages import Complaint, MaskedInput, signed
from silo_wire.canonical import Digest, digest_of
from silo_wire.messages import Mask, Standby, StandbyReason
from tests.support.masked_rounds import SILOS, D, MaskedRounds
from tests.support.rounds import (
    INITIAL,
    T0,
    A,
    B,
    C,
    after,
    aggregated,
    committed,
    declined,
    mask_answered,
    masking_opened,
    model_after,
    ready,
    regrouped,
    revoked,
    started,
    trained,
)
from tests.support.secagg_federation import SIZES, identity_key, public_key


def opened(**terms: object) -> MaskedRounds:
    rounds = MaskedRounds(**terms)
    rounds.train()
    rounds.open()
    return rounds


def stored(state: State) -> State:
    """As a restarted coordinator reads it."""
    kept = {"version": STATE_VERSION, "phase": state.phase, "text": state_to_json(state, now=0.0)}
    return state_from_json(**kept, journal=journal_of(state), where="test", now=0.0)


# --- from training to the sum


def test_masking_opens_among_those_that_have_trained() -> None:
    rounds = MaskedRounds()
    rounds.train(A, B, C)
    assert isinstance(rounds.state, Collecting)
    assert rounds.order(A) == Standby(StandbyReason.TRAINED)
    rounds.train(D)
    assert isinstance(rounds.state, Masking)
    (command,) = rounds.taken(OpenMasking)
    assert command == OpenMasking(key=rounds.key, model=rounds.state.course.model, silos=SILOS)
    assert rounds.order(A) == Standby(StandbyReason.TRAINED)


def test_a_late_silo_is_dropped_and_the_others_mask() -> None:
    rounds = MaskedRounds()
    rounds.train(A, B, C)
    deadline = rounds.state.deadline  # type: ignore[union-attr]
    rounds.happen(DeadlinePassed(now=deadline, deadline=deadline))
    assert isinstance(rounds.state, Masking)
    assert rounds.state.silos == (A, B, C)
    assert [drop.silo for drop in rounds.taken(SiloDropped)] == [D]
    assert rounds.order(D) == Standby(StandbyReason.NOT_IN_COHORT)
    rounds.refused(trained(D, rounds.key), WrongTime)


def test_below_the_quorum_nothing_is_masked() -> None:
    rounds = MaskedRounds()
    rounds.train(A, B)
    deadline = rounds.state.deadline  # type: ignore[union-attr]
    rounds.happen(DeadlinePassed(now=deadline, deadline=deadline))
    assert isinstance(rounds.state, Collecting), "all are ready: the next attempt opens at once"
    assert rounds.state.attempt == 2
    assert rounds.taken(OpenMasking) == []


def test_a_whole_masked_round_gives_the_sum_of_what_was_encoded() -> None:
    rounds = opened()
    rounds.run()
    assert isinstance(rounds.state, Aggregating)
    (command,) = rounds.taken(Aggregate)
    assert command.masked is not None
    assert command.masked.silos == SILOS
    total = sum((rounds.silos[name].masked for name in SILOS), start=np.zeros(sum(SIZES) + EXTRA_WORDS, dtype="<u4"))
    unmask = command.masked.attempt.unmask()
    unmask.masks.apply(total, 0, mask_stream.Workspace())
    expected = sum(
        (rounds.silos[name].encoded for name in SILOS), start=np.zeros(sum(SIZES) + EXTRA_WORDS, dtype="<u4")
    )
    assert (total == expected).all()
    accepted = rounds.taken(MaskedAccepted)
    assert [item.vector.silo for item in accepted] == list(SILOS)
    assert [item.vector for item in accepted] == list(command.masked.vectors)
    assert all(len(item.signature) == 64 for item in accepted)


def test_the_sum_becomes_the_model_and_nobody_is_asked_for_scores() -> None:
    rounds = opened(evaluate_every=1)
    rounds.run()
    rounds.happen(aggregated(rounds.key, silos=()))
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.state.course.model) == (2, model_after(1))
    (closed,) = rounds.taken(RoundClosed)
    assert closed.updates == ()
    assert rounds.state.course.included == (), "no update of a single silo is known"


# --- scores


def scored(right: int, *, questions: int = 40) -> Scores:
    return Scores(questions=questions, exact_matches=right, executed=10, execution_matches=5, loss=64)


def summed(rounds: MaskedRounds, scores: Scores | None, *, outcome: Outcome = Outcome.APPLIED) -> None:
    """Everybody trains, masks and reveals, and this comes out."""
    if isinstance(rounds.state, Collecting):
        rounds.train()
        rounds.open()
    rounds.run()
    command = rounds.taken(Aggregate)[-1]
    model = model_after(command.key.round) if outcome is Outcome.APPLIED else command.base_model
    told = aggregated(command.key, silos=(), outcome=outcome, model=model)
    rounds.happen(replace(told, result=replace(told.result, scores=scores)))


def test_the_scores_in_a_sum_are_of_the_model_that_the_round_began_with() -> None:
    rounds = MaskedRounds(rounds=3, evaluate_every=1, evaluate_initial=True, evaluate_last=False)
    for right, of in ((3, INITIAL), (9, model_after(1)), (5, model_after(2))):
        summed(rounds, scored(right))
        (closed,) = rounds.taken(EvaluationClosed)
        assert closed.score is not None
        assert (closed.score.model, closed.score.exact_matches, closed.scores) == (of, right, scored(right))
        assert (closed.reports, closed.macro, closed.counted, closed.is_best) == ((), None, True, right != 5)
        assert closed.key.round == (0 if of == INITIAL else closed.score.round)
    course = course_of(rounds.state)
    assert course is not None
    assert course.best_model == model_after(1), "the best of what was scored, not the newest"
    assert rounds.taken(EvaluationAccepted) == []
    retained = rounds.taken(RetainModels)[-1]
    assert retained.models == {model_after(1), model_after(3)}


def test_at_other_times_than_the_plans_scores_are_not_even_looked_at() -> None:
    rounds = MaskedRounds(rounds=4, evaluate_every=2, evaluate_last=False)
    for round_number in (1, 2, 3, 4):
        summed(rounds, scored(1))
        assert len(rounds.taken(EvaluationClosed)) == (round_number == 3), "the second model's, and none's else"
    assert isinstance(rounds.state, Collecting), "the fourth model is due as well: a closing round scores it"


def test_the_last_model_is_scored_in_a_closing_round_in_which_nobody_trains() -> None:
    rounds = MaskedRounds(rounds=1, evaluate_last=True)
    summed(rounds, None)
    assert rounds.taken(EvaluationClosed) == []
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.order(A).model) == (2, model_after(1))
    rounds.train()
    (opening,) = [it for it in rounds.taken(OpenMasking) if it.key.round == 2]
    assert opening.closing
    rounds.open()
    rounds.run()
    (command,) = [it for it in rounds.taken(Aggregate) if it.key.round == 2]
    assert command.closing
    told = aggregated(command.key, silos=(), outcome=Outcome.SCORED, model=model_after(1))
    rounds.happen(replace(told, result=replace(told.result, scores=scored(7))))
    assert isinstance(rounds.state, Finished)
    assert rounds.state.course.model == rounds.state.course.best_model == model_after(1)
    (closed,) = rounds.taken(EvaluationClosed)
    assert (closed.key.round, closed.scores) == (1, scored(7))
    assert [made.round for made in rounds.taken(ModelMade)] == [0, 1]


@pytest.mark.parametrize("told", [None, NO_SCORES])
def test_without_scores_no_model_is_the_best(told: Scores | None) -> None:
    """Everybody withheld them, or somebody lied so that they contradict each other."""
    rounds = MaskedRounds(rounds=2, evaluate_every=1, evaluate_initial=True, evaluate_last=False)
    summed(rounds, told)
    (closed,) = rounds.taken(EvaluationClosed)
    assert (closed.score, closed.counted, closed.is_best) == (None, False, False)
    course = course_of(rounds.state)
    assert course is not None
    assert course.best_model == course.model == model_after(1)


def test_a_sum_over_fewer_than_the_quorum_makes_no_model_the_best() -> None:
    rounds = MaskedRounds(rounds=2, evaluate_initial=True, min_silos=4)
    rounds.train()
    rounds.open()
    rounds.until("masked input")
    silent(rounds, D)
    summed(rounds, scored(30))
    (closed,) = rounds.taken(EvaluationClosed)
    assert (closed.counted, closed.is_best) == (False, False)
    assert closed.score is not None


def test_each_silo_is_asked_for_what_its_phase_needs_and_then_waits() -> None:
    rounds = opened()
    for phase in ("advertise keys", "share keys", "masked input", "consistency check", "unmasking"):
        assert rounds.phase == phase
        assert all(isinstance(rounds.order(name), Mask) for name in SILOS)
        rounds.answer(A)
        assert rounds.order(A) == Standby(StandbyReason.UPDATE_RECEIVED)
        if phase != "unmasking":
            rounds.answer(B, C, D)
    (late,) = rounds.answers_of(D)
    rounds.answer(B, C)
    assert isinstance(rounds.state, Aggregating), "three reveals are enough for four silos"
    before = rounds.state
    rounds.happen(MaskAnswered(now=T0, key=rounds.key, answer=late))
    assert rounds.state == before
    rounds.refused(
        MaskAnswered(now=T0, key=rounds.key, answer=signed(mask_answered(A).answer, identity_key(A))), WrongTime
    )


def test_each_phase_has_the_deadline_anew() -> None:
    rounds = opened()
    for later, phase in enumerate(("share keys", "masked input"), start=1):
        rounds.now = T0 + 10 * later
        rounds.until(phase)
        assert rounds.state.deadline == rounds.now + 30.0  # type: ignore[union-attr]


# --- silence, refusal, and what follows


def silent(rounds: MaskedRounds, *names: SiloName) -> None:
    """All but these answer, then the phase's deadline passes."""
    rounds.answer(*(name for name in SILOS if name not in names and isinstance(rounds.order(name), Mask)))
    deadline = rounds.state.deadline  # type: ignore[union-attr]
    rounds.now = deadline
    rounds.happen(DeadlinePassed(now=deadline, deadline=deadline))


@pytest.mark.parametrize("phase", ["advertise keys", "share keys", "masked input", "consistency check", "unmasking"])
def test_one_silent_silo_does_not_keep_the_others_from_their_sum(phase: str) -> None:
    rounds = opened(training_deadline_s=600.0)
    rounds.until(phase)
    if phase == "unmasking":
        rounds.answer(A, B, C)
    else:
        silent(rounds, D)
        assert [(drop.silo, drop.outcome) for drop in rounds.taken(SiloDropped)] == [(D, "late")]
        assert rounds.order(D) == Standby(StandbyReason.NOT_IN_COHORT)
        rounds.run()
    assert isinstance(rounds.state, Aggregating)
    assert rounds.state.masked is not None
    counted = SILOS if phase in ("consistency check", "unmasking") else (A, B, C)
    assert rounds.state.masked.silos == counted


@pytest.mark.parametrize("phase", ["advertise keys", "share keys", "masked input", "consistency check"])
def test_too_few_silos_before_a_share_was_asked_for_have_the_round_tried_again(phase: str) -> None:
    rounds = opened()
    rounds.until(phase)
    silent(rounds, C, D)
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.state.attempt) == (1, 2)
    (abandoned,) = rounds.taken(RoundAbandoned)
    assert (abandoned.key.round, abandoned.key.attempt) == (1, 1)
    assert len(rounds.taken(DiscardUpdates)) == 1


def test_too_few_shares_end_the_round_for_good_since_silos_answer_for_it_once() -> None:
    rounds = opened()
    rounds.until("unmasking")
    silent(rounds, C, D)
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.state.attempt) == (2, 1)
    assert rounds.taken(RoundClosed) == []


def test_a_plan_whose_last_round_cannot_be_unmasked_is_finished() -> None:
    rounds = opened(rounds=1)
    rounds.until("unmasking")
    silent(rounds, C, D)
    assert isinstance(rounds.state, Finished)


def test_a_silo_that_refuses_is_dropped_with_its_reason_and_the_others_go_on() -> None:
    rounds = opened()
    rounds.until("share keys")
    rounds.happen(declined(D, rounds.key))
    (dropped,) = rounds.taken(SiloDropped)
    assert (dropped.silo, dropped.outcome) == (D, "declined")
    rounds.run()
    assert rounds.state.masked.silos == (A, B, C)  # type: ignore[union-attr]
    assert rounds.state.course.barred == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "phase", ["", "advertise keys", "share keys", "masked input", "consistency check", "unmasking"]
)
def test_a_masked_round_survives_the_revocation_of_one_silo_as_a_drop_out(phase: str) -> None:
    rounds = opened() if phase else MaskedRounds()
    if phase:
        rounds.until(phase)
    else:
        rounds.train()
    rounds.happen(revoked(D))
    (dropped,) = rounds.taken(SiloDropped)
    assert (dropped.silo, dropped.outcome, dropped.detail) == (D, "refused", "revoked by the operator")
    if not phase:
        rounds.open(SILOS)
    assert not isinstance(rounds.order(D), Mask)
    rounds.run()
    masked = rounds.state.masked  # type: ignore[union-attr]
    assert masked is not None
    assert masked.silos == (SILOS if phase in ("consistency check", "unmasking") else (A, B, C))
    assert rounds.taken(SiloDropped) == []


def test_a_silo_that_refuses_before_masking_opens_is_not_waited_for() -> None:
    rounds = MaskedRounds()
    rounds.train()
    rounds.happen(declined(D, rounds.key))
    rounds.open(SILOS)
    assert not isinstance(rounds.order(D), Mask)
    rounds.run()
    assert rounds.state.masked.silos == (A, B, C)  # type: ignore[union-attr]


def test_terms_that_do_not_hold_for_the_cohort_abandon_the_attempt_with_their_reason() -> None:
    rounds = MaskedRounds()
    rounds.train()
    rounds.open(colluders=3)
    (abandoned,) = rounds.taken(RoundAbandoned)
    assert "colluders" in abandoned.reason


# --- a malicious silo is left out by name


def forged(rounds: MaskedRounds, name: SiloName) -> None:
    """What `name` would send now, signed by a key that is not its own."""
    for answer in rounds.answers_of(name):
        rounds.happen(MaskAnswered(now=rounds.now, key=rounds.key, answer=signed(answer, identity_key("mallory"))))


def test_a_silo_with_a_false_signature_is_left_out_of_this_round_and_the_next() -> None:
    rounds = opened()
    rounds.until("masked input")
    forged(rounds, D)
    (dropped,) = rounds.taken(SiloDropped)
    assert (dropped.silo, dropped.outcome) == (D, "refused")
    assert dropped.detail.startswith("bad signature")
    secure = rounds.state.secure  # type: ignore[union-attr]
    assert secure is not None
    assert not any(isinstance(event, MaskedInput) and event.silo == D for event in secure.events)
    assert replace(secure, held=None).state == secure.state, "the journal leads to where it stands"
    rounds.run()
    rounds.happen(aggregated(rounds.key, silos=()))
    assert isinstance(rounds.state, Collecting), "the next round does not wait for it"
    assert (rounds.state.round, rounds.state.cohort) == (2, (A, B, C))


def disputed(rounds: MaskedRounds, accuser: SiloName, dealer: SiloName) -> None:
    """The box opens by no key that the accuser could show: it says so, and whether it is true nobody can tell."""
    rounds.train(*rounds.state.cohort)  # type: ignore[union-attr]
    rounds.open()
    rounds.until("masked input")
    roster = rounds.state.secure.state.roster  # type: ignore[union-attr]
    complaint = Complaint(roster=roster.digest, silo=accuser, dealer=dealer, key=bytes(32))
    rounds.happen(MaskAnswered(now=T0, key=rounds.key, answer=signed(complaint, identity_key(accuser))))
    dropped = {drop.silo: drop.detail for drop in rounds.taken(SiloDropped)}
    assert set(dropped) == {accuser, dealer}
    assert all(detail.startswith("disputed") for detail in dropped.values())


@pytest.mark.parametrize("accuses", [True, False], ids=["false complaints", "boxes that do not open"])
def test_a_silo_cannot_stop_the_round_for_ever_by_spoiling_each_attempt(accuses: bool) -> None:
    """Of each dispute one is left out, and who is in all of them, as soon as there are two."""
    rounds = MaskedRounds()
    disputed(rounds, *((D, A) if accuses else (A, D)))
    assert isinstance(rounds.state, Collecting)
    if not accuses:
        assert rounds.state.cohort == (B, C, D)
        disputed(rounds, B, D)
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.state.cohort) == (1, (A, B, C))
    rounds.train(A, B, C)
    rounds.open()
    rounds.run()
    rounds.happen(aggregated(rounds.key, silos=()))
    assert (rounds.state.round, rounds.state.cohort) == (2, (A, B, C)), "nor is it in the next round"
    assert rounds.state.course.barred_in(3) == frozenset()


def test_who_is_left_out_is_waited_for_until_the_operator_says_otherwise() -> None:
    """Three silos are needed, and of three none can be left out."""
    rounds = opened(training_deadline_s=600.0)
    rounds.happen(declined(C, rounds.key))
    rounds.until("masked input")
    forged(rounds, D)
    rounds.run()
    assert isinstance(rounds.state, Gathering)
    rounds.happen(ready(C))
    assert isinstance(rounds.state, Collecting)
    assert rounds.state.cohort == (A, B, C)
    rounds.happen(declined(A, rounds.key))
    assert isinstance(rounds.state, Gathering)
    rounds.happen(replace(started(), terms=rounds.state.course.terms))
    assert isinstance(rounds.state, Gathering)
    assert rounds.state.course.barred_in(1) == frozenset(), "the operator's word lifts it"
    rounds.happen(ready(A))
    assert isinstance(rounds.state, Collecting)
    assert rounds.state.cohort == SILOS


def test_a_silo_that_declines_after_it_was_caught_stays_on_record_for_what_it_did() -> None:
    rounds = opened()
    rounds.until("masked input")
    forged(rounds, D)
    rounds.happen(declined(D, rounds.key))
    assert [(drop.silo, drop.outcome) for drop in rounds.taken(SiloDropped)] == [(D, "refused")]
    assert D not in rounds.state.course.ready  # type: ignore[union-attr]


def test_an_update_in_the_clear_is_not_taken_where_masks_were_agreed() -> None:
    rounds = MaskedRounds()
    rounds.refused(committed(A, rounds.key), WrongTime)
    rounds.train()
    rounds.refused(committed(A, rounds.key), WrongTime)


def test_a_second_and_different_answer_is_refused_and_the_first_counts() -> None:
    rounds = opened()
    (keys,) = rounds.answers_of(A)
    rounds.happen(MaskAnswered(now=T0, key=rounds.key, answer=keys))
    other = signed(replace(keys, mask_key=public_key("another")), identity_key(A))
    rounds.refused(MaskAnswered(now=T0, key=rounds.key, answer=other), Conflict)


def test_a_vector_is_awaited_in_its_phase_alone() -> None:
    rounds = opened()
    with pytest.raises(WrongTime):
        check_may_send_masked(rounds.state, rounds.key, A)
    rounds.until("masked input")
    secure = check_may_send_masked(rounds.state, rounds.key, A)
    assert secure.words == sum(SIZES) + EXTRA_WORDS
    (announced,) = rounds.answers_of(A)
    assert isinstance(announced, MaskedInput)
    assert secure.would_take(announced)
    assert not secure.would_take(replace(announced, signature=bytes(64)))
    rounds.happen(MaskAnswered(now=T0, key=rounds.key, answer=announced))
    with pytest.raises(WrongTime):
        check_may_send_masked(rounds.state, rounds.key, A)


# --- stop, restart


@pytest.mark.parametrize("phase", ["advertise keys", "share keys", "masked input", "consistency check", "unmasking"])
def test_a_restarted_coordinator_goes_on_where_it_was(phase: str) -> None:
    rounds = opened()
    rounds.until(phase)
    rounds.answer(B)
    orders = {name: rounds.order(name) for name in SILOS if isinstance(rounds.order(name), Mask)}
    rounds.state = stored(rounds.state)
    rounds.happen(Resumed(now=T0, population=frozenset(SILOS)))
    rounds.happen(*(ready(name) for name in SILOS))
    assert rounds.phase == phase
    assert {name: rounds.order(name) for name in orders} == orders, "the very same is asked again"
    rounds.run()
    assert rounds.state.masked.silos == SILOS  # type: ignore[union-attr]


def test_a_coordinator_that_was_restarted_before_the_opening_opens_it() -> None:
    rounds = MaskedRounds()
    rounds.train()
    rounds.effects.clear()
    rounds.state = stored(rounds.state)
    rounds.happen(Resumed(now=T0, population=frozenset(SILOS)))
    assert len(rounds.taken(OpenMasking)) == 1
    rounds.open()
    rounds.refused(masking_opened(rounds.key, silos=SILOS), WrongTime)


def test_a_coordinator_that_was_restarted_while_it_unmasked_unmasks_again() -> None:
    rounds = opened()
    rounds.run()
    (command,) = rounds.taken(Aggregate)
    rounds.state = stored(rounds.state)
    rounds.happen(Resumed(now=T0, population=frozenset(SILOS)))
    (again,) = rounds.taken(Aggregate)
    assert again == command
    words = [np.zeros(sum(SIZES) + EXTRA_WORDS, dtype="<u4") for _ in range(2)]
    for of, total in zip((command, again), words, strict=True):
        of.masked.attempt.unmask().masks.apply(total, 0, mask_stream.Workspace())
    assert (words[0] == words[1]).all()


@pytest.mark.parametrize(("phase", "following"), [("masked input", (1, 2)), ("unmasking", (2, 1))])
def test_a_stop_ends_the_attempt_and_the_next_start_goes_on(phase: str, following: tuple[int, int]) -> None:
    rounds = opened()
    rounds.until(phase)
    rounds.happen(PlanStopped(now=T0))
    assert isinstance(rounds.state, Stopped)
    assert (rounds.state.opening.round, rounds.state.opening.attempt) == following
    rounds.happen(replace(started(), terms=rounds.state.course.terms))
    assert isinstance(rounds.state, Collecting)


def test_a_stop_while_the_sum_is_unmasked_keeps_it_for_the_start() -> None:
    rounds = opened()
    rounds.run()
    (command,) = rounds.taken(Aggregate)
    rounds.happen(PlanStopped(now=T0))
    rounds.state = stored(rounds.state)
    rounds.happen(replace(started(), terms=rounds.state.course.terms))  # type: ignore[union-attr]
    assert isinstance(rounds.state, Aggregating)
    assert rounds.taken(Aggregate) == [command]


def test_a_vector_that_was_damaged_after_it_was_counted_costs_the_round() -> None:
    """All vectors of the survivors are needed, and none of them reveals its shares a second time for this round."""
    rounds = opened()
    rounds.run()
    rounds.happen(AggregationFailed(now=T0, key=rounds.key, silo=B, reason="spool is damaged"))
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.state.attempt) == (2, 1)
    assert [(drop.silo, drop.outcome) for drop in rounds.taken(SiloDropped)] == [(B, "refused")]


def test_a_sum_that_cannot_be_used_costs_the_round_and_blames_nobody() -> None:
    rounds = opened()
    rounds.run()
    rounds.happen(AggregationFailed(now=T0, key=rounds.key, silo=None, reason="out of float32's range"))
    assert isinstance(rounds.state, Collecting)
    assert (rounds.state.round, rounds.state.attempt) == (2, 1)
    assert rounds.taken(SiloDropped) == []
    assert rounds.state.course.barred == ()


def test_neither_the_journal_nor_what_it_led_to_is_in_the_states_text() -> None:
    rounds = opened()
    rounds.until("unmasking")
    text = state_to_json(rounds.state, now=0.0)
    assert '"journal":[],"held":null' in text
    assert Digest(rounds.state.course.model) in text  # type: ignore[union-attr]


# --- release groups that lack silos


ALL_FOUR = (A, B, C, D)
MASKED = {"secure_aggregation": True, "masking_deadline_s": 30.0, "min_silos": 3, "evaluate_every": 0}


def gathering(*groups: tuple[SiloName, ...], there: tuple[SiloName, ...], **terms: object) -> State:
    """A masked plan that is started, under these release groups, with some of the silos ready."""
    begun = after(Idle(population=frozenset(SILOS)), regrouped(*groups), started(**{**MASKED, **terms}))
    return after(begun, *(ready(name) for name in there))


def test_no_attempt_opens_from_which_no_sum_can_come_and_the_groups_that_lack_silos_are_named() -> None:
    waits = gathering(ALL_FOUR, there=(A, B, C))
    assert isinstance(waits, Gathering)
    assert waits.deadline is None, "a quorum is ready, and nothing can come of it"
    assert waiting_for(waits) == (
        "3 of 4 enrolled silos ready to train; no masked sum can come out yet: it takes whole release groups, 3 "
        "silos at least, and bank-a,bank-b,clinic-c,clinic-d lacks clinic-d"
    )
    wanted = awaited_groups(waits)
    assert wanted is not None
    assert wanted.absent == (D,)
    assert isinstance(after(waits, ready(D)), Collecting)


def test_an_attempt_opens_at_the_deadline_without_a_group_that_is_not_whole() -> None:
    waits = gathering((A, B, C), (D,), there=(A, B, C))
    assert isinstance(waits, Gathering)
    assert awaited_groups(waits) is None
    assert waits.deadline == T0 + 60.0
    opened = after(waits, DeadlinePassed(now=waits.deadline, deadline=waits.deadline))
    assert isinstance(opened, Collecting)
    gone = after(waits, SiloLeft(now=T0, silo=C), ready(D))
    assert isinstance(gone, Gathering)
    assert gone.deadline is None, "three are ready, of whom two are of a whole group's rest"


def test_other_groups_wake_a_plan_that_waits_for_a_silo_which_is_gone_for_good() -> None:
    waits = after(gathering(ALL_FOUR, there=(A, B, C)), revoked(D))
    assert isinstance(waits, Gathering), "all that are enrolled are ready, and the group is never whole again"
    assert "clinic-d not being enrolled, `coordinator groups propose` says" in waiting_for(waits)
    assert isinstance(after(waits, regrouped((A, B, C))), Collecting)


def test_the_operators_word_wakes_a_plan_whose_group_lacks_a_silo_that_was_left_out() -> None:
    waits = gathering(ALL_FOUR, there=())
    barred = replace(waits.course, barred=(Barred(silo=D, round=2),))  # type: ignore[union-attr]
    waits = after(replace(waits, course=barred), *(ready(name) for name in SILOS))  # type: ignore[type-var]
    assert isinstance(waits, Gathering)
    assert "clinic-d being left out, `coordinator plan start` lets all in again" in waiting_for(waits)
    assert isinstance(after(waits, started(**MASKED)), Collecting)


def test_a_plan_that_asks_for_more_silos_than_all_groups_have_says_so() -> None:
    waits = gathering(ALL_FOUR, there=SILOS, min_survivors=5)
    assert isinstance(waits, Gathering)
    assert "the plan asks for 5 silos at least, and release groups have 4; `coordinator groups propose`" in waiting_for(
        waits
    )


def test_an_attempt_is_given_up_with_the_decline_after_which_no_sum_can_come() -> None:
    opened = gathering(ALL_FOUR, there=SILOS)
    assert isinstance(opened, Collecting)
    waits, effects = step(opened, declined(D, opened.key))
    assert isinstance(waits, Gathering), "three are left, as many as the quorum: they need not train for nothing"
    (abandoned,) = (it for it in effects if isinstance(it, RoundAbandoned))
    assert "lacks clinic-d, declined have clinic-d: training_failed" in abandoned.reason


def test_groups_last_over_a_restart_and_another_plan_and_before_there_are_any_attempts_open() -> None:
    another = replace(started(plan=digest_of(b"another"), **MASKED), leave="first")
    waits = after(stored(gathering(ALL_FOUR, there=(A, B, C))), PlanStopped(now=T0), another)
    kept = after(waits, *(ready(name) for name in (A, B, C)))
    assert isinstance(kept, Gathering)
    assert kept.deadline is None, "the other plan waits for the same group"
    resumed = Resumed(now=T0, population=frozenset(SILOS))
    none = after(waits, resumed, *(ready(name) for name in (A, B, C)))
    assert isinstance(none, Gathering)
    assert none.deadline is not None, "the first release groups are signed while silos train"
    whole = after(waits, replace(resumed, groups=regrouped((A, B, C)).groups), *(ready(name) for name in (A, B, C)))
    assert isinstance(whole, Gathering)
    assert whole.deadline is not None


def test_under_masks_rounds_tell_who_has_trained_and_who_masks_still() -> None:
    rounds = MaskedRounds()
    silos = tuple(SiloRow(silo=silo, outcome="training") for silo in SILOS)
    row = RoundRow(
        round=1,
        attempt=1,
        outcome="running",
        detail="",
        opened_unix_s=T0,
        closed_unix_s=None,
        model=INITIAL,
        weight_fallback=False,
        silos=silos,
        macro_exact_match=None,
        micro_exact_match=None,
    )

    def outcomes(*there: SiloName) -> list[str]:
        shown = as_they_stand(row, rounds.key.plan, rounds.state, there)
        return [silo.outcome for silo in shown.silos]

    rounds.train(*SILOS[:3])
    assert outcomes(*SILOS) == ["trained", "trained", "trained", "training"]
    rounds.train(SILOS[3])
    assert outcomes() == ["trained"] * 4
    rounds.open()
    assert outcomes(*SILOS[:3]) == ["masking", "masking", "masking", "absent"]
    rounds.happen(declined(SILOS[3], rounds.key))
    assert outcomes(*SILOS) == ["masking", "masking", "masking", "no update"]
