"""One budget for records that several silo folders of a machine train on: a registry that all of them know.

    key              drawn when the first silo counts here; without it digests tell nothing
    lock             held while a silo looks and spends
    ID.records       16 bytes for each record that a folder ever trained privately on, sorted: HMAC-SHA256 of question
                     and query, or of a unit
    ID.releases      that folder's ledger entries, each once, and durable before they stand in its ledger

ID is the HMAC of the folder's path. What a folder spent is the union of its own ledger and of the entries of every
folder with which it shares a record, each entry counted once: a folder that was copied has the first entries of the
other, and its own from then on. (Entries of earlier releases have no nonce and count for each folder that has them.)
Nothing is ever taken out: who removes a record from its data has released of it all the same.

Nothing of this leaves the machine. Who steals the registry with its key can test whether a record that they guess is in
it.
"""

import hmac
import os
import secrets
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lorica_security.errors import ConfigurationError, Conflict, IntegrityError, StorageError
from lorica_security.host.files import append_private, is_there, make_private_folder, read_private, write_private
from lorica_security.host.process_lock import ProcessLock
from lorica_security.privacy.ledger import Entry, read_releases
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.service.privacy import NotShared, SharedRecords, SharingPort

if TYPE_CHECKING:
    from silo_agent.training.data.text_to_sql_data import SiloData

MACHINE_WIDE: Final = Path("/var/lib/lorica/shared-budget")
"""Where [policy] shared_budget is not set, and this folder is there."""
APART: Final = "none"
_DIGEST_BYTES: Final = 16
_KEY_BYTES: Final = 32
_WAIT_S, _PAUSE_S = 30.0, 0.02
"""Another silo holds the lock for as long as it takes to read ledgers and to write an entry."""


def sharing_of(folder: SiloFolder, configured: str) -> "SharedBudget | NotShared":
    """As [policy] shared_budget says, else by the machine's registry where there is one."""
    remembered = _remembered(folder)
    if configured == APART:
        return NotShared()
    if configured:
        return SharedBudget(Path(configured), folder)
    if remembered or is_there(MACHINE_WIDE):
        return SharedBudget(Path(remembered[1]) if remembered else MACHINE_WIDE, folder)
    return NotShared()


