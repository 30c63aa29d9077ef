"""The ServerApp: flwr's own FedAvg, which calls back after each round."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .constant_work import difference, initial, mark, read_layout

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    marks, silos, rounds = str(config["marks"]), int(config["silos"]), int(config["rounds"])
    try:
        layout = read_layout(str(config["layout"]))
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=silos, min_available_nodes=silos)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord([tensor for _, tensor in initial(layout)], keep_input=False),
            num_rounds=rounds,
            evaluate_fn=lambda number, _: mark(marks, "round", number),  # 0 is before the first one
        )
        mark(marks, "end", difference(layout, (array.numpy() for array in result.arrays.values()), rounds))
    except Exception as error:
        mark(marks, "end", f"{type(error).__name__}: {error}")
        raise
