"""What travels, in the order of the protocol; the roster has a file of its own.

    silo -> coordinator   Advertisement            1 advertise keys
    coordinator -> silo   Roster                   2 share keys
    silo -> coordinator   SharedKeys
    coordinator -> silo   Delivery                 3 masked input
    silo -> coordinator   MaskedInput  (beside the vector itself), or Complaint
    coordinator -> silo   SurvivorSet              4 consistency check
    silo -> coordinator   Agreement
    coordinator -> silo   UnmaskRequest            5 unmasking
    silo -> coordinator   Reveal

Every message of a silo is signed with its identity key for one domain, over the attempt (by way of the roster digest,
once there is one). Whoever relays can only relay. Sizes and orders are checked at construction (MalformedMessage),
signatures by `check_signed`. An edge that receives a silo's message checks that its `silo` is who the connection says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import AuthenticationError, ConfigurationError, IntegrityError, MalformedMessage
from lorica_security.identifiers import SiloName, silo_name
from lorica_security.identity.identity_key import SIGNATURE_BYTES, sign, verify
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.key_agreement import (
    CIPHERTEXT_BYTES,
    KEY_BYTES,
    PUBLIC_KEY_BYTES,
    X25519_BYTES,
)
from lorica_security.secure_aggregation.keys.pair_secret import PairCopy
from lorica_security.secure_aggregation.keys.secret_sharing import SALT_BYTES, check_share
from lorica_security.secure_aggregation.keys.share_box import box_bytes
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, digest, framed

UNSIGNED = bytes(SIGNATURE_BYTES)

Identities = Mapping[SiloName, Ed25519PublicKey]


def check_names(owner: str, *names: SiloName) -> None:
    """Raise MalformedMessage unless the names are silo names, strictly ascending."""
    for name in names:
        try:
            silo_name(name)
        except ConfigurationError as error:
            raise MalformedMessage(f"{owner}: {error}") from error
    if any(one >= other for one, other in pairwise(names)):
        raise MalformedMessage(f"{owner} names silos out of order or twice: sort by name")


@dataclass(frozen=True, kw_only=True)
class Advertisement:
    """Two fresh public keys, each of ML-KEM-768 and X25519: `mask_key` for masks, `box_key` for sealed shares.

    `seen`, by name: the digests of the advertisements that others of its release group last dealt by, as this silo saw.
    """

    attempt: Attempt
    silo: SiloName
    mask_key: bytes
    box_key: bytes
    seen: tuple[tuple[SiloName, bytes], ...] = ()
    signature: bytes = UNSIGNED

    domain = b"secure-aggregation/advertisement"

    def __post_init__(self) -> None:
        check_names("advertisement", self.silo)
        if X25519_BYTES in (len(self.mask_key), len(self.box_key)):
            raise MalformedMessage(
                f"silo {self.silo} advertised X25519 keys without ML-KEM-768: upgrade its agent, masks need both"
            )
        check_bytes("advertisement", PUBLIC_KEY_BYTES, mask_key=self.mask_key, box_key=self.box_key)
        check_names(f"advertisement of silo {self.silo}", *(silo for silo, _ in self.seen))
        for silo, digest_seen in self.seen:
            check_bytes(f"advertisement of silo {self.silo}, seen of {silo}:", DIGEST_BYTES, digest=digest_seen)
        check_bytes("advertisement", SIGNATURE_BYTES, signature=self.signature)

    @cached_property
    def statement(self) -> bytes:
        it = self.attempt
        parts = it.federation, it.plan, it.round, it.number, it.id, self.silo, self.mask_key, self.box_key
        return framed(*parts, self.seen)

    @cached_property
    def digest(self) -> bytes:
        return digest("advertisement", self.statement)


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtLine:
    """What a dealer says in public of what one holder gets: two commitments, and the digest of the sealed share."""

    self_mask: bytes
    mask_key: bytes
    box: bytes

    def __post_init__(self) -> None:
        check_bytes("dealing", DIGEST_BYTES, self_mask=self.self_mask, mask_key=self.mask_key, box=self.box)


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """A dealer's signed, public statement; `lines` in the order of the roster, one for the dealer itself too."""

    roster: bytes
    silo: SiloName
    seed_commitment: bytes
    lines: tuple[DealtLine, ...]
    signature: bytes = UNSIGNED

    domain = b"secure-aggregation/dealing"

    def __post_init__(self) -> None:
        check_names("dealing", self.silo)
        check_bytes("dealing", DIGEST_BYTES, roster=self.roster, seed_commitment=self.seed_commitment)
        check_bytes("dealing", SIGNATURE_BYTES, signature=self.signature)

    @cached_property
    def statement(self) -> bytes:
        lines = tuple((line.self_mask, line.mask_key, line.box) for line in self.lines)
        return framed(self.roster, self.silo, self.seed_commitment, lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShare:
    """A box and what its key was encapsulated in; from the first by name of the two also the copy of their pair
    secret."""

    dealer: SiloName
    holder: SiloName
    ciphertext: bytes
    box: bytes
    copy: PairCopy | None

    def __post_init__(self) -> None:
        check_names("sealed share", self.dealer)
        check_names("sealed share", self.holder)
        check_bytes("sealed share", CIPHERTEXT_BYTES, ciphertext=self.ciphertext)
        check_bytes("sealed share", box_bytes(self.dealer, self.holder), box=self.box)
        if (self.copy is not None) != (self.dealer < self.holder):
            raise MalformedMessage(
                f"the sealed share from silo {self.dealer} to silo {self.holder} has "
                f"{'no' if self.copy is None else 'a'} pair copy: the first by name of two sends one"
            )

    @property
    def digest(self) -> bytes:
        return digest("box", self.ciphertext, self.box, b"" if self.copy is None else self.copy.digest)


OWN_BOX = digest("box", b"", b"", b"")
"""Stands in a dealing for the share that the dealer keeps itself."""


@dataclass(frozen=True, kw_only=True)
class SharedKeys:
    """A dealing and its boxes, one for every other member, by name of the holder."""

    dealing: Dealing
    boxes: tuple[SealedShare, ...]

    def __post_init__(self) -> None:
        if any(share.dealer != self.dealing.silo for share in self.boxes):
            raise MalformedMessage(f"silo {self.dealing.silo} sends a sealed share of another dealer")
        check_names("shared keys", *(share.holder for share in self.boxes))

    @property
    def silo(self) -> SiloName:
        return self.dealing.silo


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """For one holder: the statements of all who dealt, and the boxes for it, each by name of the dealer."""

    roster: bytes
    holder: SiloName
    dealings: tuple[Dealing, ...]
    boxes: tuple[SealedShare, ...]

    def __post_init__(self) -> None:
        check_bytes("delivery", DIGEST_BYTES, roster=self.roster)
        check_names("delivery", *self.dealers)
        check_names("delivery boxes", *(share.dealer for share in self.boxes))
        if any(share.holder != self.holder for share in self.boxes):
            raise MalformedMessage(f"delivery to silo {self.holder} has a sealed share for another holder")
        if any(dealing.roster != self.roster for dealing in self.dealings):
            raise MalformedMessage(f"delivery to silo {self.holder} has a dealing of another roster")

    @cached_property
    def dealers(self) -> tuple[SiloName, ...]:
        return tuple(dealing.silo for dealing in self.dealings)

    @cached_property
    def dealings_digest(self) -> bytes:
        return dealings_digest(self.dealings)


def dealings_digest(dealings: tuple[Dealing, ...]) -> bytes:
    """Stands for who dealt, and what: masks and survivor sets are bound to it, so that all must have seen the same."""
    return digest("dealings", tuple(dealing.statement for dealing in dealings))


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A dealer's box did not open, or held other shares than were committed to; ends the attempt.

    `key` is the key of that one box, so that the coordinator can see for itself; no other share is shown by it.
    """

    roster: bytes
    silo: SiloName
    dealer: SiloName
    key: bytes
    signature: bytes = UNSIGNED

    domain = b"secure-aggregation/complaint"

    def __post_init__(self) -> None:
        check_names("complaint", self.silo)
        check_names("complaint", self.dealer)
        check_bytes("complaint", DIGEST_BYTES, roster=self.roster)
        check_bytes("complaint", KEY_BYTES, key=self.key)
        check_bytes("complaint", SIGNATURE_BYTES, signature=self.signature)

    @cached_property
    def statement(self) -> bytes:
        return framed(self.roster, self.silo, self.dealer, self.key)


@dataclass(frozen=True, kw_only=True)
class MaskedInput:
    """Announces and signs a masked vector of `words` 32-bit words by its digest (of its manifest, on the wire)."""

    roster: bytes
    dealings: bytes
    silo: SiloName
    words: int
    vector: bytes
    signature: bytes = UNSIGNED

    domain = b"secure-aggregation/masked-input"

    def __post_init__(self) -> None:
        check_names("masked input", self.silo)
        check_bytes("masked input", DIGEST_BYTES, roster=self.roster, dealings=self.dealings, vector=self.vector)
        check_bytes("masked input", SIGNATURE_BYTES, signature=self.signature)
        if not 1 <= self.words < 1 << 62:
            raise MalformedMessage(f"masked input of {self.words} words")

    @cached_property
    def statement(self) -> bytes:
        return framed(self.roster, self.dealings, self.silo, self.words, self.vector)


@dataclass(frozen=True, kw_only=True)
class SurvivorSet:
    """Whose masked inputs are summed, by name; `inputs` are the digests of their vectors, as MaskedInput has them."""

    roster: bytes
    dealings: bytes
    silos: tuple[SiloName, ...]
    inputs: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_bytes("survivor set", DIGEST_BYTES, roster=self.roster, dealings=self.dealings)
        check_names("survivor set", *self.silos)
        if len(self.inputs) != len(self.silos):
            raise MalformedMessage(f"survivor set has {len(self.inputs)} masked inputs for {len(self.silos)} silos")
        for silo, vector in zip(self.silos, self.inputs, strict=True):
            check_bytes(f"survivor set, silo {silo}:", DIGEST_BYTES, vector=vector)

    @cached_property
    def digest(self) -> bytes:
        return digest("survivors", self.roster, self.dealings, self.silos, self.inputs)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A silo's signature under the one survivor set of an attempt, here by its digest."""

    roster: bytes
    silo: SiloName
    survivors: bytes
    signature: bytes = UNSIGNED

    domain = b"secure-aggregation/agreement"

    def __post_init__(self) -> None:
        check_names("agreement", self.silo)
        check_bytes("agreement", DIGEST_BYTES, roster=self.roster, survivors=self.survivors)
        check_bytes("agreement", SIGNATURE_BYTES, signature=self.signature)

    @cached_property
    def statement(self) -> bytes:
        return framed(self.roster, self.silo, self.survivors)


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest:
    """Who agreed on the survivors, by name. It names no survivor: each silo unmasks the set that it signed itself."""

    roster: bytes
    agreements: tuple[Agreement, ...]

    def __post_init__(self) -> None:
        check_bytes("unmask request", DIGEST_BYTES, roster=self.roster)
        check_names("unmask request", *(agreement.silo for agreement in self.agreements))


@dataclass(frozen=True, kw_only=True)
class _RevealedShare:
    dealer: SiloName
    share: bytes
    salt: bytes

    def __post_init__(self) -> None:
        check_names("revealed share", self.dealer)
        check_share(self.share)
        check_bytes("revealed share", SALT_BYTES, salt=self.salt)


class SelfMaskShare(_RevealedShare):
    """Of a survivor."""


class MaskKeyShare(_RevealedShare):
    """Of one that dealt and then dropped."""


RevealedShare = SelfMaskShare | MaskKeyShare
"""One of two, on the wire a `oneof`: both shares of one dealer cannot be said."""


@dataclass(frozen=True, kw_only=True)
class Reveal:
    """One share of every dealer, by name: each dealer stands here once."""

    roster: bytes
    silo: SiloName
    shares: tuple[RevealedShare, ...]
    signature: bytes = UNSIGNED

    domain = b"secure-aggregation/reveal"

    def __post_init__(self) -> None:
        check_names("reveal", self.silo)
        check_bytes("reveal", DIGEST_BYTES, roster=self.roster)
        check_bytes("reveal", SIGNATURE_BYTES, signature=self.signature)
        check_names("reveal", *(share.dealer for share in self.shares))

    @cached_property
    def statement(self) -> bytes:
        shares = tuple((type(it).__name__, it.dealer, it.share, it.salt) for it in self.shares)
        return framed(self.roster, self.silo, shares)


Signed = Advertisement | Dealing | Complaint | MaskedInput | Agreement | Reveal
_S = TypeVar("_S", Advertisement, Dealing, Complaint, MaskedInput, Agreement, Reveal)


def signed(message: _S, key: Ed25519PrivateKey) -> _S:
    return replace(message, signature=sign(key, domain=message.domain, payload=message.statement))


def check_signed(message: Signed, identities: Identities) -> None:
    """Raise AuthenticationError where `identities` has no key of the silo, IntegrityError where the signature is
    false."""
    key = identities.get(message.silo)
    if key is None:
        raise AuthenticationError(f"silo {message.silo} has no identity key here: pin its key first")
    try:
        verify(key, domain=message.domain, payload=message.statement, signature=message.signature)
    except IntegrityError:
        raise IntegrityError(
            f"the {type(message).__name__} of silo {message.silo} is not signed by its pinned identity key: refuse it"
        ) from None
