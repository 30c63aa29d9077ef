"""The agent's transition table: every pair of phase and event, and the rules that the handlers keep."""

from dataclasses import replace

import pytest

from lorica_security.errors import StateError
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import SurvivorSet, UnmaskRequest
from silo_agent.rounds.as_planned import AsPlanned
from silo_agent.rounds.effects import (
    Activity,
    AnswerMask,
    CancelWork,
    DeclareReadiness,
    DeclareTrained,
    Decline,
    Effect,
    EndMasking,
    FetchModel,
    FetchPlan,
    JournalActivity,
    JournalModel,
    JournalOutcome,
    JournalPlan,
    JournalRoundModel,
    JournalUpdate,
    Outcome,
    RecordRefusal,
    ReportEvaluation,
    RunEvaluation,
    RunTraining,
    UploadUpdate,
)
from silo_agent.rounds.events import (
    Evaluated,
    EvaluationDelivered,
    Event,
    MaskAnswered,
    ModelFetched,
    PauseAsked,
    PlanPrepared,
    PlanRefused,
    ResumeAsked,
    SavedUpdate,
    StopAsked,
    Trained,
    Uploaded,
    WorkFailed,
    WorkUnwanted,
)
from silo_agent.rounds.machine import EVENTS, TABLE, step
from silo_agent.rounds.states import (
    FAILURES_IN_A_ROW,
    PAUSED,
    Agent,
    Answering,
    Collecting,
    Complete,
    Declined,
    Done,
    Evaluating,
    Fetching,
    Holding,
    Idle,
    Phase,
    Preparing,
    Ready,
    Refused,
    Reporting,
    Stopped,
    Training,
    Uploading,
)
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest
from silo_wire.messages import (
    DeclineReason,
    Evaluate,
    Evaluation,
    Finished,
    Mask,
    Prepare,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
    TrainingSummary,
)
from silo_wire.plans.timetable import Timetable

PLAN, OTHER_PLAN = Digest("a1" * 32), Digest("b2" * 32)
MODEL, OTHER_MODEL = Digest("c3" * 32), Digest("d4" * 32)
ALLOWS = AsPlanned(timetable=Timetable(rounds=9, every=1, initial=True, last=True, masked=False), tells_scores=True)
KEY = RoundKey(federation="care", plan=PLAN, round=3, attempt=1)
TRAIN = Train(key=KEY, model=MODEL, seconds_left=60.0)
ATTEMPT = Attempt(federation=FederationName("care"), plan=bytes.fromhex(PLAN), round=3, number=1, id=bytes(32))
MASK = Mask(key=KEY, model=MODEL, seconds_left=60.0, attempt=ATTEMPT)
EVALUATE = Evaluate(key=KEY, model=OTHER_MODEL, seconds_left=60.0)
FINISHED = Finished(plan=PLAN, rounds=3, final_model=OTHER_MODEL, best_model=MODEL)
UPDATE = SavedUpdate(
    key=KEY,
    model=MODEL,
    manifest=Manifest(Digest("e5" * 32), 8, 8, (bytes(32),)),
    summary=TrainingSummary(
        examples=5, loss_max=2.0, loss_min=1.0, loss_first=2.0, loss_last=1.0, optimizer_steps=4, seconds=1.5
    ),
)
HELD = replace(UPDATE, masked=True)
EVALUATION = Evaluation(
    split="dev", examples=4, exact_matches=2, executed=4, execution_matches=3, loss_per_token=0.5, seconds=1.0
)
GATHERING = Standby(StandbyReason.GATHERING)

