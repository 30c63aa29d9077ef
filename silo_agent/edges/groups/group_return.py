"""What a silo that was away, or comes back with nothing, can still find out about the release groups that it is shown.

Who was away finds links that nobody signs again, while their signers have other keys since. Who signs a link holds the
one before it: by what was signed later a link is known that others took when it was new (`stand_by`).

Who lost its folder and enrolled again finds earlier signatures of its own by a key that it does not have, and of silos
that left it has no keys. So the link that stands is what its people are told by people of the others, and the silo
checks all the rest.
"""

from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import Link, SignedLink, signers

Keys = Mapping[SiloName, Ed25519PublicKey]
EarlierKeys = Mapping[SiloName, Sequence[Ed25519PublicKey]]


def is_of_another_key(signed: SignedLink, silo: SiloName, own_keys: Sequence[Ed25519PublicKey]) -> bool:
    """Whether the silo's name is under it with a key that is not the silo's, nor was."""
    named = any(name == silo for name, _ in signed.signatures)
    return named and not any(signers(signed, {silo: key}) for key in own_keys)


def stand_by(
    previous: Link | None,
    signed: SignedLink,
    offered: Sequence[SignedLink],
    silo: SiloName,
    *,
    pinned: Keys,
    earlier: EarlierKeys,
    colluders: int,
) -> frozenset[SiloName]:
    """Who of those that sign `signed`, but for `silo`, shows that it took it, by more than a signature of its pinned
    key.

    That is who signed a link after it with its pinned key. Are these more than collude, then one of them does not, and
    took `signed` by the keys of then. So signatures count, too, of keys that were followed, or removed, since. In what
    nobody went on from they do not: who has a key that was given up signs nothing new with it.
    """
    voters = (previous or signed.link).members - {silo}
    present = {name: pinned[name] for name in voters & pinned.keys()}
    went_on: frozenset[SiloName] = frozenset()
    last = signed.link
    for one in offered:
        if one.link.previous == last.digest:
            went_on |= signers(one, present)
            last = one.link
    if len(went_on) <= max(colluders, (previous or signed.link).promise.colluders):
        return went_on
    before = ((name, key) for name in voters for key in earlier.get(name, ()))
    return went_on | {name for name, key in before if signers(signed, {name: key})}


def lacks(previous: Link | None, signed: SignedLink, silo: SiloName, pinned: Keys) -> str | None:
    """Why `signed` does not stand for `silo`; None: it does.

    Of a first link all members that are pinned sign, of another as many of its predecessor's as if it had no others;
    one at least.
    """
    link = signed.link
    known = {name: pinned[name] for name in (previous or link).members & pinned.keys() - {silo}}
    needed = len(known) if previous is None else (len(known) + previous.promise.colluders) // 2 + 1
    missing = max(1, min(needed, len(known))) - len(signers(signed, known))
    if missing <= 0:
        return None
    return (
        f"release groups {link.number} ({link.digest.hex()[:16]}) lack {missing} signatures of silos whose keys "
        f"this silo's people pinned: of those who sign these are {', '.join(sorted(known)) or 'none'}; compare keys "
        f"and pin them with `silo-agent trust add`"
    )


def to_compare(signed: SignedLink, silo: SiloName, others: frozenset[SiloName], of_another_key: bool) -> str | None:
    """What people of a silo that holds nothing compare about `signed`, with the people of the `others`; None: it is a
    first link like any other."""
    link = signed.link
    if silo not in link.members or (link.number == 1 and not of_another_key):
        return None
    named = ", ".join(sorted(link.members & others)) or "the others"
    return (
        "this silo holds no release groups before these, and cannot check all that was signed: have the people of "
        f"{named} read out the digest that `silo-agent groups show` says they hold, all 64 characters, and approve "
        "no other"
    )
