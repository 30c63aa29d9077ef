"""Which bytes were checked already: a file's digests are not computed again in the process that has just checked or
written it.

A mark is good while the file keeps its inode, size and time of modification, and lives no longer than the process. It
is there to save work where nothing went wrong; whoever can write into the folder of a silo or of the coordinator owns
it anyway.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMark:
    """A file as it was when its bytes were known to be right."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> "FileMark":
        """Of an open file, as it is now."""
        status = os.fstat(descriptor)
        return cls(device=status.st_dev, inode=status.st_ino, size=status.st_size, modified_ns=status.st_mtime_ns)
