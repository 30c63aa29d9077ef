"""What silos reveal for a masked sum, sealed before it goes into a database that forgets nothing.

PostgreSQL keeps what was deleted in its heap until that is written over, and in its write-ahead log, archives and
replicas for good. So each event of a masked attempt is sealed (AES-256-GCM, a fresh nonce of 96 bits each) under the
key of that attempt, which is in a `KeyVault` and never in the database. Destroying the key is what ends the attempt:
who later has the whole database, with every version of every row, has noise.

The associated data bind a row to federation, plan, round, attempt and position: no row of one attempt, or place, opens
as that of another.
"""

import secrets
from dataclasses import dataclass
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lorica_security.errors import StorageError
from lorica_security.identifiers import FederationName
from silo_wire.canonical import Digest

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
PART_POSITION: Final = 0
"""Of what the machine's state has of the attempt; events are at 1, 2, ..."""
_DOMAIN: Final = "lorica masked attempt row v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptName:
    federation: FederationName
    plan: Digest
    round: int
    attempt: int

    def bound(self, position: int) -> bytes:
        """What a row at `position` is bound to; none of these texts can hold a NUL."""
        parts = (_DOMAIN, self.federation, self.plan, self.round, self.attempt, position)
        return "\0".join(map(str, parts)).encode()


class KeyVault(Protocol):
    """Where keys of attempts lie, apart from the database. All raise StorageError naming the place."""

    def make(self, name: AttemptName) -> bytes:
        """A fresh key of KEY_BYTES, durable; one that was there under this name is destroyed."""

    def read(self, name: AttemptName) -> bytes | None:
        """None where there is none: the attempt is lost."""

    def keep_only(self, name: AttemptName | None) -> None:
        """Destroy every key but this one, for good; None: every key."""


class AttemptSeal:
    """Seals and opens the rows of one attempt at a time."""

    def __init__(self, vault: KeyVault) -> None:
        self._vault = vault
        self._name: AttemptName | None = None
        self._key: AESGCM | None = None

    def begin(self, name: AttemptName) -> None:
        """From here on rows of this attempt are sealed; under the key that it has, where it has begun before."""
        if name != self._name or self._key is None:
            # The key that it has, if it has one: a transaction that failed leaves rows that are sealed under it.
            self._key = AESGCM(self._vault.read(name) or self._vault.make(name))
            self._name = name

    def go_on(self, name: AttemptName) -> bool:
        """Take up an attempt that is under way; False where its key is gone."""
        key = self._vault.read(name)
        self._name, self._key = name, None if key is None else AESGCM(key)
        return key is not None

    def end_others(self, name: AttemptName | None) -> None:
        """Destroy the keys of all attempts but this one."""
        if name != self._name:
            self._name = self._key = None
        self._vault.keep_only(name)

    def seal(self, position: int, plain: bytes) -> bytes:
        name, key = self._under_way()
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + key.encrypt(nonce, plain, name.bound(position))

    def open(self, position: int, sealed: bytes) -> bytes:
        """Raises StorageError for what was not sealed for this place."""
        name, key = self._under_way()
        try:
            return key.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.bound(position))
        except (InvalidTag, ValueError) as error:
            raise StorageError(
                f"row {position} of the masked attempt of round {name.round}, attempt {name.attempt}, does not open "
                "with the attempt's key: the database was changed or restored beside the folder; restore both of one "
                "instant"
            ) from error

    def _under_way(self) -> tuple[AttemptName, AESGCM]:
        assert self._name is not None
        assert self._key is not None
        return self._name, self._key
