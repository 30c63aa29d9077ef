"""What silos reveal for a masked sum, sealed before it goes into a database that forgets nothing.

PostgreSQL keeps what was deleted in its heap until that is written over, and in its write-ahead log, archives and
replicas for good. So each event of a masked attempt is sealed (AES-256-GCM, a fresh nonce of 96 bits each) under the
key of that attempt, which is in a `KeyVault` and never in the database: the row of the state names it. Destroying the
key is what ends the attempt: who later has the whole database, with every version of every row, has noise.

The associated data bind a row to federation, plan, round, attempt and position: no row of one attempt, or place, opens
as that of another.
"""

import secrets
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lorica_coordinator.edges.database.sealing.attempt_keys import AttemptKey, KeyVault
from lorica_security.errors import StorageError
from lorica_security.identifiers import FederationName
from silo_wire.canonical import Digest

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


class AttemptSeal:
    """Seals and opens the rows of one attempt at a time, and destroys the keys of those that ended.

    A key is destroyed by its name, and only once a transition is saved that names it no more: that stays true whoever
    leads by then. So a process that goes on late, after another one took over, destroys no key that is needed.
    """

    def __init__(self, vault: KeyVault) -> None:
        self._vault = vault
        self._name: AttemptName | None = None
        self._key: AESGCM | None = None
        self._keys: dict[AttemptName, tuple[AttemptKey, AESGCM]] = {}
        """Of attempts that were taken up, or begun by a transition that may have failed."""
        self._ended: set[AttemptKey] = set()

    def begin(self, name: AttemptName) -> AttemptKey:
        """From here on rows of this attempt are sealed; under the key that it has, where it has begun before."""
        if name not in self._keys:
            key, secret = self._vault.make()
            self._keys[name] = key, AESGCM(secret)
        key, self._key = self._keys[name]
        self._name = name
        return key

    def go_on(self, name: AttemptName, key: AttemptKey) -> bool:
        """Take up an attempt that is under way; False where its key is gone."""
        known = self._keys.get(name)
        if known is not None and known[0] != key:
            self._ended.add(self._keys.pop(name)[0])
        secret = self._vault.read(key)
        self._name, self._key = name, None if secret is None else AESGCM(secret)
        if self._key is not None:
            self._keys[name] = key, self._key
        return secret is not None

    def saved(self, name: AttemptName | None, *, sweep: bool) -> None:
        """A transition is saved with this attempt, or none: destroy the keys of all others that are known here and,
        with `sweep`, those that earlier terms left. Raises StorageError; what is left is destroyed the next time."""
        self._ended |= {key for other, (key, _) in self._keys.items() if other != name}
        self._keys = {other: held for other, held in self._keys.items() if other == name}
        if name != self._name:
            self._name = self._key = None
        for key in sorted(self._ended):
            self._vault.destroy(key)
            self._ended.discard(key)
        if sweep:
            self._vault.destroy_earlier(None if name is None else self._keys[name][0])

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
