"""What counts as a refusal of this silo, under which rule, and which rules there are.

A refusal is what this silo's own checks say of something that the coordinator asks or sends. What the coordinator
answers to this silo's calls is none, nor is trouble with the silo's data, disk or device.
"""

from typing import Final

from lorica_security.errors import (
    AuthenticationError,
    Conflict,
    FalseModel,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    PolicyRefusal,
    WrongTime,
)
from lorica_security.secure_aggregation.model_evidence.evidence import VERIFY
from silo_agent.policy.rules import PolicyRules

PROTOCOL_RULES: Final = (
    *("federation", "trusted_peers", "one_model", "release_groups", "one_sum_per_round"),
    *("ranges", "as_planned", "initial_model", "one_lineage", "masking_memory", "shared_records", "labels"),
)
"""Of secure aggregation, and of what a plan has: nothing in silo.toml turns them off."""
REFUSED_AS: Final[tuple[type[LoricaError], ...]] = (
    Conflict,  # a second, different answer was asked for
    WrongTime,  # of another attempt, or of a step that is over: a replay
    IntegrityError,
    AuthenticationError,
    MalformedMessage,
)
"""Refusals that no rule of its own names."""
TRAINING_RULES: Final = ("processes", "sharded")
"""Of [training] in silo.toml: what this silo's way of training does not do."""
RULES: Final = (*PolicyRules.model_fields, *TRAINING_RULES, *PROTOCOL_RULES, *(kind.__name__ for kind in REFUSED_AS))
"""Every rule that a refusal can name: a closed set."""


def rule_of(error: LoricaError) -> str | None:
    """The rule by which this silo refused; None where it did not refuse."""
    if error.told_by_peer:
        return None
    if isinstance(error, PolicyRefusal):
        return error.rule
    if isinstance(error, FalseModel):
        return VERIFY
    return next((kind.__name__ for kind in REFUSED_AS if isinstance(error, kind)), None)
