"""A silo that trains in several processes, as its agent has it: settings, data on disk, a plan, the round's model."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lorica_security.identifiers import SiloName
from silo_agent.edges.ranks.rank_trainer import RankTrainer
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.ports import RoundModel, TrainedUpdate
from silo_agent.settings import Settings
from silo_agent.training.ranks.ranks import Together
from silo_wire.messages import RoundKey
from tests.support.tiny_t5 import CORPUS, SCHEMA, bundle_of, random_model, write_model

SILO = SiloName("clinic")
PAIRS = [(question, query) for question in CORPUS[:3] for query in CORPUS[3:6]] * 2
"""18 examples: 5 batches of 4 an epoch, of which two make a step: 3 steps, the last of one batch."""
WIDE = 4096
"""Of a layer: the vector has then several parts for ranks to write."""
STEPS_PER_EPOCH, EPOCHS = 3, 2
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-2,
    "epochs": EPOCHS,
    "batch_size": 4,
    "gradient_accumulation": 2,
    "dropout": 0.0,
    "fedprox_mu": 0.01,
    "max_output_tokens": 32,
}


def write_data(folder: Path) -> Path:
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"id": f"q{number}", "question": question, "query": query, "db_id": SCHEMA.db_id})
        for number, (question, query) in enumerate(PAIRS)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "dev.jsonl").write_text("\n".join(lines[:2]).replace('"id": "q', '"id": "dev') + "\n")
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    return folder


@dataclass
class RankSilo:
    """Below `root`; `processes` 0 is a silo of one process. `training` and further `sections` are the plan's, `own` is
    silo.toml's."""

    root: Path
    processes: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data = self.root / "data"
        self.settings = Settings.model_validate(
            {
                "data": {"folder": str(data if data.exists() else write_data(data))},
                "training": {"device": "cpu", "threads": 1, "processes": self.processes, **self.own},
            }
        )
        model = random_model(d_ff=WIDE)
        self.bundle = bundle_of(model, training={**TRAINING, **self.training}, **self.sections)
        manifest = write_model(model, self.root / "model")
        self.model = RoundModel(file=self.root / "model", manifest=manifest)
        training = self.settings.training
        self.policy = SiloPolicy(
            rules=self.settings.policy,
            silo=SILO,
            processes=training.processes,
            rank_interface=training.rank_interface,
            sharded=training.sharded,
        )
        self.updates = self.root / f"updates-{self.processes}"
        self.updates.mkdir(exist_ok=True)

    @property
    def update(self) -> Path:
        return self.updates / "update"

    @property
    def checkpoint(self) -> Path:
        return self.updates / "round.checkpoint"

    def workshop(self) -> Workshop:
        return Workshop(
            settings=self.settings,
            policy=self.policy,
            sources=SiloSources(self.settings, self.root / "scratch"),
            own_entropy=self.entropy.read_bytes(),
        )

    @property
    def entropy(self) -> Path:
        path = self.root / "training.entropy"
        if not path.exists():
            path.write_bytes(bytes(range(32)))
            path.chmod(0o600)
        return path

    @property
    def ranks(self) -> Path:
        """Where groups have their folders."""
        return self.root / "ranks"

    def trainer(self) -> RankTrainer:
        own = self.workshop()
        return RankTrainer(own, settings=self.settings, policy=self.policy, folder=self.ranks, entropy=self.entropy)

    def train(
        self,
        trainer: RankTrainer | Workshop,
        *,
        progress: Callable[[float], None] = lambda fraction: None,
        cancelled: Callable[[], bool] = lambda: False,
        number: int = 1,
    ) -> TrainedUpdate:
        return trainer.train(
            bundle=self.bundle,
            key=RoundKey(federation="test-net", plan=self.bundle.plan.digest, round=number, attempt=1),
            model=self.model,
            update_file=self.update,
            included_update=None,
            told_before=None,
            checkpoint_file=self.checkpoint,
            progress=progress,
            notice=lambda event, detail: self.notices.append((event, detail)),
            cancelled=cancelled,
        )


def in_ranks(world: int, work: Callable[[Together], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `work` gives, or raises, at each of `world` ranks that are threads of this process and meet by gloo."""
    store, outcomes = distributed.HashStore(), [None] * world

    def rank(number: int) -> None:
        group = distributed.ProcessGroupGloo(store, number, world, timedelta(seconds=timeout_s))
        try:
            outcomes[number] = work(Together(group, torch.device("cpu"), "gloo"))
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def require_nothing_left(root: Path) -> None:
    """No group of ranks has left its folder below `root`; what trainings wrote is deleted, for the next one."""
    assert not list(root.glob("ranks/group-*"))
    for path in root.glob("updates-*/*"):
        path.unlink()
