"""What commands share: which folder they mean, and how they reach the state.

The folder is the coordinator's own, or one with access that was granted on another host. In the first a command goes
over mutual TLS if the coordinator runs, else directly, by the same servicer; from the second always over mutual TLS.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder, chosen_folder
from lorica_coordinator.edges.operator_host.access_folder import AccessFolder
from lorica_coordinator.edges.operator_host.operator_client import CALL_TIMEOUT_S, OperatorAccess
from lorica_coordinator.opened import Coordinator, leading, with_ballast
from lorica_coordinator.settings import Settings
from lorica_security.console.terminal import terminal
from lorica_security.errors import ConfigurationError, Conflict, StorageError
from lorica_security.host import ballast, key_file
from lorica_security.host.process_lock import ProcessLock, holder, stands_by
from lorica_security.identifiers import Identity, Role, federation_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from lorica_coordinator.edges.server.audited import AuditedOperator
    from lorica_security.on_disk.log_file import AuditLog
    from silo_wire.v1 import operator_pb2_grpc

Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The coordinator's folder, or one with access that was granted.",
        envvar="LORICA_COORDINATOR_DIR",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reply = TypeVar("Reply")
Ask = Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class OnTheHost:
    coordinator: Coordinator

    @property
    def coordinator_key(self) -> "Ed25519PublicKey":
        return self.coordinator.keys.identity.public_key()

    @property
    def running(self) -> bool:
        return holder(self.coordinator.folder.lock) is not None

    @property
    def serving(self) -> bool:
        """It runs, and does not stand by."""
        return self.running and not stands_by(self.coordinator.folder.lock)

    def ask(self, ask: "Ask[Reply]", *, timeout_s: float | None = CALL_TIMEOUT_S) -> Reply:
        if not self.running:
            for disk in with_ballast(self.coordinator):
                ballast.make_room(disk)
            with ExitStack() as held:
                try:
                    held.enter_context(ProcessLock(self.coordinator.folder.lock, "coordinator", brief=True))
                except Conflict:
                    pass  # it has started this moment
                else:
                    return asyncio.run(self._ask_offline(ask))
        self._require_no_standby()
        return self.coordinator.operator_access().call(ask, timeout_s=timeout_s)

    def _require_no_standby(self) -> None:
        """Raises Conflict naming who leads where the process that runs here stands by: it answers nobody."""
        here = holder(self.coordinator.folder.lock)
        if here is None or not stands_by(self.coordinator.folder.lock):
            return
        from lorica_coordinator.edges.database.open_store import server_of
        from lorica_coordinator.edges.database.postgresql.leadership import holder_text, who_leads

        leads = ""
        with suppress(StorageError):  # where that cannot be told
            server = server_of(self.coordinator.settings, self.coordinator.folder.settings)
            leads = "" if server is None else who_leads(server)
        if leads == holder_text(here):
            return  # it has come to lead this moment, and is about to serve
        raise Conflict(
            f"the coordinator that runs on {self.coordinator.folder.root} (process {here}) stands by, and "
            f"{leads or 'another one'} leads: give this command there"
        )

    async def _ask_offline(self, ask: "Ask[Reply]") -> Reply:
        # Here, not above: where a coordinator runs, nothing of what it is made of is needed.
        from lorica_coordinator.composition import offline_operator
        from lorica_coordinator.edges.telemetry.logs import log_to_stderr

        log_to_stderr("error")
        with leading(self.coordinator) as leader:
            async with offline_operator(leader) as servicer:
                return await ask(_Direct(servicer))  # type: ignore[arg-type]  # the same calls, without a wire


@dataclass(frozen=True, slots=True)
class FromElsewhere:
    access: OperatorAccess
    coordinator_key: "Ed25519PublicKey"

    def ask(self, ask: "Ask[Reply]", *, timeout_s: float | None = CALL_TIMEOUT_S) -> Reply:
        return self.access.call(ask, timeout_s=timeout_s)


class _Direct:
    """A stub whose calls go straight to the servicer."""

    def __init__(self, servicer: "AuditedOperator") -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[[object], Awaitable[object]]:
        method = getattr(self._servicer, name)
        return lambda request: method(request, None)


def reach(directory: Path | None) -> OnTheHost | FromElsewhere:
    """For commands that an operator may give from anywhere."""
    root = chosen_folder(directory)
    access = AccessFolder(root)
    if access.granted.is_file():
        return FromElsewhere(access.load(now=datetime.now(UTC)), access.coordinator_key)
    return OnTheHost(load(directory))


def load(directory: Path | None) -> Coordinator:
    """For commands that need the coordinator's own folder; raises ConfigurationError elsewhere."""
    folder = own_folder(directory)
    key_file.settle(folder.keys, folder.lock, "coordinator")
    return Coordinator.load(folder)


def own_folder(directory: Path | None) -> CoordinatorFolder:
    """The coordinator's, of which keys and state may be missing; raises ConfigurationError where it is none."""
    folder = CoordinatorFolder(chosen_folder(directory))
    if AccessFolder(folder.root).granted.is_file():
        raise ConfigurationError(
            f"{folder.root} holds access from another host: give this command on the coordinator's own"
        )
    folder.require()
    return folder


def enter_command(folder: CoordinatorFolder, command: str, /, **said: str) -> None:
    """Into the audit log, signed: what a command is about to do to this folder by itself, beside the coordinator or
    without it."""
    from lorica_security.audit.entry import Event

    log = log_beside(folder)
    log.append(Event.OPERATOR_COMMAND, command=command, **said)
    log.seal()


def log_beside(folder: CoordinatorFolder) -> "AuditLog":
    """The coordinator's audit log, for a command that adds to it beside whoever leads."""
    from lorica_coordinator.edges.database.open_store import log_of
    from lorica_security.on_disk.log_file import AuditLog
    from lorica_security.pkcs11_keys.reference import identity_key_of

    settings = Settings.read(folder.settings)
    writer = Identity(federation_name(settings.federation), Role.COORDINATOR).uri
    key = identity_key_of(key_file.read_key_of_either(folder.identity_key, os.environ), folder.root)
    place = log_of(settings, folder.settings, folder.audit, key=key.public_key(), beside_leader=True)
    return AuditLog(place, writer=writer, key=key, clock=time.time)


def whole_seconds(given: float | None, *, unit_s: int, most: int, of_what: str) -> int:
    """How long something is to hold, as requests say it: 0 stands for what the coordinator's settings say, and is
    nobody's to type.

    Raises ConfigurationError for less than a second or more than `most`.
    """
    if given is None:
        return 0
    seconds = given * unit_s
    if not 1 <= seconds <= most:
        raise ConfigurationError(f"{of_what} valid for {seconds:.0f} seconds is not allowed: use 1 to {most}")
    return int(seconds)


def say(line: str) -> None:
    """For people, as it is: nothing in it is markup, and it is not cut."""
    terminal().print(line, soft_wrap=True)


def instant(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if unix_s else "never"
