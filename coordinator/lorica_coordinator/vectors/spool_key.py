"""The key that one spooled update lies on the disk under: to let go of the update is to destroy 32 bytes.

Spools are large, and their files are written over in the next round or deleted, which leaves what was in them on the
disk until then, or for good. So a spool is encrypted (AES-256, counter mode) with a key of its own, made when it is
begun, in a file beside it; when the round is closed that file is overwritten, made durable and deleted, and what
remains is noise to everybody.

What that is worth: no file, backup or copy made afterwards opens the update, nor does the block device, where it writes
in place. A disk that keeps old blocks (flash, snapshots, copy on write) can keep the 32 bytes: encrypt the disk as
well. While the round is open the key lies beside the spool, since a killed coordinator goes on with what it holds.

The counter is the byte's place in the file, and every chunk is what its manifest says: no two texts meet under one
keystream.
"""

import os
import secrets
from hmac import compare_digest
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import CipherContext

from lorica_security.errors import ConfigurationError
from lorica_security.host import files
from lorica_security.secure_aggregation.masked_vectors.counter_mode import by_ctr

KEY_BYTES = 32
SUFFIX = ".key"
_BLOCK_BYTES = 16


class SpoolKey:
    """32 secret bytes, shown nowhere."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def same_as(self, other: "SpoolKey | None") -> bool:
        return other is not None and compare_digest(self._secret, other._secret)

    def stream(self, position: int) -> CipherContext:
        """What is to be XORed with the bytes from `position` on, both ways."""
        context = by_ctr(self._secret, position // _BLOCK_BYTES)
        context.update(bytes(position % _BLOCK_BYTES))
        return context


def make_key(path: Path) -> SpoolKey:
    """A fresh one in `path`, durable with the folder's entry; what was there is destroyed first. Raises OSError,
    StorageError."""
    destroy_key(path)
    secret = secrets.token_bytes(KEY_BYTES)
    files.write_private(path, secret, entry=False)
    return SpoolKey(secret)


def read_key(path: Path) -> SpoolKey | None:
    """None where there is none, or not the whole of it: the update is then sent again. Raises StorageError."""
    try:
        secret = files.read_private(path)
    except ConfigurationError:
        return None
    return SpoolKey(secret) if len(secret) == KEY_BYTES else None


def destroy_key(path: Path) -> None:
    """Overwrite the key where it lies, durably, and delete it; nothing happens when there is none. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        files.overwrite(descriptor)
    finally:
        os.close(descriptor)
    path.unlink(missing_ok=True)


def destroy_keys_below(folder: Path) -> None:
    """Of every spool below `folder`. Raises OSError."""
    for path in folder.rglob(f"*{SUFFIX}"):
        destroy_key(path)
