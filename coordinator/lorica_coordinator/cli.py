"""The `coordinator` command: a table of its subcommands. A new one is a function in
coordinator/lorica_coordinator/commands and a row here."""

import sys
from typing import Annotated

import typer

from lorica_security.console.command_table import Row, commands_of
from lorica_security.console.terminal import terminal
from lorica_security.errors import LoricaError, exit_code
from lorica_security.host.program import begin_program
from lorica_security.host.software_version import software_version
from silo_wire.tls import leave_tls_1_3_alone

_IN = "lorica_coordinator.commands."
COMMANDS = commands_of(
    Row(
        "init",
        _IN + "host_commands:init",
        "Make a coordinator: its authority, its keys, federation.toml, an empty state.",
    ),
    Row("invite", _IN + "silo_commands:invite", "Print a one-time enrolment token for a silo, on stdout alone."),
    Row("serve", _IN + "host_commands:serve_command", "Run the coordinator until it is stopped."),
    Row(
        "revoke",
        _IN + "silo_commands:revoke",
        "Shut somebody out at once: open calls are cut, certificates refused. A silo comes back by a new invitation.",
    ),
    Row("status", _IN + "look_commands:status", "Show where the plan and each silo stand."),
    Row(
        "watch",
        _IN + "watch_command:watch",
        "Watch the federation live, also over restarts of the coordinator. Ctrl-C ends it, with exit code 0.",
    ),
    Row(
        "check",
        _IN + "host_commands:check",
        "Look at everything that could keep this federation from working; exit with 3 if something does.",
    ),
    Row(
        "rounds", _IN + "look_commands:rounds", "Show each round: who took part, loss reduction, weight, share, scores."
    ),
    Row(
        "export",
        _IN + "look_commands:export",
        "Write the plan's model as a Hugging Face folder that from_pretrained loads.",
    ),
    Row(
        "privacy",
        _IN + "look_commands:privacy",
        "Show what was released under silo-level privacy with noise of the coordinator's, and what it comes to.",
    ),
    Row(
        "backup",
        _IN + "upkeep_commands:backup",
        "Write the coordinator's folder to one file, encrypted with the passphrase of "
        "LORICA_BACKUP_PASSPHRASE[_FILE]; also while it runs.",
    ),
    Row(
        "restore",
        _IN + "upkeep_commands:restore",
        "Make a coordinator's folder of a backup. Its plan is stopped; silos go on once it is served and started.",
    ),
    Row(
        "settle",
        _IN + "upkeep_commands:settle",
        "After pg_restore, before serve: shut out again who was revoked since, void invitations, stop the plan, close "
        "those that released sums.",
    ),
    Row(
        "upgrade",
        _IN + "upkeep_commands:upgrade",
        "Bring the state to the tables of this release; a copy of the database is made first. The coordinator is "
        "stopped meanwhile.",
    ),
    Row(
        "gc",
        _IN + "upkeep_commands:gc",
        "Delete what the coordinator needs no more, as [retention] of federation.toml says; also while it runs.",
    ),
    Row("plan", _IN + "plan_commands:plan_app", "Make, look at, start and stop plans."),
    Row("access", _IN + "access_commands:access_app", "Operators and viewers on other hosts."),
    Row(
        "groups",
        _IN + "groups_commands:groups_app",
        "Release groups: which silos enter a masked sum together or not at all.",
    ),
    Row("ca", _IN + "authority_commands:ca_app", "The federation's authorities, which sign all its certificates."),
    Row("audit", _IN + "audit_commands:audit_app", "Look at the audit log, and check that it is whole."),
    Row("keys", _IN + "host_commands:keys_app", "The private keys on this disk."),
)

app = typer.Typer(
    cls=COMMANDS,
    help="Run the coordinator of a federation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name [sections] of files
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"coordinator {software_version()}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run the coordinator of a federation."""


def main() -> None:
    """Entry point: an error of Lorica is one line on stderr and its exit code (ops/docs/exit-codes.md)."""
    begin_program()
    leave_tls_1_3_alone()
    try:
        app()
    except LoricaError as error:
        terminal(stderr=True).print(f"error: {error}", soft_wrap=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
