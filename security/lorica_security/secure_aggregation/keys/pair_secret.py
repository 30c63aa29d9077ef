"""Pair secrets: what takes ML-KEM-768's place beside X25519 in the mask of two silos, so that either mask secret leads
to it.

The first by name expands the pair secret from its mask secret, and gives it to the second in its box. Beside the box
goes a *copy* under the second's ML-KEM mask key. When the first drops, its recovered mask secret gives the pair secret;
when the second drops, its recovered mask secret opens the copy. An encapsulated secret by itself would not do: the
first could not make it again from its mask secret.

The copy holds a commitment, so that what each of the two ways leads to is one and the same, or the first is convicted:
the second holds what it found in the box against it, and whoever recovers a mask secret holds what comes out against
it. All of it is in the digest of the box that the first signed (Dealing). 256 uniform bits need no salt.
"""

from dataclasses import dataclass

from lorica_security.secure_aggregation.keys import key_agreement
from lorica_security.secure_aggregation.keys.key_agreement import CIPHERTEXT_BYTES, Encapsulation, KeyPair, Link
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, digest

PAIR_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCopy:
    """A pair secret under the second's ML-KEM mask key: `covered` is the secret xor a key of what `ciphertext`
    holds."""

    ciphertext: bytes
    covered: bytes
    commitment: bytes

    def __post_init__(self) -> None:
        check_bytes("pair copy", CIPHERTEXT_BYTES, ciphertext=self.ciphertext)
        check_bytes("pair copy", PAIR_SECRET_BYTES, covered=self.covered)
        check_bytes("pair copy", DIGEST_BYTES, commitment=self.commitment)

    @property
    def digest(self) -> bytes:
        return digest("pair-copy", self.ciphertext, self.covered, self.commitment)


def pair_secret(mask_secret: Secret, link: Link) -> Secret:
    """By the mask secret of the first of `link`."""
    return key_agreement.derived(mask_secret, "pair-secret", *link.parts, length=PAIR_SECRET_BYTES)


def copied(secret: Secret, link: Link, kem: Encapsulation) -> PairCopy:
    """`kem` was encapsulated to the second's mask key, and serves nothing else."""
    covered = bytes(_covered(secret.buffer, link, kem))
    return PairCopy(ciphertext=kem.ciphertext, covered=covered, commitment=pair_commitment(secret, link))


def uncovered(copy: PairCopy, link: Link, keys: KeyPair) -> Secret:
    """By the mask keys of the second; whether it is what was committed to is `is_committed`'s to say."""
    kem = Encapsulation(keys.decapsulated(copy.ciphertext), copy.ciphertext)
    secret = Secret.taking(_covered(copy.covered, link, kem))
    kem.secret.erase()
    return secret


def is_committed(secret: Secret, copy: PairCopy, link: Link) -> bool:
    return pair_commitment(secret, link) == copy.commitment


def pair_commitment(secret: Secret, link: Link) -> bytes:
    return digest("pair-commitment", *link.parts, secret.buffer)


def _covered(data: bytes | bytearray, link: Link, kem: Encapsulation) -> bytearray:
    """`data` xor a key of what `kem` holds: of a secret what covers it, of that the secret."""
    cover = key_agreement.derived(kem.secret, "pair-cover", *link.parts, kem.ciphertext, length=PAIR_SECRET_BYTES)
    out = bytearray(one ^ other for one, other in zip(data, cover.buffer, strict=True))
    cover.erase()
    return out
