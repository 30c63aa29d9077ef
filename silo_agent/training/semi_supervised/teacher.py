"""The teacher: an exponential moving average of the student, step by step (Tarvainen and Valpola 2017, equation 2 of
FedParsing).

It begins at the round model, as the student does, and never leaves the silo. It is the trained parameters alone,
once more; whatever the round does not train, the two share. With a decay of 1 it stays the round model, with 0 it is
the student itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Teacher:
    """`tensors` are its parameters, one for each of the student's, float32."""

    def __init__(self, student: Sequence[nn.Parameter], *, decay: float) -> None:
        self._student = student
        self._decay = decay
        self.tensors = [parameter.detach().clone() for parameter in student]

    @torch.no_grad()
    def follow(self) -> None:
        """After an optimizer step of the student: decay x teacher + (1 - decay) x student.

        As a step towards the student: with two products, what rounding makes of the two factors adds up over steps.
        """
        if self._decay == 1.0:
            return
        for own, parameter in zip(self.tensors, self._student, strict=True):
            own.lerp_(parameter, 1.0 - self._decay)

    @contextmanager
    def in_its_place(self, model: nn.Module) -> Iterator[None]:
        """Within, `model` computes what the teacher does, without dropout and gradients; then the student is back."""
        with torch.no_grad():
            self._change_places()
            training = model.training
            model.eval()
            try:
                yield
            finally:
                model.train(training)
                self._change_places()

    def _change_places(self) -> None:
        for index, parameter in enumerate(self._student):
            self.tensors[index], parameter.data = parameter.data, self.tensors[index]
