"""A silo's machine: memory, disk, device, the port of metrics, the jail of SQL."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorica_security.console.preflight import Checks, meaning, mebibytes, misconfigured
from lorica_security.daemon.listen_address import address, require_bindable
from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.host.process_lock import holder
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.ranks.launching import check_launch
from silo_agent.settings import TrainingSection
from silo_agent.sql_sandbox import Walls
from silo_agent.training.data.spool import MEMORY_BYTES
from silo_agent.training.data.text_to_sql_data import split_paths
from silo_wire.model_folders.t5_form import t5_values
from silo_wire.plans.model_files import CONFIG_FILE
from silo_wire.plans.plan import PlanBundle

JAIL = "jail of SQL"
BYTES_PER_PARAMETER = 4
COPIES_IN_MEMORY = 6
"""Parameters, gradient, two moments of AdamW, and as much again for activations: a rough bound, said as such. Where
drift is corrected there are no moments, and one correction."""
OWN_MODELS = 3
"""On disk, beside the plan's initial one: the local and the personal model, and one that is written."""
PACKED = 5
"""So many bytes of lines a byte of a .gz file is taken for."""
WORD_TOKENS, BYTE_TOKENS = 1, 4
"""Bytes of token ids for a byte of lines: a token, which has four bytes, is about four letters, or one of ByT5's."""
MOST_BYTE_TOKENS = 512
"""In the vocabulary of a model whose tokens are bytes; ByT5's has 384."""
FREE_BYTES = 64 << 20
"""On disk, beyond models and updates: the journal, plans, logs of a service manager."""


def check_free_memory(bundle: PlanBundle, free: int, *, silo: str = "") -> str:
    """`silo`: this one, where it has a name so far."""
    teacher = bundle.teacher_bytes(silo)
    needed = BYTES_PER_PARAMETER * (bundle.layout.parameters * COPIES_IN_MEMORY) + teacher
    if bundle.base_layout is not None:
        needed += bundle.base_layout.total_bytes  # frozen: one copy, no gradient
    if free < needed:
        raise misconfigured(
            Mistake.MEMORY.value, f"about {mebibytes(needed)} of memory are needed, {mebibytes(free)} are free"
        )
    of_it = f", {mebibytes(teacher)} of it for a teacher" if teacher else ""
    return f"{mebibytes(free)} free, about {mebibytes(needed)} needed{of_it}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes that a plan's models and updates still take, and of which of them people should know."""

    bytes: int
    note: str


def disk_need(folder: SiloFolder, models_kept: int, bundle: PlanBundle | None, *, own_models: bool = False) -> DiskNeed:
    """Files are written over where they can be, so what is there already needs no more room."""
    needed, kept = FREE_BYTES, ""
    if bundle is not None:
        models = bundle.model_layout.total_bytes * max(2, models_kept)  # a download takes the place of the oldest
        masks = bundle.plan.aggregation.secure_aggregation
        updates = bundle.update_bytes + (bundle.layout.total_bytes if masks else 0)  # the delta itself stays here
        residuals = bundle.layout.total_bytes * 2 if bundle.update_layout.dtype != "float32" else 0
        control = bundle.layout.total_bytes * 3 if bundle.plan.corrects_drift else 0  # two, and one that is written
        if control:
            kept = f", up to {mebibytes(control)} of it for control states, which are as private as records"
        base = bundle.base_layout.total_bytes if bundle.base_layout else 0
        own = bundle.model_layout.total_bytes + OWN_MODELS * bundle.layout.total_bytes if own_models else 0
        parts = (folder.models, folder.updates, folder.personal)
        there = sum(path.stat().st_size for part in parts for path in part.rglob("*"))
        needed += max(0, models + updates + residuals + control + base + own - there)
    return DiskNeed(bytes=needed, note=kept)


def check_disk(folder: SiloFolder, need: DiskNeed, free: int) -> str:
    told = mebibytes(need.bytes)
    if free < need.bytes:
        raise misconfigured(Mistake.DISK.value, f"{folder.root} has {mebibytes(free)} free, about {told} are needed")
    return f"{mebibytes(free)} free in {folder.root}, about {told} needed{need.note}"


def check_spool_room(folder: SiloFolder, data: Path, bundle: PlanBundle | None, need: DiskNeed, free: int) -> str:
    """Whether lines and tokens that memory does not hold find room beside what a plan's models `need`.

    Told by the sizes of the files: the lines are not read for it. Two readings of them are there at once while a plan
    has them read otherwise.
    """
    lines = [size for size in map(_unpacked_bytes, split_paths(data)) if size > MEMORY_BYTES]
    tokens = BYTE_TOKENS if bundle is not None and _has_tokens_of_bytes(bundle) else WORD_TOKENS
    spooled = sum(lines) * (1 + tokens)
    if not spooled:
        return f"none is needed: memory holds the lines of each file ({mebibytes(MEMORY_BYTES)}) and their tokens"
    left = max(0, free - need.bytes)
    if left < spooled:
        raise misconfigured(
            Mistake.SPOOL.value,
            f"{folder.root} has {mebibytes(left)} free beside models and updates; lines and tokens of {data} take "
            f"about {mebibytes(spooled)} there",
        )
    return f"{mebibytes(left)} free beside models and updates, about {mebibytes(spooled)} needed while the agent runs"


def _has_tokens_of_bytes(bundle: PlanBundle) -> bool:
    """False for files that make no model: such a plan is refused before any training."""
    try:
        return bool(t5_values(bundle.files[CONFIG_FILE]).get("vocab_size", MOST_BYTE_TOKENS + 1) <= MOST_BYTE_TOKENS)
    except MalformedMessage:
        return False


def _unpacked_bytes(path: Path) -> int:
    size = path.stat().st_size
    return size * PACKED if path.suffix == ".gz" else size


def check_device(wanted: str) -> str:
    if not wanted.startswith("cuda"):
        return f"{wanted}: there is always one"
    # Here, not above: torch takes seconds to import.
    from silo_agent.training.device import DeviceSettings, chosen_device

    with meaning(Mistake.DEVICE.value, ConfigurationError):
        return str(chosen_device(DeviceSettings(device=wanted)))


def check_processes(training: TrainingSection) -> str:
    with meaning(Mistake.LAUNCH.value, ConfigurationError):
        return check_launch(training)


def check_metrics_port(folder: SiloFolder, listen: str) -> str:
    if not listen:
        return "none: nothing listens here"
    if (agent := holder(folder.lock)) is not None:
        return f"the running agent (process {agent}) has {listen}"
    try:
        require_bindable(address(listen))
    except OSError as error:
        raise misconfigured(
            Mistake.METRICS_PORT.value, f"[metrics] listen = {listen!r} cannot be had: {error.strerror}"
        ) from error
    return f"{listen} is free"


def check_jail(checks: Checks, walls_of: Callable[[], Walls], *, required: bool) -> bool:
    """Whether SQL may run: a missing wall keeps it away where the jail is `required`, and is a notice where it is
    not."""
    tried: list[Walls] = []

    def look() -> str:
        tried.append(walls := walls_of())
        if walls.missing and required:
            raise misconfigured(Mistake.JAIL.value, f"this machine has {walls.missing}")
        return f"{walls.standing}, each tried in a process of its own"

    runs = checks.run(JAIL, look)
    if runs and (missing := tried[0].missing):
        checks.notice(
            "jail incomplete", f"{missing}: what breaks out of SQLite or libpq there can do what this account can"
        )
    return runs
