"""`coordinator ca`: the federation's authorities, their succession, and how to keep or lend one."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from lorica_coordinator.commands.command_line import AsJson, Dir, enter_command, instant, load, own_folder, reach, say
from lorica_coordinator.edges.keys.authorities import Authorities
from lorica_coordinator.edges.keys.authority_backup import export_authority, import_authority
from lorica_coordinator.settings import Settings
from lorica_security.console.terminal import Page, terminal
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import federation_name
from silo_wire.v1 import operator_pb2

PASSPHRASE = "LORICA_CA_PASSPHRASE"  # noqa: S105  # nosec B105  # the variable's name

_STILL_THERE = (
    "the key of an authority that issues no more is deleted where it lay in a file; one in a token still signs, for "
    "whoever has the PIN: delete it there, by the token's own tool"
)

ca_app = typer.Typer(help="The federation's authorities, which sign all its certificates.", no_args_is_help=True)

Force = Annotated[
    bool, typer.Option("--force", help="Even where silos, operators elsewhere or invitations are left behind.")
]


@ca_app.command()
def show(directory: Dir = None, as_json: AsJson = False) -> None:
    """Show which authorities there are, which one issues, and who does not know or still needs one."""
    reply = reach(directory).ask(lambda stub: stub.ListAuthorities(operator_pb2.ListAuthoritiesRequest()))
    if as_json:
        rows = [
            MessageToDict(row, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for row in reply.authorities
        ]
        print(json.dumps(rows, indent=2))
        return
    _print(reply)


@ca_app.command()
def rotate(directory: Dir = None) -> None:
    """Make a new authority and have everybody know it; it issues as soon as they do."""
    _change(directory, operator_pb2.ChangeAuthorityRequest(step="rotate"))


@ca_app.command()
def activate(directory: Dir = None, force: Force = False) -> None:
    """Let the successor issue now; refused while somebody does not know it."""
    _change(directory, operator_pb2.ChangeAuthorityRequest(step="activate", force=force))
    say(_STILL_THERE)


@ca_app.command()
def retire(directory: Dir = None, force: Force = False) -> None:
    """Trust the authority before no longer; refused while anybody's certificate or an invitation is of it."""
    _change(directory, operator_pb2.ChangeAuthorityRequest(step="retire", force=force))
    say(_STILL_THERE)


@ca_app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, PKCS#12.", show_default=False)],
    directory: Dir = None,
) -> None:
    """Write the authority that issues to a file under a passphrase, asked for or in $LORICA_CA_PASSPHRASE."""
    coordinator = load(directory)
    passphrase = _passphrase(confirm=True)
    enter_command(coordinator.folder, "ca export", file=str(target))
    export_authority(coordinator.keys.authorities, target, passphrase)
    say(f"the authority of {coordinator.federation} is in {target}: who has it and the passphrase has the federation")


@ca_app.command()
def request(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, PEM.", show_default=False)],
    directory: Dir = None,
) -> None:
    """Make a key and a certificate request for an authority that an institution's CA is to certify."""
    if target.exists():
        raise ConfigurationError(f"{target} is there already: choose a new file")
    coordinator = load(directory)
    enter_command(coordinator.folder, "ca request", file=str(target))
    files.replace(target, coordinator.keys.authorities.request())
    say(f"have {target} signed, then: coordinator ca import SIGNED.pem --chain CHAIN.pem")


@ca_app.command(name="import")
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The signed certificate; or an export, for a new machine.", show_default=False
        ),
    ],
    chain: Annotated[
        Path | None, typer.Option(help="PEM certificates above the signed one, up to the self-signed root.")
    ] = None,
    directory: Dir = None,
) -> None:
    """Take what an institution's CA signed as the successor; or an export as the authority of a folder without one."""
    if chain is not None:
        message = operator_pb2.ChangeAuthorityRequest(
            step="adopt", certificate_pem=_content(source), chain_pem=_content(chain)
        )
        _change(directory, message)
        return
    folder = own_folder(directory)
    federation = federation_name(Settings.read(folder.settings).federation)
    passphrase = _passphrase(confirm=False)
    if folder.identity_key.exists():  # who signs the log; without it nothing of this folder is trusted by anybody
        enter_command(folder, "ca import", file=str(source))
    import_authority(folder.keys, source, passphrase, federation)
    pin = Authorities.load(folder.keys).pin
    say(f"the authority of {federation} is in {folder.keys}, its pin is {pin}")


def _change(directory: Path | None, message: operator_pb2.ChangeAuthorityRequest) -> None:
    _print(reach(directory).ask(lambda stub: stub.ChangeAuthority(message)))


def _print(reply: operator_pb2.AuthoritiesReply) -> None:
    rows = []
    for row in reply.authorities:
        needed = [*row.dependent]
        if row.invitations_unix_s:
            needed.append(f"invitations until {instant(row.invitations_unix_s)}")
        waits = row.stage == "successor"
        unaware = ", ".join(row.unaware) if waits else ""
        rows.append((row.name, row.stage, instant(row.expires_unix_s), unaware, ", ".join(needed)))
    columns = ("authority", "stage", "expires", "not known to", "needed by")
    Page(columns=columns, rows=rows).show(terminal())


def _passphrase(*, confirm: bool) -> str:
    """From the environment, else asked for on the terminal; never an argument, which other users of the machine see."""
    if given := os.environ.get(PASSPHRASE):
        return given
    return str(typer.prompt("passphrase", hide_input=True, confirmation_prompt=confirm, err=True))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
