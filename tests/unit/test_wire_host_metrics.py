"""The disk of a folder as metrics, by the file system's own figures; no GPU is asked for that nobody uses."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lorica_security.daemon.host_metrics import FOLDER, GPU, bytes_in, register_host
from lorica_security.host.software_version import software_version
from silo_wire.wire_version import OURS


def test_a_folder_is_measured_at_each_scrape(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    register_host(registry, tmp_path, str(OURS))
    before = registry.get_sample_value("lorica_folder_bytes")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a").write_bytes(os.urandom(1 << 20))
    (tmp_path / "link").symlink_to("/usr")
    after = registry.get_sample_value("lorica_folder_bytes")
    assert before == 0
    assert after is not None
    assert 1 << 20 <= after < 2 << 20
    disk = os.statvfs(tmp_path)
    assert registry.get_sample_value("lorica_disk_size_bytes") == disk.f_blocks * disk.f_frsize
    free = registry.get_sample_value("lorica_disk_free_bytes")
    assert free is not None
    assert 0 < free <= disk.f_blocks * disk.f_frsize


def test_what_is_installed_is_told(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    register_host(registry, tmp_path, str(OURS))
    text = generate_latest(registry).decode()
    (told,) = [family for family in text_string_to_metric_families(text) if family.name == "lorica_build_info"]
    (sample,) = told.samples
    assert sample.value == 1
    versions = {"version": software_version(), "python": platform.python_version(), "torch": version("torch")}
    assert sample.labels == {**versions, "wire": str(OURS)}


def test_a_folder_that_is_gone_says_nothing_and_the_rest_is_told(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    register_host(registry, tmp_path / "nothing", str(OURS))
    text = generate_latest(registry).decode()
    assert not any(f"\n{name} " in text for name in FOLDER)
    assert "process_resident_memory_bytes" in text
    assert bytes_in(tmp_path / "nothing") == 0


def test_no_gpu_is_told_of_before_one_is_used(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    register_host(registry, tmp_path, str(OURS))
    text = generate_latest(registry).decode()
    assert not any(f"\n{name}{{" in text for name in GPU)


def gone(device: int) -> tuple[int, int]:
    raise RuntimeError("CUDA error: unknown error")


AT_WORK = SimpleNamespace(
    is_initialized=lambda: True,
    device_count=lambda: 1,
    mem_get_info=lambda device: (3, 8),
    memory_reserved=lambda device: 2,
)


@pytest.mark.parametrize(
    ("torch", "free"),
    [
        (SimpleNamespace(cuda=AT_WORK), 3.0),
        (SimpleNamespace(), None),
        (SimpleNamespace(cuda=SimpleNamespace()), None),
        (SimpleNamespace(cuda=SimpleNamespace(**{**vars(AT_WORK), "mem_get_info": gone})), None),
    ],
    ids=["at work", "import under way", "import of its part under way", "gone"],
)
def test_a_gpu_that_cannot_be_asked_keeps_nothing_else_from_being_told(
    torch: SimpleNamespace, free: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    registry = CollectorRegistry()
    register_host(registry, tmp_path, str(OURS))
    text = generate_latest(registry).decode()
    assert "process_resident_memory_bytes" in text
    assert registry.get_sample_value("lorica_gpu_memory_free_bytes", {"device": "0"}) == free
