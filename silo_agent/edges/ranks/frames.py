"""What goes between an agent and the ranks of its training: JSON files in a private folder, each written whole.

A folder and no socket, because compute nodes of a cluster often cannot reach the agent, and because nobody but the
owner of a folder of mode 0700 can write into it. There is no pickle: a frame is parsed into one of these values, and
nothing of it is ever run. One call is under way at a time.

    start.json     what the ranks are to know, and the plan's bundle beside it in `plan`
    alive          a number that the agent raises while it lives
    rank-R         a process is rank R: no other may be
    hello-R.json   of rank R: what it is and runs
    ready-R.json   of rank R: the data are read, the ranks have met
    met-R          a number that rank R raises while it trains
    call-N.json    what to train; stop-N: that it is to end
    progress-N     of rank 0: the fraction done; notice-N-K.json: what people should know
    out-N-R.json   what came of call N at rank R
    end            the ranks are to end; gone-R: rank R heard it, or ended before
"""

import os
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal, Self

from blake3 import blake3
from pydantic import ValidationError

from lorica_security.console.strict_toml import Section, describe
from lorica_security.errors import (
    ConfigurationError,
    DataError,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    PolicyRefusal,
    StateError,
    StorageError,
)
from lorica_security.host.file_mark import FileMark
from lorica_security.host.files import PRIVATE_FILE_MODE
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.service.ports import RoundModel, TrainedUpdate, WorkCancelled
from silo_agent.service.refusals import RULES
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest
from silo_wire.messages import TrainingSummary

MOST_BYTES = 64 << 20
"""Of a frame; a manifest names 32 bytes a megabyte of its vector."""

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_COMMITMENT: Final = b"lorica/v1/ranks/entropy/"

START, PLAN, ALIVE, END = "start.json", "plan", "alive", "end"


class Frame(Section):
    def write(self, path: Path) -> None:
        """The whole of it or nothing; raises StorageError."""
        put(path, self.model_dump_json().encode())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None where it is not there yet; raises StateError for what is no such frame."""
        raw = taken(path)
        if raw is None:
            return None
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            raise StateError(
                f"{path} is no frame of a rank ({describe(error)}): end whatever else writes into that folder"
            ) from error


class Start(Frame):
    """`examples` is the digest of those that the agent read. `device` and `threads` are a rank's; `entropy` is the file
    of the silo's own secret, `interface` what the ranks listen on, `base` what the plan's adapters are for. `sharded`:
    each of the `world` ranks holds a part of the model."""

    silo: str
    plan: str
    examples: str
    world: int
    sharded: bool
    data: str
    max_bad_lines_share: float
    tasks: list[str]
    device: str
    threads: int
    entropy: str
    interface: str
    timeout_s: float
    base: "RoundModelFrame | None" = None


class Hello(Frame):
    """`born` is what born() tells of `pid`."""

    rank: int
    world: int
    host: str
    pid: int
    born: str
    versions: dict[str, str]


class Ready(Frame):
    """`entropy` is what a rank commits itself to the silo's own secret by: of another one it is another."""

    examples: str
    entropy: str
    device: str
    threads: int


class ManifestFrame(Frame):
    layout: str
    total_bytes: int
    chunk_bytes: int
    chunks: str

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        return cls(
            layout=manifest.layout_digest,
            total_bytes=manifest.total_bytes,
            chunk_bytes=manifest.chunk_bytes,
            chunks=b"".join(manifest.chunk_digests).hex(),
        )

    def manifest(self) -> Manifest:
        """Raises MalformedMessage, ValueError."""
        digests = bytes.fromhex(self.chunks)
        return Manifest(
            Digest(self.layout),
            self.total_bytes,
            self.chunk_bytes,
            tuple(digests[start : start + 32] for start in range(0, len(digests), 32)),
        )


class MarkFrame(Frame):
    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, mark: FileMark | None) -> Self | None:
        return None if mark is None else cls(**asdict(mark))

    def mark(self) -> FileMark:
        return FileMark(**self.model_dump())


class RoundModelFrame(Frame):
    file: str
    manifest: ManifestFrame
    mark: MarkFrame | None

    @classmethod
    def of(cls, model: RoundModel) -> Self:
        return cls(
            file=str(model.file.absolute()),
            manifest=ManifestFrame.of(model.manifest),
            mark=MarkFrame.of(model.mark),
        )

    def model(self) -> RoundModel:
        return RoundModel(
            file=Path(self.file),
            manifest=self.manifest.manifest(),
            mark=None if self.mark is None else self.mark.mark(),
        )


