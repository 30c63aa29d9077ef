"""`lorica try`, `demo` and `silos`: a federation of generated silos on this machine."""

import re
import sys
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Annotated

import typer

from lorica_security.console.terminal import terminal
from lorica_security.errors import ConfigurationError

_Seed = Annotated[int, typer.Option(min=0, help="Of the generated silos and of the plan.")]
_Values = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A value of the plan, such as wire.update=bfloat16; repeatable."),
]
_Secure = Annotated[bool, typer.Option("--secure", help="Under secure aggregation.")]
_Epsilon = Annotated[
    float | None,
    typer.Option(
        "--epsilon", min=0.1, help="Under record-level differential privacy with this epsilon.", show_default=False
    ),
]
_Labels = Annotated[str, typer.Option(help="half: two of the four silos have no labels, and learn from a teacher.")]


def try_(
    out: Annotated[Path, typer.Option(help="Folder for everything that it leaves.")] = Path("lorica-try"),
    seed: _Seed = 1,
    values: _Values = None,
    secure: _Secure = False,
    epsilon: _Epsilon = None,
    labels: _Labels = "",
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Open the status page in a browser, where there is a screen.")
    ] = True,
    stay: Annotated[
        bool | None,
        typer.Option(
            "--stay/--no-stay",
            help="Coordinator and agents go on at the end, until Ctrl-C. Default: on a terminal.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Try Lorica on this machine, in some two minutes: four generated silos, one coordinator and four agents over
    mutual TLS, which train a small model. At the end it prints what to do next."""
    require_both_sides()
    from lorica.demo.run import run_demo

    console = terminal()
    stays = console.is_terminal and sys.stdin.isatty() if stay is None else stay
    run_demo(
        out,
        seed=seed,
        values=values or (),
        secure=secure,
        epsilon=epsilon,
        labels=labels,
        page=page,
        stay=stays,
        console=console,
    )


def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo leaves.")] = Path("demo-out"),
    seed: _Seed = 1,
    values: _Values = None,
    secure: _Secure = False,
    epsilon: _Epsilon = None,
    labels: _Labels = "",
) -> None:
    """As `lorica try --no-page --no-stay`, in another folder: what `make demo` runs."""
    try_(out, seed=seed, values=values, secure=secure, epsilon=epsilon, labels=labels, page=False, stay=False)


def require_both_sides() -> None:
    """Raises ConfigurationError where the wheel was installed for one side, or for none."""
    try:
        wanted = requires("lorica") or []
    except PackageNotFoundError:  # the source, without an installation
        return
    of_a_side = [line for line in wanted if re.search(r"extra == ['\"](coordinator|silo)['\"]", line)]
    names = [found[0] for line in of_a_side if (found := re.match(r"[A-Za-z0-9._-]+", line))]
    missing = [name for name in names if not any(distributions(name=name))]
    if missing:
        raise ConfigurationError(
            f"this runs a coordinator and agents, and {', '.join(missing)} of theirs is not installed: install the "
            "wheel with its extra `lab` (ops/docs/deployment.md)"
        )


def silos(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Of questions and rows.")] = 1,
) -> None:
    """Write the demo's four generated silos, data and database, to try agents with: DIR/hospital, clinic, bank,
    insurer."""
    from lorica.demo.silos.silos import write_silos

    for place in write_silos(folder, seed=seed).values():
        print(place)
