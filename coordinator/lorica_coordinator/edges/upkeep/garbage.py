"""What a coordinator's state holds and needs no more, and letting it go: `coordinator gc`.

    models      of plans that were left for another, after `models_days`; of a finished plan all but the last and the
                best one
    spools      of every plan but the one under way; their keys are destroyed first
    exports     that nobody is being sent
    copies      of the database that `coordinator upgrade` made, after `copies_days`
    records     what single silos sent and scored in rounds that were closed `records_days` ago; the rounds themselves
                stay
    remains     of a backup, a collection or an upgrade that a crash cut off

Never: anything of the plan under way, the last and the best model of the present plan, plans and their kept copies, the
audit log, ledgers, keys. A folder gets a name that nothing reads before it is deleted, and records go in one
transaction: a crash leaves it there or not.
"""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.models.export_scratch import ExportScratch
from lorica_coordinator.edges.models.held_models import letting_models_go
from lorica_coordinator.edges.models.model_store import BASE, EVIDENCE, INITIAL, MODEL, SPARE
from lorica_coordinator.edges.models.spool_keys import SpoolKeys
from lorica_coordinator.edges.upkeep.backup import WORK_PREFIX
from lorica_coordinator.edges.upkeep.upgrade_copies import copied_at
from lorica_coordinator.service.records import PresentPlan
from lorica_coordinator.settings import RetentionSection
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.spool_key import destroy_keys_below
from lorica_security.errors import StorageError
from lorica_security.host import files

DAY_S = 86_400.0
GONE_PREFIX = ".gone-"
"""Of folders that are being deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """`path` is None for records; `bytes` is 0 for those: the database keeps their room for others."""

    kind: str
    what: str
    why: str
    bytes: int
    path: Path | None


class Collector:
    """Of one state folder. The caller holds the coordinator's lock, and starts no plan meanwhile. Raises StorageError
    naming the file."""

    def __init__(
        self,
        state: Path,
        retention: RetentionSection,
        store: SqlRoundStore,
        scratch: ExportScratch,
        *,
        spool_keys: SpoolKeys | None = None,
        kept: KeptFiles = FOLDER_ALONE,
    ) -> None:
        """`spool_keys`: of the spools, where they do not lie beside these."""
        self._state, self._retention, self._store, self._scratch = state, retention, store, scratch
        self._spool_keys = spool_keys or SpoolKeys(state / "spools")
        self._kept = kept

    def collect(self, present: PresentPlan, now: float, *, dry_run: bool) -> list[Garbage]:
        """What goes, or would; `now` in Unix seconds. May be repeated, also after a crash."""
        with letting_models_go(self._state / "models") as alone:
            try:
                found = list(self._found(present, now, alone=alone))
                if not dry_run:
                    for item in found:
                        with suppress(FileNotFoundError):  # the coordinator itself was quicker
                            self._let_go(item, now)
            except OSError as error:
                raise StorageError(f"{self._state} cannot be cleared: {error}") from error
        return found

    def _found(self, present: PresentPlan, now: float, *, alone: bool) -> Iterator[Garbage]:
        yield from self._spools(present)
        yield from self._exports()
        yield from self._copies(now)
        if alone:  # else a backup copies models, and may need any of them
            yield from self._remains()
            yield from self._models(present, now)
        if days := self._retention.records_days:
            count = self._store.count_details(now - days * DAY_S)
            if count:
                yield Garbage(
                    kind="records",
                    what=f"{count} updates and scores of single silos",
                    why=f"of rounds closed more than {days:g} days ago",
                    bytes=0,
                    path=None,
                )

    def _spools(self, present: PresentPlan) -> Iterator[Garbage]:
        for path in _entries(self._state / "spools"):
            if not (present.under_way and path.name == present.plan):
                yield _garbage("spools", path, "no plan under way needs them")

    def _exports(self) -> Iterator[Garbage]:
        found = _entries(self._state / "exports")
        if self._scratch.is_idle:  # asked afterwards: what is begun from here on has another name
            for path in found:
                yield _garbage("exports", path, "nobody is being sent it")

    def _copies(self, now: float) -> Iterator[Garbage]:
        days = self._retention.copies_days
        for path in sorted(self._state.glob("state.sqlite.*")):
            made = copied_at(path)
            if days and made is not None and made < now - days * DAY_S:
                yield _garbage("copies", path, f"made by coordinator upgrade more than {days:g} days ago")

    def _remains(self) -> Iterator[Garbage]:
        for pattern in (f"{WORK_PREFIX}*", f"{GONE_PREFIX}*", f"*/{GONE_PREFIX}*", ".state.sqlite.*.tmp*"):
            for path in sorted(self._state.glob(pattern)):
                yield _garbage("remains", path, "a crash left it")

    def _models(self, present: PresentPlan, now: float) -> Iterator[Garbage]:
        days = self._retention.models_days
        left = {str(plan.digest): plan for plan in self._store.plans()}
        for folder in _entries(self._state / "models"):
            plan = left.get(folder.name)
            if folder.name == present.plan:
                if not present.under_way:
                    yield from _all_but(folder, present)
            elif days and plan is not None and plan.active_unix_s < now - days * DAY_S:
                yield _garbage("models", folder, f"plan {plan.name} was left for another more than {days:g} days ago")

    def _let_go(self, item: Garbage, now: float) -> None:
        if item.path is None:
            self._store.forget_details(now - self._retention.records_days * DAY_S)
            return
        if item.kind in ("spools", "remains"):
            destroy_keys_below(item.path)
        if item.kind == "spools":
            self._spool_keys.destroy_below(item.path)
        if item.path.name.startswith(WORK_PREFIX):
            for copied in sorted(item.path.iterdir()):
                files.erase(copied)
        if item.path.is_dir():
            home = self._state / item.path.relative_to(self._state).parts[0]  # models, spools, exports
            gone = (self._state if home == item.path else home) / f"{GONE_PREFIX}{secrets.token_hex(8)}"
            item.path.rename(gone)
            files.sync_folder(gone.parent)
            shutil.rmtree(gone)
        elif item.kind in ("copies", "remains"):
            files.erase(item.path)
        else:
            item.path.unlink(missing_ok=True)
            files.sync_folder(item.path.parent)
        if item.kind in ("spools", "models"):
            self._kept.forget(item.path)


def _all_but(folder: Path, present: PresentPlan) -> Iterator[Garbage]:
    """What a finished plan's folder holds of models that are neither its last nor its best, and files for further ones
    to write over.

    Parameters come first: a model whose parameters are there is whole.
    """
    for path in sorted(_entries(folder), key=lambda path: path.suffix != MODEL):
        if path.name == SPARE:
            yield _garbage("models", path, "no further model is made of the plan")
        elif path.name not in (INITIAL, BASE, EVIDENCE) and path.name.partition(".")[0] not in present.models:
            yield _garbage("models", path, "neither the last nor the best model of the plan")


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name[0] != "." and path.suffix != ".lock")


def _garbage(kind: str, path: Path, why: str) -> Garbage:
    return Garbage(kind=kind, what=f"{path.parent.name}/{path.name}", why=why, bytes=_bytes_of(path), path=path)


def _bytes_of(path: Path) -> int:
    """That its files take on the disk."""
    found = 0
    for one in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        try:
            found += one.lstat().st_blocks * 512
        except FileNotFoundError:  # gone by itself meanwhile
            continue
    return found
