"""A complaint about a dealer: one of the two is named, or the dispute is, and the attempt is over."""

from lorica_security.errors import LoricaError, MalformedMessage
from lorica_security.secure_aggregation.coordinator.effects import Blame, Journal, Offence
from lorica_security.secure_aggregation.coordinator.phases.answers import check_dealt, check_roster, dealers_of
from lorica_security.secure_aggregation.coordinator.phases.drop_outs import abandon, blame_for
from lorica_security.secure_aggregation.coordinator.states import Masking, Step
from lorica_security.secure_aggregation.dealings import box_is_sound
from lorica_security.secure_aggregation.keys import share_box
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import Complaint, Identities, check_signed


def take_complaint(state: Masking, event: Complaint, identities: Identities) -> Step:
    """Whoever lied is named, and the attempt is over: others may hold false shares of the same dealer."""
    check_roster(state, event.roster)
    check_dealt(state, event.silo)
    try:
        check_signed(event, identities)
        if event.dealer == event.silo or event.dealer not in dealers_of(state):
            raise MalformedMessage(f"silo {event.silo} complains about {event.dealer}, who dealt it nothing")
    except LoricaError as error:
        return blame_for(state, event.silo, error)
    accused = next(item for item in state.shared if item.silo == event.dealer)
    share = next(share for share in accused.boxes if share.holder == event.silo)
    between = f"in the box from silo {event.dealer} to silo {event.silo}"
    verdict: tuple[Blame, ...]
    key = Secret(event.key)
    if box_is_sound(state.roster, accused.dealing, share, key):
        verdict = (Blame(silo=event.silo, offence=Offence.FALSE_COMPLAINT, detail=f"nothing is wrong {between}"),)
    elif share_box.opens(share.box, key, roster=state.roster.digest, dealer=share.dealer, holder=share.holder):
        verdict = (Blame(silo=event.dealer, offence=Offence.BAD_SHARE, detail=f"false shares {between}"),)
    else:
        detail = f"the key that was shown does not open it, {between}"
        verdict = tuple(
            Blame(silo=silo, offence=Offence.DISPUTED, detail=detail) for silo in sorted((event.silo, event.dealer))
        )
    key.erase()
    after, effects = abandon(state, f"silo {event.silo} complained about silo {event.dealer}: {verdict[0].detail}")
    return after, (Journal(event), *verdict, *effects)
