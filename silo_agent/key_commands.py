"""`silo-agent keys`: the private keys on this silo's disk."""

import os
from typing import Annotated

import typer

from silo_agent.command_line import Dir
from silo_agent.edges.silo_folder import silo_folder

key_app = typer.Typer(help="The private keys on this disk.", no_args_is_help=True)


@key_app.callback()
def keys() -> None:
    """The private keys on this disk."""


@key_app.command()
def protect(
    directory: Dir = None,
    clear: Annotated[bool, typer.Option("--clear", help="Leave the keys in clear instead.")] = False,
) -> None:
    """Encrypt the private keys with the passphrase of LORICA_NEW_KEY_PASSPHRASE[_FILE], whatever they are encrypted with now."""
    from security.pki.key_file import protect_all
    from security.process_lock import ProcessLock

    folder = silo_folder(directory)
    folder.require_enrolled()
    with ProcessLock(folder.lock, "silo agent"):
        print(
            protect_all(
                [path for path in (*folder.private_keys, folder.next_identity_key) if path.exists()],
                os.environ,
                clear=clear,
            )
        )
