"""A plan in which silos with labels and silos without take turns, and who dies where in it; beside kill_plan.py.

Rounds of odd numbers are of the silo with labels alone, the others of the two without; all scores are of the former. The
coordinator dies within either kind and between the two, in both directions; a silo without labels at a checkpoint,
of which its teacher is a part.
"""

from lorica.soak.federation import COORDINATOR, Shape
from tests.support.kill_plan import SHAPE as OF_WHOLE_MODELS
from tests.support.kill_run import Kill

ROUNDS = 4
LABELLED, WARDS = ("clinic-a",), ("ward-b", "ward-c")

SHAPE = Shape(
    federation="turns",
    silos=(*LABELLED, *WARDS),
    size="micro",
    lines=16,
    dev_lines=2,
    values={
        **OF_WHOLE_MODELS.values,
        "schedule.rounds": ROUNDS,
        "schedule.min_silos": len(WARDS),
        "aggregation.weighting": "equal",
        "aggregation.reduction_memory": 0,
        "aggregation.momentum": 0.0,
        "semi_supervised.unlabelled": '["ward-*"]',
        "semi_supervised.loss": "answer",
        "training.learning_rate": 0.01,
        "training.max_output_tokens": 8,
        "evaluation.every": 2,
        "evaluation.initial": "false",
    },
)

KILLS = (
    Kill(process=COORDINATOR, point="round-opened", round=1),
    Kill(process=COORDINATOR, point="update-not-acknowledged", round=1),
    Kill(process=COORDINATOR, point="round-closed", round=1),
    Kill(process=COORDINATOR, point="update-accepted", round=2),
    Kill(process=COORDINATOR, point="mid-aggregation", round=2),
    Kill(process=COORDINATOR, point="evaluation-closed", round=2),
    Kill(process=COORDINATOR, point="mid-aggregation", round=3),
    Kill(process=WARDS[0], point="checkpoint-written", round=4),
    Kill(process=COORDINATOR, point="model-published", round=4),
)
