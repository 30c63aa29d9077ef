"""A backup file is whole and of the closed form, or nothing of it is used; whoever writes one leaves it whole or not at
all."""

import io
import json
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from lorica_coordinator.edges.upkeep.backup_file import (
    About,
    BackupReader,
    BackupWriter,
    may_hold,
    new_backup,
    opened_backup,
)
from lorica_security.errors import ConfigurationError, IntegrityError, LoricaError, StorageError
from lorica_security.host.key_file import Passphrase

ABOUT = About(federation="north", made_at=1.5, release="0.1.0", revision="0005")
GIVEN = Passphrase(b"a passphrase of thirty characters", "P")
FILES = {
    "federation.toml": b"federation = 1",
    "keys/identity.key": b"k" * 70_000,
    "state/models/ab/cd.safetensors": b"",
}


def written(files: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    writer = BackupWriter(sink, ABOUT)
    for name, content in files.items():
        writer.add(name, content)
    writer.finish()
    return sink.getvalue()


def by_hand(*members: tuple[Any, bytes], digests: dict[str, str] | None = None) -> bytes:
    """What no writer writes: each member a header line and its bytes."""
    head = {
        "kind": "lorica coordinator backup",
        "format": 1,
        "federation": "n",
        "made_at": 1.0,
        "release": "r",
        "revision": "0005",
    }
    listed = {str(line.get("name")): blake3(content).hexdigest() for line, content in members}
    lines = [json.dumps(head).encode()]
    for line, content in members:
        lines.append(json.dumps(line).encode() + b"\n" + content)
    parts = b"\n".join(lines[:1]) + b"\n" + b"".join(lines[1:])
    return parts + json.dumps({"digests": listed if digests is None else digests}).encode() + b"\n"


def test_what_went_in_comes_out_private(tmp_path: Path) -> None:
    reader = BackupReader(io.BytesIO(written(FILES)), "it")
    assert reader.about == ABOUT
    assert reader.extract(tmp_path / "out") == len(FILES)
    found = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*")}
    assert {name: path.read_bytes() for name, path in found.items() if path.is_file()} == FILES
    for path in found.values():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700)


