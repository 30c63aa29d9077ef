"""What the two sides say to each other; and, before anything can import gRPC, TLS 1.3 alone.

grpcio's server accepts TLS 1.2 and has no switch for it. The cipher suite below is one of TLS 1.2 that needs an RSA
certificate; every Lorica certificate is ECDSA, so no 1.2 handshake can complete, while TLS 1.3 has suites of its own.
gRPC reads the variable once, when it is imported, and the generated stubs in silo_wire.v1 import it: so it is set here,
where no order of imports below can come first. Listeners probe themselves at start all the same (coordinator/edges).
"""

import os
import sys

_VARIABLE, _TLS_1_3_ALONE = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256"

if "grpc" in sys.modules and os.environ.get(_VARIABLE) != _TLS_1_3_ALONE:
    raise ImportError("grpc was imported before silo_wire, with TLS 1.2 enabled: import silo_wire first")
os.environ[_VARIABLE] = _TLS_1_3_ALONE
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
