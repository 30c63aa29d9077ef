"""What a caller reads of an error: silos and strangers nothing of the coordinator's own files, operators all of it."""

from typing import Final

from lorica_security.errors import Fault, LoricaError, StorageError
from lorica_security.identifiers import Identity, Role

OWN_FILES: Final = "a file or the disk of the coordinator is at fault, its log names it: ask the coordinator's operator"


def told(error: LoricaError, details: str, caller: Identity | None) -> str:
    """`details`, the text of `error`, or OWN_FILES where it may name a path of this machine.

    What is the peer's fault speaks of what the peer sent. Any other text with a slash in it is taken to have a path.
    """
    if caller is not None and caller.role in (Role.OPERATOR, Role.VIEWER):
        return details
    names_a_file = error.fault is Fault.LOCAL and (isinstance(error, StorageError) or "/" in str(error))
    return OWN_FILES if names_a_file else details
