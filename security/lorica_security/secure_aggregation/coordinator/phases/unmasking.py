"""Phase 5 at the coordinator, shares are revealed: each is held against the commitment that its dealer signed."""

from dataclasses import replace

from lorica_security.errors import LoricaError, MalformedMessage, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.effects import Blame, Journal, Offence, Unmask
from lorica_security.secure_aggregation.coordinator.phases.answers import check_roster, dealers_of, is_repeated
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import abandon, blame_for, without
from lorica_security.secure_aggregation.coordinator.phases.recovered_masks import (
    FalseDealing,
    mask_sum,
    recovered_secret,
)
from lorica_security.secure_aggregation.coordinator.states import Step, Unmasked, Unmasking
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import MASK_KEY, SELF_MASK, share_commitment
from lorica_security.secure_aggregation.messages import (
    Identities,
    MaskKeyShare,
    Reveal,
    RevealedShare,
    SelfMaskShare,
    check_signed,
)


def take_reveal(state: Unmasking, event: Reveal, identities: Identities) -> Step:
    """Take shares that are the ones committed to; `threshold` replies unmask the sum."""
    check_roster(state, event.roster)
    if event.silo not in (item.silo for item in state.agreements):
        raise WrongTime(f"silo {event.silo} reveals shares, and was not asked")
    if is_repeated(state, event, state.reveals):
        return state, ()
    try:
        check_signed(event, identities)
        _check_kinds(state, event)
    except LoricaError as error:
        return blame_for(state, event.silo, error)
    for share in event.shares:
        if not _is_as_committed(state, event.silo, share):
            detail = f"its share of silo {share.dealer} is not the one that {share.dealer} committed to"
            blame = Blame(silo=event.silo, offence=Offence.BAD_SHARE, detail=detail)
            return without(state, event.silo, (Journal(event), blame))
    after = replace(
        state,
        awaited=state.awaited - {event.silo},
        reveals=tuple(sorted((*state.reveals, event), key=lambda it: it.silo)),
    )
    if len(after.reveals) < state.roster.parameters.threshold:
        return after, (Journal(event),)
    done, effects = _to_unmasked(after)
    return done, (Journal(event), *effects)


def late_reveal(state: Unmasked, event: Reveal, identities: Identities) -> Step:
    """More than was needed; nobody's fault."""
    return state, ()


def _check_kinds(state: Unmasking, reveal: Reveal) -> None:
    expected = tuple(
        (dealer, SelfMaskShare if dealer in state.survivors.silos else MaskKeyShare) for dealer in dealers_of(state)
    )
    if tuple((share.dealer, type(share)) for share in reveal.shares) != expected:
        raise MalformedMessage(f"silo {reveal.silo} reveals other shares than the survivor set asks for")


def _is_as_committed(state: Unmasking, holder: SiloName, revealed: RevealedShare) -> bool:
    dealing = next(item.dealing for item in state.shared if item.silo == revealed.dealer)
    line = dealing.lines[state.roster.place(holder) - 1]
    kind, commitment = (SELF_MASK, line.self_mask) if isinstance(revealed, SelfMaskShare) else (MASK_KEY, line.mask_key)
    return commitment == share_commitment(
        roster=state.roster.digest,
        kind=kind,
        dealer=revealed.dealer,
        holder=holder,
        salt=revealed.salt,
        share=revealed.share,
    )


def _to_unmasked(state: Unmasking) -> Step:
    """Put the secrets together; a dealer whose shares or copies do not give back what it committed to ends the
    attempt.
    """
    recovered: dict[SiloName, Secret] = {}
    try:
        for dealer in dealers_of(state):
            recovered[dealer] = recovered_secret(state, dealer)
        masks = mask_sum(state, recovered)
    except FalseDealing as error:
        blame = Blame(silo=error.dealer, offence=Offence.BAD_SHARE, detail=str(error))
        after, effects = abandon(state, str(error))
        return after, (blame, *effects)
    finally:
        for secret in recovered.values():
            secret.erase()
    survivors = state.survivors.silos
    unmask = Unmask(
        attempt=state.attempt,
        survivors=survivors,
        dropped=tuple(dealer for dealer in dealers_of(state) if dealer not in survivors),
        fixed_point=state.roster.parameters.fixed_point,
        masks=masks,
    )
    return Unmasked(attempt=state.attempt, roster=state.roster, survivors=state.survivors), (unmask,)


def to_nothing(state: Unmasking) -> Step:
    """Too few revealed their shares: no sum comes out."""
    threshold = state.roster.parameters.threshold
    return abandon(state, f"{len(state.reveals)} silos revealed their shares, at least {threshold} must")
