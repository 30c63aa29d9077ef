"""Share boxes: what one dealer has for one holder, sealed with ChaCha20-Poly1305: two key shares, and to a later name
the pair secret.

The associated data are the roster digest, the dealer and the holder. The key takes a secret that the dealer
encapsulated for this box alone, so that one key never seals two contents and the nonce can be zero.
"""

from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from lorica_security.errors import IntegrityError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys.pair_secret import PAIR_SECRET_BYTES
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import SALT_BYTES, SHARE_BYTES
from lorica_security.secure_aggregation.transcript import PREFIX, framed

TAG_BYTES = 16
_SHARES_BYTES = 2 * (SHARE_BYTES + SALT_BYTES)
_NONCE = bytes(12)


def box_bytes(dealer: SiloName, holder: SiloName) -> int:
    """Length of the box from `dealer` to `holder`."""
    return _content_bytes(dealer, holder) + TAG_BYTES


def _content_bytes(dealer: SiloName, holder: SiloName) -> int:
    return _SHARES_BYTES + (PAIR_SECRET_BYTES if dealer < holder else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShares:
    """What one dealer gives one holder: a share of each of its two secrets, and the salts of their commitments.

    `pair_secret` is the two's, where the dealer is the first by name; None: it is not.
    """

    self_mask: Secret
    self_mask_salt: Secret
    mask_key: Secret
    mask_key_salt: Secret
    pair_secret: Secret | None = None

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """In the order in which a box holds them."""
        both = (self.self_mask, self.self_mask_salt, self.mask_key, self.mask_key_salt)
        return both if self.pair_secret is None else (*both, self.pair_secret)

    def erase(self) -> None:
        for secret in self.secrets:
            secret.erase()


def sealed(shares: KeyShares, key: Secret, *, roster: bytes, dealer: SiloName, holder: SiloName) -> bytes:
    """`box_bytes` bytes that only the holder of `key` can read or make."""
    content = bytearray(_content_bytes(dealer, holder))
    at = 0
    for secret in shares.secrets:
        content[at : at + len(secret)] = secret.buffer
        at += len(secret)
    box = ChaCha20Poly1305(key.buffer).encrypt(_NONCE, content, _bound_to(roster, dealer, holder))
    content[:] = bytes(len(content))
    return box


def opened(box: bytes, key: Secret, *, roster: bytes, dealer: SiloName, holder: SiloName) -> KeyShares:
    """The content; raises IntegrityError for a box that was not sealed so."""
    content = bytearray(_content_bytes(dealer, holder))
    try:
        if len(box) != box_bytes(dealer, holder):
            raise InvalidTag
        ChaCha20Poly1305(key.buffer).decrypt_into(_NONCE, box, _bound_to(roster, dealer, holder), content)
    except InvalidTag:
        raise IntegrityError(f"the share box from silo {dealer} to silo {holder} does not open") from None
    view, half = memoryview(content), _SHARES_BYTES // 2
    shares = KeyShares(
        self_mask=Secret(view[:SHARE_BYTES]),
        self_mask_salt=Secret(view[SHARE_BYTES:half]),
        mask_key=Secret(view[half : half + SHARE_BYTES]),
        mask_key_salt=Secret(view[half + SHARE_BYTES : _SHARES_BYTES]),
        pair_secret=Secret(view[_SHARES_BYTES:]) if dealer < holder else None,
    )
    content[:] = bytes(len(content))
    return shares


def opens(box: bytes, key: Secret, *, roster: bytes, dealer: SiloName, holder: SiloName) -> bool:
    try:
        opened(box, key, roster=roster, dealer=dealer, holder=holder).erase()
    except IntegrityError:
        return False
    return True


def _bound_to(roster: bytes, dealer: SiloName, holder: SiloName) -> bytes:
    return framed(PREFIX + "box-data", roster, dealer, holder)
