"""`lorica bench-secagg`: what masks cost, alone and in whole rounds, and on demand flwr's SecAgg+ beside them.

For each size first the cryptography in this process (cryptography.py), then as many rounds of a whole federation, in
the clear and masked (ops/lorica/bench/federation.py), by how silos check round models, then the peer.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorica.bench.federation import run_lorica
from lorica.bench.figures import figures, write_figures
from lorica.bench.masked import availability, cryptography
from lorica.bench.masked.checks import ModelCheck
from lorica.bench.masked.costs import Cost
from lorica.bench.masked.cryptography import LOST, MaskFigures
from lorica.bench.masked.figures import Entry, growth
from lorica.bench.model import T5_BASE_PARAMETERS
from lorica.bench.peers.flwr_secagg import FlwrSecAgg, PeerMasks
from lorica.bench.run import (
    BYTES_PER_PARAMETER,
    BYTES_PER_PARAMETER_AND_SILO,
    MASKED_VECTOR_BYTES,
    empty_folder,
    table_of,
)
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError
from silo_agent.service.model_checks import Mode

SILOS = (3, 8, 16, 32)
FEDERATIONS = (3, 8)
"""Those of SILOS of which every silo is also run as a process: a machine with few cores says nothing about more of
them."""
ROUNDS: tuple[Mode | None, ...] = (None, "off", "spot", "joint")
"""In the clear, then masked: how silos check round models."""
PARAMETERS = (T5_BASE_PARAMETERS,)
PEER_SILOS = (3,)
PEER_PARAMETERS = (2_000_000, 25_000_000)
PEERS = {peer.name: peer for peer in (FlwrSecAgg(),)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure: the cryptography for `silos`, whole rounds for `federations`, none where `rounds` is 0.

    `work` is a folder of the benchmark's own, `out` the JSON file that is written, if any.
    """

    silos: Sequence[int]
    federations: Sequence[int]
    parameters: Sequence[int]
    rounds: int
    peer: str | None
    work: Path
    out: Path | None


def choice(
    *,
    silos: Sequence[int] | None,
    parameters: Sequence[int] | None,
    rounds: int,
    peer: str | None,
    work: Path,
    out: Path | None,
) -> Choice:
    """With what is left out filled in; raises ConfigurationError for what cannot be measured."""
    if peer is not None and peer not in PEERS:
        raise ConfigurationError(f"peer {peer!r} has no secure aggregation here: use {', '.join(PEERS)}")
    chosen = Choice(
        silos=silos or (PEER_SILOS if peer else SILOS),
        federations=silos or (PEER_SILOS if peer else FEDERATIONS),
        parameters=parameters or (PEER_PARAMETERS if peer else PARAMETERS),
        rounds=rounds,
        peer=peer,
        work=work,
        out=out,
    )
    if min(chosen.silos) < 3:
        raise ConfigurationError(f"SILOS={min(chosen.silos)}: a masked sum takes at least 3 silos")
    if peer is not None:
        if rounds < 2:
            raise ConfigurationError("a peer's first round is not counted: use ROUNDS=2 or more with PEER")
        if max(chosen.parameters) > (most := PEERS[peer].most_parameters):
            raise ConfigurationError(
                f"{peer} can mask up to {most:,} parameters: use PARAMETERS={most} or fewer with PEER"
            )
    return chosen


def install_peer(chosen: Choice, console: Console) -> None:
    """The only step that needs the network; raises StateError when it fails."""
    if chosen.peer is not None:
        with console.status(f"{chosen.peer}: installing"):
            PEERS[chosen.peer].install(_venv(chosen, chosen.peer))


def run_bench_secagg(chosen: Choice, console: Console) -> list[Entry]:
    """Measure every size and print each as it is done; raises StorageError, StateError. The peer, if any, is
    installed."""
    results: list[Entry] = []
    for parameters in chosen.parameters:
        of_size: list[MaskFigures] = []
        for silos in chosen.silos:
            found: list[Entry] = []
            for one in _measure(chosen, silos=silos, parameters=parameters, console=console):
                found.append(one)
                write_figures(chosen.out, [entry.to_json() for entry in (*results, *found)])
            of_size += [one.masks for one in found if isinstance(one.masks, MaskFigures)]
            for table in _tables(found):
                show_table(console, table)
            results += found
        if (more := growth(of_size)) is not None:
            console.print(
                f"{parameters:,} parameters: one more silo costs every silo {more.mask_s:.3g} CPU s of masking, and "
                f"the coordinator {more.unmask_s:.3g} CPU s"
            )
    show_table(console, availability.table())
    return results


