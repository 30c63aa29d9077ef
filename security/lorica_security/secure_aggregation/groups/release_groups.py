"""Release groups: standing sets of silos that enter a sum together or not at all, and the chain that every change of
them joins.

Masks hide one vector inside one sum; whoever chooses the sums can subtract one from another. A *partition* puts every
silo into one group, and a silo signs a survivor set only where it is a union of whole groups (silo/phases). Every sum
under one partition is then constant on its groups, and so is every linear combination of such sums.

Partitions change, and memories of single silos do not suffice: of seven silos, sums over {1..7}, over {2,3,4} under
1567|234 and over {5,6,7} under 1234|567 isolate silo 1, and no silo of either last sum has seen the other partition. So
partitions form one chain for the federation (So et al. 2023 fix their batches for good; a federation of years cannot):

- A *link* names its predecessor, its partition, and the *atoms*: the common refinement of all partitions so far, in
  which leavers stay. Every sum ever made is constant on the atoms of the newest link.
- The first link is signed by all its members. Each other one is signed by more than (N + c) / 2 of the predecessor's N
  members, where c is in the predecessor (`Promise`): all count with the same number, and no silo takes a link that
  promises less than its policy.
- With one silo gone for good a successor still has to find its signatures: (N + c) // 2 + 1 <= N - 1, which is c <= N -
  3. A link that promises more (`out_of_reach`) is refused: nothing could ever follow it, or one silo could keep
  everything from following.
- A silo signs one successor of a link, and takes part under the one head that it holds; rosters are bound to that head.
  Two successors of one link would need more than N + c signatures of N silos of which c sign twice.
- What a change makes possible is what `group_changes.objection` says. Where it says something, people decide.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import SIGNATURE_BYTES, sign, verify
from lorica_security.secure_aggregation.messages import check_names
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, digest, framed

RELEASE_GROUPS = "release_groups"
"""The rule that says which sums may come out."""
NO_LINK = bytes(DIGEST_BYTES)
"""What the first link has for its predecessor."""
MAX_LINKS = 1 << 20
MOST_COLLUDERS = 10_000
MOST_SMALLEST_GROUP = MOST_COLLUDERS + 2
LINK_DOMAIN = b"secure-aggregation/release-groups"

Group = tuple[SiloName, ...]


def least_group(colluders: int) -> int:
    """All colluders may sit in one group: two silos of it at least do not collude, and a sum of two shows each the
    other."""
    return max(3, colluders + 2)


@dataclass(frozen=True)
class Partition:
    """Disjoint groups that are not empty; members ascend within a group, groups by their first member. Raises
    MalformedMessage."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise MalformedMessage("release groups: there is none, or one is empty")
        for group in self.groups:
            check_names("release group", *group)
        if any(one[0] >= other[0] for one, other in pairwise(self.groups)):
            raise MalformedMessage("release groups are out of order or twice: sort by their first member")
        if len(self.members) != sum(map(len, self.groups)):
            raise MalformedMessage("release groups: a silo is in two of them")

    @classmethod
    def of(cls, groups: Iterable[Iterable[SiloName]]) -> "Partition":
        """In the canonical order."""
        return cls(_canonical(groups))

    @classmethod
    def singletons(cls, silos: Iterable[SiloName]) -> "Partition":
        """Every silo for itself: which silos a sum is over is left to the coordinator."""
        return cls.of((silo,) for silo in silos)

    @cached_property
    def members(self) -> frozenset[SiloName]:
        return frozenset(silo for group in self.groups for silo in group)

    def group_of(self, silo: SiloName) -> Group | None:
        return next((group for group in self.groups if silo in group), None)

    def whole(self, silos: Collection[SiloName]) -> tuple[SiloName, ...]:
        """The members, by name, of those groups that are among `silos` whole."""
        there = frozenset(silos)
        return tuple(sorted(silo for group in self.groups if there.issuperset(group) for silo in group))

    def is_union(self, silos: Collection[SiloName]) -> bool:
        """Whether `silos` are members of groups that are among them whole, and of no other."""
        return len(self.whole(silos)) == len(frozenset(silos))

    def least_sum(self, cohort: Collection[SiloName], *, threshold: int, min_survivors: int) -> int | None:
        """The fewest silos of `cohort` that a sum can be over; None where no sum can come out.

        A sum is over whole groups with `min_survivors` silos; `threshold` silos must have sent their vectors, those of
        incomplete groups among them. Each group outside the sum misses one at least.
        """
        there = frozenset(cohort)
        sizes = [len(group) for group in self.groups if there.issuperset(group)]
        least_groups = max(0, len(sizes) - (len(there) - threshold))
        reachable: list[int] = [1, *([0] * len(sizes))]  # by number of groups: bit s is set where s silos can be had
        for taken, size in enumerate(sizes):
            for number in range(taken, -1, -1):
                reachable[number + 1] |= reachable[number] << size
        if len(there) < threshold:
            return None
        sums = 0
        for number in range(least_groups, len(sizes) + 1):
            sums |= reachable[number]
        least = max(min_survivors, 1)
        sums >>= least
        return least + (sums & -sums).bit_length() - 1 if sums else None


