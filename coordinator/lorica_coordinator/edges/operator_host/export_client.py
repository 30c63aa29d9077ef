"""A model's folder from the coordinator, on another host: file by file, each held to its digest, whole or not at
all."""

import os
import re
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage
from lorica_security.host import files
from lorica_security.on_disk.provenance import verified
from silo_wire.canonical import Digest
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


async def fetch_export(
    stub: "operator_pb2_grpc.OperatorAsyncStub", target: Path, *, latest: bool
) -> tuple[str, Digest]:
    """Write the files to `target`, which must be empty or not exist; the plan's name and the model.

    Raises ConfigurationError for a folder that holds anything, IntegrityError for a file that came damaged,
    StorageError.
    """
    plan, model = "", b""
    with files.new_folder(target) as work, closing(_File(work)) as current:
        async for piece in stub.ExportModel(operator_pb2.ExportModelRequest(latest=latest)):
            if piece.model_digest:
                plan, model = piece.plan_name, piece.model_digest
            else:
                current.take(piece)
        if current.name or len(model) != 32:
            raise MalformedMessage(
                "the coordinator ended the export before its last file was whole: give the command again"
            )
    return plan, Digest(model.hex())


def require_exported(folder: Path, key: Ed25519PublicKey, plan: Digest, model: Digest) -> None:
    """That an earlier export has `model` of `plan` in `folder`, as the coordinator that holds `key` signed it.

    Raises ConfigurationError, IntegrityError.
    """
    files.require_not_everybodys(folder)
    try:
        found = verified(folder, key)
    except IntegrityError as error:
        raise IntegrityError(f"{error}; it is not pushed: export to another folder") from error
    if (found.plan, found.model) != (plan, model):
        raise ConfigurationError(
            f"{folder} holds model {found.model[:16]} of plan {found.plan_name} ({found.plan[:16]}), and the one to "
            f"export is {model[:16]} of plan {plan[:16]}: choose another folder"
        )


class _File:
    """The one that is coming."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self.name = ""

    def take(self, piece: operator_pb2.ExportPiece) -> None:
        if self._file is None:
            if not _NAME.fullmatch(piece.name):  # it becomes a path here
                raise MalformedMessage(
                    f"the coordinator exports a file named {piece.name[:100]!r}, which is not allowed"
                )
            self.name, self._hashed = piece.name, blake3()
            self._file = (self._folder / piece.name).open("xb")
        if piece.name != self.name:
            raise MalformedMessage(f"the coordinator exports {piece.name[:100]!r} before {self.name} is whole")
        self._file.write(piece.data)
        self._hashed.update(piece.data)
        if piece.digest:
            if piece.digest != self._hashed.digest():
                raise IntegrityError(f"{self.name} came damaged from the coordinator: export the model again")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self.name = None, ""
