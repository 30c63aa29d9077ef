"""The ClientApp: adds the silo's constant to what it was sent, and sends that back."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .constant_work import step

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    constant = step(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    tensors = message.content["arrays"].to_numpy_ndarrays(keep_input=False)
    for tensor in tensors:
        tensor += constant
    content = RecordDict(
        {"arrays": ArrayRecord(tensors, keep_input=False), "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content=content, reply_to=message)
