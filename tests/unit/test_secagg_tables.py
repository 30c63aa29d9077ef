"""Every pair of state and event, for both machines: a transition of the table, or WrongTime with nothing changed."""

from dataclasses import replace
from typing import Any

import pytest

from lorica_security.errors import LoricaError, WrongTime
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.messages import Complaint, signed
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import resumption as silo_resumption
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from tests.support.secagg_federation import Federation, Silo, identity_key, opening

SILO_ACCEPTS = {
    "Resting": "OpenAttempt AttemptEnded",
    "Advertised": "OpenAttempt Roster AttemptEnded",
    "Sharing": "Roster SharedKeys AttemptEnded",
    "Dealt": "Roster SharedKeys Delivery AttemptEnded",
    "Masking": "Delivery VectorMasked AttemptEnded",
    "Masked": "Delivery VectorMasked SurvivorSet AttemptEnded",
    "Agreed": "SurvivorSet UnmaskRequest AttemptEnded",
    "Revealed": "UnmaskRequest AttemptEnded",
}
COORDINATOR_ACCEPTS = {
    "Idle": "OpenAttempt",
    "Advertising": "Advertisement SiloDropped PhaseClosed",
    "Sharing": "SharedKeys SiloDropped PhaseClosed",
    "Masking": "MaskedInput Complaint SiloDropped PhaseClosed",
    "Agreeing": "Agreement SiloDropped PhaseClosed",
    "Unmasking": "Reveal SiloDropped PhaseClosed",
    "Unmasked": "Reveal",
    "Abandoned": "",
}


def silo_samples() -> tuple[dict[str, silo_states.State], dict[str, silo_events.Event], silo_party.Party]:
    """A state of each type and an event of each type, of the first silo of one attempt; made anew at every call."""
    federation = Federation(3).run()
    each = federation.silos[federation.names[0]]
    journal = list(each.journal)
    events: dict[str, silo_events.Event] = {type(event).__name__: event for event in journal}
    events["AttemptEnded"] = silo_events.AttemptEnded(federation.attempt)
    states: dict[str, silo_states.State] = {"Resting": silo_states.Resting(SiloMemory())}
    (answered,) = each.memory.plans
    before = replace(each.memory, plans=(replace(answered, answered=False),))
    for last in range(1, len(journal) + 1):
        memory = each.memory if last == len(journal) else before
        state, _ = silo_resumption.restored(memory, tuple(journal[:last]), each.party)
        states[type(state).__name__] = state
    return states, events, each.party


def coordinator_samples() -> tuple[
    dict[str, coordinator_states.State], dict[str, coordinator_events.Event], Federation
]:
    federation = Federation(3).run()
    events: dict[str, coordinator_events.Event] = {type(event).__name__: event for event in federation.journal}
    states: dict[str, coordinator_states.State] = {"Idle": coordinator_states.Idle()}
    for last in range(1, len(federation.journal) + 1):
        state, _ = coordinator_machine.restored(tuple(federation.journal[:last]), federation.identities)
        states[type(state).__name__] = state
    states["Abandoned"] = coordinator_states.Abandoned(attempt=federation.attempt, reason="sample")
    one, other = federation.names[:2]
    roster = events["Reveal"].roster  # type: ignore[union-attr]
    events["Complaint"] = signed(Complaint(roster=roster, silo=one, dealer=other, key=bytes(32)), identity_key(one))
    events["SiloDropped"] = coordinator_events.SiloDropped(one, "sample")
    events["PhaseClosed"] = coordinator_events.PhaseClosed("share keys")
    return states, events, federation


SILO_STATES, SILO_EVENTS, PARTY = silo_samples()
COORDINATOR_STATES, COORDINATOR_EVENTS, FEDERATION = coordinator_samples()
UNTOUCHED_SILO_STATES, UNTOUCHED_COORDINATOR_STATES = silo_samples()[0], coordinator_samples()[0]


