"""The silos' data as a study uses it: training cut to a number of examples, and all silos' data as one silo's."""

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from security.errors import ConfigurationError, DataError
from security.identifiers import SiloName
from silo_agent.training.text_to_sql_data import SCHEMA_FILE, SPLITS

_SEED = 1
"""Of which examples stay where there are too many: the same for every run of every study."""


def own_copy(silos: Mapping[SiloName, Path], folder: Path, at_most: Mapping[str, int]) -> dict[SiloName, Path]:
    """The silos' folders with at most so many training examples, in `folder`; those without a limit are used as they are."""
    for name in at_most:
        if name not in silos:
            raise ConfigurationError(f"at_most names silo {name!r}: the silos are {', '.join(silos)}")
    return {name: _cut(path, folder / name, at_most[name]) if name in at_most else path for name, path in silos.items()}


def require_test(silos: Mapping[SiloName, Path]) -> None:
    """Raises DataError for a silo without a test split, which its agent can do without and a study cannot."""
    for name, folder in silos.items():
        if next(lines(folder, "test"), None) is None:
            raise DataError(f"silo {name} has no test examples, which a study ends with: add {folder / 'test.jsonl'}")


def _cut(source: Path, target: Path, most: int) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    found = list(lines(source, "train"))
    generator = torch.Generator().manual_seed(_SEED)
    kept = sorted(torch.randperm(len(found), generator=generator)[:most].tolist())
    (target / "train.jsonl").write_text("".join(found[index] for index in kept), encoding="utf-8")
    for path in source.iterdir():
        if not path.name.startswith("train.jsonl"):
            shutil.copy(path, target / path.name)
    return target


def merged(silos: Mapping[SiloName, Path], folder: Path) -> Path:
    """One silo that has every line of all, and all of their schemas; without a database."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        text = "".join(line for path in silos.values() for line in lines(path, split))
        if text:
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    schemas = [json.loads((path / SCHEMA_FILE).read_text(encoding="utf-8")) for path in silos.values()]
    (folder / SCHEMA_FILE).write_text(json.dumps(schemas), encoding="utf-8")
    return folder


def lines(folder: Path, split: str) -> Iterator[str]:
    """Of a split's file, packed or not, each with its end; those that are empty left out."""
    plain, packed = folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"
    if plain.exists():
        text = plain.read_text(encoding="utf-8")
    elif packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode()
    else:
        return
    for line in text.splitlines():
        if line.strip():
            yield f"{line}\n"
