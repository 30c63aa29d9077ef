"""The ClientApp under SecAgg+: adds the silo's constant to what it was sent; flwr's own mod masks it."""

import time
from typing import Any

from flwr.app import Context, Message
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from .constant_work import note, step


class Silo(NumPyClient):
    def __init__(self, constant: Any) -> None:
        self.constant = constant

    def fit(self, parameters: list[Any], config: Any) -> Any:
        for tensor in parameters:
            tensor += self.constant
        return parameters, 1, {}


def make(context: Context) -> Client:
    config = context.node_config
    return Silo(step(int(config["partition-id"]), int(config["num-partitions"]))).to_client()


def measured(message: Message, context: Context, call_next: Any) -> Message:
    """As flwr's mod; notes the CPU seconds of encoding and masking, without those of the training."""
    training = 0.0

    def trained(*arguments: Any) -> Any:
        nonlocal training
        began = time.process_time()
        answer = call_next(*arguments)
        training = time.process_time() - began
        return answer

    stage = message.content.config_records.get(RECORD_KEY_CONFIGS, {}).get(Key.STAGE)
    began = time.process_time()
    answer = secaggplus_mod(message, context, trained)
    if stage == Stage.COLLECT_MASKED_VECTORS:
        note(str(context.run_config["costs"]), "mask", time.process_time() - began - training)
    return answer


app = ClientApp(client_fn=make, mods=[measured])
