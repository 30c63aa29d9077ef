"""An agent with models of its own says to its coordinator what one without says, byte for byte but for times. So does
one whose answers are right in other parts.

It is one silo's folder twice, over mutual TLS, through two rounds to the end of the plan. Ditto's training is begun
between the rounds and gives way to the second, and is done when the plan is complete: by real processes.
"""

import asyncio
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from lorica.demo.ports import free_ports
from lorica_security.host.process_lock import ProcessLock
from silo_agent.cli import main as agent_main
from silo_agent.commands.command_line import policy_of, silo_sources
from silo_agent.composition import run_agent
from silo_agent.edges.console.logs import Whereabouts
from silo_agent.edges.disk.answers_right import answers_right
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials, store_credentials
from silo_agent.edges.personal import personal_keeper
from silo_agent.edges.personal.own_scores import OwnScores, own_scores
from silo_agent.settings import Settings
from silo_agent.training.model.model import bind, vector_blocks
from silo_agent.training.tasks.wikisql import WikiSql
from silo_agent.training.tasks.wikisql_query import METRICS
from silo_wire.codecs.common_codec import round_key_from_wire
from silo_wire.messages import Evaluate, Finished, Prepare, RoundKey, Train
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import federation_pb2
from tests.support.collected_silo import TRAINING, data_folder
from tests.support.command_line import run_command
from tests.support.federation_peer import FEDERATION, FederationPeer, TestNet
from tests.support.tiny_t5 import bundle_of, random_model

NET = TestNet.create()
OF_THE_TIME = {"agent_instance", "seconds", "signature", "log.digest"}
"""What differs from run to run: a random number, what took how long, and what is signed or hashed over times."""
PERSONAL = '[personal]\nmethod = "ditto"\nepochs = 1\n'


def but_for_times(message: Message, within: str = "") -> Message:
    for field, value in message.ListFields():
        if {field.name, f"{within}.{field.name}"} & OF_THE_TIME:
            message.ClearField(field.name)
        elif isinstance(value, Message):
            but_for_times(value, field.name)
    return message


def said(raw: Sequence[tuple[str, bytes]]) -> tuple[list[tuple[str, bytes]], list[Any]]:
    """Every message and header in order, but reports of progress: these apart, they are as many as time allows."""
    methods = federation_pb2.DESCRIPTOR.services_by_name["Federation"].methods_by_name
    messages, progress = [], []
    for path, content in raw:
        method = path.rpartition("/")[2]
        if method == "ReportProgress" and not content.startswith(b"user-agent: "):
            progress.append(federation_pb2.ProgressReport.FromString(content))
        elif content.startswith(b"user-agent: "):
            messages += [] if method == "ReportProgress" else [(method, content)]
        else:
            message = but_for_times(GetMessageClass(methods[method].input_type).FromString(content))
            messages.append((method, message.SerializeToString(deterministic=True)))
    return messages, progress


class Watched:
    """A processor of the log: `training` is set when a process begins, `scored` when scores were told."""

    def __init__(self) -> None:
        self.training, self.scored = asyncio.Event(), asyncio.Event()
        self.processes = 0
        self.problems: list[Any] = []

    def begun(self) -> None:
        self.processes += 1
        self.training.set()

    def __call__(self, logger: object, method: str, line: Any) -> Any:
        if line["event"] == "own-models":
            self.scored.set()
        elif method in ("warning", "error"):
            self.problems.append(line)
        raise structlog.DropEvent


@asynccontextmanager
async def agent(folder: SiloFolder) -> AsyncIterator[None]:
    credentials, settings = load_credentials(folder), Settings.read(folder.settings)
    with (
        ProcessLock(folder.lock, "silo agent"),
        closing(RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)) as journal,
    ):
        running = asyncio.create_task(
            run_agent(
                folder,
                credentials,
                settings,
                policy=policy_of(folder, credentials, settings),
                sources=silo_sources(folder, settings),
                journal=journal,
                where=Whereabouts(),
            )
        )
        try:
            yield
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            await asyncio.wait([running], timeout=60)
            await running


async def played(
    folder: SiloFolder,
    port: int,
    bundle: PlanBundle,
    watched: Watched,
    *,
    trains: bool = False,
    look: Callable[[], None] = lambda: None,
) -> FederationPeer:
    """The whole plan; `look` is called, in another thread, when the model was scored."""
    peer = FederationPeer(NET)
    await peer.listen(port)
    first, second = (
        peer.offer(
            bundle,
            b"".join(vector_blocks(bind(random_model(seed), bundle.layout))),
            made_by=made_by,
            chunk_bytes=1 << 20,
        )
        for made_by, seed in enumerate((0, 7))
    )
    plan = bundle.plan.digest
    keys = [RoundKey(federation=FEDERATION, plan=plan, round=number, attempt=1) for number in (1, 2)]
    try:
        await peer.order(Prepare(plan))
        async with agent(folder):
            await peer.until(lambda: len(peer.readiness) == 1)
            await peer.order(Train(key=keys[0], model=first.digest, seconds_left=600.0))
            await peer.until(lambda: sum(update.committed for update in peer.updates.values()) == 1)
            if trains:
                await asyncio.wait_for(watched.training.wait(), 60)  # and the second round takes its place
            await peer.order(Train(key=keys[1], model=second.digest, seconds_left=600.0))
            await peer.until(lambda: sum(update.committed for update in peer.updates.values()) == 2)
            await peer.order(Evaluate(key=keys[1], model=second.digest, seconds_left=600.0))
            await peer.until(lambda: len(peer.evaluations) == 1)
            await asyncio.to_thread(look)
            await peer.order(Finished(plan=plan, rounds=2, final_model=second.digest, best_model=second.digest))
            if trains:
                await asyncio.wait_for(watched.scored.wait(), 120)
            await peer.order(Prepare(plan))  # the line is still listened to, and what was said of it ends both runs
            await peer.until(lambda: len(peer.readiness) == 2)
    finally:
        await peer.close()
    assert peer.declined == []
    return peer


