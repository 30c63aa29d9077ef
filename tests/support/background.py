"""Processes as a script, `nohup` or cron starts them in the background."""

import signal


def without_ctrl_c() -> None:
    """For `preexec_fn`: the program inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
