"""Phase 5, a silo reveals shares: once `threshold` silos signed the set that it signed, and for that set alone.

This is what stops a second unmasking: no other set is signed, and the memory refuses further attempts of the round.
"""

from lorica_security.errors import IntegrityError, MalformedMessage, PolicyRefusal, WrongTime
from lorica_security.secure_aggregation.messages import (
    MaskKeyShare,
    Reveal,
    RevealedShare,
    SelfMaskShare,
    UnmaskRequest,
    check_signed,
    signed,
)
from lorica_security.secure_aggregation.silo.effects import Journal, Remember, Send
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.boxes import opened_box, own_box_keys
from lorica_security.secure_aggregation.silo.phases.own_dealing import dealt_shares
from lorica_security.secure_aggregation.silo.phases.roster_rules import check_groups
from lorica_security.secure_aggregation.silo.states import Agreed, Revealed, Step, WithSet


def take_unmask_request(state: Agreed, request: UnmaskRequest, party: Party) -> Step:
    """Reveal one share of each dealer, and join no further attempt of this round."""
    check_agreements(state, request, party)
    memory = state.memory.answered(state.attempt)
    after = Revealed(
        memory=memory,
        opening=state.opening,
        roster=state.roster,
        shared=state.shared,
        delivery=state.delivery,
        vector=state.vector,
        survivors=state.survivors,
    )
    return after, (Remember(memory), Journal(request), Send(_revealed(after, party)))


def check_agreements(state: WithSet, request: UnmaskRequest, party: Party) -> None:
    """Raise unless at least `threshold` dealers signed the very set that this silo signed."""
    if request.roster != state.roster.digest:
        raise WrongTime(f"an unmask request of another roster came for {state.attempt}")
    check_groups(state.roster, party)
    for agreement in request.agreements:
        if agreement.silo not in state.delivery.dealers:
            raise MalformedMessage(f"the unmask request has a signature of silo {agreement.silo}, who dealt no keys")
        if agreement.roster != state.roster.digest or agreement.survivors != state.survivors.digest:
            raise IntegrityError(
                f"silo {agreement.silo} signed another survivor set than this silo: nothing is revealed"
            )
        check_signed(agreement, party.identities)
    threshold = max(state.roster.parameters.threshold, party.demands.min_threshold)
    if len(request.agreements) < threshold:
        raise PolicyRefusal(
            "min_threshold",
            f"{len(request.agreements)} silos signed the survivor set, at least {threshold} must before any share is "
            "shown",
        )


def unmask_request_again(state: Revealed, request: UnmaskRequest, party: Party) -> Step:
    """The same shares are shown again."""
    check_agreements(state, request, party)
    return state, (Send(_revealed(state, party)),)


def _revealed(state: Revealed, party: Party) -> Reveal:
    dealt = dealt_shares(state, party.silo)
    own = dealt[state.roster.place(party.silo) - 1]
    revealed: list[RevealedShare] = []
    boxes, keys = {share.dealer: share for share in state.delivery.boxes}, own_box_keys(state)
    for dealer in state.delivery.dealers:
        if dealer == party.silo:
            shares = own
        else:
            shares = opened_box(state, boxes[dealer], keys)
        if dealer in state.survivors.silos:
            share, salt = shares.self_mask, shares.self_mask_salt
            revealed.append(SelfMaskShare(dealer=dealer, share=bytes(share.buffer), salt=bytes(salt.buffer)))
        else:
            share, salt = shares.mask_key, shares.mask_key_salt
            revealed.append(MaskKeyShare(dealer=dealer, share=bytes(share.buffer), salt=bytes(salt.buffer)))
        shares.erase()
    for shares in dealt:
        shares.erase()
    keys.erase()
    reveal = Reveal(roster=state.roster.digest, silo=party.silo, shares=tuple(revealed))
    return signed(reveal, party.identity_key)
