"""The `lorica` command: what spans both programs."""

import secrets
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from lorica.commands import bench_commands, demo_commands, model_commands, track_command
from lorica_security.console.terminal import list_whole_summaries, terminal
from lorica_security.errors import LoricaError, exit_code
from lorica_security.host.program import begin_program
from lorica_security.host.software_version import software_version
from silo_wire.tls import leave_tls_1_3_alone

app = typer.Typer(
    help="Lorica: a whole federation on one machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name [sections] of files
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"lorica {software_version()}")
        raise typer.Exit


@app.callback()
def lorica(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lorica: a whole federation on one machine."""


def main() -> None:
    """Entry point: an error of Lorica is one line on stderr and its exit code (ops/docs/exit-codes.md)."""
    begin_program()
    leave_tls_1_3_alone()
    signal.signal(signal.SIGTERM, _end)
    if (
        signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    ):  # `nohup` has it ignored: it is there to outlive its terminal
        signal.signal(signal.SIGHUP, _end)
    try:
        app()
    except LoricaError as error:
        terminal(stderr=True).print(f"error: {error}", soft_wrap=True)
        sys.exit(exit_code(error))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """As after Ctrl-C, whoever was started is stopped on the way out; a second signal does not cut that short."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


app.command(name="try")(demo_commands.try_)
app.command(name="demo")(demo_commands.demo)
app.command(name="silos")(demo_commands.silos)
app.command(name="track")(track_command.track)
app.command(name="verify")(model_commands.verify)
app.command(name="convert")(model_commands.convert)
app.command(name="bench")(bench_commands.bench)
app.command(name="bench-secagg")(bench_commands.bench_secagg)
app.command(name="bench-many")(bench_commands.bench_many)
app.command(name="bench-dp")(bench_commands.bench_dp)
app.command(name="bench-training")(bench_commands.bench_training)
app.command(name="bench-sums")(bench_commands.bench_sums)
app.command(name="bench-data")(bench_commands.bench_data)
app.command(name="bench-log")(bench_commands.bench_log)
app.command(name="bench-simulation")(bench_commands.bench_simulation)
app.command(name="bench-status-page")(bench_commands.bench_status_page)


@app.command(name="simulate")
def simulate_command(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan's folder, with its plan.toml.", show_default=False)
    ],
    silos: Annotated[
        Path, typer.Option(help="Folder of the silos' data folders; their names are the silos'.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for everything; a run that was cut off goes on there.")] = Path(
        "simulation"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="Threads of PyTorch in each process; 0: its own choice, with --workers a share of the cores."
        ),
    ] = 0,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that train silos in parallel, with a model each; 1: silos in turn, in this one."
        ),
    ] = 1,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="D,D",
            help="In place of --device: cuda:0,cuda:1, say, which workers get in turn.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Run no round: estimate its time, traffic, memory and disk from a few real steps, and what silos "
            "would refuse.",
        ),
    ] = False,
) -> None:
    """Run a plan to its end on this machine, with the federation's own parts and no network between them."""
    each = () if devices is None else tuple(devices.split(","))
    if dry_run:
        _estimate(plan, silos, out, device=device, threads=threads, workers=workers, devices=each)
        return
    from functools import cache

    from lorica.simulation import report
    from lorica.simulation.run import silos_in, simulate
    from silo_wire.plans.plan import Plan

    @cache  # asked for once there is a round, when the plan is known to be one
    def score() -> str:
        file = plan / "plan.toml"
        return Plan.from_toml(file.read_text(encoding="utf-8"), str(file)).task.score_label

    console = terminal()
    done = simulate(
        plan,
        silos_in(silos),
        out,
        device=device,
        threads=threads,
        workers=workers,
        devices=each,
        on_round=lambda row: report.print_round(console, row, score=score()),
    )
    report.print_end(console, done, out, score=score())


def _estimate(
    plan: Path, silos: Path, out: Path, *, device: str, threads: int, workers: int, devices: tuple[str, ...]
) -> None:
    from lorica.simulation.forecast import estimate_report
    from lorica.simulation.forecast.dry_run import dry_run
    from lorica.simulation.run import silos_in
    from lorica.simulation.workers.shares import devices_in_turn

    found = silos_in(silos)
    first = devices_in_turn(devices, device=device, workers=min(workers, len(found)))[0]
    done = dry_run(plan, found, out, device=first, threads=threads, workers=workers)
    estimate_report.write(out, done)
    estimate_report.show(terminal(), done)
    done.require_no_problem()