SAMPLES: dict[str, Event] = {
    "Standby": GATHERING,
    "Prepare": Prepare(PLAN),
    "Train": TRAIN,
    "Mask": MASK,
    "Evaluate": EVALUATE,
    "Finished": FINISHED,
    "PlanPrepared": PlanPrepared(PLAN, ALLOWS),
    "PlanRefused": PlanRefused(plan=PLAN, reason=DeclineReason.POLICY, detail="no", told="no"),
    "ModelFetched": ModelFetched(MODEL),
    "Trained": Trained(UPDATE),
    "Uploaded": Uploaded(KEY),
    "MaskAnswered": MaskAnswered(key=KEY, revealed=False),
    "Evaluated": Evaluated(KEY, EVALUATION),
    "EvaluationDelivered": EvaluationDelivered(KEY),
    "WorkFailed": WorkFailed(reason=DeclineReason.TRAINING_FAILED, detail="line 3 broke", told="broke"),
    "WorkUnwanted": WorkUnwanted("late"),
    "PauseAsked": PauseAsked(),
    "ResumeAsked": ResumeAsked(),
    "StopAsked": StopAsked(),
}
PREPARED = Agent(prepared=PLAN, allows=ALLOWS)
AGENTS: dict[str, Agent] = {
    "Idle": Agent(),
    "Preparing": Agent(phase=Preparing(PLAN)),
    "Ready": replace(PREPARED, phase=Ready(PLAN)),
    "Refused": Agent(phase=Refused(plan=PLAN, reason=DeclineReason.POLICY, detail="no", told="no")),
    "Fetching": replace(PREPARED, phase=Fetching(TRAIN)),
    "Training": replace(PREPARED, phase=Training(TRAIN)),
    "Uploading": replace(PREPARED, phase=Uploading(TRAIN, UPDATE), saved=UPDATE),
    "Holding": replace(PREPARED, phase=Holding(HELD), saved=HELD),
    "Answering": replace(PREPARED, phase=Answering(MASK, HELD), saved=HELD),
    "Evaluating": replace(PREPARED, phase=Evaluating(EVALUATE)),
    "Reporting": replace(PREPARED, phase=Reporting(EVALUATE, EVALUATION)),
    "Done": replace(PREPARED, phase=Done(TRAIN), saved=UPDATE),
    "Declined": replace(
        PREPARED, phase=Declined(order=TRAIN, reason=DeclineReason.TRAINING_FAILED, told="broke"), failures=1
    ),
    "Collecting": replace(PREPARED, phase=Collecting(FINISHED)),
    "Complete": replace(PREPARED, phase=Complete(FINISHED)),
    "Stopped": replace(PREPARED, phase=Stopped()),
}

# Where each event leads from each phase; `-`: refused, nothing changes.
GRID = """
           Standby    Prepare   Train     Mask      Evaluate   Finished   PlanPrepared PlanRefused ModelFetched Trained   Uploaded MaskAnswered Evaluated EvaluationDelivered WorkFailed WorkUnwanted PauseAsked ResumeAsked StopAsked
Idle       Idle       Preparing Preparing Preparing Preparing  Preparing  -            -           -            -         -        -            -         -                   -          -            Idle       Idle        Stopped
Preparing  Preparing  Preparing Preparing Preparing Preparing  Preparing  Ready        Refused     -            -         -        -            -         -                   -          -            Preparing  Preparing   Stopped
Ready      Ready      Ready     Fetching  Declined  Fetching   Collecting -            -           -            -         -        -            -         -                   -          -            Ready      Ready       Stopped
Refused    Refused    Refused   Refused   Refused   Refused    Refused    -            -           -            -         -        -            -         -                   -          -            Refused    Preparing   Stopped
Fetching   Ready      Ready     Fetching  Declined  Fetching   Collecting -            -           Training     -         -        -            -         -                   Declined   Ready        Fetching   Fetching    Stopped
Training   Ready      Ready     Training  Declined  Fetching   Collecting -            -           -            Uploading -        -            -         -                   Declined   Ready        Training   Training    Stopped
Uploading  Uploading  Uploading Uploading Uploading Uploading  Uploading  -            -           -            -         Done     -            -         -                   Declined   Ready        Uploading  Uploading   Stopped
Holding    Ready      Holding   Holding   Answering Fetching   Collecting -            -           -            -         -        -            -         -                   -          -            Holding    Holding     Stopped
Answering  Answering  Answering Answering Answering Answering  Answering  -            -           -            -         -        Holding      -         -                   Declined   Holding      Answering  Answering   Stopped
Evaluating Ready      Ready     Fetching  Declined  Evaluating Collecting -            -           -            -         -        -            Reporting -                   Declined   Ready        Evaluating Evaluating  Stopped
Reporting  Reporting  Reporting Reporting Reporting Reporting  Reporting  -            -           -            -         -        -            -         Done                Declined   Ready        Reporting  Reporting   Stopped
Done       Ready      Done      Uploading Declined  Fetching   Collecting -            -           -            -         -        -            -         -                   -          -            Done       Done        Stopped
Declined   Ready      Ready     Declined  Declined  Fetching   Collecting -            -           -            -         -        -            -         -                   -          -            Declined   Declined    Stopped
Collecting Collecting Ready     Fetching  Declined  Fetching   Collecting -            -           Complete     -         -        -            -         -                   Complete   Complete     Collecting Collecting  Stopped
Complete   Ready      Ready     Fetching  Declined  Fetching   Complete   -            -           -            -         -        -            -         -                   -          -            Complete   Complete    Stopped
Stopped    Stopped    Stopped   Stopped   Stopped   Stopped    Stopped    Stopped      Stopped     Stopped      Stopped   Stopped  Stopped      Stopped   Stopped             Stopped    Stopped      Stopped    Stopped     Stopped
""".strip().splitlines()
PAIRS = [
    (row.split()[0], event, expected)
    for row in GRID[1:]
    for event, expected in zip(GRID[0].split(), row.split()[1:], strict=True)
]


