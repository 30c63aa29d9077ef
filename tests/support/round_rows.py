"""A round as people are told of it."""

from dataclasses import replace
from typing import Any

from lorica_coordinator.service.records import RoundRow
from silo_wire.canonical import Digest


def applied_round(**changes: Any) -> RoundRow:
    """The first attempt at round 1, which made a model; of no silo and no score, but for `changes`."""
    row = RoundRow(
        round=1,
        attempt=1,
        outcome="applied",
        detail="",
        opened_unix_s=0.0,
        closed_unix_s=1.0,
        model=Digest("a" * 64),
        weight_fallback=False,
        silos=(),
        macro_exact_match=None,
        micro_exact_match=None,
    )
    return replace(row, **changes)
