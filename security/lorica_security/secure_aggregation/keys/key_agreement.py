"""Keys: one root of entropy per silo and attempt, X25519 and ML-KEM-768 between silos, HKDF-SHA-256 for every purpose.

All that is secret in an attempt is expanded from its root: the two secrets that key pairs are made from, the self-mask
seed, share polynomials, salts, the rounding stream, noise. A restarted agent that still has the root makes the same
bytes; erasing the root erases everything that it sealed or masked. The info of every key names the digests that it is
bound to, so that silos with different views of the attempt get unrelated masks and cannot open each other's boxes.

A recorder may break X25519 one day, and ML-KEM-768 is young: each key between two silos takes a secret of both kinds,
so that breaking one kind alone gives nothing. A public key is 1184 bytes of ML-KEM-768 (FIPS 203), then 32 of X25519.

    mask secret   32 bytes, shared by Shamir. Both private mask keys come from it, and this silo's pair secrets
                  (pair_secret.py): whoever recovers it makes all masks between this silo and the others
    box secret    32 bytes that nobody else ever has: were boxes opened by the mask secret, recovering a dropped silo
                  would open its boxes, and with them its self mask

Encapsulation is random, and `cryptography` takes no coins for it: `encapsulated` is called by whoever runs a silo's
machine, never by the machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.transcript import PREFIX, Part, framed

ROOT_BYTES = 32
KEY_BYTES = 32
X25519_BYTES = 32
KEM_SEED_BYTES = 64
KEM_KEY_BYTES = 1184
CIPHERTEXT_BYTES = 1088
PUBLIC_KEY_BYTES = KEM_KEY_BYTES + X25519_BYTES


def derived(secret: Secret, purpose: str, *bound_to: Part, length: int = KEY_BYTES) -> Secret:
    """HKDF-SHA-256 of `secret` for one purpose, bound to what is listed."""
    out = bytearray(length)
    HKDF(SHA256(), length, salt=None, info=framed(PREFIX + purpose, *bound_to)).derive_into(secret.buffer, out)
    return Secret.taking(out)


# --- key pairs --------------------------------------------------------------------------------------------------------


def mask_secret(root: Secret, attempt: Attempt) -> Secret:
    return derived(root, "mask-secret", attempt.digest)


def box_secret(root: Secret, attempt: Attempt) -> Secret:
    return derived(root, "box-secret", attempt.digest)


class KeyPair:
    """Both private keys of a mask or a box secret, which it owns from then on; OpenSSL clears its copies when this
    goes."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def erase(self) -> None:
        self._secret.erase()

    @cached_property
    def _x25519(self) -> X25519PrivateKey:
        scalar = derived(self._secret, "x25519", length=X25519_BYTES)
        key = X25519PrivateKey.from_private_bytes(scalar.buffer)
        scalar.erase()
        return key

    @cached_property
    def _kem(self) -> MLKEM768PrivateKey:
        seed = derived(self._secret, "ml-kem-768", length=KEM_SEED_BYTES)
        key = MLKEM768PrivateKey.from_seed_bytes(seed.buffer)
        seed.erase()
        return key

    @property
    def public(self) -> bytes:
        """PUBLIC_KEY_BYTES bytes."""
        return self._kem.public_key().public_bytes_raw() + self._x25519.public_key().public_bytes_raw()

    def agreed(self, public: bytes, peer: SiloName) -> Secret:
        """The X25519 secret with `peer`, whose public key is `public`; raises MalformedMessage for one of small
        order."""
        return _exchanged(self._x25519, public, peer)

    def decapsulated(self, ciphertext: bytes) -> Secret:
        """What was encapsulated to this key; for any other CIPHERTEXT_BYTES bytes a secret that nobody else has."""
        return Secret(self._kem.decapsulate(ciphertext))


def erase_all(*secrets: Secret | KeyPair) -> None:
    """Erase each of these."""
    for secret in secrets:
        secret.erase()


def halves(public: bytes) -> tuple[bytes, bytes]:
    """Of a public key: that of ML-KEM-768, that of X25519."""
    return public[:KEM_KEY_BYTES], public[KEM_KEY_BYTES:]


