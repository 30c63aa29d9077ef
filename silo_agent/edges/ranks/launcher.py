"""All ranks of a silo's training on this machine, of one process that has imported what takes seconds.

    python -P -m silo_agent.edges.ranks.launcher FOLDER PROCESSES

It is what an agent starts where [training] launch is empty. Ranks are forked from it before PyTorch has a thread, and
none of them outlives it: the kernel ends them with it, and it ends when the agent's end of its stdin is closed, or with
the first rank that ends. It opens no port. torchrun does: its store listens on all addresses of the machine, and what
it reads there it unpickles (ADR 30).
"""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn

from silo_agent.edges.ranks import rank_process

_PR_SET_PDEATHSIG: Final = 1


def launch(folder: str, processes: int) -> int:
    """The exit code of the first rank that ended."""
    launcher = os.getpid()
    children = [_forked(folder, rank, processes, launcher) for rank in range(processes)]

    def end() -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)

    def end_with_agent() -> None:
        while os.read(0, 1):
            pass
        end()

    threading.Thread(target=end_with_agent, daemon=True).start()
    ended, status = os.wait()
    children.remove(ended)
    end()
    return os.waitstatus_to_exitcode(status)


def _forked(folder: str, rank: int, processes: int, launcher: int) -> int:
    child = os.fork()
    if child:
        return child
    _be_rank(folder, rank, processes, launcher)


def _be_rank(folder: str, rank: int, processes: int, launcher: int) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == launcher:  # else it went before the kernel knew
            named = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            code = rank_process.main(folder, {**os.environ, **named})
    except BaseException:  # noqa: BLE001 - a child never returns into its parent's frames
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    code = launch(str(Path(sys.argv[1])), int(sys.argv[2]))
    os._exit(code if code >= 0 else rank_process.GONE)
