"""Which key a masked attempt is sealed under, and where keys lie: never where the database is.

Two coordinators may see one place of keys, and one of them be stale: stopped, cut off, and going on when another one
leads. So a key has a name of its own: the number of the term that made it, and 128 random bits. What may be destroyed
is told by that name alone: a key that a saved transition ended, and those of earlier terms that the state does not
name. Nobody destroys a key of a later term, or of another process of his own.
"""

import re
from dataclasses import dataclass
from typing import Final, Protocol, Self

from lorica_security.errors import StorageError

KEY_BYTES: Final = 32
RANDOM_BYTES: Final = 16
_TEXT: Final = re.compile(r"([0-9]{1,18})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """The name of a key, not the key. `random` is RANDOM_BYTES in hexadecimal."""

    term: int
    random: str

    @property
    def text(self) -> str:
        """In the row of the state, and of its file: at most 51 characters."""
        return f"{self.term}-{self.random}"

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Raises StorageError naming `where`: whoever can write the database chooses this text."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise StorageError(f"{where} names the key of a masked attempt as {text[:60]!r}: restore it from backup")
        return cls(int(found[1]), found[2])


class KeyVault(Protocol):
    """Keys of attempts, as the leader of one term has them. All raise StorageError naming the place."""

    def make(self) -> tuple[AttemptKey, bytes]:
        """A fresh key of KEY_BYTES under a fresh name of this term, durable."""

    def read(self, key: AttemptKey) -> bytes | None:
        """None where there is none: the attempt is lost."""

    def destroy(self, key: AttemptKey) -> None:
        """For good; nothing where it is gone."""

    def destroy_earlier(self, kept: AttemptKey | None) -> None:
        """Destroy what terms before this one left, but `kept`."""
