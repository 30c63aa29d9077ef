"""Joint noise: a real coordinator and four real agents that take one step of a masked sum of gradients together."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.privacy.ledger import Entry
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_agent.service.ports import TrainedUpdate
from silo_agent.service.work import joint_timing
from silo_agent.training.private.joint_gradient import write_sum
from silo_wire.messages import RoundKey
from silo_wire.plans.noised_masks import noise_terms
from tests.support.coordinator import PLAN_VALUES, FederationTemplate
from tests.support.rogue_silos import (
    FEDERATION,
    LONG_S,
    ROGUE,
    SILOS,
    Attack,
    Declared,
    FirstVectorHangs,
    Play,
    PlayedSilo,
    honestly,
    make_rogue_template,
    played,
)
from tests.support.secagg_federation import entropy
from tests.unit.test_private_joint import VALUES

JOINT, SLOW = "joint", "joint-slow"
ANSWER_AFTER_S = 1.0
SETTINGS: dict[str, object] = {
    **PLAN_VALUES,
    **VALUES,
    "schedule.min_silos": 3,
    "schedule.start_when_ready": True,
    "schedule.masking_deadline_s": 600.0,
    "schedule.training_deadline_s": 600.0,
    "aggregation.server_optimizer": "sgd",
    "aggregation.momentum": 0.0,
    "privacy.answer_after_s": ANSWER_AFTER_S,
}


@pytest.fixture(autouse=True)
def soon_after_being_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use may be late, too; what follows then is in test_agent_joint_timing.py."""
    monkeypatch.setattr(joint_timing, "LATE_S", 0.1)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    made = make_rogue_template(tmp_path_factory.mktemp("rogue") / "coordinator")
    for name, more in ((JOINT, {}), (SLOW, {"privacy.answer_after_s": 1e-6})):
        create_plan(
            Coordinator.load(CoordinatorFolder(made.folder)).shelf.plans,
            name=name,
            federation=FEDERATION,
            source=SizedModel("micro"),
            overrides={**SETTINGS, **more},
        )
    return made


class Gradients:
    """Stands for the gradients of each silo's sample, another one at each training; everything after them is the
    product's."""

    def __init__(self, play: Play) -> None:
        self.plan, self.layout = play.bundle.plan, play.bundle.layout
        self.sums: dict[str, list[tuple[RoundKey, np.ndarray[Any, Any]]]] = defaultdict(list)
        for silo in play.silos.values():
            silo.trainer.train = self._trainer_of(silo.name)  # type: ignore[method-assign]

    def _trainer_of(self, name: str) -> Any:
        def train(*, key: RoundKey, update_file: Path, **named: Any) -> TrainedUpdate:
            seed = entropy("gradients", name, len(self.sums[name]))
            flat = np.random.default_rng(list(seed)).normal(size=self.layout.parameters) / math.sqrt(
                self.layout.parameters
            )
            self.sums[name].append((key, flat))
            parts, at = [], 0
            for spec in self.layout.tensors:
                parts.append(torch.from_numpy(flat[at : at + spec.elements]))
                at += spec.elements
            section = self.plan.privacy
            written = write_sum(
                update_file,
                self.layout,
                parts,
                divisor=section.expected_batch_size,
                bound=self.plan.aggregation.delta_bound,
            )
            return TrainedUpdate(manifest=written.manifest, summary=section.summary(None), mark=written.mark)

        return train

    def of(self, silo: str, key: RoundKey) -> list[np.ndarray[Any, Any]]:
        return [flat for at, flat in self.sums[silo] if (at.round, at.attempt) == (key.round, key.attempt)]


@asynccontextmanager
async def joint(
    template: FederationTemplate, folder: Path, attack: Attack, *, plan: str = JOINT
) -> AsyncIterator[tuple[Play, Gradients]]:
    """Silos whose people allow what it costs."""
    gradients: list[Gradients] = []
    async with played(
        template,
        folder,
        attack,
        plan=plan,
        rules={"max_epsilon": 1e3, "max_epsilon_alone": 1e3},
        prepared=lambda play: gradients.append(Gradients(play)),
    ) as play:
        yield play, gradients[0]


