"""The ServerApp under SecAgg+: flwr's own workflow around its own FedAvg, which calls back after each round."""

import time
from typing import Any

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from .constant_work import difference, initial, mark, note, read_layout, relative_error

app = ServerApp()

SHARES, THRESHOLD = 1.0, 0.67
"""Of the silos: all hold a share of each secret, two thirds open it, as in Lorica."""
MAX_WEIGHT = 1.0
"""Every silo weighs as much, so that integers are as fine as they can be."""


class Measured(SecAggPlusWorkflow):
    """Notes the CPU seconds of its last stage, in which the masks come off."""

    def __init__(self, costs: str) -> None:
        super().__init__(SHARES, THRESHOLD, max_weight=MAX_WEIGHT)
        self.costs = costs

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        began = time.process_time()
        done: bool = super().unmask_stage(grid, context, state)
        note(self.costs, "unmask", time.process_time() - began)
        return done


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    marks, silos, rounds = str(config["marks"]), int(config["silos"]), int(config["rounds"])
    last: list[Any] = []

    def ended(number: int, tensors: list[Any], _: Any) -> None:
        last[:] = tensors
        mark(marks, "round", number)  # 0 is before the first one

    try:
        layout = read_layout(str(config["layout"]))
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=silos,
            min_available_clients=silos,
            initial_parameters=ndarrays_to_parameters([tensor for _, tensor in initial(layout)]),
            evaluate_fn=ended,
        )
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=rounds), strategy=strategy)
        DefaultWorkflow(fit_workflow=Measured(str(config["costs"])))(grid, legacy)
        found = [tensor.astype("float32") for tensor in last]
        note(str(config["costs"]), "error", relative_error(layout, found, rounds))
        mark(marks, "end", difference(layout, found, rounds))
    except Exception as error:
        mark(marks, "end", f"{type(error).__name__}: {error}")
        raise
