"""A coordinator's folder, opened for a command: its settings, its keys, and what lies in it.

Most commands need little of it, so what takes long to import (the database, models, gRPC) is imported where it is used.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.settings import Settings, reachable
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.key_place import marked
from lorica_security.daemon.heartbeat import Start
from lorica_security.daemon.listen_address import Address, address
from lorica_security.errors import ConfigurationError, Conflict, StateError, StorageError
from lorica_security.identifiers import FederationName, Identity, Role
from silo_wire.canonical import Digest

if TYPE_CHECKING:
    from lorica_coordinator.edges.database.postgresql.leadership import Leadership
    from lorica_coordinator.edges.database.postgresql.release_rows import ReleaseRows
    from lorica_coordinator.edges.database.round_store import SqlRoundStore
    from lorica_coordinator.edges.kept.ahead import Ahead
    from lorica_coordinator.edges.kept.kept_in_bucket import Listed, Seen
    from lorica_coordinator.edges.models.export_scratch import ExportScratch
    from lorica_coordinator.edges.models.model_store import ModelStore
    from lorica_coordinator.edges.models.spool import Spools
    from lorica_coordinator.edges.models.spool_keys import SpoolKeys
    from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess
    from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
    from lorica_coordinator.plans.plan_shelf import PlanShelf
    from lorica_security.on_disk.log_file import AuditLog
    from lorica_security.privacy.ledger import Entry
    from silo_wire.plans.plan import Plan, PlanBundle


def load_keys(folder: CoordinatorFolder, settings: Settings) -> KeyStore:
    """Raises ConfigurationError naming the file."""
    return KeyStore.load(
        folder.keys,
        hosts=settings.public.hosts,
        enrolment_host=settings.public.hosts[0],
        enrolment_port=settings.public_enrolment_port,
        silo_certificate_lifetime=settings.certificates.silo_lifetime,
        own_certificate_lifetime=settings.certificates.own_lifetime,
    )


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A coordinator's folder with its settings and keys loaded. `leadership`: of a process that may write a state in
    PostgreSQL; `kept`: where such a one keeps models and updates beside the folder, `rows`: its releases, held to the
    end against what it saw of them before its term; `start`: which goes on until it serves."""

    folder: CoordinatorFolder
    settings: Settings
    keys: KeyStore
    leadership: "Leadership | None" = None
    kept: KeptFiles = FOLDER_ALONE
    rows: "ReleaseRows | None" = None
    start: Start | None = None

    @classmethod
    def load(cls, folder: CoordinatorFolder) -> "Coordinator":
        """Raises ConfigurationError naming the file, the key and the remedy."""
        settings = Settings.read(folder.settings)
        keys = load_keys(folder, settings)
        if keys.federation != settings.federation:
            raise ConfigurationError(
                f"{folder.settings}: federation = {settings.federation!r}, but the authority in {folder.keys} is of "
                f"{keys.federation!r}: correct the name"
            )
        if settings.storage.database:
            from lorica_coordinator.edges.database.postgresql.place import DatabasePlace

            DatabasePlace.parse(settings.storage.database, folder.settings)
        if settings.storage.blobs:
            from lorica_coordinator.edges.kept.opening import bucket_place

            bucket_place(settings, folder.settings)
        return cls(folder, settings, keys)

    @property
    def federation(self) -> FederationName:
        return self.keys.federation

    @property
    def identity(self) -> str:
        """The public identity key in hexadecimal."""
        return self.keys.identity_public_key.hex()

    @property
    def shelf(self) -> "PlanShelf":
        from lorica_coordinator.plans.plan_shelf import NEVER_COMPILED, NOT_HERE, NOT_KEPT, PlanShelf

        storage = self.settings.storage
        missing = NOT_KEPT if storage.blobs else NOT_HERE if storage.database else NEVER_COMPILED
        return PlanShelf(self.settings.state_folder, self.kept, missing)

    def models(self, bundle: "PlanBundle") -> "ModelStore":
        """The models of one plan."""
        from lorica_coordinator.edges.sums.plan_parts import model_store

        return model_store(self.settings.state_folder, bundle, self.kept)

    def base(self, bundle: "PlanBundle") -> "ModelStore | None":
        """The model that the plan's adapters are for, where it has adapters."""
        from lorica_coordinator.edges.sums.plan_parts import base_store

        return base_store(self.settings.state_folder, bundle, self.kept)

    @property
    def spool_keys(self) -> "SpoolKeys":
        """Where the keys of updates on their way in lie: beside these, unless these are kept elsewhere as well."""
        from lorica_coordinator.edges.models.spool import SPOOLS
        from lorica_coordinator.edges.models.spool_keys import SpoolKeys

        state = self.settings.state_folder
        if not self.settings.storage.blobs:
            return SpoolKeys(state / SPOOLS)
        from lorica_coordinator.edges.database.open_store import key_folder

        term = 0 if self.leadership is None else self.leadership.term
        own = not self.settings.storage.attempt_keys
        return SpoolKeys(state / SPOOLS, key_folder(self.settings, self.identity) / SPOOLS, term, own)

    def has_key(self, update: Path, name: str) -> bool:
        """Whether the key of this name is there that an update (its path, without suffix) is encrypted with."""
        path = self.spool_keys.path(update, name)
        return path is not None and path.is_file()

    @property
    def spools(self) -> "Spools":
        """All updates on their way in."""
        from lorica_coordinator.edges.models.spool import SPOOLS, Spools

        return Spools(self.settings.state_folder / SPOOLS, keys=self.spool_keys, kept=self.kept)

    @property
    def releases(self) -> "ReleaseLedger":
        """What was released under silo-level privacy, of all plans."""
        from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger

        return ReleaseLedger(self.settings.state_folder / "privacy", kept=self._release_rows())

    def releases_told(self, audit: "AuditLog") -> "ReleaseLedger":
        """The same; `audit` tells of each entry before it is written, and answers for those that are there."""
        from lorica_coordinator.edges.server.audited import released
        from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
        from lorica_coordinator.edges.upkeep.taken_up import tells_of_sum

        return ReleaseLedger(
            self.settings.state_folder / "privacy",
            kept=self._release_rows(),
            tell=released(audit),
            is_told=partial(tells_of_sum, audit),
        )

    def _release_rows(self) -> "ReleaseRows | None":
        from lorica_coordinator.edges.database.open_store import release_rows

        if self.rows is not None:
            return self.rows
        return release_rows(self.settings, self.folder.settings, self.keys.identity, self.leadership)

    def with_rows(self) -> "Coordinator":
        """The same, which remembers what it sees of its releases."""
        return replace(self, rows=self._release_rows())

    def audit(self, clock: Callable[[], float] = time.time) -> "AuditLog":
        """The coordinator's audit log; nothing of it is read before something is entered."""
        from lorica_coordinator.edges.database.open_store import log_of
        from lorica_security.on_disk.log_file import AuditLog

        key = self.keys.identity.public_key()
        place = log_of(self.settings, self.folder.settings, self.folder.audit, self.leadership, key=key)
        writer = Identity(self.federation, Role.COORDINATOR).uri
        return AuditLog(place, writer=writer, key=self.keys.identity, clock=clock)

    def released(self) -> "list[tuple[Digest, Plan | None, list[Entry]]]":
        """Every plan of which sums were released so, in the order of the first, with its entries; no plan where it is
        one of another release."""
        of_plan: dict[str, list[Entry]] = {}
        for entry in self.releases.kept.entries():
            of_plan.setdefault(entry.plan, []).append(entry)
        return [(Digest(plan), self._plan(Digest(plan)), entries) for plan, entries in of_plan.items()]

    def _plan(self, digest: Digest) -> "Plan | None":
        from silo_wire.plans.plan import PlanOfAnotherRelease

        try:
            return self.shelf.bundle(digest).plan
        except PlanOfAnotherRelease:
            return None

    def epsilon_released(self, plan: "Plan") -> float | None:
        """What sums with noise of the coordinator's have cost under `plan` so far; None where the noise is not its
        own."""
        return self.releases.spent(plan) if plan.noise_at == "coordinator" else None

    def operator_access(self) -> "OperatorAccess":
        """How this host's operator reaches the coordinator that runs on this folder."""
        from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess

        listening = address(self.settings.listen.silos)
        return OperatorAccess(
            address=str(Address(reachable(listening.host), listening.port)),
            federation=self.federation,
            pair=self.keys.present_operator_pair(),
            trust=self.keys.trust,
        )

    @property
    def public_address(self) -> str:
        """host:port by which silos and operators elsewhere reach this coordinator."""
        return str(Address(self.settings.public.hosts[0], self.settings.public_silos_port))

    @property
    def scratch(self) -> "ExportScratch":
        from lorica_coordinator.edges.models.export_scratch import ExportScratch

        return ExportScratch(self.settings.state_folder / "exports")

    def export(self, plan: Digest, model: Digest, target: Path) -> None:
        """Write a model of a plan to the new folder `target`; raises StateError for one that is not in the records."""
        from lorica_coordinator.edges.models.export import export_model
        from lorica_coordinator.edges.models.model_card import made_of
        from lorica_coordinator.edges.models.provenance import provenance_of

        bundle = self.shelf.bundle(plan)
        store = self.open_store()
        try:
            signed, rounds = store.signed_model(plan, model), store.rounds(plan, 0)
        finally:
            store.close()
        if signed is None:
            raise StateError(
                f"model {model} is not in the records of plan {bundle.plan.name}: restore the state from backup"
            )
        made = made_of(rounds, model)
        export_model(
            bundle,
            self.models(bundle),
            model,
            target,
            base=self.base(bundle),
            round_number=signed.round,
            made=made,
            provenance=lambda files: provenance_of(
                bundle.plan,
                signed,
                made=made,
                head=self.audit().signed_head().head,
                now=time.time(),
                files=files,
            ).signed(self.keys.identity),
        )

    def make_state_folder(self) -> None:
        """Where it is missing; raises StorageError."""
        state = self.settings.state_folder
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{state} cannot be created: {error.strerror}") from error

    def open_store(self) -> "SqlRoundStore":
        from lorica_coordinator.edges.database.open_store import open_store

        self.make_state_folder()
        return open_store(self.settings, self.folder.settings, self.federation, self.leadership, identity=self.identity)