def test_the_grid_names_every_phase_and_every_event() -> None:
    assert {event for _, event, _ in PAIRS} == {kind.__name__ for kind in EVENTS} == set(SAMPLES)
    assert {phase for phase, _, _ in PAIRS} == {kind.__name__ for kind in Phase.__args__} == set(AGENTS)
    assert len(TABLE) == sum(expected != "-" for _, _, expected in PAIRS)


@pytest.mark.parametrize(("phase", "event", "expected"), PAIRS)
def test_every_pair_of_phase_and_event(phase: str, event: str, expected: str) -> None:
    agent = AGENTS[phase]
    if expected == "-":
        with pytest.raises(StateError):
            step(agent, SAMPLES[event])
        return
    after, effects = step(agent, SAMPLES[event])
    assert type(after.phase).__name__ == expected
    kinds = [isinstance(effect, JOURNAL) for effect in effects]
    assert kinds == sorted(kinds, reverse=True), "journal effects come first"
    begun = [effect for effect in effects if isinstance(effect, WORK)]
    assert len(begun) <= 1
    was_at_work = isinstance(agent.phase, AT_WORK)
    if begun and was_at_work and not isinstance(SAMPLES[event], RESULTS):
        assert CancelWork() in effects, "work that is replaced is cancelled"
        assert effects.index(CancelWork()) < effects.index(begun[0])
    if was_at_work and not isinstance(after.phase, AT_WORK) and not isinstance(SAMPLES[event], RESULTS):
        assert CancelWork() in effects, "work that is left is cancelled"


JOURNAL = (JournalRoundModel, JournalActivity, JournalModel, JournalOutcome, JournalPlan, JournalUpdate, RecordRefusal)
WORK = (FetchPlan, FetchModel, RunTraining, UploadUpdate, AnswerMask, RunEvaluation, ReportEvaluation)
AT_WORK = (Preparing, Fetching, Training, Uploading, Answering, Evaluating, Reporting, Collecting)
RESULTS = (
    *(PlanPrepared, PlanRefused, ModelFetched, Trained, Uploaded, MaskAnswered, Evaluated),
    *(EvaluationDelivered, WorkFailed, WorkUnwanted),
)


def run(agent: Agent, *events: Event) -> tuple[Agent, list[Effect]]:
    """The agent after all events, and every effect but what is only shown."""
    effects: list[Effect] = []
    for event in events:
        agent, more = step(agent, event)
        effects += [effect for effect in more if not isinstance(effect, JournalActivity)]
    return agent, effects


def test_one_whole_round_from_nothing() -> None:
    agent, effects = run(
        Agent(),
        Prepare(PLAN),
        PlanPrepared(PLAN, ALLOWS),
        GATHERING,
        TRAIN,
        ModelFetched(MODEL),
        Trained(UPDATE),
        Standby(StandbyReason.UPDATE_RECEIVED),
        Uploaded(KEY),
        Standby(StandbyReason.AGGREGATING),
        EVALUATE,
        ModelFetched(OTHER_MODEL),
        Evaluated(KEY, EVALUATION),
        EvaluationDelivered(KEY),
        FINISHED,
        ModelFetched(MODEL),
    )
    assert agent == Agent(
        phase=Complete(FINISHED), prepared=PLAN, allows=ALLOWS, saved=UPDATE, models={(PLAN, 3): OTHER_MODEL}
    )
    assert effects == [
        FetchPlan(PLAN),
        JournalPlan(PLAN),
        DeclareReadiness(plan=PLAN, ready=True),
        FetchModel(TRAIN),
        JournalModel(PLAN, MODEL),
        RunTraining(TRAIN),
        JournalUpdate(UPDATE),
        UploadUpdate(UPDATE),
        JournalOutcome(key=KEY, evaluation=False, outcome=Outcome.UPLOADED),
        JournalRoundModel(plan=PLAN, round=3, model=OTHER_MODEL),
        FetchModel(EVALUATE),
        JournalModel(PLAN, OTHER_MODEL),
        RunEvaluation(EVALUATE),
        ReportEvaluation(EVALUATE, EVALUATION),
        JournalOutcome(key=KEY, evaluation=True, outcome=Outcome.EVALUATED),
        FetchModel(FINISHED),
        JournalModel(PLAN, MODEL),
    ]


