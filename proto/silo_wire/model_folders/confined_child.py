"""The process that `confined` begins: it takes its own means away, does one job, answers, and ends.

Nothing of torch or transformers is imported, which takes seconds; nor is anything that the request names.
"""

import os
import resource
import sys
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Final

from lorica_security.errors import LoricaError
from silo_wire.model_folders.confined import DONE, REFUSED
from silo_wire.model_folders.model_folder_read import read_folder
from silo_wire.model_folders.tokenizer_trial import PANIC, tried

JOBS: Final[Mapping[str, Callable[[bytes], bytes]]] = {"folder": read_folder, "tokenizer": tried}
_OPEN_FILES: Final = 64


def main(job: str, memory_bytes: str, others: str) -> None:
    seconds, answer_bytes = others.split(",")
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    _take_means_away(int(memory_bytes), float(seconds), int(answer_bytes))
    with os.fdopen(answers, "wb") as file:
        file.write(answered(JOBS[job], sys.stdin.buffer.read()))


def answered(job: Callable[[bytes], bytes], request: bytes) -> bytes:
    try:
        return DONE + job(request)
    except LoricaError as error:
        return REFUSED + str(error).encode("utf-8", "replace")
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        said = " ".join(str(error).split())[:200]
        return REFUSED + f"cannot be read ({type(error).__name__}: {said})".encode("utf-8", "replace")


def _take_means_away(memory_bytes: int, seconds: float, answer_bytes: int) -> None:
    """Memory is what is mapped now plus what is given; no core is dumped, no process or thread made, no large file
    written."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes),
        (resource.RLIMIT_CPU, ceil(seconds)),
        (resource.RLIMIT_FSIZE, answer_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, hard if kind == resource.RLIMIT_CPU else least))
