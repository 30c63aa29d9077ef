"""The audit log in a silo's folder, as the running agent and the commands beside it write it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lorica_security.on_disk.log_file import AuditLog
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials


def audit_log(folder: SiloFolder, credentials: SiloCredentials) -> AuditLog:
    return AuditLog(folder.audit, writer=credentials.identity.uri, key=credentials.identity_key, clock=time.time)


@contextmanager
def audited(folder: SiloFolder, credentials: SiloCredentials) -> Iterator[AuditLog]:
    """For a command, which seals what it added at its end."""
    log = audit_log(folder, credentials)
    try:
        yield log
    finally:
        log.seal()
