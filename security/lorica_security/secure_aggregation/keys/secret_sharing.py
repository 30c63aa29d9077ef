"""Shamir's secret sharing (1979) of 32-byte secrets over the field of 2^521 - 1, with salted commitments to each share.

The prime is the Mersenne prime of NIST P-521. A share is the polynomial's value at the holder's place in the roster,
counted from 1, as 66 big-endian bytes; fewer than `threshold` of them say nothing at all about the secret. A commitment
is hiding (32 random bytes of salt) and binding (BLAKE3), and is signed by the dealer before anybody masks, so that a
share which comes back altered has a culprit, and so has a dealer whose shares do not give back the secret that it
committed to.

Python's integers do not run in constant time; all of this runs a few times per round on fresh secrets, silently, in
processes of their own, so there is nothing that an observer could repeat and average.
"""

from collections.abc import Mapping

from blake3 import blake3

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.transcript import PREFIX, framed

PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66
SALT_BYTES = 32

SELF_MASK = "self-mask"
MASK_KEY = "mask-key"


def coefficients_bytes(threshold: int) -> int:
    """How many random bytes `split` uses up."""
    return (threshold - 1) * SHARE_BYTES


def split(secret: Secret, *, threshold: int, holders: int, entropy: Secret) -> tuple[Secret, ...]:
    """One 66-byte share for each of `holders`, any `threshold` of which give the secret back."""
    if len(secret) != SECRET_BYTES or len(entropy) != coefficients_bytes(threshold) or not 1 <= threshold <= holders:
        raise ValueError(f"cannot split {len(secret)} bytes {threshold} of {holders} with {len(entropy)} random bytes")
    polynomial = [int.from_bytes(secret.buffer, "big")]
    for at in range(0, len(entropy), SHARE_BYTES):
        polynomial.append((int.from_bytes(entropy.buffer[at : at + SHARE_BYTES], "big") & PRIME) % PRIME)
    return tuple(Secret(_value(polynomial, place).to_bytes(SHARE_BYTES, "big")) for place in range(1, holders + 1))


def _value(polynomial: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def check_share(share: bytes) -> None:
    """Raise MalformedMessage unless `share` is a field element in its one spelling."""
    if len(share) != SHARE_BYTES or int.from_bytes(share, "big") >= PRIME:
        raise MalformedMessage(
            f"key share of {len(share)} bytes is not a number below 2^521 - 1 in {SHARE_BYTES} bytes"
        )


def combined(shares: Mapping[int, bytes], *, threshold: int) -> Secret:
    """The secret behind exactly `threshold` shares, by place (from 1); raises MalformedMessage when it is none of 32
    bytes."""
    if len(shares) != threshold or any(place < 1 for place in shares):
        raise ValueError(f"{len(shares)} shares, exactly {threshold} are combined, at places from 1")
    total = 0
    for place, share in shares.items():
        check_share(share)
        above, below = 1, 1
        for other in shares:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        total = (total + int.from_bytes(share, "big") * above * pow(below, -1, PRIME)) % PRIME
    if total >= 1 << (8 * SECRET_BYTES):
        raise MalformedMessage(
            "key shares combine to a number that is no 32-byte secret: the dealer dealt false shares"
        )
    return Secret(total.to_bytes(SECRET_BYTES, "big"))


def share_commitment(
    *, roster: bytes, kind: str, dealer: SiloName, holder: SiloName, salt: bytes, share: bytes
) -> bytes:
    """What the dealer signs for the share of one secret (`kind`) that one holder gets."""
    return blake3(framed(PREFIX + "share-commitment", roster, kind, dealer, holder, salt, share)).digest()


def seed_commitment(*, roster: bytes, dealer: SiloName, seed: Secret) -> bytes:
    """What the dealer signs for its self-mask seed; 256 uniform bits need no salt."""
    return blake3(framed(PREFIX + "seed-commitment", roster, dealer, seed.buffer)).digest()
