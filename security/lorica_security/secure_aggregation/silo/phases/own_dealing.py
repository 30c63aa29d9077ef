"""What a silo deals: shares of its two secrets, committed to, and sealed to each holder."""

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.dealings import dealt_line
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, secret_sharing, share_box
from lorica_security.secure_aggregation.keys.key_agreement import Encapsulate, KeyPair, erase_all
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import MASK_KEY, SALT_BYTES, SELF_MASK
from lorica_security.secure_aggregation.keys.share_box import KeyShares
from lorica_security.secure_aggregation.messages import OWN_BOX, Dealing, SealedShare, SharedKeys, signed
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.boxes import own_box_keys
from lorica_security.secure_aggregation.silo.states import WithRoster


def shared_keys(state: WithRoster, party: Party, encapsulate: Encapsulate) -> SharedKeys:
    """What this silo deals: expanded from the root, but for what `encapsulate` draws."""
    roster, root = state.roster, state.opening.root
    keys = own_box_keys(state)
    seed = key_agreement.self_mask_seed(root, state.attempt, roster.digest)
    lines, boxes = [], []
    for holder, shares in zip(roster.silos, dealt_shares(state, party.silo), strict=True):
        box = OWN_BOX
        if holder != party.silo:
            boxes.append(_sealed(roster, party.silo, holder, shares, keys, encapsulate))
            box = boxes[-1].digest
        lines.append(dealt_line(roster, party.silo, holder, shares, box))
        shares.erase()
    dealing = Dealing(
        roster=roster.digest,
        silo=party.silo,
        seed_commitment=secret_sharing.seed_commitment(roster=roster.digest, dealer=party.silo, seed=seed),
        lines=tuple(lines),
    )
    erase_all(keys, seed)
    return SharedKeys(dealing=signed(dealing, party.identity_key), boxes=tuple(boxes))


def _sealed(
    roster: Roster, dealer: SiloName, holder: SiloName, shares: KeyShares, keys: KeyPair, encapsulate: Encapsulate
) -> SealedShare:
    link = roster.box_link(dealer, holder)
    kem = encapsulate(roster.member(holder).box_key)
    key = key_agreement.box_key(keys, link, own=dealer, kem=kem)
    box = share_box.sealed(shares, key, roster=roster.digest, dealer=dealer, holder=holder)
    erase_all(key, kem.secret)
    copy = None
    if shares.pair_secret is not None:
        copy_kem = encapsulate(roster.member(holder).mask_key)
        copy = pair_secret.copied(shares.pair_secret, roster.pair_link(dealer, holder), copy_kem)
        copy_kem.secret.erase()
    return SealedShare(dealer=dealer, holder=holder, ciphertext=kem.ciphertext, box=box, copy=copy)


def dealt_shares(state: WithRoster, dealer: SiloName) -> tuple[KeyShares, ...]:
    """What this silo deals, in the order of the roster."""
    roster, root = state.roster, state.opening.root
    threshold, holders = roster.parameters.threshold, len(roster.members)
    secrets = {
        SELF_MASK: key_agreement.self_mask_seed(root, state.attempt, roster.digest),
        MASK_KEY: key_agreement.mask_secret(root, state.attempt),
    }
    pairs = [
        pair_secret.pair_secret(secrets[MASK_KEY], roster.pair_link(dealer, holder)) if dealer < holder else None
        for holder in roster.silos
    ]
    shares, salts = {}, {}
    for kind, secret in secrets.items():
        size = secret_sharing.coefficients_bytes(threshold)
        entropy = _expanded(root, f"polynomial/{kind}", roster.digest, size=size)
        shares[kind] = secret_sharing.split(secret, threshold=threshold, holders=holders, entropy=entropy)
        salts[kind] = [
            key_agreement.derived(root, f"salt/{kind}", roster.digest, silo, length=SALT_BYTES) for silo in roster.silos
        ]
        erase_all(entropy, secret)
    return tuple(
        KeyShares(
            self_mask=shares[SELF_MASK][index],
            self_mask_salt=salts[SELF_MASK][index],
            mask_key=shares[MASK_KEY][index],
            mask_key_salt=salts[MASK_KEY][index],
            pair_secret=pairs[index],
        )
        for index in range(holders)
    )


def _expanded(root: Secret, purpose: str, roster: bytes, *, size: int) -> Secret:
    """`size` bytes, of which HKDF gives 255 * 32 at a time."""
    out, most = bytearray(size), 255 * 32
    for at in range(0, size, most):
        piece = key_agreement.derived(root, purpose, roster, at, length=min(most, size - at))
        out[at : at + len(piece)] = piece.buffer
        piece.erase()
    return Secret.taking(out)
