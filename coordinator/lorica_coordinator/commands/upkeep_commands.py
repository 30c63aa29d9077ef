"""The `coordinator` commands that keep a federation for years: backup, restore, settle, upgrade, gc."""

import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from lorica_coordinator.commands.command_line import (
    Dir,
    enter_command,
    instant,
    load,
    log_beside,
    own_folder,
    reach,
    say,
)
from lorica_coordinator.edges.database.open_store import SQLITE, has_log, require_sqlite, server_of
from lorica_coordinator.edges.database.round_tables import TABLES_REVISION
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.telemetry.logs import log_to_stderr
from lorica_coordinator.edges.upkeep.backup import back_up
from lorica_coordinator.edges.upkeep.backup_file import PASSPHRASE
from lorica_coordinator.edges.upkeep.later_log import CaughtUp
from lorica_coordinator.edges.upkeep.settle import Lost
from lorica_coordinator.edges.upkeep.settle import settle as bring_up
from lorica_coordinator.opened import leading
from lorica_coordinator.settings import Settings
from lorica_security.errors import ConfigurationError
from lorica_security.host import key_file
from lorica_security.host.process_lock import ProcessLock
from lorica_security.host.software_version import software_version
from silo_wire.v1 import operator_pb2


def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.", show_default=False)],
    plain: Annotated[
        bool, typer.Option("--plain", help="Without a passphrase: whoever has the file then has the federation.")
    ] = False,
    directory: Dir = None,
) -> None:
    """Write the coordinator's folder to one file, encrypted with the passphrase of LORICA_BACKUP_PASSPHRASE[_FILE];
    also while it runs."""
    folder = own_folder(directory)
    require_sqlite(Settings.read(folder.settings), "backup")
    passphrase = key_file.passphrase_of(os.environ, PASSPHRASE)
    if plain and passphrase is not None:
        raise ConfigurationError(f"--plain and ${passphrase.variable} say different things: leave one of them out")
    if not plain and passphrase is None:
        raise ConfigurationError(
            f"${PASSPHRASE} and ${PASSPHRASE}_FILE are not set: give the passphrase there, or --plain for a file "
            "that holds the keys of the federation as they are"
        )
    enter_command(folder, "backup", file=str(target.absolute()), plain="yes" if plain else "no")
    done = back_up(folder, target.absolute(), passphrase, now=time.time(), release=software_version())
    for name in done.left_out:
        say(f"left out: {name} (use a-z, A-Z, 0-9, '.', '_' and '-' in names)")
    say(f"{done.files} files, {done.bytes} bytes are in {target}{', in clear' if plain else ''}")


def restore(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A file of coordinator backup.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    log: Annotated[
        Path | None, typer.Option("--log", help="The newest copy of the audit folder: what happened since the backup.")
    ] = None,
    without_log: Annotated[
        bool, typer.Option("--without-log", help="There is no newer audit log: who was revoked since is let in again.")
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option("--ledger", help="With --log: the newest copy of state/privacy/ledger, under silo-level privacy."),
    ] = None,
    token_keys: Annotated[
        list[str] | None,
        typer.Option("--token-key", metavar="URI", help="A key in a token that the backup may name; several times."),
    ] = None,
) -> None:
    """Make a coordinator's folder of a backup. Its plan is stopped; silos go on once it is served and started."""
    from lorica_coordinator.edges.upkeep.restore import restore as make

    _require_log_or_word(log, without_log)

    def tell(folder: CoordinatorFolder, said: Mapping[str, str]) -> None:
        enter_command(folder, "restore", **said)

    done = make(source, target.absolute(), os.environ, log=log, ledger=ledger, tell=tell, token_keys=token_keys or ())
    say(f"{done.files} files of {instant(done.about.made_at)} are in {target}; its plan is stopped")
    _say_settled(done.silos, done.closed, done.since)


def settle(
    log: Annotated[
        Path | None, typer.Option("--log", help="The newest copy of the log, by `audit export`: what happened since.")
    ] = None,
    without_log: Annotated[
        bool, typer.Option("--without-log", help="There is no newer log: who was revoked since is let in again.")
    ] = False,
    ledger: Annotated[
        Path | None, typer.Option("--ledger", help="With --log: `ledger` of that copy, under silo-level privacy.")
    ] = None,
    without_rest: Annotated[
        bool,
        typer.Option(
            "--without-rest",
            help="With --log: what is known to have come after it is lost; who was revoked then is let in again.",
        ),
    ] = False,
    directory: Dir = None,
) -> None:
    """After pg_restore, before serve: shut out again who was revoked since, void invitations, stop the plan, close
    those that released sums."""
    _require_log_or_word(log, without_log)
    if ledger is not None and log is None:
        raise ConfigurationError("--ledger needs the newer log, with --log: nothing else says whether it has every sum")
    coordinator = load(directory)
    log_to_stderr("error")
    with ProcessLock(coordinator.folder.lock, "coordinator"), leading(coordinator, to_settle=True) as leader:
        store = leader.open_store()
        try:
            done = bring_up(
                store, leader.audit(), leader.releases, leader.settings, leader.federation, leader.keys,
                log=log, ledger=ledger, without_rest=without_rest, now=time.time(),
            )  # fmt: skip
        finally:
            store.close()
    say("the state is settled; its plan is stopped")
    _say_settled(done.silos, done.closed, done.since, done.lost)
    if done.authorities:
        say(f"the log told of other authorities, and tells of this folder's from here on: {done.authorities}")


