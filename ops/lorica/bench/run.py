"""`lorica bench`: the infrastructure of a round, measured, for Lorica and on demand for peers beside it.

One configuration after the other, each in fresh processes and folders. What is printed and written are medians; where
peers ran too, their figures stand below Lorica's with the ratios.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorica.bench.elsewhere.storage import Storage
from lorica.bench.federation import run_lorica
from lorica.bench.figures import Figures, figures, write_figures
from lorica.bench.model import T5_BASE_PARAMETERS
from lorica.bench.peers import PEERS
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, StorageError
from silo_agent.service.model_checks import Mode
from silo_wire.manifest import Dtype

SILOS = (2, 4, 8)
PARAMETERS = (25_000_000, 50_000_000, T5_BASE_PARAMETERS)
BYTES_PER_PARAMETER = 20
BYTES_PER_PARAMETER_AND_SILO = 16
"""On disk, at most: the plan's model, those kept and one to write over; models kept, update and residuals of a silo,
its spool. A first round alone writes nothing twice and needs two thirds."""
MASKED_VECTOR_BYTES = 8
"""On disk, for each parameter of each silo: what masked rounds keep beyond what plain ones do, the vector at the silo
and, as evidence, the one of the round before at the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure. `work` is a folder of the benchmark's own, `out` the JSON file that is written, if any.

    `masked`: under masks, silos checking models so. `storage`: the same again, state and files there.
    """

    silos: Sequence[int]
    parameters: Sequence[int]
    rounds: int
    wire: Dtype
    peers: Sequence[str]
    work: Path
    out: Path | None
    masked: Mode | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError for what cannot be measured."""
        if self.masked and min(self.silos) < 3:
            raise ConfigurationError(f"SILOS={min(self.silos)}: a masked sum takes at least 3 silos")
        if self.masked and self.peers:
            raise ConfigurationError("peers are measured beside rounds in the clear: leave MASKED or PEER out")
        if self.storage is not None and len(self.silos) * len(self.parameters) > 1:
            raise ConfigurationError(
                "a database is for one coordinator, and each number of silos and parameters has its own: name one of "
                "each, by SILOS and PARAMETERS"
            )


def install_peers(choice: Choice, console: Console) -> None:
    """The only step that needs the network; raises ConfigurationError for an unknown peer, StateError when it fails."""
    for name in choice.peers:
        if name not in PEERS:
            raise ConfigurationError(f"peer {name!r} is unknown: use one of {', '.join(PEERS)}")
    if choice.peers and choice.rounds < 2:
        raise ConfigurationError("a peer's first round is not counted: use ROUNDS=2 or more with PEER")
    for name in choice.peers:
        with _step(console, f"{name} {PEERS[name].version}".strip(), "installed"):
            PEERS[name].install(_venv(choice, name))


def run_bench(choice: Choice, console: Console) -> list[Figures]:
    """Measure every configuration and print each as it is done; raises StorageError, StateError.

    Peers, if any, are installed.
    """
    if choice.storage is not None:
        choice.work.mkdir(parents=True, exist_ok=True)
        choice.storage.require_usable(choice.work)
    results: list[Figures] = []
    for parameters in choice.parameters:
        for silos in choice.silos:
            here: list[Figures] = []
            for one in _measure(choice, silos=silos, parameters=parameters, console=console):
                here.append(one)
                write_figures(choice.out, [each.to_json() for each in (*results, *here)])
            show_table(console, table_of(here))
            results += here
    return results


def _measure(choice: Choice, *, silos: int, parameters: int, console: Console) -> Iterator[Figures]:
    """Each system as soon as it is measured: they take minutes, and a peer may not come to its end."""
    what = f"{silos} silos, {parameters / 1e6:.1f} M parameters, {choice.rounds} rounds" + (
        " and one to warm up" if choice.rounds > 1 else ""
    )
    per_silo = BYTES_PER_PARAMETER_AND_SILO + (MASKED_VECTOR_BYTES if choice.masked else 0)
    needed = parameters * (BYTES_PER_PARAMETER + silos * per_silo)
    for storage in (None,) if choice.storage is None else (None, choice.storage):
        place = empty_folder(choice.work, "lorica", needed=needed if choice.rounds > 1 else needed * 2 // 3)
        with _step(console, f"lorica {storage.words}" if storage else "lorica", what):
            run = run_lorica(
                place,
                silos=silos,
                parameters=parameters,
                rounds=choice.rounds,
                wire=choice.wire,
                masked=choice.masked,
                storage=storage,
            )
        shutil.rmtree(place)
        yield figures(run)
    for name in choice.peers:
        place = empty_folder(choice.work, name, needed=0)
        with _step(console, name, what):
            theirs = PEERS[name].run(
                venv=_venv(choice, name), work=place, silos=silos, parameters=run.parameters, rounds=choice.rounds
            )
        shutil.rmtree(place)
        yield figures(theirs)


@contextmanager
def _step(console: Console, who: str, what: str) -> Iterator[None]:
    """Says what takes minutes while it does, and afterwards how long it took."""
    began = time.monotonic()
    with console.status(f"{who}: {what}"):
        yield
    console.print(f"{who}: {what}, in {time.monotonic() - began:.0f} s", highlight=False, style="dim")


def _venv(choice: Choice, peer: str) -> Path:
    return choice.work / "venvs" / peer


def empty_folder(work: Path, name: str, *, needed: int) -> Path:
    """An empty folder; what an earlier run left in it goes."""
    place = work / name
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise StorageError(f"{place} cannot be made: {error.strerror or error}") from error
    if free < needed:
        raise StorageError(
            f"{place} has {free / 1e9:.0f} GB free, this takes up to {needed / 1e9:.0f} GB: choose another WORK"
        )
    return place


def table_of(found: Sequence[Figures]) -> Table:
    """Of one size; below the first system's figures those of the others, and what they are as multiples of its own."""
    first = found[0]
    table = Table(
        title=f"{first.silos} silos, {first.parameters:,} parameters: medians of {first.rounds} rounds",
        title_style="dim",
    )
    for column in (
        "system",
        "wall s",
        "CPU s",
        "coordinator's",
        "coordinator peak MB",
        "agent peak MB",
        "on the wire MB",
        "growth MB/round",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for one in found:
        table.add_row(
            one.system,
            f"{one.wall_s:.2f}",
            f"{one.cpu_s:.2f}",
            f"{one.coordinator_cpu_s:.2f}",
            *(f"{value / 1e6:,.0f}" for value in (one.coordinator_peak_bytes, one.agent_peak_bytes, one.wire_bytes)),
            f"{one.growth_bytes_per_round / 1e6:+.2f}",
        )
    for one in found[1:]:
        table.add_row(
            f"{one.system} / {first.system}",
            *(
                f"{theirs / ours:.1f} x" if ours > 0 else ""
                for theirs, ours in (
                    (one.wall_s, first.wall_s),
                    (one.cpu_s, first.cpu_s),
                    (one.coordinator_cpu_s, first.coordinator_cpu_s),
                    (one.coordinator_peak_bytes, first.coordinator_peak_bytes),
                    (one.agent_peak_bytes, first.agent_peak_bytes),
                    (one.wire_bytes, first.wire_bytes),
                )
            ),
            "",
            style="bold",
        )
    return table
