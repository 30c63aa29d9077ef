"""Every order of messages, restarts and restored disks that a hostile coordinator can bring one silo to, and what never
comes of it.

Everything is tried against the real silo machine (tests/support/exploration.py): a slice of it here, two attempts of
two rounds of two plans with `make leak-search`. With a rule of the machine broken, the exploration finds what the rule
is there for.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from lorica_security.secure_aggregation.messages import Delivery, SurvivorSet, UnmaskRequest
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from lorica_security.secure_aggregation.silo.phases import consistency_check as silo_consistency_check
from lorica_security.secure_aggregation.silo.phases import masked_input as silo_masked_input
from lorica_security.secure_aggregation.silo.phases import unmasking as silo_unmasking
from tests.support.exploration import (
    PLANS,
    Broken,
    Check,
    Exploration,
    Pool,
    own_promises_broken,
    restored_promises_broken,
    told_too_much,
)

whole_alone = pytest.mark.skipif(
    "LORICA_SCHEDULES" not in os.environ, reason="takes a minute or two: `make leak-search` explores the whole"
)


def check_covered(exploration: Exploration, states: int) -> None:
    """The states are those that were counted when this was written, or more, and none of the machine's is missing."""
    assert len(exploration.seen) >= states, f"{len(exploration.seen)} states were reached, {states} are there"
    assert set(exploration.kinds) == {state.__name__ for state in silo_states.STATES}
    assert {"WrongTime", "Conflict", "PolicyRefusal"} <= set(exploration.refusals)


def learnt(exploration: Exploration, what: str) -> Collection[frozenset[Any]]:
    """What of this kind came out together, in one state or another."""
    return {frozenset(fact for fact in key[1] if fact[0] == what) for key in exploration.seen}


def test_a_silo_keeps_its_promises_in_every_order_of_messages_and_restarts() -> None:
    """Two attempts of a round, with other rosters, deliveries, survivor sets and requests of each, and ones that do not
    fit."""
    explored = Exploration(Pool(plans=1, rounds=1, attempts=2)).run(own_promises_broken)
    check_covered(explored, 800)
    assert {"IntegrityError", "MalformedMessage"} <= set(explored.refusals)
    assert max(len(one) for one in learnt(explored, "signed")) == 2, "one set of each attempt"
    assert max(len(one) for one in learnt(explored, "revealed")) == 1, "shares in one attempt of the round"


def test_what_was_sent_in_other_rounds_and_plans_does_not_help() -> None:
    pool = Pool(plans=2, rounds=2, attempts=1, size="bare")
    explored = Exploration(pool, watched=(0, 1)).run(own_promises_broken)
    check_covered(explored, 950)
    assert {frozenset(plan.plan for plan in node.memory.plans) for node in explored.nodes.values()} >= {
        frozenset(PLANS)
    }


def test_a_silo_whose_disk_is_put_back_reveals_for_one_survivor_set_all_the_same() -> None:
    """At most `colluders` of them: the peers sign one set of an attempt, whatever this one forgot."""
    explored = Exploration(Pool(plans=1, rounds=1, attempts=1), restores=1, honest_peers=True)
    check_covered(explored.run(restored_promises_broken), 6200)
    assert max(len(one) for one in learnt(explored, "signed")) == 2, "nothing was put back: it signed no other set"
    assert max(len(one) for one in learnt(explored, "revealed")) == 1


@whole_alone
@pytest.mark.parametrize("round_", [1, 2])
@pytest.mark.parametrize("plan", [0, 1])
def test_a_silo_keeps_its_promises_over_two_attempts_of_two_rounds_of_two_plans(plan: int, round_: int) -> None:
    """Each round is watched by itself, since each promise is of one round; the messages of all are delivered."""
    pool = Pool(plans=2, rounds=2, attempts=2, size="lean")
    check_covered(Exploration(pool, watched=(plan, round_)).run(own_promises_broken), 18_000)


@whole_alone
@pytest.mark.parametrize(("attempts", "size", "restores"), [(1, "full", 2), (2, "bare", 2)])
def test_a_disk_that_is_put_back_twice_reveals_for_one_survivor_set_of_each_attempt(
    attempts: int, size: str, restores: int
) -> None:
    pool = Pool(plans=1, rounds=1, attempts=attempts, size=size)
    explored = Exploration(pool, restores=restores, honest_peers=True).run(restored_promises_broken)
    check_covered(explored, 15_000)


