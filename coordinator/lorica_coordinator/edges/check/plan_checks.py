"""The state and the plan: the database, what the plan asks for, and whether silos and disk suffice for it."""

import sqlite3
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lorica_coordinator.edges.check.found import PROBE_TIMEOUT_S, Found
from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_coordinator.edges.database.open_store import SQLITE, is_new, log_of, open_store, release_rows
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import TABLES_VERSION
from lorica_coordinator.edges.upkeep.authorities_in_log import require_newest
from lorica_coordinator.edges.upkeep.newest_in_log import newest_told
from lorica_coordinator.edges.upkeep.taken_up import check_newest
from lorica_coordinator.plans.forecast import require_worth
from lorica_coordinator.plans.plan_folder import PLAN_FILE, compile_plan
from lorica_coordinator.plans.plan_shelf import NOT_HERE, PlanShelf
from lorica_coordinator.rounds.states import State
from lorica_security.console.preflight import meaning, mebibytes, misconfigured
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from lorica_security.identifiers import federation_name
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan


def database(found: Found) -> str:
    if found.settings.storage.database:
        return _in_postgresql(found)
    path = found.settings.state_folder / SQLITE
    if not path.is_file() or path.stat().st_size == 0:
        raise misconfigured(Mistake.DATABASE_MISSING.value, f"{path} is missing or empty")
    version, verdict = _database_facts(path)
    if version != TABLES_VERSION:
        raise misconfigured(
            Mistake.DATABASE_VERSION.value,
            f"{path} has tables of version {version}, this release has {TABLES_VERSION}",
        )
    if verdict != "ok":
        raise misconfigured(Mistake.DATABASE_DAMAGED.value, f"{path}: {verdict}")
    with (
        meaning(Mistake.DATABASE_DAMAGED.value),
        closing(SqlRoundStore(path, federation_name(found.settings.federation))) as store,
    ):
        _look_into(store, found)
    return f"{path} is whole; enrolled: {len(found.silos)}"


def _in_postgresql(found: Found) -> str:
    """What the settings say is refused as such; all else is the database's."""
    file, settings = found.ground.folder.settings, found.settings
    identity = "" if found.loaded_keys is None else found.keys.identity_public_key.hex()
    with meaning(Mistake.DATABASE_SERVER.value):
        if is_new(settings, file, found.ground.folder.audit, identity):
            name = DatabasePlace.parse(settings.storage.database, file).name
            return f"{name} answers and has no tables yet: the first coordinator serve makes them"
    with (
        meaning(Mistake.DATABASE_SERVER.value),
        closing(open_store(settings, file, federation_name(settings.federation), identity=identity)) as store,
    ):
        _look_into(store, found)
        if found.loaded_keys is not None:
            key = found.loaded_keys.identity
            log = log_of(settings, file, found.ground.folder.audit, key=key.public_key())
            check_newest(log, release_rows(settings, file, key))
            with meaning(Mistake.KEYS_OLDER.value, ConfigurationError):
                require_newest(newest_told(log), found.keys.authorities, found.ground.folder.keys)
        return f"{store.place.name} answers; enrolled: {len(found.silos)}"


def _look_into(store: SqlRoundStore, found: Found) -> None:
    recorded = store.silos()
    digest, found.under_way = _under_way(store.load())
    found.digest_under_way = digest
    rounds = store.rounds(digest, 1) if digest else ()
    found.silos = tuple(silo for silo in recorded if silo.revoked_unix_s is None)
    instants = [0.0, *(max(silo.enrolled_unix_s, silo.last_seen_unix_s) for silo in recorded)]
    instants += [row.closed_unix_s or row.opened_unix_s for row in rounds]
    found.newest = max(instants)


