"""Committed updates of one plan into its next model: the plan's reducers, over the files of one coordinator.

A reducer (reducers/) says what the updates of a round come to; next_model.py reads, computes and writes, slab by slab.
Nothing here depends on the clock, on arrival order or on how far an earlier try came: the same base model and committed
updates give the same model on the same device.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.delta_source import FORMS
from lorica_coordinator.edges.sums.next_model import NextModel
from lorica_coordinator.edges.sums.reducers.chosen import of_masks, of_updates
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.rounds.secure_attempt import MaskedSum
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_security.errors import ConfigurationError
from silo_wire.canonical import Digest
from silo_wire.manifest import UpdateDtype
from silo_wire.messages import RoundKey
from silo_wire.plans.adapters import NOTHING_RESTS, Pair, Turns
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from silo_wire.plans.sections.training import TrainingSection

DeviceSetting = Literal["auto", "cpu", "cuda"]
SLAB_BYTES: dict[str, int] = {"cpu": 1 << 20, "cuda": 32 << 20}
"""By kind of device: what stays in a core's cache, and what a copy to a GPU and back is worth its overhead for."""


def device_for(setting: DeviceSetting) -> torch.device:
    """`auto` is a GPU where there is one; raises ConfigurationError for `cuda` where there is none."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device = 'cuda' and no CUDA device is usable here: set device to 'auto' or 'cpu'")
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


class Aggregator:
    """Updates of one plan into its next model, stored in `models`.

    `training` is the plan's; only a weighting that needs optimizer steps looks at it. `update_dtype` is the type of the
    committed deltas, `slab_bytes` the size of a slab in float32, a multiple of 4. Under a `privacy` of level "silo"
    sums are noised, and what is released of deltas in the clear is entered into `releases`. `turns`, of the plan, say
    what of the model rests in which round; `reprojected` are its adapters, where the mean is of their products. `rates`
    multiply the server's, round by round.
    """

    def __init__(
        self,
        section: AggregationSection,
        *,
        models: ModelStore,
        spools: Spools,
        update_dtype: UpdateDtype,
        device: torch.device,
        slab_bytes: int | None = None,
        training: TrainingSection | None = None,
        privacy: PrivacySection | None = None,
        releases: ReleaseLedger | None = None,
        turns: Turns = NOTHING_RESTS,
        reprojected: Sequence[Pair] = (),
        rates: ServerRates = UNCHANGED,
    ) -> None:
        slab_bytes = SLAB_BYTES[device.type] if slab_bytes is None else slab_bytes
        if slab_bytes < 4 or slab_bytes % 4:
            raise ValueError(f"slab_bytes={slab_bytes}: use a multiple of 4, at least 4")
        into = NextModel(
            models=models,
            optimizer=optimizer_of(section),
            device=device,
            slab_elements=slab_bytes // torch.float32.itemsize,
            carries=section.carried,
            turns=turns,
            rates=rates,
        )
        self.updates = of_updates(
            section,
            training,
            privacy,
            spools=spools,
            form=FORMS[update_dtype],
            into=into,
            releases=releases,
            reprojected=reprojected,
        )
        self.masks = of_masks(privacy, spools=spools, into=into)

    def aggregate(self, key: RoundKey, base_model: Digest, updates: Sequence[CommittedUpdate]) -> AggregationResult:
        """What the plan's reducer makes of updates in the clear; raises what that raises."""
        return self.updates.reduce(key, base_model, updates)

    def aggregate_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        """The same of masked vectors."""
        return self.masks.reduce(key, base_model, masked)

    def score_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        """The scores in the sum of a closing round, in which nobody trained; the model stays. Raises as
        `aggregate_masked`."""
        return self.masks.scored(key, base_model, masked)
