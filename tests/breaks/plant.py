"""`make breaks`: plant each break of the catalogue in a copy of the working tree, and see that what has to find it
does.

A break is caught when every test that it names fails, and every promise that it names is found broken. What merely does
not run any more is not caught: a test that fails for a name that is missing has seen no break. Each named test, and the
audit, must pass in the copy before anything is planted.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from typing import TypeVar

from tests.breaks.catalogue import CODE, PAGE, ROOT, Break, all_breaks, page, subjects

T = TypeVar("T")
MOST_SECONDS = 300
FORKS = multiprocessing.get_context("forkserver")
"""A process for each run, forked from one that has loaded PRELOADED: what is not ours and takes longest."""
PRELOADED = (
    "numpy",
    "torch",
    "scipy.stats",
    "transformers.models.t5.modeling_t5",
    "opacus.optimizers",
    "hypothesis",
    "pytest",
)
NO_BREAK = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "UnboundLocalError")
"""What code raises that does not run; a test that fails so has not seen what is broken."""


@dataclass(frozen=True, slots=True)
class Outcome:
    caught: bool
    told: str


class Copy:
    """A copy of the working tree: what git tracks, and what it does not ignore."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        for name in listed:
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    @contextmanager
    def with_break(self, one: Break) -> Iterator[None]:
        """Raises ValueError where the break cannot be planted."""
        path = self.root / one.file
        content = path.read_text(encoding="utf-8")
        path.write_text(one.planted(content), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(content, encoding="utf-8")

    def failures(self, tests: Sequence[str]) -> tuple[dict[str, str], str]:
        """Of the tests that failed, by node id without parameters, the exception's message; and what pytest said, where
        that tells nothing."""
        report = self._scratch / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore", "-o", "junit_family=xunit1"]
        code, told = self._run(
            "pytest", *options, f"--junitxml={report}", f"--basetemp={self._scratch / 'tests'}", *tests
        )
        if code not in (0, 1) or not report.exists():
            return {}, f"pytest ended with {code}: {told[-1500:]}"
        failed: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = _node(case)
            if (failure := case.find("failure")) is not None:
                failed.setdefault(name, failure.get("message", ""))
            elif case.find("error") is not None:
                return {}, f"{name} did not begin: {told[-1500:]}"
        return failed, ""

    def broken_promises(self) -> tuple[dict[str, str], str]:
        code, told = self._run("tests.breaks.audited")
        if code != 0:
            return {}, f"the audit ended with {code}: {told[-1500:]}"
        promises: dict[str, str] = json.loads(told.splitlines()[-1])
        return promises, ""

    def _run(self, module: str, *arguments: str) -> tuple[int, str]:
        """`python -m module` in this copy: how it ended, and what it said."""
        output = self._scratch / "output"
        process = FORKS.Process(target=run_in, args=(self.root, output, module, arguments))
        process.start()
        process.join(MOST_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return 124, f"no end after {MOST_SECONDS} s"
        return process.exitcode, output.read_text(encoding="utf-8", errors="replace")


def run_in(root: Path, output: Path, module: str, arguments: Sequence[str]) -> None:
    """In a process of its own: what is imported from here on comes from the copy at `root`."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    ours = {path.name for path in root.iterdir()} | {"silo_wire", "lorica_security", "lorica_coordinator", "lorica"}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [*(str(root / folder) for folder in CODE), *(path for path in sys.path if not _is_ours(path))]
    os.environ.update(PYTHONPATH=os.pathsep.join(str(root / folder) for folder in CODE), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True  # two texts of a file within one second, of one length, would pass for the same
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _is_ours(path: str) -> bool:
    return Path(path or ".").resolve() in [ROOT / folder for folder in CODE]


def _node(case: ElementTree.Element) -> str:
    """As pytest names a test, without its parameters."""
    file, module = case.get("file", ""), case.get("classname", "")
    inner = module.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *inner.split(".")] if inner else [file]) + "::" + case.get("name", "").split("[")[0]


def plant(copy: Copy, one: Break) -> Outcome:
    """Plant one break in `copy`, and take it out again."""
    missed: list[str] = []
    try:
        with copy.with_break(one):
            if one.caught_by:
                failed, trouble = copy.failures(one.caught_by)
                if trouble:
                    return Outcome(False, trouble)
                for test in one.caught_by:
                    told = failed.get(test.split("[")[0])
                    if told is None:
                        missed.append(f"{test} passes")
                    elif told.startswith(NO_BREAK):
                        missed.append(f"{test} fails for code that does not run: {told.splitlines()[0]}")
            if one.audit:
                promises, trouble = copy.broken_promises()
                if trouble:
                    return Outcome(False, trouble)
                missed += [
                    f"the audit does not find {promise!r} broken, but {sorted(promises) or 'nothing'}"
                    for promise in one.audit
                    if promise not in promises
                ]
    except ValueError as error:
        return Outcome(False, str(error))
    return Outcome(not missed, "; ".join(missed))


def looks(breaks: Sequence[Break]) -> list[Callable[[Copy], list[str]]]:
    """Whether all passes before anything is planted: each of these tells what fails in a copy. One for each module of
    tests, as a run of more of them would not end in MOST_SECONDS."""
    modules: dict[str, set[str]] = {}
    for test in (test for one in breaks for test in one.caught_by):
        modules.setdefault(test.split("::")[0], set()).add(test)
    audit = [_broken_unbroken] if any(one.audit for one in breaks) else []
    return [*audit, *(partial(_failures_unbroken, tests=sorted(tests)) for tests in modules.values())]


def _failures_unbroken(copy: Copy, *, tests: Sequence[str]) -> list[str]:
    failed, trouble = copy.failures(tests)
    return [trouble] if trouble else [f"{name}: {message}" for name, message in failed.items()]


def _broken_unbroken(copy: Copy) -> list[str]:
    promises, trouble = copy.broken_promises()
    return [trouble] if trouble else list(promises.values())


def run(breaks: Sequence[Break], *, jobs: int = 1) -> int:
    """Plant all of `breaks`, a line for each; how many were not caught. Raises SystemExit where something fails
    unbroken."""
    with tempfile.TemporaryDirectory(prefix="lorica-breaks-") as folder:
        copies: Queue[Copy] = Queue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))

        def with_a_copy(work: Callable[[Copy], T]) -> T:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        survivors = 0
        to_plant = [one for one in breaks if not one.explained]
        with ThreadPoolExecutor(max_workers=jobs) as threads:
            if told := [line for lines in threads.map(with_a_copy, looks(breaks)) for line in lines]:
                raise SystemExit("without any break this fails already:\n" + "\n".join(told))
            print("without any break all that is to find one passes", flush=True)
            outcomes = threads.map(with_a_copy, [partial(_timed_plant, one=one) for one in to_plant])
            for one, (outcome, seconds) in zip(to_plant, outcomes, strict=True):
                survivors += not outcome.caught
                word = "caught  " if outcome.caught else "SURVIVED"
                print(f"{word} {one.subject}: {one.name} ({seconds:.1f} s) {outcome.told}".rstrip(), flush=True)
    print(
        f"{len(to_plant) - survivors} of {len(to_plant)} breaks were caught, {len(breaks) - len(to_plant)} are "
        "explained"
    )
    return survivors


def _timed_plant(copy: Copy, *, one: Break) -> tuple[Outcome, float]:
    began = time.monotonic()
    return plant(copy, one), time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.breaks.plant", description="Plant breaks, and see them caught."
    )
    parser.add_argument("--only", metavar="NAME", help="the break of this name")
    parser.add_argument("--file", metavar="SUBJECT", choices=subjects(), help="those of one file")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="copies in which breaks are planted side by side"
    )
    parser.add_argument("--page", action="store_true", help="bring the table of ops/docs/breaks.md up to date, and end")
    chosen = parser.parse_args(arguments)
    if chosen.page:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    FORKS.set_forkserver_preload(list(PRELOADED))
    breaks = [one for one in all_breaks() if chosen.only in (None, one.name) and chosen.file in (None, one.subject)]
    if not breaks:
        parser.error(f"no break has the name {chosen.only!r}: names are those of tests/breaks/*.toml")
    return 1 if run(breaks, jobs=chosen.jobs) else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads torch
    sys.exit(main())
