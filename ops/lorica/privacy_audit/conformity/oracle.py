"""What each record is worth, reckoned without the product: gradients in float64, one
record at a time, clipped by a formula of the audit's own.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from silo_agent.training.model.model import T5, bind, layout_of

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Of records in order, at one model. `gradients` has shape (records,
    parameters); `norms` and `losses` (records,).
    """

    gradients: Vector
    norms: Vector
    losses: Vector

    @classmethod
    def of(
        cls,
        model: T5,
        records: Sequence[tuple[Sequence[int], Sequence[int]]],
        other_views: Sequence[Sequence[Sequence[int]]] = (),
    ) -> "Oracle":
        """By transformers' own forward pass and loss; `records` are the ids of question and answer.

        `other_views` are what further views of the records say in place of their questions, view by view: gradients are
        means over views.
        """
        exact = copy.deepcopy(model).double()
        parameters = bind(exact, layout_of(exact)).tensors
        gradients = np.empty((len(records), sum(parameter.numel() for parameter in parameters)))
        losses = np.empty(len(records))
        for number, (asked, answered) in enumerate(records):
            views = (asked, *(questions[number] for questions in other_views))
            made = []
            for view in views:
                loss = exact(input_ids=torch.tensor([view]), labels=torch.tensor([answered])).loss
                made.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)]).numpy())
                if view is asked:
                    losses[number] = loss.item()
            gradients[number] = np.mean(made, axis=0)
        norms: Vector = np.linalg.norm(gradients, axis=1)
        return cls(gradients, norms, losses)

    def clipped(self, bound: float) -> Vector:
        """Each gradient, shortened to `bound` where it is longer; shape (records, parameters)."""
        clipped: Vector = self.gradients * np.minimum(1.0, bound / self.norms)[:, None]
        return clipped