@pytest.mark.parametrize("phase", ["Fetching", "Training", "Uploading"])
def test_the_same_train_order_again_does_nothing(phase: str) -> None:
    assert step(AGENTS[phase], replace(TRAIN, seconds_left=5.0)) == (AGENTS[phase], ())


@pytest.mark.parametrize("phase", ["Evaluating", "Reporting"])
def test_the_same_evaluate_order_again_does_nothing(phase: str) -> None:
    assert step(AGENTS[phase], replace(EVALUATE, seconds_left=5.0)) == (AGENTS[phase], ())


@pytest.mark.parametrize(
    "reason", [StandbyReason.NOT_IN_COHORT, StandbyReason.AGGREGATING, StandbyReason.GATHERING, StandbyReason.STOPPED]
)
def test_a_round_that_goes_on_without_this_silo_cancels_its_training(reason: StandbyReason) -> None:
    agent, effects = run(AGENTS["Training"], Standby(reason))
    assert CancelWork() in effects
    assert isinstance(effects[0], JournalOutcome)
    assert effects[0].outcome is Outcome.CLOSED
    assert isinstance(agent.phase, Idle if reason is StandbyReason.STOPPED else Ready)


def test_a_new_attempt_replaces_the_training_of_the_old_one() -> None:
    again = replace(TRAIN, key=replace(KEY, attempt=2))
    agent, effects = run(AGENTS["Training"], again)
    assert agent.phase == Fetching(again)
    assert effects[-2:] == [CancelWork(), FetchModel(again)]


def test_an_update_on_disk_is_uploaded_again_and_never_trained_again() -> None:
    agent, effects = run(Agent(saved=UPDATE), TRAIN, PlanPrepared(PLAN, ALLOWS))
    assert agent.phase == Uploading(TRAIN, UPDATE)
    assert effects == [FetchPlan(PLAN), JournalPlan(PLAN), UploadUpdate(UPDATE)]


def test_an_update_of_another_attempt_on_disk_is_no_answer() -> None:
    second = replace(TRAIN, key=replace(KEY, attempt=2))
    agent, _ = run(Agent(saved=UPDATE, prepared=PLAN, allows=ALLOWS, phase=Ready(PLAN)), second)
    assert agent.phase == Fetching(second)


SECOND = replace(TRAIN, key=replace(KEY, attempt=2))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("phase", ["Idle", "Ready", "Done", "Declined", "Training", "Evaluating"])
def test_a_private_update_of_an_earlier_attempt_is_sent_again_and_never_trained_again(phase: str, masked: bool) -> None:
    saved = replace(UPDATE, private=True, masked=masked)
    agent, effects = run(replace(AGENTS[phase], prepared=PLAN, allows=ALLOWS, saved=saved), SECOND)
    again = replace(saved, key=SECOND.key)
    assert agent.saved == again
    assert agent.phase == (Holding(again) if masked else Uploading(SECOND, again))
    assert JournalUpdate(again, made_for=KEY) in effects
    assert effects[-1] == (DeclareTrained(key=SECOND.key, model=MODEL) if masked else UploadUpdate(again))
    assert not any(isinstance(effect, FetchModel | RunTraining) for effect in effects)


@pytest.mark.parametrize(
    ("saved", "order"),
    [
        (replace(UPDATE, private=False), SECOND),
        (replace(UPDATE, private=True), replace(SECOND, model=OTHER_MODEL)),
        (replace(UPDATE, private=True), replace(SECOND, key=replace(KEY, round=4))),
        (replace(UPDATE, private=True, key=replace(KEY, federation="other")), SECOND),
        (replace(UPDATE, private=True, key=replace(KEY, attempt=3)), SECOND),
    ],
    ids=["not-private", "another-model", "another-round", "another-federation", "an-attempt-that-went-back"],
)
def test_no_other_update_is_sent_again(saved: SavedUpdate, order: Train) -> None:
    agent, _ = run(replace(AGENTS["Ready"], saved=saved), order)
    assert agent.phase == Fetching(order)


def test_an_update_that_training_writes_over_is_not_sent_again() -> None:
    """The first model comes back for a third attempt, but its update is no more."""
    other = replace(SECOND, model=OTHER_MODEL)
    third = replace(TRAIN, key=replace(KEY, attempt=3))
    agent, _ = run(
        replace(AGENTS["Ready"], saved=replace(UPDATE, private=True)), other, ModelFetched(OTHER_MODEL), third
    )
    assert (agent.phase, agent.saved) == (Fetching(third), None)