def _exchanged(private: X25519PrivateKey, public: bytes, peer: SiloName) -> Secret:
    _, x25519 = halves(public)
    try:
        return Secret(private.exchange(X25519PublicKey.from_public_bytes(x25519)))
    except ValueError:
        raise MalformedMessage(
            f"silo {peer} advertised the X25519 key {x25519.hex()}, which agrees on no secret: leave it out"
        ) from None


def check_public(peer: SiloName, *keys: bytes) -> None:
    """Raise MalformedMessage where X25519 agrees on no secret, or the other half is no ML-KEM-768 key (FIPS 203,
    7.2)."""
    probe = X25519PrivateKey.from_private_bytes(bytes(X25519_BYTES - 1) + b"\x40")
    for public in keys:
        _exchanged(probe, public, peer).erase()
        kem, _ = halves(public)
        try:
            MLKEM768PublicKey.from_public_bytes(kem)
        except ValueError:
            raise MalformedMessage(
                f"silo {peer} advertised {kem[:8].hex()}... for ML-KEM-768, which is no such key: leave it out"
            ) from None


# --- encapsulation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encapsulation:
    """A secret of 32 bytes, and the CIPHERTEXT_BYTES bytes from which the holder of one ML-KEM key has it too."""

    secret: Secret
    ciphertext: bytes


Encapsulate = Callable[[bytes], Encapsulation]
"""To a public key that `check_public` has seen, another one each time."""


def encapsulated(public: bytes) -> Encapsulation:
    """Drawn by OpenSSL. Not for a machine: what a silo encapsulated is journalled with what it deals."""
    kem, _ = halves(public)
    secret, ciphertext = MLKEM768PublicKey.from_public_bytes(kem).encapsulate()
    return Encapsulation(Secret(secret), ciphertext)


# --- between two silos ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Two members of a roster and their public keys: of a box, dealer and holder; of a pair of masks, first and second
    by name."""

    roster: bytes
    silos: tuple[SiloName, SiloName]
    keys: tuple[bytes, bytes]

    @property
    def parts(self) -> tuple[Part, ...]:
        """What keys of this link are bound to."""
        return (self.roster, *self.silos, *self.keys)

    def peer_of(self, own: SiloName) -> tuple[SiloName, bytes]:
        at = 1 - self.silos.index(own)
        return self.silos[at], self.keys[at]


def box_key(keys: KeyPair, link: Link, *, own: SiloName, kem: Encapsulation) -> Secret:
    """The key of the one box of `link`, by the box keys of `own`; `kem` is what the dealer encapsulated to the
    holder."""
    return _of_both_kinds(kem.secret, keys, link, own, "box", kem.ciphertext)


def pairwise_mask_key(
    keys: KeyPair, link: Link, *, own: SiloName, pair_secret: Secret, copy: bytes, dealings: bytes
) -> Secret:
    """The key of the mask that the first by name adds and the second subtracts, by the mask keys of `own`.

    `pair_secret` is the first's, which the second had under ML-KEM; `copy` is the digest of its copy (PairCopy).
    """
    return _of_both_kinds(pair_secret, keys, link, own, "pairwise-mask", copy, dealings)


def _of_both_kinds(kem: Secret, keys: KeyPair, link: Link, own: SiloName, purpose: str, *bound_to: Part) -> Secret:
    """32 bytes of ML-KEM, then 32 of X25519, into one key."""
    peer, public = link.peer_of(own)
    agreed = keys.agreed(public, peer)
    both = Secret.taking(kem.buffer + agreed.buffer)
    key = derived(both, purpose, *link.parts, *bound_to)
    for secret in (agreed, both):
        secret.erase()
    return key


# --- of one silo alone ------------------------------------------------------------------------------------------------


def self_mask_seed(root: Secret, attempt: Attempt, roster: bytes) -> Secret:
    """Another one for another roster, should a silo whose disk was restored be led to deal twice in one attempt."""
    return derived(root, "self-mask-seed", attempt.digest, roster)


def rounding_key(root: Secret, attempt: Attempt, model: bytes) -> Secret:
    return derived(root, "rounding", attempt.digest, model)


def noise_key(root: Secret, attempt: Attempt, roster: bytes) -> Secret:
    """Another one for another roster, as with the self mask: noise of two sums must not be the same."""
    return derived(root, "noise", attempt.digest, roster)


def self_mask_key(seed: Secret, *, own: SiloName, roster: bytes, dealings: bytes) -> Secret:
    return derived(seed, "self-mask", roster, dealings, own)