@contextmanager
def leading(
    coordinator: Coordinator,
    *,
    waiting: Callable[[], None] | None = None,
    require_able: Callable[[Coordinator], None] = lambda coordinator: None,
    to_settle: bool = False,
) -> Iterator[Coordinator]:
    """The coordinator as one that may write its state. In PostgreSQL one process leads at a time: where another one
    does, `waiting` is called again and again until it does no more; without it Conflict is raised.

    Who has waited begins with the settings and keys that the folder has then. `require_able` refuses one that could not
    do what it is to lead for: as all that can be refused, before it leads, so that one that is started again and again
    begins no terms. The caller holds the folder's lock. With `to_settle` log and ledger may be of an earlier instant;
    else raises IntegrityError naming what is. From here on the folder's lock file shows that the process is alive, for
    as long as each step takes no longer than STEP_S.
    """
    from lorica_coordinator.edges.database.open_store import leave_former_keys

    with Start(coordinator.folder.lock) as start:
        coordinator = replace(coordinator, start=start)
        leave_former_keys(coordinator.settings)
        if not coordinator.settings.storage.database:
            require_able(coordinator)
            yield coordinator
            return
        from lorica_coordinator.edges.upkeep.taken_up import take_up

        present, leadership = coordinator, None
        seen: Mapping[str, Seen] = {}
        while leadership is None:  # once more as what the folder has become while this one stood by
            present, leadership, seen = _elected(present, start, waiting, require_able, to_settle=to_settle)
        try:
            leader = replace(present, leadership=leadership, start=start).with_rows()
            start.went_on()
            if not to_settle:
                take_up(leader.audit(), leader.releases)
            start.went_on()
            with _kept(present, leadership, start, seen) as kept:
                start.went_on()
                yield replace(leader, kept=kept)
        finally:
            leadership.release()