def test_a_second_model_for_one_attempt_is_declined_after_a_restart() -> None:
    other = replace(TRAIN, model=OTHER_MODEL)
    agent, effects = run(Agent(saved=UPDATE, prepared=PLAN, allows=ALLOWS, phase=Ready(PLAN)), other)
    assert isinstance(agent.phase, Declined)
    assert [e.reason for e in effects if isinstance(e, Decline)] == [DeclineReason.INTEGRITY]
    assert not any(isinstance(e, UploadUpdate | FetchModel) for e in effects)


def test_a_second_model_for_one_attempt_is_declined_while_training() -> None:
    agent, effects = run(AGENTS["Training"], replace(TRAIN, model=OTHER_MODEL))
    assert isinstance(agent.phase, Declined)
    assert CancelWork() in effects
    assert [e.reason for e in effects if isinstance(e, Decline)] == [DeclineReason.INTEGRITY]


def test_an_order_for_another_plan_waits_for_that_plans_check() -> None:
    key = replace(KEY, plan=OTHER_PLAN)
    order = replace(TRAIN, key=key)
    agent, effects = run(AGENTS["Ready"], order)
    assert (agent.phase, effects) == (Preparing(OTHER_PLAN, order), [FetchPlan(OTHER_PLAN)])
    refused = PlanRefused(plan=OTHER_PLAN, reason=DeclineReason.POLICY, detail="secret", told="not approved")
    agent, effects = run(agent, refused)
    assert Decline(key=key, reason=DeclineReason.POLICY, detail="not approved") in effects
    assert DeclareReadiness(plan=OTHER_PLAN, ready=False, reason="not approved") in effects
    assert not any(isinstance(e, FetchModel) for e in effects)
    assert run(agent, order)[1] == [Decline(key=key, reason=DeclineReason.POLICY, detail="not approved")]


def test_a_receipt_that_standby_overtakes_still_counts() -> None:
    agent, effects = run(AGENTS["Uploading"], Standby(StandbyReason.AGGREGATING), Uploaded(KEY))
    assert agent.phase == Done(TRAIN)
    assert CancelWork() not in effects


def test_prepare_that_overtakes_the_receipt_declares_readiness_and_lets_the_upload_end() -> None:
    agent, effects = run(AGENTS["Uploading"], Prepare(PLAN), Uploaded(KEY))
    assert agent.phase == Done(TRAIN)
    assert effects[0] == DeclareReadiness(plan=PLAN, ready=True)
    assert CancelWork() not in effects


def test_an_order_that_overtakes_the_receipt_waits_for_it() -> None:
    agent, effects = run(AGENTS["Uploading"], EVALUATE)
    assert effects == []
    assert run(agent, Uploaded(KEY)) == (
        replace(AGENTS["Done"], phase=Fetching(EVALUATE), models={(PLAN, 3): OTHER_MODEL}),
        [
            JournalOutcome(key=KEY, evaluation=False, outcome=Outcome.UPLOADED),
            JournalRoundModel(plan=PLAN, round=3, model=OTHER_MODEL),
            FetchModel(EVALUATE),
        ],
    )
    next_round = replace(TRAIN, key=replace(KEY, round=4))
    agent, _ = run(AGENTS["Reporting"], next_round)
    after, effects = run(agent, EvaluationDelivered(KEY))
    assert (after.phase, effects[-1]) == (Fetching(next_round), FetchModel(next_round))


def test_an_upload_that_came_too_late_goes_on_with_the_order_that_stands() -> None:
    again = replace(TRAIN, key=replace(KEY, attempt=2))
    agent, effects = run(AGENTS["Uploading"], again, WorkUnwanted("attempt 1 is closed"))
    assert agent.phase == Fetching(again)
    assert [e.outcome for e in effects if isinstance(e, JournalOutcome)] == [Outcome.CLOSED]


def test_only_the_newest_order_waits_for_a_delivery() -> None:
    agent, _ = run(AGENTS["Uploading"], EVALUATE, GATHERING)
    assert agent == AGENTS["Uploading"]
    agent, _ = run(AGENTS["Uploading"], EVALUATE, FINISHED, Uploaded(KEY))
    assert agent.phase == Collecting(FINISHED)
    agent, _ = run(AGENTS["Uploading"], Prepare(OTHER_PLAN), Uploaded(KEY))
    assert agent.phase == Preparing(OTHER_PLAN)


def test_an_evaluation_that_is_asked_for_again_is_reported_again_without_work() -> None:
    agent = replace(PREPARED, phase=Done(EVALUATE, EVALUATION))
    after, effects = run(agent, EVALUATE)
    assert (after.phase, effects) == (Reporting(EVALUATE, EVALUATION), [ReportEvaluation(EVALUATE, EVALUATION)])


