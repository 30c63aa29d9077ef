"""What survives the agent's process: SQLite in WAL mode, synced at every commit, in the silo's folder.

It holds whether the silo is paused, the plan and the model it works with, the update on disk and how each round ended.
`silo-agent pause` and `status` open it beside the running agent.
"""

import errno
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from google.protobuf.message import DecodeError
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    func,
    inspect,
    select,
)
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from lorica_security.audit.chain import Head
from lorica_security.errors import LoricaError, StorageError
from lorica_security.host import ballast
from lorica_security.host.files import overwrite, sync_folder
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from silo_agent.rounds.as_planned import ModelOf
from silo_agent.rounds.effects import (
    JournalActivity,
    JournalEffect,
    JournalModel,
    JournalOutcome,
    JournalPlan,
    JournalRoundModel,
    JournalUpdate,
)
from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.codecs.updates_codec import update_header_from_wire, update_header_to_wire
from silo_wire.messages import RoundKey, UpdateHeader
from silo_wire.v1 import federation_pb2

SCHEMA_VERSION = "3"
BUSY_TIMEOUT_S = 10
MOST_REFUSALS = 10_000
_FULL = "disk is full"
"""What SQLite says of SQLITE_FULL."""

_metadata = MetaData()
_facts = Table("facts", _metadata, Column("name", String, primary_key=True), Column("value", String, nullable=False))
_plans = Table(
    "plans",
    _metadata,
    Column("plan", String, primary_key=True),
    Column("prepared_unix_s", Float, nullable=False),
)
_updates = Table(
    "updates",
    _metadata,
    Column("plan", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("saved_unix_s", Float, nullable=False),
    Column("digest", String, nullable=False),
    Column("masked", Boolean, nullable=False),
    Column("private", Boolean, nullable=False),
    Column("header", LargeBinary, nullable=False),  # federation.proto UpdateHeader, unsigned
)
_scores = Table(  # of the update that is saved, the model that it was made from: they leave together, under masks
    "scores",
    _metadata,
    Column("plan", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("attempt", Integer, primary_key=True),
    *(Column(field.name, Integer, nullable=False) for field in fields(Scores)),
)
_reductions = Table(  # the loss reductions that this silo told, the newest attempt's of each round
    "reductions",
    _metadata,
    Column("plan", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("told", Float, nullable=False),
)
_round_models = Table(  # which model was handed out as the one that this round made: for good
    "round_models",
    _metadata,
    Column("plan", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("model", String, nullable=False),
)
_outcomes = Table(
    "outcomes",
    _metadata,
    Column("number", Integer, primary_key=True),
    Column("unix_s", Float, nullable=False),
    Column("plan", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("work", String, nullable=False),  # training, evaluation
    Column("outcome", String, nullable=False),
    Column("detail", String, nullable=False),
)


_refusals = Table(
    "refusals",
    _metadata,
    Column("number", Integer, primary_key=True),
    Column("unix_s", Float, nullable=False),
    Column("rule", String, nullable=False),
    Column("detail", String, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRefusal:
    """What this silo refused, and by which rule."""

    unix_s: float
    rule: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutcome:
    unix_s: float
    plan: str
    round: int
    attempt: int
    work: str
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastModel:
    """The newest whole model in the cache, and the plan it is of."""

    plan: Digest
    model: Digest


class RoundJournal:
    """Raises StorageError when the file cannot be read or written."""

    def __init__(self, path: Path, *, updates: Path, silo: SiloName) -> None:
        self._path, self._updates, self._silo = path, updates, silo
        _begin(path)
        self._engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_S})
        event.listen(self._engine, "connect", _configure)
        try:
            with self._transaction() as connection:
                tables = inspect(connection).get_table_names()
                known = select(_facts.c.value).where(_facts.c.name == "schema_version")
                version = connection.execute(known).scalar() if _facts.name in tables else None
                if version not in (None, SCHEMA_VERSION) or (version is None and tables):
                    raise _another_release(path, version or "none")
                _make(connection)
        except StorageError:
            self.close()
            raise

    def close(self) -> None:
        self._engine.dispose()

    # ---- JournalPort --------------------------------------------------------------------------------------------

    def record(self, effect: JournalEffect) -> None:
        match effect:
            case JournalPlan(plan):
                self._execute(_replacing(_plans, plan=plan, prepared_unix_s=time.time()))
                self.set_fact("plan", plan)
                self._delete_residuals(of_all_but=plan)
            case JournalModel(plan, model):
                self.set_fact("model", f"{plan} {model}")
                self._delete_checkpoints(but=self.checkpoint_file(model))
            case JournalRoundModel(plan=plan, round=number, model=model):
                first = upsert(_round_models).values(plan=plan, round=number, model=model).on_conflict_do_nothing()
                self._execute(first)
            case JournalUpdate(update, made_for):
                if made_for is not None:
                    self._carry_over(made_for, update.key)
                self._record_update(update)
            case JournalOutcome(key=key):
                row = upsert(_outcomes).values(
                    unix_s=time.time(),
                    plan=key.plan,
                    round=key.round,
                    attempt=key.attempt,
                    work="evaluation" if effect.evaluation else "training",
                    outcome=effect.outcome.value,
                    detail=effect.detail,
                )
                self._execute(row)
            case JournalActivity(activity, key, detail):
                shown = f" round {key.round} attempt {key.attempt}" if key else ""
                self.set_fact("activity", f"{activity.value}{shown}{f': {detail}' if detail else ''}")

    def paused(self) -> bool:
        return self.fact("paused") == "yes"

    def round_models(self) -> dict[ModelOf, Digest]:
        with self._transaction() as connection:
            rows = connection.execute(select(_round_models)).all()
        return {(Digest(row.plan), row.round): Digest(row.model) for row in rows}

    def saved_update(self) -> SavedUpdate | None:
        with self._transaction() as connection:
            row = connection.execute(select(_updates).order_by(_updates.c.saved_unix_s.desc()).limit(1)).first()
        if row is None:
            return None
        try:
            header = update_header_from_wire(federation_pb2.UpdateHeader.FromString(row.header))
        except (DecodeError, LoricaError) as error:
            raise StorageError(f"{self._path}: the update of round {row.round} does not parse: {error}") from error
        try:
            whole = self.update_file(header.key).stat().st_size == header.manifest.total_bytes
        except OSError:
            whole = False
        if not whole:
            return None
        return SavedUpdate(
            key=header.key,
            model=header.model,
            manifest=header.manifest,
            summary=header.summary,
            masked=row.masked,
            private=row.private,
            scores=self._scores_of(header.key),
        )

    def told_before(self, key: RoundKey) -> float | None:
        earlier = select(_reductions.c.told).where(_reductions.c.plan == key.plan, _reductions.c.round < key.round)
        with self._transaction() as connection:
            told = connection.execute(earlier.order_by(_reductions.c.round.desc()).limit(1)).scalar_one_or_none()
        return None if told is None else float(told)

    def update_file(self, key: RoundKey) -> Path:
        return self._updates / f"{key.plan[:32]}-round-{key.round}-attempt-{key.attempt}.delta"

    def new_update_file(self, key: RoundKey) -> Path:
        """Writes over the update before: to write over a file costs a tenth of the time of a new one.

        An order for this attempt is the end of every other, so that update is of no use; it is forgotten before its
        file is another's.
        """
        path = self.update_file(key)
        with self._transaction() as connection:
            connection.execute(delete(_updates))
        for other in self._updates.glob("*.delta"):
            if other != path and path.exists():
                other.unlink(missing_ok=True)
            elif other != path:
                other.replace(path)
        return path

    def erase_update(self, key: RoundKey) -> None:
        path = self.update_file(key)
        try:
            with path.open("r+b") as file:
                overwrite(file.fileno())
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{path} cannot be erased: {error.strerror or error}") from error

    def checkpoint_file(self, model: Digest) -> Path:
        return self._updates / f"{model}.checkpoint"

    def ledger_head(self) -> Head:
        """Of the privacy ledger, as it was recorded last."""
        fact = self.fact("ledger_head")
        if fact is None:
            return Head()
        sequence, _, digest = fact.partition(" ")
        return Head(int(sequence), digest)

    def record_ledger_head(self, head: Head) -> None:
        self.set_fact("ledger_head", f"{head.sequence} {head.digest}")

    # ---- what commands read and write ---------------------------------------------------------------------------

    def set_paused(self, paused: bool) -> None:
        self.set_fact("paused", "yes" if paused else "no")

    def last_model(self) -> LastModel | None:
        fact = self.fact("model")
        if fact is None:
            return None
        plan, _, model = fact.partition(" ")
        return LastModel(plan=Digest(plan), model=Digest(model))

    def history(self, last: int) -> Sequence[RecordedOutcome]:
        """The newest outcomes, oldest first."""
        with self._transaction() as connection:
            rows = connection.execute(select(_outcomes).order_by(_outcomes.c.number.desc()).limit(last)).all()
        return [
            RecordedOutcome(
                unix_s=row.unix_s,
                plan=row.plan,
                round=row.round,
                attempt=row.attempt,
                work=row.work,
                outcome=row.outcome,
                detail=row.detail,
            )
            for row in reversed(rows)
        ]

    def record_refusal(self, rule: str, detail: str) -> None:
        """Keeps the newest: a coordinator that goes on asking for what is refused must not fill this silo's disk."""
        with self._transaction() as connection:
            connection.execute(upsert(_refusals).values(unix_s=time.time(), rule=rule, detail=detail))
            newest = select(func.max(_refusals.c.number)).scalar_subquery()
            connection.execute(delete(_refusals).where(_refusals.c.number <= newest - MOST_REFUSALS))

    def refusals(self, last: int) -> Sequence[RecordedRefusal]:
        """The newest refusals, oldest first."""
        with self._transaction() as connection:
            rows = connection.execute(select(_refusals).order_by(_refusals.c.number.desc()).limit(last)).all()
        return [RecordedRefusal(unix_s=row.unix_s, rule=row.rule, detail=row.detail) for row in reversed(rows)]

    def fact(self, name: str) -> str | None:
        with self._transaction() as connection:
            value = connection.execute(select(_facts.c.value).where(_facts.c.name == name)).scalar_one_or_none()
        return None if value is None else str(value)

    def set_fact(self, name: str, value: str) -> None:
        self._execute(_replacing(_facts, name=name, value=value))

    # ---- rows ---------------------------------------------------------------------------------------------------

    def _scores_of(self, key: RoundKey) -> Scores:
        of_key = (_scores.c.plan == key.plan, _scores.c.round == key.round, _scores.c.attempt == key.attempt)
        with self._transaction() as connection:
            row = connection.execute(select(_scores).where(*of_key)).first()
        return (
            NO_SCORES if row is None else Scores(**{field.name: getattr(row, field.name) for field in fields(Scores)})
        )

    def _record_update(self, update: SavedUpdate) -> None:
        header = UpdateHeader(
            key=update.key, model=update.model, manifest=update.manifest, summary=update.summary, signature=b""
        )
        key = update.key
        with self._transaction() as connection:
            connection.execute(delete(_updates))
            connection.execute(delete(_scores))
            told = {"plan": key.plan, "round": key.round, "attempt": key.attempt, **asdict(update.scores)}
            connection.execute(upsert(_scores).values(**told))
            # Later rounds are of a course that the coordinator went back from.
            of_plan = _reductions.c.plan == key.plan, _reductions.c.round >= key.round
            connection.execute(delete(_reductions).where(*of_plan))
            told_now = {"plan": key.plan, "round": key.round, "told": update.summary.loss_reduction}
            connection.execute(upsert(_reductions).values(**told_now))
            connection.execute(
                upsert(_updates).values(
                    plan=key.plan,
                    round=key.round,
                    attempt=key.attempt,
                    saved_unix_s=time.time(),
                    digest=update.manifest.digest,
                    masked=update.masked,
                    private=update.private,
                    header=update_header_to_wire(header, self._silo).SerializeToString(deterministic=True),
                )
            )
        kept = self.update_file(key)
        for path in self._updates.glob("*.delta"):
            if path != kept:
                path.unlink(missing_ok=True)
        self._delete_checkpoints()

    def _carry_over(self, made_for: RoundKey, key: RoundKey) -> None:
        """Give the update's file the name of another attempt as well; the first goes when that attempt is recorded."""
        old, new = self.update_file(made_for), self.update_file(key)
        try:
            new.unlink(missing_ok=True)
            new.hardlink_to(old)
            sync_folder(self._updates)
        except OSError as error:
            raise StorageError(
                f"{old} cannot be kept for attempt {key.attempt} of round {key.round} ({error.strerror}): start the "
                "agent again"
            ) from error

    def _delete_residuals(self, *, of_all_but: Digest) -> None:
        for path in self._updates.glob("*.residual*"):
            if not path.name.startswith(of_all_but[:32]):
                path.unlink(missing_ok=True)

    def _delete_checkpoints(self, *, but: Path | None = None) -> None:
        """What training from another model left is of no use: a round is over when the next model is here."""
        for path in self._updates.glob("*.checkpoint*"):
            if path != but:
                path.unlink(missing_ok=True)

    def _execute(self, statement: Insert) -> None:
        with self._transaction() as connection:
            connection.execute(statement)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).splitlines()[0]
            if _FULL in reason:
                ballast.give_up_above(self._path)  # whoever tries again has room
            raise StorageError(f"{self._path} cannot be used: {reason}; check the disk, or restore it") from error


def _replacing(table: Table, **values: str | float) -> Insert:
    statement = upsert(table).values(**values)
    keys = [column.name for column in table.primary_key]
    return statement.on_conflict_do_update(
        index_elements=keys, set_={name: value for name, value in values.items() if name not in keys}
    )


def _configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _begin(path: Path) -> None:
    """Have a journal at `path`, whole from its first instant: commands look at one that an agent is about to begin."""
    if path.exists():
        return
    try:
        descriptor, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        engine = create_engine(f"sqlite:///{made}")
        event.listen(engine, "connect", _configure)
        try:
            with engine.begin() as connection:
                _make(connection)
        finally:
            engine.dispose()
        try:
            with suppress(FileExistsError):  # another process was first, with the same
                os.link(made, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            os.rename(made, path)  # a file system without links
    except (SQLAlchemyError, OSError) as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise StorageError(f"{path} cannot be written: {reason}") from error
    finally:
        for end in ("", "-wal", "-shm"):
            Path(made + end).unlink(missing_ok=True)


def _make(connection: Connection) -> None:
    """What is not there yet."""
    _metadata.create_all(connection)
    row = upsert(_facts).values(name="schema_version", value=SCHEMA_VERSION).on_conflict_do_nothing()
    connection.execute(row)


def _another_release(path: Path, version: str) -> StorageError:
    newer = version.isdecimal() and int(version) > int(SCHEMA_VERSION)
    remedy = "install the agent that wrote it, or a newer one" if newer else "run the agent that wrote it"
    return StorageError(
        f"{path} has schema version {version}, this agent works with {SCHEMA_VERSION}: {remedy}; nothing was changed"
    )
