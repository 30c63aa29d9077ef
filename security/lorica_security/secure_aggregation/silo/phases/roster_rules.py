"""Every rule that a roster must meet before a silo shares keys with it."""

from lorica_security.errors import IntegrityError, PolicyRefusal, WrongTime
from lorica_security.secure_aggregation.groups.release_groups import RELEASE_GROUPS, Partition, too_little
from lorica_security.secure_aggregation.keys import key_agreement
from lorica_security.secure_aggregation.messages import check_signed
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.events import OpenAttempt
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.advertise_keys import own_advertisement


def check_roster(roster: Roster, opening: OpenAttempt, party: Party) -> None:
    """Raise unless this silo may share keys with this roster; every rule that a roster must meet stands here."""
    if roster.attempt != opening.attempt:
        raise WrongTime(f"a roster of {roster.attempt} came for {opening.attempt}: an old or a foreign one")
    if roster.model != opening.model:
        raise PolicyRefusal(
            "one_model",
            f"the roster is for model {roster.model.hex()[:16]}, this silo trained {opening.model.hex()[:16]}",
        )
    if roster.parameters.fixed_point.ranges.sizes != opening.tensors:
        raise PolicyRefusal("allowed_tensors", "the roster's ranges are for other tensors than the model's")
    party.demands.check(roster.parameters)
    strangers = [silo for silo in roster.silos if silo not in party.identities]
    if strangers:
        raise PolicyRefusal(
            "trusted_peers", f"the roster names {', '.join(strangers)}, whose identity keys this silo has not pinned"
        )
    check_groups(roster, party)
    for member in roster.members:
        check_signed(member, party.identities)
    if party.silo not in roster or roster.member(party.silo) != own_advertisement(opening, party):
        raise IntegrityError(
            "the roster does not hold the keys that this silo advertised: they were swapped or left out"
        )
    for member in roster.members:
        key_agreement.check_public(member.silo, member.mask_key, member.box_key)


def check_groups(roster: Roster, party: Party) -> Partition:
    """The partition that the roster is bound to.

    Raises PolicyRefusal unless it is the newest that this silo holds and allows.
    """
    link = party.link
    if link is None:
        raise PolicyRefusal(
            RELEASE_GROUPS,
            "this silo holds no release groups, so that nothing says which sums may come out: `silo-agent groups show`",
        )
    if roster.link != link.digest:
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the roster is for release groups {roster.link.hex()[:16]}, this silo holds {link.digest.hex()[:16]} "
            f"(number {link.number}): `silo-agent groups show`",
        )
    own = link.atom_of(party.silo)
    if own is None or party.silo not in link.members:
        raise PolicyRefusal(
            RELEASE_GROUPS, f"silo {party.silo} is in none of release groups {link.number}: it masks nothing"
        )
    least = party.demands.least_group
    allowed_atoms = party.approved | party.approved_atoms  # a group that is allowed may be told apart
    for group, allowed in ((own, allowed_atoms), *((group, party.approved) for group in link.partition.groups)):
        if len(group) < least and group not in allowed:
            raise PolicyRefusal(
                RELEASE_GROUPS,
                f"release group {', '.join(group)} has {len(group)} silos, smallest_group of this silo is {least}: "
                "larger groups, or `silo-agent groups approve`",
            )
    offered = roster.parameters
    if reason := too_little(link, party.demands.promise):
        raise PolicyRefusal(RELEASE_GROUPS, reason)
    if offered.colluders > link.promise.colluders:
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the roster is to hold against {offered.colluders} colluders, release groups {link.number} hold against "
            f"{link.promise.colluders}: have the operator propose others, with --colluders {offered.colluders}",
        )
    outside = [silo for silo in roster.silos if silo not in link.members]
    if outside:
        raise PolicyRefusal(RELEASE_GROUPS, f"the roster names {', '.join(outside)}, who are in no release group")
    expected = link.partition.least_sum(roster.silos, threshold=offered.threshold, min_survivors=offered.min_survivors)
    if offered.least_sum != expected:
        raise PolicyRefusal(
            RELEASE_GROUPS, f"the roster's least sum is of {offered.least_sum} silos, that of its groups is {expected}"
        )
    return link.partition
