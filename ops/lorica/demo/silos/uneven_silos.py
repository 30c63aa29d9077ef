"""The demo's four silos at 30 : 1 in size, each with many held-out questions: data of the study `ladder`.

`silos` are those of the study. `equal` have the same held-out questions and as many training questions each, drawn from
more of them. `mislabelled` are `silos`, but for one that learns other questions' SQL. None has a database: a study
scores them many times. Everything is a function of the seed.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from lorica.demo.silos.bank import BANK
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import Splits, questions, write_silo
from lorica.demo.silos.specification import SiloSpecification
from lorica.hostile.attack import Pair
from lorica.hostile.label_flip import exchanged

TRAIN: Final[Mapping[str, int]] = {"hospital": 1080, "bank": 324, "insurer": 108, "clinic": 36}
EQUAL: Final = 300
"""Training questions of each silo where all have as many."""
TEST: Final = 200
MISLABELLED: Final = "bank"

# The two smaller silos have too few values for so many held-out questions: they get those that the others have.
SILOS: Final = (
    HOSPITAL,
    BANK,
    replace(
        INSURER,
        pools={
            **INSURER.pools,
            "city": BANK.pools["city"],
            "year": HOSPITAL.pools["year"],
            "age": HOSPITAL.pools["age"],
            "amount": (500, 1000, 2000, 3000, 5000),
        },
    ),
    replace(
        CLINIC,
        pools={
            **CLINIC.pools,
            "city": HOSPITAL.pools["city"],
            "doctor": HOSPITAL.pools["doctor"],
            "year": HOSPITAL.pools["year"],
            "age": HOSPITAL.pools["age"],
        },
    ),
)


def uneven_questions(silo: SiloSpecification, train: int, *, seed: int) -> Splits:
    """Of one of SILOS: `train` training questions, the demo's number of dev questions, TEST test questions."""
    return questions(replace(silo, train=train, test=TEST), seed=seed)


def write_uneven_silos(folder: Path, *, seed: int = 1) -> None:
    """The three sets of silos below the new folder `folder`."""
    for silo in SILOS:
        for name, train in (("silos", TRAIN[silo.name]), ("equal", EQUAL)):
            target = folder / name / silo.name
            write_silo(target, silo, seed=seed, splits=uneven_questions(silo, train, seed=seed))
            (target / "db.sqlite").unlink()
    shutil.copytree(folder / "silos", folder / "mislabelled")
    _mislabel(folder / "mislabelled" / MISLABELLED / "train.jsonl")


def _mislabel(file: Path) -> None:
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = exchanged([Pair(record["question"], record["query"]) for record in records])
    lines = (json.dumps({**record, "query": pair.query}) for record, pair in zip(records, pairs, strict=True))
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
