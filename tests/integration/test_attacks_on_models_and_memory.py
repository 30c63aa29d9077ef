"""A coordinator that chooses models and plans under masks, and a silo that lost its memory, against real agents over
gRPC.

With what each of these attacks is after, two sums come out over one set of deltas but for one silo's.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from lorica_security.audit.entry import Event
from lorica_security.errors import DataError, LoricaError, StorageError
from lorica_security.identity.seal import Seal
from lorica_security.on_disk.reading import read_log
from lorica_security.secure_aggregation.masked_vectors.fixed_point import TensorRange
from lorica_security.secure_aggregation.roster import Roster
from silo_agent.edges.accounts.audit_report import report_of
from silo_agent.edges.disk.plan_approvals import Comparison, PlanApprovals
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.service.told import FAILED
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Finished, Prepare, Train
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import federation_pb2
from tests.support.federation_peer import TestNet, vector_of
from tests.support.hostile_masks import (
    BANK,
    CLINIC,
    ELEMENTS,
    HOSPITAL,
    INSURER,
    SILOS,
    AttackedSilo,
    HostileCoordinator,
    attacked,
    masked_bundle,
)
from tests.support.release_groups import hold_groups

NET = TestNet.create()
POLICY = DeclineReason.POLICY
SECOND = masked_bundle(seed=1)
"""A second plan from the model that the first begins from."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


async def whole_round(at: HostileCoordinator) -> None:
    await at.train()
    at.open()
    await at.play("unmasked")
    at.require_sum_of(*SILOS)


async def offered(at: HostileCoordinator, bundle: PlanBundle, says: str, rule: str) -> None:
    """BANK is asked for a round of `bundle`, and refuses it by `rule` before it trains."""
    model = at.peer.offer(bundle, vector_of(bundle.layout, 0))
    trained = list(at.silos[BANK].trainer.trained)
    at.key = replace(at.key, plan=bundle.plan.digest, round=1)
    await at.peer.order(Prepare(bundle.plan.digest), BANK)
    await at.refused(BANK, rule, says)
    await at.peer.order(Train(key=at.key, model=model.digest, seconds_left=60.0), BANK)
    await at.declined(BANK, POLICY, says)
    assert at.silos[BANK].trainer.trained == trained


def approvals_of(silo: AttackedSilo) -> PlanApprovals:
    return PlanApprovals(silo.folder.approvals, Seal(silo.credentials.identity_key))


def kept_still(rate: str) -> PlanBundle:
    """All silos but HOSPITAL train at `rate`, which the coordinator's own plan shelf might refuse: the sum would be
    HOSPITAL's delta."""
    others = {silo: {"learning_rate": 1e-7} for silo in SILOS if silo != HOSPITAL}
    bundle = masked_bundle(training={"learning_rate": 1e-3, "overrides": others})
    text = bundle.plan.to_json()
    assert text.count(b"1e-07") == len(others)
    crafted = _Unchecked(bundle, text.replace(b"1e-07", rate.encode()))
    return crafted  # type: ignore[return-value]


class _Unchecked:
    """A bundle whose plan no rule of Lorica has seen; what else is asked of it is the bundle's that it was made
    from."""

    def __init__(self, bundle: PlanBundle, text: bytes) -> None:
        self._bundle, self.text = bundle, text
        self.digest = Digest(blake3(text).hexdigest())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bundle, name)

    @property
    def plan(self) -> Any:
        return SimpleNamespace(digest=self.digest)

    def encode(self) -> bytes:
        message = federation_pb2.PlanBundle.FromString(self._bundle.encode())
        message.plan_json = self.text
        return message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("rate", ["1e-30", "9.9e-8", "0.0", "-1e-3"])
async def test_keeps_all_silos_but_one_still_by_rates_near_zero(tmp_path: Path, rate: str) -> None:
    """No plan at all, whoever wrote it: it is malformed, and nobody is ready for it."""
    async with attacked(tmp_path, NET) as at:
        crafted = kept_still(rate)
        at.peer.offer(crafted, vector_of(crafted.layout, 0))
        for silo in SILOS:
            await at.peer.order(Prepare(crafted.digest), silo)
            await at.refused(silo, "MalformedMessage", "learning_rate")
            assert at.silos[silo].trainer.trained == []


