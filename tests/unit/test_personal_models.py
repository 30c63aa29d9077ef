"""A silo's own models: what they are trained to, that each is made once, which one answers, and what is refused."""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from lorica_security.errors import ConfigurationError, Conflict, DataError, StateError
from lorica_security.host.process_lock import ProcessLock
from silo_agent.cli import main as agent_main
from silo_agent.composition import _is_loopback
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.edges.personal.own_models import OwnModels
from silo_agent.edges.personal.own_scores import OwnScores, Scored
from silo_agent.edges.personal.rounds_first import RoundsFirst
from silo_agent.rounds.effects import Activity, JournalActivity
from silo_agent.training.model.model import bind, vector_blocks
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.manifest import manifest_of
from tests.support.collected_silo import CollectedSilo
from tests.support.command_line import Done, run_command
from tests.support.federation_peer import FEDERATION
from tests.support.tiny_t5 import random_model
from tests.support.undisturbed_training import train_undisturbed

DITTO = '[personal]\nmethod = "ditto"\nepochs = 2\nlearning_rate = 0.02\nditto_lambda = 0.5\n'


def run(silo: CollectedSilo, *arguments: str) -> Done:
    return run_command(agent_main, *arguments, "--dir", silo.folder.root)


def trained(silo: CollectedSilo, *more: str) -> dict[str, Any]:
    """The models, as the command tells them."""
    done = run(silo, "personal", "train", "--json", *more)
    assert done.code == 0, done.err
    facts: dict[str, Any] = json.loads(done.out)
    return facts


@pytest.fixture
def silo(tmp_path: Path) -> CollectedSilo:
    made = CollectedSilo(tmp_path)
    made.keep(random_model(7))
    return made


# --- what they are trained to -----------------------------------------------------------------------------------------


def by_hand(
    silo: CollectedSilo, start: np.ndarray, goal: Any, *, pulled_to: Sequence[torch.Tensor] | None = None
) -> bytes:
    """What the rounds' own local training makes of `start` under the goal's settings."""
    model = random_model(0)
    bound = bind(model, silo.bundle.layout)
    with torch.no_grad():
        for parameter, (spec, begin) in zip(bound.tensors, silo.bundle.layout.placed(), strict=True):
            parameter.copy_(torch.from_numpy(start[begin : begin + spec.elements].copy()).view(spec.shape))
    train_undisturbed(
        model, list(bound.tensors), goal.examples, goal.section, seed=goal.seed, round_parameters=pulled_to
    )
    return b"".join(vector_blocks(bound))
