"""An agent that is killed in its second epoch, then started again: the round goes on where its checkpoint was."""

import json
import os
import signal
import sqlite3
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from pathlib import Path
from typing import Any

import pytest

from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.training.data.text_to_sql_data import load_silo_data
from silo_agent.training.device import DeviceSettings
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.messages import RoundKey, Train
from tests.support.federation_peer import FEDERATION, SILO, FederationPeer, TestNet
from tests.support.tiny_t5 import SCHEMA, bundle_of, random_model, write_model

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name.lower() not in ("https_proxy", "all_proxy")},
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}
EXAMPLES, EPOCHS, BATCH = 12, 3, 2
STEPS_PER_EPOCH = EXAMPLES // BATCH


def data_folder(folder: Path) -> Path:
    folder.mkdir()
    for split, count in (("train", EXAMPLES), ("dev", 2)):
        lines = [
            {"id": f"{split}-{n}", "question": f"how many people live in city {n} ?", "db_id": SCHEMA.db_id}
            | {"query": f"SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = '{split} {n}' ;"}
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    with sqlite3.connect(folder / "db.sqlite") as database:
        database.execute("CREATE TABLE PEOPLE (NAME text PRIMARY KEY, CITY text)")
    database.close()
    return folder


async def started(*command: str) -> Any:
    return await create_subprocess_exec(sys.executable, "-m", *command, env=ENVIRONMENT, stdout=PIPE, stderr=PIPE)


@pytest.mark.slow
async def test_an_agent_killed_in_its_second_epoch_goes_on_there_and_sends_the_same_update(tmp_path: Path) -> None:
    net, data = TestNet.create(), data_folder(tmp_path / "data")
    model = random_model()
    training = {"epochs": EPOCHS, "batch_size": BATCH, "dropout": 0.2, "learning_rate_schedule": "linear"}
    bundle = bundle_of(model, training=training)
    manifest = write_model(model, tmp_path / "model", chunk_bytes=1 << 20)
    undisturbed = SiloTrainer(bundle, load_silo_data(data), SILO, DeviceSettings(device="cpu", threads=1)).train(
        round_number=1, model_path=tmp_path / "model", model=manifest, update_path=tmp_path / "update"
    )

    folder = SiloFolder(tmp_path / "silo")
    async with FederationPeer(net) as peer:
        store_credentials(folder, net.credentials(peer.address))
        folder.settings.write_text("[training]\nthreads = 1\n")
        offered = peer.offer(bundle, (tmp_path / "model").read_bytes(), chunk_bytes=1 << 20)
        key = RoundKey(federation=FEDERATION, plan=bundle.plan.digest, round=1, attempt=1)
        await peer.order(Train(key=key, model=offered.digest, seconds_left=600.0))
        start = ("start", "--data", str(data), "--dir", str(folder.root))
        agent = await started("tests.support.dying_agent", str(STEPS_PER_EPOCH + 2), *start)
        _, stderr = await agent.communicate()
        assert agent.returncode == -signal.SIGKILL, stderr.decode()
        assert [path.name for path in folder.updates.iterdir()] == [f"{offered.digest}.checkpoint"]

        agent = await started("silo_agent.cli", *start)
        try:
            await peer.until(lambda: any(update.committed for update in peer.updates.values()), within_s=240.0)
        finally:
            agent.terminate()
            _, stderr = await agent.communicate()
    (sent,) = peer.updates.values()
    assert sent.data == (tmp_path / "update").read_bytes()
    assert sent.header.summary.optimizer_steps == undisturbed.summary.optimizer_steps == EPOCHS * STEPS_PER_EPOCH
    assert sent.header.summary.loss_reduction == undisturbed.summary.loss_reduction
    records = [json.loads(line) for line in stderr.decode().splitlines()]
    resumed = [record["detail"] for record in records if record["event"] == "training-resumed"]
    assert resumed == [f"after epoch 1, optimizer step {STEPS_PER_EPOCH}"]
    assert [path.suffix for path in folder.updates.iterdir()] == [".delta"]
    assert peer.declined == []
