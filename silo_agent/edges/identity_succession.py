"""How this silo's identity key is succeeded by another one, so that a kill at any instant leaves one way to go.

    1. identity.next            the new key is durable before anybody hears of it
    2. the coordinator          takes it, at the old key's word and the new one's; it acknowledges the same again
    3. predecessors.json        how the old key named the new one, for whoever checks old signatures
    4. what is sealed           is sealed by the new key: the memory of masked rounds, release groups, accepted models, approvals
    5. identity.key             is replaced by the new key
    6. identity.next            is deleted

While identity.next is there no agent starts: before step 2 the old key would still do, after it only the new one, and this
silo cannot tell which it is. The same command again finishes what was begun.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AwareDatetime, Field

from security.errors import IntegrityError, StateError
from security.files import erase, is_there, read_private, was_erased, write_private
from security.pki.identity_key import (
    identity_key_from_pem,
    identity_key_to_pem,
    new_identity_key,
    public_key_bytes,
    public_key_from_bytes,
)
from security.pki.key_file import read_key, write_key
from security.pki.seal import Seal
from security.pki.succession import Succession, possession_statement, succession_statement
from security.secure_aggregation.silo_machine import OpenAttempt
from silo_agent.edges.key_store import SiloCredentials
from silo_agent.edges.masking_journal import masking_journal
from silo_agent.edges.private_record import PrivateRecord
from silo_agent.edges.silo_folder import SiloFolder
from silo_wire.strict_toml import Section


def own_keys(folder: SiloFolder, credentials: SiloCredentials) -> list[Ed25519PublicKey]:
    """The present identity key, and those before it, oldest first: what this silo ever signed with."""
    before = [public_key_from_bytes(one.key) for one in predecessors(folder)]
    return [*before, credentials.identity_key.public_key()]


Send = Callable[[Succession, bytes], Awaitable[None]]
"""Has the coordinator take a succession, with the successor's proof that it is at hand."""


class _Line(Section):
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    successor: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    statement: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    until: AwareDatetime


class _Predecessors(Section):
    version: Literal[1] = 1
    keys: list[_Line] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """A key that this silo signed with `until` it named its successor by `statement`; keys are raw bytes."""

    key: bytes
    successor: bytes
    statement: bytes
    until: datetime


def predecessors(folder: SiloFolder) -> tuple[Predecessor, ...]:
    """The identity keys of this silo before the present one, oldest first."""
    return tuple(
        Predecessor(
            key=bytes.fromhex(line.key),
            successor=bytes.fromhex(line.successor),
            statement=bytes.fromhex(line.statement),
            until=line.until,
        )
        for line in _record(folder).read().keys
    )


def require_settled(folder: SiloFolder) -> None:
    """Raise StateError while a succession is not finished; deletes what a finished one left."""
    if not is_there(folder.next_identity_key):
        return
    if _is_finished(folder):
        erase(folder.next_identity_key)
        return
    raise StateError(
        f"{folder.next_identity_key} is there: a rotation of the identity key was begun and not finished; run "
        "`silo-agent identity rotate` again"
    )


async def succeed(
    folder: SiloFolder,
    credentials: SiloCredentials,
    send: Send,
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> SiloCredentials:
    """Begin a succession, or finish the one that was begun; the credentials after it. The caller holds the folder's lock.

    Raises StateError while an attempt of secure aggregation is open here, and what `send` raises; then the old key is
    still this silo's, and the new one waits for another try.
    """
    _require_no_attempt(folder, credentials)
    if is_there(folder.next_identity_key) and _is_finished(folder):  # killed within the last step
        erase(folder.next_identity_key)
        return credentials
    old, new = credentials.identity_key, _next_key(folder)
    identity = credentials.identity
    statement = succession_statement(old, identity=identity, new_key=new.public_key())
    succession = Succession(predecessor=old.public_key(), successor=new.public_key(), statement=statement)
    await send(succession, possession_statement(new, identity=identity, old_key=old.public_key()))
    _remember(folder, succession, now())
    seal_anew(folder, Seal(old), Seal(new))
    write_key(folder.identity_key, identity_key_to_pem(new), os.environ)
    erase(folder.next_identity_key)
    return replace(credentials, identity_key=new)


def seal_anew(folder: SiloFolder, present: Seal, successor: Seal) -> None:
    """What has the present seal gets its successor's. What has that already, or nobody's, stays as it is."""
    for path in folder.sealed:
        if is_there(path):
            try:
                content = present.opened(path.name, read_private(path))
            except IntegrityError:
                continue
            write_private(path, successor.sealed(path.name, content))


def _is_finished(folder: SiloFolder) -> bool:
    """Whether the successor that is there is the present key, or was overwritten already."""
    if was_erased(folder.next_identity_key):
        return True
    return read_key(folder.next_identity_key, os.environ) == read_key(folder.identity_key, os.environ)


def _next_key(folder: SiloFolder) -> Ed25519PrivateKey:
    if is_there(folder.next_identity_key):
        return identity_key_from_pem(read_key(folder.next_identity_key, os.environ))
    key = new_identity_key()
    write_key(folder.next_identity_key, identity_key_to_pem(key), os.environ)
    return key


def _remember(folder: SiloFolder, succession: Succession, at: datetime) -> None:
    line = _Line(
        key=public_key_bytes(succession.predecessor).hex(),
        successor=public_key_bytes(succession.successor).hex(),
        statement=succession.statement.hex(),
        until=at,
    )

    def edit(content: _Predecessors) -> _Predecessors:
        if any(known.statement == line.statement for known in content.keys):
            return content
        return content.model_copy(update={"keys": [*content.keys, line]})

    _record(folder).change(edit)


def _record(folder: SiloFolder) -> PrivateRecord[_Predecessors]:
    return PrivateRecord(
        folder.predecessors, _Predecessors, check=lambda content: None, remedy="restore it from backup"
    )


def _require_no_attempt(folder: SiloFolder, credentials: SiloCredentials) -> None:
    events = masking_journal(folder, credentials).events()
    for event in events:
        if isinstance(event, OpenAttempt):
            event.root.erase()
    if events:
        raise StateError(
            "secure aggregation is under way here, and knows this silo by its present identity key: run `silo-agent start` "
            "until the round has been summed, stop it, and try again"
        )
