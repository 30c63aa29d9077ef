"""`silo-agent keys`: the private keys on this silo's disk."""

import os
import time
from typing import Annotated

import typer

from silo_agent.commands.command_line import Dir
from silo_agent.edges.disk.silo_folder import silo_folder

key_app = typer.Typer(help="The private keys on this disk.", no_args_is_help=True)


@key_app.callback()
def keys() -> None:
    """The private keys on this disk."""


@key_app.command()
def protect(
    directory: Dir = None,
    clear: Annotated[bool, typer.Option("--clear", help="Leave the keys in clear instead.")] = False,
) -> None:
    """Encrypt the private keys with the passphrase of LORICA_NEW_KEY_PASSPHRASE[_FILE], whatever they are encrypted
    with now."""
    from lorica_security.audit.entry import Event
    from lorica_security.host.key_file import protect_all, read_key_of_either, settle
    from lorica_security.host.process_lock import ProcessLock
    from lorica_security.on_disk.log_file import AuditLog
    from lorica_security.pkcs11_keys.reference import identity_key_of
    from silo_agent.edges.keys.key_store import enrolled_as

    folder = silo_folder(directory)
    folder.require_enrolled()

    def tell() -> None:
        key = identity_key_of(read_key_of_either(folder.identity_key, os.environ), folder.root)
        log = AuditLog(folder.audit, writer=enrolled_as(folder).uri, key=key, clock=time.time)
        log.append(Event.KEYS_PROTECTED, clear="yes" if clear else "no")
        log.seal()

    settle(folder.root, folder.lock, "silo agent")
    with ProcessLock(folder.lock, "silo agent"):
        keys = [path for path in (*folder.private_keys, folder.next_identity_key) if path.exists()]
        print(protect_all(keys, os.environ, clear=clear, tell=tell))
