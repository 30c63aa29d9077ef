"""`lorica track`: rounds to JSON lines, TensorBoard and MLflow, from a coordinator or from a silo."""

from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.errors import ConfigurationError
from lorica_security.visible_text import visible

if TYPE_CHECKING:
    from lorica.tracking.http_json import HttpJson
    from lorica.tracking.point import Source


def track(
    coordinator: Annotated[
        Path | None,
        typer.Option(help="Folder of a coordinator, or of access that it granted (a viewer's is enough)."),
    ] = None,
    silo: Annotated[Path | None, typer.Option(help="Folder of a silo's agent.")] = None,
    json_lines: Annotated[Path | None, typer.Option(help="File that gets a line for each round.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for `tensorboard --logdir`.")] = None,
    mlflow: Annotated[
        str, typer.Option(help="Address of an MLflow server: https, or on this machine http://127.0.0.1:5000.")
    ] = "",
    experiment: Annotated[str, typer.Option(help="Its name at the MLflow server.")] = "lorica",
    credentials: Annotated[
        Path | None,
        typer.Option(help="File of mode 0600 with the token, or NAME:PASSWORD, for the MLflow server."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="Authorities (PEM) of the MLflow server, in place of the system's.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Tell of what there is, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between two looks.")] = 5.0,
) -> None:
    """Tell JSON lines, TensorBoard and MLflow of each round. A killed tracker goes on where it was.

    No round waits for it. Of single silos it tells what `coordinator rounds` shows: under masks or privacy nothing.
    """
    from lorica.tracking.json_lines import JsonLines
    from lorica.tracking.mlflow import Mlflow
    from lorica.tracking.point import Sink
    from lorica.tracking.tensorboard import TensorBoard
    from lorica.tracking.track import track_on, track_once

    if (coordinator is None) == (silo is None):
        raise ConfigurationError("give one of --coordinator DIR and --silo DIR")
    if not (json_lines or tensorboard or mlflow):
        raise ConfigurationError("give --json-lines FILE, --tensorboard DIR, --mlflow URL, or several of them")
    if (credentials or ca) and not mlflow:
        raise ConfigurationError("--credentials and --ca are for --mlflow")
    source = _source(coordinator, silo, once=once)
    with ExitStack() as opened:
        sinks: list[Sink] = []
        if json_lines:
            sinks.append(opened.enter_context(closing(JsonLines(json_lines))))
        if tensorboard:
            sinks.append(opened.enter_context(closing(TensorBoard(tensorboard))))
        if mlflow:
            sinks.append(Mlflow(_server(mlflow, credentials, ca), experiment))
        if once:
            track_once(source, sinks, _say)
        else:
            with suppress(KeyboardInterrupt):
                track_on(source, sinks, _say, every_s=every)


def _source(coordinator: Path | None, silo: Path | None, *, once: bool) -> "Source":
    """Each side's code alone is imported: a silo's machine need not have the coordinator's."""
    if coordinator is not None:
        from lorica.tracking.of_coordinator import OfCoordinator

        return OfCoordinator(coordinator, offline=once)
    from lorica.tracking.of_silo import OfSilo

    assert silo is not None
    return OfSilo(silo)


def _server(address: str, credentials: Path | None, ca: Path | None) -> "HttpJson":
    from lorica.tracking.http_json import server_at

    return server_at(address, credentials=credentials, authorities=ca)


def _say(line: str) -> None:
    print(visible(line), flush=True)
