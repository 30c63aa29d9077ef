"""How a dealing and its boxes are checked, by silos that receive them and by the coordinator that relays them."""

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys import pair_secret, secret_sharing, share_box
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import MASK_KEY, SELF_MASK, share_commitment
from lorica_security.secure_aggregation.keys.share_box import KeyShares
from lorica_security.secure_aggregation.messages import Dealing, DealtLine, Identities, SealedShare, check_signed
from lorica_security.secure_aggregation.roster import Roster


def dealt_line(roster: Roster, dealer: SiloName, holder: SiloName, shares: KeyShares, box: bytes) -> DealtLine:
    def commitment(kind: str, salt: Secret, share: Secret) -> bytes:
        return share_commitment(
            roster=roster.digest,
            kind=kind,
            dealer=dealer,
            holder=holder,
            salt=bytes(salt.buffer),
            share=bytes(share.buffer),
        )

    return DealtLine(
        self_mask=commitment(SELF_MASK, shares.self_mask_salt, shares.self_mask),
        mask_key=commitment(MASK_KEY, shares.mask_key_salt, shares.mask_key),
        box=box,
    )


def check_dealing(roster: Roster, dealing: Dealing, identities: Identities) -> None:
    """Raise unless `dealing` was signed by a member of `roster`, for it, with a line for each member."""
    if dealing.silo not in roster or dealing.roster != roster.digest:
        raise MalformedMessage(f"the dealing of silo {dealing.silo} is for another roster, or by no member of this one")
    if len(dealing.lines) != len(roster.members):
        raise MalformedMessage(
            f"the dealing of silo {dealing.silo} has {len(dealing.lines)} lines for {len(roster.members)} members"
        )
    check_signed(dealing, identities)


def box_is_sound(roster: Roster, dealing: Dealing, share: SealedShare, key: Secret) -> bool:
    """Whether the box opens with `key` and holds the shares, and the pair secret, that its dealer signed commitments
    to.
    """
    try:
        shares = share_box.opened(share.box, key, roster=roster.digest, dealer=share.dealer, holder=share.holder)
    except IntegrityError:
        return False
    sound = dealt_line(roster, share.dealer, share.holder, shares, share.digest) == line_of(
        roster, dealing, share.holder
    )
    try:
        secret_sharing.check_share(bytes(shares.self_mask.buffer))
        secret_sharing.check_share(bytes(shares.mask_key.buffer))
    except MalformedMessage:
        sound = False
    if shares.pair_secret is not None:
        assert share.copy is not None, "a sealed share has a copy where its box has a pair secret"
        link = roster.pair_link(share.dealer, share.holder)
        sound = sound and pair_secret.is_committed(shares.pair_secret, share.copy, link)
    shares.erase()
    return sound


def line_of(roster: Roster, dealing: Dealing, holder: SiloName) -> DealtLine:
    return dealing.lines[roster.place(holder) - 1]
