"""What the coordinator hears of an error that ended a piece of work; the rest stays in this silo's own log.

Under a plan with differential privacy it hears one of a few sentences that are always the same: how a record is broken,
or how many are, is nobody's to learn. Under masks it does not hear why training failed either: a model can be made so
that training fails in one way where a record has some word, and in another where not. That the work failed at all, and
when, it sees.
"""

from typing import Final

from lorica_security.errors import (
    AuthenticationError,
    Conflict,
    DataError,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    PolicyRefusal,
)
from silo_agent.service.privacy import BudgetSpent
from silo_wire.messages import DeclineReason

BUDGET_SPENT: Final = "privacy budget spent"
NOT_INTACT: Final = "something was not intact or not what was promised; this silo's own log says what"
FAILED: Final = "the work failed here; this silo's own log says why"
TOLD_UNDER_PRIVACY: Final = (BUDGET_SPENT, NOT_INTACT, FAILED)
"""All that is ever told under differential privacy, but for what a policy says of a plan."""


def told(error: LoricaError, *, private: bool, masked: bool) -> str:
    """All of it about the coordinator's own plan and bytes, nothing of this silo's files and data."""
    match error:
        case BudgetSpent():
            return BUDGET_SPENT
        case PolicyRefusal():  # follows from plan, roster and policy
            return str(error)
        case MalformedMessage() | IntegrityError() | AuthenticationError() | Conflict():
            return NOT_INTACT if private else str(error)
        case _ if private or masked:
            return FAILED
        case DataError():
            return "this silo's data or database cannot be used; its own log says why"
        case _:
            return f"the work failed here ({type(error).__name__}); this silo's own log says why"


def reason(error: LoricaError, *, private: bool, masked: bool) -> DeclineReason:
    match error:
        case PolicyRefusal():
            return DeclineReason.POLICY
        case IntegrityError() | MalformedMessage() | AuthenticationError() | Conflict():
            return DeclineReason.INTEGRITY
        case DataError() if not (private or masked):
            return DeclineReason.DATA
        case _:
            return DeclineReason.TRAINING_FAILED
