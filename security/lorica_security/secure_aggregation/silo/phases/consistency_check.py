"""Phase 4, a silo signs the survivor set: one set an attempt, of whole release groups."""

from lorica_security.errors import Conflict, IntegrityError, MalformedMessage, PolicyRefusal, WrongTime
from lorica_security.secure_aggregation.groups.release_groups import RELEASE_GROUPS
from lorica_security.secure_aggregation.messages import Agreement, SurvivorSet, signed
from lorica_security.secure_aggregation.silo.effects import Journal, Send
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.roster_rules import check_groups
from lorica_security.secure_aggregation.silo.states import Agreed, Masked, Step, WithSet


def take_survivors(state: Masked, survivors: SurvivorSet, party: Party) -> Step:
    """Sign the survivor set where it is of whole groups, of silos enough, and has the vector that this silo sent."""
    if survivors.roster != state.roster.digest or survivors.dealings != state.delivery.dealings_digest:
        raise WrongTime(f"a survivor set of another roster, or of other dealings, came for {state.attempt}")
    strangers = [silo for silo in survivors.silos if silo not in state.delivery.dealers]
    if strangers:
        raise MalformedMessage(f"the survivor set names {', '.join(strangers)}, who dealt no keys")
    partition = check_groups(state.roster, party)
    if not partition.is_union(survivors.silos):
        broken = [silo for silo in survivors.silos if silo not in partition.whole(survivors.silos)]
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the survivor set has {', '.join(broken)} without the rest of their release groups: only whole groups are "
            "summed",
        )
    least = max(state.roster.parameters.least_sum, party.demands.min_survivors)
    if len(survivors.silos) < least:
        raise PolicyRefusal(
            "min_survivors", f"the survivor set has {len(survivors.silos)} silos, at least {least} are needed"
        )
    if dict(zip(survivors.silos, survivors.inputs, strict=True)).get(party.silo, state.vector) != state.vector:
        raise IntegrityError("the survivor set has another vector for this silo than it sent: nothing is signed")
    after = Agreed(
        memory=state.memory,
        opening=state.opening,
        roster=state.roster,
        shared=state.shared,
        delivery=state.delivery,
        vector=state.vector,
        survivors=survivors,
    )
    return after, (Journal(survivors), Send(_agreement(after, party)))


def survivors_again(state: Agreed, survivors: SurvivorSet, party: Party) -> Step:
    """The same set gets the same signature; another one gets none."""
    if survivors != state.survivors:
        raise Conflict(f"a second survivor set came for {state.attempt}: this silo signs one per attempt")
    return state, (Send(_agreement(state, party)),)


def _agreement(state: WithSet, party: Party) -> Agreement:
    return signed(
        Agreement(roster=state.roster.digest, silo=party.silo, survivors=state.survivors.digest), party.identity_key
    )
