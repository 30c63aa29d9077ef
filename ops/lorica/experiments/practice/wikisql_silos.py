"""WikiSQL cut into silos for a study of FedParsing: one with the server's labelled questions, and silos of clients.

Every line keeps its answer. A silo that a plan names in `[semi_supervised] unlabelled` never reads it; in the row that
has all labels it does. Two questions of each client's silo are its dev and two its test split in every row, out of what
it trains on; the paper's figures are those of `server`, whose dev and test are WikiSQL's.
"""

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from lorica_security.errors import ConfigurationError

SERVER: Final = "server"
WARD: Final = "ward-"
HELD_OUT: Final = 2
"""Dev and test questions of each client's silo: as few as a silo's policy lets be scored."""


def write_wikisql_silos(source: Path, folder: Path, *, silos: int) -> None:
    """Below the new `folder`: `server`, and `silos` of clients, who are dealt to them in turn.

    `source` holds server_labelled, clients_unlabelled, clients_gold, dev and test, each as .jsonl.gz. Raises
    ConfigurationError for a file that is not so, for more silos than clients, or a folder that is there.
    """
    gold = {str(line["id"]): line["sql"] for line in _lines(source, "clients_gold", "id", "sql")}
    clients: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for line in _lines(source, "clients_unlabelled", "id", "client", "question", "header", "types"):
        if line["id"] not in gold:
            raise ConfigurationError(f"{source}: clients_gold has no answer to {line['id']} of clients_unlabelled")
        clients[line["client"]].append({**line, "sql": gold[line["id"]]})
    if not 1 <= silos <= len(clients):
        raise ConfigurationError(f"{silos} silos for {len(clients)} clients: give 1 to {len(clients)}")
    if folder.exists():
        raise ConfigurationError(f"{folder} is there already: give a new folder")
    needed = ("id", "question", "header", "types", "sql")
    train = _lines(source, "server_labelled", *needed)
    _write(folder / SERVER, train, _lines(source, "dev", *needed), _lines(source, "test", *needed))
    dealt: list[list[Mapping[str, Any]]] = [[] for _ in range(silos)]
    for number, client in enumerate(sorted(clients)):
        dealt[number % silos] += clients[client]
    for number, own in enumerate(dealt):
        dev, test, kept = own[:HELD_OUT], own[HELD_OUT : 2 * HELD_OUT], own[2 * HELD_OUT :]
        if not kept:
            raise ConfigurationError(f"silo {WARD}{number:03} has {len(own)} questions: give fewer silos")
        _write(folder / f"{WARD}{number:03}", kept, dev, test)


def _write(
    folder: Path,
    train: Iterable[Mapping[str, Any]],
    dev: Iterable[Mapping[str, Any]],
    test: Iterable[Mapping[str, Any]],
) -> None:
    folder.mkdir(parents=True)
    for split, lines in (("train", train), ("dev", dev), ("test", test)):
        kept = ({key: line[key] for key in ("id", "question", "header", "types", "sql")} for line in lines)
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")


def _lines(source: Path, name: str, *keys: str) -> list[Mapping[str, Any]]:
    file = source / f"{name}.jsonl.gz"
    try:
        # not splitlines: a question may hold U+2028
        text = gzip.decompress(file.read_bytes()).decode().removesuffix("\n").split("\n")
        found = [json.loads(line) for line in text]
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}; give WikiSQL's lines as .jsonl.gz") from error
    for number, line in enumerate(found, 1):
        if not isinstance(line, dict) or any(key not in line for key in keys):
            raise ConfigurationError(f"{file}, line {number} lacks one of {', '.join(keys)}: give WikiSQL's lines")
    return found
