"""results.jsonl: one line for each run that is done, appended as it ends, each run once. A shard's is results-I.jsonl.

A kill, or a disk that is full, may tear the last line. A torn line is no result, and takes no later one with it.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lorica.experiments.shard import WHOLE, Shard
from lorica_security.errors import StorageError
from lorica_security.host.process_lock import ProcessLock

RESULTS = "results.jsonl"
_NAME = re.compile(r"results(-[0-9]+)?\.jsonl")
BY_MACRO = "test_by_macro"
"""In a line: the scores of the best model by MacroAvg on dev, where it is not the best by MicroAvg."""


def results(out: Path) -> Iterator[dict[str, Any]]:
    """The runs that are done, of all shards, as they were written; of a run that stands there twice the first."""
    return lines_of(*results_files(out))


def results_files(out: Path) -> list[Path]:
    """Those that there are."""
    return sorted(path for path in out.glob("results*.jsonl") if _NAME.fullmatch(path.name))


def one_shard_at_a_time(out: Path) -> ProcessLock:
    """For what shards have in common, which the first of them makes and the others find, and for the report."""
    return ProcessLock(out / "common", "study", patient=True)


def lines_of(*paths: Path) -> Iterator[dict[str, Any]]:
    """The same, of files by any name."""
    seen: set[str] = set()
    for path in paths:
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "run" in line and line["run"] not in seen:
                seen.add(line["run"])
                yield line


def rounded(value: Any) -> Any:
    """With five significant digits in each number that is not whole: lines are published, and nobody reads more."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(of_key) for key, of_key in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def append_result(out: Path, facts: Mapping[str, Any], shard: Shard = WHOLE) -> None:
    """On the disk when this returns, for what the line was made from is deleted next; raises StorageError. Jobs of a
    shard write one after the other."""
    path = (out / RESULTS).with_stem(f"results{shard.suffix}")
    try:
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(f"{json.dumps(rounded(facts))}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; the run is kept: free some space and run the "
            "same command again"
        ) from error
