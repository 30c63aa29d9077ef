"""The silos' data as a simulation reads them itself, beside their agents."""

import gzip
import zlib
from pathlib import Path

import pytest

from lorica.simulation.silo_data import changed, lines, remember
from lorica_security.errors import DataError
from lorica_security.identifiers import SiloName

SPOILT_HEADER = 10


def silo(folder: Path, train: bytes = b'{"id": "1"}\n', schema: bytes = b"[]") -> Path:
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(train)
    (folder / "schema.json").write_bytes(schema)
    return folder


def pack(file: Path) -> Path:
    packed = file.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    return packed


def test_lines_are_the_same_packed_or_not_and_empty_ones_are_none(tmp_path: Path) -> None:
    folder = silo(tmp_path / "bees", b"{}\n \n\n[\n{}")
    plain = list(lines(folder, "train"))
    pack(folder / "train.jsonl")
    assert plain == list(lines(folder, "train")) == [b"{}\n", b"[\n", b"{}\n"]
    assert list(lines(folder, "dev")) == []


@pytest.mark.parametrize("how", ["torn", "spoilt", "no gzip"])
def test_a_damaged_split_is_named(tmp_path: Path, how: str) -> None:
    packed = pack(silo(tmp_path / "bees") / "train.jsonl")
    whole = packed.read_bytes()
    spoilt = whole[:SPOILT_HEADER] + b"\xff" + whole[SPOILT_HEADER + 1 :]  # its first block's header
    packed.write_bytes({"torn": whole[:-6], "spoilt": spoilt, "no gzip": b"{}"}[how])
    with pytest.raises((EOFError, zlib.error, gzip.BadGzipFile)):
        gzip.decompress(packed.read_bytes())
    with pytest.raises(DataError, match=r"bees: train cannot be read \(.+\): correct or replace it"):
        list(lines(packed.parent, "train"))


def test_a_silo_has_changed_with_its_examples_or_its_schema_not_with_its_packing_or_its_settings(
    tmp_path: Path,
) -> None:
    silos = {SiloName(name): silo(tmp_path / name) for name in ("ants", "bees", "crabs")}
    assert changed(silos, tmp_path) == [], "nothing is remembered yet"
    remember(silos, tmp_path)
    pack(silos[SiloName("ants")] / "train.jsonl")
    (silos[SiloName("ants")] / "silo.toml").write_text("[training]\nthreads = 1\n")
    assert changed(silos, tmp_path) == []
    (silos[SiloName("bees")] / "dev.jsonl").write_bytes(b"{}\n")
    (silos[SiloName("crabs")] / "schema.json").write_bytes(b"{}")
    assert changed(silos, tmp_path) == ["bees", "crabs"]
    remember(silos, tmp_path)
    assert changed(silos, tmp_path) == []
    assert changed({name: path for name, path in silos.items() if name != "ants"}, tmp_path) == ["ants"]


def test_a_schema_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = silo(tmp_path / "bees")
    (folder / "schema.json").unlink()
    (folder / "schema.json").mkdir()
    with pytest.raises(DataError, match=r"bees/schema\.json cannot be read: Is a directory"):
        remember({SiloName("bees"): folder}, tmp_path)


def test_data_whose_lines_have_a_table_each_have_no_schema_until_they_have_one(tmp_path: Path) -> None:
    silos = {SiloName("bees"): silo(tmp_path / "bees")}
    (tmp_path / "bees" / "schema.json").unlink()
    remember(silos, tmp_path)
    assert changed(silos, tmp_path) == []
    (tmp_path / "bees" / "schema.json").write_bytes(b"[]")
    assert changed(silos, tmp_path) == ["bees"]
