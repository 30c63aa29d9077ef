"""The masked plan that the kill tests run, and who dies where in it; beside kill_plan.py.

Several die in one round, one after the other: the same attempt goes on, since nothing of it is drawn anew. Three silos,
which is as few as masks take: nobody can be left out, and each round needs all that was killed.
"""

from lorica.soak.federation import COORDINATOR, Shape
from tests.support.kill_run import Kill

ROUNDS = 8
CLOSING = ROUNDS + 1
"""In which nobody trains and the last model is scored."""
CLINIC, HOSPITAL, INSURER = "clinic-a", "hospital-b", "insurer-c"

SHAPE = Shape(
    federation="masked",
    silos=(CLINIC, HOSPITAL, INSURER),
    size="tiny",
    lines=8,
    dev_lines=2,
    secure=True,
    spot=(INSURER,),
    values={
        "schedule.rounds": ROUNDS,
        "aggregation.momentum": 0.9,
        "aggregation.weighting": "size",  # a single step of training reduces no loss that it could see
        "training.batch_size": 8,
        "training.dropout": 0.1,
        "training.schema_in_input": "false",
        "training.max_input_tokens": 48,
        "training.max_output_tokens": 24,
        "evaluation.every": 3,
        "evaluation.initial": "false",
    },
)

KILLS = (
    Kill(process=COORDINATOR, point="masking-entered", round=1),
    Kill(process=COORDINATOR, point="keys-advertised", round=1),
    Kill(process=CLINIC, point="root-journalled", round=1),
    Kill(process=CLINIC, point="erasing", round=1),
    Kill(process=CLINIC, point="model-not-accepted"),  # of the model of round 1, which its next order names
    Kill(process=COORDINATOR, point="attempt-opened", round=2),
    Kill(process=COORDINATOR, point="keys-not-announced", round=2),
    Kill(process=COORDINATOR, point="keys-shared", round=2),
    Kill(process=INSURER, point="roster-journalled", round=2),
    Kill(process=HOSPITAL, point="boxes-journalled", round=2),
    Kill(process=INSURER, point="erased", round=2),
    Kill(process=COORDINATOR, point="evidence-not-kept", round=2),
    Kill(process=COORDINATOR, point="roster-made", round=3),
    Kill(process=COORDINATOR, point="vector-accepted", round=3),
    Kill(process=CLINIC, point="delivery-journalled", round=3),
    Kill(process=HOSPITAL, point="vector-written", round=3),
    Kill(process=HOSPITAL, point="shares-delivered", round=3),
    Kill(process=INSURER, point="answer-not-marked", round=3),
    Kill(process=HOSPITAL, point="pieces-fetched"),  # of the model of round 3, which its next order names
    Kill(process=COORDINATOR, point="boxes-delivered", round=4),
    Kill(process=COORDINATOR, point="survivors-signed", round=4),
    Kill(process=INSURER, point="vector-journalled", round=4),
    Kill(process=COORDINATOR, point="evidence-kept", round=4),
    Kill(process=CLINIC, point="mid-upload", round=4, nth=4),
    Kill(process=INSURER, point="pieces-fetched"),  # of the model of round 4, in its spot check
    Kill(process=COORDINATOR, point="survivors-fixed", round=5),
    Kill(process=COORDINATOR, point="shares-revealed", round=5),
    Kill(process=HOSPITAL, point="survivors-journalled", round=5),
    Kill(process=CLINIC, point="answer-remembered", round=5),
    Kill(process=COORDINATOR, point="verdict-not-taken", round=6),
    Kill(process=COORDINATOR, point="shares-asked", round=6),
    Kill(process=COORDINATOR, point="mid-unmasking", round=6),
    Kill(process=INSURER, point="shares-journalled", round=6),
    Kill(process=INSURER, point="model-not-accepted"),  # of the model of round 6, after its spot check
    Kill(process=CLINIC, point="verdict-shared"),  # of the model of round 5, which its next order names
    Kill(process=HOSPITAL, point="model-accepted"),  # of the model of round 5, which its next order names
    # A silo whose shares came last may find the next round open when the coordinator is back: no silo's end is here.
    Kill(process=COORDINATOR, point="unmasked", round=7),
    Kill(process=COORDINATOR, point="log-not-cleared", round=7),
    Kill(process=COORDINATOR, point="mid-upload", round=8),
    Kill(process=COORDINATOR, point="spool-durable", round=8),
    Kill(process=COORDINATOR, point="model-published", round=8),
    Kill(process=COORDINATOR, point="vector-accepted", round=CLOSING),
    Kill(process=CLINIC, point="vector-written", round=CLOSING),
)
