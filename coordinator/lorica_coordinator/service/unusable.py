"""Why a round could not be summed, where it is no fault of the disk."""

from lorica_security.errors import IntegrityError, StateError
from lorica_security.identifiers import SiloName


class UnusableUpdate(IntegrityError):
    """One committed update cannot be summed (damaged spool, NaN found late); the round goes on without `silo`."""

    def __init__(self, silo: SiloName, message: str) -> None:
        super().__init__(message)
        self.silo = silo


class BudgetSpent(StateError):
    """Another release would cost more epsilon than its plan promises: the plan ends with the model that it has."""
