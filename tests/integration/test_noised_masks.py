"""Silo-level privacy without a trusted coordinator: a real coordinator and four real agents that noise before they
mask."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.privacy.ledger import Entry
from lorica_security.secure_aggregation.masked_vectors.noise_shares import NoiseShares
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_wire.messages import RoundKey
from tests.integration.test_attacks_on_masked_rounds import rogue_template
from tests.support.coordinator import FederationTemplate
from tests.support.rogue_silos import (
    CLIPPING_NORM,
    LONG_S,
    NOISED,
    NOMINAL_SILOS,
    SILOS,
    WEIGHT_CAP,
    FirstVectorHangs,
    PlayedSilo,
    delta_of,
    honestly,
    played,
    weight_of,
)

__all__ = ["rogue_template"]


async def test_two_rounds_come_out_noised_and_each_silo_has_paid_before_it_uploads(
    rogue_template: FederationTemplate, tmp_path: Path
) -> None:
    paid: list[tuple[RoundKey, tuple[Entry, ...]]] = []

    async def looking(silo: PlayedSilo, key: RoundKey, message: object) -> None:
        if isinstance(message, MaskedInput):
            paid.append((key, silo.privacy.entries()))
        await honestly(silo, key, message)

    async with played(rogue_template, tmp_path, looking, plan=NOISED) as play:
        rows = [await play.closed(number) for number in (1, 2)]
        plan, elements = play.bundle.plan, play.bundle.layout.parameters
        noise = plan.privacy.noise_multiplier
        shares = NoiseShares(cohort=4, honest=2, noise_multiplier=noise, elements=elements)
        # Of four survivors, where the promise holds for the fewest, three, towards one of them.
        deviation = math.sqrt(4) * 2**shares.sigma_bits * CLIPPING_NORM / shares.levels / NOMINAL_SILOS
        assert deviation >= noise * CLIPPING_NORM / NOMINAL_SILOS * math.sqrt(4 / 2)
        for row in rows:
            assert row.outcome == "applied"
            assert play.counted(row) == list(SILOS)
            without = np.zeros(elements)
            for silo in SILOS:
                delta = delta_of(silo, row.round, elements).astype(float)
                without += delta * (CLIPPING_NORM / np.linalg.norm(delta)) * weight_of(silo) / WEIGHT_CAP
            left = play.step_of(row) - without / NOMINAL_SILOS
            assert left.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * elements))
            assert row.masked is not None
            assert (row.masked.weight_sum, row.masked.saturated) == (pytest.approx(4 * WEIGHT_CAP), 0)
        ledgers = {name: silo.privacy.entries() for name, silo in play.silos.items()}
    release = GaussianRelease(noise / 2)
    assert [(key.round, len(entries)) for key, entries in paid] == [(1, 1), (2, 2)]
    for entries in ledgers.values():
        assert [(entry.round, entry.mechanism, entry.release) for entry in entries] == [
            (1, "delta", release),
            (2, "delta", release),
        ]


async def test_what_was_paid_for_is_sent_by_the_next_process_the_same_and_not_paid_for_twice(
    rogue_template: FederationTemplate, tmp_path: Path
) -> None:
    hanging = FirstVectorHangs()
    async with played(rogue_template, tmp_path, hanging, plan=NOISED) as play:
        async with asyncio.timeout(LONG_S):
            await hanging.reached.wait()
        await play.rogue.restart()
        row = await play.closed(1)
        assert row.outcome == "applied"
        assert play.counted(row) == list(SILOS)
        entries = play.rogue.privacy.entries()
    assert len(hanging.digests) == 2
    assert len(set(hanging.digests)) == 1
    assert [entry.round for entry in entries].count(1) == 1
