"""`coordinator watch`: how the federation stands, until somebody has seen enough.

It only looks, by the calls of `status` and `rounds`, from the coordinator's host or with a viewer's access. A
coordinator that is stopped is waited for. On a terminal it is a picture that is drawn anew; elsewhere a line for every
change.
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict
from rich.live import Live

from lorica_coordinator.commands.command_line import AsJson, Dir, OnTheHost, reach
from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess
from lorica_coordinator.edges.operator_host.watch_view import ROUNDS_SHOWN, Seen, headline, picture
from lorica_security.console.terminal import one_line, terminal
from lorica_security.errors import Unreachable
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

REDRAWN_S = 0.5
_ASKING = "asking the coordinator ..."
LEAST_S, MOST_S = 0.5, 3600.0
Every = Annotated[float, typer.Option("--every", min=LEAST_S, max=MOST_S, help="Seconds between two looks.")]


def watch(directory: Dir = None, every: Every = 2.0, as_json: AsJson = False) -> None:
    """Watch the federation live, also over restarts of the coordinator. Ctrl-C ends it, with exit code 0."""
    on_a_terminal = sys.stdout.isatty() and not as_json
    with suppress(KeyboardInterrupt):
        if on_a_terminal:
            _draw(directory, every)
        else:
            _tell(directory, every, as_json=as_json)


def _access(directory: Path | None) -> OperatorAccess:
    """Anew each time: a certificate may have been renewed since. Never the state itself, which would keep a coordinator
    from starting."""
    reached = reach(directory)
    return reached.coordinator.operator_access() if isinstance(reached, OnTheHost) else reached.access


def _look(directory: Path | None) -> Seen:
    async def both(stub: "operator_pb2_grpc.OperatorAsyncStub") -> Seen:
        status = await stub.GetStatus(operator_pb2.GetStatusRequest())
        rounds = await stub.ListRounds(operator_pb2.ListRoundsRequest(last=ROUNDS_SHOWN))
        return Seen(status=status, rounds=tuple(rounds.rounds), at=time.monotonic())

    return _access(directory).call(both)


def _draw(directory: Path | None, every: float) -> None:
    seen: Seen | None = None
    lost = _ASKING

    def show() -> object:
        return picture(seen, lost=lost, now=time.monotonic())

    console = terminal()
    with Live(get_renderable=show, console=console, refresh_per_second=1 / REDRAWN_S, screen=False):  # type: ignore[arg-type]
        while True:
            try:
                seen, lost = _look(directory), ""
            except Unreachable:
                lost = f"not reachable since {_clock()}, trying again" if lost in ("", _ASKING) else lost
            time.sleep(every)


def _tell(directory: Path | None, every: float, *, as_json: bool) -> None:
    said = ""
    while True:
        try:
            seen = _look(directory)
            line = headline(seen.status)
            shown = json.dumps(MessageToDict(seen.status, preserving_proto_field_name=True)) if as_json else line
        except Unreachable as error:
            line = "not reachable, trying again"
            shown = json.dumps({"unreachable": one_line(str(error))}) if as_json else line
        if line != said:
            said = line
            print(shown if as_json else f"{_clock()} {shown}", flush=True)
        time.sleep(every)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
