"""The ClientApp: load, train, answer with the weights."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from stock.workload import EXAMPLES_PER_DEVICE, network, train

app = ClientApp()


@app.train()
def train_device(message: Message, context: Context) -> Message:
    """One device's round."""
    torch.set_num_threads(1)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, str(context.run_config["data"]), int(context.node_config["partition-id"]))
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": EXAMPLES_PER_DEVICE}),
        }
    )
    return Message(content, reply_to=message)