def _measure(chosen: Choice, *, silos: int, parameters: int, console: Console) -> Iterator[Entry]:
    """Each as soon as it is measured: whole rounds take minutes."""
    what = f"{silos} silos, {parameters / 1e6:.1f} M parameters"
    place = empty_folder(chosen.work, "masks", needed=cryptography.FILES * 4 * parameters)
    with console.status(f"masks: {what}"):
        masks = cryptography.measure(place, silos=silos, parameters=parameters)
    shutil.rmtree(place)
    masked = Entry(system="lorica masked", silos=silos, parameters=masks.parameters, masks=masks)
    if not chosen.rounds or silos not in chosen.federations:
        yield masked
        return
    rounds = f"{what}, {chosen.rounds} rounds" + (" and one to warm up" if chosen.rounds > 1 else "")
    per_silo = BYTES_PER_PARAMETER_AND_SILO + MASKED_VECTOR_BYTES
    for masked_as in ROUNDS:
        place = empty_folder(chosen.work, "lorica", needed=parameters * (BYTES_PER_PARAMETER + silos * per_silo))
        with console.status(f"lorica{f' masked, checks {masked_as}' if masked_as else ''}: {rounds}"):
            run = run_lorica(place, silos=silos, parameters=parameters, rounds=chosen.rounds, masked=masked_as)
        shutil.rmtree(place)
        one = figures(run)
        if masked_as is ROUNDS[-1]:
            yield replace(masked, rounds=one)
        else:
            yield Entry(system=one.system, silos=silos, parameters=one.parameters, rounds=one)
    if chosen.peer is not None:
        place = empty_folder(chosen.work, chosen.peer, needed=0)
        with console.status(f"{chosen.peer}: {rounds}"):
            theirs = PEERS[chosen.peer].run(
                venv=_venv(chosen, chosen.peer),
                work=place,
                silos=silos,
                parameters=one.parameters,
                rounds=chosen.rounds,
            )
        shutil.rmtree(place)
        peers = figures(theirs.run)
        yield Entry(system=peers.system, silos=silos, parameters=parameters, rounds=peers, masks=theirs)


def _venv(chosen: Choice, peer: str) -> Path:
    """The one that `lorica bench` has, too."""
    return chosen.work / "venvs" / peer


def _tables(found: Sequence[Entry]) -> list[Table]:
    alone = [one.masks for one in found if isinstance(one.masks, MaskFigures)]
    tables = [table(masks) for masks in alone for table in (_table_of_masks, _table_of_checks)]
    if in_rounds := [one.rounds for one in found if one.rounds is not None]:
        tables.append(table_of(in_rounds))
    if any(isinstance(one.masks, PeerMasks) for one in found):
        tables.append(_table_per_million(found))
    return tables


def _table_of_masks(masks: MaskFigures) -> Table:
    table = Table(title=f"{masks.silos} silos, {masks.parameters:,} parameters: masks alone", title_style="dim")
    for column in ("", "CPU s", "wall s", "memory MB", "relative L2 error"):
        table.add_column(column, justify="right" if column else "left")
    whole, lost = masks.whole, masks.lost
    rows: list[tuple[str, Cost, float | None]] = [
        ("keys and shares, all silos and the coordinator", masks.keys, None),
        (f"masking one silo: encoding, {masks.silos} streams, writing", masks.mask, None),
        ("unmasking: sum, streams, mean", whole.mean, whole.relative_l2_error),
    ]
    if lost is not None:
        rows.append((f"unmasking with {LOST} silos lost", lost.mean, lost.relative_l2_error))
    rows += [
        ("aggregation, with the step and the next model", whole.aggregate, None),
        ("aggregation of as many plain updates", masks.plain, None),
    ]
    for name, cost, error in rows:
        table.add_row(
            name,
            f"{cost.cpu_s:.2f}",
            f"{cost.wall_s:.2f}",
            f"{cost.peak_bytes / 1e6:.1f}",
            "" if error is None else f"{error:.1e}",
        )
    return table


def _table_of_checks(masks: MaskFigures) -> Table:
    """`models` are bytes in whole float32 models."""
    table = Table(title="a silo checks the model of that round, without transport", title_style="dim")
    for column in ("", "CPU s", "memory MB", "fetched MB", "models", "CPU s a model", "coordinator's CPU s"):
        table.add_column(column, justify="right" if column else "left")
    checks: list[tuple[str, ModelCheck]] = [("spot", masks.spot), ("joint", masks.joint)]
    for name, check in checks:
        models = check.fetched_bytes / (4 * masks.parameters)
        table.add_row(
            f"{name}: {check.chunks} chunks",
            f"{check.silo.cpu_s:.2f}",
            f"{check.silo.peak_bytes / 1e6:.1f}",
            f"{check.fetched_bytes / 1e6:.1f}",
            f"{models:.2f}",
            f"{check.silo.cpu_s / models:.2f}" if models >= 1 else "",
            f"{check.shown_cpu_s:.2f}",
        )
    table.caption = (
        f"ML-KEM-768 took {1000 * masks.kem_cpu_s / masks.silos:.2f} ms of CPU time a silo of its keys and shares"
    )
    return table


def _table_per_million(found: Sequence[Entry]) -> Table:
    table = Table(title="CPU seconds per million parameters", title_style="dim")
    for column in ("system", "one round, all processes", "masking one silo", "unmasking", "bytes per parameter"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for one in found:
        millions = one.parameters / 1e6
        both_ways = 2 * one.silos * one.parameters
        table.add_row(
            one.system,
            *(
                "" if seconds is None else f"{seconds / millions:.4f}"
                for seconds in (None if one.rounds is None else one.rounds.cpu_s, one.mask_cpu_s, one.unmask_cpu_s)
            ),
            "" if one.rounds is None else f"{one.rounds.wire_bytes / both_ways:.1f}",
        )
    return table
