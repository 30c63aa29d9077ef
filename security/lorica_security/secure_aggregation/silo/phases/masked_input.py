"""Phase 3, a silo masks its vector: for those who dealt, once, and sends one vector."""

from lorica_security.errors import Conflict, IntegrityError, MalformedMessage, PolicyRefusal, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.dealings import box_is_sound, check_dealing, line_of
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret
from lorica_security.secure_aggregation.keys.key_agreement import KeyPair, erase_all
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.messages import Complaint, Dealing, Delivery, MaskedInput, SealedShare, signed
from lorica_security.secure_aggregation.parameters import too_few
from lorica_security.secure_aggregation.silo.effects import Journal, MaskVector, Remember, Send
from lorica_security.secure_aggregation.silo.events import AttemptEnded, VectorMasked
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.attempt_end import end_attempt
from lorica_security.secure_aggregation.silo.phases.boxes import key_of_box, opened_box, own_box_keys
from lorica_security.secure_aggregation.silo.phases.roster_rules import check_groups
from lorica_security.secure_aggregation.silo.states import Dealt, Masked, Masking, Step, WithDelivery, WithVector


def take_delivery(state: Dealt, delivery: Delivery, party: Party) -> Step:
    """Mask the vector for those who dealt, or complain about a false box and end the attempt."""
    check_delivery(state, delivery, party)
    keys = own_box_keys(state)
    for share in delivery.boxes:
        key = key_of_box(state, share, keys)
        sound = box_is_sound(state.roster, _dealing(delivery, share.dealer), share, key)
        if not sound:
            complaint = Complaint(
                roster=state.roster.digest, silo=party.silo, dealer=share.dealer, key=bytes(key.buffer)
            )
            erase_all(key, keys)
            ended, effects = end_attempt(state, AttemptEnded(state.attempt), party)
            return ended, (Send(signed(complaint, party.identity_key)), *effects)
        key.erase()
    keys.erase()
    memory = _having_seen(state, delivery, party)
    after = Masking(memory=memory, opening=state.opening, roster=state.roster, shared=state.shared, delivery=delivery)
    return after, (Remember(memory), Journal(delivery), _mask_vector(after, party))


def _having_seen(state: Dealt, delivery: Delivery, party: Party) -> SiloMemory:
    """With the keys of those of its release group that dealt.

    Of who did not deal an older advertisement stays: it may have forgotten that one, and this silo is to say so again.
    """
    dealt = party.group_mates.intersection(delivery.dealers)
    members = frozenset() if party.link is None else party.link.members
    return state.memory.with_seen({silo: state.roster.member(silo).digest for silo in dealt}, members=members)


def check_delivery(state: Dealt, delivery: Delivery, party: Party) -> None:
    """Raise unless the delivery is complete, signed by its dealers, and unaltered on the way."""
    roster = state.roster
    if delivery.roster != roster.digest or delivery.holder != party.silo:
        raise WrongTime(f"a delivery for silo {delivery.holder} and another roster came for {state.attempt}")
    for dealing in delivery.dealings:
        check_dealing(roster, dealing, party.identities)
    if party.silo not in delivery.dealers or _dealing(delivery, party.silo) != state.shared.dealing:
        raise IntegrityError("the delivery does not hold what this silo dealt: it was altered or left out")
    lacking = too_few(check_groups(roster, party), roster.parameters, delivery.dealers)
    if lacking is not None:
        raise PolicyRefusal("min_survivors", f"{len(delivery.dealers)} silos dealt, for a sum to come out {lacking}")
    if tuple(share.dealer for share in delivery.boxes) != tuple(it for it in delivery.dealers if it != party.silo):
        raise MalformedMessage("the delivery does not hold one box of each other dealer")
    for share in delivery.boxes:
        if line_of(roster, _dealing(delivery, share.dealer), party.silo).box != share.digest:
            raise IntegrityError(f"the box of silo {share.dealer} is not the one that it signed: altered on the way")


def _dealing(delivery: Delivery, dealer: SiloName) -> Dealing:
    return delivery.dealings[delivery.dealers.index(dealer)]


def delivery_again(state: Masking, delivery: Delivery, party: Party) -> Step:
    """The same delivery has the vector masked again."""
    _check_same_delivery(state, delivery)
    return state, (_mask_vector(state, party),)


def delivery_after_masking(state: Masked, delivery: Delivery, party: Party) -> Step:
    """The same delivery is answered with the vector that was masked."""
    _check_same_delivery(state, delivery)
    return state, (Send(_masked_input(state, party)),)


def _check_same_delivery(state: WithDelivery, delivery: Delivery) -> None:
    if delivery != state.delivery:
        raise Conflict(f"a second delivery came for {state.attempt}: this silo masks for the first")


def _mask_vector(state: Masking, party: Party) -> MaskVector:
    roster, root = state.roster, state.opening.root
    seed = key_agreement.self_mask_seed(root, state.attempt, roster.digest)
    secret = key_agreement.mask_secret(root, state.attempt)
    dealings = state.delivery.dealings_digest
    added = [KeyStream(key_agreement.self_mask_key(seed, own=party.silo, roster=roster.digest, dealings=dealings))]
    subtracted: list[KeyStream] = []
    keys, box_keys = KeyPair(secret), own_box_keys(state)
    sent = {share.holder: share for share in state.shared.boxes}
    for share in state.delivery.boxes:
        peer = share.dealer
        link = roster.pair_link(party.silo, peer)
        if party.silo < peer:
            pair, copy = pair_secret.pair_secret(secret, link), sent[peer].copy
        else:
            pair, copy = _received_pair_secret(state, share, box_keys), share.copy
        assert copy is not None, "the first by name of two sends a copy of their pair secret"
        key = key_agreement.pairwise_mask_key(
            keys, link, own=party.silo, pair_secret=pair, copy=copy.digest, dealings=dealings
        )
        pair.erase()
        (added if party.silo < peer else subtracted).append(KeyStream(key))
    erase_all(seed, keys, box_keys)
    return MaskVector(
        parameters=roster.parameters,
        rounding=KeyStream(key_agreement.rounding_key(root, state.attempt, roster.model)),
        noise=key_agreement.noise_key(root, state.attempt, roster.digest),
        masks=MaskSum(added=tuple(added), subtracted=tuple(subtracted)),
    )


def _received_pair_secret(state: Masking, share: SealedShare, keys: KeyPair) -> Secret:
    shares = opened_box(state, share, keys)
    assert shares.pair_secret is not None, "the first by name of two sends their pair secret"
    pair = Secret(shares.pair_secret.buffer)
    shares.erase()
    return pair


def take_vector(state: Masking, event: VectorMasked, party: Party) -> Step:
    """Announce the masked vector."""
    after = Masked(
        memory=state.memory,
        opening=state.opening,
        roster=state.roster,
        shared=state.shared,
        delivery=state.delivery,
        vector=event.vector,
    )
    return after, (Journal(event), Send(_masked_input(after, party)))


def vector_again(state: Masked, event: VectorMasked, party: Party) -> Step:
    """The same vector is announced again; another one never."""
    if event.vector != state.vector:
        raise Conflict(
            f"the vector of {state.attempt} was masked again and differs: forfeit the attempt, never send both"
        )
    return state, (Send(_masked_input(state, party)),)


def _masked_input(state: WithVector, party: Party) -> MaskedInput:
    return signed(
        MaskedInput(
            roster=state.roster.digest,
            dealings=state.delivery.dealings_digest,
            silo=party.silo,
            words=state.roster.parameters.fixed_point.words,
            vector=state.vector,
        ),
        party.identity_key,
    )
