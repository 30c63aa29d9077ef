"""Who calls, for as long as a call is served: what the gate found out, and servicers, records and logs read."""

from contextvars import ContextVar
from typing import Final

from cryptography.x509 import Certificate

from lorica_security.identifiers import Identity

CALLER: Final[ContextVar[Identity]] = ContextVar("CALLER")
CERTIFICATE: Final[ContextVar[Certificate]] = ContextVar("CERTIFICATE")
"""The one that says who the caller is."""