HOSTILE = [
    "../federation.toml",
    "state/../../etc/passwd",
    "/etc/passwd",
    "//federation.toml",
    "state//x",
    "state/./x",
    "state/",
    "",
    ".",
    "..",
    "keys/..",
    "keys/.ssh",
    ".bashrc",
    "other/file",
    "state/a\x00b",
    "state/a\nb",
    "state/a b",
    "state\\x",
    "state/\u202e",
    "C:/x",
    "~/x",
    "/".join(["state"] * 9),
    "state/" + "x" * 200,
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_path_that_leads_elsewhere_is_refused_both_ways(tmp_path: Path, name: str) -> None:
    assert not may_hold(name)
    with pytest.raises(IntegrityError, match="which no backup holds"):
        BackupReader(io.BytesIO(by_hand(({"name": name, "size": 1}, b"x"))), "it").extract(tmp_path / "out")
    assert not list(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match="cannot stand in a backup"):
        BackupWriter(io.BytesIO(), ABOUT).add(name, b"x")


@pytest.mark.parametrize(
    "line",
    [
        {"name": "keys/a", "size": -1},
        {"name": "keys/a", "size": 1.0},
        {"name": "keys/a", "size": True},
        {"name": "keys/a", "size": "1"},
        {"name": ["keys/a"], "size": 1},
        {"size": 1},
        {"name": "keys/a"},
        {"name": "keys/a", "size": 1 << 60},
    ],
    ids=str,
)
def test_a_member_of_another_shape_is_refused(tmp_path: Path, line: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        BackupReader(io.BytesIO(by_hand((line, b"x"))), "it").extract(tmp_path / "out")


@pytest.mark.parametrize(
    "members",
    [
        [({"name": "keys/a", "size": 1}, b"x"), ({"name": "keys/a", "size": 1}, b"y")],
        [({"name": "keys/a", "size": 1}, b"x"), ({"name": "keys/a/b", "size": 1}, b"y")],
        [({"name": "keys/a/b", "size": 1}, b"x"), ({"name": "keys/a", "size": 1}, b"y")],
    ],
    ids=["twice", "file-then-folder", "folder-then-file"],
)
def test_names_that_collide_are_refused(tmp_path: Path, members: list[tuple[Any, bytes]]) -> None:
    with pytest.raises(IntegrityError):
        BackupReader(io.BytesIO(by_hand(*members)), "it").extract(tmp_path / "out")


@pytest.mark.parametrize(
    "digests", [{}, {"keys/a": "0" * 64}, {"keys/a": blake3(b"x").hexdigest(), "keys/b": "0" * 64}], ids=str
)
def test_digests_that_are_not_those_of_the_files_are_refused(tmp_path: Path, digests: dict[str, str]) -> None:
    data = by_hand(({"name": "keys/a", "size": 1}, b"x"), digests=digests)
    with pytest.raises(IntegrityError, match="digests"):
        BackupReader(io.BytesIO(data), "it").extract(tmp_path / "out")


def test_cut_or_damaged_anywhere_it_is_refused(tmp_path: Path) -> None:
    whole = written(FILES)
    cuts = [*range(0, 400, 7), len(whole) // 2, len(whole) - 200, len(whole) - 2, len(whole) - 1]
    for number, size in enumerate(cuts):
        with pytest.raises((IntegrityError, ConfigurationError)):
            BackupReader(io.BytesIO(whole[:size]), "it").extract(tmp_path / f"cut{number}")
    for number, at in enumerate([300, 40_000, len(whole) - 150, len(whole) - 30]):
        data = bytearray(whole)
        data[at] ^= 1
        with pytest.raises(IntegrityError):
            BackupReader(io.BytesIO(bytes(data)), "it").extract(tmp_path / f"flip{number}")
    with pytest.raises(IntegrityError):
        BackupReader(io.BytesIO(whole + b"more"), "it").extract(tmp_path / "more")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", IntegrityError),
        (b"\x00" * 5000, IntegrityError),
        (b"{}\n", IntegrityError),
        (b"[" * 4000 + b"\n", IntegrityError),
        (b'{"kind": "lorica coordinator backup", "format": 2}\n', ConfigurationError),
        (b'{"kind": "lorica coordinator backup", "format": 1}\n', IntegrityError),
    ],
    ids=["empty", "zeros", "object", "deep", "later-format", "says-nothing"],
)
def test_what_is_no_backup_is_refused(data: bytes, kind: type[LoricaError], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(kind), opened_backup(path, None):
        pass


@pytest.mark.parametrize("made_at", ["1.5", 1, True, None, -1.0, 1e300, float("inf"), float("nan")], ids=str)
def test_an_instant_that_is_none_is_refused(made_at: object) -> None:
    line = {"kind": "lorica coordinator backup", "format": 1, **asdict(ABOUT), "made_at": made_at}
    with pytest.raises(IntegrityError, match="its first line"):
        BackupReader(io.BytesIO(json.dumps(line).encode() + b"\n"), "it")


def test_in_clear_it_does_not_stand_in_for_one_under_a_passphrase(tmp_path: Path) -> None:
    """Whoever can write to where backups lie can put one there that has no passphrase, with keys of their own."""
    path = tmp_path / "backup"
    path.write_bytes(written(FILES))
    with pytest.raises(ConfigurationError, match=r"is in clear, though \$P gives"), opened_backup(path, GIVEN):
        pass


def test_a_backup_that_fails_leaves_nothing_and_overwrites_nothing(tmp_path: Path) -> None:
    target = tmp_path / "backup"

    def fail() -> None:
        with new_backup(target, None, ABOUT) as backup:
            backup.add("keys/a", b"x")
            backup.add_from("keys/b", io.BytesIO(b"short"), 10)

    with pytest.raises(StorageError, match="keys/b became shorter"):
        fail()
    assert not list(tmp_path.iterdir())
    with new_backup(target, None, ABOUT) as backup:
        backup.add("keys/a", b"x")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    before = target.read_bytes()
    with pytest.raises(ConfigurationError, match="nothing is overwritten"), new_backup(target, None, ABOUT):
        pass
    assert target.read_bytes() == before