# ---- pause ----------------------------------------------------------------------------------------------------------


def test_pause_while_ready_is_told_at_once_and_new_rounds_are_declined() -> None:
    agent, effects = run(AGENTS["Ready"], PauseAsked(), TRAIN)
    assert effects[0] == DeclareReadiness(plan=PLAN, ready=False, reason=PAUSED)
    assert Decline(key=KEY, reason=DeclineReason.PAUSED, detail=PAUSED) in effects
    assert isinstance(agent.phase, Declined)


def test_pause_while_training_lets_the_round_end_its_evaluation_included() -> None:
    agent, effects = run(AGENTS["Training"], PauseAsked())
    assert effects == []
    agent, effects = run(agent, Trained(UPDATE), Uploaded(KEY))
    assert effects[-1] == DeclareReadiness(plan=PLAN, ready=False, reason=PAUSED)
    agent, effects = run(agent, Prepare(PLAN), EVALUATE)
    assert agent.phase == Fetching(EVALUATE)
    next_round = replace(TRAIN, key=replace(KEY, round=4))
    agent, effects = run(agent, next_round)
    assert Decline(key=next_round.key, reason=DeclineReason.PAUSED, detail=PAUSED) in effects


def test_resume_declares_readiness_again() -> None:
    agent, effects = run(AGENTS["Ready"], PauseAsked(), TRAIN, ResumeAsked())
    assert effects[-1] == DeclareReadiness(plan=PLAN, ready=True)
    assert agent == replace(AGENTS["Ready"])


def test_a_paused_agent_prepares_and_says_that_it_is_not_ready() -> None:
    agent, effects = run(Agent(paused=True), Prepare(PLAN), PlanPrepared(PLAN, ALLOWS))
    assert agent.phase == Ready(PLAN)
    assert effects[-1] == DeclareReadiness(plan=PLAN, ready=False, reason=PAUSED)


def test_a_coordinator_that_counts_on_a_paused_silo_hears_it_again() -> None:
    paused = replace(AGENTS["Ready"], paused=True)
    assert run(paused, GATHERING)[1] == [DeclareReadiness(plan=PLAN, ready=False, reason=PAUSED)]


# ---- failures and stopping ------------------------------------------------------------------------------------------


def test_a_silo_that_keeps_failing_withholds_its_readiness_so_that_rounds_do_not_spin() -> None:
    agent, told = AGENTS["Ready"], []
    for attempt in range(1, FAILURES_IN_A_ROW + 1):
        order = replace(TRAIN, key=replace(KEY, attempt=attempt))
        agent, effects = run(
            agent,
            order,
            WorkFailed(reason=DeclineReason.TRAINING_FAILED, detail="loss is nan", told="it failed"),
            Prepare(PLAN),
        )
        told.append([e.ready for e in effects if isinstance(e, DeclareReadiness)][-1])
    assert told == [True, True, False]
    agent, effects = run(agent, ResumeAsked(), Prepare(PLAN))
    assert effects[-1] == DeclareReadiness(plan=PLAN, ready=True)


def test_what_failed_stays_in_the_silo_and_what_is_told_leaves() -> None:
    failed = WorkFailed(reason=DeclineReason.DATA, detail="train.jsonl:3 names Ada", told="data")
    _, effects = run(AGENTS["Training"], failed)
    assert effects == [
        JournalOutcome(key=KEY, evaluation=False, outcome=Outcome.DECLINED, detail="data: train.jsonl:3 names Ada"),
        Decline(key=KEY, reason=DeclineReason.DATA, detail="data"),
    ]


def test_success_forgives_failures() -> None:
    agent, _ = run(replace(AGENTS["Uploading"], failures=2, trouble="x"), Uploaded(KEY))
    assert (agent.failures, agent.trouble) == (0, "")


def test_stopping_while_training_declines_the_round() -> None:
    agent, effects = run(AGENTS["Training"], StopAsked())
    assert agent.phase == Stopped()
    assert CancelWork() in effects
    assert [e.reason for e in effects if isinstance(e, Decline)] == [DeclineReason.STOPPING]


