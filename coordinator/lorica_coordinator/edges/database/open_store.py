"""The store that federation.toml means: SQLite in the state folder, or PostgreSQL with the keys of attempts in a
folder."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRows, Fence
from lorica_coordinator.edges.database.postgresql.leadership import Leadership, beside, read_only
from lorica_coordinator.edges.database.postgresql.log_rows import LogRows
from lorica_coordinator.edges.database.postgresql.newest import SharedNewest
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.release_rows import ReleaseRows
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import audit_log, release_ledger
from lorica_coordinator.edges.database.sealing.key_vault import FOLDER, FolderKeyVault
from lorica_coordinator.edges.database.sealing.root_seal import RootSeal
from lorica_coordinator.edges.database.tables_revision import revision_of
from lorica_coordinator.settings import Settings
from lorica_coordinator.vectors.spool_key import destroy_keys_below
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.identifiers import FederationName, Identity, Role, federation_name
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.on_disk.log_file import LogFiles
from lorica_security.on_disk.log_place import LogPlace

SQLITE = "state.sqlite"
NEWEST = "newest"
"""Of the audit log, and of the ledger of releases: a file with what this folder saw of the rows last."""
AUDIT, PRIVACY = "audit", "privacy"
"""Folders in `attempt_keys` with what every coordinator there saw of the rows last."""


def open_store(
    settings: Settings, file: Path, federation: FederationName, leadership: Leadership | None = None, *, identity: str
) -> SqlRoundStore:
    """`file` is what `settings` were read from; `identity`: the coordinator's public identity key in hexadecimal. In
    PostgreSQL who has no `leadership`, or no term yet, only looks.

    Raises ConfigurationError, StorageError naming the database.
    """
    if (server := server_of(settings, file)) is None:
        return SqlRoundStore(settings.state_folder / SQLITE, federation)
    if leadership is None or not leadership.term:
        return SqlRoundStore(server, federation, key_vault(settings, identity), read_only)
    return SqlRoundStore(server, federation, key_vault(settings, identity, leadership.term), leadership.fence)


def key_vault(settings: Settings, identity: str, term: int = 0) -> FolderKeyVault:
    """Where the keys of masked attempts are, for the leader of this term; 0: for who looks."""
    return FolderKeyVault(key_folder(settings, identity), term, own=not settings.storage.attempt_keys)


def key_folder(settings: Settings, identity: str) -> Path:
    """Where keys lie that neither database nor bucket may have. In `attempt_keys` each federation's have a folder of
    their own, by the `identity` key of its coordinators: none destroys another's."""
    given = settings.storage.attempt_keys
    return Path(given) / identity if given else settings.state_folder / FOLDER


def leave_former_keys(settings: Settings) -> None:
    """Destroy keys in the state folder where nothing looks for them there any more: `database` was emptied, or
    `attempt_keys` names another place. The caller holds the folder's lock."""
    former, present = settings.state_folder / FOLDER, settings.storage.attempt_keys
    if settings.storage.database and (not present or not _are_apart(former, Path(present))):
        return
    FolderKeyVault(former, 0).leave()
    try:
        destroy_keys_below(former)  # of updates on their way in
    except OSError as error:
        raise StorageError(f"{former} cannot be cleared: {error.strerror or error}") from error


def _are_apart(former: Path, present: Path) -> bool:
    """False also where one is not there: then there is nothing to destroy, or nobody leads."""
    try:
        return not former.samefile(present)
    except OSError:
        return False


def log_of(
    settings: Settings,
    file: Path,
    audit: Path,
    leadership: Leadership | None = None,
    *,
    key: Ed25519PublicKey | None = None,
    beside_leader: bool = False,
) -> LogPlace:
    """The coordinator's audit log, whose folder is `audit`. In PostgreSQL who has no `leadership`, or no term yet, only
    looks, or adds to it `beside_leader`. `key` is the coordinator's identity key, without which lines are read alone.

    Raises ConfigurationError.
    """
    server, fence = _fenced(settings, file, leadership)
    if server is None:
        return LogFiles(audit)
    federation, identity = federation_name(settings.federation), public_key_bytes(key).hex() if key else ""
    if beside_leader and identity:
        fence = beside(federation, identity)
    writer = Identity(federation, Role.COORDINATOR).uri
    rows = ChainedRows(server, audit_log, fence, audit / NEWEST, _shared_newest(settings, identity, AUDIT))
    return LogRows(rows, audit, writer=writer, key=key)