def plan(found: Found) -> str:
    shelf = PlanShelf(found.settings.state_folder, missing=NOT_HERE)
    name = found.ground.plan or found.under_way or _only(shelf.names())
    if name not in shelf.names():
        if found.settings.storage.database and found.digest_under_way and name == found.under_way:
            return _of_another_folder(found, shelf, found.digest_under_way)
        raise misconfigured(Mistake.PLAN_MISSING.value, f"plan {name!r} is not in {shelf.plans}")
    folder = shelf.folder(name)
    _require_threshold(folder / PLAN_FILE)
    with (
        meaning(Mistake.PLAN_WRONG.value, ConfigurationError, StorageError),
        meaning(Mistake.PLAN_EDITED.value, IntegrityError),
    ):
        try:
            text = (folder / PLAN_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise misconfigured(Mistake.PLAN_WRONG.value, f"{folder / PLAN_FILE} cannot be read: {error}") from error
        plan = Plan.from_toml(text, str(folder / PLAN_FILE))
        with meaning(Mistake.NOISE.value, ConfigurationError):
            require_worth(plan, str(folder / PLAN_FILE))
        found.bundle = compile_plan(folder)
    return f"{name} ({found.bundle.plan.digest[:16]}) is whole, {found.bundle.plan.model.parameters:,} parameters"


def _of_another_folder(found: Found, shelf: PlanShelf, digest: Digest) -> str:
    """The plan under way, which another coordinator of this database began: it is gone on with by its kept copy."""
    name = f"{found.under_way} ({digest[:16]})"
    if not shelf.has(digest) and found.settings.storage.blobs:
        return f"{name} is under way: who leads on this folder has it from the bucket"
    with meaning(Mistake.PLAN_MISSING.value):
        found.bundle = shelf.bundle(digest)
    return f"{name} is under way and whole, by the copy in state/bundles; its folder is not here"


def cohort(found: Found) -> str:
    assert found.bundle is not None
    plan, enrolled = found.bundle.plan, len(found.silos)
    if enrolled < plan.schedule.min_silos:
        raise misconfigured(
            Mistake.TOO_FEW.value,
            f"{enrolled} silos are enrolled, plan {plan.name} has min_silos = {plan.schedule.min_silos}",
        )
    if wrong := plan.too_few([entry.silo for entry in found.silos]):
        raise misconfigured(Mistake.TOO_FEW.value, wrong)
    if plan.aggregation.secure_aggregation:
        # Here, not above: numpy, which it brings, is for plans with masks alone.
        from silo_wire.codecs.secure_codec import MAX_COHORT

        if enrolled > MAX_COHORT:
            raise misconfigured(
                Mistake.TOO_MANY.value,
                f"{enrolled} silos are enrolled, secure aggregation takes {MAX_COHORT} at most",
            )
    return f"{enrolled} silos are enrolled, at least {plan.schedule.min_silos} are needed"


def disk(found: Found) -> str:
    assert found.bundle is not None
    state, silos = found.settings.state_folder, max(len(found.silos), found.bundle.plan.schedule.min_silos)
    # Here, not above: torch takes seconds to import.
    from lorica_coordinator.edges.models.plan_disk import MODELS_KEPT, plan_disk

    needed = plan_disk(found.bundle, silos)
    there = _size_below(state / "spools") + _size_below(state / "models" / found.bundle.plan.digest)
    more, free = max(0, needed - there), found.ground.free_disk(state)
    if free < more:
        raise misconfigured(
            Mistake.DISK.value,
            f"{state} has {mebibytes(free)} free, a cohort of {silos} and {MODELS_KEPT} models take "
            f"{mebibytes(more)} more",
        )
    return f"{mebibytes(free)} free in {state}, {mebibytes(more)} needed for a cohort of {silos}"


def _database_facts(path: Path) -> tuple[int, str]:
    """The version of its tables, and "ok" or what SQLite finds inconsistent; read alone."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=PROBE_TIMEOUT_S)) as database:
            (version,) = database.execute("SELECT version FROM schema").fetchone()
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise misconfigured(Mistake.DATABASE_DAMAGED.value, f"{path} cannot be read ({error})") from error
    return int(version), " ".join(str(verdict).split())


def _under_way(state: State) -> tuple[Digest | None, str]:
    """Digest and name of the plan under way."""
    course = getattr(state, "course", None)
    return (None, "") if course is None else (course.terms.plan, course.terms.name)


def _only(names: Sequence[str]) -> str:
    """The plan that is meant where none is named and none is under way: `default`, as `coordinator serve` has it, or
    the only one."""
    return "default" if "default" in names or len(names) != 1 else names[0]


def _require_threshold(plan_file: Path) -> None:
    """Before the plan is read as a whole, which refuses such a threshold among everything else."""
    try:
        values = tomllib.loads(plan_file.read_text(encoding="utf-8"))
        masked, threshold = values["aggregation"]["secure_aggregation"], values["aggregation"]["threshold"]
        silos = values["schedule"]["min_silos"]
        wrong = bool(masked) and threshold != 0 and not 3 <= threshold <= silos
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return  # what else is wrong with it, the plan's own reader says
    if wrong:
        raise misconfigured(
            Mistake.THRESHOLD.value, f"{plan_file}: [aggregation] threshold = {threshold} with min_silos = {silos}"
        )


def _size_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
