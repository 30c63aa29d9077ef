"""How a silo opens the boxes that others sealed for it."""

from lorica_security.secure_aggregation.keys import key_agreement, share_box
from lorica_security.secure_aggregation.keys.key_agreement import Encapsulation, KeyPair
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.share_box import KeyShares
from lorica_security.secure_aggregation.messages import SealedShare
from lorica_security.secure_aggregation.silo.states import WithDelivery, WithRoster


def own_box_keys(state: WithRoster) -> KeyPair:
    """The keys that others seal boxes to."""
    return KeyPair(key_agreement.box_secret(state.opening.root, state.attempt))


def key_of_box(state: WithRoster, share: SealedShare, keys: KeyPair) -> Secret:
    """By the box keys of the holder."""
    kem = Encapsulation(keys.decapsulated(share.ciphertext), share.ciphertext)
    link = state.roster.box_link(share.dealer, share.holder)
    key = key_agreement.box_key(keys, link, own=share.holder, kem=kem)
    kem.secret.erase()
    return key


def opened_box(state: WithDelivery, share: SealedShare, keys: KeyPair) -> KeyShares:
    """What a dealer sealed for this silo; the box was found sound before."""
    key = key_of_box(state, share, keys)
    shares = share_box.opened(share.box, key, roster=state.roster.digest, dealer=share.dealer, holder=share.holder)
    key.erase()
    return shares
