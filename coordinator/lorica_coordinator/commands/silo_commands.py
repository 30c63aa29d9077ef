"""`coordinator invite` and `revoke`: who is let in, and who is shut out."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from lorica_coordinator.commands.command_line import (
    Dir,
    OnTheHost,
    reach,
    say,
    whole_seconds,
)
from lorica_coordinator.commands.completion import silo_names
from lorica_coordinator.edges.check.told_address import loopback_alone, warning
from lorica_coordinator.service.members.enrolment import MAX_VALID_SECONDS
from lorica_security.console.terminal import terminal
from lorica_security.identifiers import Role
from lorica_security.identity.enrolment_token import decode
from silo_wire.v1 import operator_pb2


def invite(
    silo: Annotated[
        str,
        typer.Argument(help="Name of the silo: a-z, 0-9 and '-'.", show_default=False, autocompletion=silo_names),
    ],
    hours: Annotated[
        float | None, typer.Option(help="How long the token can be used; default from federation.toml.")
    ] = None,
    directory: Dir = None,
) -> None:
    """Print a one-time enrolment token for a silo, on stdout alone."""
    seconds = whole_seconds(hours, unit_s=3600, most=MAX_VALID_SECONDS, of_what="an invitation")
    wanted = operator_pb2.InviteRequest(silo=silo, valid_seconds=seconds)
    reached = reach(directory)
    reply = reached.ask(lambda stub: stub.Invite(wanted))
    if not (isinstance(reached, OnTheHost) and loopback_alone(reached.coordinator.settings)):
        told = decode(reply.token)
        warn_of(told.host, told.port)
    expires = datetime.fromtimestamp(reply.expires_unix_s, UTC).isoformat(timespec="minutes")
    terminal(stderr=True).print(f"for silo {silo}, once, until {expires}: silo-agent enroll TOKEN", soft_wrap=True)
    print(reply.token)


def revoke(
    name: Annotated[
        str,
        typer.Argument(help="Of the silo, operator or viewer.", show_default=False, autocompletion=silo_names),
    ],
    role: Annotated[str, typer.Option(help="silo, operator or viewer.")] = Role.SILO.value,
    directory: Dir = None,
) -> None:
    """Shut somebody out at once: open calls are cut, certificates refused. A silo comes back by a new invitation."""
    reply = reach(directory).ask(lambda stub: stub.Revoke(operator_pb2.RevokeRequest(role=role, name=name)))
    say(reply.detail)


def warn_of(host: str, port: int) -> None:
    """On stderr: a token goes to stdout alone."""
    if told := warning(host, port):
        terminal(stderr=True).print(f"warning: {told}", soft_wrap=True)
