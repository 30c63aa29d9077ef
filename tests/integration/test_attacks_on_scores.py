"""A coordinator that asks for more scores, rounds and models than its plan has, against real agents over gRPC.

What it is after: a model whose answers depend on one held-out query, asked again and again, spells that query. Under
masks it hears one sum of scores for each model of the plan's timetable; in the clear one answer of each silo, to one
model.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from silo_agent.policy.rules import PolicyRules
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Evaluate, Standby, StandbyReason, Train
from tests.support.federation_peer import OfferedModel, TestNet, small_bundle
from tests.support.hostile_masks import (
    BANK,
    CLINIC,
    ELEMENTS,
    HOSPITAL,
    INSURER,
    SILOS,
    HostileCoordinator,
    attacked,
    evaluation_of,
    masked_bundle,
)

NET = TestNet.create()
INTEGRITY, POLICY = DeclineReason.INTEGRITY, DeclineReason.POLICY
NEVER = {"every": 0, "initial": False, "last": False}
SWEEPS = 44
MASKED = PolicyRules(require_secure_aggregation=True, approved_plans="any")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def summed(model: Digest, silos: Iterable[SiloName]) -> Scores:
    told = []
    for silo in silos:
        it = evaluation_of(silo, model)
        told.append(
            Scores.told(
                questions=it.examples,
                exact_matches=it.exact_matches,
                executed=it.executed,
                execution_matches=it.execution_matches,
                loss_per_token=it.loss_per_token,
            ).words
        )
    names = ("questions", "exact_matches", "executed", "execution_matches", "loss")
    return Scores(**dict(zip(names, map(sum, zip(*told, strict=True)), strict=True)))


async def order_scores(at: HostileCoordinator, silo: SiloName, number: int, attempt: int, model: OfferedModel) -> None:
    key = replace(at.key, round=number, attempt=attempt)
    await at.peer.order(Evaluate(key=key, model=model.digest, seconds_left=60.0), silo)


async def answered(at: HostileCoordinator, silo: SiloName, count: int) -> None:
    """It has answered, or declined, so many orders for scores."""

    def done() -> bool:
        return len(at.peer.evaluations) + len(at.peer.declined_by[silo]) >= count

    await at.peer.until(done)


def look_at(at: HostileCoordinator, silo: SiloName, rule: str, count: int) -> None:
    """All that it refused was refused by this rule, and is in its journal and its metrics."""
    agent = at.silos[silo]
    assert [by for by, _ in agent.refusals[agent.seen :]] == [rule] * count
    agent.seen += count
    agent.require_recorded()
    at.declines_seen(silo, count)


# --- what honest rounds give ------------------------------------------------------------------------------------------


async def test_honest_round_gives_the_sum_of_the_scores_and_no_silos_own(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET) as at:
        await at.train()
        at.open()
        await at.play("unmasked")
        at.require_sum_of(*SILOS)
        assert at.tail().scores == summed(at.model.digest, SILOS)
        assert at.peer.evaluations == []
        assert {agent.trainer.scored[0] for agent in at.silos.values()} == {at.model.digest}


async def test_closing_round_gives_the_scores_of_the_last_model_and_no_delta(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET) as at:
        at.key, last = replace(at.key, round=4), at.offer(3)
        at.model = last
        await at.train()
        at.open()
        await at.play("unmasked")
        assert at.tail().scores == summed(last.digest, SILOS)
        assert at.words()[:1].tolist() == [0], "nobody trained"
        assert all(agent.trainer.trained == [] for agent in at.silos.values())


async def test_withheld_scores_are_zeros_that_look_like_any_others(tmp_path: Path) -> None:
    rules = {BANK: PolicyRules(tell_scores=False)}
    async with attacked(tmp_path, NET, rules=rules) as at:
        await at.train()
        at.open()
        await at.play("unmasked")
        at.require_sum_of(*SILOS)
        assert at.tail().scores == summed(at.model.digest, (CLINIC, HOSPITAL, INSURER))
        assert at.silos[BANK].trainer.scored == []
        assert at.peer.evaluations == []
        kinds = {silo: [type(answer) for name, answer in at.peer.answers if name == silo] for silo in SILOS}
        assert all(kinds[silo] == kinds[BANK] for silo in SILOS)
        lengths = {len(at.vector(silo, at.state.roster.digest)) for silo in SILOS}  # type: ignore[union-attr]
        assert len(lengths) == 1


async def test_a_round_at_which_the_plan_has_no_scores_has_zeros_for_them(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET, bundle=masked_bundle(evaluation=NEVER)) as at:
        await at.train()
        at.open()
        await at.play("unmasked")
        assert at.tail().scores == NO_SCORES
        assert all(agent.trainer.scored == [] for agent in at.silos.values())


# --- what hostile ones do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", [NEVER, {}], ids=["never", "always"])
async def test_sweeps_44_models_past_one_silo_under_required_masks(tmp_path: Path, evaluation: dict[str, Any]) -> None:
    """The attack as it was shown: each of the 44 had its answer."""
    async with attacked(tmp_path, NET, bundle=masked_bundle(evaluation=evaluation), rules={BANK: MASKED}) as at:
        models = [at.offer(number) for number in range(SWEEPS)]
        for number, model in enumerate(models):
            await order_scores(at, BANK, number % 4, number + 1, model)
            await answered(at, BANK, number + 1)
        assert at.peer.evaluations == []
        assert at.silos[BANK].trainer.scored == []
        assert {reason for _, reason, _ in at.peer.declined_by[BANK]} == {POLICY}
        look_at(at, BANK, "as_planned", SWEEPS)


async def test_sweeps_44_models_past_one_silo_in_the_clear(tmp_path: Path) -> None:
    """One model for each time of the plan's, whatever is asked and however often the agent is restarted."""
    plan = small_bundle(elements=ELEMENTS, evaluation={"every": 2}, schedule={"rounds": 3, "min_silos": 1})
    async with attacked(tmp_path, NET, bundle=plan, silos=(BANK,)) as at:
        firsts: dict[int, Digest] = {}
        for number in range(SWEEPS):
            if number in (7, 21):
                await at.silos[BANK].restart()
                at.silos[BANK].seen = len(at.silos[BANK].refusals)
            model, of = at.offer(number), number % 6
            await order_scores(at, BANK, of, number + 1, model)
            await answered(at, BANK, number + 1)
            firsts.setdefault(of, model.digest)
        times = (0, 2, 3)
        assert [key.round for key, _ in at.peer.evaluations] == list(times)
        assert [it for _, it in at.peer.evaluations] == [evaluation_of(BANK, firsts[of]) for of in times]
        assert at.silos[BANK].trainer.scored == [firsts[of] for of in times]
        reasons = {(key.round, reason) for key, reason, _ in at.peer.declined_by[BANK]}
        assert reasons == {(1, POLICY), (4, POLICY), (5, POLICY), *((of, INTEGRITY) for of in times)}
        at.silos[BANK].seen = len(at.silos[BANK].refusals)
        at.declines_seen(BANK, SWEEPS - len(times))