def _elected(
    coordinator: Coordinator,
    start: Start,
    waiting: Callable[[], None] | None,
    require_able: Callable[[Coordinator], None],
    *,
    to_settle: bool,
) -> "tuple[Coordinator, Leadership | None, Mapping[str, Seen]]":
    """The coordinator as its folder has it when it comes to lead; no leadership where that is one of another database,
    or another coordinator, by then: nothing was begun. With what was brought from the bucket meanwhile."""
    from lorica_coordinator.edges.database.open_store import leadership_of
    from lorica_coordinator.edges.kept.kept_in_bucket import Listed
    from lorica_coordinator.edges.kept.opening import kept_so_far

    settings, file = coordinator.settings, coordinator.folder.settings
    start.rest()  # one that waits shows by itself that it is alive
    listed, waited, present = Listed(), False, coordinator
    found = leadership_of(settings, file, coordinator.federation, coordinator.identity, kept_of=lambda: listed.term)
    if found is None:
        raise ConfigurationError(
            f"{file}: [storage] database was emptied while this coordinator stood by: start it again"
        )
    leadership, make_tables = found

    def prepare() -> None:
        nonlocal present, listed
        start.went_on()
        if waited:
            present = Coordinator.load(coordinator.folder)
            if (present.settings.storage, present.identity) != (settings.storage, coordinator.identity):
                raise _Another
        require_able(present)
        if shared := settings.storage.attempt_keys:
            marked(Path(shared), "")  # one that the database knows was compared
        # So that nothing that it refuses begins a term. It is listed once more in the term (`KeptInBucket.look`): until
        # that begins, whoever led before may still put and delete.
        listed = kept_so_far(settings, file)
        start.went_on()
        make_tables()
        start.went_on()
        if not to_settle:
            present = replace(present, leadership=leadership, rows=None).with_rows()
            _require_continuable(present, listed)
            start.went_on()

    ahead: Ahead | None = None
    try:
        with ExitStack() as meanwhile:
            while not leadership.take(prepare):
                if waiting is None:
                    raise Conflict(
                        f"{leadership.holder or 'a coordinator'} leads on the database of [storage] database: give "
                        "this command where that one runs"
                    )
                if settings.storage.blobs and ahead is None:
                    ahead = meanwhile.enter_context(_brought_ahead(coordinator))
                waiting()
                waited = True
    except _Another:
        return present, None, {}
    except BaseException:
        leadership.release()
        raise
    return present, leadership, {} if ahead is None else ahead.seen


