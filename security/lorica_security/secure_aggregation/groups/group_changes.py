"""What a change of release groups makes possible, in words for the people of one silo.

Who approves reads this text and nothing else, and the audit log keeps it. So it names everything that the change brings
at once, the own silo first: a finding that hides another one hides its victim.
"""

from collections.abc import Collection, Iterator

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import LEAST_PROMISE, Group, Link, Promise, needed_after


def judged_by(link: Link, smallest_group: int) -> int:
    """Of fewer silos than this a set is small: what the silo's policy says, or what the link promises, if that is
    more."""
    return max(smallest_group, link.promise.smallest_group)


def split_pieces(previous: Link, link: Link, silo: SiloName) -> tuple[Group, ...]:
    """What `link` leaves of each atom that it splits: of `silo`'s own atom first, and of that the piece with `silo`
    first."""
    split = own_first([atom for atom in previous.atoms if atom not in link.atoms], silo)
    return tuple(piece for atom in split for piece in own_first(link.atoms, silo) if piece[0] in atom)


def new_small_atoms(previous: Link | None, link: Link, *, smallest_group: int) -> tuple[Group, ...]:
    """Sets of fewer than `smallest_group` silos that `link` tells apart for the first time: sums can be subtracted down
    to them."""
    before = frozenset(() if previous is None else previous.atoms)
    return tuple(atom for atom in link.atoms if len(atom) < smallest_group and atom not in before)


def new_small_groups(previous: Link | None, link: Link, *, smallest_group: int) -> tuple[Group, ...]:
    """Groups of fewer than `smallest_group` silos that were none before, also where their atoms are old.

    Of an atom the coordinator can learn what it is told once; of a group it can have the sum as often as it likes.
    """
    before = frozenset(() if previous is None else previous.partition.groups)
    return tuple(group for group in link.partition.groups if len(group) < smallest_group and group not in before)


def objection(
    previous: Link | None,
    link: Link,
    silo: SiloName,
    *,
    pinned: Collection[SiloName],
    asks: Promise,
    signed: Collection[SiloName] | None = None,
) -> str | None:
    """Why people of `silo` must decide about `link`: all that may be learnt of whom, in one text; None: it passes by
    itself.

    `previous` is the link that the silo holds, `pinned` are the peers whose keys its people pinned, `asks` is what its
    policy asks a link to promise. The coordinator does not choose who is with whom: by itself passes one group of all
    that are pinned, or what tells nobody apart who was together before. Nor does it choose how hard the next change
    will be: a promise beyond policy and predecessor is for people. `signed` are those whose good signatures are there;
    None: of those inside the groups it is not said who has signed.
    """
    came = previous is None or silo not in previous.members  # nothing holds yet for whom it is summed with
    group = link.partition.group_of(silo)
    if group is None and came:
        return None  # it is in neither, and has no say
    peers = frozenset(pinned) - {silo}
    least = max(judged_by(one, asks.smallest_group) for one in (previous, link) if one is not None)
    known = None if came else previous  # of a link that it was not in, nothing was allowed
    atoms = new_small_atoms(known, link, smallest_group=least)
    groups = new_small_groups(known, link, smallest_group=least)
    pieces = () if previous is None else split_pieces(previous, link, silo)
    own = link.atom_of(silo)
    strangers = [peer for peer in group or () if peer != silo and peer not in peers]
    by_itself = link.number == 1 and link.partition.groups == (tuple(sorted({silo, *peers})),)
    chosen = came and not by_itself
    less = () if previous is None else link.promise.lacks(previous.promise)
    more = link.promise.beyond(asks.or_more(LEAST_PROMISE if known is None else known.promise))
    if not (strangers or chosen or less or more or atoms or groups or own in pieces):
        return None
    small_own = (own,) if own is not None and len(own) < least else ()
    told = own_first(dict.fromkeys((*pieces, *small_own, *atoms)), silo)

    def findings() -> Iterator[str]:
        if strangers:
            yield (
                f"{', '.join(strangers)} in this silo's release group have no key that its people pinned: "
                "somebody may have made them up"
            )
        if group == (silo,) and (came or group in groups):
            yield (
                "this silo is a release group of its own: the coordinator chooses which sums it is in, and two sums, "
                f"subtracted, are of {silo} alone"
            )
        elif chosen:
            others = ", ".join(peer for peer in group or () if peer != silo)
            yield (
                f"somebody else chose that this silo is summed with {others}: who works together among them learns "
                "the sum of the others"
            )
        if told:
            under = "these groups" if previous is None else "the groups before and under these"
            yield f"sums under {under}, subtracted, are " + ", ".join(_alone(one, least) for one in told)
        if others_small := [", ".join(one) for one in own_first(groups, silo) if one != (silo,)]:
            yield f"the coordinator chooses which sums these release groups of fewer than {least} silos are in: " + (
                "; ".join(others_small)
            )
        if less:
            yield f"these release groups promise less than those before: {', '.join(less)}"
        if more:
            yield (
                "these release groups promise more than this silo's policy asks for, and than those before: "
                f"{', '.join(more)}. What follows them, also to take that back, needs the signatures of "
                f"{needed_after(link)} of {len(link.members)} silos"
            )
        yield from _not_asked(link, {one for each in (*told, *groups) for one in each} - {silo}, signed)

    return "; ".join(findings())


def own_first(sets: Collection[Group], silo: SiloName) -> tuple[Group, ...]:
    """In the order that they are in, those with `silo` before the others."""
    return tuple(sorted(sets, key=lambda one: silo not in one))


def _alone(silos: Group, least: int) -> str:
    return f"of {', '.join(silos)} alone" + (f" (fewer than {least} silos)" if len(silos) < least else "")


def _not_asked(link: Link, told: Collection[SiloName], signed: Collection[SiloName] | None) -> Iterator[str]:
    """Of those who are told apart, whose word nobody has."""
    wanting = sorted(set(told) - set(signed or ()))
    if outside := [silo for silo in wanting if silo not in link.members]:
        yield f"in none of these release groups: {', '.join(outside)}; their own people may not have been asked"
    if signed is not None and (silent := [silo for silo in wanting if silo in link.members]):
        yield f"no good signature is here of {', '.join(silent)}: their own people may not have been asked"
