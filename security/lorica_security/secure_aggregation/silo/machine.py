"""A silo's side of secure aggregation: `step(state, event, party) -> (state, effects)`, by one table.

    Resting     --OpenAttempt--> Advertised     remember the attempt, journal; send the Advertisement
    Advertised  --Roster-------> Sharing        check the roster, journal; encapsulate to all keys, seal boxes
    Sharing     --SharedKeys---> Dealt          journal what was made; send it
    Dealt       --Delivery-----> Masking        check dealings and boxes; remember who dealt, journal; mask the vector
    Dealt       --Delivery-----> Resting        a dealer dealt falsely: send a Complaint, erase
    Masking     --VectorMasked-> Masked         journal the digest; send the MaskedInput
    Masked      --SurvivorSet--> Agreed         journal the set; sign it, once
    Agreed      --UnmaskRequest> Revealed       `threshold` signatures on that set; remember, journal; send the Reveal
    any attempt --AttemptEnded-> Resting        erase

A message that was answered may come again, the very same, and is answered by the very same bytes; another in its place
is a Conflict. All else raises and changes nothing. A handler checks everything, then commits.

Effects stand in the order in which they must be done: `Remember` and `Journal` are durable before anything is sent. The
journal of an attempt is the list of its events, which `resumption` replays. All that is random comes from the root in
OpenAttempt, but for what was encapsulated, which is in the journalled SharedKeys: a replay gives the same state and the
same bytes. `Erase` ends it: root and journal go, in memory and on disk. The root must not outlive the attempt; whoever
has it and the boxes can open them.

What this machine holds a coordinator to (DESIGN section 4), by rule:
- every member's keys are signed by the identity key that this silo's own people pinned, so that phantoms cannot fill a
  cohort;
- model, tensors and parameters are what this silo expects and demands, and are bound to every key by the roster digest;
- the roster is bound to the newest release groups that this silo holds, and nobody in its own has seen keys of this
  silo that it does not remember: else it forgot what it took part in, or its disk went back;
- masks go only to those who dealt, and are bound to who dealt what; survivors are whole release groups of them, with
  the vectors that they announced. A silo whose group is incomplete counts as dropped; it signs and reveals like the
  others;
- one survivor set per attempt is signed, and nothing is revealed but for that set, signed by `threshold` dealers;
- one share per dealer: of the self mask for a survivor, of the mask key for all others.
"""

from collections.abc import Callable
from typing import Any

from lorica_security.errors import WrongTime
from lorica_security.secure_aggregation.messages import Delivery, SharedKeys, SurvivorSet, UnmaskRequest
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.events import AttemptEnded, Event, OpenAttempt, VectorMasked
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.advertise_keys import open_again, open_attempt
from lorica_security.secure_aggregation.silo.phases.attempt_end import end_at_rest, end_attempt
from lorica_security.secure_aggregation.silo.phases.consistency_check import survivors_again, take_survivors
from lorica_security.secure_aggregation.silo.phases.masked_input import (
    delivery_after_masking,
    delivery_again,
    take_delivery,
    take_vector,
    vector_again,
)
from lorica_security.secure_aggregation.silo.phases.share_keys import (
    own_dealing_again,
    roster_after_dealing,
    roster_again,
    take_own_dealing,
    take_roster,
)
from lorica_security.secure_aggregation.silo.phases.unmasking import take_unmask_request, unmask_request_again
from lorica_security.secure_aggregation.silo.states import (
    Advertised,
    Agreed,
    Dealt,
    Masked,
    Masking,
    Resting,
    Revealed,
    Sharing,
    State,
    Step,
)


def step(state: State, event: Event, party: Party) -> Step:
    """The state after `event`, and what to do, in this order.

    Raises WrongTime (does not fit the state), Conflict (a second, different answer was asked for), PolicyRefusal (this
    silo's rules; the roster is to be refused for good), AuthenticationError, IntegrityError or MalformedMessage.
    """
    handler = TABLE.get((type(state), type(event)))
    if handler is None:
        raise WrongTime(f"{type(event).__name__} does not fit the state {type(state).__name__}: nothing was changed")
    return handler(state, event, party)


TABLE: dict[tuple[type[State], type[Event]], Callable[[Any, Any, Party], Step]] = {
    (Resting, OpenAttempt): open_attempt,
    (Resting, AttemptEnded): end_at_rest,
    (Advertised, OpenAttempt): open_again,
    (Advertised, Roster): take_roster,
    (Advertised, AttemptEnded): end_attempt,
    (Sharing, Roster): roster_again,
    (Sharing, SharedKeys): take_own_dealing,
    (Sharing, AttemptEnded): end_attempt,
    (Dealt, Roster): roster_after_dealing,
    (Dealt, SharedKeys): own_dealing_again,
    (Dealt, Delivery): take_delivery,
    (Dealt, AttemptEnded): end_attempt,
    (Masking, Delivery): delivery_again,
    (Masking, VectorMasked): take_vector,
    (Masking, AttemptEnded): end_attempt,
    (Masked, Delivery): delivery_after_masking,
    (Masked, VectorMasked): vector_again,
    (Masked, SurvivorSet): take_survivors,
    (Masked, AttemptEnded): end_attempt,
    (Agreed, SurvivorSet): survivors_again,
    (Agreed, UnmaskRequest): take_unmask_request,
    (Agreed, AttemptEnded): end_attempt,
    (Revealed, UnmaskRequest): unmask_request_again,
    (Revealed, AttemptEnded): end_attempt,
}
