"""How each of the programs begins, and ends."""

import atexit
import gc
import io
import os
import signal
import sys
from contextlib import suppress


def begin_program() -> None:
    """Before anything else: Ctrl-C is heard, every text can be printed, and the end does not take seconds.

    SIGINT raises KeyboardInterrupt, also where it was ignored: shells ignore it for what scripts start in the
    background. At the end Python would look through everything that PyTorch and others have made, for circles to break.
    What stdout's encoding does not have comes as an escape, as Python has it for stderr.

    PyTorch's threads wait for one another asleep, unless whoever starts the program says otherwise: its library reads
    that when it is loaded. Awake they keep the cores that they wait for from the threads of another program, and two
    agents on one machine take some four times as long.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if isinstance(sys.stdout, io.TextIOWrapper):  # None where the program was started without one
        sys.stdout.reconfigure(errors="backslashreplace")
    with suppress(ValueError):  # only the main thread hears signals, and a program may call a command in another one
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)
