"""Silos check a round model together: each makes some of its chunks again, and signs which came out as the evidence
says.

Every chunk is one that `checkers` of the survivors are to check; who is to check what follows from their names, so
nobody deals it out. A silo takes a chunk for right that it checked itself, or that so many others did whose keys its
people pinned: of `colluders` + 1 others at least one is honest. What others leave out it checks itself. What it checked
itself it knows from its own disk, and from no verdict.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import SIGNATURE_BYTES, sign, verify
from lorica_security.secure_aggregation.messages import check_names
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, framed

VERDICT_DOMAIN = b"round-verdict"
MAX_CHUNKS = 1 << 20


def checkers(colluders: int) -> int:
    """How many others have to have checked a chunk that a silo did not check itself."""
    return max(2, colluders + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`silo` found these chunks of the round right: in `chunks` a bit for each, the first one lowest in the first byte.
    Raises MalformedMessage."""

    silo: SiloName
    evidence: bytes
    chunks: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check_names("verdict", self.silo)
        check_bytes("verdict", DIGEST_BYTES, evidence=self.evidence)
        check_bytes("verdict", SIGNATURE_BYTES, signature=self.signature)
        if len(self.chunks) > MAX_CHUNKS // 8:
            raise MalformedMessage(
                f"verdict of silo {self.silo} is on {8 * len(self.chunks)} chunks: at most {MAX_CHUNKS}"
            )

    @property
    def numbers(self) -> frozenset[int]:
        """The chunks that were found right."""
        return numbers_of(self.chunks)

    def check(self, key: Ed25519PublicKey) -> None:
        """Raise IntegrityError unless the owner of `key` signed it."""
        payload = framed(self.silo.encode(), self.evidence, self.chunks)
        verify(key, domain=VERDICT_DOMAIN, payload=payload, signature=self.signature)


def bits_of(chunks: Iterable[int]) -> bytes:
    """A bit for each chunk, as `Verdict.chunks` has them; no byte after the last chunk."""
    bits = bytearray()
    for chunk in sorted(chunks):
        bits.extend(bytes(chunk // 8 + 1 - len(bits)))
        bits[chunk // 8] |= 1 << chunk % 8
    return bytes(bits)


def numbers_of(bits: bytes) -> frozenset[int]:
    return frozenset(8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)


def signed_verdict(evidence: bytes, silo: SiloName, chunks: Iterable[int], key: Ed25519PrivateKey) -> Verdict:
    bits = bits_of(chunks)
    signature = sign(key, domain=VERDICT_DOMAIN, payload=framed(silo.encode(), evidence, bits))
    return Verdict(silo=silo, evidence=evidence, chunks=bits, signature=signature)


def part_of(silo: SiloName, survivors: Sequence[SiloName], chunks: int, *, each: int) -> frozenset[int]:
    """Which of `chunks` chunks `silo` is to check, where `each` of the survivors check every one; none where it is not
    among them."""
    names = sorted(survivors)
    if silo not in names:
        return frozenset()
    own, silos = names.index(silo), len(names)
    return frozenset(chunk for chunk in range(chunks) if (own - chunk) % silos < each)


def beyond_others(
    silo: SiloName, survivors: Sequence[SiloName], chunks: int, *, pinned: Iterable[SiloName], each: int
) -> frozenset[int]:
    """Chunks that fewer than `each` others of those `pinned` are to check: there is nothing to wait for."""
    trusted = frozenset(pinned) - {silo}
    parts = [part_of(other, survivors, chunks, each=each) for other in survivors if other in trusted]
    return frozenset(chunk for chunk in range(chunks) if sum(chunk in part for part in parts) < each)


def uncovered(
    own: Iterable[int],
    others: Iterable[Verdict],
    *,
    evidence: bytes,
    chunks: int,
    keys: Mapping[SiloName, Collection[Ed25519PublicKey]],
    each: int,
) -> frozenset[int]:
    """Chunks that this silo did not check, nor `each` others. A verdict counts that one of its silo's `keys` signed."""
    of_silo: dict[SiloName, frozenset[int]] = {}
    for verdict in others:
        if verdict.evidence == evidence and any(_is_by(verdict, key) for key in keys.get(verdict.silo, ())):
            of_silo[verdict.silo] = of_silo.get(verdict.silo, frozenset()) | verdict.numbers
    counts = _counts(of_silo)
    checked = frozenset(own)
    return frozenset(at for at in range(chunks) if at not in checked and counts.get(at, 0) < each)


def _is_by(verdict: Verdict, key: Ed25519PublicKey) -> bool:
    try:
        verdict.check(key)
    except IntegrityError:
        return False
    return True


def _counts(of_silo: Mapping[SiloName, frozenset[int]]) -> Mapping[int, int]:
    counts: dict[int, int] = {}
    for numbers in of_silo.values():
        for number in numbers:
            counts[number] = counts.get(number, 0) + 1
    return counts
