"""Secret bytes in a buffer of their own, overwritten when they are no longer needed, and never shown."""

import hmac
from typing import NoReturn

from cryptography.utils import Buffer

from lorica_security.errors import StateError


class Secret:
    """Owns a copy of `data`; the caller clears what it copied from, or uses `Secret.taking`."""

    __slots__ = ("_buffer", "_erased")
    __hash__ = None  # type: ignore[assignment]  # a hash table would keep a value derived from it

    def __init__(self, data: Buffer) -> None:
        self._buffer = bytearray(data)
        self._erased = False

    @classmethod
    def taking(cls, buffer: bytearray) -> "Secret":
        """A secret that owns `buffer` itself, not a copy."""
        secret = cls(b"")
        secret._buffer = buffer
        return secret

    @property
    def buffer(self) -> bytearray:
        """The owned bytes themselves; raises StateError once erased."""
        if self._erased:
            raise StateError("a secret of this attempt was used after it was erased: the attempt is over")
        return self._buffer

    @property
    def erased(self) -> bool:
        return self._erased

    def erase(self) -> None:
        """Overwrite the bytes with zeros; a second time does nothing."""
        self._buffer[:] = bytes(len(self._buffer))
        self._erased = True

    def __len__(self) -> int:
        return len(self._buffer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return self._erased == other._erased and hmac.compare_digest(self._buffer, other._buffer)

    def __repr__(self) -> str:
        return f"Secret({'erased' if self._erased else f'{len(self._buffer)} bytes'})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not copied or serialised")
