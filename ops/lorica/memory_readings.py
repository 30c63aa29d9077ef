"""How much memory a process has, read from /proc."""

from contextlib import suppress
from pathlib import Path

_RESET_PEAK = "5"  # proc(5), clear_refs


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident now, and at most since the last `reset_peak`; zeros once the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    values = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return int(values.get("VmRSS", 0)) * 1024, int(values.get("VmHWM", 0)) * 1024


def reset_peak(pid: int) -> None:
    with suppress(FileNotFoundError, ProcessLookupError):
        Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
