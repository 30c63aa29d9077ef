"""A file of any size under a passphrase: pieces of AES-256-GCM, each in its place or not at all.

    MAGIC, 16 bytes of salt             in clear; every piece's associated data
    pieces of 1 MiB, the last shorter   each with its tag of 16 bytes; the nonce is the piece's number (11 bytes) and
                                        whether it is the last

The key comes of the passphrase and the salt by scrypt (N = 2^17, r = 8, p = 1: 128 MiB of memory, some half a second).
Every file has a key of its own, so no nonce is used twice. A piece that was changed, moved, left out or cut does not
open; nothing of it is given out. This is the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizár (2015), as
in age and Tink.
"""

import io
import secrets
from typing import Any, BinaryIO, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.utils import Buffer

from lorica_security.errors import IntegrityError
from lorica_security.host.key_file import Passphrase, WrongPassphrase

MAGIC: Final = b"lorica sealed file 1\n"
PIECE_BYTES: Final = 1 << 20
_SALT_BYTES, _TAG_BYTES, _KEY_BYTES = 16, 16, 32
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 17, 8, 1


class SealedWriter:
    """Writes to `file`; without `finish` what was written does not open."""

    def __init__(self, file: BinaryIO, passphrase: Passphrase) -> None:
        self._file = file
        self._head = MAGIC + secrets.token_bytes(_SALT_BYTES)
        self._cipher = _cipher(passphrase, self._head)
        self._waiting = bytearray()
        self._number = 0
        file.write(self._head)

    def write(self, data: Buffer) -> None:
        self._waiting += data
        while len(self._waiting) > PIECE_BYTES:  # the last piece is never known to be the last before `finish`
            self._seal(PIECE_BYTES, last=False)

    def finish(self) -> None:
        self._seal(len(self._waiting), last=True)

    def _seal(self, size: int, *, last: bool) -> None:
        piece = bytes(memoryview(self._waiting)[:size])
        self._file.write(self._cipher.encrypt(_nonce(self._number, last), piece, self._head))
        del self._waiting[:size]
        self._number += 1


class SealedReader(io.RawIOBase):
    """What a SealedWriter wrote to `file`, of which MAGIC was read.

    Raises WrongPassphrase where the first piece does not open, IntegrityError at a later one; both name `where`.
    """

    def __init__(self, file: BinaryIO, passphrase: Passphrase, *, where: str) -> None:
        self._file, self._where = file, where
        self._head = MAGIC + file.read(_SALT_BYTES)
        self._passphrase = passphrase
        self._cipher = _cipher(passphrase, self._head)
        self._next = file.read(PIECE_BYTES + _TAG_BYTES)
        self._piece = memoryview(b"")
        self._number = 0
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._piece and not self._ended:
            self._open()
        into = memoryview(buffer)
        size = min(len(into), len(self._piece))
        into[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size

    def _open(self) -> None:
        sealed, self._next = self._next, self._file.read(PIECE_BYTES + _TAG_BYTES)
        self._ended = not self._next
        try:
            self._piece = memoryview(self._cipher.decrypt(_nonce(self._number, self._ended), sealed, self._head))
        except InvalidTag:
            if self._number == 0:
                raise WrongPassphrase(
                    f"{self._where} does not open with the passphrase of ${self._passphrase.variable}: it is "
                    "another one's, or the file was changed or cut"
                ) from None
            raise IntegrityError(
                f"{self._where} was changed or cut, after {self._number * PIECE_BYTES} bytes that are whole: use "
                "another copy"
            ) from None
        self._number += 1


def _cipher(passphrase: Passphrase, head: bytes) -> AESGCM:
    scrypt = Scrypt(salt=head[len(MAGIC) :], length=_KEY_BYTES, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P)
    return AESGCM(scrypt.derive(passphrase.secret))


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])