def release_rows(
    settings: Settings, file: Path, key: Ed25519PrivateKey, leadership: Leadership | None = None
) -> ReleaseRows | None:
    """The coordinator's releases, `key` its identity key; None where they are in the folder. Raises
    ConfigurationError."""
    server, fence = _fenced(settings, file, leadership)
    if server is None:
        return None
    own, identity = settings.state_folder / "privacy" / NEWEST, public_key_bytes(key.public_key()).hex()
    rows = ChainedRows(server, release_ledger, fence, own, _shared_newest(settings, identity, PRIVACY))
    return ReleaseRows(rows, RootSeal(key, federation_name(settings.federation)))


def _shared_newest(settings: Settings, identity: str, name: str) -> SharedNewest | None:
    """In `attempt_keys`; None where that is not named, or whose it is is not known."""
    given = settings.storage.attempt_keys
    return SharedNewest(key_folder(settings, identity) / name, Path(given)) if given and identity else None


def _fenced(settings: Settings, file: Path, leadership: Leadership | None) -> tuple[PostgresqlDatabase | None, Fence]:
    if leadership is None:
        return server_of(settings, file), read_only

    def fence(connection: Connection) -> None:
        """Of who looks before its term, and writes in it."""
        (leadership.fence if leadership.term else read_only)(connection)

    return leadership.database, fence


def leadership_of(
    settings: Settings,
    file: Path,
    federation: FederationName,
    identity: str,
    *,
    kept_of: Callable[[], int] = lambda: 0,
) -> tuple[Leadership, Callable[[], None]] | None:
    """How this process comes to lead, and what makes the tables; None where the state is in the folder, whose lock
    decides. `identity` and `kept_of` as for Leadership."""
    if (server := server_of(settings, file)) is None:
        return None
    place = DatabasePlace.parse(settings.storage.database, file)

    def prepare() -> None:
        _require_no_other_state(settings, server)
        SqlRoundStore(server, federation).close()

    shared = settings.storage.attempt_keys
    leadership = Leadership(
        place,
        server,
        federation,
        identity,
        later_than=key_vault(settings, identity).newest_term,
        kept_of=kept_of,
        key_place=Path(shared) if shared else None,
    )
    return leadership, prepare


def _require_no_other_state(settings: Settings, server: PostgresqlDatabase) -> None:
    """Raises ConfigurationError where a database without tables would take the place of a state in the folder."""
    path = settings.state_folder / SQLITE
    try:
        with server.engine.connect() as connection:
            if revision_of(connection) is not None or not path.is_file():
                return
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as folder:
            silos = folder.execute("SELECT count(*) FROM silos").fetchone()[0]
    except SQLAlchemyError as error:
        raise server.failed(error) from error
    except sqlite3.Error as error:
        raise StorageError(f"{path} cannot be read ({error}): restore it from backup, or move it aside") from error
    if silos:
        raise ConfigurationError(
            f"{path} has {silos} silos, and {server.name} has no tables: nothing is moved from one to the other; leave "
            "[storage] database empty to go on, or move that file aside and enrol all silos anew"
        )


def is_new(settings: Settings, file: Path, audit: Path, identity: str) -> bool:
    """Whether the database has no tables, and nobody knows of rows there: who leads first makes them. `audit`,
    `identity`: as for the log.

    Raises ConfigurationError, StorageError where that would be refused.
    """
    if (server := server_of(settings, file)) is None:
        return False
    _require_no_other_state(settings, server)
    try:
        with server.engine.connect() as connection:
            server.require_supported(connection)
            if revision_of(connection) is not None:
                return False
    except SQLAlchemyError as error:
        raise server.failed(error) from error
    finally:
        server.engine.dispose()
    shared = key_folder(settings, identity) / AUDIT
    return not (audit / NEWEST).exists() and not (settings.storage.attempt_keys and any(shared.glob("*-*")))


def server_of(settings: Settings, file: Path) -> PostgresqlDatabase | None:
    """None where the state is in the folder. Raises ConfigurationError."""
    if not settings.storage.database:
        return None
    return PostgresqlDatabase(DatabasePlace.parse(settings.storage.database, file))


def has_log(server: PostgresqlDatabase) -> bool:
    """Whether its tables are of a release that keeps the audit log there. Raises StorageError."""
    try:
        with server.engine.connect() as connection:
            return connection.dialect.has_table(connection, audit_log.name)
    except SQLAlchemyError as error:
        raise server.failed(error) from error


def require_sqlite(settings: Settings, command: str) -> None:
    """Raises ConfigurationError with the remedy for what works on the folder's own database alone."""
    if settings.storage.database:
        raise ConfigurationError(
            f"`coordinator {command}` is for a state in the folder, and [storage] database is in PostgreSQL: back the "
            "database up with pg_dump, bring it back with pg_restore and `coordinator settle`, and copy the folder "
            f"without {FOLDER}/ while the coordinator is stopped"
        )