@pytest.mark.parametrize("ratio", [1.0, 4.0])
async def test_keeps_all_silos_but_one_still_by_the_least_rates_that_there_are(tmp_path: Path, ratio: float) -> None:
    """Also where people allow what they may, and though they approved the plan."""
    async with attacked(tmp_path, NET, rules={BANK: PolicyRules(max_work_ratio=ratio)}) as at:
        others = {silo: {"learning_rate": 1e-7} for silo in SILOS if silo != HOSPITAL}
        bundle = masked_bundle(training={"learning_rate": 1e-3, "overrides": others})
        await offered(at, bundle, "max_work_ratio", "max_work_ratio")


@pytest.mark.parametrize("number", [1, 2, 250])
async def test_hands_out_another_model_than_the_plans_in_the_first_round(tmp_path: Path, number: int) -> None:
    async with attacked(tmp_path, NET) as at:
        crafted = at.offer(number)
        for silo in SILOS:
            await at.peer.order(Train(key=at.key, model=crafted.digest, seconds_left=60.0), silo)
            says = f"begins from model {at.model.digest}, the coordinator hands out {crafted.digest}"
            await at.refused(silo, "initial_model", says, declined=POLICY)
            assert at.silos[silo].trainer.trained == []
            assert at.silos[silo].trainer.scored == []


async def test_offers_a_second_plan_from_the_same_model_until_people_approve_the_two_beside_each_other(
    tmp_path: Path,
) -> None:
    async with attacked(tmp_path, NET) as at:
        await whole_round(at)
        first = at.key.plan
        await offered(at, SECOND, "masked under plan small up to round 1, and both have the same model", "one_lineage")
        approvals_of(at.silos[BANK]).approve(SECOND.plan.digest, although=[first])
        await at.peer.order(Prepare(SECOND.plan.digest), BANK)
        await at.silos[BANK].restart()
        at.silos[BANK].seen = len(at.silos[BANK].refusals)
        await at.peer.until(lambda: at.peer.readiness[-1] == (SECOND.plan.digest, True, ""), within_s=20)


@pytest.mark.parametrize("change", [{"weight_cap": 12.0}, {"tensors": (TensorRange(ELEMENTS, 0.01),)}])
async def test_moves_the_cap_or_the_bounds_in_a_later_round(tmp_path: Path, change: dict[str, Any]) -> None:
    """What silos put into the sums would be cut at other places, and the differences of the sums be those of single
    silos."""
    async with attacked(tmp_path, NET) as at:
        await whole_round(at)
        at.key = replace(at.key, round=2)
        at.model = at.offer(2)
        await at.train()
        at.open(ranges=replace(ranges_of(at.bundle), **change))
        await at.play("share keys")
        for silo in SILOS:
            await at.ask(silo, at.requested(Roster, silo))
            await at.refused(silo, "ranges", "are the same in every round", declined=POLICY)
        at.key = replace(at.key, round=3)
        at.model = at.offer(3)
        await whole_round(at)


async def test_hands_out_a_model_of_another_plan_in_a_later_round(tmp_path: Path) -> None:
    """The second plan begins elsewhere, as people made sure, and is of the same shape; in its second round would come a
    model of the first."""
    values = masked_bundle().plan.model_dump(mode="json")
    values["model"] |= {"initial": "ab" * 32, "initial_bfloat16": "ac" * 32}
    elsewhere = PlanBundle(type(SECOND.plan).model_validate(values), SECOND.files)
    async with attacked(tmp_path, NET) as at:
        await whole_round(at)
        approvals = approvals_of(at.silos[BANK])
        for plan in (at.key.plan, elsewhere.plan.digest):
            approvals.approve(plan, model=Comparison.COPY)
        model = at.peer.offer(elsewhere, vector_of(elsewhere.layout, 0))
        assert model.digest == at.model.digest
        at.key = replace(at.key, plan=elsewhere.plan.digest, round=2)
        await at.peer.order(Train(key=at.key, model=model.digest, seconds_left=60.0), BANK)
        await at.refused(BANK, "one_lineage", "has the same shape, and could be all but the same", declined=POLICY)


@pytest.mark.parametrize("lost", ["masking/memory", "lineages.json"])
async def test_asks_a_silo_that_lost_its_memory_for_a_second_sum(tmp_path: Path, lost: str) -> None:
    async with attacked(tmp_path, NET) as at:
        await whole_round(at)
        victim = at.silos[BANK]
        await victim.kill()
        (victim.folder.root / lost).unlink()
        await victim.start()
        victim.seen = len(victim.refusals)
        at.key = replace(at.key, attempt=2)
        trained = list(victim.trainer.trained)
        await at.peer.order(Prepare(at.key.plan), BANK)
        await at.refused(BANK, "masking_memory", f"{lost} is missing")
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        await at.declined(BANK, POLICY, "silo-agent trust reset-memory")
        assert victim.trainer.trained == trained