class _Another(Exception):
    """The folder is of another database, or of another coordinator, than the one that stood by."""


def _require_continuable(present: Coordinator, listed: "Listed") -> None:
    """That log, ledger, keys and the plan are what a leader can go on with, as far as that shows before it leads: it
    only looks. `listed` is what the bucket has. Raises ConfigurationError, IntegrityError, StateError, StorageError."""
    from lorica_coordinator.edges.upkeep.authorities_in_log import require_newest
    from lorica_coordinator.edges.upkeep.newest_in_log import newest_told
    from lorica_coordinator.edges.upkeep.taken_up import require_can_take_up
    from lorica_coordinator.rounds.states import Finished, Stopped, course_of
    from silo_wire.plans.plan import PlanOfAnotherRelease

    audit = present.audit()
    require_can_take_up(audit, present.releases)
    require_newest(newest_told(audit.place), present.keys.authorities, present.folder.keys)
    store = present.open_store()
    try:
        state = store.load()
    finally:
        store.close()
    course = course_of(state)
    if course is None or f"bundles/{course.terms.plan}.bundle" in listed.paths:
        return
    try:
        present.shelf.bundle(course.terms.plan)
    except PlanOfAnotherRelease:
        if not isinstance(state, (Finished, Stopped)):  # else the next plan is started beside it
            raise


@contextmanager
def _brought_ahead(coordinator: Coordinator) -> "Iterator[Ahead]":
    """Into the folder of one that stands by, from the bucket."""
    from lorica_coordinator.edges.kept.ahead import Ahead, running
    from lorica_coordinator.edges.kept.bucket import Bucket
    from lorica_coordinator.edges.kept.opening import bucket_place

    coordinator.make_state_folder()
    settings, keys = coordinator.settings, coordinator.keys
    bucket = Bucket.at(bucket_place(settings, coordinator.folder.settings))
    ahead = Ahead(settings.state_folder, bucket, coordinator.federation, keys.identity, coordinator.has_key)
    with running(ahead):
        yield ahead


@contextmanager
def _kept(
    coordinator: Coordinator, leadership: "Leadership", start: Start, seen: "Mapping[str, Seen]"
) -> Iterator[KeptFiles]:
    """Where the leader keeps files beside the folder; before the block, both come to hold the same. `seen` were the
    same already."""
    if not coordinator.settings.storage.blobs:
        yield FOLDER_ALONE
        return
    from lorica_coordinator.edges.database.postgresql.leadership import BEAT_S
    from lorica_coordinator.edges.kept.kept_in_bucket import Leader
    from lorica_coordinator.edges.kept.opening import kept_in_bucket

    coordinator.make_state_folder()
    leader = Leader(
        federation=coordinator.federation,
        term=leadership.term,
        identity=coordinator.keys.identity,
        prove=leadership.hold,
    )
    settings, file, has_key = coordinator.settings, coordinator.folder.settings, coordinator.has_key
    with kept_in_bucket(settings, file, leader, has_key, leadership.hold, BEAT_S, start.went_on, seen) as kept:
        yield kept


def disks(coordinator: Coordinator) -> set[Path]:
    """Folders of this coordinator alone, of which each may be on a disk of its own."""
    root, state = coordinator.folder.root, coordinator.settings.state_folder
    return {root} if state.is_relative_to(root) else {root, state}


def with_ballast(coordinator: Coordinator) -> set[Path]:
    """The folders that are to have ballast. Those that stand by share the federation's own in `attempt_keys`."""
    if not coordinator.settings.storage.attempt_keys:
        return disks(coordinator)
    from lorica_coordinator.edges.database.open_store import key_folder

    return disks(coordinator) | {key_folder(coordinator.settings, coordinator.identity)}
