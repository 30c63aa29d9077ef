"""A coordinator's folder from a backup: into a new folder, whole or not at all.

A restored coordinator stands where it stood when the backup was made. What the time since can break, and what is done
about it:

    somebody was revoked since          is revoked again, from the newer audit log; without one only if that is said
    certificates issued since           are registered again from that log, as far as a seal covers it; else their silos
                                        are invited again
    open invitations                    are in no backup: a token that was spent since does not open the door a second
                                        time
    sums released since (silo level)    plans of which the ledger may have forgotten releases are closed, unless the
                                        newer ledger is given, and has all that the newer log tells of
    the audit log forks                 the newer one goes on, if it was kept; else the entry `restore` says where the
                                        other one began
    the round under way                 is given up, and the plan is stopped: nothing begins before a person says so
    release groups since                are given back by silos when they connect, and checked as they were when they
                                        came to stand
    masked rounds since                 silos take no lower round than they took before, and none again that they
                                        unmasked
    privacy ledgers of silos            are ahead of what the restored coordinator knows: silos tell it from there
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from lorica_coordinator.edges.database.open_store import require_sqlite
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import FIRST_REVISION, TABLES_REVISION
from lorica_coordinator.edges.database.tables_revision import revision_of
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import key_files
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.upkeep.backup_file import PASSPHRASE, About, opened_backup
from lorica_coordinator.edges.upkeep.later_log import CaughtUp, catch_up, later_log, particulars_of, records_in
from lorica_coordinator.edges.upkeep.upgrade import in_transaction, migrate
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_coordinator.settings import Settings
from lorica_security.daemon.listen_address import address, require_bindable
from lorica_security.errors import ConfigurationError, IntegrityError, StateError, StorageError
from lorica_security.host import files, key_file
from lorica_security.identifiers import FederationName, Identity, Role, federation_name
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.on_disk.log_file import LogFiles, segments
from lorica_security.pkcs11_keys.reference import identity_key_of
from lorica_security.pkcs11_keys.token_uri import SCHEME, TokenUri
from lorica_security.privacy.ledger import Entry, check_head, head_of
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanOfAnotherRelease

_STATE_LINE = re.compile(r"(?m)^state\s*=.*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`since` is what a newer log told, None without one; `closed` the plans of which no further sum is released."""

    about: About
    files: int
    silos: tuple[str, ...]
    closed: tuple[str, ...]
    since: CaughtUp | None


def restore(
    source: Path,
    target: Path,
    environment: Mapping[str, str],
    *,
    log: Path | None,
    ledger: Path | None,
    tell: Callable[[CoordinatorFolder, Mapping[str, str]], None],
    token_keys: Sequence[str] = (),
) -> Restored:
    """Make the folder `target`, which must be new or empty, of a backup.

    `log` is the newer audit folder, None where it is lost; `ledger` the newer `state/privacy/ledger`; `tell` hears of
    the folder before it has its name, and what its log is to say; `token_keys` are the URIs of keys in a token that the
    backup may name, each of which names code. Raises IntegrityError for a damaged file, or a log or
    ledger that does not go on from the backup's; WrongPassphrase, ConfigurationError, StateError, StorageError.
    """
    if ledger is not None and log is None:
        raise ConfigurationError(
            "--ledger needs the newer audit log, with --log: nothing else says whether that ledger has every sum "
            "that was released; leave it out, and the plans are closed"
        )
    passphrase = key_file.passphrase_of(environment, PASSPHRASE)
    with opened_backup(source, passphrase) as backup, files.new_folder(target, files.PRIVATE_FOLDER_MODE) as work:
        _require_known(source, backup.about)
        count = backup.extract(work)
        folder = CoordinatorFolder(work)
        settings = _settings_of(folder)
        require_sqlite(settings, "restore")
        federation = federation_name(settings.federation)
        if federation != backup.about.federation or not key_files(folder.keys):
            raise IntegrityError(
                f"{source} holds no coordinator of federation {backup.about.federation}: use another copy"
            )
        _require_own_tokens(folder.keys, token_keys)
        _require_not_running(settings)
        _bring_up_to_date(settings.state_folder / "state.sqlite", backup.about)
        since = None if log is None else _go_on_from(log, folder, settings, federation, environment)
        closed = close_plans(ReleaseLedger(settings.state_folder / "privacy"), settings, since, ledger)
        store = SqlRoundStore(settings.state_folder / "state.sqlite", federation)
        try:
            store.load()
            silos = tuple(silo.silo for silo in store.silos() if silo.revoked_unix_s is None)
        finally:
            store.close()
        tell(folder, {"made_at": str(int(backup.about.made_at)), **particulars_of(since, ledger=ledger is not None)})
    return Restored(about=backup.about, files=count, silos=silos, closed=closed, since=since)


