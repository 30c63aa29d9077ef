"""Phase 3 at the coordinator, masked vectors come in; survivors are the whole release groups among them."""

from dataclasses import replace

from lorica_security.errors import LoricaError, MalformedMessage
from lorica_security.secure_aggregation.coordinator.effects import Blame, Journal, Offence
from lorica_security.secure_aggregation.coordinator.phases.answers import check_dealt, check_roster, is_repeated
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import abandon, blame_for, without
from lorica_security.secure_aggregation.coordinator.requests import requests_to_all
from lorica_security.secure_aggregation.coordinator.states import Agreeing, Masking, Step
from lorica_security.secure_aggregation.messages import Identities, MaskedInput, SurvivorSet, check_signed
from lorica_security.secure_aggregation.parameters import too_few


def take_masked_input(state: Masking, event: MaskedInput, identities: Identities) -> Step:
    """The vector itself was received whole, and fits its digest: the edge has seen to that."""
    check_roster(state, event.roster)
    check_dealt(state, event.silo)
    if is_repeated(state, event, state.inputs):
        return state, ()
    words = state.roster.parameters.fixed_point.words
    try:
        check_signed(event, identities)
        if event.dealings != state.dealings_digest:
            raise MalformedMessage(f"silo {event.silo} masked for other dealings than it was sent")
    except LoricaError as error:
        return blame_for(state, event.silo, error)
    if event.words != words:
        blame = Blame(silo=event.silo, offence=Offence.WRONG_LENGTH, detail=f"{event.words} words, expected {words}")
        return without(state, event.silo, (Journal(event), blame))
    return replace(
        state,
        awaited=state.awaited - {event.silo},
        inputs=tuple(sorted((*state.inputs, event), key=lambda it: it.silo)),
    ), (Journal(event),)


def to_agreeing(state: Masking) -> Step:
    """Who sent a vector and is in an incomplete group counts as dropped, and helps to unmask the others' sum."""
    vectors = {item.silo: item.vector for item in state.inputs}
    if (lacking := too_few(state.link.partition, state.roster.parameters, vectors)) is not None:
        return abandon(state, f"{len(vectors)} silos sent a masked vector: {lacking}")
    silos = state.link.partition.whole(vectors)
    survivors = SurvivorSet(
        roster=state.roster.digest,
        dealings=state.dealings_digest,
        silos=silos,
        inputs=tuple(vectors[silo] for silo in silos),
    )
    after = Agreeing(
        roster=state.roster,
        link=state.link,
        shared=state.shared,
        inputs=state.inputs,
        survivors=survivors,
        awaited=frozenset(vectors),
    )
    return after, requests_to_all(after)