@pytest.mark.parametrize("number", [5, 1000, (1 << 31) - 1])
async def test_goes_on_after_the_plans_last_round(tmp_path: Path, number: int) -> None:
    """Of three rounds, and the closing one: another sum over the same deltas for as long as it likes."""
    async with attacked(tmp_path, NET) as at:
        at.key = replace(at.key, round=number)
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        await at.refused(
            BANK, "as_planned", rf"round {number} was ordered, the plan's rounds are 1 to 4", declined=POLICY
        )
        assert at.silos[BANK].trainer.trained == []


async def test_goes_on_after_the_last_round_of_a_plan_in_the_clear(tmp_path: Path) -> None:
    plan = small_bundle(elements=ELEMENTS, schedule={"rounds": 3, "min_silos": 1})
    async with attacked(tmp_path, NET, bundle=plan, silos=(BANK,)) as at:
        at.key = replace(at.key, round=4)
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        await at.refused(BANK, "as_planned", "round 4 was ordered, the plan's rounds are 1 to 3", declined=POLICY)


async def test_scores_a_second_model_in_a_further_attempt_at_a_masked_round(tmp_path: Path) -> None:
    """Two models in one round would be two answers to one timetable; the first is remembered over a restart."""
    async with attacked(tmp_path, NET) as at:
        await at.train()
        await at.silos[BANK].restart()
        at.key, other = replace(at.key, attempt=2), at.offer(7)
        await at.peer.order(Train(key=at.key, model=other.digest, seconds_left=60.0), BANK)
        await at.refused(BANK, "one_model", "another model stands in this one's place", declined=INTEGRITY)
        assert at.silos[BANK].trainer.scored == [at.model.digest]
        await at.peer.order(Standby(StandbyReason.GATHERING), *SILOS)
        at.key = replace(at.key, attempt=3)
        await at.train(BANK)  # the first one again is as good as ever
        assert set(at.silos[BANK].trainer.scored) == {at.model.digest}


async def test_asks_a_silo_that_withholds_its_scores_in_the_clear(tmp_path: Path) -> None:
    plan = small_bundle(elements=ELEMENTS, schedule={"rounds": 9, "min_silos": 1})
    async with attacked(tmp_path, NET, bundle=plan, silos=(BANK,), rules={BANK: PolicyRules(tell_scores=False)}) as at:
        for number in range(5):
            await order_scores(at, BANK, number, 1, at.model)
            await answered(at, BANK, number + 1)
        assert at.peer.evaluations == []
        at.declines_seen(BANK, 5)
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        async with asyncio.timeout(20):
            await at.peer.until(lambda: bool(at.peer.updates))
        at.peer.updates.clear()  # in the clear, as its plan has it
