"""What is secret is overwritten: every buffer that a Secret ever owned is zero once an attempt has ended."""

import gc
from dataclasses import replace
from typing import Any

import pytest

from lorica_security.errors import StateError
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import MaskedInput, Reveal
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import states as silo_states
from tests.support import secagg_federation
from tests.support.secagg_federation import PHASES, Federation, entropy, silo_names

NAMES = silo_names(4)


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytearray, bytes]]:
    """(buffer, what it held at first) of every secret that is made, kept alive beyond the secret itself."""
    buffers: list[tuple[bytearray, bytes]] = []
    make, take = Secret.__init__, Secret.taking.__func__  # type: ignore[attr-defined]

    def made(self: Secret, data: Any) -> None:
        make(self, data)
        buffers.append((self._buffer, bytes(self._buffer)))

    def taken(cls: type[Secret], buffer: bytearray) -> Secret:
        secret: Secret = take(cls, buffer)
        buffers.append((buffer, bytes(buffer)))
        return secret

    monkeypatch.setattr(Secret, "__init__", made)
    monkeypatch.setattr(Secret, "taking", classmethod(taken))
    return buffers


@pytest.mark.parametrize("phase", ["", *PHASES])
def test_every_buffer_is_zero_after_an_attempt_whichever_way_it_ended(
    phase: str, owned: list[tuple[bytearray, bytes]]
) -> None:
    federation = Federation(4).run(drops={NAMES[3]: phase} if phase else {})
    if federation.unmask is not None:
        federation.sum()
        federation.unmask.masks.erase()
    federation.end()
    assert len([held for _, held in owned if held]) > 50
    left = [index for index, (buffer, _) in enumerate(owned) if any(buffer)]
    assert not left, f"{len(left)} of {len(owned)} secrets were not overwritten, the first was number {left[0]}"


@pytest.mark.parametrize("phase", PHASES)
def test_a_restart_in_any_phase_leaves_nothing_more(phase: str, owned: list[tuple[bytearray, bytes]]) -> None:
    """The keys that a process had go with it; those that the next one makes of the journal go at the end."""
    federation = Federation(4).run(until=phase)
    for each in federation.silos.values():
        assert isinstance(each.state, silo_states.InAttempt)
        each.state.opening.root.erase()
        for event in each.journal:
            if isinstance(event, silo_events.OpenAttempt):
                each.journal[0] = replace(event, root=Secret(entropy("root", each.name, event.attempt.id.hex())))
        each.restart()
    federation.run()
    federation.sum()
    assert federation.unmask is not None
    federation.unmask.masks.erase()
    federation.end()
    left = [index for index, (buffer, _) in enumerate(owned) if any(buffer)]
    assert not left, f"{len(left)} of {len(owned)} secrets were not overwritten, the first was number {left[0]}"


def test_an_abandoned_attempt_leaves_nothing_that_its_messages_could_be_opened_with(
    owned: list[tuple[bytearray, bytes]],
) -> None:
    federation = Federation(4, of=secagg_federation.attempt(salt="abandoned"))
    federation.run(drops=dict.fromkeys(NAMES[1:], "consistency check"))
    assert any(isinstance(message, MaskedInput) for message in federation.seen)
    assert not any(isinstance(message, Reveal) for message in federation.seen)
    federation.end()
    assert not any(any(buffer) for buffer, _ in owned)
    for each in federation.silos.values():
        assert isinstance(each.state, silo_states.Resting)
        assert not each.journal
        (root,) = each.erased
        with pytest.raises(StateError, match="erased"):
            _ = root.buffer
    roots = [entropy("root", name, federation.attempt.id.hex()) for name in NAMES]
    live = [item for item in gc.get_objects() if isinstance(item, bytearray | Secret)]
    for item in live:
        data = item._buffer if isinstance(item, Secret) else item
        assert not any(root in data for root in roots)


def test_entropy_of_this_module_is_what_roots_are_made_of() -> None:
    """Else the test above would look for something that never was there."""
    of = secagg_federation.attempt()
    assert bytes(secagg_federation.opening(NAMES[0], of).root.buffer) == entropy("root", NAMES[0], of.id.hex())
