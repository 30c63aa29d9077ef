"""A round model crafted in as few chunks as a search finds, so that training tells one silo apart: what which check
makes of it.

One silo alone has a word. The search alters chunks of the model that an honest round made, each in many ways, and
trains four silos by the true trainer: how much of their sum is then the part of the silo with the word? One chunk of it
will do, so a check that draws chunks mostly passes such a model, and a check of all chunks never does.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
import torch

from lorica_security.secure_aggregation.masked_vectors import mask_stream
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.training.data.batches import EncodedExamples
from silo_wire.checkable_round import FalseChunk
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.server_step.server_optimizer import Sgd
from tests.support.evidence import Made, Rounds, Vectors
from tests.support.masked_round import summed
from tests.support.tiny_t5 import random_model, vocabulary_size
from tests.support.undisturbed_training import train_undisturbed

ELEMENTS: Final = 512
"""Of a chunk."""
WORD: Final = 7
VICTIM: Final = 0
SILOS: Final = 4
SECTION = TrainingSection(learning_rate=1e-3, batch_size=4, epochs=2, dropout=0.0, max_grad_norm=1.0)
SERVER = AggregationSection(secure_aggregation=True, max_weight=100.0, weighting="lorar")


def examples(silo: int) -> EncodedExamples:
    generator = torch.Generator().manual_seed(silo)

    def row() -> Any:
        words = torch.randint(WORD + 1, vocabulary_size(), (6,), generator=generator)
        if silo == VICTIM:
            words[2] = WORD
        return torch.cat([words, torch.ones(1, dtype=torch.int64)]).numpy().astype("<i4")

    return EncodedExamples(
        inputs=tuple(row() for _ in range(8)),
        targets=tuple(row() for _ in range(8)),
        inputs_cut=0,
        targets_cut=0,
        targets_with_unknown=0,
    )


@cache
def architecture() -> Any:
    return random_model(dropout_rate=0.0, d_model=16, d_ff=24, num_layers=1, num_heads=2)


def flat() -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in architecture().parameters()])


def victims_share(model: torch.Tensor) -> float:
    """Of the lengths of all parts of the sum, by silos that train from `model`; -1 where training diverges, which a
    silo says."""
    lengths = []
    for silo in range(SILOS):
        trained = copy.deepcopy(architecture())
        torch.nn.utils.vector_to_parameters(model.clone(), trained.parameters())
        try:
            summary = train_undisturbed(
                trained,
                list(trained.parameters()),
                examples(silo),
                SECTION,
                seed=silo,
            )
        except TrainingDiverged:
            return -1.0
        delta = torch.nn.utils.parameters_to_vector(trained.parameters()).detach() - model
        encoded, weight = summed(SERVER, [it.numel() for it in trained.parameters()], delta.numpy(), summary)
        lengths.append(weight * float(np.linalg.norm(encoded)))
    return lengths[VICTIM] / sum(lengths)


@dataclass(frozen=True)
class Crafted:
    model: torch.Tensor
    chunks: tuple[int, ...]
    share: float


def alterations(model: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    """The chunk louder, reversed, or pushed aside."""
    inside = slice(chunk * ELEMENTS, (chunk + 1) * ELEMENTS)
    for factor, by in ((30.0, 0.0), (-3.0, 0.0), (1.0, 1.0)):
        altered = model.clone()
        altered[inside] = altered[inside] * factor + by
        yield altered


def searched(model: torch.Tensor, *, most: int, enough: float) -> Crafted:
    """Greedily, chunk after chunk, until the victim's share is `enough` or `most` chunks are altered."""
    found = Crafted(model, (), victims_share(model))
    while len(found.chunks) < most and found.share < enough:
        candidates = [
            Crafted(altered, (*found.chunks, chunk), victims_share(altered))
            for chunk in range(-(-len(model) // ELEMENTS))
            if chunk not in found.chunks
            for altered in alterations(found.model, chunk)
        ]
        found = max(candidates, key=lambda one: one.share)
    return found


@pytest.fixture(scope="module")
def honest() -> Made:
    rounds = Rounds(optimizer=Sgd(learning_rate=1e-3), sizes=(len(flat()),), chunk_bytes=4 * ELEMENTS)
    rounds.vectors = Vectors(model=flat(), master=flat(), slots={})
    return rounds.next(1)


def test_attack_a_model_altered_in_the_fewest_chunks_is_found_where_all_are_made_again(honest: Made) -> None:
    before = victims_share(honest.after.master)
    assert 0.1 < before < 0.5, "four silos of as many examples"
    crafted = searched(honest.after.master, most=4, enough=2 * before)
    assert crafted.share > 1.5 * before, "the search finds no attack, so it shows nothing"
    assert len(crafted.chunks) <= 3
    honest.check_all()
    false = honest.told(Vectors(model=crafted.model, master=crafted.model, slots=honest.after.slots))
    check = false.check()
    wrong = []
    for chunk in check.chunks:
        workspace = mask_stream.Workspace()
        try:
            check.check(chunk, false.pieces(check, chunk), workspace)
        except FalseChunk:
            wrong.append(chunk)
    assert wrong == sorted(crafted.chunks), "these alone: who draws one of the others passes the model"
