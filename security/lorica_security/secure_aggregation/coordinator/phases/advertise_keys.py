"""Phase 1 at the coordinator, keys are advertised: fresh ones of those invited make the roster."""

from dataclasses import replace

from lorica_security.errors import LoricaError, MalformedMessage, WrongTime
from lorica_security.secure_aggregation.coordinator.effects import Journal
from lorica_security.secure_aggregation.coordinator.events import OpenAttempt
from lorica_security.secure_aggregation.coordinator.phases.answers import is_repeated
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import abandon, blame_for
from lorica_security.secure_aggregation.coordinator.requests import requests_to_all
from lorica_security.secure_aggregation.coordinator.states import Advertising, Idle, Sharing, Step
from lorica_security.secure_aggregation.keys import key_agreement
from lorica_security.secure_aggregation.keys.key_agreement import halves
from lorica_security.secure_aggregation.messages import Advertisement, Identities, check_signed
from lorica_security.secure_aggregation.roster import Roster


def open_attempt(state: Idle, event: OpenAttempt, identities: Identities) -> Step:
    """Wait for those invited, where the terms hold for all of them."""
    event.terms.parameters(event.invited)
    return Advertising(opening=event, awaited=frozenset(event.invited)), (Journal(event),)


def take_advertisement(state: Advertising, event: Advertisement, identities: Identities) -> Step:
    """Take keys that are signed, fresh and sound."""
    if event.attempt != state.attempt:
        raise WrongTime(f"keys for {event.attempt} came in {state.attempt}")
    if is_repeated(state, event, state.advertisements):
        return state, ()
    try:
        check_signed(event, identities)
        held = {half for it in state.advertisements for half in (*halves(it.mask_key), *halves(it.box_key))}
        fresh = {*halves(event.mask_key), *halves(event.box_key)}
        if len(fresh) != 4 or held & fresh:
            raise MalformedMessage(f"silo {event.silo} advertised a key that is in use: each silo makes two fresh ones")
        key_agreement.check_public(event.silo, event.mask_key, event.box_key)
    except LoricaError as error:
        return blame_for(state, event.silo, error)
    return replace(
        state,
        awaited=state.awaited - {event.silo},
        advertisements=tuple(sorted((*state.advertisements, event), key=lambda it: it.silo)),
    ), (Journal(event),)


def to_sharing(state: Advertising) -> Step:
    """Make the roster of those who advertised, and send it."""
    try:
        roster = Roster(
            attempt=state.attempt,
            model=state.opening.terms.model,
            link=state.opening.terms.link.digest,
            parameters=state.opening.terms.parameters([it.silo for it in state.advertisements]),
            members=state.advertisements,
        )
    except MalformedMessage as error:
        return abandon(state, str(error))
    after = Sharing(roster=roster, link=state.opening.terms.link, awaited=frozenset(roster.silos))
    return after, requests_to_all(after)
