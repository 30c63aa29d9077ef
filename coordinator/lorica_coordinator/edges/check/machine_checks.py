"""The machine below a coordinator: memory, open files, the device of aggregation."""

from lorica_coordinator.edges.check.found import Found
from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_coordinator.edges.server.places import PLACES
from lorica_security.console.preflight import meaning, mebibytes, misconfigured
from lorica_security.errors import ConfigurationError

OWN_MEMORY_BYTES = 400 << 20
"""With PyTorch loaded; the transfers that it works at come on top."""


TRANSFER_BYTES = 10 << 20


LEAST_OPEN_FILES = 2048


def memory(found: Found) -> str:
    needed, free = needed_memory(), found.ground.free_memory()
    if free < needed and found.running is None:
        raise misconfigured(Mistake.MEMORY.value, f"{mebibytes(free)} are free, about {mebibytes(needed)} are needed")
    return f"{mebibytes(free)} free, about {mebibytes(needed)} needed"


def files(found: Found) -> str:
    allowed = found.ground.open_files()
    if allowed < LEAST_OPEN_FILES:
        raise misconfigured(
            Mistake.OPEN_FILES.value, f"a process may have {allowed} files open, {LEAST_OPEN_FILES} are needed"
        )
    return f"a process may have {allowed} files open"


def device(found: Found) -> str:
    wanted = found.settings.aggregation.device
    if wanted != "cuda":
        return f"{wanted}: there is always one"
    # Here, not above: torch takes seconds to import.
    from lorica_coordinator.edges.sums.aggregator import device_for

    with meaning(Mistake.DEVICE.value, ConfigurationError):
        return str(device_for(wanted))


def needed_memory() -> int:
    """About how many bytes a coordinator has here, whatever model and silos."""
    return OWN_MEMORY_BYTES + PLACES * TRANSFER_BYTES
