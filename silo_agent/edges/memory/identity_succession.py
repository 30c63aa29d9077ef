"""How this silo's identity key is succeeded by another one, so that a kill at any instant leaves one way to go.

    1. identity.next            the new key is durable before anybody hears of it
    2. the coordinator          takes it, at the old key's word and the new one's; it acknowledges the same again
    3. predecessors.json        how the old key named the new one, for whoever checks old signatures
    4. what is sealed           is sealed by the new key: all of `SiloFolder.sealed`
    5. identity.key             is replaced by the new key
    6. the audit log            says so
    7. identity.next            is deleted

While identity.next is there nothing is done under either key: before step 2 the old one would still do, after it only
the new one, and this silo cannot tell which it is. The agent finishes what was begun as it starts, and so does the same
command again.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AwareDatetime, Field

from lorica_security.console.strict_toml import Section
from lorica_security.errors import ConfigurationError, IntegrityError, StateError
from lorica_security.host.files import erase, is_there, read_private, write_private
from lorica_security.host.key_file import read_key, write_key
from lorica_security.identifiers import Identity
from lorica_security.identity.identity_key import (
    identity_key_from_pem,
    identity_key_to_pem,
    new_identity_key,
    public_key_bytes,
    public_key_from_bytes,
)
from lorica_security.identity.seal import Seal
from lorica_security.identity.succession import Succession, check_succession, possession_statement, succession_statement
from lorica_security.pkcs11_keys.reference import in_token
from lorica_security.secure_aggregation.silo.events import OpenAttempt
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, check_settled, succession_is_finished
from silo_agent.edges.memory.masking_journal import masking_journal


def own_keys(folder: SiloFolder, credentials: SiloCredentials) -> list[Ed25519PublicKey]:
    """The present identity key, and those before it, oldest first: what this silo ever signed with."""
    before = [public_key_from_bytes(one.key) for one in predecessors(folder, credentials)]
    return [*before, credentials.identity_key.public_key()]


Send = Callable[[Succession, bytes], Awaitable[None]]
"""Has the coordinator take a succession, with the successor's proof that it is at hand."""

Tell = Callable[[SiloCredentials], None]
"""Hears of the credentials after a succession while it can still be repeated: after a kill it hears twice."""

_REMEDY = (
    "restore it from backup, or move it away: what this silo signed with earlier keys is then nobody's here, and "
    "silos that did not follow yet compare its key by telephone"
)


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


def predecessors(folder: SiloFolder, credentials: SiloCredentials) -> tuple[Predecessor, ...]:
    """The identity keys of this silo before the present one, oldest first.

    Raises ConfigurationError for a file that this silo did not seal, or whose statements do not lead to the present
    key, StateError where that is so because a succession is not finished.
    """
    try:
        content = _record(folder, credentials.identity, credentials.identity_key).read()
    except ConfigurationError:
        check_settled(folder)
        raise
    return tuple(
        Predecessor(
            key=bytes.fromhex(line.key),
            successor=bytes.fromhex(line.successor),
            statement=bytes.fromhex(line.statement),
            until=line.until,
        )
        for line in content.keys
    )


async def succeed(
    folder: SiloFolder,
    credentials: SiloCredentials,
    send: Send,
    tell: Tell,
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> SiloCredentials:
    """Begin a succession, or finish the one that was begun; the credentials after it. The caller holds the folder's
    lock.

    Raises StateError while an attempt of secure aggregation is open here, and what `send` raises; then the old key is
    still this silo's, and the new one waits for another try.
    """
    _require_no_attempt(folder, credentials)
    if in_token(credentials.identity_key):
        raise StateError(
            f"the identity key of {credentials.silo} lies in a token, and its successor would lie in a file: enrol "
            "anew with another key of the token, by a new invitation, and have the other silos pin it"
        )
    if is_there(folder.next_identity_key) and succession_is_finished(folder):  # killed within the last steps
        tell(credentials)
        erase(folder.next_identity_key)
        return credentials
    old, new = credentials.identity_key, _next_key(folder)
    identity = credentials.identity
    statement = succession_statement(old, identity=identity, new_key=new.public_key())
    succession = Succession(predecessor=old.public_key(), successor=new.public_key(), statement=statement)
    await send(succession, possession_statement(new, identity=identity, old_key=old.public_key()))
    _remember(folder, identity, old, new, succession, now())
    seal_anew(folder, Seal(old), Seal(new))
    write_key(folder.identity_key, identity_key_to_pem(new), os.environ)
    after = replace(credentials, identity_key=new)
    tell(after)
    erase(folder.next_identity_key)
    return after


def seal_anew(folder: SiloFolder, present: Seal, successor: Seal) -> None:
    """What has the present seal gets its successor's. What has that already, or nobody's, stays as it is."""
    for path in folder.sealed:
        if is_there(path):
            try:
                content = present.opened(path.name, read_private(path))
            except IntegrityError:
                continue
            write_private(path, successor.sealed(path.name, content))


def _next_key(folder: SiloFolder) -> Ed25519PrivateKey:
    if is_there(folder.next_identity_key):
        return identity_key_from_pem(read_key(folder.next_identity_key, os.environ))
    key = new_identity_key()
    write_key(folder.next_identity_key, identity_key_to_pem(key), os.environ)
    return key


def _remember(
    folder: SiloFolder,
    identity: Identity,
    old: Ed25519PrivateKey,
    new: Ed25519PrivateKey,
    succession: Succession,
    at: datetime,
) -> None:
    if _is_sealed(folder.predecessors, Seal(new)):
        return  # killed while all was sealed anew
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

    _record(folder, identity, old).change(edit)


def _is_sealed(path: Path, seal: Seal) -> bool:
    try:
        return is_there(path) and bool(seal.opened(path.name, read_private(path)))
    except IntegrityError:
        return False


def _record(folder: SiloFolder, identity: Identity, key: Ed25519PrivateKey) -> PrivateRecord[_Predecessors]:
    present = public_key_bytes(key.public_key())

    def check(content: _Predecessors) -> None:
        """Raises LoricaError unless each key named the next, and the last the present one or, in the midst of it, its
        successor."""
        following = [bytes.fromhex(line.key) for line in content.keys[1:]]
        for line, after in zip(content.keys, [*following, present], strict=False):
            old, named = bytes.fromhex(line.key), bytes.fromhex(line.successor)
            check_succession(
                bytes.fromhex(line.statement),
                identity=identity,
                old_key=public_key_from_bytes(old),
                new_key=public_key_from_bytes(named),
            )
            if named != after and not (old == present and line is content.keys[-1]):
                raise IntegrityError("a key of it named another successor than the key that comes after it")

    return PrivateRecord(folder.predecessors, _Predecessors, check=check, remedy=_REMEDY, seal=Seal(key))


def _require_no_attempt(folder: SiloFolder, credentials: SiloCredentials) -> None:
    events = masking_journal(folder, credentials).events()
    for event in events:
        if isinstance(event, OpenAttempt):
            event.root.erase()
    if events:
        raise StateError(
            "secure aggregation is under way here, and knows this silo by its present identity key: run `silo-agent "
            "start` until the round has been summed, stop it, and try again"
        )
