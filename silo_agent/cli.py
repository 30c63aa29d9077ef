"""The `silo-agent` command: a table of its subcommands. A new one is a function in silo_agent/commands and a row here.

Every LoricaError ends as one line on stderr and the exit code of lorica_security.errors.EXIT_CODES.
"""

import sys
from typing import Annotated

import typer

from lorica_security.console.command_table import Row, commands_of
from lorica_security.errors import EXIT_CODES, LoricaError
from lorica_security.host.program import begin_program
from lorica_security.host.software_version import software_version
from silo_wire.tls import leave_tls_1_3_alone

_IN = "silo_agent.commands."
COMMANDS = commands_of(
    Row(
        "enroll",
        _IN + "agent_commands:enroll",
        "Make this silo's keys, prove the token, and store the certificate. Private keys never leave the folder.",
    ),
    Row(
        "start",
        _IN + "agent_commands:start",
        "Run the agent until SIGTERM or Ctrl-C. SIGHUP makes it read `pause` and `resume` again.",
    ),
    Row(
        "pause",
        _IN + "agent_commands:pause",
        "Take no new round; the one that is running is finished. Lasts until `resume`, also over restarts.",
    ),
    Row("resume", _IN + "agent_commands:resume", "Take rounds again."),
    Row("status", _IN + "agent_commands:status", "What this silo is, what it does, and how its last rounds ended."),
    Row(
        "check",
        _IN + "silo_commands:check",
        "Look at everything that could keep this silo from taking part; exit with 3 if something does.",
    ),
    Row(
        "ask",
        _IN + "silo_commands:ask",
        "Answer with the best of the newest global model and this silo's own: its SQL, and what that gives on this "
        "silo's database, in the sandbox; or its text, where the plan's task is another.",
    ),
    Row(
        "personal",
        _IN + "silo_commands:personal_app",
        "Models of this silo's own, beside the global one; nothing of them leaves.",
    ),
    Row(
        "schema",
        _IN + "silo_commands:schema",
        "Print the schema.json of a live database: every table that its role may read. What is left out is said on "
        "stderr.",
    ),
    Row(
        "import",
        _IN + "import_commands:import_data",
        "Make a data folder of data as you have it: CSV, TSV, JSON, Parquet, Hugging Face data sets, Spider, BIRD.",
    ),
    Row(
        "tasks",
        _IN + "silo_commands:tasks",
        "Tasks that this silo's people installed, with version and digest as a plan names them.",
    ),
    Row("identity", _IN + "identity_commands:identity_app", "The identity key of this silo, which other silos pin."),
    Row("audit", _IN + "audit_commands:audit_app", "What this silo did, sent and refused, by its audit log."),
    Row("keys", _IN + "key_commands:key_app", "The private keys on this disk."),
    Row("plan", _IN + "plan_commands:plan_app", "Look at the plans that the coordinator offers, and approve them."),
    Row(
        "groups",
        _IN + "groups_commands:groups_app",
        "Release groups: the silos that this one is summed with, together or not at all.",
    ),
    Row(
        "privacy",
        _IN + "privacy_commands:privacy_app",
        "What this silo has released of its records, and what more it would cost.",
    ),
    Row(
        "trust",
        _IN + "trust_commands:trust_app",
        "The silos that this one masks its updates with, by their identity keys.",
    ),
)

app = typer.Typer(
    cls=COMMANDS,
    help="Run one silo of a federation: its data and its private keys stay here.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name [sections] of files
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"silo-agent {software_version()}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run one silo of a federation: its data and its private keys stay here."""


def main() -> None:
    begin_program()
    leave_tls_1_3_alone()
    try:
        app(prog_name="silo-agent")
    except LoricaError as error:
        print(f"silo-agent: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES))


if __name__ == "__main__":
    main()
