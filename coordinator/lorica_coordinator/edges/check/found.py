"""What the checks stand on, and what earlier ones found for later ones."""

import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.service.records import EnrolledSilo
from lorica_coordinator.settings import Settings
from lorica_security.errors import LoricaError
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle

PROBE_TIMEOUT_S = 10.0


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What checks stand on. `keys` loads the folder's key material for these settings; `plan` names the plan, "": the
    one under way, or the only one."""

    folder: CoordinatorFolder
    keys: Callable[[Settings], KeyStore]
    now: Callable[[], datetime]
    plan: str = ""
    free_memory: Callable[[], int] = lambda: int(psutil.virtual_memory().available)
    free_disk: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    open_files: Callable[[], int] = _open_files


@dataclass(slots=True, kw_only=True)
class Found:
    """What earlier checks read, for later ones. `shown` is the certificate that a `running` coordinator answers
    with."""

    ground: Ground
    settings: Settings
    now: datetime
    loaded_keys: KeyStore | None = None
    keys_error: LoricaError | None = None
    running: int | None = None
    shown: bytes | None = None
    silos: tuple[EnrolledSilo, ...] = ()
    under_way: str = ""
    digest_under_way: Digest | None = None
    newest: float = 0.0
    bundle: PlanBundle | None = None

    @property
    def keys(self) -> KeyStore:
        """Once they are loaded."""
        assert self.loaded_keys is not None, "checked before"
        return self.loaded_keys