def _require_log_or_word(log: Path | None, without_log: bool) -> None:
    if (log is None) != without_log:
        raise ConfigurationError(
            "give the newest copy of the audit folder with --log, or --without-log where it is lost: it says who "
            "was revoked since"
        )


def _say_settled(silos: Sequence[str], closed: Sequence[str], since: CaughtUp | None, lost: Lost | None = None) -> None:
    listed = ", ".join(silos) or "no silo"
    if since is None:
        say(
            f"let in again, who was revoked since as well: {listed}; shut out with coordinator revoke whoever should "
            "not be"
        )
    else:
        if lost is None:
            say(f"enrolled, as the newer log has it: {listed}; who was revoked since stays so")
        else:
            given = "a log of another history has it" if lost.another_history else "the newer log has it up to its end"
            say(
                f"enrolled, as {given}: {listed}; whoever was revoked by entries {lost.first} to {lost.last}, which "
                "are lost, is in again: shut out with coordinator revoke who should not be"
            )
        for said, names in (
            ("revoked", since.revoked),
            ("registered", since.let_in),
            ("to be invited again", since.to_invite),
        ):
            if names:
                say(f"{said}, by {since.entries} entries since: {', '.join(sorted(set(names)))}")
        if since.authorities_changed:
            say("the authorities changed since: silos with a certificate of a later one are invited again")
    for plan in closed:
        say(
            f"closed: plan {plan[:16]}, of which sums may have been released since; a plan of another name goes on "
            "from its model"
        )


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    directory: Dir = None,
) -> None:
    """Delete what the coordinator needs no more, as [retention] of federation.toml says; also while it runs."""
    wanted = operator_pb2.CollectGarbageRequest(dry_run=dry_run)
    reply = reach(directory).ask(lambda stub: stub.CollectGarbage(wanted), timeout_s=None)
    for item in reply.items:
        say(f"{item.kind}: {item.what}, {item.bytes} bytes: {item.why}")
    freed = sum(item.bytes for item in reply.items)
    say(f"{'would free' if dry_run else 'freed'} {freed} bytes" if reply.items else "there is nothing to delete")


def upgrade(
    to: Annotated[
        str, typer.Option(help="Revision of the tables; an older one before that release is put back.")
    ] = TABLES_REVISION,
    directory: Dir = None,
) -> None:
    """Bring the state to the tables of this release; a copy of the database is made first. The coordinator is stopped
    meanwhile."""
    from lorica_coordinator.edges.database.postgresql.log_rows import LogRows
    from lorica_coordinator.edges.upkeep.upgrade import require_to_upgrade, upgrade_server, was_put_back
    from lorica_coordinator.edges.upkeep.upgrade import upgrade as bring_to

    folder = own_folder(directory)
    settings = Settings.read(folder.settings)
    server = server_of(settings, folder.settings)
    database = settings.state_folder / SQLITE if server is None else server.name
    log_to_stderr("error")
    with ProcessLock(folder.lock, "coordinator"):
        put_back = False
        if server is not None:
            require_to_upgrade(server, to=to)
            place = log_beside(folder).place
            put_back = isinstance(place, LogRows) and was_put_back(place.rows, has_log=has_log(server))
        tells = not put_back and (server is None or has_log(server))
        if tells:
            enter_command(folder, "upgrade", to=to)
        if server is not None:
            done = upgrade_server(server, to=to, put_back=put_back)
            if not tells and not put_back and done.after == TABLES_REVISION:
                with leading(load(directory)):  # which takes the folder's log over
                    enter_command(folder, "upgrade", to=to)
        else:
            done = bring_to(settings.state_folder / SQLITE, to=to, now=datetime.now(UTC))
    if server is not None and done.before != done.after:
        say(f"{database} has tables of revision {done.after}, it had {done.before}")
    elif done.copy is None:
        say(f"{database} has tables of revision {done.after}: nothing was to be done")
    else:
        say(f"{database} has tables of revision {done.after}, it had {done.before}; as it was it is in {done.copy}")
    if put_back:
        say("it lacks entries of the log that are known: the log does not tell of this; type coordinator settle now")
