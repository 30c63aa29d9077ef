"""The state diagrams of ops/docs/secure-aggregation.md are the transitions that the real machines make, and all of
them."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.messages import Delivery, SharedKeys, signed
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import states as silo_states
from tests.support.secagg_federation import PHASES, Federation, identity_key

PAGE = Path(__file__).parents[2] / "ops/docs/secure-aggregation.md"
_EDGE = re.compile(r"^    (\w+) --> (\w+): (\w+)$", re.MULTILINE)

Transition = tuple[str, str, str]


def drawn(index: int) -> set[Transition]:
    """(state, event, next state) of one diagram of the page."""
    text = re.findall(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)[index]
    return {(before, event, after) for before, after, event in _EDGE.findall(text)}


class Watch:
    """Every transition to another state, and a state of each kind, with the party or identities it was stepped with."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.transitions: set[Transition] = set()
        self.states: dict[str, tuple[Any, Any]] = {}

    def __call__(self, state: Any, event: Any, with_: Any) -> Any:
        after, effects = self._step(state, event, with_)
        self.states.setdefault(type(after).__name__, (after, with_))
        if type(after) is not type(state):
            self.transitions.add((type(state).__name__, type(event).__name__, type(after).__name__))
        return after, effects


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Watch, Watch]:
    silo, coordinator = Watch(silo_machine.step), Watch(coordinator_machine.step)
    monkeypatch.setattr(silo_machine, "step", silo)
    monkeypatch.setattr(coordinator_machine, "step", coordinator)
    return silo, coordinator


def silence(phase: str, silos: int, *, told: bool) -> None:
    """So many fall silent in one phase: until its deadline, or until the coordinator is told."""
    run = Federation(4)
    if not told:
        run.run(drops=dict.fromkeys(run.names[:silos], phase))
        return
    run.run(until=phase)
    quiet = run.names[:silos]
    run.queue = [(to, message) for to, message in run.queue if (to or message.silo) not in quiet]
    while run.queue:
        run.deliver()
    for name in quiet:
        if run.coordinator.phase == phase:
            run.tell_coordinator(coordinator_events.SiloDropped(name, "left"))


def false_box() -> None:
    """The first silo's box for the last one holds nothing that opens."""
    run = Federation(4)

    def spoilt(to: str, message: Any) -> Any:
        if isinstance(message, SharedKeys) and message.silo == run.names[0]:
            *others, last = message.boxes
            box = replace(last, box=bytes(len(last.box)))
            lines = (*message.dealing.lines[:-1], replace(message.dealing.lines[-1], box=box.digest))
            dealing = signed(replace(message.dealing, lines=lines), identity_key(message.silo))
            return SharedKeys(dealing=dealing, boxes=(*others, box))
        return message

    run.alter = spoilt
    run.run(until="masked input")
    run.deliver(next(index for index, (to, _) in enumerate(run.queue) if to == run.names[-1]))
    run.deliver(len(run.queue) - 1)  # the complaint


def test_the_diagrams_show_every_transition_of_the_machines_and_no_other(watched: tuple[Watch, Watch]) -> None:
    silo, coordinator = watched
    Federation(4).run()
    for phase, silos, told in product(PHASES, (1, 3), (False, True)):
        silence(phase, silos, told=told)
    false_box()
    for state, party in list(silo.states.values()):
        if isinstance(state, silo_states.InAttempt):
            silo(state, silo_events.AttemptEnded(state.attempt), party)
    assert silo.transitions == drawn(0)
    assert coordinator.transitions == drawn(1)


def test_the_diagrams_name_every_state() -> None:
    for index, states in enumerate((silo_states.STATES, coordinator_states.STATES)):
        named = {name for before, _, after in drawn(index) for name in (before, after)}
        assert named == {state.__name__ for state in states}


def test_each_message_stands_in_the_page_with_its_phase() -> None:
    page = PAGE.read_text()
    assert all(f"| {phase} |" in page for phase in PHASES)
    assert Delivery.__name__ in page
