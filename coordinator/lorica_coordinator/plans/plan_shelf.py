"""The operator's plan folders, and a kept copy of every plan that was compiled, under its digest.

Silos may have approved a plan whose folder has been edited or deleted since: the copy is what is served from then on.
"""

from pathlib import Path
from typing import Final

from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_security.errors import IntegrityError, MalformedMessage, StateError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import silo_name
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle, PlanOfAnotherRelease

NEVER_COMPILED: Final = "was never compiled here: run coordinator plan show NAME"
NOT_HERE: Final = (
    "is not in state/bundles of this folder: copy state/bundles of the folder that has it, since a state in "
    "[storage] database is gone on with by those files alone"
)
NOT_KEPT: Final = (
    "is not in state/bundles of this folder, nor did a coordinator that led on it find it in the bucket of [storage] "
    "blobs: restore it from the bucket's versions, or copy state/bundles of the folder that has it"
)


class PlanShelf:
    """`state`/plans/NAME/ are the operator's, `state`/bundles/DIGEST.bundle the copies. `missing`: what is said of a
    plan without a copy."""

    def __init__(self, state: Path, kept: KeptFiles = FOLDER_ALONE, missing: str = NEVER_COMPILED) -> None:
        self.plans = state / "plans"
        self._kept, self._missing = kept, missing
        self._bundles = state / "bundles"

    def names(self) -> tuple[str, ...]:
        """The plans that have a folder, by name."""
        if not self.plans.is_dir():
            return ()
        return tuple(sorted(path.name for path in self.plans.iterdir() if path.is_dir() and path.name[0] != "."))

    def folder(self, name: str) -> Path:
        """Where the plan `name` is, or would be; raises ConfigurationError for what is not a plan's name."""
        return self.plans / silo_name(name)

    def compile(self, name: str) -> PlanBundle:
        """Read, validate and digest the plan folder `name`, keep a copy; raises ConfigurationError naming the file."""
        bundle = compile_plan(self.folder(name))
        self.keep(bundle)
        return bundle

    def keep(self, bundle: PlanBundle) -> None:
        path = self._path(bundle.plan.digest)
        if path.exists():
            self._kept.keep(path)
            return
        try:
            self._bundles.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self._bundles} cannot be made: {error.strerror or error}") from error
        files.replace(path, bundle.encode())
        self._kept.keep(path)

    def has(self, plan: Digest) -> bool:
        """Whether there is a copy, be it whole or not."""
        return self._path(plan).exists()

    def require(self, plan: Digest) -> None:
        """Raises StateError where there is no copy."""
        if not self.has(plan):
            raise StateError(f"plan {plan} {self._missing}")

    def bundle(self, plan: Digest) -> PlanBundle:
        """The kept copy; raises StateError where there is none, PlanOfAnotherRelease, IntegrityError when it was
        changed."""
        path = self._path(plan)
        try:
            self.require(plan)
            raw = path.read_bytes()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            return PlanBundle.decode(raw, plan)
        except (IntegrityError, MalformedMessage) as error:
            if PlanBundle.is_of_another_release(raw, plan):
                raise PlanOfAnotherRelease(
                    f"plan {plan} was made by a release whose plans this one does not read ({error}): make a new one "
                    "with coordinator plan new, or go on with that release"
                ) from error
            raise IntegrityError(f"{path} was damaged ({error}): restore it from a backup") from error

    def _path(self, plan: Digest) -> Path:
        return self._bundles / f"{plan}.bundle"
