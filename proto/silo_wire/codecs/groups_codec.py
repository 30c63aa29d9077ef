"""Release groups between values and bytes. Whoever reads bounds what it takes; the values check themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import SIGNATURE_BYTES, public_key_bytes, public_key_from_bytes
from lorica_security.identity.succession import Succession
from lorica_security.secure_aggregation.groups.release_groups import Group, Link, Partition, Promise, SignedLink
from silo_wire.codecs.renewal import succession_to_wire, successions_from_wire
from silo_wire.v1 import federation_pb2
from silo_wire.v1 import secure_aggregation_pb2 as pb

MOST_LINKS = 1_000
"""In one answer; an agent that is further behind asks again."""
MOST_BYTES_HELD = 2 << 20
"""Of the links that a silo gives back to a coordinator that came from a backup; one link is given whatever its size."""
MOST_SILOS = 10_000
"""In all groups or atoms of one link: leavers stay in the atoms."""
MOST_NAME_CHARACTERS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIdentity:
    """A silo's identity key as the coordinator has it, and what led to it, oldest first. Nothing vouches for it."""

    silo: SiloName
    key: Ed25519PublicKey
    successions: tuple[Succession, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsOffer:
    """What the coordinator answers to a silo that asks for release groups: links from the one that it holds on, oldest
    first."""

    links: tuple[SignedLink, ...]
    proposed: SignedLink | None
    identities: tuple[KnownIdentity, ...]


def offer_to_wire(offer: GroupsOffer) -> federation_pb2.GroupsReply:
    return federation_pb2.GroupsReply(
        links=map(signed_groups_to_wire, offer.links[:MOST_LINKS]),
        proposed=None if offer.proposed is None else signed_groups_to_wire(offer.proposed),
        identities=[
            federation_pb2.SiloIdentity(
                silo=one.silo, key=public_key_bytes(one.key), successions=map(succession_to_wire, one.successions)
            )
            for one in offer.identities
        ],
    )


def offer_from_wire(message: federation_pb2.GroupsReply, federation: FederationName) -> GroupsOffer:
    """Raises MalformedMessage; checks no signature."""
    if len(message.links) > MOST_LINKS or len(message.identities) > MOST_SILOS:
        raise MalformedMessage(
            f"{len(message.links)} links of release groups with {len(message.identities)} identity keys came: at most "
            f"{MOST_LINKS} and {MOST_SILOS} are taken"
        )
    return GroupsOffer(
        links=tuple(signed_groups_from_wire(one, federation) for one in message.links),
        proposed=signed_groups_from_wire(message.proposed, federation) if message.HasField("proposed") else None,
        identities=tuple(
            KnownIdentity(
                silo=_name(one.silo),
                key=public_key_from_bytes(one.key),
                successions=tuple(successions_from_wire(one.successions)),
            )
            for one in message.identities
        ),
    )


def held_to_wire(links: Sequence[SignedLink]) -> list[pb.SignedGroups]:
    """The newest of what a silo keeps, oldest first, as many as one request takes."""
    taken: list[pb.SignedGroups] = []
    size = 0
    for signed in reversed(links[-MOST_LINKS:]):
        message = signed_groups_to_wire(signed)
        size += message.ByteSize()
        if taken and size > MOST_BYTES_HELD:
            break
        taken.insert(0, message)
    return taken


def held_from_wire(messages: Sequence[pb.SignedGroups], federation: FederationName) -> tuple[SignedLink, ...]:
    """Raises MalformedMessage; checks no signature."""
    if len(messages) > MOST_LINKS:
        raise MalformedMessage(f"a silo gives {len(messages)} links of release groups: at most {MOST_LINKS} are taken")
    return tuple(signed_groups_from_wire(one, federation) for one in messages)


def groups_to_wire(link: Link) -> pb.ReleaseGroups:
    return pb.ReleaseGroups(
        number=link.number,
        previous=link.previous,
        groups=_groups_to_wire(link.partition.groups),
        atoms=_groups_to_wire(link.atoms),
        colluders=link.promise.colluders,
        smallest_group=link.promise.smallest_group,
    )


def groups_from_wire(message: pb.ReleaseGroups, federation: FederationName) -> Link:
    """Raises MalformedMessage."""
    return Link(
        federation=federation,
        number=message.number,
        previous=message.previous,
        partition=Partition(_groups_from_wire(message.groups)),
        atoms=_groups_from_wire(message.atoms),
        promise=Promise(colluders=message.colluders, smallest_group=message.smallest_group),
    )


def signed_groups_to_wire(signed: SignedLink) -> pb.SignedGroups:
    signatures = [pb.GroupsSignature(silo=silo, signature=signature) for silo, signature in signed.signatures]
    return pb.SignedGroups(groups=groups_to_wire(signed.link), signatures=signatures)


def signed_groups_from_wire(message: pb.SignedGroups, federation: FederationName) -> SignedLink:
    """Raises MalformedMessage; checks no signature."""
    if len(message.signatures) > MOST_SILOS:
        raise MalformedMessage(f"release groups have {len(message.signatures)} signatures: at most {MOST_SILOS}")
    for each in message.signatures:
        if len(each.signature) != SIGNATURE_BYTES:
            raise MalformedMessage(f"a signature under release groups has {len(each.signature)} bytes")
    return SignedLink(
        link=groups_from_wire(message.groups, federation),
        signatures=tuple((_name(each.silo), each.signature) for each in message.signatures),
    )


def signed_groups_to_bytes(signed: SignedLink) -> bytes:
    return signed_groups_to_wire(signed).SerializeToString(deterministic=True)


def signed_groups_from_bytes(data: bytes, federation: FederationName) -> SignedLink:
    """Raises MalformedMessage."""
    try:
        return signed_groups_from_wire(pb.SignedGroups.FromString(data), federation)
    except DecodeError as error:
        raise MalformedMessage("release groups do not parse: their bytes are damaged") from error


def groups_from_request(groups: Sequence[pb.ReleaseGroup]) -> tuple[Group, ...]:
    """As an operator names them, in any order; raises MalformedMessage for more than there can be."""
    return _groups_from_wire(groups)


def _groups_to_wire(groups: Iterable[Group]) -> list[pb.ReleaseGroup]:
    return [pb.ReleaseGroup(silos=group) for group in groups]


def _groups_from_wire(groups: Sequence[pb.ReleaseGroup]) -> tuple[Group, ...]:
    silos = sum(len(group.silos) for group in groups)
    if len(groups) > MOST_SILOS or silos > MOST_SILOS:
        raise MalformedMessage(f"release groups are {len(groups)} of {silos} silos: at most {MOST_SILOS} are allowed")
    return tuple(tuple(_name(silo) for silo in group.silos) for group in groups)


def _name(text: str) -> SiloName:
    if len(text) > MOST_NAME_CHARACTERS:
        raise MalformedMessage(
            f"a silo name of release groups has {len(text)} characters: at most {MOST_NAME_CHARACTERS}"
        )
    return SiloName(text)
