"""The version of the software that is installed here; the wire's own version is in its package name."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lorica"


@cache  # the files that say it are read once: a status that is asked for says it each time
def software_version() -> str:
    """As the wheel says; "0+source" where nothing is installed and the code runs from its folder."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+source"