@pytest.mark.parametrize("how", ["put back", "lost"])
async def test_goes_on_with_a_silo_whose_disk_went_back_as_a_whole(tmp_path: Path, how: str) -> None:
    """Its own two files agree; those that it was summed with say otherwise, whatever the coordinator says of it."""
    bundle = masked_bundle(schedule={"rounds": 9})
    snapshot = tmp_path / "snapshot"
    async with attacked(tmp_path / "silos", NET, bundle=bundle, groups=[SILOS]) as at:
        victim = at.silos[BANK]
        await whole_round(at)
        await victim.kill()
        victim.snapshot(snapshot)
        await victim.start()
        at.key = replace(at.key, round=2)
        await whole_round(at)

        await victim.kill()
        if how == "put back":
            victim.restore(snapshot)
        else:
            pins = trust_store(victim.folder, victim.credentials).identities()
            shutil.rmtree(victim.folder.masking)
            for file in (victim.folder.lineages, victim.folder.release_groups, victim.folder.peers):
                file.unlink()
            for peer, key in pins.items():
                trust_store(victim.folder, victim.credentials).add(peer, key)
            others = [at.silos[silo].credentials for silo in SILOS if silo != BANK]
            hold_groups([(victim.folder, victim.credentials)], [SILOS], others=others)  # which it took again
        await victim.start()
        victim.seen = len(victim.refusals)
        for round_ in (3, 4):  # attempts that come to nothing do not make up for it
            at.key = replace(at.key, round=round_)
            await at.train()
            at.open()
            await at.answer_to(BANK, None)
        at.key = replace(at.key, round=5)
        await at.train()
        at.open()
        await at.play("share keys")
        await at.ask(BANK, at.requested(Roster, BANK))
        says = f"silo {CLINIC} and silo {HOSPITAL} and silo {INSURER} saw keys of this silo"
        await at.refused(BANK, "masking_memory", says, declined=POLICY)

        await victim.restart()
        victim.seen = len(victim.refusals)
        at.key = replace(at.key, round=6)
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        await at.refused(BANK, "masking_memory", "silo-agent trust reset-memory", declined=POLICY)

        await victim.kill()
        journal = masking_journal(victim.folder, victim.credentials)
        assert journal.problem() is not None
        journal.reset()  # by its people
        assert journal.problem() is None
        await victim.start()
        at.key = replace(at.key, round=7)
        await whole_round(at)


async def test_puts_the_attempt_of_an_earlier_round_back_beside_the_memory_of_today(tmp_path: Path) -> None:
    """Of BANK's disk, with its journal of rounds: it is to sign a second set of round 1 and show both shares of
    CLINIC."""
    async with attacked(tmp_path / "silos", NET, bundle=masked_bundle(schedule={"rounds": 9})) as at:
        victim, copy = at.silos[BANK], tmp_path / "copy"
        await at.train()
        at.open()
        await at.play("consistency check")
        first = at.attempt, at.key
        second_set = at.survivors_of(at.state.roster.digest, BANK, *[silo for silo in SILOS if silo != CLINIC])
        await victim.kill()
        victim.snapshot(copy)
        await victim.start()
        await at.play("unmasked")
        at.require_sum_of(*SILOS)
        at.key = replace(at.key, round=2)
        await whole_round(at)

        await victim.kill()
        put_back_attempt(victim, copy)
        memory = masking_journal(victim.folder, victim.credentials).memory()
        await victim.start()
        victim.seen = len(victim.refusals)
        at.attempt, at.key = first
        await at.ask(BANK, second_set)
        await at.refused(BANK, "masking_memory", "came to attempt 1 of round 2", declined=POLICY)
        assert masking_journal(victim.folder, victim.credentials).memory() == memory
        await at.peer.until(lambda: not (victim.folder.masking / "attempt").exists())
        at.key = replace(at.key, round=3)
        await whole_round(at)


def put_back_attempt(victim: AttackedSilo, copy: Path) -> None:
    for name in ("attempt", "vector", "vector.manifest"):
        if (copy / "masking" / name).exists():
            shutil.copy2(copy / "masking" / name, victim.folder.masking / name)
    shutil.rmtree(victim.folder.updates)
    shutil.copytree(copy / "updates", victim.folder.updates)
    for file in victim.folder.root.glob("journal.sqlite*"):
        file.unlink()
    for file in copy.glob("journal.sqlite*"):
        shutil.copy2(file, victim.folder.root)


