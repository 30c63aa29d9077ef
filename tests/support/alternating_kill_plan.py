"""A plan of adapters that take turns, and who dies where in it; beside kill_plan.py.

B is trained in rounds 1 and 3, A in round 2. What rests has momentum at the coordinator and remainders of rounding at
the silos, which wait over a round that has nothing to do with them, and over the kills in it. Updates travel in int8.
"""

from lorica.soak.federation import COORDINATOR, Shape
from tests.support.kill_plan import CLINIC, INSURER
from tests.support.kill_plan import SHAPE as OF_WHOLE_MODELS
from tests.support.kill_run import Kill

ROUNDS = 3
SHAPE = Shape(
    federation="alternating",
    silos=(CLINIC, INSURER),
    size="micro",
    lines=16,
    dev_lines=2,
    values={
        **OF_WHOLE_MODELS.values,
        "schedule.rounds": ROUNDS,
        "wire.update": "int8",
        "adapters.rank": 4,
        "adapters.train": "alternate",
        "training.learning_rate": 0.01,
        "evaluation.every": 0,
        "evaluation.initial": "false",
        "evaluation.last": "false",
    },
)

KILLS = (
    Kill(process=CLINIC, point="checkpoint-written", round=2),
    Kill(process=INSURER, point="residual-named", round=2),
    Kill(process=COORDINATOR, point="mid-aggregation", round=2),
)
