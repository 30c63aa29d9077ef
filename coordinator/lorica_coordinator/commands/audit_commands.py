"""`coordinator audit`: what happened here, and whether the log that says so is whole. Offline: nothing is asked of
anybody."""

from pathlib import Path
from typing import Annotated

import typer

from lorica_coordinator.commands.command_line import AsJson, Dir, load, own_folder
from lorica_coordinator.edges.check.audit_check import check_silos, silo_heads
from lorica_coordinator.settings import Settings
from lorica_security.host import files
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.on_disk.log_file import write_copy
from lorica_security.on_disk.log_place import LogPlace
from lorica_security.on_disk.reading import against, key_from_digits, read_log, shown, verdict

audit_app = typer.Typer(help="Look at the audit log, and check that it is whole.", no_args_is_help=True)

Log = Annotated[Path | None, typer.Option("--log", help="A copy of a coordinator's audit folder, elsewhere.")]
Key = Annotated[str, typer.Option("--key", help="With --log: the coordinator's identity key, 64 hexadecimal digits.")]


@audit_app.command()
def show(
    directory: Dir = None,
    log: Log = None,
    last: Annotated[int, typer.Option(min=0, help="Only the last entries; 0 for all.")] = 0,
    heads: Annotated[
        bool, typer.Option("--heads", help="Print what silos signed of their logs, for their `verify --receipts`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the entries of the log."""
    place = log or _own_log(directory)
    if heads:
        for of_silo in silo_heads(read_log(place)).values():
            for head in of_silo:
                print(head.line().decode(), end="")
        return
    for line in shown(place, last=last, as_json=as_json):
        print(line)


@audit_app.command()
def verify(
    directory: Dir = None,
    log: Log = None,
    key: Key = "",
    receipts: Annotated[
        Path | None,
        typer.Option("--receipts", help="What a silo holds of this log: from `silo-agent audit show --heads`."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every entry and every signature; exit with 5 naming the first entry that is wrong."""
    if log is None:
        coordinator = load(directory)
        place: Path | LogPlace = coordinator.audit().place
        writer = Identity(coordinator.federation, Role.COORDINATOR).uri
        keys = [coordinator.keys.identity.public_key()]
    else:
        place, writer, keys = log, "", [key_from_digits("--key", key)]
    reading = read_log(place, writer=writer, keys=keys)
    said = [*reading.summary(), f"identity key {public_key_bytes(keys[0]).hex()}", *check_silos(reading)]
    if receipts is not None:
        said.append(against(receipts, reading, keys))
    else:
        said.append(
            "not checked: whether who has the key wrote the log anew; a silo's `silo-agent audit show --heads`, "
            "given with --receipts, tells"
        )
    print(verdict(reading, said, as_json=as_json))


@audit_app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    directory: Dir = None,
) -> None:
    """Write the log, and the ledger of releases, to a folder: a copy to keep elsewhere, for `verify --log`, `restore`
    and `settle`."""
    coordinator = load(directory)
    place = coordinator.audit().place
    reading = read_log(
        place,
        writer=Identity(coordinator.federation, Role.COORDINATOR).uri,
        keys=[coordinator.keys.identity.public_key()],
    )
    released = coordinator.releases.kept.entries()
    with files.new_folder(target.absolute(), files.PRIVATE_FOLDER_MODE) as work:
        write_copy(place, work)
        if released:
            files.write_private(work / "ledger", b"".join(entry.line() for entry in released))
    beside = f", and {len(released)} of the ledger of releases" if released else ""
    print(f"{len(reading.entries)} entries of the audit log{beside} are in {target}")


def _own_log(directory: Path | None) -> LogPlace:
    """Also where keys are missing, or are encrypted."""
    from lorica_coordinator.edges.database.open_store import log_of

    folder = own_folder(directory)
    return log_of(Settings.read(folder.settings), folder.settings, folder.audit)
