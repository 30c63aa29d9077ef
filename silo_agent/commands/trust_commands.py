"""`silo-agent trust`: whose identity keys this silo has pinned, and its own, to be compared by telephone."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from silo_agent.commands.command_line import Dir, Json, credentials_of, settled_credentials_of
from silo_agent.edges.disk.private_record import AS_HELD
from silo_agent.edges.disk.silo_folder import silo_folder

if TYPE_CHECKING:
    from pathlib import Path

    from silo_agent.edges.keys.key_store import SiloCredentials
    from silo_agent.edges.memory.trust_store import TrustStore

trust_app = typer.Typer(
    help="The silos that this one masks its updates with, by their identity keys.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The other silo's name.", show_default=False)]
HOW = {"added": "added by people", "first use": "taken on first use"}


@trust_app.command()
def own(directory: Dir = None, as_json: Json = False) -> None:
    """Print this silo's own name and identity key, as `trust add` takes them at the others'."""
    from lorica_security.identity.key_text import key_text

    credentials = credentials_of(silo_folder(directory))
    key = key_text(credentials.identity, credentials.identity_key.public_key())
    if as_json:
        print(json.dumps({"federation": credentials.federation, "silo": credentials.silo, "identity_key": key}))
        return
    print(f"{credentials.silo} {key}")


@trust_app.command(name="list")
def list_peers(directory: Dir = None, as_json: Json = False) -> None:
    """Name the pinned silos, each with its key and how it was pinned."""
    from lorica_security.identity.key_text import key_text
    from silo_agent.edges.memory.trust_store import silo_identity

    credentials, store = _store(directory)
    rows = []
    for peer in store.peers():
        identity = silo_identity(credentials.federation, peer.silo)
        rows.append(
            {
                "silo": peer.silo,
                "identity_key": key_text(identity, peer.key),
                "how": peer.how.value,
                "since": peer.since.isoformat(timespec="seconds"),
                "predecessor": key_text(identity, peer.predecessor) if peer.predecessor else None,
            }
        )
    removed = store.removed()
    if as_json:
        print(json.dumps({"pinned": rows, "removed": removed}, indent=1))
        return
    for row in rows:
        succeeded = ", succeeded the key before" if row["predecessor"] else ""
        print(f"{row['silo']} {row['identity_key']} {HOW[str(row['how'])]}{succeeded}, {row['since']}")
    if removed:
        print(f"removed, and not taken on first use: {', '.join(removed)}")
    if not rows:
        print("no silo is pinned: silo-agent trust add NAME KEY, with what silo-agent trust own prints at theirs")


@trust_app.command()
def add(
    name: Name,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="What `trust own` prints at that silo.", show_default=False)
    ],
    succession: Annotated[
        str,
        typer.Option(metavar="STATEMENT", help="By which the key that is pinned now names this one as its successor."),
    ] = "",
    directory: Dir = None,
) -> None:
    """Pin another silo's identity key. Compare it by telephone first: the coordinator could make up silos."""
    from lorica_security.audit.entry import Event
    from lorica_security.identifiers import silo_name
    from lorica_security.identity.identity_key import public_key_bytes
    from lorica_security.identity.key_text import key_from_text
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.edges.memory.trust_store import Taken, silo_identity

    silo = silo_name(name)
    folder = silo_folder(directory)
    credentials, store = _store(directory)
    public_key = key_from_text(silo_identity(credentials.federation, silo), key)
    with audited(folder, credentials) as log:
        taken = store.add(silo, public_key, succession=_statement(succession) if succession else None)
        log.append(Event.PIN_ADDED, silo=silo, key=public_key_bytes(public_key).hex(), how=taken.value)
    match taken:
        case Taken.PINNED:
            print(f"silo {silo} is pinned")
        case Taken.CONFIRMED:
            print(f"silo {silo} is pinned: its key was taken on first use and is confirmed now")
        case Taken.SUCCEEDED:
            print(f"silo {silo} is pinned with its new key, which the key before signed")
        case Taken.KNOWN:
            print(f"silo {silo} was pinned with this key already")


@trust_app.command()
def remove(name: Name, directory: Dir = None) -> None:
    """Trust another silo's key no longer; rounds with masks that it is in go on without this silo."""
    from lorica_security.audit.entry import Event
    from lorica_security.identifiers import silo_name
    from silo_agent.edges.accounts.audit_log import audited

    silo = silo_name(name)
    credentials, store = _store(directory)
    with audited(silo_folder(directory), credentials) as log:
        store.remove(silo)
        log.append(Event.PIN_REMOVED, silo=silo)
    print(f"silo {silo} is no longer pinned, and is not taken on first use; silo-agent trust add pins it again")


@trust_app.command(name="reset-memory")
def reset_memory(
    although: Annotated[
        bool,
        typer.Option(
            "--although-a-delta-may-be-in-two-sums",
            help="Needed: a coordinator that knows of the loss may ask for a sum that this silo has helped to before.",
        ),
    ] = False,
    groups_as_they_are: Annotated[
        bool,
        typer.Option(
            AS_HELD,
            help="Take the release groups that are here for the newest, where a larger number is noted that people "
            "know to be wrong.",
        ),
    ] = False,
    directory: Dir = None,
) -> None:
    """Let this silo mask again after masking/memory, lineages.json, release-groups.json or peers.json was lost or came
    from a backup.

    Every round that is known of, by any of them, counts as answered. What all have forgotten may be answered once more.
    Stop the agent first.
    """
    from lorica_security.audit.entry import Event
    from lorica_security.errors import ConfigurationError, LoricaError, StateError
    from lorica_security.host.process_lock import ProcessLock
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.edges.memory.masking_journal import masking_journal

    folder = silo_folder(directory)
    credentials = settled_credentials_of(folder)
    journal = masking_journal(folder, credentials)
    lost: LoricaError | None = journal.problem()
    if lost is None and groups_as_they_are and journal.groups_short():
        lost = StateError("older release groups are here than are noted")
    if lost is None:
        raise StateError("the memory of masked rounds is whole: nothing was changed")
    doubts = journal.doubts()
    if not although:
        raise ConfigurationError(
            f"{'; '.join((str(lost), *doubts))}; with --although-a-delta-may-be-in-two-sums this silo goes on with "
            "what is left: nothing was changed"
        )
    with ProcessLock(folder.lock, "silo agent"), audited(folder, credentials) as log:
        memory = journal.reset(groups_as_held=groups_as_they_are)
        log.append(Event.MEMORY_RESET, detail="; ".join((str(lost), *doubts)))
    for doubt in doubts:
        print(doubt)
    print("pinned from now on:")
    list_peers(directory)
    print(
        f"this silo masks again, in later rounds than the last known of {len(memory.plans)} plans; look at "
        "`silo-agent groups show` and `silo-agent trust list`, then start the agent"
    )


def _store(directory: "Path | None") -> "tuple[SiloCredentials, TrustStore]":
    from silo_agent.edges.memory.trust_store import trust_store

    folder = silo_folder(directory)
    credentials = settled_credentials_of(folder)
    return credentials, trust_store(folder, credentials)


def _statement(text: str) -> bytes:
    from lorica_security.errors import ConfigurationError
    from lorica_security.identity.identity_key import SIGNATURE_BYTES

    try:
        statement = bytes.fromhex(text)
    except ValueError:
        statement = b""
    if len(statement) != SIGNATURE_BYTES:
        raise ConfigurationError(
            f"succession statement {text[:100]!r} is not {2 * SIGNATURE_BYTES} digits 0-9 and a-f: copy it again"
        )
    return statement
