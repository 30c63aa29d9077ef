"""What a caller reads of an error: silos and strangers nothing of the coordinator's own files, operators all of it."""

import re
from typing import Final

from lorica_security.errors import Fault, LoricaError, StorageError
from lorica_security.identifiers import Identity, Role

OWN_FILES: Final = "a file or the disk of the coordinator is at fault, its log names it: ask the coordinator's operator"

_PATH: Final = re.compile(r"(?:^|[^\w.~/-])/(?!/)")
"""Folders of a coordinator are absolute: a path begins with a slash that no word goes before. A URI has none."""


def told(error: LoricaError, details: str, caller: Identity | None) -> str:
    """`details`, the text of `error`, or OWN_FILES where it may name a path of this machine.

    What is the peer's fault speaks of what the peer sent.
    """
    if caller is not None and caller.role in (Role.OPERATOR, Role.VIEWER):
        return details
    names_a_file = error.fault is Fault.LOCAL and (
        isinstance(error, StorageError) or _PATH.search(str(error)) is not None
    )
    return OWN_FILES if names_a_file else details
