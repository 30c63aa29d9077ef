"""Plan bundles on disk, by digest: with the round model, all that `ask` and a restarted agent need."""

from pathlib import Path

from security import files
from security.errors import IntegrityError, MalformedMessage, StorageError
from silo_wire.canonical import Digest
from silo_wire.plan import PlanBundle


class PlanStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, plan: Digest) -> PlanBundle | None:
        """The bundle, verified against its digest; None where it is missing or damaged, and must be fetched again."""
        path = self._path(plan)
        try:
            return PlanBundle.decode(path.read_bytes(), plan)
        except FileNotFoundError:
            return None
        except (IntegrityError, MalformedMessage):
            path.unlink(missing_ok=True)
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error

    def save(self, bundle: PlanBundle) -> None:
        files.write_private(self._path(bundle.plan.digest), bundle.encode())

    def _path(self, plan: Digest) -> Path:
        return self._folder / f"{plan}.plan"
