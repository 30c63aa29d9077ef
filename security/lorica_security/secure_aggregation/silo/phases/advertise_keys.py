"""Phase 1, a silo advertises its keys: the attempt is remembered and journalled before anything is sent."""

from dataclasses import replace

from lorica_security.errors import Conflict, PolicyRefusal
from lorica_security.secure_aggregation.keys import key_agreement
from lorica_security.secure_aggregation.keys.key_agreement import KeyPair, erase_all
from lorica_security.secure_aggregation.messages import Advertisement, signed
from lorica_security.secure_aggregation.silo.effects import Journal, Remember, Send
from lorica_security.secure_aggregation.silo.events import OpenAttempt
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.states import Advertised, Resting, Step


def open_attempt(state: Resting, event: OpenAttempt, party: Party) -> Step:
    """Join an attempt that the memory allows, with fresh keys."""
    if event.attempt.federation != party.federation:
        raise PolicyRefusal(
            "federation", f"attempt of federation {event.attempt.federation}: this silo is in {party.federation}"
        )
    state.memory.check_may_join(event.attempt)
    others = party.group_mates
    opening = replace(event, seen=tuple((silo, digest) for silo, digest in state.memory.seen if silo in others))
    advertisement = own_advertisement(opening, party)
    memory = state.memory.joined(event.attempt, advertisement.digest)
    after = Advertised(memory=memory, opening=opening)
    return after, (Remember(memory), Journal(opening), Send(advertisement))


def open_again(state: Advertised, event: OpenAttempt, party: Party) -> Step:
    """The root that it began with stays; the one that came with the repetition is not used."""
    opening = state.opening
    if (event.attempt, event.model, event.tensors) != (opening.attempt, opening.model, opening.tensors):
        raise Conflict(f"{event.attempt} was opened during {state.attempt}: end that one first")
    return state, (Send(own_advertisement(opening, party)),)


def own_advertisement(opening: OpenAttempt, party: Party) -> Advertisement:
    """This silo's keys for the attempt: the same bytes whenever they are asked for."""
    masks = KeyPair(key_agreement.mask_secret(opening.root, opening.attempt))
    boxes = KeyPair(key_agreement.box_secret(opening.root, opening.attempt))
    advertisement = Advertisement(
        attempt=opening.attempt, silo=party.silo, mask_key=masks.public, box_key=boxes.public, seen=opening.seen
    )
    erase_all(masks, boxes)
    return signed(advertisement, party.identity_key)
