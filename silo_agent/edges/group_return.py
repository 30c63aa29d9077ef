"""What a silo that comes back with nothing can still find out about the release groups that it is shown.

It lost its folder and enrolled again: its earlier signatures are of a key that it does not have, and of silos that left it has no keys.
So the link that stands is what its people are told by people of the others, and the silo checks all the rest.
"""

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from security.identifiers import SiloName
from security.secure_aggregation.release_groups import Link, SignedLink, signers


def is_of_another_key(signed: SignedLink, silo: SiloName, own_key: Ed25519PublicKey) -> bool:
    """Whether the silo's name is under it with a key that is not the silo's."""
    return any(name == silo for name, _ in signed.signatures) and not signers(signed, {silo: own_key})


def lacks(
    previous: Link | None, signed: SignedLink, silo: SiloName, pinned: Mapping[SiloName, Ed25519PublicKey]
) -> str | None:
    """Why `signed` does not stand for `silo`; None: it does.

    Of a first link all members that are pinned sign, of another as many of its predecessor's as if it had no others; one at least.
    """
    link = signed.link
    known = {name: pinned[name] for name in (previous or link).members & pinned.keys() - {silo}}
    needed = len(known) if previous is None else (len(known) + previous.promise.colluders) // 2 + 1
    missing = max(1, min(needed, len(known))) - len(signers(signed, known))
    if missing <= 0:
        return None
    return (
        f"release groups {link.number} ({link.digest.hex()[:16]}) lack {missing} signatures of silos whose keys this silo's people "
        f"pinned: of those who sign these are {', '.join(sorted(known)) or 'none'}; compare keys and pin them with `silo-agent trust add`"
    )


def to_compare(
    signed: SignedLink, silo: SiloName, own_key: Ed25519PublicKey, pinned: frozenset[SiloName]
) -> str | None:
    """What people of a silo that holds nothing compare about `signed`; None: it is a first link like any other."""
    link = signed.link
    if silo not in link.members or (link.number == 1 and not is_of_another_key(signed, silo, own_key)):
        return None
    others = ", ".join(sorted(link.members & pinned - {silo})) or "the others"
    return (
        "this silo holds no release groups before these, and cannot check all that was signed: have the people of "
        f"{others} read out the digest that `silo-agent groups show` says they hold, all 64 characters, and approve no other"
    )
