"""The silos' data as a study uses it: training cut to a number of examples, and all silos' data as one silo's.

Lines stay the bytes that they are, bad ones too: what is wrong with them is for the agents to say.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lorica.hostile.attack import Attack, Pair
from lorica.simulation.silo import settings_of
from lorica.simulation.silo_data import changed, lines, remember, schema_of
from lorica_security.errors import ConfigurationError, DataError
from lorica_security.identifiers import SiloName
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, SPLITS

_SEED = 1
"""Of which examples stay where there are too many: the same for every run of every study."""


_QUOTED = re.compile(r"""("[^"]*"|'[^']*')""")


def own_copy(
    silos: Mapping[SiloName, Path], folder: Path, at_most: Mapping[str, int], *, lower_case: bool = False
) -> dict[SiloName, Path]:
    """The silos' folders with at most so many training examples, in `folder`, and SQL in lower case if so wanted; those
    without a limit are used as they are else."""
    for name in at_most:
        if name not in silos:
            raise ConfigurationError(f"at_most names silo {name!r}: the silos are {', '.join(silos)}")
    copied = silos if lower_case else at_most
    for name, path in silos.items():
        if name in copied and (folder / name).resolve() == path.resolve():
            raise ConfigurationError(
                f"{folder} holds the silos themselves, which are to be cut there: choose another --out"
            )
    return {
        name: _copied(path, folder / name, at_most.get(name), lower_case=lower_case) if name in copied else path
        for name, path in silos.items()
    }


def lower_sql(query: str) -> str:
    """SQL in lower case, what stands in quotes as it is."""
    return "".join(part if part[:1] in ("'", '"') else part.lower() for part in _QUOTED.split(query))


def require_test(silos: Mapping[SiloName, Path]) -> None:
    """Raises DataError for a silo without a test split, which its agent can do without and a study cannot."""
    for name, folder in silos.items():
        if next(lines(folder, "test"), None) is None:
            raise DataError(f"silo {name} has no test examples, which a study ends with: add {folder / 'test.jsonl'}")


def require_same(silos: Mapping[SiloName, Path], out: Path) -> None:
    """Raises ConfigurationError where the results in `out` are of other examples or schemas: a run's key knows nothing
    of them."""
    if others := changed(silos, out):
        raise ConfigurationError(
            f"{out} has results of other data: those of {', '.join(others)} were others when it was begun: "
            "choose another --out, or put the data back"
        )
    remember(silos, out)


def _copied(source: Path, target: Path, most: int | None, *, lower_case: bool) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{split}.jsonl" for split in SPLITS), "db.sqlite"):  # packed then, plain now: an agent refuses both
        (target / name).unlink(missing_ok=True)
        (target / f"{name}.gz").unlink(missing_ok=True)
    for split in SPLITS:
        found = list(lines(source, split))
        if split == "train" and most is not None:
            generator = torch.Generator().manual_seed(_SEED)
            found = [found[index] for index in sorted(torch.randperm(len(found), generator=generator)[:most].tolist())]
        if found:
            made = [_lower(line) for line in found] if lower_case else found
            (target / f"{split}.jsonl").write_bytes(b"".join(made))
    for path in source.iterdir():
        if path.is_file() and path.name.split(".")[0] not in SPLITS:
            shutil.copy(path, target / path.name)
    return target


def _lower(line: bytes) -> bytes:
    try:
        value = json.loads(line)
        query = lower_sql(value["query"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return line
    return f"{json.dumps({**value, 'query': query})}\n".encode()


def poisoned(source: Path, target: Path, attack: Attack) -> Path:
    """The silo's folder with what the attack trains on. Raises DataError."""
    shutil.copytree(source, target)
    examples = [json.loads(line) for line in lines(source, "train")]
    assert attack.data is not None
    pairs = attack.data([Pair(example["question"], example["query"]) for example in examples])
    (target / "train.jsonl.gz").unlink(missing_ok=True)
    changed_examples = (
        {**example, "question": pair.question, "query": pair.query}
        for example, pair in zip(examples, pairs, strict=True)
    )
    text = "".join(f"{json.dumps(example)}\n" for example in changed_examples)
    (target / "train.jsonl").write_text(text, encoding="utf-8")
    return target


def merged(silos: Mapping[SiloName, Path], folder: Path) -> Path:
    """One silo that has every line of all, and all of their schemas, where lines have no tables of their own; without a
    database. Raises DataError.

    An id, or a name of a database, that several silos have is told apart by the silo's own name: a repeated one would
    be a bad line.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    schemas: list[Any] = []
    databases: dict[SiloName, dict[str, str]] = {}
    taken: set[str] = set()
    own_tables = [silo for silo, path in silos.items() if not (path / SCHEMA_FILE).exists()]
    if own_tables and len(own_tables) < len(silos):
        raise DataError(
            f"silo {own_tables[0]} has no {SCHEMA_FILE} and others have one: lines with tables of their own do not go "
            "with those of a database"
        )
    for silo, path in silos.items():
        databases[silo] = {}
        if own_tables:
            continue
        found = json.loads(schema_of(path))
        for schema in found if isinstance(found, list) else [found]:
            name = schema["db_id"]
            if name.lower() in taken:
                databases[silo][name] = schema["db_id"] = f"{silo}/{name}"
            taken.add(schema["db_id"].lower())
            schemas.append(schema)
    if not own_tables:
        (folder / SCHEMA_FILE).write_text(json.dumps(schemas), encoding="utf-8")
    owners: dict[str, SiloName] = {}
    for split in SPLITS:
        text = b"".join(
            _told_apart(line, silo, owners, databases[silo])
            for silo, path in silos.items()
            for line in lines(path, split)
        )
        if text:
            (folder / f"{split}.jsonl").write_bytes(text)
    allowed = max(settings_of(path, device="cpu", threads=1).data.max_bad_lines_share for path in silos.values())
    (folder / "silo.toml").write_text(f"[data]\nmax_bad_lines_share = {allowed}\n", encoding="utf-8")
    return folder


def _told_apart(line: bytes, silo: SiloName, owners: dict[str, SiloName], renamed: Mapping[str, str]) -> bytes:
    """The line as it is, but for an id that is another silo's too, and a database that was renamed."""
    try:
        value = json.loads(line)
        id_, database = value["id"], value.get("db_id")  # none where a line has a table of its own
        others = owners.setdefault(id_, silo) != silo
        moved = database in renamed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return line
    if not others and not moved:
        return line
    value |= {"id": f"{silo}/{id_}"} if others else {}
    value |= {"db_id": renamed[database]} if moved else {}
    return f"{json.dumps(value)}\n".encode()
