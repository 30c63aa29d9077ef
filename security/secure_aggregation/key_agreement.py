"""Keys: one root of entropy per silo and attempt, X25519 between silos, HKDF-SHA-256 for every purpose.

All that is secret in an attempt is expanded from its root: two private keys, the self-mask seed, share polynomials, salts,
the rounding stream, noise. A restarted agent that still has the root makes the same bytes; erasing the root erases everything that
it sealed or masked. Both parties of a pair derive one mask key, in the order of their names, and two box keys, one per
direction. The info of every key names the digests that it is bound to, so that silos with different views of the attempt get
unrelated masks and cannot open each other's boxes.
"""

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from security.errors import MalformedMessage
from security.identifiers import SiloName
from security.secure_aggregation.attempt import Attempt
from security.secure_aggregation.secret import Secret
from security.secure_aggregation.transcript import PREFIX, Part, framed

ROOT_BYTES = 32
KEY_BYTES = 32


def derived(secret: Secret, purpose: str, *bound_to: Part, length: int = KEY_BYTES) -> Secret:
    """HKDF-SHA-256 of `secret` for one purpose, bound to what is listed."""
    out = bytearray(length)
    HKDF(SHA256(), length, salt=None, info=framed(PREFIX + purpose, *bound_to)).derive_into(secret.buffer, out)
    return Secret.taking(out)


def private_key(secret: Secret) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret.buffer)


def public_key(secret: Secret) -> bytes:
    """The 32 bytes of the X25519 public key of a private one."""
    return private_key(secret).public_key().public_bytes_raw()


def mask_private_key(root: Secret, attempt: Attempt) -> Secret:
    return derived(root, "mask-private-key", attempt.digest)


def box_private_key(root: Secret, attempt: Attempt) -> Secret:
    return derived(root, "box-private-key", attempt.digest)


def self_mask_seed(root: Secret, attempt: Attempt, roster: bytes) -> Secret:
    """Another one for another roster, should a silo whose disk was restored be led to deal twice in one attempt."""
    return derived(root, "self-mask-seed", attempt.digest, roster)


def rounding_key(root: Secret, attempt: Attempt, model: bytes) -> Secret:
    return derived(root, "rounding", attempt.digest, model)


def noise_key(root: Secret, attempt: Attempt, roster: bytes) -> Secret:
    """Another one for another roster, as with the self mask: noise of two sums must not be the same."""
    return derived(root, "noise", attempt.digest, roster)


def agreed(private: Secret, public: bytes, peer: SiloName) -> Secret:
    """The X25519 shared secret with `peer`; raises MalformedMessage for a public key of small order."""
    try:
        return Secret(private_key(private).exchange(X25519PublicKey.from_public_bytes(public)))
    except ValueError:
        raise MalformedMessage(
            f"silo {peer} advertised the X25519 key {public.hex()}, which agrees on no secret: leave it out"
        ) from None


def check_public(peer: SiloName, *keys: bytes) -> None:
    """Raise MalformedMessage where a public key is of small order, so that it agrees on no secret with anybody."""
    probe = Secret(bytes(KEY_BYTES - 1) + b"\x40")
    for public in keys:
        agreed(probe, public, peer).erase()
    probe.erase()


def box_key(
    private: Secret, public: bytes, *, peer: SiloName, roster: bytes, sender: SiloName, receiver: SiloName
) -> Secret:
    """The key of the one box from `sender` to `receiver`; `peer` is the one of them that is not oneself."""
    secret = agreed(private, public, peer)
    key = derived(secret, "box", roster, sender, receiver)
    secret.erase()
    return key


def pairwise_mask_key(
    private: Secret, public: bytes, *, own: SiloName, peer: SiloName, roster: bytes, dealings: bytes
) -> Secret:
    """The key of the mask that the first by name of the two adds and the other subtracts."""
    secret = agreed(private, public, peer)
    key = derived(secret, "pairwise-mask", roster, dealings, *sorted((own, peer)))
    secret.erase()
    return key


def self_mask_key(seed: Secret, *, own: SiloName, roster: bytes, dealings: bytes) -> Secret:
    return derived(seed, "self-mask", roster, dealings, own)