async def test_goes_on_with_a_new_round_where_an_old_attempt_was_put_back(tmp_path: Path) -> None:
    """An honest coordinator's new round costs the silo nothing: the old attempt is erased, not played."""
    async with attacked(tmp_path / "silos", NET, bundle=masked_bundle(schedule={"rounds": 9})) as at:
        victim, copy = at.silos[BANK], tmp_path / "copy"
        await at.train()
        at.open()
        await at.play("consistency check")
        await victim.kill()
        victim.snapshot(copy)
        await victim.start()
        await at.play("unmasked")
        await victim.kill()
        put_back_attempt(victim, copy)
        await victim.start()
        at.key = replace(at.key, round=2)
        await whole_round(at)


async def test_goes_on_with_a_silo_that_found_itself_behind_in_the_same_process(tmp_path: Path) -> None:
    """An honest coordinator told it so once; another one, or the same, says nothing of it from then on."""
    async with attacked(tmp_path, NET, bundle=masked_bundle(schedule={"rounds": 9})) as at:
        victim = at.silos[BANK]
        await whole_round(at)
        at.key = replace(at.key, round=2)
        await at.train()
        at.open()
        await at.ask(BANK, None, seen=b"\7" * 32)
        await at.refused(BANK, "masking_memory", "the coordinator saw keys of this silo", declined=POLICY)
        at.key = replace(at.key, round=3)
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        await at.refused(BANK, "masking_memory", "silo-agent trust reset-memory", declined=POLICY)
        assert masking_journal(victim.folder, victim.credentials).problem() is not None


async def test_asks_a_silo_that_trained_before_its_memory_was_lost_for_keys(tmp_path: Path) -> None:
    """In the same process, which had it in its own memory: the disk is looked at when an attempt begins."""
    async with attacked(tmp_path, NET, bundle=masked_bundle(schedule={"rounds": 9})) as at:
        victim = at.silos[BANK]
        await whole_round(at)
        at.key = replace(at.key, round=2)
        await at.train()
        (victim.folder.masking / "memory").unlink()
        at.open()
        await at.ask(BANK, None)
        await at.refused(BANK, "masking_memory", "masking/memory is missing", declined=POLICY)


@pytest.mark.parametrize("how", ["deleted", "put back"])
@pytest.mark.parametrize("when", ["before it trains", "while it masks"])
async def test_goes_on_with_a_silo_whose_list_of_lineages_was_lost_while_it_runs(
    tmp_path: Path, how: str, when: str
) -> None:
    """It would be written anew without the models of the plan, and a second plan from one of them be taken."""
    async with attacked(tmp_path, NET, bundle=masked_bundle(schedule={"rounds": 9})) as at:
        victim = at.silos[BANK]
        await whole_round(at)
        copy = victim.folder.lineages.read_bytes()

        def lose() -> None:
            if how == "deleted":
                victim.folder.lineages.unlink()
            else:
                victim.folder.lineages.write_bytes(copy)

        at.key = replace(at.key, round=2)
        at.model = at.offer(2)
        says = "lineages.json is missing or comes from a backup"
        if when == "before it trains":
            await whole_round(at)
            lose()
            at.key = replace(at.key, round=3)
            at.model = at.offer(3)
            await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        else:
            await at.train()
            at.open()
            await at.play("masked input")
            lose()
            await at.ask(BANK, at.request(BANK))
        await at.refused(BANK, "masking_memory", says, declined=POLICY)
        assert says in str(masking_journal(victim.folder, victim.credentials).problem())


async def test_a_reset_by_people_holds_for_an_agent_that_still_runs(tmp_path: Path) -> None:
    """The command waits for the agent's end; whatever else resets the memory is not written over either."""
    async with attacked(tmp_path, NET, bundle=masked_bundle(schedule={"rounds": 9})) as at:
        victim = at.silos[BANK]
        await whole_round(at)
        at.key = replace(at.key, round=2)
        await at.train()
        at.open()
        await at.play("masked input")
        reset = masking_journal(victim.folder, victim.credentials).reset()
        await at.ask(BANK, at.request(BANK))
        await at.refused(BANK, "masking_memory", "was changed by somebody else", declined=POLICY)
        assert masking_journal(victim.folder, victim.credentials).memory() == reset
        at.key = replace(at.key, round=3)
        await whole_round(at)