def test_the_samples_cover_every_state_and_event() -> None:
    assert {type(it) for it in SILO_STATES.values()} == set(silo_states.STATES)
    assert {type(it) for it in SILO_EVENTS.values()} == set(silo_events.EVENTS)
    assert {type(it) for it in COORDINATOR_STATES.values()} == set(coordinator_states.STATES)
    assert {type(it) for it in COORDINATOR_EVENTS.values()} == set(coordinator_events.EVENTS)


@pytest.mark.parametrize(
    ("table", "accepts"),
    [(silo_machine.TABLE, SILO_ACCEPTS), (coordinator_machine.TABLE, COORDINATOR_ACCEPTS)],
    ids=["silo", "coord"],
)
def test_the_tables_hold_exactly_the_pairs_listed_here(table: Any, accepts: dict[str, str]) -> None:
    listed = {(state, event) for state, events in accepts.items() for event in events.split()}
    assert {(state.__name__, event.__name__) for state, event in table} == listed


@pytest.mark.parametrize("state", [*silo_states.STATES, *coordinator_states.STATES])
def test_no_state_is_a_kind_of_another(state: type) -> None:
    """Else a check for an earlier phase would let a later one through."""
    assert state.__mro__ == (state, object)


@pytest.mark.parametrize("state", SILO_STATES)
@pytest.mark.parametrize("event", SILO_EVENTS)
def test_every_pair_of_the_silo(state: str, event: str) -> None:
    before = SILO_STATES[state]
    if event not in SILO_ACCEPTS[state].split():
        with pytest.raises(WrongTime, match=state):
            silo_machine.step(before, SILO_EVENTS[event], PARTY)
    else:
        after, effects = silo_machine.step(before, SILO_EVENTS[event], PARTY)
        repeated, same = silo_machine.step(before, SILO_EVENTS[event], PARTY)
        assert (after, effects) == (repeated, same)
        durable = [isinstance(effect, silo_effects.Remember | silo_effects.Journal) for effect in effects]
        assert durable == sorted(durable, reverse=True), "what is durable comes before what is sent"
    assert before == UNTOUCHED_SILO_STATES[state]


@pytest.mark.parametrize("state", COORDINATOR_STATES)
@pytest.mark.parametrize("event", COORDINATOR_EVENTS)
def test_every_pair_of_the_coordinator(state: str, event: str) -> None:
    before = COORDINATOR_STATES[state]
    if event not in COORDINATOR_ACCEPTS[state].split():
        with pytest.raises(WrongTime, match=before.phase):
            coordinator_machine.step(before, COORDINATOR_EVENTS[event], FEDERATION.identities)
    else:
        try:
            _, effects = coordinator_machine.step(before, COORDINATOR_EVENTS[event], FEDERATION.identities)
        except LoricaError:
            pass  # the sample does not fit this state's values; test_secagg_culprits pins which error it is
        else:
            journals = [
                index for index, effect in enumerate(effects) if isinstance(effect, coordinator_effects.Journal)
            ]
            assert journals in ([], [0])
    assert before == UNTOUCHED_COORDINATOR_STATES[state]


def test_the_answer_to_a_repeated_message_is_the_same_bytes() -> None:
    each = Silo(PARTY)
    first = {}
    for name in ("OpenAttempt", "Roster", "Delivery", "SurvivorSet", "UnmaskRequest"):
        event = SILO_EVENTS[name]
        first[name] = each.take(event)
        if name == "Delivery":
            assert each.take(silo_events.VectorMasked(each.state.vector)) == first[name]  # type: ignore[union-attr]
        assert each.take(event) == first[name]


def test_no_state_shows_a_secret() -> None:
    root = opening("silo-00", FEDERATION.attempt).root
    for state in SILO_STATES.values():
        assert bytes(root.buffer).hex() not in repr(state)
        assert repr(bytes(root.buffer))[2:-1] not in repr(state)
    erased = replace(opening("silo-00", FEDERATION.attempt)).root
    erased.erase()
    assert repr(erased) == "Secret(erased)"
    assert bytes(erased._buffer) == bytes(32)
