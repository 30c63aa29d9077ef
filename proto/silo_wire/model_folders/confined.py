"""A process of its own for bytes that others wrote: little memory, little time, no file, no environment, and an answer
in bytes.

The child is of the same code, with a job out of `confined_child.JOBS`. Its end is a refusal with a reason, whatever
ended it. Requests and answers pass through files without a name, so that neither side waits for the other and the
answer's length is bounded by the system.
"""

import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Final

import lorica_security
import silo_wire
from lorica_security.errors import MalformedMessage, StorageError
from lorica_security.host.own_code import places_of

REFUSED: Final = b"-"
DONE: Final = b"+"
"""The first byte of an answer; then the reason, or what came out."""
_MIB: Final = 1 << 20

# -I ignores PYTHONPATH, the user's site and the working directory; the code is found where these very packages lie.
_START: Final = (
    "import sys; sys.path[:0] = sys.argv[4:]; from silo_wire.model_folders.confined_child import main; "
    "main(*sys.argv[1:4])"
)
_CODE: Final = places_of(lorica_security, silo_wire)
_ENVIRONMENT: Final = {
    "LANG": "C.UTF-8",
    # Each thread would count for its stack and for an arena of its own.
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SAID_OF_MEMORY: Final = (b"memory allocation of", b"MemoryError", b"bad_alloc")
"""What Rust, Python and C++ say before they end for want of it."""
_SHOWN_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`memory_bytes` beside what Python itself takes; `seconds` of the clock, of which as many of the processor;
    `answer_bytes` of any file."""

    memory_bytes: int = 1024 * _MIB
    seconds: float = 120.0
    answer_bytes: int = 96 * _MIB


USUAL: Final = Limits()


def confined(job: str, request: bytes, what: str, limits: Limits = USUAL) -> bytes:
    """What `job` makes of `request`. Raises MalformedMessage, which begins with `what`, where it refuses or does not
    end well.

    Raises StorageError where this machine cannot begin a process.
    """
    try:
        with (
            tempfile.TemporaryFile() as asked,
            tempfile.TemporaryFile() as answer,
            tempfile.TemporaryFile() as complaints,
        ):
            asked.write(request)
            asked.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, job, str(limits.memory_bytes), _whole(limits), *_CODE],
                stdin=asked,
                stdout=answer,
                stderr=complaints,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # the terminal's Ctrl-C is the parent's to handle
            )
            try:
                code = process.wait(limits.seconds)
            except subprocess.TimeoutExpired:
                raise MalformedMessage(f"{what} took longer than {limits.seconds:g} s") from None
            finally:
                process.kill()
                process.wait()
            read = _read(answer, limits.answer_bytes)
            if code == 0 and read[:1] == DONE:
                return read[1:]
            if code == 0 and read[:1] == REFUSED:
                raise MalformedMessage(f"{what} {' '.join(read[1:1000].decode('utf-8', 'replace').split())}")
            raise MalformedMessage(f"{what} {_end(code, _read(complaints, _SHOWN_BYTES), limits)}")
    except OSError as error:
        raise StorageError(
            f"no process can be begun to look at {what} ({error.strerror or error}): free memory, processes and "
            f"space in {tempfile.tempdir or 'a folder for temporary files'}"
        ) from error


def _whole(limits: Limits) -> str:
    return f"{limits.seconds:g},{limits.answer_bytes}"


def _read(file: IO[bytes], most: int) -> bytes:
    file.seek(0)
    return file.read(most)


def _end(code: int, said: bytes, limits: Limits) -> str:
    if any(it in said for it in _SAID_OF_MEMORY):
        return f"needed more than {limits.memory_bytes // _MIB} MiB"
    if code == -signal.SIGXCPU:
        return f"took longer than {limits.seconds:g} s"
    if code < 0:
        return f"ended the process that looked at it, by {signal.Signals(-code).name}"
    last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it said nothing"]
    return f"ended the process that looked at it: {' '.join(last[0].split())[:200]}"
