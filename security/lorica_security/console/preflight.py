"""What `coordinator check` and `silo-agent check` have in common: misconfigurations with names, and checks that find
them.

Each program has a table of what it can find, an Enum of `Misconfiguration`; ops/docs/preflight.md shows both tables. A
check is a function that returns what it saw, or raises `Misconfigured`. Nothing that a check finds ends the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from lorica_security.errors import ConfigurationError, LoricaError


@dataclass(frozen=True, slots=True)
class Misconfiguration:
    """One row of such a table, in the order in which it is read. `name` stays from release to release; `found_by` is
    the check; `remedy` says what to do, as a command to the reader."""

    name: str
    found_by: str
    meaning: str
    remedy: str


class Misconfigured(ConfigurationError):
    """What a check found; `name` is that of its Misconfiguration."""

    def __init__(self, what: Misconfiguration, found: str) -> None:
        super().__init__(found)
        self.name = what.name


def misconfigured(what: Misconfiguration, found: str) -> Misconfigured:
    """`found`, with the remedy of the table behind it."""
    return Misconfigured(what, f"{found}; {what.remedy}")


@contextmanager
def meaning(what: Misconfiguration, *kinds: type[LoricaError]) -> Iterator[None]:
    """An error of these kinds (of any, without one) that comes from within means `what`: in its own words, which have a
    remedy."""
    try:
        yield
    except Misconfigured:
        raise
    except LoricaError as error:
        if kinds and not isinstance(error, kinds):
            raise
        raise Misconfigured(what, str(error)) from error


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`misconfiguration` is the name of what was found; empty unless FAILED, and for an error that no table foresaw."""

    name: str
    outcome: Outcome
    detail: str
    misconfiguration: str = ""


class Checks:
    """The checks of one run, in order."""

    def __init__(self) -> None:
        self.done: list[Check] = []

    def run(self, name: str, look: Callable[[], str], *, unless: str = "") -> bool:
        """Whether `look` found nothing wrong; what it raises of LoricaError becomes the outcome.

        `unless`: why the check is skipped instead; "": it is made.
        """
        if unless:
            self.skip(name, because=unless)
            return False
        try:
            self.done.append(Check(name=name, outcome=Outcome.PASSED, detail=look()))
        except LoricaError as error:
            found = error.name if isinstance(error, Misconfigured) else ""
            self.done.append(Check(name=name, outcome=Outcome.FAILED, detail=str(error), misconfiguration=found))
            return False
        return True

    def notice(self, name: str, detail: str) -> None:
        """What keeps nobody from taking part, and people should know."""
        self.done.append(Check(name=name, outcome=Outcome.NOTICE, detail=detail))

    def skip(self, *names: str, because: str) -> None:
        self.done.extend(Check(name=name, outcome=Outcome.SKIPPED, detail=because) for name in names)


def failures(checks: Sequence[Check]) -> ConfigurationError | None:
    """What a command ends with after it has shown `checks`; None where all is well."""
    failed = [check.name for check in checks if check.outcome is Outcome.FAILED]
    if not failed:
        return None
    return ConfigurationError(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


def mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
