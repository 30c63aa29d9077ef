"""`make paper-round`: one short round of the paper's protocol on a random T5-base, with what it took.

studies/paper.toml as it is: its model's form and size, its preset, its eight silos. Short are the data (so many
questions of each split of each silo), the rounds (one), the epochs (two, which log too few losses to weigh by, so that
they are evaluated) and the answers; the table at the end says so.
"""

import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from lorica.experiments.definition import Study, Value
from lorica.experiments.practice.random_checkpoint import write_checkpoint
from lorica.experiments.results_file import results
from lorica.experiments.run import run_study
from lorica.simulation.run import silos_in
from lorica.simulation.silo_data import lines
from lorica_security.console.terminal import show_table, terminal
from lorica_security.errors import ConfigurationError, LoricaError
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, SPLITS
from silo_wire.public_text import public_text

PAPER: Final = Path(__file__).parent / "studies" / "paper.toml"
SHORT: Final[dict[str, Value]] = {
    "schedule.rounds": 1,
    "training.epochs": 2,
    "training.overrides.advising.epochs": 2,
    "training.overrides.atis.epochs": 2,
    "training.loss_reduction": "evaluated",
    "training.max_output_tokens": 16,
    "evaluation.initial": False,
}
"""What is not the paper's. A random model never ends an answer, so that each costs as many steps as it may have
tokens."""


def paper_round(data: Path, out: Path, *, examples: int, device: str, threads: int, console: Console) -> dict[str, Any]:
    """Run it in the new folder `out`; the run's line of results, with seconds, peak memory and sizes."""
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"{out} is to be a new folder: {error.strerror or error}") from error
    with console.status("a random T5-base"):
        parameters = write_checkpoint(out / "t5-base", public_text())
    for silo, folder in silos_in(data).items():
        cut(folder, out / "silos" / silo, examples)
    study = Study.read(PAPER)
    study = study.model_copy(
        update={
            "silos": "silos",
            "setups": ("fedopt-lorar",),
            "seeds": (1,),
            "plan": {**study.plan, **SHORT},
        }
    )
    began = time.monotonic()
    run_study(study, out / "study", data=out, device=device, threads=threads, console=console)
    (line,) = results(out / "study")
    return {
        **line,
        "parameters": parameters,
        "all_seconds": time.monotonic() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def cut(source: Path, target: Path, examples: int) -> None:
    """A silo's first questions of each split, its schema, and no database."""
    target.mkdir(parents=True)
    for split in SPLITS:
        (target / f"{split}.jsonl").write_bytes(b"".join(list(lines(source, split))[:examples]))
    shutil.copy(source / SCHEMA_FILE, target / SCHEMA_FILE)


def shares(silos: dict[str, dict[str, Any]]) -> str:
    """Each silo's share of the new model and the loss reduction that it told, largest first."""
    largest_first = sorted(silos.items(), key=lambda silo: -silo[1]["share"])
    return ", ".join(
        f"{name} {row['share']:.1%} ({row['loss_max'] - row['loss_min']:.2f})" for name, row in largest_first
    )


def main(
    data: Annotated[Path, typer.Argument(help="Folder of the paper's eight silos.", show_default=False)],
    out: Annotated[Path, typer.Option(help="A new folder; it takes 20 GB.")] = Path("paper-round"),
    examples: Annotated[int, typer.Option(min=1, help="Of each split of each silo.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of PyTorch; 0: its own choice.")] = 0,
) -> None:
    """One short round of the paper's protocol on a random T5-base."""
    console = terminal()
    try:
        found = paper_round(data, out, examples=examples, device=device, threads=threads, console=console)
    except LoricaError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    (row,) = found["rounds"][0]
    table = Table(title="paper.toml, FedOPT + Lorar, one short round", title_style="dim", show_header=False)
    for name, value in (
        ("parameters", f"{found['parameters']:,}"),
        ("silos", f"{len(row['silos'])}; questions in each split: {examples}"),
        ("unlike the paper", ", ".join(f"{key} = {value}" for key, value in SHORT.items())),
        ("outcome of the round", row["outcome"]),
        ("share (loss reduction)", shares(row["silos"])),
        ("seconds, with plan, scores and test", f"{found['all_seconds']:.0f}"),
        ("peak memory", f"{found['peak_bytes'] / 1e9:.1f} GB"),
    ):
        table.add_row(name, value)
    show_table(console, table)


if __name__ == "__main__":
    typer.run(main)
