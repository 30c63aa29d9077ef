"""`coordinator` on its own host: make a federation, run it, look for what keeps it from working, protect its keys."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import structlog
import typer

from lorica_coordinator.commands.command_line import (
    AsJson,
    Dir,
    enter_command,
    own_folder,
    say,
)
from lorica_coordinator.commands.completion import plan_names
from lorica_coordinator.commands.plan_commands import DEFAULT_SIZE, assignments, new_plan
from lorica_coordinator.commands.silo_commands import warn_of
from lorica_coordinator.edges.check.folder_checks import KEYS_IN_THE_FOLDER
from lorica_coordinator.edges.check.told_address import leads_to_itself, loopback_alone, own_hosts
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder, remember, undo_init
from lorica_coordinator.edges.keys.key_store import KeyStore, key_files
from lorica_coordinator.edges.telemetry.logs import log_to_stderr
from lorica_coordinator.opened import Coordinator, leading, load_keys, with_ballast
from lorica_coordinator.rounds.which_plan import DEFAULT_PLAN
from lorica_coordinator.settings import (
    ENROLMENT_PORT,
    METRICS_PORT,
    SILOS_PORT,
    STATE,
    STATUS_PORT,
    Settings,
    require_apart,
    settings_text,
)
from lorica_security.console.terminal import terminal
from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import ConfigurationError, Conflict
from lorica_security.host import ballast, files, key_file
from lorica_security.host.private_memory import keep_memory_private
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import federation_name
from lorica_security.pkcs11_keys.reference import identity_in_token, tls_key_in_token
from silo_wire.transport import keep_chunks_in_memory

_log = structlog.get_logger(__name__)
keys_app = typer.Typer(help="The private keys on this disk.", no_args_is_help=True)


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    federation: Annotated[str, typer.Option(help="Name of the federation; it stands in every certificate.")] = "",
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which silos reach this host; repeatable.")
    ] = None,
    silos_port: Annotated[int, typer.Option(help="Port for silos and operators.")] = SILOS_PORT,
    enrolment_port: Annotated[int, typer.Option(help="Port for enrolment.")] = ENROLMENT_PORT,
    metrics_host: Annotated[
        str, typer.Option(help="Address of /metrics: loopback, or one that your monitoring alone reaches.")
    ] = "127.0.0.1",
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics.")] = METRICS_PORT,
    status_host: Annotated[
        str,
        typer.Option(help="Address of the status page; on any but loopback it asks for a certificate or the token."),
    ] = "127.0.0.1",
    status_port: Annotated[int, typer.Option(help="Port of the status page; 0 for none.")] = STATUS_PORT,
    status_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of the status page; not on loopback.", show_default=False),
    ] = None,
    database: Annotated[
        str,
        typer.Option(metavar="URL", help="PostgreSQL for the state, postgresql+psycopg://...; else SQLite here."),
    ] = "",
    blobs: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Bucket for models and updates, s3://...; with --database. Else this folder alone."
        ),
    ] = "",
    attempt_keys: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Folder that every coordinator sees, with keys; with --database. Else this folder."
        ),
    ] = "",
    authority_key: Annotated[
        str | None,
        typer.Option(metavar="URI", help="pkcs11: URI of the authority's ECDSA key in a token.", show_default=False),
    ] = None,
    identity_key: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="pkcs11: URI of the coordinator's Ed25519 key in a token.", show_default=False
        ),
    ] = None,
    plan: Annotated[bool, typer.Option(help="Also make the plan 'default', a small model from scratch.")] = True,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A value of that plan, such as schedule.rounds=40; repeatable."
        ),
    ] = None,
) -> None:
    """Make a coordinator: its authority, its keys, federation.toml, an empty state."""
    folder = CoordinatorFolder(directory.absolute())
    undo_init(folder)
    if folder.settings.exists():
        raise ConfigurationError(
            f"{folder.root} is not empty, it holds a coordinator: go on with it, or choose a new folder"
        )
    if folder.root.exists() and any(folder.root.iterdir()):
        raise ConfigurationError(f"{folder.root} is not empty: choose a new folder")
    if status_token_file is not None and is_loopback(status_host):
        raise ConfigurationError(
            f"--status-token-file {status_token_file} is for a page on another address than {status_host}, where "
            "nobody is asked for a token: give --status-host as well, or leave it out"
        )
    _require_places(folder, database, blobs, attempt_keys)
    name = federation_name(federation or _name_from(folder.root.name))
    chosen = _values_of_the_plan(values or (), name, with_plan=plan)
    text = settings_text(
        name,
        host or own_hosts(),
        silos_port=silos_port,
        enrolment_port=enrolment_port,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        status_host=status_host,
        status_port=status_port,
        status_token_file=str(status_token_file.absolute()) if status_token_file else "",
        this_machine_alone=all(map(leads_to_itself, host)) if host else False,
        database=database,
        blobs=blobs,
        attempt_keys=attempt_keys,
    )
    of_authority = None if authority_key is None else tls_key_in_token(authority_key, folder.root)
    own = None if identity_key is None else identity_in_token(identity_key, folder.root)
    files.make_private_folder(folder.root)
    files.mark(folder.begun)
    KeyStore.create(folder.keys, name, datetime.now(UTC), authority_key=of_authority, own_key=own)
    files.replace(folder.settings, text.encode())
    folder.begun.unlink()
    coordinator = Coordinator.load(folder)
    coordinator.keys.operator_pair(datetime.now(UTC))  # commands find it also while the coordinator starts
    if not database:
        coordinator.open_store().close()
    remember(folder.root)
    say(f"federation {name} is in {folder.root}; silos reach it at {coordinator.settings.public.hosts[0]}")
    if plan:
        say("making the plan 'default' (a small model from scratch) ...")
        new_plan(coordinator, DEFAULT_PLAN, size=DEFAULT_SIZE, overrides=chosen)
    settings = coordinator.settings
    if not loopback_alone(settings):
        warn_of(settings.public.hosts[0], settings.public_silos_port)
    if blobs and not attempt_keys:
        say(KEYS_IN_THE_FOLDER)
    say("next: coordinator invite SILO, for each; then coordinator serve")


def _require_places(folder: CoordinatorFolder, database: str, blobs: str, attempt_keys: str) -> None:
    """Raises ConfigurationError naming the option, by what reads federation.toml, before anything is made."""
    if database:
        DatabasePlace.parse(database, None)
    for option, value in (("--blobs", blobs), ("--attempt-keys", attempt_keys)):
        if value and not database:
            raise ConfigurationError(
                f"{option} {value} is for a state in PostgreSQL, which another coordinator goes on with: give "
                "--database as well, or leave it out"
            )
    if blobs:
        BucketPlace.parse(blobs, None)
    if attempt_keys:
        if not attempt_keys.startswith("/"):
            raise ConfigurationError(
                f"--attempt-keys {attempt_keys} is no path from / on: give the whole path, which is the same folder "
                "for every coordinator"
            )
        require_apart(Path(attempt_keys), folder.root / STATE, "--attempt-keys")


def _values_of_the_plan(values: Sequence[str], federation: str, *, with_plan: bool) -> dict[str, object]:
    """Raises ConfigurationError for values that no plan may have, or that there is no plan for, before anything is
    made."""
    if values and not with_plan:
        raise ConfigurationError("--set is of the plan that --no-plan leaves out: give one of the two")
    chosen = assignments(values)
    if chosen:
        from lorica_coordinator.plans.plan_folder import require_valid

        require_valid(name=DEFAULT_PLAN, federation=federation, preset="default", seed=0, overrides=chosen)
    return chosen


def serve_command(
    directory: Dir = None,
    plan: Annotated[
        str,
        typer.Option(help="Plan that silos prepare as soon as they connect; '' for none.", autocompletion=plan_names),
    ] = DEFAULT_PLAN,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the coordinator until it is stopped."""
    # Here, not above: making, checking and protecting a federation needs nothing of what serves it.
    from lorica_coordinator.composition import load_libraries, require_servable, serve
    from lorica_coordinator.edges.telemetry.standing_by import StandingBy

    keep_memory_private()
    keep_chunks_in_memory()
    where = log_to_stderr(log_level, libraries=True)
    folder = own_folder(directory)
    key_file.settle(folder.keys, folder.lock, "coordinator")
    with StandingBy(folder.settings, load_libraries) as stand_by, _folder_lock(folder, stand_by) as lock:
        stand_by.lock = lock
        # Not before: who led until now may have changed keys and settings, and made or begun an authority.
        coordinator = Coordinator.load(folder)
        for disk in with_ballast(coordinator):
            ballast.keep(disk)
        with leading(coordinator, waiting=stand_by, require_able=require_servable) as leader:
            stand_by.end()
            if plan == DEFAULT_PLAN and plan not in leader.shelf.names():
                plan = ""
            if leader.leadership is not None:
                _log.info("leads", term=leader.leadership.term)
            asyncio.run(serve(leader, offer=plan, ready=_announce(leader), where=where))


