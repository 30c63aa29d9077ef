"""Hostile silos of a simulation: what they send in the place of what they trained, once all silos of the round have
trained.

A hostile silo is an agent as any other, with its own keys. Its update is taken on the way out, made anew, and signed by
it, so that the coordinator checks, weighs and adds it as it always does. All updates of a round are in memory at once,
as they are nowhere else.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lorica.hostile.attack import Claims, Exact, Known, Row, Rows, sent
from lorica.hostile.named import Hostility
from lorica.hostile.rule_at_hand import made_of
from lorica_coordinator.aggregation.weighting import SiloSummary
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName
from silo_agent.rounds.events import SavedUpdate
from silo_wire.int8_vectors.blocks import as_floats
from silo_wire.int8_vectors.rounding import in_int8
from silo_wire.manifest import Layout, manifest_of
from silo_wire.messages import RoundKey, TrainingSummary
from silo_wire.plans.plan import Plan
from silo_wire.plans.robust import CENTRED_CLIPPING
from silo_wire.plans.work import optimizer_steps


@dataclass(frozen=True, slots=True)
class _Trained:
    summary: TrainingSummary
    delta: Row


def require_playable(hostility: Hostility, plan: Plan, silos: Collection[SiloName]) -> None:
    """Raises ConfigurationError for hostile silos that are not there or leave none honest, and for plans whose rounds
    nobody could look into."""
    if unknown := sorted(set(hostility.silos) - set(silos)):
        raise ConfigurationError(
            f"hostile silo {', '.join(unknown)} is not among the silos: name some of {', '.join(sorted(silos))}"
        )
    if not hostility.silos or len(set(hostility.silos)) == len(silos):
        raise ConfigurationError(
            f"{len(set(hostility.silos))} of {len(silos)} silos are hostile: name at least one, and leave one honest"
        )
    for key, wrong, remedy in (
        ("aggregation.secure_aggregation = true", plan.aggregation.secure_aggregation, "set it to false"),
        (f"schedule.cohort_size = {plan.schedule.cohort_size}", bool(plan.schedule.cohort_size), "set it to 0"),
        (f'privacy.level = "{plan.privacy.level}"', plan.privacy.level != "none", 'set it to "none"'),
    ):
        if wrong:
            raise ConfigurationError(
                f"{key} does not go with hostile silos, which know the deltas of all silos in each round: {remedy}"
            )


class Conspiracy:
    """The hostile silos of a simulation of `plan`, whose updates are of `layout`; `silos` are all of them."""

    def __init__(self, hostility: Hostility, plan: Plan, layout: Layout, silos: Collection[SiloName]) -> None:
        require_playable(hostility, plan, silos)
        self._attack, self._plan, self._layout = hostility.attack, plan, layout
        self._hostile, self._silos = sorted(set(hostility.silos)), sorted(silos)
        self._key: RoundKey | None = None
        self._trained: dict[SiloName, _Trained] = {}
        self._told = asyncio.Condition()
        self._forged: dict[SiloName, Row] = {}
        self._centre = np.zeros(layout.parameters, dtype="<f4")

    async def passed(self, silo: SiloName, update: SavedUpdate, file: Path) -> tuple[SavedUpdate, Path]:
        """What the silo sends: as it is where it is honest or only its data are not, else when all have trained."""
        if self._attack.delta is None:
            return update, file
        await self._tell(silo, update, file)
        if silo not in self._hostile:
            return update, file
        async with self._told:
            await self._told.wait_for(lambda: len(self._trained) == len(self._silos))
        return await asyncio.to_thread(self._forge, silo, update, file)

    async def _tell(self, silo: SiloName, update: SavedUpdate, file: Path) -> None:
        summary = self._claimed(silo, update.summary) if silo in self._hostile else update.summary
        trained = _Trained(summary, self._read(file))
        async with self._told:
            if update.key != self._key:
                self._key = update.key
                self._trained, self._forged = {}, {}
            self._trained[silo] = trained
            self._told.notify_all()

    def _forge(self, silo: SiloName, update: SavedUpdate, file: Path) -> tuple[SavedUpdate, Path]:
        trained, honest = self._trained, [name for name in self._silos if name not in self._hostile]
        known = Known(
            honest=np.stack([trained[name].delta for name in honest]),
            own=trained[silo].delta,
            hostile=len(self._hostile),
            made=self._made,
        )
        forged = file.with_name(f"{file.name}.forged")
        content = self._written(sent(self._attack, known))
        forged.write_bytes(content)
        self._forged[silo] = self._read(forged)  # as it travels
        if len(self._forged) == len(self._hostile) and self._plan.aggregation.reducer == CENTRED_CLIPPING.name:
            self._centre = self._made(np.stack([self._forged[name] for name in self._hostile])).astype("<f4")
        manifest = manifest_of(self._layout, [content])
        return replace(update, manifest=manifest, summary=trained[silo].summary), forged

    def _made(self, hostile: Rows) -> Exact:
        """By the plan's rule, of honest deltas and these."""
        theirs = dict(zip(self._hostile, hostile, strict=True))
        rows = np.stack([theirs.get(name, self._trained[name].delta) for name in self._silos])
        summaries = [_summary(name, self._trained[name].summary) for name in self._silos]
        return made_of(self._plan.aggregation, summaries, rows, self._centre)

    def _claimed(self, silo: SiloName, summary: TrainingSummary) -> TrainingSummary:
        claims: Claims | None = self._attack.claims
        if claims is None:
            return summary
        examples = round(summary.examples * claims.examples)
        return replace(
            summary,
            examples=examples,
            optimizer_steps=optimizer_steps(examples, self._plan.training.for_silo(silo)),  # as whoever looks expects
            **{name: getattr(summary, name) * claims.losses for name in ("loss_max", "loss_min", "loss_first")},
        )

    def _read(self, file: Path) -> Row:
        if self._layout.dtype == "float32":
            return np.fromfile(file, dtype="<f4")
        if self._layout.dtype == "int8":
            return as_floats(file.read_bytes())
        return torch.from_file(str(file), size=self._layout.parameters, dtype=torch.bfloat16).float().numpy()

    def _written(self, row: Row) -> bytes:
        if self._layout.dtype == "float32":
            return row.astype("<f4").tobytes()
        if self._layout.dtype == "int8":
            with np.errstate(invalid="ignore"):  # of what is not finite, whose scale the coordinator refuses
                return in_int8(row.astype("<f4"))
        return torch.from_numpy(row).bfloat16().view(torch.uint8).numpy().tobytes()


def _summary(silo: SiloName, told: TrainingSummary) -> SiloSummary:
    return SiloSummary(
        silo=silo,
        examples=told.examples,
        loss_reduction=told.loss_max - told.loss_min,
        optimizer_steps=told.optimizer_steps,
        delta_norm=0.0,
        loss_first=told.loss_first,
    )