def test_stopping_while_uploading_keeps_the_round_for_the_next_process() -> None:
    agent, effects = run(AGENTS["Uploading"], StopAsked())
    assert (agent.phase, effects) == (Stopped(), [CancelWork()])


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        ("Preparing", PlanPrepared(OTHER_PLAN, ALLOWS)),
        ("Preparing", PlanRefused(plan=OTHER_PLAN, reason=DeclineReason.DATA, detail="x", told="x")),
        ("Fetching", ModelFetched(OTHER_MODEL)),
        ("Collecting", ModelFetched(OTHER_MODEL)),
        ("Training", Trained(replace(UPDATE, key=replace(KEY, attempt=2)))),
        ("Training", Trained(replace(UPDATE, model=OTHER_MODEL))),
        ("Uploading", Uploaded(replace(KEY, round=4))),
        ("Evaluating", Evaluated(replace(KEY, round=4), EVALUATION)),
        ("Reporting", EvaluationDelivered(replace(KEY, round=4))),
    ],
)
def test_a_result_of_other_work_is_refused(phase: str, event: Event) -> None:
    with pytest.raises(StateError):
        step(AGENTS[phase], event)


def test_what_is_shown_changes_with_the_phase_alone() -> None:
    _, effects = step(AGENTS["Ready"], TRAIN)
    assert effects[0] == JournalActivity(Activity.FETCHING, KEY)
    _, effects = step(AGENTS["Ready"], GATHERING)
    assert effects == ()


# --- secure aggregation

SURVIVORS = replace(
    MASK,
    message=SurvivorSet(
        roster=bytes(32), dealings=bytes(32), silos=(SiloName("a"), SiloName("b")), inputs=(bytes(32),) * 2
    ),
)
UNMASK = replace(MASK, message=UnmaskRequest(roster=bytes(32), agreements=()))
AGREED, REVEALED = MaskAnswered(key=KEY, revealed=False), MaskAnswered(key=KEY, revealed=True)
TRAINED = Standby(StandbyReason.TRAINED)
LATER = {
    "a new attempt": replace(TRAIN, key=replace(KEY, attempt=2)),
    "the next round": replace(TRAIN, key=replace(KEY, round=4)),
    "an evaluation": EVALUATE,
    "the end of the plan": FINISHED,
    "a new gathering": GATHERING,
    "a round without this silo": Standby(StandbyReason.NOT_IN_COHORT),
    "a stop": Standby(StandbyReason.STOPPED),
    "another plan": Prepare(OTHER_PLAN),
}


def test_a_whole_masked_round_sends_nothing_but_answers() -> None:
    agent, effects = run(
        replace(PREPARED, phase=Training(TRAIN)),
        Trained(HELD),
        TRAINED,
        MASK,
        AGREED,
        SURVIVORS,
        AGREED,
        UNMASK,
        REVEALED,
    )
    assert agent == replace(PREPARED, phase=Done(UNMASK), saved=HELD)
    assert effects == [
        JournalUpdate(HELD),
        DeclareTrained(key=KEY, model=MODEL),
        AnswerMask(MASK, HELD),
        AnswerMask(SURVIVORS, HELD),
        AnswerMask(UNMASK, HELD),
        JournalOutcome(key=KEY, evaluation=False, outcome=Outcome.UPLOADED),
        EndMasking(KEY),
    ]


@pytest.mark.parametrize("order", LATER.values(), ids=LATER.keys())
@pytest.mark.parametrize("phase", ["Holding", "Answering"])
def test_what_masking_left_is_erased_when_the_attempt_is_over(phase: str, order: Event) -> None:
    events = [order] if phase == "Holding" else [order, AGREED]  # an answer is seen through
    _, effects = run(AGENTS[phase], *events)
    assert effects.count(EndMasking(KEY)) == 1


@pytest.mark.parametrize("failed", [WorkFailed(reason=DeclineReason.POLICY, detail="min_cohort", told="min_cohort")])
def test_what_masking_left_is_erased_when_this_silo_refuses(failed: WorkFailed) -> None:
    agent, effects = run(AGENTS["Answering"], failed)
    assert isinstance(agent.phase, Declined)
    assert EndMasking(KEY) in effects
    assert Decline(key=KEY, reason=DeclineReason.POLICY, detail="min_cohort") in effects
    again, effects = run(agent, MASK)
    assert again == agent, "a refusal stands"
    assert effects == [Decline(key=KEY, reason=DeclineReason.POLICY, detail="min_cohort")]


@pytest.mark.parametrize("reason", [StandbyReason.TRAINED, StandbyReason.UPDATE_RECEIVED, StandbyReason.AGGREGATING])
@pytest.mark.parametrize("phase", ["Holding", "Answering"])
def test_waiting_for_the_others_erases_nothing(phase: str, reason: StandbyReason) -> None:
    agent, effects = run(AGENTS[phase], Standby(reason))
    assert (agent, effects) == (AGENTS[phase], [])