async def test_steps_are_the_mean_gradient_and_noise_and_each_silo_has_paid_and_erased_before_it_uploads(
    template: FederationTemplate, tmp_path: Path
) -> None:
    paid: list[tuple[RoundKey, tuple[Entry, ...], bytes]] = []

    async def looking(silo: PlayedSilo, key: RoundKey, message: object) -> None:
        if isinstance(message, MaskedInput):
            left = silo.journal.update_file(key).read_bytes()
            paid.append((key, silo.privacy.entries(), left))
        await honestly(silo, key, message)

    async with joint(template, tmp_path, looking) as (play, gradients):
        rows = [await play.closed(number) for number in (1, 2)]
        plan, elements = play.bundle.plan, play.bundle.layout.parameters
        terms = noise_terms(plan)
        assert terms is not None
        shares = terms.shares(cohort=4, honest=2, elements=elements)
        divisor, bound = plan.privacy.expected_batch_size, plan.aggregation.delta_bound
        deviation = math.sqrt(4) * 2**shares.sigma_bits * bound / shares.levels / 4
        # Of two of four, the noise is what the plan promises on a sum of gradients, over the batch size and the four.
        promised = plan.privacy.noise_multiplier * plan.training.max_grad_norm / divisor / 4
        assert promised <= deviation / math.sqrt(2) <= 1.1 * promised
        for row in rows:
            assert row.outcome == "applied"
            assert play.counted(row) == list(SILOS)
            key = RoundKey(federation=FEDERATION, plan=plan.digest, round=row.round, attempt=row.attempt)
            ((one,), *others) = [gradients.of(silo, key) for silo in SILOS]
            without = -(one + sum(other for (other,) in others)) / divisor / 4
            left = play.step_of(row) - without
            assert left.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * elements))
            assert abs(np.corrcoef(left, without)[0, 1]) < 6 / math.sqrt(elements)
            assert row.masked is not None
            assert row.masked.saturated == 0
        ledgers = {name: silo.privacy.entries() for name, silo in play.silos.items()}
    ((_, release),) = plan.releases_of_round
    assert [(key.round, len(entries)) for key, entries, _ in paid] == [(1, 1), (2, 2)]
    assert not any(any(left) for _, _, left in paid)
    for entries in ledgers.values():
        assert [(entry.round, entry.mechanism, entry.release) for entry in entries] == [
            (1, "joint_gradients", release),
            (2, "joint_gradients", release),
        ]


async def test_another_attempt_has_another_sample_and_is_paid_for_again(
    template: FederationTemplate, tmp_path: Path
) -> None:
    """What was noised and sent in an attempt that came to nothing serves no further one: two sums would have one
    sample's noise twice."""
    held, let_go = asyncio.Event(), asyncio.Event()

    async def slow(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        if isinstance(message, MaskedInput) and key.attempt == 1:
            held.set()
            await let_go.wait()
        await silo.send(key, message)

    async with joint(template, tmp_path, slow) as (play, gradients):
        async with asyncio.timeout(LONG_S):
            await held.wait()
        await play.at.service.stop_plan()
        await play.at.service.start_plan(JOINT)
        let_go.set()
        row = await play.closed(1)
        assert row.outcome == "applied"
        assert row.attempt == 2
        entries = {name: silo.privacy.entries() for name, silo in play.silos.items()}
        for name in SILOS:
            trained = [(key.attempt, flat) for key, flat in gradients.sums[name] if key.round == 1]
            assert [attempt for attempt, _ in trained] == [1, 2]
            assert not np.array_equal(trained[0][1], trained[1][1])
        of_round_1 = [entry.attempt for entry in entries[ROGUE] if entry.round == 1]
        assert of_round_1 == [1, 2]


async def test_a_silo_answers_when_the_plan_says_and_tells_no_progress(
    template: FederationTemplate, tmp_path: Path
) -> None:
    began: dict[int, float] = {}
    waited: list[float] = []

    async def looking(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        if isinstance(message, Declared) and key.round in began:
            waited.append(asyncio.get_running_loop().time() - began[key.round])
        await honestly(silo, key, message)

    told: list[float] = []
    async with joint(template, tmp_path, looking) as (play, _):
        rogue = play.silos[ROGUE]
        whole = rogue.trainer.train

        def train(*, key: RoundKey, progress: Any, **named: Any) -> TrainedUpdate:
            began.setdefault(key.round, asyncio.run_coroutine_threadsafe(_now(), play_loop).result())
            for part in (0.3, 0.6, 1.0):
                progress(part)
            return whole(key=key, progress=progress, **named)

        play_loop = asyncio.get_running_loop()
        rogue.trainer.train = train  # type: ignore[method-assign]
        report = rogue.client.report_progress

        async def reported(key: RoundKey, phase: Any, fraction: float) -> None:
            if phase.name == "TRAINING":
                told.append(fraction)
            await report(key, phase, fraction)

        rogue.client.report_progress = reported  # type: ignore[method-assign]
        await play.closed(2)
    assert waited
    assert all(seconds >= ANSWER_AFTER_S / 2 for seconds in waited)
    assert set(told) <= {0.0}


async def _now() -> float:
    return asyncio.get_running_loop().time()


async def test_who_is_later_than_the_plan_says_adds_nothing(template: FederationTemplate, tmp_path: Path) -> None:
    async with joint(template, tmp_path, honestly, plan=SLOW) as (play, _):
        await play.until(lambda: any(silo.notes.of("work-failed") for silo in play.silos.values()))
        details = [note["detail"] for silo in play.silos.values() for note in silo.notes.of("work-failed")]
        assert any("were not there 1e-06 s after the order" in detail for detail in details)
        for silo in play.silos.values():
            assert not silo.privacy.entries()


async def test_what_was_sent_is_sent_by_the_next_process_the_same_though_its_sum_is_erased(
    template: FederationTemplate, tmp_path: Path
) -> None:
    hanging = FirstVectorHangs()
    async with joint(template, tmp_path, hanging) as (play, gradients):
        async with asyncio.timeout(LONG_S):
            await hanging.reached.wait()
        await play.rogue.restart()
        row = await play.closed(1)
        assert row.outcome == "applied"
        assert play.counted(row) == list(SILOS)
        entries = play.rogue.privacy.entries()
        trained = [key.round for key, _ in gradients.sums[ROGUE]].count(1)
    assert len(hanging.digests) == 2
    assert len(set(hanging.digests)) == 1
    assert [entry.round for entry in entries].count(1) == trained == 1
