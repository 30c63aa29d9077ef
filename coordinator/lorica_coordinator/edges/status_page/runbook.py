"""Where the runbook says what to do about what the page shows. It is served at /runbook.html: nothing leaves the host.

`make docs` makes static/runbook.html of ops/docs/runbook.md. A test holds that each anchor here is there, and that
every phase and every kind of error has one.
"""

from collections.abc import Mapping
from typing import Final

PHASES: Final[Mapping[str, str]] = {
    phase: f"phase-{phase}"
    for phase in ("idle", "gathering", "collecting", "masking", "aggregating", "evaluating", "stopped", "finished")
}
KINDS: Final[Mapping[str, str]] = {
    kind: kind.lower()
    for kind in (
        "AuthenticationError",
        "AuthorisationError",
        "ConfigurationError",
        "Conflict",
        "DataError",
        "Defect",
        "FalseModel",
        "IntegrityError",
        "MalformedMessage",
        "OutsideValidity",
        "PolicyRefusal",
        "StateError",
        "StorageError",
        "Unreachable",
        "UnsafeSql",
        "WrongTime",
    )
}
"""Of what is refused, by class of the error."""
ROUND_WARNINGS: Final[Mapping[str, str]] = {
    "abandoned": "loricaroundsabandoned",
    "zero_weight": "loricaallweighnothing",
    "weighs nothing": "loricasiloweighsnothing",
}
SILO_STATES: Final[Mapping[str, str]] = {"absent": "loricasilosilent", "declined": "loricasilorefuses"}
KEPT_OUT: Final = "loricareleasegroupswait"
BUDGET_NEARLY_SPENT: Final = "loricabudgetnearlyspent"
OWN_CERTIFICATE: Final = "loricacoordinatorcertificateendssoon"
SILO_CERTIFICATE: Final = "loricaenrolledsilocertificateendssoon"
AUTHORITY: Final = "loricaauthorityendssoon"

ANCHORS: Final = frozenset(
    {
        *PHASES.values(),
        *KINDS.values(),
        *ROUND_WARNINGS.values(),
        *SILO_STATES.values(),
        KEPT_OUT,
        BUDGET_NEARLY_SPENT,
        OWN_CERTIFICATE,
        SILO_CERTIFICATE,
        AUTHORITY,
    }
)