async def test_an_honest_coordinator_tells_a_silo_what_it_forgot_before_it_makes_any_keys(tmp_path: Path) -> None:
    """Also where all of its group went back together, and nobody else knows."""
    async with attacked(tmp_path, NET) as at:
        await at.train()
        at.open()
        await at.ask(BANK, None, seen=bytes(32))
        says = "the coordinator saw keys of this silo"
        await at.refused(BANK, "masking_memory", says, declined=POLICY)
        for silo in (HOSPITAL, CLINIC):
            made = await at.answer_to(silo, None)
            at.step(made)
            await at.ask(silo, None, seen=made.digest)  # the same again: it knows them
            assert await at.answer_of(silo) == made


async def test_asks_for_a_plan_that_nobody_approved_where_masks_are_required_and_no_key_says_more(
    tmp_path: Path,
) -> None:
    rules = {BANK: PolicyRules(require_secure_aggregation=True)}
    async with attacked(tmp_path, NET, rules=rules) as at:
        await offered(at, SECOND, "waits for approval by this silo's people", "approved_plans")
        assert at.silos[HOSPITAL].trainer.trained == []


async def test_each_sum_stands_in_the_audit_log_with_plan_model_survivors_and_release_groups(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET) as at:
        await at.train()
        at.open()
        await at.play("masked input")
        await at.deny(CLINIC)
        await at.play("unmasked")
        rest = [silo for silo in SILOS if silo != CLINIC]
        at.require_sum_of(*rest)
        for name in rest:
            silo = at.silos[name]
            log = read_log(silo.folder.audit, keys=[silo.credentials.identity_key.public_key()])
            (entry,) = log.of(Event.SUM_UNMASKED)
            assert (entry.text("plan"), entry.number("round")) == (at.key.plan, 1)
            assert entry.text("model") == at.model.digest
            assert entry.text("survivors").split() == sorted(rest)
            assert entry.number("silos") == len(rest)
            assert entry.text("groups") == at.link.digest.hex()
            told = [it.event for it in log.entries]
            reveal = next(it for it in log.of(Event.KEYS_LEAVE) if it.text("message") == "Reveal")
            assert told.index(Event.SUM_UNMASKED) < log.entries.index(reveal), "it is told before the share leaves"
            (part,) = report_of(log.entries).parts
            assert (part.model, part.survivors.split()) == (at.model.digest, sorted(rest))


@pytest.mark.parametrize(
    "failure",
    [TrainingDiverged("loss is nan at step 3 of 400"), DataError("train.jsonl line 7: mr smith"), StorageError("full")],
    ids=["diverges", "data", "disk"],
)
async def test_makes_training_fail_and_hears_no_more_than_that_it_failed(tmp_path: Path, failure: LoricaError) -> None:
    """A model can be made so that training fails in one way where a record has some word, in another where not."""
    async with attacked(tmp_path, NET) as at:

        def fails(**_: Any) -> Any:
            raise failure

        at.silos[BANK].trainer.train = fails  # type: ignore[method-assign]
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), BANK)
        await at.declined(BANK, DeclineReason.TRAINING_FAILED, f"^{re.escape(FAILED)}$")


async def test_hands_a_second_model_to_a_silo_that_lost_its_journal(tmp_path: Path) -> None:
    """In a further attempt of a round: two deltas of one round would be in two sums."""
    async with attacked(tmp_path, NET) as at:
        await at.train()
        at.open()
        await at.play("unmasked")
        at.key = replace(at.key, round=2)
        first, second = at.offer(2), at.offer(3)
        await at.train(model=first)
        victim = at.silos[BANK]
        await victim.kill()
        for file in victim.folder.root.glob("journal.sqlite*"):
            file.unlink()
        await victim.start()
        victim.seen = len(victim.refusals)
        at.key = replace(at.key, attempt=2)
        await at.peer.order(Prepare(at.key.plan), BANK)
        await at.peer.order(Train(key=at.key, model=second.digest, seconds_left=60.0), BANK)
        await at.refused(BANK, "one_model", f"where this silo had {first.digest} before", declined=POLICY)
        assert (BANK, at.key, second.digest) not in at.peer.trained


async def test_names_models_that_are_none_in_orders_that_end_a_plan(tmp_path: Path) -> None:
    """A model is one of the plan's, for good, once it is there."""
    async with attacked(tmp_path, NET) as at:
        await whole_round(at)
        victim = at.silos[BANK]
        before = victim.folder.lineages.read_bytes()
        real = at.offer(2)
        for number in range(3):
            none = Digest(f"{number + 1000:064x}")
            at.peer.models[none] = real
            await at.peer.order(Finished(plan=at.key.plan, rounds=3, final_model=none, best_model=none), BANK)
            await at.refused(BANK, "IntegrityError", f"{none}")
            assert victim.folder.lineages.read_bytes() == before