def _require_known(source: Path, about: About) -> None:
    known = about.revision.isdecimal() and FIRST_REVISION <= about.revision <= TABLES_REVISION
    if not known:
        raise StorageError(
            f"{source} has tables of revision {about.revision[:20]}, this release works with {TABLES_REVISION}: "
            f"install the release that made it ({about.release[:40]}), or a newer one"
        )


def _settings_of(folder: CoordinatorFolder) -> Settings:
    """With the state in the folder itself, wherever it was."""
    try:
        text = folder.settings.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise IntegrityError(
            f"the backup holds no {folder.settings.name} that can be read: use another copy"
        ) from error
    if Settings.parse(text, folder.settings.name).state != "state":
        text = _STATE_LINE.sub('state = "state"', text, count=1)
        if Settings.parse(text, folder.settings.name).state != "state":
            raise ConfigurationError(
                f"{folder.settings.name} of the backup says in no line of its own where the state is"
            )
        files.write_private(folder.settings, text.encode())
    return Settings.read(folder.settings)


def _require_own_tokens(keys: Path, given: Sequence[str]) -> None:
    """Nothing says who made a backup in clear, and a URI in it names a library that the next `serve` loads, and a file
    that it gives to it as PIN: the operator names the same. Raises ConfigurationError."""
    known = [replace(TokenUri.parse(uri), text="") for uri in given]
    for path in sorted(path for path in keys.rglob("*") if path.is_file()):
        text = path.read_bytes().decode("utf-8", "replace").strip()
        if not text.startswith(SCHEME):
            continue
        uri = TokenUri.parse(text.splitlines()[0])
        if replace(uri, text="") not in known:
            raise ConfigurationError(
                f"{path.name} of the backup names the key {uri.of_key} in token {uri.of_token}, by the library "
                f"{uri.module}, which would run here, with the PIN in {uri.pin_source}: if that is what the "
                "coordinator had, give its pkcs11: URI with --token-key; else use another copy"
            )


def _require_not_running(settings: Settings) -> None:
    """Two coordinators with one identity would tell silos two histories."""
    try:
        require_bindable(address(settings.listen.silos))
    except OSError as error:
        raise StateError(
            f"something listens on {settings.listen.silos}, where this coordinator would ({error.strerror}): stop "
            "the coordinator that runs, for good, before it is restored"
        ) from error


def _bring_up_to_date(database: Path, about: About) -> None:
    try:
        with in_transaction(database) as connection:
            (verdict,) = connection.exec_driver_sql("PRAGMA integrity_check(1)").one()
            if verdict != "ok":
                raise IntegrityError(f"the database in the backup is damaged ({verdict}): use another copy")
            if (found := revision_of(connection)) != about.revision:
                raise IntegrityError(
                    f"the database in the backup has tables of revision {(found or 'none')[:20]}, the backup names "
                    f"{about.revision}: use another copy"
                )
            migrate(connection, TABLES_REVISION)
    except SQLAlchemyError as error:
        raise IntegrityError(f"the database in the backup cannot be read ({error}): use another copy") from error


def _go_on_from(
    log: Path, folder: CoordinatorFolder, settings: Settings, federation: FederationName, environment: Mapping[str, str]
) -> CaughtUp:
    """Take `log` over in place of the one that was in the backup, and what it tells into the records."""
    key = identity_key_of(key_file.read_key(folder.identity_key, environment), folder.root).public_key()
    writer = Identity(federation, Role.COORDINATOR).uri
    reading, since = later_log(log, LogFiles(folder.audit), writer=writer, key=key)
    done = catch_up(records_in(settings.state_folder / "state.sqlite"), federation, reading, since)
    try:
        if folder.audit.exists():
            shutil.rmtree(folder.audit)
        files.make_private_folder(folder.audit)
        for segment in segments(log):
            files.write_private(folder.audit / segment.name, segment.read_bytes())
    except OSError as error:
        raise StorageError(f"{log} cannot be taken over: {error.strerror or error}") from error
    return done