# ---- broken on purpose
# -------------------------------------------------------------------------------------------------


def own_promises(attempts: int = 1, check: Check = own_promises_broken) -> Exploration:
    return Exploration(Pool(plans=1, rounds=1, attempts=attempts, size="bare")).run(check)


def changed(
    monkeypatch: pytest.MonkeyPatch,
    at: tuple[type[silo_states.State], type[silo_events.Event]],
    change: Callable[[Any, tuple[silo_effects.Effect, ...]], silo_states.Step],
) -> None:
    """The step of the machine's table at `at`, and then `change` of the state and the effects that it led to."""
    handler = silo_machine.TABLE[at]
    monkeypatch.setitem(silo_machine.TABLE, at, lambda state, event, party: change(*handler(state, event, party)))


def test_nothing_is_found_in_the_small_worlds_as_they_are() -> None:
    own_promises(attempts=2)


def test_finds_a_silo_that_signs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(silo_machine.TABLE, (silo_states.Agreed, SurvivorSet), silo_consistency_check.take_survivors)
    with pytest.raises(Broken, match="2 different things were signed"):
        own_promises()


def test_finds_a_silo_that_signs_before_it_writes_down_what(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, (silo_states.Masked, SurvivorSet), lambda state, effects: (state, effects[::-1]))
    with pytest.raises(Broken, match=r"2 different things were signed .* killed after 1 effects"):
        own_promises()


def test_finds_a_silo_that_takes_an_attempt_after_it_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: SiloMemory, attempt: Any) -> SiloMemory:
        return self

    monkeypatch.setattr(SiloMemory, "answered", forgetful)
    with pytest.raises(Broken, match=r"of attempt .0, 1, 1., which was unmasked, was masked again in .0, 1, 2."):
        own_promises(attempts=2, check=told_too_much)
    with pytest.raises(Broken, match="and it is not remembered"):
        own_promises(attempts=2)


def test_finds_a_silo_that_takes_any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SiloMemory, "check_may_join", lambda self, attempt: None)
    with pytest.raises(Broken, match=r"2 different things were signed|was masked again"):
        own_promises(attempts=2, check=told_too_much)


def test_finds_a_silo_that_reveals_before_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(state: Any, effects: tuple[silo_effects.Effect, ...]) -> silo_states.Step:
        remember, journal, send = effects
        return state, (send, remember, journal)

    changed(monkeypatch, (silo_states.Agreed, UnmaskRequest), first)
    with pytest.raises(Broken, match="before the request was written down"):
        own_promises()


def test_finds_a_silo_that_masks_whatever_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of two masked vectors of one delta is what was masked with, and nothing else."""

    def anew(state: silo_states.Masked, event: Delivery, party: silo_party.Party) -> silo_states.Step:
        dealt = silo_states.Dealt(memory=state.memory, opening=state.opening, roster=state.roster, shared=state.shared)
        return silo_masked_input.take_delivery(dealt, event, party)

    monkeypatch.setitem(silo_machine.TABLE, (silo_states.Masked, Delivery), anew)
    with pytest.raises(Broken, match="2 different things were masked"):
        Exploration(Pool(plans=1, rounds=1, attempts=1)).run(own_promises_broken)


def test_finds_a_refusal_that_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = silo_machine.TABLE[silo_states.Advertised, Roster]

    def erasing(state: silo_states.Advertised, event: Any, party: silo_party.Party) -> silo_states.Step:
        try:
            return handler(state, event, party)
        except Exception:
            object.__setattr__(state, "memory", replace(state.memory, sequence=99))
            raise

    monkeypatch.setitem(silo_machine.TABLE, (silo_states.Advertised, Roster), erasing)
    with pytest.raises(Broken, match="what was brought to it changed"):
        own_promises(attempts=2)


def test_finds_that_too_few_signatures_make_a_restored_disk_reveal_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silo_unmasking, "check_agreements", lambda *_: None)
    pool = Pool(plans=1, rounds=1, attempts=1, size="bare")
    with pytest.raises(Broken, match=r"both shares of silo-03 were revealed .* put the snapshot back"):
        Exploration(pool, restores=1, honest_peers=True).run(restored_promises_broken)
