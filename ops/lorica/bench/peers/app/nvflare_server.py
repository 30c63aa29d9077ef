"""The server's persistor: it makes the first model, and FedAvg hands it the new one as each round ends.

Nothing is written.
"""

from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor

from .constant_work import difference, initial, mark, read_layout


class ConstantPersistor(ModelPersistor):
    def __init__(self, layout: str, marks: str, rounds: int) -> None:
        super().__init__()
        self.layout, self.marks, self.rounds = layout, marks, rounds
        self.done = 0

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        model = make_model_learnable(dict(initial(read_layout(self.layout))), {})
        mark(self.marks, "round", 0)
        return model

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        self.done += 1
        mark(self.marks, "round", self.done)
        if self.done == self.rounds:
            tensors: dict[str, Any] = model[ModelLearnableKey.WEIGHTS]
            layout = read_layout(self.layout)
            mark(self.marks, "end", difference(layout, (tensors[name] for name, _ in layout), self.rounds))
