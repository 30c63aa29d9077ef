"""What survives the agent's process: SQLite in WAL mode, synced at every commit, in the silo's folder.

It holds whether the silo is paused, the plan and the model it works with, the update on disk and how each round ended.
`silo-agent pause` and `status` open it beside the running agent.
"""

import errno
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

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

_TABLES = (
    "facts (name VARCHAR NOT NULL, value VARCHAR NOT NULL, PRIMARY KEY (name))",
    "plans (plan VARCHAR NOT NULL, prepared_unix_s FLOAT NOT NULL, PRIMARY KEY (plan))",
    # `header` is an UpdateHeader of federation.proto, unsigned.
    "updates (plan VARCHAR NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, saved_unix_s FLOAT NOT NULL, "
    "digest VARCHAR NOT NULL, masked BOOLEAN NOT NULL, private BOOLEAN NOT NULL, header BLOB NOT NULL, "
    "PRIMARY KEY (plan, round, attempt))",
    # Of the update that is saved, the model that it was made from: they leave together, under masks.
    "scores (plan VARCHAR NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, questions INTEGER NOT NULL, "
    "exact_matches INTEGER NOT NULL, executed INTEGER NOT NULL, execution_matches INTEGER NOT NULL, "
    "loss INTEGER NOT NULL, PRIMARY KEY (plan, round, attempt))",
    # The loss reductions that this silo told, the newest attempt's of each round.
    "reductions (plan VARCHAR NOT NULL, round INTEGER NOT NULL, told FLOAT NOT NULL, PRIMARY KEY (plan, round))",
    # Which model was handed out as the one that this round made: for good.
    "round_models (plan VARCHAR NOT NULL, round INTEGER NOT NULL, model VARCHAR NOT NULL, PRIMARY KEY (plan, round))",
    # `work` is training or evaluation.
    "outcomes (number INTEGER NOT NULL, unix_s FLOAT NOT NULL, plan VARCHAR NOT NULL, round INTEGER NOT NULL, "
    "attempt INTEGER NOT NULL, work VARCHAR NOT NULL, outcome VARCHAR NOT NULL, detail VARCHAR NOT NULL, "
    "PRIMARY KEY (number))",
    "refusals (number INTEGER NOT NULL, unix_s FLOAT NOT NULL, rule VARCHAR NOT NULL, detail VARCHAR NOT NULL, "
    "PRIMARY KEY (number))",
)
_SET_FACT = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"


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
    """One connection, which threads take in turn. Not `synced`: what is written may be lost with the host's power.

    Raises StorageError when the file cannot be read or written.
    """

    def __init__(self, path: Path, *, updates: Path, silo: SiloName, synced: bool = True) -> None:
        self._path, self._updates, self._silo = path, updates, silo
        self._turn = threading.Lock()
        self._synchronous = "FULL" if synced else "OFF"
        _begin(path, synced=synced)
        try:
            self._connection = _connect(path)
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            with self._transaction() as connection:
                names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                version = _fact(connection, "schema_version") if "facts" in names else None
                if version not in (None, SCHEMA_VERSION) or (version is None and names):
                    raise _another_release(path, version or "none")
                _make(connection)
            self._connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        except StorageError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    # ---- JournalPort --------------------------------------------------------------------------------------------

    def record(self, effect: JournalEffect) -> None:
        match effect:
            case JournalPlan(plan):
                self._write(
                    "INSERT INTO plans VALUES (?, ?) "
                    "ON CONFLICT (plan) DO UPDATE SET prepared_unix_s = excluded.prepared_unix_s",
                    (plan, time.time()),
                )
                self.set_fact("plan", plan)
                self._delete_kept(of_all_but=plan)
            case JournalModel(plan, model):
                self.set_fact("model", f"{plan} {model}")
                self._delete_checkpoints(but=self.checkpoint_file(model))
            case JournalRoundModel(plan=plan, round=number, model=model):
                self._write("INSERT INTO round_models VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (plan, number, model))
            case JournalUpdate(update, made_for):
                if made_for is not None:
                    self._carry_over(made_for, update.key)
                self._record_update(update)
            case JournalOutcome(key=key):
                work = "evaluation" if effect.evaluation else "training"
                self._write(
                    "INSERT INTO outcomes (unix_s, plan, round, attempt, work, outcome, detail) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (time.time(), key.plan, key.round, key.attempt, work, effect.outcome.value, effect.detail),
                )
            case JournalActivity(activity, key, detail):
                shown = f" round {key.round} attempt {key.attempt}" if key else ""
                at_work = f"{activity.value}{shown}{f': {detail}' if detail else ''}"
                self._write(_SET_FACT, ("activity", at_work), durable=False)  # it is of no use to another process

    def paused(self) -> bool:
        return self.fact("paused") == "yes"

    def round_models(self) -> dict[ModelOf, Digest]:
        rows = self._rows("SELECT plan, round, model FROM round_models")
        return {(Digest(row["plan"]), row["round"]): Digest(row["model"]) for row in rows}

    def saved_update(self) -> SavedUpdate | None:
        rows = self._rows("SELECT round, masked, private, header FROM updates ORDER BY saved_unix_s DESC LIMIT 1")
        if not rows:
            return None
        row = rows[0]
        try:
            header = update_header_from_wire(federation_pb2.UpdateHeader.FromString(row["header"]))
        except (DecodeError, LoricaError) as error:
            raise StorageError(f"{self._path}: the update of round {row['round']} does not parse: {error}") from error
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
            masked=bool(row["masked"]),
            private=bool(row["private"]),
            scores=self._scores_of(header.key),
        )

    def told_before(self, key: RoundKey) -> float | None:
        query = "SELECT told FROM reductions WHERE plan = ? AND round < ? ORDER BY round DESC LIMIT 1"
        rows = self._rows(query, (key.plan, key.round))
        return float(rows[0]["told"]) if rows else None

    def update_file(self, key: RoundKey) -> Path:
        return self._updates / f"{key.plan[:32]}-round-{key.round}-attempt-{key.attempt}.delta"

    def new_update_file(self, key: RoundKey) -> Path:
        """Writes over the update before: to write over a file costs a tenth of the time of a new one.

        An order for this attempt is the end of every other, so that update is of no use; it is forgotten before its
        file is another's.
        """
        path = self.update_file(key)
        self._write("DELETE FROM updates")
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
        rows = self._rows(
            "SELECT unix_s, plan, round, attempt, work, outcome, detail FROM outcomes ORDER BY number DESC LIMIT ?",
            (last,),
        )
        return [RecordedOutcome(**dict(row)) for row in reversed(rows)]

    def record_refusal(self, rule: str, detail: str) -> None:
        """Keeps the newest: a coordinator that goes on asking for what is refused must not fill this silo's disk."""
        with self._transaction() as connection:
            added = (time.time(), rule, detail)
            connection.execute("INSERT INTO refusals (unix_s, rule, detail) VALUES (?, ?, ?)", added)
            connection.execute(
                "DELETE FROM refusals WHERE number <= (SELECT max(number) FROM refusals) - ?", (MOST_REFUSALS,)
            )

    def refusals(self, last: int) -> Sequence[RecordedRefusal]:
        """The newest refusals, oldest first."""
        rows = self._rows("SELECT unix_s, rule, detail FROM refusals ORDER BY number DESC LIMIT ?", (last,))
        return [RecordedRefusal(**dict(row)) for row in reversed(rows)]

    def fact(self, name: str) -> str | None:
        with self._turn_of_a_thread():
            return _fact(self._connection, name)

    def set_fact(self, name: str, value: str) -> None:
        self._write(_SET_FACT, (name, value))

    # ---- rows ---------------------------------------------------------------------------------------------------

    def _scores_of(self, key: RoundKey) -> Scores:
        rows = self._rows(
            "SELECT questions, exact_matches, executed, execution_matches, loss FROM scores "
            "WHERE plan = ? AND round = ? AND attempt = ?",
            (key.plan, key.round, key.attempt),
        )
        return Scores(**dict(rows[0])) if rows else NO_SCORES

    def _record_update(self, update: SavedUpdate) -> None:
        header = UpdateHeader(
            key=update.key, model=update.model, manifest=update.manifest, summary=update.summary, signature=b""
        )
        key = update.key
        saved = {
            "plan": key.plan,
            "round": key.round,
            "attempt": key.attempt,
            "saved_unix_s": time.time(),
            "digest": update.manifest.digest,
            "masked": update.masked,
            "private": update.private,
            "header": update_header_to_wire(header, self._silo).SerializeToString(deterministic=True),
        }
        with self._transaction() as connection:
            connection.execute("DELETE FROM updates")
            connection.execute("DELETE FROM scores")
            # Later rounds are of a course that the coordinator went back from.
            connection.execute("DELETE FROM reductions WHERE plan = :plan AND round >= :round", saved)
            connection.execute(
                "INSERT INTO reductions VALUES (:plan, :round, :told)",
                saved | {"told": update.summary.loss_reduction},
            )
            connection.execute(
                "INSERT INTO scores VALUES "
                "(:plan, :round, :attempt, :questions, :exact_matches, :executed, :execution_matches, :loss)",
                saved | asdict(update.scores),
            )
            connection.execute(
                "INSERT INTO updates VALUES "
                "(:plan, :round, :attempt, :saved_unix_s, :digest, :masked, :private, :header)",
                saved,
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

    def _delete_kept(self, *, of_all_but: Digest) -> None:
        """Residuals and control states of other plans."""
        for pattern in ("*.residual*", "*.control*"):
            for path in self._updates.glob(pattern):
                if not path.name.startswith(of_all_but[:32]):
                    path.unlink(missing_ok=True)

    def _delete_checkpoints(self, *, but: Path | None = None) -> None:
        """What training from another model left is of no use: a round is over when the next model is here. Ranks that
        hold a part of a model each have a file each beside the checkpoint, `.STEP-RANK`."""
        kept = [] if but is None else [but, *self._updates.glob(f"{but.name}.*-*")]
        for path in self._updates.glob("*.checkpoint*"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        with self._turn_of_a_thread():
            return self._connection.execute(query, values).fetchall()

    def _write(self, statement: str, values: Sequence[object] = (), *, durable: bool = True) -> None:
        """What is not durable is lost with the machine's power, not with this process."""
        lax = not durable and self._synchronous == "FULL"
        with self._turn_of_a_thread():
            if lax:
                self._connection.execute("PRAGMA synchronous = NORMAL")
            try:
                with _committed(self._connection):
                    self._connection.execute(statement, values)
            finally:
                if lax:
                    self._connection.execute(f"PRAGMA synchronous = {self._synchronous}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._turn_of_a_thread(), _committed(self._connection):
            yield self._connection

    @contextmanager
    def _turn_of_a_thread(self) -> Iterator[None]:
        with self._turn:
            try:
                yield
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> StorageError:
        if _FULL in str(error):
            ballast.give_up_above(self._path)  # whoever tries again has room
        return StorageError(f"{self._path} cannot be used: {error}; check the disk, or restore it")


def _connect(path: Path | str) -> sqlite3.Connection:
    """Transactions are begun and ended by who writes; RoundJournal sees to it that threads take turns."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _committed(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself ends one that finds the disk full
            connection.execute("ROLLBACK")
        raise


def _fact(connection: sqlite3.Connection, name: str) -> str | None:
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row["value"])


def _begin(path: Path, *, synced: bool) -> None:
    """Have a journal at `path`, whole from its first instant: commands look at one that an agent is about to begin."""
    if path.exists():
        return
    try:
        descriptor, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with closing(_connect(made)) as connection:
            if not synced:
                connection.execute("PRAGMA synchronous=OFF")
            with _committed(connection):
                _make(connection)
        try:
            with suppress(FileExistsError):  # another process was first, with the same
                os.link(made, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            os.rename(made, path)  # a file system without links
    except (sqlite3.Error, OSError) as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
    finally:
        for end in ("", "-wal", "-shm"):
            Path(made + end).unlink(missing_ok=True)


def _make(connection: sqlite3.Connection) -> None:
    """What is not there yet."""
    for table in _TABLES:
        connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
    connection.execute("INSERT INTO facts VALUES ('schema_version', ?) ON CONFLICT DO NOTHING", (SCHEMA_VERSION,))


def _another_release(path: Path, version: str) -> StorageError:
    newer = version.isdecimal() and int(version) > int(SCHEMA_VERSION)
    remedy = "install the agent that wrote it, or a newer one" if newer else "run the agent that wrote it"
    return StorageError(
        f"{path} has schema version {version}, this agent works with {SCHEMA_VERSION}: {remedy}; nothing was changed"
    )