class Call(Frame):
    """TrainerPort.train, of the plan that the ranks were started for."""

    round: int
    model: RoundModelFrame
    update_file: str
    included_update: str | None
    told_before: float | None
    checkpoint_file: str


class Notice(Frame):
    event: str
    detail: str


class SummaryFrame(Frame):
    examples: int
    loss_max: float
    loss_min: float
    loss_first: float
    loss_last: float
    optimizer_steps: int
    seconds: float


class Done(Frame):
    kind: Literal["done"] = "done"
    manifest: ManifestFrame
    mark: MarkFrame | None
    summary: SummaryFrame

    @classmethod
    def of(cls, update: TrainedUpdate) -> Self:
        return cls(
            manifest=ManifestFrame.of(update.manifest),
            mark=MarkFrame.of(update.mark),
            summary=SummaryFrame(
                **{name: getattr(update.summary, name) for name in SummaryFrame.model_fields},
            ),
        )

    def update(self) -> TrainedUpdate:
        return TrainedUpdate(
            manifest=self.manifest.manifest(),
            mark=None if self.mark is None else self.mark.mark(),
            summary=TrainingSummary(**self.summary.model_dump()),
        )


_KINDS: dict[str, type[LoricaError]] = {
    kind.__name__: kind
    for kind in (
        ConfigurationError,
        DataError,
        IntegrityError,
        MalformedMessage,
        StateError,
        StorageError,
        TrainingDiverged,
    )
}
"""What a rank may say went wrong; any other error of Lorica's is told as the one of these that it derives from."""


class Raised(Frame):
    """`parted`: the others are what is wrong. `another`: why is said by another rank."""

    kind: Literal["raised"] = "raised"
    error: str
    text: str
    rule: str = ""
    parted: bool = False
    another: bool = False

    @classmethod
    def of(cls, error: Exception, *, parted: bool = False, another: bool = False) -> Self:
        if isinstance(error, WorkCancelled):
            return cls(error="WorkCancelled", text="")
        if isinstance(error, PolicyRefusal):
            return cls(error="PolicyRefusal", text=str(error), rule=error.rule)
        name = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), "StateError")
        return cls(error=name, text=str(error), parted=parted, another=another)

    def exception(self) -> Exception:
        if self.error == "WorkCancelled":
            return WorkCancelled()
        if self.error == "PolicyRefusal" and (rule := self.rule) in RULES:
            return PolicyRefusal(rule, self.text)
        return _KINDS.get(self.error, StateError)(self.text)


class Out(Frame):
    out: Done | Raised


def put(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 that whoever reads finds whole or not at all; raises StorageError naming the folder.
    It need not outlive a power cut."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(part, _NEW, PRIVATE_FILE_MODE), "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise unwritten(path.parent, error) from error


def born(pid: int) -> str:
    """When process `pid` of this machine began, by no clock that anybody sets: which boot, and how many ticks after
    it. "" where it is not there, or no Linux."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    # The second field is a name in brackets, which may have spaces and brackets; the start is the 22nd of proc(5).
    return f"{boot} {int(stat.rpartition(b')')[2].split()[19])}"


def claim(path: Path) -> bool:
    """Whether nobody made `path` before; raises StorageError naming the folder."""
    try:
        os.close(os.open(path, _NEW, PRIVATE_FILE_MODE))
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritten(path.parent, error) from error
    return True


def unwritten(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"{folder} cannot be written ({error.strerror or error}): make room, or mount its disk again")


def taken(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """The file's bytes; None where it is not there. Raises StateError for one that is too long or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror}): see who else writes there") from error
    with os.fdopen(descriptor, "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise StateError(f"{path} has more than {most} bytes: see who else writes there")
    return raw


def committed(entropy: bytes, plan: Digest) -> str:
    """To the silo's own secret `entropy`, 32 bytes, which nobody learns by it; another one for each plan."""
    return blake3(_COMMITMENT + plan.encode(), key=entropy).hexdigest()


def number_in(path: Path) -> float:
    """The number that `path` holds; 0 where there is none."""
    try:
        return float(taken(path, 100) or 0)
    except ValueError:
        return 0.0