def _canonical(groups: Iterable[Iterable[SiloName]]) -> tuple[Group, ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def refined(atoms: Iterable[Group], partition: Partition) -> tuple[Group, ...]:
    """The common refinement of what was told apart so far and of `partition`; leavers and newcomers are atoms too."""
    pieces: list[Iterable[SiloName]] = []
    known: set[SiloName] = set()
    for atom in atoms:
        known.update(atom)
        pieces += [frozenset(atom) & frozenset(group) for group in partition.groups]
        pieces.append(frozenset(atom) - partition.members)
    pieces += [frozenset(group) - known for group in partition.groups]
    return _canonical(piece for piece in pieces if piece)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a link says that it holds against: `colluders` silos that sign two successors, and sets of fewer than
    `smallest_group`.

    All members count signatures with these numbers, and none of them takes a link that says less than its own policy.
    Raises MalformedMessage.
    """

    colluders: int = 0
    smallest_group: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.colluders <= MOST_COLLUDERS:
            raise MalformedMessage(
                f"release groups hold against {self.colluders} colluders: allowed are 0 to {MOST_COLLUDERS}"
            )
        if not least_group(self.colluders) <= self.smallest_group <= MOST_SMALLEST_GROUP:
            raise MalformedMessage(
                f"smallest_group of release groups is {self.smallest_group} with {self.colluders} colluders: "
                f"allowed are {least_group(self.colluders)} to {MOST_SMALLEST_GROUP}"
            )

    def lacks(self, other: "Promise") -> tuple[str, ...]:
        """Each number in which this promise is below `other`, in words."""
        return tuple(f"{name} {own} instead of {asked}" for name, own, asked in self._beside(other) if own < asked)

    def beyond(self, other: "Promise") -> tuple[str, ...]:
        """Each number in which this promise is above `other`, in words."""
        return tuple(f"{name} {own} where {asked} would do" for name, own, asked in self._beside(other) if own > asked)

    def _beside(self, other: "Promise") -> tuple[tuple[str, int, int], ...]:
        return (
            ("colluders", self.colluders, other.colluders),
            ("smallest_group", self.smallest_group, other.smallest_group),
        )

    def or_more(self, other: "Promise") -> "Promise":
        """The larger of each number."""
        return Promise(
            colluders=max(self.colluders, other.colluders),
            smallest_group=max(self.smallest_group, other.smallest_group),
        )


LEAST_PROMISE = Promise()
"""What all release groups promise."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One partition in its place of the chain; `number` counts from 1. Raises MalformedMessage."""

    federation: FederationName
    number: int
    previous: bytes
    partition: Partition
    atoms: tuple[Group, ...]
    promise: Promise = LEAST_PROMISE

    def __post_init__(self) -> None:
        check_bytes("release groups", DIGEST_BYTES, previous=self.previous)
        if not 1 <= self.number < MAX_LINKS:
            raise MalformedMessage(f"release groups have number {self.number}: allowed are 1 to {MAX_LINKS - 1}")
        if (self.number == 1) != (self.previous == NO_LINK):
            raise MalformedMessage(f"release groups {self.number} name no predecessor, or the first ones name one")
        Partition(self.atoms)
        if self.number == 1 and self.atoms != self.partition.groups:
            raise MalformedMessage("the first release groups have other atoms than their groups")

    @cached_property
    def digest(self) -> bytes:
        return digest(
            "release-groups",
            self.federation,
            self.number,
            self.previous,
            self.partition.groups,
            self.atoms,
            self.promise.colluders,
            self.promise.smallest_group,
        )

    @property
    def members(self) -> frozenset[SiloName]:
        return self.partition.members

    def atom_of(self, silo: SiloName) -> Group | None:
        return next((atom for atom in self.atoms if silo in atom), None)


def first_link(federation: FederationName, partition: Partition, promise: Promise = LEAST_PROMISE) -> Link:
    return Link(
        federation=federation,
        number=1,
        previous=NO_LINK,
        partition=partition,
        atoms=partition.groups,
        promise=promise,
    )


def successor(previous: Link, partition: Partition, promise: Promise | None = None) -> Link:
    """`promise` None: the predecessor's."""
    return Link(
        federation=previous.federation,
        number=previous.number + 1,
        previous=previous.digest,
        partition=partition,
        atoms=refined(previous.atoms, partition),
        promise=previous.promise if promise is None else promise,
    )


def too_little(link: Link, asked: Promise) -> str | None:
    """What `link` promises less than a silo's policy asks for, with the remedy; None: nothing."""
    if not (lacks := link.promise.lacks(asked)):
        return None
    return (
        f"release groups {link.number} ({link.digest.hex()[:16]}) promise less than [policy] of this silo asks for: "
        f"{', '.join(lacks)}. Have the operator run `coordinator groups propose` with --colluders {asked.colluders} "
        f"--smallest-group {asked.smallest_group}, or lower [policy]"
    )


def out_of_reach(link: Link) -> str | None:
    """Why no successor of `link` could be sure of its signatures with one silo gone for good, with the remedy; None:
    one can."""
    silos, colluders = len(link.members), link.promise.colluders
    if silos < 3:
        return (
            f"release groups {link.number} ({link.digest.hex()[:16]}) are of {silos} silos: under masks no sum is "
            "of fewer than 3, and of so few one that is gone for good keeps any other groups from following. Propose "
            "groups of at least 3 silos"
        )
    if colluders <= silos - 3:
        return None
    return (
        f"release groups {link.number} ({link.digest.hex()[:16]}) promise to hold against {colluders} colluders "
        f"among {silos} silos: what follows them would need {needed_after(link)} signatures, and one silo that is "
        f"gone for good would keep them from it. Of {silos} silos at most {silos - 3} may be colluders: `coordinator "
        f"groups propose` with --colluders {silos - 3} or less, or with "
        f"{colluders + 3 - silos} more silos"
    )


def needed_after(link: Link) -> int:
    """Signatures of `link`'s members that each successor needs."""
    return (len(link.members) + link.promise.colluders) // 2 + 1


def check_successor(previous: Link | None, link: Link) -> None:
    """Raise MalformedMessage unless `link` follows `previous` with the atoms that come of both; None: it is the
    first."""
    expected = (
        first_link(link.federation, link.partition, link.promise)
        if previous is None
        else successor(previous, link.partition, link.promise)
    )
    if link != expected:
        raise MalformedMessage(
            f"release groups {link.number} ({link.digest.hex()[:16]}) do not follow "
            f"{'nothing' if previous is None else previous.digest.hex()[:16]}: they name another predecessor or "
            "other atoms"
        )


@dataclass(frozen=True, kw_only=True)
class SignedLink:
    """`signatures` by name of the signer, each over the link's digest with that silo's identity key. Raises
    MalformedMessage."""

    link: Link
    signatures: tuple[tuple[SiloName, bytes], ...] = ()

    def __post_init__(self) -> None:
        check_names("signatures of release groups", *(silo for silo, _ in self.signatures))
        for silo, signature in self.signatures:
            check_bytes(f"release groups, silo {silo}:", SIGNATURE_BYTES, signature=signature)

    def signed_by(self, silo: SiloName, signature: bytes) -> "SignedLink":
        others = ((name, one) for name, one in self.signatures if name != silo)
        return SignedLink(link=self.link, signatures=tuple(sorted((*others, (silo, signature)))))


def signature_of(link: Link, key: Ed25519PrivateKey) -> bytes:
    return sign(key, domain=LINK_DOMAIN, payload=framed(link.digest))


def check_signature(link: Link, silo: SiloName, signature: bytes, key: Ed25519PublicKey) -> None:
    """Raise IntegrityError for a signature that `key` did not make."""
    try:
        verify(key, domain=LINK_DOMAIN, payload=framed(link.digest), signature=signature)
    except IntegrityError:
        raise IntegrityError(f"silo {silo} did not sign release groups {link.digest.hex()[:16]}") from None


def signers(signed: SignedLink, identities: Mapping[SiloName, Ed25519PublicKey]) -> frozenset[SiloName]:
    """Whose signatures are good under `identities`; others count for nothing."""
    found = set()
    for silo, signature in signed.signatures:
        key = identities.get(silo)
        if key is None:
            continue
        try:
            check_signature(signed.link, silo, signature, key)
        except IntegrityError:
            continue
        found.add(silo)
    return frozenset(found)


def missing_signatures(
    previous: Link | None, link: Link, signed: Collection[SiloName]
) -> tuple[frozenset[SiloName], int]:
    """Of whom `link` still wants signatures, and how many; 0: it stands.

    Of the first link all members; of another more than (N + c) / 2 of the predecessor's N members, c being the
    predecessor's colluders.
    """
    if previous is None:
        missing = link.members - frozenset(signed)
        return missing, len(missing)
    have = previous.members & frozenset(signed)
    return previous.members - have, max(0, needed_after(previous) - len(have))
