"""A silo's folder as rounds leave it: enrolled, with data, a plan, its initial model and the newest global one."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import T5ForConditionalGeneration

from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.rounds.effects import JournalModel, JournalPlan
from silo_agent.training.model.model import bind, vector_blocks
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import ModelHeader
from silo_wire.plans.plan import PlanBundle
from tests.support.federation_peer import SILO, TestNet
from tests.support.tiny_t5 import SCHEMA, bundle_of, random_model

TRAINING: dict[str, Any] = {"learning_rate": 1e-2, "batch_size": 4, "max_input_tokens": 64, "max_output_tokens": 32}


def data_folder(folder: Path, *, database: bool) -> Path:
    """Six training questions and two others; with a database of which one of these gives something."""
    folder.mkdir()
    lines = [
        json.dumps(
            {"id": f"q{number}", "question": f"how many people live in city {number} ?", "db_id": SCHEMA.db_id}
            | {"query": f"SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = '{number}' ;"}
        )
        for number in range(8)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines[:6]) + "\n")
    (folder / "dev.jsonl").write_text("".join(f"{line}\n" for line in lines[6:]))
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    if database:
        with closing(sqlite3.connect(folder / "db.sqlite")) as made, made:
            made.execute("CREATE TABLE PEOPLE (NAME text PRIMARY KEY, CITY text)")
            made.execute("INSERT INTO PEOPLE VALUES ('ada', '6')")
    return folder


class CollectedSilo:
    """`keep` puts a model where the agent would have put it, as the newest global one."""

    def __init__(self, root: Path, *, initial: int = 0, database: bool = False, **sections: Any) -> None:
        self.folder = SiloFolder(root / "silo")
        store_credentials(self.folder, TestNet.create().credentials("127.0.0.1:1"))
        self.folder.make()
        self.data = data_folder(root / "data", database=database)
        self.bundle: PlanBundle = bundle_of(
            random_model(initial), **{"training": TRAINING, "schedule": {"rounds": 2, "min_silos": 1}, **sections}
        )
        PlanStore(self.folder.plans).save(self.bundle)
        self.newest: Digest | None = None
        self.cache = ModelCache(self.folder.models, kept=2)
        with self.journal_open() as journal:
            journal.record(JournalPlan(self.bundle.plan.digest))
        self.settings('[personal]\nmethod = "finetune"\n')

    def journal_open(self) -> "closing[RoundJournal]":
        return closing(RoundJournal(self.folder.journal, updates=self.folder.updates, silo=SILO))

    def settings(self, text: str) -> None:
        self.folder.settings.write_text(
            f'[data]\nfolder = "{self.data}"\n[training]\ndevice = "cpu"\nthreads = 1\n{text}'
        )

    def keep(self, model: T5ForConditionalGeneration) -> Digest:
        layout = self.bundle.layout
        data = b"".join(vector_blocks(bind(model, layout)))
        manifest = manifest_of(layout, [data])
        digest = manifest.digest
        part = self.cache.open_partial(digest, ModelHeader(manifest=manifest, round=0, signature=bytes(64)))
        part.append(data)
        part.finish(self.cache.file(digest))
        part.close()
        with self.journal_open() as journal:
            journal.record(JournalModel(self.bundle.plan.digest, digest))
        self.newest = digest
        return digest

    def file(self, digest: str) -> bytes:
        return (self.folder.personal / f"{digest}.model").read_bytes()
