"""AES-CTR from any counter block on, by way of GCM, which OpenSSL runs on the processor's vector instructions, as it
does not run CTR.

GCM is CTR and a tag. Its keystream begins with the block after J0, and a nonce of 16 bytes gives (SP 800-38D, 7.1)

    J0 = GHASH(nonce, 128) = (nonce * H + 128) * H    in GF(2^128), where H is the cipher's block of zeros

so that nonce = J0 / H^2 + 128 / H leads to any J0. Only the keystream is of use here: no tag is asked for, nothing is
authenticated, and the nonce stays here, since H can be told from it.

GCM counts in the 32 low bits of a block, CTR in all of them: a keystream from here ends where those bits run over.
"""

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.utils import Buffer

BLOCK_BYTES = 16
COUNTER_BITS = 38
"""Counter blocks below 2^38: streams of 4 TiB."""
_LOW = 1 << 32
_MOST_BLOCKS = _LOW - 2
"""In one message of GCM."""
_MODULUS = 1 << 128 | 0x87  # x^128 + x^7 + x^2 + x + 1
_LENGTH_AT = 120
"""The length of the nonce, 128 = 2^7, as a power of x: bit 127 - i of a block read as a number is the factor of x^i."""


def by_ctr(key: Buffer, counter: int) -> CipherContext:
    """The keystream of `key` from block `counter` on."""
    return Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(BLOCK_BYTES, "big"))).encryptor()


def gcm_reaches(counter: int, blocks: int) -> bool:
    """Whether `blocks` blocks from `counter` on can be had by GCM."""
    return blocks <= min(_MOST_BLOCKS, _LOW - counter % _LOW) and counter + blocks <= 1 << COUNTER_BITS


class Nonces:
    """For one key, the nonce of each counter block. Whoever has them has the cipher's block of zeros: `erase` when
    done."""

    def __init__(self, key: Buffer) -> None:
        inverse = _inverse(_element(by_ctr(key, 0).update(bytes(BLOCK_BYTES))))
        # The nonce is linear in J0: a line for each of its low bits, after the line for 128 / H.
        self._lines = bytearray(_block(_product(inverse, 1 << _LENGTH_AT)))
        line = _product(_product(inverse, inverse), 1 << 127)
        for _ in range(COUNTER_BITS):
            self._lines += _block(line)
            line = (line ^ _MODULUS if line & 1 else line) >> 1  # divided by x

    def by_gcm(self, key: Buffer, counter: int) -> CipherContext:
        """As `by_ctr`, for as many blocks as `gcm_reaches`."""
        before = counter - counter % _LOW + (counter - 1) % _LOW
        nonce = self._line(0)
        for bit in range(before.bit_length()):
            if before >> bit & 1:
                nonce ^= self._line(1 + bit)
        return Cipher(algorithms.AES(key), modes.GCM(nonce.to_bytes(BLOCK_BYTES, "big"))).encryptor()

    def erase(self) -> None:
        self._lines[:] = bytes(len(self._lines))

    def _line(self, index: int) -> int:
        return int.from_bytes(self._lines[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES], "big")


def _element(block: bytes) -> int:
    """A block as a polynomial: bit i is the factor of x^i."""
    return int(f"{int.from_bytes(block, 'big'):0128b}"[::-1], 2)


def _block(element: int) -> bytes:
    return int(f"{element:0128b}"[::-1], 2).to_bytes(BLOCK_BYTES, "big")


def _product(one: int, other: int) -> int:
    product = 0
    for bit in range(127, -1, -1):
        product <<= 1
        if product >> 128:
            product ^= _MODULUS
        if other >> bit & 1:
            product ^= one
    return product


def _inverse(element: int) -> int:
    """By Euclid's algorithm; raises ZeroDivisionError for zero."""
    if not element:
        raise ZeroDivisionError("zero has no inverse in GF(2^128)")
    left, right, of_left, of_right = element, _MODULUS, 1, 0
    while left != 1:
        shift = left.bit_length() - right.bit_length()
        if shift < 0:
            left, right, of_left, of_right, shift = right, left, of_right, of_left, -shift
        left ^= right << shift
        of_left ^= of_right << shift
    return of_left