@app.command()
def experiment(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A study's TOML file.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for results; a study that was cut off goes on there.")] = Path(
        "experiment"
    ),
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder that the study's paths are taken from. Default: FILE's.", show_default=False
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at a time, each in a process and with a model of its own.")
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of PyTorch in each run; 0: the cores, shared among the jobs.")
    ] = 0,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Every N-th run alone, from the I-th on; shards share --out.")
    ] = "1/1",
    dask: Annotated[
        str, typer.Option(metavar="tls://HOST:PORT", help="Scheduler of a Dask cluster, whose workers do the runs.")
    ] = "",
    dask_tls: Annotated[
        Path, typer.Option(metavar="DIR", help="Its ca.pem, and this client's cert.pem and key.pem.")
    ] = Path("dask-tls"),
    report: Annotated[bool, typer.Option("--report", help="Run nothing; write the report of what is done.")] = False,
) -> None:
    """Run every set-up, seed and point of a study's grid through the simulated federation, and append each to
    results.jsonl."""
    from lorica.experiments.dask_cluster import DaskCluster
    from lorica.experiments.definition import Study
    from lorica.experiments.reports.report import write_report
    from lorica.experiments.results_file import one_shard_at_a_time
    from lorica.experiments.run import run_study
    from lorica.experiments.shard import Shard

    part = Shard.from_text(shard)
    study = Study.read(file)
    if report:
        with one_shard_at_a_time(out) if (out / "common").exists() else nullcontext():  # beside shards
            print(write_report(study, out))
        return
    page = run_study(
        study,
        out.absolute() if dask else out,
        data=(file.parent if data is None else data).absolute(),
        device=device,
        threads=threads,
        jobs=jobs,
        shard=part,
        console=terminal(),
        cluster=DaskCluster(dask, dask_tls) if dask else None,
    )
    print(page)


@app.command(name="privacy-utility")
def privacy_utility(
    out: Annotated[
        Path, typer.Option(help="JSON file of the results; trainings that it has are not done again.")
    ] = Path("privacy-utility.json"),
    work: Annotated[Path, typer.Option(help="Folder for data and federations; it may be deleted afterwards.")] = Path(
        "privacy-utility"
    ),
    epsilons: Annotated[
        list[float] | None,
        typer.Option("--epsilon", help="One to train with, inf for none; repeatable.", show_default=False),
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", min=0, help="Repeatable.", show_default=False)] = None,
    records: Annotated[
        int | None,
        typer.Option(
            min=1000,
            help="Of each generated silo: 20000, or with --joint 8000, which four silos share.",
            show_default=False,
        ),
    ] = None,
    real: Annotated[
        Path | None,
        typer.Option(help="Folder of the real silo geoquery; without it that row is left out.", show_default=False),
    ] = None,
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="Instead: joint noise beside noise of each silo's own, of eight silos, at the first epsilon.",
        ),
    ] = False,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            help="Of ops/lorica/privacy_utility/comparison.py: trained beside the least epsilon as it is today, and "
            "compared; repeatable. Default: all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train with several epsilons and none, and show what privacy costs in accuracy. Takes some hours; what is done is
    not done again."""
    if joint:
        from lorica.privacy_utility.joint import run_joint

        run_joint(
            work.resolve(),
            epsilon=(epsilons or [1.0])[0],
            seeds=seeds or range(1, 9),
            records=records or 8_000,
            out=out,
            console=terminal(),
        )
        return
    from lorica.privacy_utility.comparison import VARIANTS
    from lorica.privacy_utility.run import run_utility

    run_utility(
        work.resolve(),
        epsilons=epsilons or [1.0, 4.0, float("inf")],
        seeds=seeds or range(1, 9),
        records=records or 20_000,
        real=real,
        out=out,
        console=terminal(),
        variants=variants or list(VARIANTS),
    )


@app.command()
def soak(
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of who is killed when; drawn, and printed, without it.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the plan.")] = 30,
    silos: Annotated[int, typer.Option(min=1, help="Silos; all of them are the quorum.")] = 5,
    secure: Annotated[bool, typer.Option("--secure", help="Under secure aggregation.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Under record-level differential privacy.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for everything the soak leaves.")] = Path("soak-out"),
) -> None:
    """Kill a process or a command at random every few seconds through a whole plan, and show that nothing is different
    by that."""
    from lorica.soak.run import run_soak

    chosen = secrets.randbelow(1 << 32) if seed is None else seed
    run_soak(out, seed=chosen, rounds=rounds, silos=silos, secure=secure, private=private, console=terminal())


@app.command()
def privacy_audit(
    target: Annotated[
        list[str] | None, typer.Option(help="conformity, trainer, transcript or weight; repeatable. Default: all four.")
    ] = None,
    claim: Annotated[
        list[float] | None, typer.Option(help="Epsilon that is claimed; repeatable. Default: 1, 4 and 8.")
    ] = None,
    canaries: Annotated[int, typer.Option(min=10, max=20_000, help="Canary records of a training.")] = 2000,
    releases: Annotated[int, typer.Option(min=10, help="Noised weights, for the target weight.")] = 25_000,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the model, the coins and the noise that is not a silo's own.")
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for what was found.")] = None,
) -> None:
    """Hold what private training does against what it promises, and what an attack on it proves of epsilon against what
    is claimed."""
    from lorica.privacy_audit.run import choice, run_audit

    chosen = choice(targets=target, claims=claim, canaries=canaries, releases=releases, seed=seed, out=out)
    run_audit(chosen, terminal())


list_whole_summaries(app)

if __name__ == "__main__":
    main()
