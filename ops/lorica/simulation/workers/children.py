"""Processes that a simulation or a study starts: what takes seconds to import is there already, and they end with it,
however that ends.

They are forked from one process (multiprocessing's forkserver) that has imported it and done nothing else. This one
cannot be forked: PyTorch's threads do not survive that, and a GPU neither.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing.context import ForkServerContext

LEFT_ALONE = 1
"""Exit code of a process whose parent is gone."""


def children() -> ForkServerContext:
    """Their context. All that one process starts come from the same server, and theirs as well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lorica.simulation.workers.worker"])
    return context


def end_with_parent() -> None:
    """Called first in such a process. Ctrl-C, which a terminal sends to both, is the parent's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(LEFT_ALONE)

    threading.Thread(target=watch, daemon=True).start()
