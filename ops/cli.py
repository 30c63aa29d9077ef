"""The `lorica` command: what spans both programs."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from security.errors import LoricaError, exit_code

app = typer.Typer(
    help="Lorica: a whole federation on one machine.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def lorica() -> None:
    """Lorica: a whole federation on one machine."""


def main() -> None:
    """Entry point: an error of Lorica is one line on stderr and its exit code (ops/docs/exit-codes.md)."""
    try:
        app()
    except LoricaError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(exit_code(error))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo leaves.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(min=0, help="Of the generated silos and of the plan.")] = 1,
) -> None:
    """Generate four silos, run one coordinator and four agents over mutual TLS, and show them learn."""
    from ops.demo.run import run_demo

    run_demo(out, seed=seed, console=Console())


if __name__ == "__main__":
    main()
