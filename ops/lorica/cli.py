"""The `lorica` command: what spans both programs."""

import secrets
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from lorica_security.console.terminal import list_whole_summaries, terminal
from lorica_security.errors import ConfigurationError, LoricaError, exit_code
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


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo leaves.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, help="Of the generated silos and of the plan.")] = 1,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A value of the plan, such as wire.update=bfloat16; repeatable."
        ),
    ] = None,
    secure: Annotated[bool, typer.Option("--secure", help="Under secure aggregation.")] = False,
    epsilon: Annotated[
        float | None,
        typer.Option(
            "--epsilon", min=0.1, help="Under record-level differential privacy with this epsilon.", show_default=False
        ),
    ] = None,
    labels: Annotated[
        str, typer.Option(help="half: two of the four silos have no labels, and learn from a teacher.")
    ] = "",
) -> None:
    """Generate four silos, run one coordinator and four agents over mutual TLS, and show them learn."""
    from lorica.demo.run import run_demo

    run_demo(out, seed=seed, values=values or (), secure=secure, epsilon=epsilon, labels=labels, console=terminal())


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
    if dry_run:
        _estimate(plan, silos, out, device=device, threads=threads, workers=workers)
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
        on_round=lambda row: report.print_round(console, row, score=score()),
    )
    report.print_end(console, done, out, score=score())


def _estimate(plan: Path, silos: Path, out: Path, *, device: str, threads: int, workers: int) -> None:
    from lorica.simulation.forecast import estimate_report
    from lorica.simulation.forecast.dry_run import dry_run
    from lorica.simulation.run import silos_in

    done = dry_run(plan, silos_in(silos), out, device=device, threads=threads, workers=workers)
    estimate_report.write(out, done)
    estimate_report.show(terminal(), done)
    done.require_no_problem()


@app.command(name="verify")
def verify_command(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="As coordinator export made it.", show_default=False)],
    key: Annotated[str, typer.Option(help="The coordinator's identity key, 64 hexadecimal digits.")] = "",
    silo: Annotated[
        Path | None, typer.Option(help="In place of --key: folder of an agent that is enrolled there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The signed statement, for programs.")] = False,
) -> None:
    """Check offline which plan and rounds made an exported model, and that no file of it was changed; exit with 5 if
    one was."""
    from lorica.verify import key_of, told
    from lorica_security.on_disk.provenance import verified

    provenance = verified(model, key_of(key, silo))
    print(provenance.statement.decode() if as_json else "\n".join(told(provenance)))


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
    report: Annotated[bool, typer.Option("--report", help="Run nothing; write the report of what is done.")] = False,
) -> None:
    """Run every set-up, seed and point of a study's grid through the simulated federation, and append each to
    results.jsonl."""
    from lorica.experiments.definition import Study
    from lorica.experiments.reports.report import write_report
    from lorica.experiments.run import run_study
    from lorica.experiments.shard import Shard

    part = Shard.from_text(shard)
    study = Study.read(file)
    if report:
        print(write_report(study, out))
        return
    of_data = file.parent if data is None else data
    console = terminal()
    print(run_study(study, out, data=of_data, device=device, threads=threads, jobs=jobs, shard=part, console=console))


@app.command()
def silos(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Of questions and rows.")] = 1,
) -> None:
    """Write the demo's four generated silos, data and database, to try agents with: DIR/hospital, clinic, bank,
    insurer."""
    from lorica.demo.silos.silos import SILOS, write_silo

    for silo in SILOS:
        write_silo(folder / silo.name, silo, seed=seed)
        print(folder / silo.name)


@app.command()
def bench(
    silos: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of silos; repeatable. Default: 2, 4, 8.")
    ] = None,
    parameters: Annotated[
        list[int] | None,
        typer.Option(min=2_000_000, help="Parameters of the model; repeatable. Default: 25 M, 50 M, T5-base."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that count, after one that does not; 1: the first of all, alone.")
    ] = 3,
    wire: Annotated[str, typer.Option(help="float32 or bfloat16, for models and updates.")] = "float32",
    peer: Annotated[
        str, typer.Option(help="Also run flwr or nvflare, from PyPI, or floor, a bare gRPC loop; prints ratios.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    work: Annotated[Path, typer.Option(help="Folder for models, spools and peers' environments.")] = Path(".bench"),
) -> None:
    """Measure one round's infrastructure: time, CPU, memory, bytes, with training replaced by a constant."""
    from lorica.bench import private_loopback
    from lorica.bench.run import PARAMETERS, SILOS, Choice, install_peer, run_bench

    if wire not in ("float32", "bfloat16"):
        raise ConfigurationError(f"wire type {wire!r} is unknown: use float32 or bfloat16")
    choice = Choice(
        silos=silos or SILOS,
        parameters=parameters or PARAMETERS,
        rounds=rounds,
        wire="float32" if wire == "float32" else "bfloat16",
        peer=peer or None,
        work=work.absolute(),
        out=out,
    )
    console = terminal()
    install_peer(choice, console)
    if not private_loopback.enter():
        console.print("Without root, bytes on the wire are those of all traffic on loopback: let nothing else run.")
    run_bench(choice, console)


@app.command()
def bench_secagg(
    silos: Annotated[
        list[int] | None,
        typer.Option(
            min=3, help="Number of silos; repeatable. Default: 3, 8, 16, 32, the latter two without whole rounds."
        ),
    ] = None,
    parameters: Annotated[
        list[int] | None,
        typer.Option(
            min=2_000_000, help="Parameters of the model; repeatable. Default: T5-base; with a peer 2 M, 25 M."
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="Whole rounds that count, after one that does not; 0: the masks alone.")
    ] = 2,
    peer: Annotated[str, typer.Option(help="Also run flwr's SecAgg+, from PyPI; with 3 silos unless --silos.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
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


@app.command()
def bench_dp(
    size: Annotated[
        list[str] | None, typer.Option(help="Size of the model; repeatable. Default: mini and small.")
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="plain, ghost, hooks, loop, or with -lora; repeatable. Default: all.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Records of a step.")] = 128,
    physical: Annotated[int, typer.Option(min=1, help="Records in memory at a time.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, after one that does not.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch on the CPU; 0: its default.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Measure private training beside plain training: time of a step, noise apart, and peak memory."""
    from lorica.bench.private.run import choice, run_bench_dp

    chosen = choice(
        sizes=size, ways=way, batch=batch, physical=physical, steps=steps, device=device, threads=threads, out=out
    )
    run_bench_dp(chosen, terminal())


@app.command()
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
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
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


@app.command()
def bench_simulation(
    size: Annotated[
        list[str] | None, typer.Option(help="Size of the model; repeatable. Default: mini, tiny and compact.")
    ] = None,
    largest: Annotated[int, typer.Option(min=4, help="Training examples of the largest of the eight silos.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one and before one that do not.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch; 0: its default.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    work: Annotated[Path, typer.Option(help="Folder for the simulations.")] = Path(".bench"),
) -> None:
    """Measure simulated rounds: examples a second, and what share of the time is neither forward nor backward."""
    from lorica.bench.simulation.run import SIZES, Choice, run_bench_simulation

    chosen = Choice(sizes=size or SIZES, largest=largest, rounds=rounds, threads=threads, work=work.absolute(), out=out)
    run_bench_simulation(chosen, terminal())


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
