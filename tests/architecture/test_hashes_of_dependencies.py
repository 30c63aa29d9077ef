"""ops/hashes.txt is of exactly what ops/constraints.txt pins, but for torch; `make hashes` makes it."""

import re
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[2] / "ops"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    text = (OPS / name).read_text(encoding="utf-8")
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in PIN.findall(text)}


def test_everything_but_torch_is_held_to_a_hash_of_the_version_that_is_pinned() -> None:
    pinned = pins("constraints.txt")
    assert pinned.pop("torch")
    assert len(pinned) > 80
    assert pins("hashes.txt") == pinned, "run make hashes"


def test_every_package_has_a_hash_and_nothing_else_may_be_installed() -> None:
    for name in ("hashes.txt", "audit-tools.txt", "site-tools.txt"):
        lines = (OPS / name).read_text(encoding="utf-8").splitlines()
        packages = [index for index, line in enumerate(lines) if PIN.match(line)]
        assert packages
        assert all(lines[index + 1].strip().startswith("--hash=sha256:") for index in packages), name


@pytest.mark.parametrize("tools", ["audit-tools", "site-tools"])
def test_the_tools_are_pinned_as_they_are_asked_for(tools: str) -> None:
    assert pins(f"{tools}.in").items() <= pins(f"{tools}.txt").items()
