"""What every test shares: property tests that no busy machine can fail, ports of its worker's own, and the folder of
real data."""

import gc
import os
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

# Before anything imports torch: its threads, two workers' and those of the processes that tests start, would fight for
# the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lorica.demo import ports
from silo_wire.tls import leave_tls_1_3_alone

leave_tls_1_3_alone()  # before any test module imports grpc

MEMORY = "/dev/shm"
LEAST_FREE_BYTES = 6 << 30


def _takes_the_tests_folders(folder: str) -> bool:
    """Whether it has room, and lets programs run: test_wheel.py installs some."""
    try:
        at = os.statvfs(folder)
    except OSError:
        return False
    return at.f_bavail * at.f_frsize >= LEAST_FREE_BYTES and not at.f_flag & os.ST_NOEXEC


if _takes_the_tests_folders(
    MEMORY
):  # else where TMPDIR says. What is written is synced all the time, which a disk takes long for
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

PORTS_OF_A_WORKER = 5000  # a whole run chooses some 2000

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers of one run choose from ranges that do not meet: what one has chosen and not yet listens on, no other
    # is given.
    _run = crc32(os.environ["PYTEST_XDIST_TESTRUNUID"].encode())  # two runs at a time begin at different places
    _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    ports._turns = count((_run + _worker * PORTS_OF_A_WORKER) % (ports.END - ports.FIRST))

settings.register_profile("lorica", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)  # the same slice in each run
settings.load_profile("ci" if os.environ.get("CI") else "lorica")

CRASH = "tests/crash/"
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_text2sql() -> Path:
    """The paper's eight silos; a test that needs them is skipped, saying so, where they are missing."""
    folder = Path(os.environ.get("LORICA_SHARED_DATA", REPOSITORY.parent / "shared" / "data")) / "text2sql"
    if not folder.is_dir():
        pytest.skip(f"the paper's text-to-SQL silos are not at {folder}: set LORICA_SHARED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def shared_wikisql() -> Path:
    """WikiSQL's re-split; a test that needs it is skipped, saying so, where it is missing."""
    folder = Path(os.environ.get("LORICA_SHARED_DATA", REPOSITORY.parent / "shared" / "data")) / "wikisql"
    if not folder.is_dir():
        pytest.skip(f"WikiSQL's questions are not at {folder}: set LORICA_SHARED_DATA to the folder of theirs")
    return folder


_COLLECTED = pytest.StashKey[frozenset[str]]()


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> frozenset[str]:
    """Node ids of all tests that were collected, whichever of them are run."""
    return pytestconfig.stash[_COLLECTED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Modules with slow tests begin first, so that no worker is left alone with one at the end."""
    config.stash[_COLLECTED] = frozenset(item.nodeid for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # a stable sort: within both it stays as it was


def pytest_collection_finish() -> None:
    """What the modules have loaded stays: each full collection would go through all of it again, for half a second.

    The second collection finds next to nothing. Python makes full ones once a quarter of what the last one found has
    come to be: without it hardly ever, and each cycle of what tests left behind would keep its descriptors.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of tests/crash look at runs that all begin together: one worker takes all of them."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return CRASH if nodeid.startswith(CRASH) else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # it would begin with the modules that have the most tests, not the longest
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


_internal_errors: list[str] = []


def pytest_internalerror(excrepr: Any) -> None:
    _internal_errors.append(str(excrepr))


def pytest_unconfigure() -> None:
    """The first internal error, a worker's own, is printed last: what it brings about in the other processes hides it
    else."""
    if _internal_errors and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nthe first internal error was:\n{_internal_errors[0]}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What became of each false identity (tests/integration/test_identity_matrix.py), as a table."""
    reports = [*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())]
    rows = [
        (*value, "" if report.passed else "FAILED")
        for report in reports
        for name, value in report.user_properties
        if name == "identity matrix"
    ]
    if rows:
        terminalreporter.section("who was kept out, and how")
        for attack, answer, failed in sorted(rows):
            terminalreporter.write_line(f"{attack:<50}{answer:<24}{failed}".rstrip())
