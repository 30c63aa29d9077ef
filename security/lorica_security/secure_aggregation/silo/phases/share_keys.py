"""Phase 2, a silo shares keys: it checks the roster, deals once, and answers the same roster with the same bytes."""

from lorica_security.errors import Conflict, IntegrityError
from lorica_security.secure_aggregation.dealings import check_dealing
from lorica_security.secure_aggregation.messages import SharedKeys
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.effects import Journal, Remember, Send, ShareKeys
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.roster_rules import check_roster
from lorica_security.secure_aggregation.silo.states import Advertised, Dealt, Sharing, Step, WithRoster


def take_roster(state: Advertised, roster: Roster, party: Party) -> Step:
    """Accept a roster that meets every rule, once nobody in it saw keys that this silo forgot."""
    check_roster(roster, state.opening, party)
    others = [member for member in roster.members if member.silo in party.group_mates]
    told = {member.silo: dict(member.seen).get(party.silo) or None for member in others}
    state.memory.check_remembers({f"silo {name}": last for name, last in told.items() if last is not None})
    members = frozenset() if party.link is None else party.link.members
    memory = state.memory.with_dealt(roster.member(party.silo).digest, told, members=members)
    after = Sharing(memory=memory, opening=state.opening, roster=roster)
    return after, (Remember(memory), Journal(roster), ShareKeys())


def roster_again(state: Sharing, roster: Roster, party: Party) -> Step:
    """The same roster has the keys shared again: nothing was dealt yet."""
    _check_same_roster(state, roster)
    return state, (ShareKeys(),)


def roster_after_dealing(state: Dealt, roster: Roster, party: Party) -> Step:
    """The same roster is answered with what was dealt."""
    _check_same_roster(state, roster)
    return state, (Send(state.shared),)


def _check_same_roster(state: WithRoster, roster: Roster) -> None:
    if roster != state.roster:
        raise Conflict(f"a second roster came for {state.attempt}: this silo deals to the first")


def take_own_dealing(state: Sharing, shared: SharedKeys, party: Party) -> Step:
    """From `shared_keys`, which took it from the root but for its encapsulations: these are in no other place than
    here.
    """
    check_dealing(state.roster, shared.dealing, party.identities)
    if shared.silo != party.silo:
        raise IntegrityError(f"what silo {shared.silo} dealt stands for what this silo dealt: forfeit the attempt")
    after = Dealt(memory=state.memory, opening=state.opening, roster=state.roster, shared=shared)
    return after, (Journal(shared), Send(shared))


def own_dealing_again(state: Dealt, shared: SharedKeys, party: Party) -> Step:
    """What was dealt is sent again."""
    if shared != state.shared:
        raise Conflict(f"keys were shared a second time for {state.attempt}: what was dealt first stands")
    return state, (Send(shared),)
