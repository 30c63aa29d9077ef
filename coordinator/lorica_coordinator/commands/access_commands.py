"""`coordinator access`: operators and viewers on other hosts, whose keys are made there and never travel."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from platformdirs import user_data_path

from lorica_coordinator.commands.command_line import AsJson, Dir, instant, reach, whole_seconds
from lorica_coordinator.edges.keys.coordinator_folder import remember
from lorica_coordinator.edges.operator_host.access_folder import (
    AccessFolder,
    access_role,
    granted_text,
    requested_identity,
)
from lorica_coordinator.service.members.renewal import MOST_ACCESS_S
from lorica_security.console.terminal import Page, terminal
from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import Identity, Role, federation_name
from lorica_security.pki.parsing import MAX_REQUEST_BYTES
from silo_wire.codecs.renewal import renewal_from_wire
from silo_wire.v1 import operator_pb2

access_app = typer.Typer(help="Operators and viewers on other hosts.", no_args_is_help=True)

AccessDir = Annotated[
    Path | None, typer.Option("--dir", help="The folder for access on this host.", show_default=False)
]
FileName = Annotated[typer.FileText, typer.Argument(metavar="FILE", help="`-` reads it from stdin.")]


@access_app.command()
def request(
    federation: Annotated[str, typer.Argument(help="Name of the federation.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Name of who will hold it: a-z, 0-9 and '-'.", show_default=False)],
    role: Annotated[str, typer.Option(help="operator, or viewer, who may only look.")] = Role.VIEWER.value,
    directory: AccessDir = None,
) -> None:
    """On your own host: make a key and print the request for its certificate."""
    identity = Identity(federation_name(federation), access_role(role), name)
    folder = _folder(directory)
    pem = folder.ask(identity)
    terminal(stderr=True).print(
        f"the key of {identity.uri} is in {folder.root}; have the request granted on the coordinator's host: "
        f"coordinator access grant {name} --role {role} FILE",
        soft_wrap=True,
    )
    print(pem.decode(), end="")


@access_app.command()
def grant(
    name: Annotated[str, typer.Argument(help="Whose request you mean to grant.", show_default=False)],
    file: FileName,
    role: Annotated[str, typer.Option(help="operator or viewer.")] = Role.VIEWER.value,
    days: Annotated[float | None, typer.Option(help="How long it holds; default from federation.toml.")] = None,
    directory: Dir = None,
) -> None:
    """Grant a request, and print what its holder gives to `coordinator access accept`."""
    pem = file.read(MAX_REQUEST_BYTES + 1).encode()
    try:
        asked = requested_identity(pem)
        der = x509.load_pem_x509_csr(pem).public_bytes(Encoding.DER)
    except (MalformedMessage, ValueError) as error:
        raise ConfigurationError(f"{file.name} is not what coordinator access request printed: {error}") from error
    if (asked.role, asked.name) != (access_role(role), name):
        raise ConfigurationError(f"{file.name} asks for {asked.uri}, and you grant {role} {name}: correct one of them")
    seconds = whole_seconds(days, unit_s=86_400, most=MOST_ACCESS_S, of_what="access")
    wanted = operator_pb2.GrantAccessRequest(role=role, name=name, csr_der=der, valid_seconds=seconds)
    reply = reach(directory).ask(lambda stub: stub.GrantAccess(wanted))
    terminal(stderr=True).print(
        f"granted to {asked.uri}; hand it over by a way on which nobody can change it", soft_wrap=True
    )
    print(granted_text(asked, reply), end="")


@access_app.command()
def accept(file: FileName, directory: AccessDir = None) -> None:
    """On your own host: take up what was granted; commands find the coordinator from then on."""
    folder = _folder(directory)
    identity = folder.accept(file.read(), now=datetime.now(UTC))
    remember(folder.root)
    print(f"{identity.uri}: coordinator status now asks the coordinator; --dir {folder.root} names this access")


@access_app.command()
def renew(directory: AccessDir = None) -> None:
    """On your own host: a new key, its certificate, and the authorities of today. Access ends when it did before."""
    folder = _folder(directory)
    before = folder.load(now=datetime.now(UTC))
    message = operator_pb2.RenewAccessRequest(csr_der=folder.begin_renewal())
    reply = before.call(lambda stub: stub.RenewAccess(message))
    access = folder.renew(renewal_from_wire(reply), now=datetime.now(UTC))
    # The coordinator counts on it from the first call on: what it sent might have been lost.
    access.call(lambda stub: stub.GetStatus(operator_pb2.GetStatusRequest()))
    known = len(access.trust.authorities)
    print(f"renewed, until {access.pair.expires.isoformat()} as before; authorities that are trusted: {known}")


@access_app.command(name="list")
def list_access(directory: Dir = None, as_json: AsJson = False) -> None:
    """Name the certificates of operators and viewers, with when they expire or were revoked."""
    reply = reach(directory).ask(lambda stub: stub.ListAccess(operator_pb2.ListAccessRequest()))
    rows = [
        {
            "role": item.role,
            "name": item.name,
            "serial": item.serial,
            "issued": instant(item.issued_unix_s),
            "expires": instant(item.expires_unix_s),
            "revoked": instant(item.revoked_unix_s) if item.revoked_unix_s else None,
        }
        for item in reply.certificates
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    columns = ("role", "name", "serial", "issued", "expires", "revoked")
    Page(columns=columns, rows=[[value or "" for value in row.values()] for row in rows]).show(terminal())


def _folder(given: Path | None) -> AccessFolder:
    return AccessFolder((given or user_data_path("lorica") / "access").absolute())
