"""The secrets that the revealed shares give back, and the masks that they take off the sum."""

from collections.abc import Mapping

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.states import Unmasking
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, secret_sharing
from lorica_security.secure_aggregation.keys.key_agreement import KeyPair
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum


class FalseDealing(MalformedMessage):
    """What `dealer` dealt does not lead to what it advertised or committed to."""

    def __init__(self, dealer: SiloName, message: str) -> None:
        super().__init__(message)
        self.dealer = dealer


def recovered_secret(state: Unmasking, dealer: SiloName) -> Secret:
    """What `threshold` shares of this dealer give back; raises FalseDealing where it is not what was committed to."""
    threshold = state.roster.parameters.threshold
    shares = {
        state.roster.place(reveal.silo): share.share
        for reveal in state.reveals[:threshold]
        for share in reveal.shares
        if share.dealer == dealer
    }
    try:
        secret = secret_sharing.combined(shares, threshold=threshold)
    except MalformedMessage as error:
        raise FalseDealing(dealer, str(error)) from error
    if dealer in state.survivors.silos:
        dealing = next(item.dealing for item in state.shared if item.silo == dealer)
        committed = secret_sharing.seed_commitment(roster=state.roster.digest, dealer=dealer, seed=secret)
        sound = committed == dealing.seed_commitment
    else:
        sound = KeyPair(secret).public == state.roster.member(dealer).mask_key
    if not sound:
        secret.erase()
        raise FalseDealing(dealer, f"the shares of silo {dealer} give back another secret than it committed to")
    return secret


def mask_sum(state: Unmasking, recovered: Mapping[SiloName, Secret]) -> MaskSum:
    """What takes the masks off the sum: self masks of the survivors, and what they agreed on with the dropped."""
    roster, dealings, survivors = state.roster, state.dealings_digest, state.survivors.silos
    added: list[KeyStream] = []
    subtracted: list[KeyStream] = []
    try:
        for dealer, secret in recovered.items():
            if dealer in survivors:
                key = key_agreement.self_mask_key(secret, own=dealer, roster=roster.digest, dealings=dealings)
                subtracted.append(KeyStream(key))
                continue
            keys = KeyPair(secret)
            for survivor in survivors:
                key = _pairwise_key(state, dealer, survivor, secret, keys)
                (subtracted if survivor < dealer else added).append(KeyStream(key))
    except FalseDealing:
        MaskSum(added=tuple(added), subtracted=tuple(subtracted)).erase()
        raise
    return MaskSum(added=tuple(added), subtracted=tuple(subtracted))


def _pairwise_key(state: Unmasking, dropped: SiloName, survivor: SiloName, secret: Secret, keys: KeyPair) -> Secret:
    """By the recovered mask secret of `dropped`, and its keys.

    Where it was the second, the first's copy has the pair secret.
    """
    link = state.roster.pair_link(dropped, survivor)
    first, second = link.silos
    dealt = next(item for item in state.shared if item.silo == first)
    copy = next(share for share in dealt.boxes if share.holder == second).copy
    assert copy is not None, "the first by name of two sends a pair copy"
    shared = pair_secret.pair_secret(secret, link) if dropped == first else pair_secret.uncovered(copy, link, keys)
    try:
        if not pair_secret.is_committed(shared, copy, link):
            raise FalseDealing(
                first, f"silo {first} gave silo {second} another pair secret than the one it committed to"
            )
        return key_agreement.pairwise_mask_key(
            keys, link, own=dropped, pair_secret=shared, copy=copy.digest, dealings=state.dealings_digest
        )
    finally:
        shared.erase()
