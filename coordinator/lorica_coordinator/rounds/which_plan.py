"""Which plan a start is about. One that is left for another never goes on, so nothing leaves it but its own name."""

from lorica_coordinator.rounds.states import Finished, Gathering, Idle, State, Stopped, round_of
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_security.errors import StateError
from silo_wire.canonical import Digest

DEFAULT_PLAN = "default"
"""What starts where no plan was named and none was ever there."""


def unfinished(state: State) -> PlanTerms | None:
    """Of the plan that runs or is stopped; one that was offered and not started yet has nothing to lose."""
    match state:
        case Idle() | Finished() | Gathering(started=False):
            return None
        case _:
            return state.course.terms


def check_start(state: State, *, plan: Digest, name: str, leave: str) -> None:
    """Before plan `name` is started; `leave` names the plan that is left for good, "" none.

    Raises StateError where another plan runs, or is stopped and `leave` is not its name; also where this start leaves
    no plan and `leave` names one.
    """
    other = unfinished(state)
    if other is None or other.plan == plan:
        if leave:
            raise StateError(
                f"--leave {leave} is for a start that leaves plan {leave} before its end, and this one leaves none: "
                "name the other plan "
                "that is to start, or give no --leave"
            )
        return
    leaving = (
        f"`coordinator plan start {name} --leave {other.name}` leaves it for good and starts plan {name} ({plan[:16]})"
    )
    if not isinstance(state, Stopped):
        raise StateError(
            f"plan {other.name} ({other.plan[:16]}) is running: `coordinator plan stop` stops it before another is "
            f"started; then {leaving}"
        )
    if leave != other.name:
        raise StateError(
            f"plan {other.name} ({other.plan[:16]}) is stopped in round {round_of(state)[0]} of {other.rounds}: "
            "`coordinator plan start` "
            f"goes on with it; {leaving}"
        )
