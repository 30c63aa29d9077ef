"""The coordinator's side: `step(state, event, identities) -> (state, effects)`, by one table, for one attempt.

    Idle         --OpenAttempt----> Advertising    wait for the keys of those invited
    Advertising  --Advertisement--> Sharing        all are there: send the Roster
    Sharing      --SharedKeys-----> Masking        send a Delivery to all who dealt
    Masking      --MaskedInput----> Agreeing       send the SurvivorSet, of whole release groups, to all who sent one
    Agreeing     --Agreement------> Unmasking      send the UnmaskRequest to all who signed
    Unmasking    --Reveal---------> Unmasked       `threshold` good replies: how to unmask the sum
    any phase    --Complaint------> Abandoned      a dealer dealt falsely, or was falsely accused

A phase ends when all it waits for have answered, were dropped (SiloDropped: its connection is gone for good) or are
late (PhaseClosed: the deadline has passed); with fewer than it needs, the attempt is abandoned and the reason names
everybody who is missing. One attempt has one course: what comes late does not fit the state any more.

Nobody has to trust this side; it checks in order to know whom to leave out. A silo whose message is false is named
(Blame), dropped from the attempt, and not waited for. Shares that come back are held against the commitments that their
dealer signed, so that the culprit is the one who altered them; secrets that do not fit what was advertised convict the
dealer.

`Journal` effects are durable before anything after them is sent: the list of an attempt's events, replayed by
`restored`, gives the same state and the same messages. A message that was refused is not among them: its sender's
SiloDropped stands there.
"""

from collections.abc import Callable
from typing import Any

from lorica_security.errors import WrongTime
from lorica_security.secure_aggregation.coordinator.effects import Effect, Journal
from lorica_security.secure_aggregation.coordinator.events import Event, OpenAttempt, PhaseClosed, SiloDropped
from lorica_security.secure_aggregation.coordinator.phases.advertise_keys import (
    open_attempt,
    take_advertisement,
    to_sharing,
)
from lorica_security.secure_aggregation.coordinator.phases.complaints import take_complaint
from lorica_security.secure_aggregation.coordinator.phases.consistency_check import take_agreement, to_unmasking
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import close_phase, drop
from lorica_security.secure_aggregation.coordinator.phases.masked_input import take_masked_input, to_agreeing
from lorica_security.secure_aggregation.coordinator.phases.share_keys import take_shared_keys, to_masking
from lorica_security.secure_aggregation.coordinator.phases.unmasking import late_reveal, take_reveal, to_nothing
from lorica_security.secure_aggregation.coordinator.states import (
    Advertising,
    Agreeing,
    Idle,
    Masking,
    Phase,
    Sharing,
    State,
    Step,
    Unmasked,
    Unmasking,
)
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    Identities,
    MaskedInput,
    Reveal,
    SharedKeys,
)


def step(state: State, event: Event, identities: Identities) -> Step:
    """The state after `event`, and what to do, in this order; `identities` are the enrolled silos' identity keys.

    Raises WrongTime or Conflict, and changes nothing. A false message does not raise: its sender is blamed and dropped.
    """
    handler = TABLE.get((type(state), type(event)))
    if handler is None:
        raise WrongTime(f"{type(event).__name__} does not fit the phase {state.phase}: nothing was changed")
    after, effects = handler(state, event, identities)
    if isinstance(after, Phase) and not after.awaited:
        after, further = _CLOSING[type(after)](after)
        effects = (*effects, *further)
    return after, effects


def restored(journal: tuple[Event, ...], identities: Identities) -> Step:
    """Where a restarted coordinator stands, and the last event's effects but for the journal's, to be done again."""
    state: State = Idle()
    effects: tuple[Effect, ...] = ()
    for event in journal:
        state, effects = step(state, event, identities)
    return state, tuple(effect for effect in effects if not isinstance(effect, Journal))


_CLOSING: dict[type[Phase], Callable[[Any], Step]] = {
    Advertising: to_sharing,
    Sharing: to_masking,
    Masking: to_agreeing,
    Agreeing: to_unmasking,
    Unmasking: to_nothing,
}
"""How a phase ends that waits for nobody any more."""

TABLE: dict[tuple[type[State], type[Event]], Callable[[Any, Any, Identities], Step]] = {
    (Idle, OpenAttempt): open_attempt,
    (Advertising, Advertisement): take_advertisement,
    (Advertising, SiloDropped): drop,
    (Advertising, PhaseClosed): close_phase,
    (Sharing, SharedKeys): take_shared_keys,
    (Sharing, SiloDropped): drop,
    (Sharing, PhaseClosed): close_phase,
    (Masking, MaskedInput): take_masked_input,
    (Masking, Complaint): take_complaint,
    (Masking, SiloDropped): drop,
    (Masking, PhaseClosed): close_phase,
    (Agreeing, Agreement): take_agreement,
    (Agreeing, SiloDropped): drop,
    (Agreeing, PhaseClosed): close_phase,
    (Unmasking, Reveal): take_reveal,
    (Unmasking, SiloDropped): drop,
    (Unmasking, PhaseClosed): close_phase,
    (Unmasked, Reveal): late_reveal,
}
