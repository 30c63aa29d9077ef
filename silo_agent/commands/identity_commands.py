"""`silo-agent identity`: this silo's identity key, which others pin, and its successor."""

import json
from typing import TYPE_CHECKING

import typer

from lorica_security.errors import LoricaError
from lorica_security.host.software_version import software_version
from silo_agent.commands.command_line import Dir, Json, credentials_of
from silo_agent.edges.disk.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from silo_agent.edges.keys.key_store import SiloCredentials

identity_app = typer.Typer(help="The identity key of this silo, which other silos pin.", no_args_is_help=True)


@identity_app.command()
def show(directory: Dir = None, as_json: Json = False) -> None:
    """Print the present key and those before it, each with the statement by which it named the next."""
    from lorica_security.identity.identity_key import public_key_from_bytes
    from lorica_security.identity.key_text import key_text
    from silo_agent.edges.memory.identity_succession import predecessors

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    present = key_text(credentials.identity, credentials.identity_key.public_key())
    rows = [
        {
            "identity_key": key_text(credentials.identity, public_key_from_bytes(one.key)),
            "until": one.until.isoformat(timespec="seconds"),
            "succession": one.statement.hex(),
        }
        for one in predecessors(folder, credentials)
    ]
    if as_json:
        print(json.dumps({"silo": credentials.silo, "identity_key": present, "predecessors": rows}, indent=1))
        return
    for row in rows:
        print(f"{credentials.silo} {row['identity_key']} until {row['until']}, succession {row['succession']}")
    print(f"{credentials.silo} {present}")


@identity_app.command()
def rotate(directory: Dir = None) -> None:
    """Make a new identity key, named by the present one. Silos that pinned this one follow by themselves."""
    import asyncio

    from lorica_security.host.process_lock import ProcessLock
    from lorica_security.identity.key_text import key_text
    from silo_agent.edges.memory.identity_succession import predecessors

    def unreachable(problem: LoricaError, _seconds: float) -> None:
        raise problem

    folder = silo_folder(directory)
    folder.require_enrolled()
    folder.make()
    with ProcessLock(folder.lock, "silo agent"):
        after = asyncio.run(_succeed(folder, credentials_of(folder), unreachable))
    newest = predecessors(folder, after)[-1]
    print(f"{after.silo} {key_text(after.identity, after.identity_key.public_key())}")
    print(f"named by the key before with succession {newest.statement.hex()}")
    print("silos that pinned the key before follow with their next masked round; start the agent again")


def finish_rotation(folder: SiloFolder, on_trouble: "Callable[[str], None]") -> None:
    """Finish a rotation of the identity key that was cut off, if one was; while the coordinator is away `on_trouble`
    hears of each try.

    The caller holds the folder's lock. Raises what the coordinator says.
    """
    import asyncio

    from lorica_security.host.files import is_there

    def unreachable(problem: LoricaError, seconds: float) -> None:
        on_trouble(f"a rotation of the identity key is to be finished first ({problem}), next try in {seconds:.1f} s")

    if is_there(folder.next_identity_key):
        asyncio.run(_succeed(folder, credentials_of(folder), unreachable))


async def _succeed(
    folder: SiloFolder, credentials: "SiloCredentials", unreachable: "Callable[[LoricaError, float], None]"
) -> "SiloCredentials":
    from lorica_security.audit.entry import Event
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.edges.disk.model_cache import ModelCache
    from silo_agent.edges.memory.identity_succession import predecessors, succeed
    from silo_agent.edges.wire.channel import mutual_channel
    from silo_agent.edges.wire.grpc_client import GrpcCoordinator

    def tell(after: "SiloCredentials") -> None:
        newest = predecessors(folder, after)[-1]
        with audited(folder, after) as log:
            log.append(Event.IDENTITY_SUCCEEDED, predecessor=newest.key.hex(), identity_key=newest.successor.hex())

    coordinator = GrpcCoordinator(
        channel=mutual_channel(credentials),
        credentials=credentials,
        models=ModelCache(folder.models, kept=1),
        agent_version=software_version(),
        unreachable=unreachable,
    )
    try:
        return await succeed(folder, credentials, coordinator.succeed_identity, tell)
    finally:
        await coordinator.close()
