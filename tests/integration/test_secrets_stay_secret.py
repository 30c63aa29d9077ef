"""Every secret that a federation has is looked for in all that it writes and says, as bytes, in hex and in base64.

First a federation of real processes: masks, record-level privacy, encrypted keys, a database with a password, a proxy
with one, at debug level. Then one in this process, where the secrets that never reach a disk (seeds of masks, shares,
the roots of noise) are noted as they are made.
"""

import io
import json
import logging
import traceback
import urllib.request
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from lorica.demo.plan import set_arguments
from lorica.demo.ports import free_ports
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica_coordinator.cli import main as coordinator_main
from lorica_security.host import key_file
from lorica_security.identity.enrolment_token import decode
from lorica_security.secure_aggregation.keys.secret import Secret
from silo_agent.cli import main as agent_main
from tests.integration.test_attacks_on_masked_rounds import rogue_template
from tests.support.byte_search import Needles
from tests.support.command_line import Done, run_command
from tests.support.coordinator import FEDERATION as ROGUE_FEDERATION
from tests.support.coordinator import FederationTemplate
from tests.support.revealed_shares import but_revealed
from tests.support.rogue_silos import honestly, played
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

__all__ = ["rogue_template"]

SILOS = ("clinic-a", "clinic-b", "clinic-c")
PASSPHRASE = "q7Vd0fZ-passphrase-of-the-tests"
DATABASE_PASSWORD = "xK3-password-of-the-database"
PROXY_PASSWORD = "mW9-password-of-the-proxy"
RECORDS = 64
LONGEST_S = 90.0
VALUES = {
    "schedule.rounds": 1,
    "schedule.min_silos": len(SILOS),
    "schedule.start_when_ready": "true",
    "aggregation.secure_aggregation": "true",
    "aggregation.max_weight": 100.0,
    "aggregation.max_delta_norm": 0.0,
    "aggregation.server_optimizer": "sgd",
    "aggregation.momentum": 0.0,
    "training.epochs": 1,
    "training.dropout": 0.0,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 48,
    "training.max_output_tokens": 24,
    "privacy.level": "record",
    "privacy.nominal_records": RECORDS,
    "privacy.expected_batch_size": 16,
    "privacy.steps": 1,
    "evaluation.every": 0,
    "evaluation.initial": "false",
    "evaluation.last": "false",
}


def forms(secret: bytes) -> set[bytes]:
    """How a secret may be written: as it is, in hex, in base64 wherever it begins in a longer text, escaped."""
    shown = {secret, secret.hex().encode(), secret.hex().upper().encode(), repr(secret)[2:-1].encode()}
    for lead in range(3):
        for encode in (b64encode, urlsafe_b64encode):
            text = encode(bytes(lead) + secret)
            shown.add(text[4 if lead else 0 : len(text) - 4 if len(secret) > 12 else None])
    return {form for form in shown if len(form) >= 12}


def found_in(text: bytes, secrets_made: dict[str, bytes]) -> list[str]:
    return [name for name, secret in secrets_made.items() if any(form in text for form in forms(secret))]


def key_secrets(name: str, path: Path) -> dict[str, bytes]:
    """A key's private number, and the lines of its PEM in clear."""
    pem = key_file.read_key(path, {key_file.PASSPHRASE: PASSPHRASE})
    key: Any = load_pem_private_key(pem, None)
    raw = (
        key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        if path.name == "identity.key"
        else key.private_numbers().private_value.to_bytes(32, "big")
    )
    lines = {f"{name} line {number}": line for number, line in enumerate(pem.splitlines()[1:-1]) if len(line) > 40}
    return {name: raw, **lines}


# --- real processes
# -----------------------------------------------------------------------------------------------------------


