"""Where an exported model comes from, as the coordinator signs it: the plan, every round that made a model, the promise
under which silos sent anything, and the digests of the folder's files.

The statement lies beside the model, in PROVENANCE_FILE. Whoever has the coordinator's identity key checks it offline
(`lorica verify`). It says what the coordinator did, by the coordinator's own word: a dishonest one signs what it likes.
Silos' audit logs, compared with its own (audit.md), are what tells on that.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lorica_security.audit.chain import canonical
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from lorica_security.identity.identity_key import sign, verify
from lorica_security.visible_text import visible

PROVENANCE_FILE: Final = "provenance.json"
DOMAIN: Final = b"model-provenance"
MOST_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20

Digits = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
Count = Annotated[int, Field(ge=0, le=1 << 62)]


class _Part(BaseModel):
    """Of a statement: frozen, an unknown key is refused, no value is converted to another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RoundMade(_Part):
    """One round that made a model. `silos`: how many updates it had. `model`: its manifest's BLAKE3 digest."""

    round: Count
    attempt: Count
    silos: Count
    model: Digits


class Promise(_Part):
    """What covered each update by the plan. `level` none, record or silo; epsilon and delta of all rounds together,
    None where nothing is promised."""

    secure_aggregation: bool
    level: Literal["none", "record", "silo"]
    epsilon: float | None
    delta: float | None


class Provenance(_Part):
    """`plan` is its digest, `model` the exported model's manifest's, `round` the one that made it (0: the initial one).
    `audit_entry` and `audit_digest` are the head of the coordinator's audit log at the export. `exact_match` is of the
    silos' dev splits together (MicroAvg, 0 to 1), None where it was not measured or is of fewer than three. `files` are
    the SHA-256 of every other file of the folder, by name."""

    version: Literal[1] = 1
    federation: Name
    software: Annotated[str, Field(max_length=100)]
    exported_unix_s: Annotated[int, Field(ge=0, lt=253_402_300_800)]  # before the year 10000, which no clock shows
    plan_name: Name
    plan: Digits
    begun_from: Annotated[str, Field(max_length=1000)]
    model: Digits
    round: Count
    rounds: Annotated[tuple[RoundMade, ...], Field(max_length=100_000, strict=False)]
    promise: Promise
    exact_match: Annotated[float, Field(ge=0, le=1)] | None
    audit_entry: Count
    audit_digest: Digits
    files: Annotated[dict[Name, Digits], Field(min_length=1, max_length=1000)]

    @property
    def statement(self) -> bytes:
        return canonical(self.model_dump(mode="json"))

    def signed(self, key: Ed25519PrivateKey) -> bytes:
        """The content of PROVENANCE_FILE."""
        signature = sign(key, domain=DOMAIN, payload=self.statement)
        value = {"statement": json.loads(self.statement), "signature": signature.hex()}
        return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def digests_of(folder: Path) -> Mapping[str, str]:
    """The SHA-256 of each file of `folder` but PROVENANCE_FILE. Raises IntegrityError for what is no plain file,
    StorageError naming what cannot be read."""
    return {name: _sha256(folder / name) for name in _names(folder)}


def verified(folder: Path, key: Ed25519PublicKey) -> Provenance:
    """What the holder of `key` says of the model in `folder`.

    Raises ConfigurationError where there is no such statement, IntegrityError where it is not signed by `key`, or the
    folder has other files, or others' content, than it says.
    """
    provenance, signature = _read(folder / PROVENANCE_FILE)
    try:
        verify(key, domain=DOMAIN, payload=provenance.statement, signature=signature)
    except IntegrityError as error:
        raise IntegrityError(
            f"{folder / PROVENANCE_FILE} is not signed by the key that was given: it was changed, or is another "
            "coordinator's"
        ) from error
    _require_names(folder, provenance.files)
    for name, signed in provenance.files.items():
        if (found := _sha256(folder / name)) != signed:
            raise IntegrityError(f"{folder / name} was changed since the export: its SHA-256 is {found}")
    return provenance


def _require_names(folder: Path, signed: Mapping[str, str]) -> None:
    """Before anything is read: what was added may be of any length, and by any name."""
    names = _names(folder)
    if added := sorted(set(names) - signed.keys()):
        raise IntegrityError(
            f"{folder / visible(added[0])} is not of the model that {PROVENANCE_FILE} is about: take it away"
        )
    if missing := sorted(signed.keys() - set(names)):
        raise IntegrityError(f"{folder / missing[0]} is missing: export the model again")


def _names(folder: Path) -> list[str]:
    """Of everything in `folder` but PROVENANCE_FILE."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name != PROVENANCE_FILE)
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror or error}") from error


def _read(path: Path) -> tuple[Provenance, bytes]:
    """Untrusted bytes, parsed here alone."""
    try:
        with _plain(path) as file:
            raw = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path.parent} has no {PROVENANCE_FILE}: it is not a folder that `coordinator export` of this release made"
        ) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > MOST_BYTES:
        raise IntegrityError(f"{path} has more than {MOST_BYTES} bytes: it is no statement of a coordinator")
    try:
        value: Any = json.loads(raw)
        if not isinstance(value, dict) or value.keys() != {"statement", "signature"}:
            raise ValueError("it has not the keys statement and signature")
        return Provenance.model_validate(value["statement"]), bytes.fromhex(value["signature"])
    except (ValueError, TypeError, RecursionError, ValidationError) as error:
        raise IntegrityError(
            f"{path} is no statement of a coordinator: {visible(' '.join(str(error).split())[:300])}"
        ) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with _plain(path) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


@contextmanager
def _plain(path: Path) -> Iterator[BinaryIO]:
    """Open for reading; a pipe is never waited for, a link never followed."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise IntegrityError(f"{path} is no plain file, which an exported model never has")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        yield file
