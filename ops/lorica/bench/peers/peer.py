"""What every peer offers to the benchmark."""

from pathlib import Path
from typing import Protocol

from lorica.bench.figures import Run


class Peer(Protocol):
    """A released version of another system, in its real deployment on loopback."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def install(self, venv: Path) -> None:
        """Make the virtual environment with this version from the package index; nothing when it is there.

        Raises StateError with the installer's last words.
        """

    def run(self, *, venv: Path, work: Path, silos: int, parameters: int, rounds: int) -> Run:
        """`rounds` rounds after one that is not counted, in the empty folder `work`; every process has ended after it.

        Raises StateError when a process fails, a round does not end in time or the averaged model is wrong.
        """