@contextmanager
def _folder_lock(folder: CoordinatorFolder, stand_by: Callable[[], None]) -> Iterator[ProcessLock]:
    """Holds the folder's lock: nobody serves a folder that another process has open, be it stopped or hung.

    With a state in PostgreSQL `stand_by` is called until that process has ended; else Conflict is raised at once.
    """
    with ExitStack() as held:
        while True:
            try:
                lock = held.enter_context(ProcessLock(folder.lock, "coordinator"))
            except Conflict:
                if not Settings.read(folder.settings).storage.database:
                    raise
                stand_by()
            else:
                break
        yield lock


def check(
    directory: Dir = None,
    plan: Annotated[str, typer.Option(help="Plan to hold it to; default: the one under way, else 'default'.")] = "",
    as_json: AsJson = False,
) -> None:
    """Look at everything that could keep this federation from working; exit with 3 if something does."""
    from lorica_coordinator.edges.check.found import Ground
    from lorica_coordinator.edges.check.preflight import preflight
    from lorica_security.console.preflight import failures
    from lorica_security.console.preflight_page import check_json, check_page

    folder = own_folder(directory)
    checks = preflight(
        Ground(
            folder=folder, keys=lambda settings: load_keys(folder, settings), now=lambda: datetime.now(UTC), plan=plan
        )
    )
    if as_json:
        print(check_json(checks))
    else:
        check_page(checks, f"coordinator check of {folder.root}").show(terminal())
    if problem := failures(checks):
        raise problem


