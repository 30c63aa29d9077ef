"""How each of the programs begins, and ends."""

import atexit
import gc
import signal
import threading


def begin_program() -> None:
    """Before anything else: Ctrl-C is heard, and the end does not take seconds.

    SIGINT raises KeyboardInterrupt, also where it was ignored: shells ignore it for what scripts start in the background. At the end
    Python would look through everything that PyTorch and others have made, for circles to break.
    """
    if threading.current_thread() is threading.main_thread():  # another one, of a program that calls a command, hears no signals
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)
