"""What this silo still has of a round whose model it checks: its masked vector and the model before, which so need not
travel again.

Nothing here is trusted: a chunk counts only if it is what the manifest says, which the evidence names.
"""

from pathlib import Path

from lorica_security.errors import LoricaError
from silo_agent.edges.disk.model_cache import model_file
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.memory.masking_journal import vector_files
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest


class OwnFiles:
    def __init__(self, folder: SiloFolder) -> None:
        self._vectors = vector_files(folder.masking)
        self._models = folder.models

    def vector(self, manifest: Manifest, chunk: int) -> bytes | None:
        for path in self._vectors:
            if (found := _chunk(path, manifest, chunk)) is not None:
                return found
        return None

    def model(self, manifest: Manifest, chunk: int) -> bytes | None:
        return _chunk(model_file(self._models, Digest(manifest.digest)), manifest, chunk)


def _chunk(path: Path, manifest: Manifest, chunk: int) -> bytes | None:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(chunk * manifest.chunk_bytes)
            content = file.read(manifest.chunk_size(chunk))
        manifest.check_chunk(chunk, content)
    except (OSError, LoricaError):
        return None
    return content
