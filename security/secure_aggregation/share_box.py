"""Share boxes: the two key shares of one dealer for one holder, sealed with ChaCha20-Poly1305.

The associated data are the roster digest, the dealer and the holder. The key is directional and bound to the same three, and
the dealer's root makes one content for it, so that one key never seals two contents and the nonce can be zero.
"""

from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from security.errors import IntegrityError
from security.identifiers import SiloName
from security.secure_aggregation.secret import Secret
from security.secure_aggregation.secret_sharing import SALT_BYTES, SHARE_BYTES
from security.secure_aggregation.transcript import PREFIX, framed

TAG_BYTES = 16
CONTENT_BYTES = 2 * (SHARE_BYTES + SALT_BYTES)
BOX_BYTES = CONTENT_BYTES + TAG_BYTES
_NONCE = bytes(12)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShares:
    """What one dealer gives one holder: a share of each of its two secrets, and the salts of their commitments."""

    self_mask: Secret
    self_mask_salt: Secret
    mask_key: Secret
    mask_key_salt: Secret

    def erase(self) -> None:
        for secret in (self.self_mask, self.self_mask_salt, self.mask_key, self.mask_key_salt):
            secret.erase()


def sealed(shares: KeyShares, key: Secret, *, roster: bytes, dealer: SiloName, holder: SiloName) -> bytes:
    """BOX_BYTES bytes that only the holder of `key` can read or make."""
    content = bytearray(CONTENT_BYTES)
    at = 0
    for secret in (shares.self_mask, shares.self_mask_salt, shares.mask_key, shares.mask_key_salt):
        content[at : at + len(secret)] = secret.buffer
        at += len(secret)
    box = ChaCha20Poly1305(key.buffer).encrypt(_NONCE, content, _bound_to(roster, dealer, holder))
    content[:] = bytes(len(content))
    return box


def opened(box: bytes, key: Secret, *, roster: bytes, dealer: SiloName, holder: SiloName) -> KeyShares:
    """The content; raises IntegrityError for a box that was not sealed so."""
    content = bytearray(CONTENT_BYTES)
    try:
        if len(box) != BOX_BYTES:
            raise InvalidTag
        ChaCha20Poly1305(key.buffer).decrypt_into(_NONCE, box, _bound_to(roster, dealer, holder), content)
    except InvalidTag:
        raise IntegrityError(f"the share box from silo {dealer} to silo {holder} does not open") from None
    view, half = memoryview(content), CONTENT_BYTES // 2
    shares = KeyShares(
        self_mask=Secret(view[:SHARE_BYTES]),
        self_mask_salt=Secret(view[SHARE_BYTES:half]),
        mask_key=Secret(view[half : half + SHARE_BYTES]),
        mask_key_salt=Secret(view[half + SHARE_BYTES :]),
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
