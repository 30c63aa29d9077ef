"""What the order of training data and dropout come from under masks: 32 bytes of this silo's own, that nobody else
knows.

They are kept, so that a training that was killed comes to the same bits when it begins again. A lost file costs nothing
but that.
"""

import secrets
from pathlib import Path

from lorica_security.errors import ConfigurationError
from lorica_security.host.files import read_private, write_private

ENTROPY_BYTES = 32


def own_entropy(path: Path) -> bytes:
    """Drawn where there is no file. Raises ConfigurationError for one that is damaged or that others can read,
    StorageError."""
    if not path.exists():
        write_private(path, secrets.token_bytes(ENTROPY_BYTES))
    kept = read_private(path)
    if len(kept) != ENTROPY_BYTES:
        raise ConfigurationError(
            f"{path} holds {len(kept)} bytes, expected {ENTROPY_BYTES}: remove it, the next start of the agent "
            "draws a new one"
        )
    return kept
