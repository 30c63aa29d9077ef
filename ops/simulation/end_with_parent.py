"""A process that a simulation or a study started ends with it, however that ends."""

import multiprocessing
import os
import signal
import threading

LEFT_ALONE = 1
"""Exit code of a process whose parent is gone."""


def end_with_parent() -> None:
    """Called first in such a process. Ctrl-C, which a terminal sends to both, is the parent's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(LEFT_ALONE)

    threading.Thread(target=watch, daemon=True).start()
