"""`lorica bench` and its kind: what a round, masks, privacy, sums and simulations cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.console.terminal import terminal
from lorica_security.errors import ConfigurationError

if TYPE_CHECKING:
    from silo_agent.service.model_checks import Mode

_Out = Annotated[Path | None, typer.Option(help="JSON file for the figures.")]
_AttemptKeys = Annotated[str, typer.Option(metavar="DIR", help="With the database, as [storage] attempt_keys.")]


def bench(
    silos: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of silos; repeatable. Default: 2, 4, 8.")
    ] = None,
    parameters: Annotated[
        list[int] | None,
        typer.Option(min=400_000, help="Parameters of the model; repeatable. Default: 25 M, 50 M, T5-base."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that count, after one that does not; 1: the first of all, alone.")
    ] = 3,
    wire: Annotated[str, typer.Option(help="float32 or bfloat16, for models and updates.")] = "float32",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Also run flwr or nvflare, from PyPI, or floor, a bare gRPC loop; repeatable."),
    ] = None,
    masked: Annotated[
        str, typer.Option(help="Under masks, with 3 silos or more that check models so: off, spot or joint.")
    ] = "",
    database: Annotated[
        str,
        typer.Option(metavar="URL", help="As [storage] database, an empty one: the same again with the state there."),
    ] = "",
    blobs: Annotated[str, typer.Option(metavar="URL", help="With it, as [storage] blobs, a new prefix.")] = "",
    attempt_keys: _AttemptKeys = "",
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for models, spools and peers' environments.")] = Path(".bench"),
) -> None:
    """Measure one round's infrastructure: time, CPU, memory, bytes, with training replaced by a constant."""
    from lorica.bench import private_loopback
    from lorica.bench.elsewhere.storage import storage
    from lorica.bench.run import PARAMETERS, SILOS, Choice, install_peers, run_bench

    if wire not in ("float32", "bfloat16"):
        raise ConfigurationError(f"wire type {wire!r} is unknown: use float32 or bfloat16")
    choice = Choice(
        silos=silos or SILOS,
        parameters=parameters or PARAMETERS,
        rounds=rounds,
        wire="float32" if wire == "float32" else "bfloat16",
        peers=tuple(dict.fromkeys(peer or ())),
        work=work.absolute(),
        out=out,
        masked=_checks(masked),
        storage=storage(database, blobs, attempt_keys),
    )
    console = terminal()
    install_peers(choice, console)
    if choice.storage is not None:
        console.print("Bytes on the wire are those of all traffic on loopback, where the servers may be.")
    elif not private_loopback.enter():
        console.print("Without root, bytes on the wire are those of all traffic on loopback: let nothing else run.")
    run_bench(choice, console)


def _checks(masked: str) -> "Mode | None":
    match masked:
        case "":
            return None
        case "off" | "spot" | "joint":
            return masked
    raise ConfigurationError(f"--masked {masked} is unknown: use off, spot or joint")


def bench_secagg(
    silos: Annotated[
        list[int] | None,
        typer.Option(
            min=3, help="Number of silos; repeatable. Default: 3, 8, 16, 32, the latter two without whole rounds."
        ),
    ] = None,
    parameters: Annotated[
        list[int] | None,
        typer.Option(min=400_000, help="Parameters of the model; repeatable. Default: T5-base; with a peer 2 M, 25 M."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Whole rounds that count, after one that does not; 0: the masks alone.")
    ] = 2,
    peer: Annotated[str, typer.Option(help="Also run flwr's SecAgg+, from PyPI; with 3 silos unless --silos.")] = "",
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for models, vectors and peers' environments.")] = Path(".bench"),
) -> None:
    """Measure secure aggregation: what masks cost a silo and the coordinator, alone and in whole rounds."""
    from lorica.bench import private_loopback
    from lorica.bench.masked.run import choice, install_peer, run_bench_secagg

    chosen = choice(silos=silos, parameters=parameters, rounds=rounds, peer=peer or None, work=work.absolute(), out=out)
    console = terminal()
    install_peer(chosen, console)
    if not private_loopback.enter() and rounds:
        console.print("Without root, bytes on the wire are those of all traffic on loopback: let nothing else run.")
    run_bench_secagg(chosen, console)


def bench_dp(
    size: Annotated[
        list[str] | None, typer.Option(help="Size of the model; repeatable. Default: mini and small.")
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="plain, ghost, loop, or with -lora, -bfloat16, -again, -lengths; repeatable. Default: all."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Records of a step.")] = 128,
    physical: Annotated[int, typer.Option(min=1, help="Records in memory at a time.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, after one that does not.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Of each way, one after the other; medians count.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch on the CPU; 0: its default.")] = 0,
    out: _Out = None,
) -> None:
    """Measure private training beside plain training: time of a step, noise apart, and peak memory."""
    from lorica.bench.private.run import choice, run_bench_dp

    chosen = choice(
        sizes=size,
        ways=way,
        batch=batch,
        physical=physical,
        steps=steps,
        turns=turns,
        device=device,
        threads=threads,
        out=out,
    )
    run_bench_dp(chosen, terminal())


def bench_training(
    size: Annotated[
        list[str] | None, typer.Option(help="Size of the model; repeatable. Default: small and base.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples of a batch.")] = 16,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches of an optimizer step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn that count, after one that does not.")] = 5,
    turns: Annotated[int, typer.Option(min=1, help="Of each trainer, one after the other; medians count.")] = 3,
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch on the CPU; 0: its default.")] = 0,
    out: _Out = None,
) -> None:
    """Measure plain training beside Hugging Face's Seq2SeqTrainer: examples a second, CPU time and peak memory."""
    from lorica.bench.trainers.run import SIZES, Choice, run_bench_training

    if precision not in ("float32", "bfloat16"):
        raise ConfigurationError(f"precision {precision!r} is unknown: use float32 or bfloat16")
    chosen = Choice(
        sizes=size or SIZES,
        batch=batch,
        accumulation=accumulation,
        steps=steps,
        turns=turns,
        precision="float32" if precision == "float32" else "bfloat16",
        device=device,
        threads=threads,
        out=out,
    )
    run_bench_training(chosen, terminal())


def bench_sums(
    device: Annotated[
        list[str] | None, typer.Option(help="cpu or cuda; repeatable. Default: cpu, and cuda where a GPU is.")
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="sgd, with momentum, or adam; repeatable. Default: both.")
    ] = None,
    silos: Annotated[int, typer.Option(min=1, help="Updates of the round.")] = 4,
    parameters: Annotated[int, typer.Option(min=1, help="Of the model; default: T5-base's.")] = 222_903_552,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is done; the median counts.")] = 3,
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for models and spools.")] = Path(".bench"),
) -> None:
    """Measure the coordinator's aggregation on the CPU and on a GPU: seconds, and whether bits differ."""
    import torch

    from lorica.bench.sums import OPTIMIZERS, Choice, run_bench_sums

    chosen = Choice(
        devices=device or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])],
        optimizers=optimizer or OPTIMIZERS,
        silos=silos,
        parameters=parameters,
        repeats=repeats,
        work=work.absolute(),
        out=out,
    )
    run_bench_sums(chosen, terminal())


