"""Where the secret lies that noise is made from: in the coordinator's own folder, or in one that several coordinators
see.

    own      privacy/root
    shared   DIGEST.root: the database says which digest is the root's. A file has its name by what is in it, so none is
             ever written over: of two leaders that make one at once, the fence of their transactions decides whose is
             the root

A root that the own folder has from before is copied to the shared one by the first leader that has it, and stays.
"""

import secrets
from pathlib import Path
from typing import Final

from lorica_security.errors import IntegrityError, StorageError
from lorica_security.host import files
from lorica_security.noise.random_words import KEY_BYTES
from silo_wire.canonical import Digest, digest_of

_DOMAIN: Final = b"lorica/v1/release-root\n"
_SUFFIX: Final = ".root"


def digest_of_root(root: bytes) -> Digest:
    """Which root it is, told to the database."""
    return digest_of(_DOMAIN + root)


class RootPlace:
    """May be used by who leads alone. Raises StorageError, ConfigurationError, IntegrityError naming the file."""

    def __init__(self, own: Path, shared: Path | None = None, mount: Path | None = None) -> None:
        """`own`: the file of the own folder; `mount`: the folder above `shared` that has to be there."""
        self.own, self._shared, self._mount = own, shared, mount

    @property
    def where(self) -> str:
        """For errors: where it is looked for."""
        return str(self.own) if self._shared is None else f"the root of noise in {self._shared} (or {self.own})"

    def find(self, known: Digest | None) -> tuple[bytes, Path] | None:
        """The root and its file; `known`: which one noise was made from, where that is said elsewhere. None where there
        is none."""
        if self._shared is None:
            return self._own()
        listed = self._listed(self._shared)
        if known is not None:
            listed = [path for path in listed if path.stem == known]
        if len(listed) > 1:
            raise IntegrityError(
                f"{self._shared} has {len(listed)} roots of noise, and the database does not say which one noise was "
                "made from: move all but that one away"
            )
        if listed:
            return self._read(listed[0], listed[0].stem), listed[0]
        former = self._own()
        if former is None or (known is not None and digest_of_root(former[0]) != known):
            return former
        return former[0], self._put(self._shared, former[0])

    def make(self) -> tuple[bytes, Path]:
        """A fresh one, durable."""
        root = secrets.token_bytes(KEY_BYTES)
        if self._shared is not None:
            return root, self._put(self._shared, root)
        files.make_private_folder(self.own.parent)
        files.write_private(self.own, root)
        return root, self.own

    def _own(self) -> tuple[bytes, Path] | None:
        return (self._read(self.own), self.own) if self.own.exists() else None

    def _listed(self, shared: Path) -> list[Path]:
        if self._mount is not None and not self._mount.is_dir():
            raise StorageError(f"{self._mount} of [storage] attempt_keys is not there: mount it")
        try:
            return sorted(path for path in shared.iterdir() if path.suffix == _SUFFIX) if shared.exists() else []
        except OSError as error:
            raise StorageError(f"{shared} cannot be read: {error.strerror or error}") from error

    def _put(self, shared: Path, root: bytes) -> Path:
        files.make_private_folder(shared, below=self._mount)
        path = shared / f"{digest_of_root(root)}{_SUFFIX}"
        files.write_private(path, root)
        return path

    def _read(self, path: Path, named: str = "") -> bytes:
        root = files.read_private(path)
        if len(root) != KEY_BYTES:
            raise IntegrityError(f"{path} has {len(root)} bytes, {KEY_BYTES} are needed: restore it from a backup")
        if named and digest_of_root(root) != named:
            raise IntegrityError(f"{path} is another root than its name says: restore it from a backup")
        return root
