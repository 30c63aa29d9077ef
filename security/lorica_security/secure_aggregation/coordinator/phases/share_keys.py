"""Phase 2 at the coordinator, keys are shared: each silo deals to the whole roster, or is left out."""

from dataclasses import replace

from lorica_security.errors import LoricaError, MalformedMessage
from lorica_security.secure_aggregation.coordinator.effects import Journal
from lorica_security.secure_aggregation.coordinator.phases.answers import check_roster, is_repeated
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import abandon, blame_for
from lorica_security.secure_aggregation.coordinator.requests import requests_to_all
from lorica_security.secure_aggregation.coordinator.states import Masking, Sharing, Step
from lorica_security.secure_aggregation.dealings import check_dealing
from lorica_security.secure_aggregation.messages import OWN_BOX, Identities, SharedKeys
from lorica_security.secure_aggregation.parameters import too_few


def take_shared_keys(state: Sharing, event: SharedKeys, identities: Identities) -> Step:
    """Take a dealing that is signed, with a box for each other member."""
    check_roster(state, event.dealing.roster)
    if is_repeated(state, event, state.shared):
        return state, ()
    try:
        check_dealing(state.roster, event.dealing, identities)
        others = tuple(silo for silo in state.roster.silos if silo != event.silo)
        if tuple(share.holder for share in event.boxes) != others:
            raise MalformedMessage(f"silo {event.silo} sent boxes for other holders than the rest of the roster")
        digests = {share.holder: share.digest for share in event.boxes} | {event.silo: OWN_BOX}
        if any(line.box != digests[silo] for silo, line in zip(state.roster.silos, event.dealing.lines, strict=True)):
            raise MalformedMessage(f"silo {event.silo} sent other boxes than it signed")
    except LoricaError as error:
        return blame_for(state, event.silo, error)
    return replace(
        state,
        awaited=state.awaited - {event.silo},
        shared=tuple(sorted((*state.shared, event), key=lambda it: it.silo)),
    ), (Journal(event),)


def to_masking(state: Sharing) -> Step:
    """Deliver the boxes to all who dealt, where a sum can come out of them."""
    dealers = tuple(item.silo for item in state.shared)
    if (lacking := too_few(state.link.partition, state.roster.parameters, dealers)) is not None:
        return abandon(state, f"{len(dealers)} of {len(state.roster.silos)} silos shared keys: {lacking}")
    after = Masking(roster=state.roster, link=state.link, shared=state.shared, awaited=frozenset(dealers))
    return after, requests_to_all(after)
