"""Phase 4 at the coordinator, the survivor set is signed: with `threshold` signatures shares are asked for."""

from dataclasses import replace

from lorica_security.errors import LoricaError, MalformedMessage
from lorica_security.secure_aggregation.coordinator.effects import Journal
from lorica_security.secure_aggregation.coordinator.phases.answers import check_roster, check_sent, is_repeated
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import abandon, blame_for
from lorica_security.secure_aggregation.coordinator.requests import requests_to_all
from lorica_security.secure_aggregation.coordinator.states import Agreeing, Step, Unmasking
from lorica_security.secure_aggregation.messages import Agreement, Identities, check_signed


def take_agreement(state: Agreeing, event: Agreement, identities: Identities) -> Step:
    """Take a signature on the very survivor set that was sent."""
    check_roster(state, event.roster)
    check_sent(state, event.silo)
    if is_repeated(state, event, state.agreements):
        return state, ()
    try:
        check_signed(event, identities)
        if event.survivors != state.survivors.digest:
            raise MalformedMessage(f"silo {event.silo} signed another survivor set than it was sent")
    except LoricaError as error:
        return blame_for(state, event.silo, error)
    return replace(
        state,
        awaited=state.awaited - {event.silo},
        agreements=tuple(sorted((*state.agreements, event), key=lambda it: it.silo)),
    ), (Journal(event),)


def to_unmasking(state: Agreeing) -> Step:
    """Ask the signers for shares, where `threshold` have signed."""
    threshold = state.roster.parameters.threshold
    if len(state.agreements) < threshold:
        return abandon(state, f"{len(state.agreements)} silos signed the survivor set, at least {threshold} must")
    signers = tuple(item.silo for item in state.agreements)
    after = Unmasking(
        roster=state.roster,
        link=state.link,
        shared=state.shared,
        inputs=state.inputs,
        survivors=state.survivors,
        agreements=state.agreements,
        awaited=frozenset(signers),
    )
    return after, requests_to_all(after)
