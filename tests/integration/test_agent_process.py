"""The agent as its people run it: a real process with a tiny T5, against a hand-written coordinator over mutual TLS."""

import asyncio
import base64
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.request import urlopen

import pytest

from lorica.demo.ports import free_ports
from lorica_security.errors import EXIT_CODES, ConfigurationError, Conflict, DataError, OutsideValidity, StateError
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.training.model.model import bind, vector_blocks
from silo_wire.manifest import manifest_of
from silo_wire.messages import Evaluate, Finished, Prepare, RoundKey, Train
from tests.support.background import in_the_background
from tests.support.federation_peer import FEDERATION, SILO, FederationPeer, OfferedModel, TestNet
from tests.support.tiny_t5 import SCHEMA, bundle_of, random_model

NET = TestNet.create()
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name.lower() not in ("https_proxy", "all_proxy")},
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}


def silo_agent(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command that ends by itself and needs no coordinator."""
    return subprocess.run(
        [sys.executable, "-m", "silo_agent.cli", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


async def silo_agent_beside(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """As `silo_agent`, while this loop goes on serving."""
    return await asyncio.to_thread(silo_agent, *arguments)


OF_RECORDS = ("quagmire", "vexillum", "ZIGGURAT", "ada-lovelace")
"""Words of questions, of their SQL, of the database."""


def data_folder(folder: Path, *, bad_lines: int = 0) -> Path:
    folder.mkdir()
    lines = [
        {"id": f"quagmire{number}", "question": f"how many people live in vexillum {number} ?", "db_id": SCHEMA.db_id}
        | {"query": f"SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = 'ZIGGURAT {number}' ;"}
        for number in range(8)
    ]
    train = [json.dumps(line) for line in lines[:6]] + ["{broken"] * bad_lines
    (folder / "train.jsonl").write_text("\n".join(train) + "\n")
    (folder / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[6:]))
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    with sqlite3.connect(folder / "db.sqlite") as database:
        database.execute("CREATE TABLE PEOPLE (NAME text PRIMARY KEY, CITY text)")
        database.execute("INSERT INTO PEOPLE VALUES ('ada-lovelace', '6'), ('bob', '7')")
    return folder


def ways_to_write(word: str) -> set[bytes]:
    """As it is, in either case, in UTF-16, in hex, and in base64 at each offset."""
    texts = {word, word.lower(), word.upper()}
    plain = {text.encode(code) for text in texts for code in ("utf-8", "utf-16-le", "utf-16-be")}
    hexed = {form.hex().encode() for form in plain}
    in_base64 = {
        base64.b64encode(bytes(offset) + text.encode())[4 if offset else 0 : -4]
        for text in texts
        for offset in range(3)
    }
    return plain | hexed | in_base64


def found_in(messages: list[tuple[str, bytes]], word: str) -> set[str]:
    """The methods of messages in which `word` stands in any of these ways."""
    forms = ways_to_write(word)
    return {method for method, message in messages if any(form in message for form in forms)}


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *in_the_background(sys.executable, "-m", "silo_agent.cli", "start", *arguments),
        env=ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def peer() -> AsyncIterator[FederationPeer]:
    async with FederationPeer(NET) as listening:
        yield listening


@pytest.fixture
def silo(peer: FederationPeer, tmp_path: Path) -> SiloFolder:
    folder = SiloFolder(tmp_path / "silo")
    store_credentials(folder, NET.credentials(peer.address))
    return folder


@pytest.mark.slow
async def test_a_silos_day(peer: FederationPeer, silo: SiloFolder, tmp_path: Path) -> None:
    model = random_model()
    bundle = bundle_of(model, training={"epochs": 1, "batch_size": 4, "dropout": 0.0})
    plan = bundle.plan.digest
    offered: OfferedModel = peer.offer(
        bundle, b"".join(bytes(block) for block in vector_blocks(bind(model, bundle.layout))), chunk_bytes=1 << 20
    )
    key = RoundKey(federation=FEDERATION, plan=plan, round=1, attempt=1)
    data = data_folder(tmp_path / "data")
    directory = ("--dir", str(silo.root))
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    (silo.root / "silo.toml").write_text(f'[metrics]\nlisten = "{metrics}"\n')
    await peer.order(Prepare(plan))
    async with running("--data", str(data), *directory) as process:
        await peer.until(lambda: len(peer.readiness) == 1)
        assert peer.readiness == [(plan, True, "")]

        second = await silo_agent_beside("start", "--data", str(data), *directory)
        assert second.returncode == EXIT_CODES[Conflict]
        assert f"(process {process.pid})" in second.stderr

        status = json.loads((await silo_agent_beside("status", "--json", *directory)).stdout)
        assert (status["running"], status["process"], status["plan"]) == (True, process.pid, plan)

        paused = await silo_agent_beside("pause", *directory)
        assert paused.stdout == f"paused; the running agent (process {process.pid}) was told\n"
        await peer.until(lambda: len(peer.readiness) == 2)
        assert peer.readiness[1][1] is False
        await silo_agent_beside("resume", *directory)
        await peer.until(lambda: len(peer.readiness) == 3)
        assert peer.readiness[2] == (plan, True, "")

        await peer.order(Train(key=key, model=offered.digest, seconds_left=60.0))
        await peer.until(lambda: any(update.committed for update in peer.updates.values()))
        (update,) = peer.updates.values()
        update.header.manifest.check_layout(bundle.layout)
        assert manifest_of(bundle.layout, [update.data]).digest == update.header.manifest.digest
        assert update.header.summary.examples == 6

        await peer.order(Evaluate(key=key, model=offered.digest, seconds_left=60.0))
        await peer.until(lambda: len(peer.evaluations) == 1)
        assert (peer.evaluations[0][1].examples, peer.evaluations[0][1].executed) == (2, 2)

        await peer.order(
            Finished(plan=plan, rounds=1, final_model=offered.digest, best_model=offered.digest),
        )
        while "finished" not in (await silo_agent_beside("status", *directory)).stdout:
            assert process.returncode is None
        served = await asyncio.to_thread(lambda: urlopen(f"http://{metrics}/metrics", timeout=20).read().decode())
        assert 'lorica_silo_rounds_total{outcome="uploaded",work="training"} 1.0' in served
        assert 'lorica_silo_refusals_total{rule="trusted_peers"} 0.0' in served
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        records = [json.loads(line) for line in stderr.decode().splitlines()]
        assert {"started", "readiness", "trained", "evaluated", "stopped"} <= {record["event"] for record in records}
    assert peer.declined == []

    assert len(peer.raw) > 20
    assert len(found_in(peer.raw, SILO)) > 5  # what does leave is found
    for word in OF_RECORDS:
        assert found_in(peer.raw, word) == set(), f"{word!r} of the silo's records left it"
    assert not any(b"PEOPLE" in message for _, message in peer.raw), "the name of a table left it"

    (silo.root / "silo.toml").write_text("[policy]\nallow_execution = false\n")
    answer = await silo_agent_beside("ask", "how many people live in city 6 ?", "--json", *directory)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["question"] == "how many people live in city 6 ?"
    assert "allow_execution" in json.loads(answer.stdout)["not_run"]

    status_text = silo_agent("status", *directory).stdout
    assert "not running" in status_text
    assert f"last loss reduction      {update.header.summary.loss_reduction:.4g} in round 1" in status_text
    assert "round 1 attempt 1 training: uploaded" in status_text
    assert "round 1 attempt 1 evaluation: evaluated" in status_text


async def test_check_passes_where_everything_is_well(peer: FederationPeer, silo: SiloFolder, tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data")
    done = await silo_agent_beside("check", "--data", str(data), "--dir", str(silo.root))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 train, 2 dev, 0 test examples" in done.stdout
    assert "failed" not in done.stdout


async def test_check_names_what_fails_and_exits_so(peer: FederationPeer, silo: SiloFolder, tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data", bad_lines=3)
    silo.identity_key.chmod(0o644)
    done = await silo_agent_beside("check", "--data", str(data), "--dir", str(silo.root))
    assert done.returncode == EXIT_CODES[ConfigurationError]
    assert "chmod 600" in done.stdout
    assert re.search(r"2 of \d+ checks failed: files and permissions, data$", done.stderr, re.MULTILINE)


async def test_check_tells_a_tls_intercepting_proxy(peer: FederationPeer, tmp_path: Path) -> None:
    async with FederationPeer(TestNet.create()) as interception:
        folder = SiloFolder(tmp_path / "silo")
        store_credentials(folder, NET.credentials(interception.address))
        done = await silo_agent_beside(
            "check", "--data", str(data_folder(tmp_path / "data")), "--dir", str(folder.root)
        )
    assert done.returncode == EXIT_CODES[ConfigurationError]
    assert "TLS-intercepting" in done.stdout
    assert "route and TLS interception" in done.stderr


def test_too_many_bad_lines_and_the_silo_does_not_start(silo: SiloFolder, tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data", bad_lines=3)
    done = silo_agent("start", "--data", str(data), "--dir", str(silo.root))
    assert done.returncode == EXIT_CODES[DataError]
    assert "train.jsonl" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["status"], ConfigurationError, "silo-agent enroll TOKEN"),
        (["pause"], ConfigurationError, "silo-agent enroll TOKEN"),
        (["start"], ConfigurationError, "silo-agent enroll TOKEN"),
        (["ask", "x"], ConfigurationError, "silo-agent enroll TOKEN"),
        (["enroll", "nonsense"], ConfigurationError, "does not begin with 'lorica1-'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(
    tmp_path: Path, arguments: list[str], kind: type[Exception], said: str
) -> None:
    done = silo_agent(*arguments, "--dir", str(tmp_path / "none"))
    assert done.returncode == EXIT_CODES[kind]  # type: ignore[index]
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not (tmp_path / "none").exists()


def test_asking_before_any_model_came_says_so(silo: SiloFolder) -> None:
    silo.make()
    done = silo_agent("ask", "who ?", "--dir", str(silo.root))
    assert done.returncode == EXIT_CODES[StateError]
    assert "no global model is here yet" in done.stderr


def test_an_expired_certificate_does_not_start(tmp_path: Path) -> None:
    folder = SiloFolder(tmp_path / "silo")
    net = TestNet.create(age=timedelta(days=30))
    store_credentials(folder, net.credentials("127.0.0.1:1", age=timedelta(days=20)))
    done = silo_agent("start", "--data", str(tmp_path), "--dir", str(folder.root))
    assert done.returncode == EXIT_CODES[OutsideValidity]
    assert "expired at" in done.stderr


def test_light_commands_do_not_load_what_is_heavy(silo: SiloFolder) -> None:
    silo.make()
    for arguments in (["--help"], ["status", "--dir", str(silo.root)], ["pause", "--dir", str(silo.root)]):
        script = (
            "import sys; from silo_agent.cli import main; sys.argv[1:] = " + repr(arguments) + "\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "print(sorted({'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stderr.splitlines()[-1] == "[]", arguments


def test_schema_prints_a_databases_tables(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data")
    done = silo_agent("schema", f"sqlite:///{data / 'db.sqlite'}")
    assert done.returncode == 0
    assert [table["name"] for table in json.loads(done.stdout)["tables"]] == ["PEOPLE"]