def close_plans(
    releases: ReleaseLedger,
    settings: Settings,
    since: CaughtUp | None,
    ledger: Path | None,
    *,
    whole: bool = True,
    released: Sequence[Entry] = (),
    marked: frozenset[Digest] = frozenset(),
) -> tuple[str, ...]:
    """Those that were begun or released and may have released more since; where the newer ledger goes on from the
    older, those of which it has not every sum that the log tells of, or that an earlier `restore` may have closed. Not
    `whole`: the log is known to have gone on. `released`: what is known to have been there; `marked`: plans that are
    known to have released.

    Raises IntegrityError for a ledger that is not what the log tells of.
    """
    entries = releases.kept.entries()
    begun = {Digest(plan) for plan in _plans_of(settings) if _noise_is_made_here(settings, Digest(plan))}
    known = begun | marked | {Digest(entry.plan) for entry in entries}
    told = set() if since is None else since.released
    newer: Sequence[Entry] = ()
    if ledger is None or since is None:
        closed = known | {plan for _, plan, _ in told}
    else:
        if not ledger.is_file():
            raise ConfigurationError(f"{ledger} is missing: name the newest copy of state/privacy/ledger with --ledger")
        newer = PrivacyLedgerFile(ledger).entries()
        if newer and releases.kept.root() is None:
            raise ConfigurationError(
                "the backup is from before the first sum was released, and has not the secret that its noise was "
                "made from: leave --ledger out, and the plans are closed"
            )
        check_head(newer, head_of(entries), where=str(ledger), by="the ledger in the backup")
        for some in (since.signed, told):  # what nobody signed does not speak against what somebody did
            end = _vouched_for(newer, some, where=str(ledger))
        if whole and len(newer) > max(end, len(entries)):
            raise IntegrityError(
                f"{ledger} has {len(newer)} entries, and the audit log tells of none after entry "
                f"{max(end, len(entries))}: give a log that is as new, or leave --ledger out, and the plans are closed"
            )
        if newer[len(entries) :]:
            releases.kept.append(newer[len(entries) :])
        closed = {plan for number, plan, _ in told if number > end}
        if since.forgotten:
            closed |= known | since.in_doubt
    if lost := [one for one in released if not _has(newer, one.sequence, one.plan, one.digest)]:
        whole = False
        closed |= {Digest(one.plan) for one in lost}
    if not whole:
        closed |= known | {plan for _, plan, _ in told} | {Digest(entry.plan) for entry in newer}
    if closed:
        releases.close(closed)
    return tuple(sorted(releases.closed()))


def _has(entries: Sequence[Entry], number: int, plan: str, digest: str) -> bool:
    """Whether a ledger has the entry that a log tells of; one of an earlier release tells no digest."""
    if not 0 < number <= len(entries):
        return False
    found = entries[number - 1]
    return found.plan == plan and digest in ("", found.digest)


def _vouched_for(newer: Sequence[Entry], told: set[tuple[int, Digest, str]], *, where: str) -> int:
    """Up to which entry a log vouches for a copy of the ledger. Nobody signed that, and whoever edits it makes its
    chain anew. The log has the digest of each entry, and of sums that were told and never entered; an entry names all
    before it. Raises IntegrityError where it tells otherwise after that."""
    end = max((number for number, plan, digest in told if _has(newer, number, plan, digest)), default=0)
    others = sorted(number for number, _, _ in told if end < number <= len(newer))
    if others:
        raise IntegrityError(
            f"{where} has another entry {others[0]} than the audit log tells of: it was edited, or is of another "
            "history; give another copy, or leave --ledger out, and the plans are closed"
        )
    return end


def _plans_of(settings: Settings) -> list[str]:
    bundles = settings.state_folder / "bundles"
    return [path.stem for path in sorted(bundles.glob("*.bundle"))] if bundles.is_dir() else []


def _noise_is_made_here(settings: Settings, plan: Digest) -> bool:
    """Or may be: a plan of another release, which this one does not read, is closed like those."""
    try:
        return PlanShelf(settings.state_folder).bundle(plan).plan.noise_at == "coordinator"
    except PlanOfAnotherRelease:
        return True