class SharedBudget(SharingPort):
    """`root` is the registry, a folder of mode 0700 that people made. Raises SharedRecords where what was spent cannot
    be told."""

    def __init__(self, root: Path, folder: SiloFolder) -> None:
        self._root, self._folder = root, folder
        self._records: frozenset[bytes] | None = None

    @property
    def shown(self) -> str:
        return str(self._root)

    def others(self, own: Sequence[Entry]) -> tuple[Entry, ...]:
        with self._reading():
            key = self._key()
            if key is None:
                return ()
            mine = self._id(key)
            found = {(mine, entry.digest): entry for entry in self._releases(mine)}
            records = self._records or frozenset(self._records_of(mine))
            for member in self._members():
                if member != mine and any(record in records for record in self._records_of(member)):
                    found |= {(member, entry.digest): entry for entry in self._releases(member)}
            for entry in own:
                found.pop((mine, entry.digest), None)
            # What a copied folder has of the other. Without a nonce it may be another silo's release of the same
            # second.
            own_copies = {entry.digest for entry in own}
            for (member, digest), entry in list(found.items()):
                if entry.nonce and digest in own_copies:
                    del found[member, digest]
                own_copies.add(digest)
            return tuple(sorted(found.values(), key=lambda entry: (entry.at, entry.sequence, entry.digest)))

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._reading():
            lock = self._locked()
        try:
            yield  # what goes wrong here is not the registry's
        finally:
            lock.__exit__(None, None, None)

    def enter(self, entries: Sequence[Entry]) -> None:
        with self._reading():
            key = self._key()
            if key is None or self._records is None:
                raise SharedRecords(
                    "shared_records",
                    f"{self._root} does not know yet which records this silo trains on: start the agent again",
                )
            path = self._path(self._id(key), "releases")
            known, whole = self._read_releases(path)
            seen = {entry.digest for entry in known}
            fresh = b"".join(entry.line() for entry in entries if entry.digest not in seen)
            if fresh:
                append_private(
                    path, fresh, whole, remedy="free some space; nothing is released until it can be written"
                )

    def register(self, data: "SiloData", unit_field: str) -> None:
        """Note that this folder trains on `data`, beside all that it trained on before. Durable when it returns."""
        with self.held(), self._reading():
            key = self._key() or self._new_key()
            path = self._path(self._id(key), "records")
            before = frozenset(self._records_of(self._id(key)))
            now = frozenset(digests(key, data, unit_field))
            if not now <= before:
                write_private(path, b"".join(sorted(before | now)))
            self._remember(key)
            self._records = before | now

    # ---- the files --------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (ConfigurationError, StorageError, IntegrityError, Conflict) as error:
            raise SharedRecords(
                "shared_records", f"what other silos of this machine spent of these records cannot be told: {error}"
            ) from error

    def _locked(self) -> ProcessLock:
        """Waits for another silo, which has it for a moment."""
        self._require()
        lock = ProcessLock(self._root / "lock", "silo that counts its shared budget")
        until = time.monotonic() + _WAIT_S
        while True:
            try:
                return lock.__enter__()
            except Conflict:
                if time.monotonic() > until:
                    raise
                pause()

    def _require(self) -> None:
        if not self._root.is_dir():
            raise ConfigurationError(
                f"[policy] shared_budget {self._root} is not there: mount or restore it; make an empty folder "
                "(install -d -m 700) "
                f'only if no silo has counted there, or set shared_budget = "{APART}" if these records are nobody '
                "else's"
            )
        make_private_folder(self._root)

    def _key(self) -> bytes | None:
        """None where no silo counted here yet. Raises ConfigurationError for another registry than the one this silo
        counted in."""
        self._require()
        path = self._root / "key"
        key = read_private(path) if is_there(path) else None
        if key is not None and len(key) != _KEY_BYTES:
            raise IntegrityError(f"{path} is no key: restore it from a backup")
        known = _remembered(self._folder)
        if known and (key is None or known[0] != _name_of(key)):
            raise ConfigurationError(
                f"{self._root} is not the registry that this silo counted in before, which was {known[1]}: restore "
                "that one; without it nobody knows what others spent. If these records are nobody else's, set "
                "[policy] shared_budget = "
                f'"{APART}"'
            )
        if key is None and self._members():
            raise ConfigurationError(
                f"{path} is missing beside records that were counted by it: restore it from a backup"
            )
        return key

    def _new_key(self) -> bytes:
        key = secrets.token_bytes(_KEY_BYTES)
        write_private(self._root / "key", key)
        return key

    def _remember(self, key: bytes) -> None:
        content = f"{_name_of(key)} {self._root}\n".encode()
        path = self._folder.privacy_sharing
        if not is_there(path) or read_private(path) != content:
            make_private_folder(path.parent)
            write_private(path, content)

    def _id(self, key: bytes) -> str:
        return _hmac(key, b"folder", os.fsencode(self._folder.root.resolve())).hex()

    def _path(self, member: str, what: str) -> Path:
        return self._root / f"{member}.{what}"

    def _members(self) -> list[str]:
        return sorted(path.name.removesuffix(".records") for path in self._root.glob("*.records"))

    def _records_of(self, member: str) -> Iterator[bytes]:
        path = self._path(member, "records")
        if not is_there(path):
            return
        content = read_private(path)
        if len(content) % _DIGEST_BYTES:
            raise IntegrityError(f"{path} is damaged: restore it from a backup")
        for begin in range(0, len(content), _DIGEST_BYTES):
            yield content[begin : begin + _DIGEST_BYTES]

    def _releases(self, member: str) -> tuple[Entry, ...]:
        return self._read_releases(self._path(member, "releases"))[0]

    def _read_releases(self, path: Path) -> tuple[tuple[Entry, ...], int]:
        return read_releases(read_private(path), str(path)) if is_there(path) else ((), 0)


def pause() -> None:
    """Until the next look at a lock that another silo holds."""
    time.sleep(_PAUSE_S)


def digests(key: bytes, data: "SiloData", unit_field: str) -> Iterator[bytes]:
    """Of each training line's question and query, and of each unit where lines are grouped."""
    for example in data.train:
        yield _hmac(key, b"record", _normal(example.question), _normal(example.query))
        if unit_field:
            yield _hmac(key, b"unit", unit_field.encode(), _normal(example.unit))


def _normal(text: str) -> bytes:
    """The same for what differs in case, spaces or the way that characters are written."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).encode()


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """Parts are told apart by their lengths."""
    told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, told, "sha256")[:_DIGEST_BYTES]


def _name_of(key: bytes) -> str:
    return sha256(b"lorica/v1/shared-budget" + key).hexdigest()


def _remembered(folder: SiloFolder) -> tuple[str, str] | None:
    """The registry that this silo counted in last: the name of its key, and where it was."""
    path = folder.privacy_sharing
    if not is_there(path):
        return None
    name, _, where = read_private(path).decode(errors="replace").rstrip("\n").partition(" ")
    return name, where
