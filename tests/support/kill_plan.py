"""The plan that the kill tests run, and who dies where in it.

Models and updates travel in bfloat16, which has more to lose than float32; tests/crash/test_full_disks_and_damage.py
and `make soak` run the same path in float32.

A model is made in each round and scored in rounds 0, 4, 8, 12, 16 and 18; a silo has its model already in the round
after a score, so downloads are cut in others. A kill without a round comes wherever its process comes to the point
after the kill before it: a start that is killed again.
"""

from lorica.soak.federation import COORDINATOR, Shape
from tests.support.kill_run import Kill

ROUNDS = 18
CLINIC, INSURER = "clinic-a", "insurer-b"

SHAPE = Shape(
    federation="crash",
    silos=(CLINIC, INSURER),
    size="tiny",
    lines=16,
    dev_lines=2,
    values={
        "schedule.rounds": ROUNDS,
        # What is kept from round to round and must not be lost: master parameters, momentum, residuals, and what silos
        # told of their losses before.
        "wire.model": "bfloat16",
        "wire.update": "bfloat16",
        "aggregation.momentum": 0.9,
        "aggregation.reduction_memory": 0.5,
        "training.epochs": 2,
        "training.batch_size": 8,
        "training.dropout": 0.1,
        "training.schema_in_input": "false",
        "training.max_input_tokens": 48,
        "training.max_output_tokens": 24,
        "evaluation.every": 4,
        "evaluation.batch_size": 1,
    },
)

COORDINATOR_KILLS = (
    Kill(process=COORDINATOR, point="plan-begun"),
    Kill(process=COORDINATOR, point="silo-ready"),
    Kill(process=COORDINATOR, point="evaluation-opened", round=0),
    Kill(process=COORDINATOR, point="round-opened", round=1),
    Kill(process=COORDINATOR, point="mid-download", round=2, nth=5),
    Kill(process=COORDINATOR, point="mid-upload", round=3),
    Kill(process=COORDINATOR, point="evaluation-accepted", round=4),
    Kill(process=COORDINATOR, point="spool-durable", round=5),
    Kill(process=COORDINATOR, point="update-accepted", round=6),
    Kill(process=COORDINATOR, point="update-not-acknowledged", round=7),
    Kill(process=COORDINATOR, point="evaluation-closed", round=8),
    Kill(process=COORDINATOR, point="aggregating-entered", round=9),
    Kill(process=COORDINATOR, point="resumed"),
    Kill(process=COORDINATOR, point="mid-aggregation", round=10),
    Kill(process=COORDINATOR, point="model-written", round=11),
    Kill(process=COORDINATOR, point="mid-publication", round=13),
    Kill(process=COORDINATOR, point="model-published", round=14),
    Kill(process=COORDINATOR, point="clearing-spools", round=14),
    Kill(process=COORDINATOR, point="clearing-models", round=15),
    Kill(process=COORDINATOR, point="spools-not-cleared", round=16),
    Kill(process=COORDINATOR, point="round-closed", round=17),
    Kill(process=COORDINATOR, point="plan-finished", round=18),
)

AGENT_KILLS = (
    Kill(process=INSURER, point="mid-evaluation", round=0),
    Kill(process=CLINIC, point="epoch-done", round=1),
    Kill(process=INSURER, point="mid-download", round=2, nth=3),
    Kill(process=CLINIC, point="model-not-named", round=3),
    Kill(process=INSURER, point="score-not-reported", round=4),
    Kill(process=CLINIC, point="update-written", round=5),
    Kill(process=INSURER, point="model-journalled", round=6),
    Kill(process=CLINIC, point="update-journalled", round=7),
    Kill(process=INSURER, point="score-not-journalled", round=8),
    Kill(process=CLINIC, point="mid-upload", round=9, nth=4),
    Kill(process=INSURER, point="last-chunk-sent", round=10),
    Kill(process=CLINIC, point="receipt-not-journalled", round=11),
    Kill(process=INSURER, point="outcome-journalled", round=12, nth=2),
    Kill(process=CLINIC, point="mid-training", round=13, nth=2),
    Kill(process=CLINIC, point="plan-journalled"),
    Kill(process=INSURER, point="checkpoint-written", round=14),
    Kill(process=CLINIC, point="residual-not-named", round=15),
    Kill(process=INSURER, point="residual-named", round=16),
)