def bench_status_page(
    silos: Annotated[int, typer.Option(min=1, help="Silos of the federation.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are in the records.")] = 500,
    repeats: Annotated[int, typer.Option(min=1, help="Looks of each kind; the median counts.")] = 9,
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for the coordinator.")] = Path(".bench"),
) -> None:
    """Measure the status page of a coordinator with many silos and rounds: time and bytes of a look."""
    from lorica.bench.status_page import Choice, run_bench_status_page

    chosen = Choice(silos=silos, rounds=rounds, repeats=repeats, work=work.absolute(), out=out)
    run_bench_status_page(chosen, terminal())


def bench_simulation(
    size: Annotated[
        list[str] | None, typer.Option(help="Size of the model; repeatable. Default: mini, tiny and compact.")
    ] = None,
    largest: Annotated[int, typer.Option(min=4, help="Training examples of the largest of the eight silos.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one and before one that do not.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch; 0: its default.")] = 0,
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for the simulations.")] = Path(".bench"),
) -> None:
    """Measure simulated rounds: examples a second, and what share of the time is neither forward nor backward."""
    from lorica.bench.simulation.run import SIZES, Choice, run_bench_simulation

    chosen = Choice(sizes=size or SIZES, largest=largest, rounds=rounds, threads=threads, work=work.absolute(), out=out)
    run_bench_simulation(chosen, terminal())


def bench_data(
    lines: Annotated[
        list[int] | None, typer.Option(min=100, help="Training lines; repeatable. Default: 100,000 and 400,000.")
    ] = None,
    characters: Annotated[int, typer.Option(min=10, help="Of a line, about.")] = 1000,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training that are timed.")] = 50,
    size: Annotated[str, typer.Option(help="Of the model.")] = "mini",
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for data and spools.")] = Path(".bench"),
) -> None:
    """Measure reading, tokenising and training on lines that memory need not hold, beside lines in memory."""
    from lorica.bench.data import Choice, run_bench_data

    chosen = Choice(
        lines=lines or (100_000, 400_000),
        characters=characters,
        steps=steps,
        size=size,
        work=work.absolute(),
        out=out,
    )
    run_bench_data(chosen, terminal())


def bench_log(
    database: Annotated[str, typer.Option(metavar="URL", help="As [storage] database, an empty one.")],
    attempt_keys: _AttemptKeys = "",
    entries: Annotated[int, typer.Option(min=1, help="Of each log; medians count.")] = 300,
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for the two coordinators.")] = Path(".bench"),
) -> None:
    """Measure an entry of the coordinator's audit log, in files and in rows of PostgreSQL."""
    from lorica.bench.audit_log.run import Choice, run_bench_log
    from lorica.bench.elsewhere.storage import Storage

    stored = Storage(database=database, attempt_keys=attempt_keys)
    run_bench_log(Choice(entries=entries, storage=stored, work=work.absolute(), out=out), terminal())


def bench_many(
    silos: Annotated[
        list[int] | None, typer.Option(min=3, help="Number of silos; repeatable. Default: 32 and 64.")
    ] = None,
    parameters: Annotated[
        int, typer.Option(min=0, help="Of the model, 2 million or more; 0: the masked journal alone, no round.")
    ] = 25_000_000,
    out: _Out = None,
    work: Annotated[Path, typer.Option(help="Folder for models, spools and silos.")] = Path(".bench"),
) -> None:
    """Measure one round of many silos, in the clear and masked, each a process that is forked from a warm one."""
    from lorica.bench import private_loopback
    from lorica.bench.many.run import SILOS, Choice, run_bench_many

    chosen = Choice(silos=silos or SILOS, parameters=parameters, work=work.absolute(), out=out)
    console = terminal()
    if not private_loopback.enter() and parameters:
        console.print("Without root, bytes on the wire are those of all traffic on loopback: let nothing else run.")
    run_bench_many(chosen, console)
