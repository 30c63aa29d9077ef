"""Where whoever tries Lorica is led: to the status page while it runs, and to commands for afterwards."""

import os
import shlex
import shutil
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Final

from rich.console import Console

from lorica.demo.processes import Processes

LOOK_S: Final = 0.5
DISPLAYS: Final = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")


def can_show_pages(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser would have a screen of its own: without one, Python takes a browser that draws on this
    terminal."""
    return platform == "darwin" or any(environment.get(name) for name in DISPLAYS)


def open_page(address: str) -> None:
    """In the user's browser, `$BROWSER` first; nothing where there is no screen, and nothing waits for it."""
    if can_show_pages(os.environ, sys.platform):
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()


@dataclass(frozen=True, slots=True)
class NextStep:
    """What a person may want, and the command for it, as typed from here."""

    purpose: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIsLeft:
    """What is left of one that was tried: folders of the coordinator, of one silo's agent and data, and of the
    model."""

    coordinator: Path
    agent: Path
    data: Path
    model: Path
    question: str
    """One that the silo held out."""


def next_steps(of: WhatIsLeft, *, lives: bool) -> Iterator[NextStep]:
    """Commands that work as they stand. `lives`: coordinator and agents run, so that another plan finds silos."""
    coordinator = _words("coordinator")
    silo = _words("silo-agent")
    at, there = _option("--dir", of.coordinator), _option("--dir", of.agent)
    yield NextStep("ask the model", f"{silo} ask {shlex.quote(of.question)} {there} {_option('--data', of.data)}")
    yield NextStep("see what left that silo", f"{silo} audit report {there}")
    yield NextStep("see each round", f"{coordinator} rounds {at}")
    yield NextStep(
        "check who made the model",
        f"{_words('lorica')} verify {_path(of.model)} {_option('--silo', of.agent)}",
    )
    if lives:
        yield NextStep("watch the federation", f"{coordinator} watch {at}")
        new = f"{coordinator} plan new mine --size mini --set schedule.rounds=4 {at}"
        yield NextStep("train by a plan of your own", f"{new} && {coordinator} plan start mine {at}")


def elsewhere() -> Iterator[NextStep]:
    """What goes on from there, in a folder of its own or with other people."""
    lorica = f"{_words('lorica')} try"
    yield NextStep("the same under masks", f"{lorica} --secure --out lorica-try-masked")
    yield NextStep("the same under differential privacy", f"{lorica} --epsilon 8 --out lorica-try-private")
    yield NextStep("data of your own", f"{_words('silo-agent')} import FILE --out DIR")
    yield NextStep(
        "two hosts", f"{_words('coordinator')} init DIR --host NAME, then {_words('coordinator')} invite SILO"
    )


def show(console: Console, steps: Sequence[NextStep]) -> None:
    """One command a line, so that it can be copied whole."""
    console.print("\nnext:")
    for step in steps:
        console.print(f"  {step.purpose}:", highlight=False, markup=False)
        console.print(f"    {step.command}", highlight=False, markup=False, soft_wrap=True)


def stay(console: Console, processes: Processes, address: str) -> None:
    """Until Ctrl-C; raises StateError where one of the processes ends before."""
    console.print(f"\nCoordinator and agents go on, and so does {address}", highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops them.")
    try:
        while True:
            processes.check()
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        console.print("stopping the coordinator and all agents ...")


def _words(program: str) -> str:
    """The program as this terminal finds it."""
    return program if shutil.which(program) else shlex.quote(str(Path(sys.executable).with_name(program)))


def _option(name: str, path: Path) -> str:
    return f"{name} {_path(path)}"


def _path(path: Path) -> str:
    """From here, where that is shorter."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
