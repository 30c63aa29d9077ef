"""Where Lorica's own packages lie, for child processes that start with nothing else on their path."""

from pathlib import Path
from types import ModuleType


def places_of(*packages: ModuleType) -> tuple[str, ...]:
    """The folders to import `packages` from: one where Lorica is installed, several in a checkout."""
    return tuple(dict.fromkeys(str(Path(next(iter(package.__path__))).resolve().parent) for package in packages))
