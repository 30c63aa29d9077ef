"""`silo-agent audit`: what this silo did, sent and refused, and whether the log that says so is whole. Offline."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silo_agent.commands.command_line import Dir, Json, credentials_of
from silo_agent.edges.disk.silo_folder import silo_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

audit_app = typer.Typer(help="What this silo did, sent and refused, by its audit log.", no_args_is_help=True)

Log = Annotated[Path | None, typer.Option("--log", help="A copy of a silo's audit folder, elsewhere.")]


@audit_app.command()
def show(
    directory: Dir = None,
    log: Log = None,
    last: Annotated[int, typer.Option(min=0, help="Only the last entries; 0 for all.")] = 0,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads", help="Print what the coordinator signed of its log, for `coordinator audit verify --receipts`."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the entries of the log."""
    from lorica_security.on_disk.reading import read_log, shown
    from silo_agent.edges.accounts.audit_check import receipts_in

    folder = log or silo_folder(directory).audit
    if heads:
        for _, receipt in receipts_in(read_log(folder), None):
            print(receipt.head.line().decode(), end="")
        return
    for line in shown(folder, last=last, as_json=as_json):
        print(line)


@audit_app.command()
def verify(
    directory: Dir = None,
    log: Log = None,
    key: Annotated[str, typer.Option("--key", help="With --log: the silo's identity key, 64 hexadecimal digits.")] = "",
    coordinator_key: Annotated[
        str,
        typer.Option(
            "--coordinator-key",
            help="With --log: the coordinator's identity key; without, its receipts are not checked.",
        ),
    ] = "",
    receipts: Annotated[
        Path | None,
        typer.Option(
            "--receipts", help="What the coordinator holds of this log: from `coordinator audit show --heads`."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every entry, every signature and the coordinator's receipts; exit with 5 naming the first entry that is
    wrong."""
    from lorica_security.on_disk.reading import against, key_from_digits, read_log, verdict
    from silo_agent.edges.accounts.audit_check import check_receipts
    from silo_agent.edges.memory.identity_succession import own_keys

    coordinator: Ed25519PublicKey | None
    if log is None:
        folder = silo_folder(directory)
        credentials = credentials_of(folder)
        at, writer = folder.audit, credentials.identity.uri
        keys, coordinator = own_keys(folder, credentials), credentials.coordinator_key
    else:
        at, writer, keys = log, "", [key_from_digits("--key", key)]
        coordinator = key_from_digits("--coordinator-key", coordinator_key) if coordinator_key else None
    reading = read_log(at, writer=writer, keys=keys)
    said = reading.summary()
    if coordinator is not None:
        said += check_receipts(reading, coordinator)
    else:
        said.append("not checked: the coordinator's receipts; --coordinator-key says by which key")
    if receipts is not None:
        said.append(against(receipts, reading, keys))
    else:
        said.append(
            "not checked: whether who has this silo's key wrote anew what came after the last receipt; the operator's "
            "`coordinator audit show --heads`, given with --receipts, tells"
        )
    print(verdict(reading, said, as_json=as_json))


@audit_app.command()
def report(
    directory: Dir = None,
    log: Log = None,
    since: Annotated[str, typer.Option("--since", help="From this day on, UTC: YYYY-MM-DD.")] = "",
    as_json: Json = False,
) -> None:
    """Print one page: what left this silo in each round, under which promise, and what was refused."""
    from lorica_security.errors import ConfigurationError
    from lorica_security.on_disk.reading import read_log
    from silo_agent.edges.accounts.audit_report import page, report_of
    from silo_agent.edges.memory.identity_succession import own_keys

    try:
        begin = int(datetime.strptime(since, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) if since else 0
    except ValueError as error:
        raise ConfigurationError(f"--since {since!r} is no day: write it as 2026-11-30") from error
    if log is None:
        folder = silo_folder(directory)
        credentials = credentials_of(folder)
        keys = own_keys(folder, credentials)
        reading = read_log(
            folder.audit, writer=credentials.identity.uri, keys=keys
        )  # a report of a false log is worth nothing
    else:
        reading = read_log(log)
    made = report_of(reading.entries, since=begin)
    silo = reading.writer.rpartition("/")[2]
    print(json.dumps({"silo": silo, **made.json()}, indent=1) if as_json else page(made, silo))


@audit_app.command()
def examine(
    file: Annotated[Path, typer.Argument(help="A proof from the folder `proofs` of this silo, or of another one.")],
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Make the chunk of a proof again: does it show that the coordinator handed out a false model? Exit with 5 where it
    shows nothing, with 11 where the file is no proof."""
    from silo_agent.edges.masks.model_checking import examine as examine_proof

    folder = silo_folder(directory)
    found = examine_proof(folder, credentials_of(folder), file)
    attempt, model = found.evidence.attempt, found.evidence.after.model.hex()
    if as_json:
        facts = {"plan": attempt.plan.hex(), "round": attempt.round, "attempt": attempt.number, "model": model}
        print(json.dumps({**facts, "chunk": found.chunk, "part": found.part, "coordinator_signed": True}, indent=1))
        return
    print(f"proof of a false model: the coordinator signed that {attempt} made model {model}")
    print(f"chunk {found.chunk} of its {found.part} is not what the sum and the plan's step make")
