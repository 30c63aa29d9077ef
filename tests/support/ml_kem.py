"""ML-KEM-768's encapsulation as FIPS 203 writes it, with its 32 random bytes given: for vectors that come out the same
each time.

Slow, and not of constant time: no secret that matters may come near it.
"""

from hashlib import sha3_256, sha3_512, shake_128, shake_256

Q, N, K, ETA, DU, DV = 3329, 256, 3, 2, 10, 4

Poly = list[int]


def _zeta(index: int) -> int:
    return pow(17, int(f"{index:07b}"[::-1], 2), Q)


ZETAS = [_zeta(index) for index in range(128)]
GAMMAS = [pow(17, 2 * int(f"{index:07b}"[::-1], 2) + 1, Q) for index in range(128)]


def encapsulate(public: bytes, coins: bytes) -> tuple[bytes, bytes]:
    """(shared secret, ciphertext) for the 1184 bytes of an encapsulation key: algorithm 17."""
    derived = sha3_512(coins + sha3_256(public).digest()).digest()
    return derived[:32], _encrypt(public, coins, derived[32:])


def _encrypt(public: bytes, message: bytes, coins: bytes) -> bytes:
    """K-PKE.Encrypt: algorithm 14."""
    t = [_unpacked(public[384 * row : 384 * (row + 1)], 12) for row in range(K)]
    seed = public[384 * K :]
    y = [_ntt(_noise(coins, index)) for index in range(K)]
    e1 = [_noise(coins, K + index) for index in range(K)]
    e2 = _noise(coins, 2 * K)
    u = [
        _added(_inverse_ntt(_dot([_sampled(seed, row, column) for row in range(K)], y)), e1[column])
        for column in range(K)
    ]
    mu = [(Q + 1) // 2 * (message[at // 8] >> at % 8 & 1) for at in range(N)]
    v = _added(_added(_inverse_ntt(_dot(t, y)), e2), mu)
    return b"".join(_packed(_compressed(part, DU), DU) for part in u) + _packed(_compressed(v, DV), DV)


def _sampled(seed: bytes, row: int, column: int) -> Poly:
    """The entry of the matrix at `row`, `column`, in the NTT domain: algorithm 7."""
    out: Poly = []
    stream = shake_128(seed + bytes([column, row])).digest(3 * 512)
    for at in range(0, len(stream), 3):
        low = stream[at] | (stream[at + 1] & 15) << 8
        high = stream[at + 1] >> 4 | stream[at + 2] << 4
        out += [value for value in (low, high) if value < Q]
    return out[:N]


def _noise(coins: bytes, index: int) -> Poly:
    """From the centred binomial distribution: algorithm 8."""
    bits = int.from_bytes(shake_256(coins + bytes([index])).digest(64 * ETA), "little")
    take = [bits >> at & 1 for at in range(8 * 64 * ETA)]
    return [
        (sum(take[2 * ETA * at : 2 * ETA * at + ETA]) - sum(take[2 * ETA * at + ETA : 2 * ETA * (at + 1)])) % Q
        for at in range(N)
    ]


def _ntt(poly: Poly) -> Poly:
    out, at, length = list(poly), 1, 128
    while length >= 2:
        for start in range(0, N, 2 * length):
            for j in range(start, start + length):
                product = ZETAS[at] * out[j + length] % Q
                out[j + length], out[j] = (out[j] - product) % Q, (out[j] + product) % Q
            at += 1
        length //= 2
    return out


def _inverse_ntt(poly: Poly) -> Poly:
    out, at, length = list(poly), 127, 2
    while length <= 128:
        for start in range(0, N, 2 * length):
            for j in range(start, start + length):
                one, other = out[j], out[j + length]
                out[j], out[j + length] = (one + other) % Q, ZETAS[at] * (other - one) % Q
            at -= 1
        length *= 2
    return [value * 3303 % Q for value in out]


def _dot(one: list[Poly], other: list[Poly]) -> Poly:
    out = [0] * N
    for f, g in zip(one, other, strict=True):
        for at, gamma in enumerate(GAMMAS):
            a0, a1, b0, b1 = *f[2 * at : 2 * at + 2], *g[2 * at : 2 * at + 2]
            out[2 * at] = (out[2 * at] + a0 * b0 + a1 * b1 * gamma) % Q
            out[2 * at + 1] = (out[2 * at + 1] + a0 * b1 + a1 * b0) % Q
    return out


def _added(one: Poly, other: Poly) -> Poly:
    return [(a + b) % Q for a, b in zip(one, other, strict=True)]


def _compressed(poly: Poly, bits: int) -> Poly:
    return [((value << bits) + Q // 2) // Q % (1 << bits) for value in poly]


def _packed(poly: Poly, bits: int) -> bytes:
    return sum(value << bits * at for at, value in enumerate(poly)).to_bytes(N * bits // 8, "little")


def _unpacked(data: bytes, bits: int) -> Poly:
    number = int.from_bytes(data, "little")
    return [number >> bits * at & ((1 << bits) - 1) for at in range(N)]