def test_the_next_step_waits_until_the_answer_that_it_overtook_is_delivered() -> None:
    agent, effects = run(AGENTS["Answering"], SURVIVORS)
    assert (agent.phase, effects) == (Answering(MASK, HELD, SURVIVORS), [])
    agent, effects = run(agent, AGREED)
    assert (agent.phase, effects) == (Answering(SURVIVORS, HELD), [AnswerMask(SURVIVORS, HELD)])


def test_a_restarted_agent_goes_on_with_the_attempt_under_way() -> None:
    """The coordinator has it prepare first: it counts as connected anew."""
    agent, effects = run(Agent(phase=Holding(HELD), saved=HELD), Prepare(PLAN), PlanPrepared(PLAN, ALLOWS), MASK)
    assert agent.phase == Answering(MASK, HELD)
    assert effects == [
        FetchPlan(PLAN),
        JournalPlan(PLAN),
        DeclareReadiness(plan=PLAN, ready=True),
        AnswerMask(MASK, HELD),
    ]
    at_once, effects = run(Agent(phase=Holding(HELD), saved=HELD), SURVIVORS, PlanPrepared(PLAN, ALLOWS))
    assert at_once.phase == Answering(SURVIVORS, HELD)
    assert EndMasking(KEY) not in effects


def test_a_restarted_agent_erases_an_attempt_that_is_over() -> None:
    for order in LATER.values():
        _, effects = run(
            Agent(phase=Holding(HELD), saved=HELD), order, *([PlanPrepared(PLAN, ALLOWS)] if order == FINISHED else [])
        )
        assert effects.count(EndMasking(KEY)) == 1, order


def test_an_agent_that_trained_before_its_restart_says_so_and_does_not_train_again() -> None:
    agent, effects = run(Agent(saved=HELD), TRAIN, PlanPrepared(PLAN, ALLOWS))
    assert agent.phase == Holding(HELD)
    assert effects[-1] == DeclareTrained(key=KEY, model=MODEL)
    assert not any(isinstance(effect, RunTraining | UploadUpdate) for effect in effects)


def test_masks_for_a_delta_that_is_not_here_are_declined() -> None:
    for saved in (None, UPDATE, replace(HELD, key=replace(KEY, round=2))):
        agent, effects = run(replace(PREPARED, phase=Ready(PLAN), saved=saved), MASK)
        assert isinstance(agent.phase, Declined)
        assert any(isinstance(effect, Decline) for effect in effects)


def test_masks_over_another_model_than_was_trained_from_are_declined() -> None:
    agent, effects = run(AGENTS["Holding"], replace(MASK, model=OTHER_MODEL))
    assert isinstance(agent.phase, Declined)
    assert agent.phase.reason is DeclineReason.INTEGRITY
    assert EndMasking(KEY) in effects


@pytest.mark.parametrize(
    ("agent", "order"),
    [
        (AGENTS["Training"], replace(TRAIN, model=OTHER_MODEL)),
        (AGENTS["Holding"], replace(TRAIN, model=OTHER_MODEL)),
        (AGENTS["Holding"], replace(MASK, model=OTHER_MODEL)),
        (Agent(phase=Preparing(PLAN, TRAIN)), replace(TRAIN, model=OTHER_MODEL)),
        (replace(PREPARED, phase=Ready(PLAN), saved=UPDATE), replace(TRAIN, model=OTHER_MODEL)),
    ],
)
def test_a_second_model_for_one_attempt_is_recorded_as_a_refusal(agent: Agent, order: Train | Mask) -> None:
    agent, effects = run(agent, order)
    (refusal,) = (effect for effect in effects if isinstance(effect, RecordRefusal))
    assert refusal.rule == "one_model"
    assert OTHER_MODEL in refusal.detail
    _, again = run(agent, order)
    assert not any(isinstance(effect, RecordRefusal) for effect in again), "once"


def test_a_second_model_erases_what_masking_left_while_the_plan_is_looked_at_again() -> None:
    restarted = Agent(phase=Preparing(PLAN, TRAIN, HELD), saved=HELD)
    _, effects = run(restarted, replace(TRAIN, model=OTHER_MODEL))
    assert EndMasking(KEY) in effects


def test_a_plan_that_policy_refused_is_looked_at_again_when_its_people_say_so() -> None:
    agent, effects = run(AGENTS["Refused"], ResumeAsked(), PlanPrepared(PLAN, ALLOWS))
    assert agent.phase == Ready(PLAN)
    assert effects[0] == FetchPlan(PLAN)
    assert effects[-1] == DeclareReadiness(plan=PLAN, ready=True)


def test_a_stale_step_leaves_the_attempt_as_it_is() -> None:
    agent, effects = run(AGENTS["Answering"], WorkUnwanted("of an earlier roster"))
    assert (agent.phase, effects) == (Holding(HELD), [])
