"""TLS 1.3 alone: set where a program starts, required where a port is opened or dialled.

grpcio's server accepts TLS 1.2 and has no switch for it. The cipher suite below is one of TLS 1.2 that needs an RSA
certificate; every Lorica certificate is ECDSA, so no 1.2 handshake can complete, while TLS 1.3 has suites of its own.
gRPC reads the variable once, when it is imported. Listeners probe themselves at start all the same
(coordinator/lorica_coordinator/edges/server).
"""

import os
import sys

from lorica_security.errors import StateError

_VARIABLE, _TLS_1_3_ALONE = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"


def leave_tls_1_3_alone() -> None:
    """Set this process's gRPC to TLS 1.3, before it is imported; raises StateError where it was imported otherwise."""
    if "grpc" in sys.modules and os.environ.get(_VARIABLE) != _TLS_1_3_ALONE:
        raise StateError("grpc was imported with TLS 1.2 enabled: call silo_wire.tls.leave_tls_1_3_alone() before that")
    os.environ[_VARIABLE] = _TLS_1_3_ALONE
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def require_tls_1_3() -> None:
    """Raises StateError where `leave_tls_1_3_alone` was not called in this process, or in the one that started it."""
    if os.environ.get(_VARIABLE) != _TLS_1_3_ALONE:
        raise StateError("gRPC speaks TLS 1.2 in this process: call silo_wire.tls.leave_tls_1_3_alone() as it starts")
