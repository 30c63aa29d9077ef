"""Every error that Lorica raises on purpose, and whose fault it is.

One sentence per error: the thing, its value, the remedy. `fault` says who must act: LOCAL (this installation) or
PEER (whoever sent the bytes). Edges translate these classes to gRPC status and to exit codes, each in one table;
nothing else may.
"""

from enum import Enum


class Fault(Enum):
    LOCAL = "local"
    PEER = "peer"


class LoricaError(Exception):
    """Base of all deliberate errors. `str(error)` is the one line that a user reads.

    `told_by_peer` marks what a peer answered to a call of ours: its word, not what this side found.
    """

    fault: Fault = Fault.LOCAL
    told_by_peer: bool = False


class ConfigurationError(LoricaError):
    """A file, key or command-line value that the user can correct."""


class StateError(LoricaError):
    """The action does not fit the present state; nothing was changed."""


class IntegrityError(LoricaError):
    """Stored or received bytes differ from their digest or signature."""


class FalseModel(IntegrityError):
    """A round model is not what the masked sum makes that it is said to come from; there is proof of it."""


class StorageError(LoricaError):
    """A disk that is full, a file that cannot be read or written."""


class DataError(LoricaError):
    """The silo's data set or database cannot be used."""


class PolicyRefusal(LoricaError):
    """This silo's own policy forbids what was asked; `rule` names the policy key."""

    fault = Fault.PEER

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class AuthenticationError(LoricaError):
    """Who the peer is could not be established."""

    fault = Fault.PEER


class OutsideValidity(AuthenticationError):
    """A certificate does not hold at the moment that the clock shows; at another it does. Clocks are set, so it is
    asked again."""


class AuthorisationError(LoricaError):
    """The peer is known and may not do this."""

    fault = Fault.PEER


class MalformedMessage(LoricaError):
    """Bytes or fields from a peer that do not parse, or values outside their range."""

    fault = Fault.PEER


class WrongTime(LoricaError):
    """A valid message that does not fit the present round, attempt or phase; the state is kept."""

    fault = Fault.PEER


class Conflict(LoricaError):
    """A second, different answer where one was already given, or a second agent of one identity."""

    fault = Fault.PEER


class UnsafeSql(LoricaError):
    """The SQL sandbox refused a statement, or stopped it at a limit."""


class Unreachable(LoricaError):
    """The peer did not answer: no route, no listener, or the connection broke."""


EXIT_CODES: dict[type[LoricaError], int] = {
    ConfigurationError: 3,
    StateError: 4,
    IntegrityError: 5,
    StorageError: 6,
    DataError: 7,
    PolicyRefusal: 8,
    AuthenticationError: 9,
    AuthorisationError: 10,
    MalformedMessage: 11,
    WrongTime: 12,
    Conflict: 13,
    UnsafeSql: 14,
    Unreachable: 15,
    FalseModel: 16,
    OutsideValidity: 17,
}
"""What a command exits with; 1 is a defect of Lorica, 2 a mistyped command line (ops/docs/exit-codes.md)."""


def kind_of(error: LoricaError) -> type[LoricaError]:
    """The class of the table above that `error` is, or derives from: what metrics, exit codes and status go by."""
    return next(kind for kind in type(error).__mro__ if kind in EXIT_CODES)


def exit_code(error: LoricaError) -> int:
    return EXIT_CODES[kind_of(error)]