@dataclass
class Federation:
    root: Path
    processes: WarmProcesses
    environment: dict[str, str]
    secrets: dict[str, bytes] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.root / "coordinator"

    def agent_folder(self, silo: str) -> Path:
        return self.root / "agents" / silo

    def coordinator(self, *arguments: str | Path, code: int = 0) -> Done:
        return self._run(coordinator_main, arguments, "coordinator", code)

    def agent(self, silo: str, *arguments: str | Path, code: int = 0) -> Done:
        return self._run(agent_main, (*arguments, "--dir", self.agent_folder(silo)), silo, code)

    def _run(self, main: Callable[[], None], arguments: tuple[str | Path, ...], who: str, code: int) -> Done:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            done = run_command(main, *arguments)
        assert done.code == code, done.out + done.err
        if arguments[0] != "invite":  # which is there to say one
            self.said[f"{who}: {' '.join(map(str, arguments))}"] = done.out + done.err
        return done


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One masked, private round, to its end; everything still runs."""
    root = tmp_path_factory.mktemp("secrets")
    ports = free_ports(4)
    (root / "logs").mkdir()
    environment = {
        "XDG_CONFIG_HOME": str(root / "config"),
        key_file.PASSPHRASE: PASSPHRASE,
        "NO_PROXY": "127.0.0.1",
        "HTTPS_PROXY": f"http://agent:{PROXY_PASSWORD}@127.0.0.1:9",
    }
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, environment)
        it.coordinator(
            *("init", it.folder, "--federation", "quiet", "--host", "127.0.0.1", "--no-plan", "--status-port", "0"),
            *("--silos-port", str(ports[0]), "--enrolment-port", str(ports[1]), "--metrics-port", str(ports[2])),
        )
        where = ("--dir", it.folder)
        it.coordinator("plan", "new", "default", *where, "--size", "micro", *set_arguments(VALUES))
        tokens = {silo: it.coordinator("invite", silo, *where).out.strip() for silo in SILOS}
        processes.start(
            "coordinator", "lorica_coordinator.cli", ["serve", *map(str, where), "--log-level", "debug"], environment
        )
        until(lambda: "serving" in (root / "logs" / "coordinator.log").read_text(), processes.check, LONGEST_S)
        for number, silo in enumerate(SILOS):
            log = query_log(CLINIC, records=RECORDS, seed=number).log
            write_silo(root / "data" / silo, CLINIC, seed=number, splits=log)
            it.agent(silo, "enroll", tokens[silo])
            metrics = f'\n[metrics]\nlisten = "127.0.0.1:{ports[3]}"\n' if silo == SILOS[0] else ""
            (it.agent_folder(silo) / "silo.toml").write_text(
                "[policy]\ntrust_on_first_use = true\nrequire_secure_aggregation = true\napproved_plans = "
                '"any"\nrequire_privacy = "record"\n'
                "max_epsilon = 20.0\nallow_execution = false\n[database]\nurl = "
                f'"postgresql://reader:{DATABASE_PASSWORD}@127.0.0.1:9/none"\n{metrics}'
            )
            arguments = ["start", "--dir", str(it.agent_folder(silo)), "--data", str(root / "data" / silo)]
            processes.start(silo, "silo_agent.cli", [*arguments, "--log-level", "debug"], environment)
        log = root / "logs" / "coordinator.log"
        until(lambda: '"phase": "finished"' in log.read_text(), processes.check, LONGEST_S)
        outcome = json.loads(it.coordinator("rounds", "--json", *where).out)[-1]["outcome"]
        assert outcome in ("applied", "zero_weight")  # the noise of the weights decides, and no seed decides the noise

        it.secrets.update({"passphrase": PASSPHRASE.encode(), "database's password": DATABASE_PASSWORD.encode()})
        it.secrets["proxy's password"] = PROXY_PASSWORD.encode()
        for silo, token in tokens.items():
            it.secrets[f"token of {silo}"] = token.removeprefix("lorica1-").encode()
            it.secrets[f"secret of the token of {silo}"] = decode(token).secret
        for owner, folder in (("coordinator", it.folder / "keys"), *((silo, it.agent_folder(silo)) for silo in SILOS)):
            for path in sorted(folder.glob("*.key")):
                it.secrets |= key_secrets(f"{owner}'s {path.name}", path)
        for name, port in (("coordinator", ports[2]), (SILOS[0], ports[3])):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                it.said[f"{name}: metrics"] = reply.read().decode()
        for command in ("status", "privacy", "check"):
            it.coordinator(command, *where)
        for command in (("status",), ("status", "--json"), ("privacy", "show"), ("plan", "show"), ("trust", "list")):
            it.agent(SILOS[0], *command)
        it.agent(SILOS[0], "check", "--data", root / "data" / SILOS[0], code=3)  # nobody answers as the database
        yield it


@pytest.mark.slow
def test_no_log_line_traceback_metric_or_command_shows_a_secret(federation: Federation) -> None:
    assert len(federation.secrets) > 3 + 2 * 3 + 4 + 2 * 3, sorted(federation.secrets)
    logs = {path.name: path.read_bytes() for path in (federation.root / "logs").iterdir()}
    assert {"coordinator.log", *(f"{silo}.log" for silo in SILOS)} == set(logs)
    assert all(logs.values())
    assert b'"level": "debug"' in logs[f"{SILOS[0]}.log"]
    assert "database-unreachable" in str(federation.said)
    for name, text in {**logs, **{name: text.encode() for name, text in federation.said.items()}}.items():
        assert found_in(text, federation.secrets) == [], name
    assert found_in(b"x" + b64encode(b"ab" + PASSPHRASE.encode()), federation.secrets) == ["passphrase"], "search finds"


@pytest.mark.slow
def test_no_file_has_a_secret_but_the_one_that_its_people_wrote(federation: Federation) -> None:
    by_people = {str(federation.agent_folder(silo) / "silo.toml"): ["database's password"] for silo in SILOS}
    found = {}
    for path in sorted(federation.root.rglob("*")):
        if path.is_file() and (names := found_in(path.read_bytes(), federation.secrets)):
            found[str(path)] = names
    assert found == by_people


@pytest.mark.slow
def test_the_processes_write_no_core_file(federation: Federation) -> None:
    for name in ("coordinator", *SILOS):
        limits = Path(f"/proc/{federation.processes.pid(name)}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
        assert line.split()[4:6] == ["0", "0"], name


# --- in this process
# --------------------------------------------------------------------------------------------------------------


async def test_what_secure_aggregation_keeps_secret_is_in_no_log_and_no_file_afterwards(
    rogue_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, bytes] = {}
    make, take = Secret.__init__, Secret.taking.__func__  # type: ignore[attr-defined]

    def note(data: bytes) -> None:
        where = traceback.extract_stack(limit=3)[0]
        if len(data) >= 16 and any(data):
            made[f"{where.name}:{where.lineno} {len(made)}"] = data

    def from_data(self: Secret, data: Any) -> None:
        make(self, data)
        note(bytes(data))

    def from_buffer(cls: type[Secret], buffer: bytearray) -> Secret:
        note(bytes(buffer))
        secret: Secret = take(cls, buffer)
        return secret

    monkeypatch.setattr(Secret, "__init__", from_data)
    monkeypatch.setattr(Secret, "taking", classmethod(from_buffer))
    lines = io.StringIO()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(lines),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(lines)
    logging.getLogger().addHandler(handler)
    try:
        async with played(rogue_template, tmp_path, honestly) as play:
            await play.closed(2)
    finally:
        logging.getLogger().removeHandler(handler)
        structlog.reset_defaults()
    assert len(made) > 100
    assert lines.getvalue()
    assert found_in(lines.getvalue().encode(), made) == []
    assert sum(path.is_file() for path in tmp_path.rglob("*")) > 10
    assert but_revealed(tmp_path, Needles(made.values()).below(tmp_path), ROGUE_FEDERATION) == {}
