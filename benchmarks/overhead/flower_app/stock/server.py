"""The ServerApp: Flower's FedAvg over all nodes, no evaluation."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from stock.workload import network, round_ended

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    torch.set_num_threads(1)
    nodes = int(context.run_config["devices-per-round"])
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number:  # the first call comes before the first round
            round_ended(str(context.run_config["rounds-file"]))
        return None

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=after_round,
    )
