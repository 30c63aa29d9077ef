"""A full disk, really full: what is small goes on in place of the ballast, so that there is a way out that needs no
other disk."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.database.postgresql.newest import SharedNewest
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator, with_ballast
from lorica_coordinator.vectors.key_place import marked
from lorica_security.daemon.kept_ballast import kept_ballast
from lorica_security.errors import DataError, StorageError
from lorica_security.host import ballast, files
from silo_agent.cli import main as silo_main
from silo_agent.edges.disk.silo_folder import SiloFolder
from tests.support.command_line import run_command
from tests.support.coordinator import HOSPITAL, FederationTemplate
from tests.support.coordinator import federation_template as federation_template
from tests.support.fault_story import MIB, SmallDisk
from tests.support.lifecycle import silo_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small disk that this needs")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with SmallDisk(tmp_path / "disk", size=32 * MIB) as small:
        yield small.folder


def fill(disk: Path) -> Path:
    """To the last block."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(disk).free == 0
    return filler


@pytest.mark.parametrize("has_ballast", [True, False])
def test_audit_and_gc_work_on_a_full_disk_with_ballast(
    disk: Path, federation_template: FederationTemplate, has_ballast: bool
) -> None:
    folder = CoordinatorFolder(disk / "coordinator")
    federation_template.copy(folder.root)
    if has_ballast:
        ballast.keep(folder.root)
    filler = fill(disk)
    for words in (("status",), ("gc",), ("audit", "verify"), ("invite", "clinic-c")):
        done = run_command(coordinator_main, *words, "--dir", folder.root)
        assert (done.code == 0) == (has_ballast or words == ("audit", "verify")), (words, done.err)
    assert not (folder.root / ballast.NAME).exists()
    filler.unlink()
    ballast.keep(folder.root)
    assert (folder.root / ballast.NAME).stat().st_blocks * 512 >= ballast.BYTES


@pytest.mark.parametrize("has_ballast", [True, False])
def test_an_agent_starts_on_a_full_disk_with_ballast(
    disk: Path, federation_template: FederationTemplate, has_ballast: bool
) -> None:
    folder = silo_at(disk / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    if has_ballast:
        ballast.keep(folder.root)
    fill(disk)
    paused = run_command(silo_main, "pause", "--dir", folder.root)
    assert (paused.code == 0) == has_ballast, paused.err
    # The data are looked at when lock and journal are written: that there are none is all that is wrong.
    started = run_command(silo_main, "start", "--dir", folder.root, "--data", disk / "none")
    started.is_refusal(DataError if has_ballast else StorageError)


def test_what_is_small_takes_the_room_of_the_ballast_and_what_is_large_does_not(disk: Path) -> None:
    folder = SiloFolder(disk / "silo")
    files.make_private_folder(folder.root)
    files.append_private(folder.root / "log", b"one entry")
    ballast.keep(folder.root)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        (folder.root / "model").write_bytes(bytes(MIB))
    (folder.root / "model").unlink()
    assert (folder.root / ballast.NAME).exists()
    files.append_private(folder.root / "log", bytes(2 * MIB))
    assert not (folder.root / ballast.NAME).exists()
    files.write_private(folder.root / "key", bytes(MIB))
    with pytest.raises(StorageError, match=r"log cannot be written \(No space left"):
        files.append_private(folder.root / "log", bytes(16 * MIB))


def test_the_folder_of_attempt_keys_has_ballast_of_its_own(
    disk: Path, tmp_path: Path, federation_template: FederationTemplate
) -> None:
    """It is on another disk than the state, and leader and standby look after the same file."""
    folder = CoordinatorFolder(tmp_path / "coordinator")
    federation_template.copy(folder.root)
    coordinator = Coordinator.load(folder)
    storage = coordinator.settings.storage.model_copy(update={"attempt_keys": str(disk)})
    coordinator = replace(coordinator, settings=coordinator.settings.model_copy(update={"storage": storage}))
    marked(disk, "")
    newest = SharedNewest(disk / coordinator.identity / "audit", disk)
    newest.prepare()
    for each in [*with_ballast(coordinator)] * 2:
        ballast.keep(each)
    kept = disk / coordinator.identity / ballast.NAME
    assert kept.stat().st_size == ballast.BYTES
    fill(disk)
    newest.keep(1, "a" * 64, b"line")
    assert not kept.exists()
    fill(disk)
    with pytest.raises(StorageError, match=r"audit/2-b.*No space left on device: free some space on its disk"):
        newest.keep(2, "b" * 64, b"line")


async def test_a_program_that_runs_looks_after_its_ballast_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    twice, loop = asyncio.Event(), asyncio.get_running_loop()

    def keep(folder: Path) -> None:
        looked.append(folder)
        if len(looked) == 4:
            loop.call_soon_threadsafe(twice.set)

    monkeypatch.setattr(ballast, "keep", keep)
    async with kept_ballast(tmp_path / "a", tmp_path / "b", every_s=0):
        await twice.wait()
    assert looked[:4] == [tmp_path / "a", tmp_path / "b"] * 2


def test_ballast_whose_making_a_kill_cut_off_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / ballast.NAME
    file.touch()
    ballast.keep(tmp_path)
    assert file.stat().st_size == ballast.BYTES