@keys_app.callback()
def keys() -> None:
    """The private keys on this disk."""


@keys_app.command(name="protect")
def keys_protect(
    directory: Dir = None,
    clear: Annotated[bool, typer.Option("--clear", help="Leave the keys in clear instead.")] = False,
) -> None:
    """Encrypt the private keys with the passphrase of LORICA_NEW_KEY_PASSPHRASE[_FILE], whatever they are encrypted
    with now."""
    folder = own_folder(directory)
    key_file.settle(folder.keys, folder.lock, "coordinator")
    with ProcessLock(folder.lock, "coordinator", brief=True):
        tell = partial(enter_command, folder, "keys protect", clear="yes" if clear else "no")
        print(key_file.protect_all(key_files(folder.keys), os.environ, clear=clear, tell=tell))


def _name_from(folder: str) -> str:
    kept = "".join(character if character.isalnum() else "-" for character in folder.lower()).strip("-")
    return kept[:63].strip("-") or "federation"


def _announce(coordinator: Coordinator) -> Callable[[], None]:
    def announce() -> None:
        if sys.stderr.isatty():
            terminal(stderr=True).print(
                f"coordinator of federation {coordinator.federation} serves silos on "
                f"{coordinator.settings.listen.silos}; Ctrl-C stops it",
                soft_wrap=True,
            )

    return announce
