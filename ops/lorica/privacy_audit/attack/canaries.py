"""Canaries: records each of which has a word of its own, so that its gradient
is nearly at right angles to every other one's.

The attacker knows everything but the coins: the records, the model, the noise's deviation, every released model. What a
step released is then a known sum, one vector for each canary that is in, and noise, and least squares tells the parts
apart. The words' embeddings are small, so that most of a canary's gradient is in the row of its own word.

The local optimizer is the real AdamW. max_grad_norm is chosen so small, and the learning rate so large, that AdamW's
own epsilon rules its denominator: a step is then linear in the gradient to 1 part in 10^3 and the attacker takes it
back (AdamWReader). Training moves the model so little that gradients at the first model hold for all.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from lorica.privacy_audit.attack.bound import Guesses
from lorica.privacy_audit.conformity.audited_plan import END, SPECIAL
from lorica_security.errors import ConfigurationError
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.model.model import T5, bind, layout_of
from silo_wire.plans.sections.training import TrainingSection

_EMBEDDING_SCALE = 0.02
_SHAPE = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,  # nosec B105  # a number of a vocabulary
}
_ADAMW_EPSILON, _BETA = 1e-8, 0.9  # torch.optim.AdamW's defaults
_STEP = 1e-13
"""max_grad_norm over the expected batch size: what one canary adds to a step's gradient at most."""
_MOST_EVIDENCE = 20.0
_LEAST_NOISE = 1e-3

Vector = NDArray[np.float64]
Truths = NDArray[np.bool_]


def canary_model(canaries: int, seed: int) -> T5:
    """A T5 whose vocabulary is the special tokens and a word for each canary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: T5 = T5ForConditionalGeneration(T5Config.from_dict({**_SHAPE, "vocab_size": SPECIAL + canaries}))
    with torch.no_grad():
        model.shared.weight.mul_(_EMBEDDING_SCALE)
    model.eval()
    return model


def trained(model: T5) -> tuple[nn.Parameter, ...]:
    """All parameters, in the order in which a silo's updates have them."""
    return bind(model, layout_of(model)).tensors


def coins(canaries: int, seed: int) -> Truths:
    """Which of the canaries are in: reproducible, since nothing but an attack depends on them."""
    generator = torch.Generator().manual_seed(seed)
    drawn: Truths = (torch.rand(canaries, generator=generator) < 0.5).numpy()
    return drawn


def examples_of(included: Truths) -> EncodedExamples:
    """Each canary that is in asks its word and is answered with it."""
    rows = tuple(np.array([SPECIAL + canary, END], dtype=np.int32) for canary in np.flatnonzero(included))
    return EncodedExamples(inputs=rows, targets=rows, inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def section_for(expected_batch_size: int) -> TrainingSection:
    """`[training]` under which AdamW is linear, and the model hardly moves: what a canary adds stays what it was at the
    first model."""
    return TrainingSection(
        optimizer="adamw",
        learning_rate=0.1,
        weight_decay=0.0,
        batch_size=128,
        max_grad_norm=_STEP * expected_batch_size,
        dropout=0.0,
        schema_in_input=False,
    )


class AdamWReader:
    """The gradients that AdamW was given, from the models that it made; for sections of `section_for`."""

    def __init__(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._mean: Vector | None = None
        self._steps = 0

    def read(self, delta: Vector) -> Vector:
        """Of the next step, the gradient, given the difference that the step made."""
        self._steps += 1
        before = np.zeros_like(delta) if self._mean is None else self._mean
        self._mean = -delta * (_ADAMW_EPSILON / self._learning_rate) * (1 - _BETA**self._steps)
        gradient: Vector = (self._mean - _BETA * before) / (1 - _BETA)
        return gradient


@dataclass(frozen=True, slots=True)
class Decoder:
    """Tells from a sum of clipped gradients, and noise, how far each
    canary is in it, and how far noise takes that away.
    """

    directions: Vector
    """Shape (canaries, parameters): what each canary adds to a sum, over max_grad_norm."""
    inverse: Vector
    """Of the matrix of the directions' inner products."""

    @classmethod
    def of(cls, model: T5, canaries: int) -> "Decoder":
        """From the gradient of each canary on its own, by transformers' own forward pass and loss."""
        parameters = trained(model)
        size = sum(parameter.numel() for parameter in parameters)
        directions: Vector = np.empty((canaries, size))
        for canary in range(canaries):
            tokens = torch.tensor([[SPECIAL + canary, END]])
            loss = model(input_ids=tokens, labels=tokens).loss
            gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)]).double()
            directions[canary] = (gradient / gradient.norm()).numpy()
        products: Vector = directions @ directions.T
        if np.linalg.cond(products) > 1e8:
            raise ConfigurationError(f"{canaries} canaries cannot be told apart in this model: use fewer")
        return cls(directions, np.linalg.inv(products).astype(np.float64))

    def estimates(self, total: Vector, weight: "Weight | None" = None) -> tuple[Vector, Vector]:
        """Of a sum over max_grad_norm, shape (parameters,): how far each canary is in it, and the deviation of that.

        The noise is measured: it is what no sum of canaries explains. So the attacker need not trust any plan.
        """
        found = self.inverse @ (self.directions @ total)
        rest = total - found @ self.directions
        noise = float(np.linalg.norm(rest)) / math.sqrt(self.directions.shape[1] - len(found))
        variance = max(noise, _LEAST_NOISE) ** 2
        variances = variance * self.inverse.diagonal()
        if weight is not None:  # one equation more, of which all canaries have a part: recursive least squares
            shared = variance * (self.inverse @ weight.parts)
            gain = shared / (float(weight.parts @ shared) + weight.deviation**2)
            found = found + gain * (weight.total - float(weight.parts @ found))
            variances = variances - gain * shared
        return found, np.sqrt(variances)


@dataclass(frozen=True, slots=True)
class Weight:
    """A noised scaled loss reduction: `total` is the sum of the `parts`,
    shape (canaries,), of those that are in, and noise.
    """

    parts: Vector
    total: float
    deviation: float


def evidence(estimate: Vector, deviation: Vector, sampling_rate: float) -> Vector:
    """Of one step, the logarithm of how much more probable an estimate is
    with the canary in the data than without it; no more than _MOST_EVIDENCE either way.

    As models leave the first one, estimates are off by more than their deviation says: no step decides by itself.
    """
    shifted = (2 * estimate - 1) / (2 * deviation**2)
    result: Vector = shifted
    if sampling_rate < 1.0:
        result = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + shifted)
    limited: Vector = np.clip(result, -_MOST_EVIDENCE, _MOST_EVIDENCE)
    return limited


def guess(evidence: Vector, included: Truths, *, made: int, alone: bool = False) -> Guesses:
    """Guess the `made` canaries of which the evidence is clearest, by its sign; abstain on the others."""
    clearest = np.argsort(-np.abs(evidence), kind="stable")[:made]
    right = (evidence > 0.0)[clearest] == included[clearest]
    return Guesses(canaries=len(included), made=made, correct=int(right.sum()), alone=alone)