async def test_nothing_leaves_of_a_silos_own_models_and_no_update_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = FederationPeer(NET)
    async with peer:
        port = peer.port
    silo = SiloFolder(tmp_path / "silo")
    store_credentials(silo, NET.credentials(f"127.0.0.1:{port}"))
    silo.make()
    data = data_folder(tmp_path / "data", database=False)
    silo.settings.write_text(f'[data]\nfolder = "{data}"\n[training]\ndevice = "cpu"\nthreads = 1\n')
    bundle = bundle_of(random_model(0), training=TRAINING, schedule={"rounds": 2, "min_silos": 1})
    with_own = SiloFolder(tmp_path / "with-own")
    shutil.copytree(silo.root, with_own.root)
    with_own.settings.write_text(f"{silo.settings.read_text()}{PERSONAL}")

    watched = Watched()
    monkeypatch.setattr("silo_agent.composition.QUIET_S", 0.0)
    command = personal_keeper.training_command

    def begun(folder: Path) -> Sequence[str]:
        watched.begun()
        return command(folder)

    monkeypatch.setattr(personal_keeper, "training_command", begun)
    structlog.configure(processors=[watched])
    try:
        without = await played(silo, port, bundle, watched, trains=False)
        assert watched.processes == 0
        with_it = await played(with_own, port, bundle, watched, trains=True)
    finally:
        structlog.reset_defaults()

    assert watched.problems == []
    assert watched.processes >= 2  # one of them gave way
    (messages, _), (messages_with, progress) = said(without.raw), said(with_it.raw)
    assert messages_with == messages
    assert [update.data for update in with_it.updates.values()] == [update.data for update in without.updates.values()]
    assert len(without.updates) == 2
    spoken = {
        "Attend",
        "FetchPlan",
        "DeclareReadiness",
        "FetchModel",
        "UploadOffset",
        "UploadUpdate",
        "ReportEvaluation",
    }
    assert {method for method, _ in messages} == spoken
    rounds = {update.header.key for update in without.updates.values()}
    assert {round_key_from_wire(report.key) for report in progress} <= rounds

    scores = own_scores(with_own.personal).read()
    assert set(scores.scores) == {"local", "global", "personal"}
    assert own_scores(silo.personal).read() == OwnScores()
    assert not silo.personal.exists()


def wikisql_folder(folder: Path) -> Path:
    folder.mkdir()
    for split, count in (("train", 8), ("dev", 3)):
        lines = [
            {
                "id": f"{split}-{number}",
                "question": f"which {word} of {number}",
                "header": ["Week", "Venue"],
                "types": ["real", "text"],
                "sql": {"agg": 0, "sel": 1, "conds": [[0, 0, number]]},
            }
            for number, word in zip(range(count), ("venue", "place", "town") * 3, strict=False)
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


async def test_nothing_leaves_of_which_parts_of_answers_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder twice, with a task of whose six parts all are wrong once and right the other time, and the whole
    answer wrong both times: the silo's people see it, the coordinator does not, and whoever can read metrics from
    elsewhere neither."""
    peer = FederationPeer(NET)
    async with peer:
        port = peer.port
    silo = SiloFolder(tmp_path / "silo")
    store_credentials(silo, NET.credentials(f"127.0.0.1:{port}"))
    silo.make()
    data, (metrics,) = wikisql_folder(tmp_path / "data"), free_ports(1)
    silo.settings.write_text(
        f'[data]\nfolder = "{data}"\n[training]\ndevice = "cpu"\nthreads = 1\n[metrics]\nlisten = "127.0.0.1:{metrics}"\n'
    )
    bundle = bundle_of(
        random_model(0), training=TRAINING, schedule={"rounds": 2, "min_silos": 1}, task={"kind": "wikisql"}
    )
    other = SiloFolder(tmp_path / "other")
    shutil.copytree(silo.root, other.root)
    other.settings.write_text(silo.settings.read_text().replace("127.0.0.1", "0.0.0.0"))
    scraped: list[str] = []

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=30) as page:
            scraped.append(page.read().decode())

    peers, shown = [], []
    structlog.configure(processors=[Watched()])
    try:
        for folder, parts in ((silo, False), (other, True)):
            monkeypatch.setattr(WikiSql, "right", lambda *_, parts=parts: (False, *(parts,) * (len(METRICS) - 1)))
            peers.append(await played(folder, port, bundle, Watched(), look=scrape))
            shown.append(run_command(agent_main, "status", "--dir", folder.root).out)
    finally:
        structlog.reset_defaults()

    (messages, _), (of_other, _) = (said(one.raw) for one in peers)
    assert of_other == messages
    assert "ReportEvaluation" in {method for method, _ in messages}
    wrong, right = ({"overall": 0, **dict.fromkeys(METRICS[1:], count)} for count in (0, 3))
    for folder, expected, status in zip((silo, other), (wrong, right), shown, strict=True):
        known = answers_right(folder.answers_right).read()
        assert (known.plan, known.questions, known.right) == (bundle.plan.digest, 3, expected)
        assert f"global model, right of 3 answers: overall 0, aggregate {expected['aggregate']}" in status
    here, elsewhere = scraped
    for part, count in wrong.items():
        assert f'lorica_silo_answers_right_ratio{{part="{part}"}} {count / 3}' in here
    assert "lorica_silo_connected 1.0" in elsewhere
    assert "lorica_silo_answers_right_ratio{" not in elsewhere
