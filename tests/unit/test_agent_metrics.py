"""What a silo counts of its refusals and rounds, where it says so, and that the sets of labels are closed."""

import ast
import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from lorica.demo.ports import free_ports
from lorica_security.errors import (
    ConfigurationError,
    DataError,
    LoricaError,
    MalformedMessage,
    PolicyRefusal,
    StateError,
    StorageError,
    Unreachable,
    WrongTime,
)
from lorica_security.identifiers import FederationName
from silo_agent.edges.console.metrics import ENDS, EVALUATION, TRAINING, SiloMetrics, metrics_served
from silo_agent.edges.console.observer import SiloObserver
from silo_agent.edges.disk.round_journal import MOST_REFUSALS, RoundJournal
from silo_agent.policy.rules import PolicyRules
from silo_agent.rounds.effects import JournalOutcome, Outcome
from silo_agent.service.refusals import PROTOCOL_RULES, REFUSED_AS, RULES, rule_of
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.transport import error_of, status_of
from tests.support.agent_parts import Notes
from tests.support.federation_peer import SILO

ROOT = Path(__file__).resolve().parents[2]
KEY = RoundKey(federation=FederationName("care"), plan=Digest("a1" * 32), round=3, attempt=1)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[RoundJournal]:
    opened = RoundJournal(tmp_path / "journal.sqlite", updates=tmp_path, silo=SILO)
    yield opened
    opened.close()


# --- rules ------------------------------------------------------------------------------------------------------------


def named_in_refusals(path: Path) -> Iterator[ast.expr]:
    """The rule of every PolicyRefusal and RecordRefusal that is made in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="PolicyRefusal" | "BudgetSpent" | "SharedRecords"), args=[rule, *_]):
                yield rule
            case ast.Call(func=ast.Name(id="RecordRefusal"), keywords=[ast.keyword(arg="rule", value=rule), *_]):
                yield rule


def test_every_rule_that_the_code_refuses_by_is_in_the_closed_set_and_no_other() -> None:
    named: set[str] = set()
    for folder in ("security", "silo_agent", "proto/silo_wire"):
        for path in (ROOT / folder).rglob("*.py"):
            for rule in named_in_refusals(path):
                match rule:
                    case ast.Constant(value=str() as text):
                        named.add(text)
                    case ast.Name(
                        id="TRUSTED_PEERS" | "RELEASE_GROUPS" | "RANGES" | "VERIFY" | "MASKING_MEMORY" as constant
                    ):
                        named.add(constant.lower())
                    case ast.Name(id="rule"):  # of a list beside it; all of them are keys of [policy]
                        pass
                    case other:
                        pytest.fail(f"{path}: {ast.unparse(other)} names a rule that this test cannot follow")
    assert named <= set(RULES)
    assert set(PROTOCOL_RULES) <= named, "a rule that nothing refuses by"
    assert set(PolicyRules.model_fields) <= set(RULES)
    assert len(set(RULES)) == len(RULES)


def test_a_refusal_is_named_by_its_rule_or_its_kind() -> None:
    assert rule_of(PolicyRefusal("min_cohort", "of this silo is 5")) == "min_cohort"
    assert {rule_of(kind("false")) for kind in REFUSED_AS} == {kind.__name__ for kind in REFUSED_AS}


@pytest.mark.parametrize("kind", [DataError, StateError, StorageError, ConfigurationError, Unreachable])
def test_trouble_of_this_silos_own_is_no_refusal(kind: type[LoricaError]) -> None:
    assert rule_of(kind("the disk is full")) is None


@pytest.mark.parametrize("kind", REFUSED_AS)
def test_what_the_coordinator_says_of_a_call_is_no_refusal(kind: type[LoricaError]) -> None:
    code, details, trailing = status_of(kind("round 1 is closed"))
    told = error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details))
    assert type(told) is kind
    assert told.told_by_peer
    assert rule_of(told) is None


# --- counting ---------------------------------------------------------------------------------------------------------


def test_every_series_exists_at_zero_from_the_start() -> None:
    registry = CollectorRegistry()
    SiloMetrics(registry)
    for rule in RULES:
        assert registry.get_sample_value("lorica_silo_refusals_total", {"rule": rule}) == 0
    for work, outcomes in ENDS.items():
        for outcome in outcomes:
            labels = {"work": work, "outcome": outcome.value}
            assert registry.get_sample_value("lorica_silo_rounds_total", labels) == 0
    assert {outcome for outcomes in ENDS.values() for outcome in outcomes} == set(Outcome)


def test_a_refusal_is_in_the_journal_the_metrics_and_the_log(journal: RoundJournal) -> None:
    metrics, notes = SiloMetrics(CollectorRegistry()), Notes()
    observer = SiloObserver(journal=journal, metrics=metrics, display=notes)
    observer.refused("one_model", "two models")
    assert [(item.rule, item.detail) for item in journal.refusals(10)] == [("one_model", "two models")]
    assert metrics.registry.get_sample_value("lorica_silo_refusals_total", {"rule": "one_model"}) == 1
    assert notes.notes == [("refused", {"rule": "one_model", "detail": "two models"})]


def test_an_order_that_does_not_parse_is_a_refusal_and_a_broken_connection_is_none(journal: RoundJournal) -> None:
    notes = Notes()
    observer = SiloObserver(journal=journal, metrics=SiloMetrics(CollectorRegistry()), display=notes)
    observer.unreachable(Unreachable("no route"), 0.5)
    assert journal.refusals(10) == []
    observer.unreachable(MalformedMessage("threshold 2 for 4 silos"), 0.512)
    assert [item.rule for item in journal.refusals(10)] == ["MalformedMessage"]
    assert notes.of("unreachable")[1] == {"detail": "threshold 2 for 4 silos", "next_try_s": 0.5}


@pytest.mark.parametrize("evaluation", [False, True])
def test_the_ends_of_rounds_are_counted_by_work(journal: RoundJournal, evaluation: bool) -> None:
    metrics = SiloMetrics(CollectorRegistry())
    observer = SiloObserver(journal=journal, metrics=metrics, display=Notes())
    observer.round_ended(JournalOutcome(key=KEY, evaluation=evaluation, outcome=Outcome.DECLINED))
    for work in (TRAINING, EVALUATION):
        labels = {"work": work, "outcome": "declined"}
        counted = metrics.registry.get_sample_value("lorica_silo_rounds_total", labels)
        assert counted == (work == (EVALUATION if evaluation else TRAINING))


def test_a_coordinator_that_asks_wrongly_without_end_does_not_fill_the_disk(
    journal: RoundJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_REFUSALS == 10_000, "ops/docs/metrics.md says so"
    monkeypatch.setattr("silo_agent.edges.disk.round_journal.MOST_REFUSALS", 3)
    for number in range(5):
        journal.record_refusal(WrongTime.__name__, f"order {number}")
    assert [item.detail for item in journal.refusals(100)] == ["order 2", "order 3", "order 4"]


# --- serving ----------------------------------------------------------------------------------------------------------


async def test_the_metrics_are_served_while_the_agent_runs(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    async with metrics_served(listen, tmp_path) as metrics:
        metrics.refused("trusted_peers")
        text = await asyncio.to_thread(lambda: urlopen(f"http://{listen}/metrics", timeout=20).read().decode())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    refusals = {sample.labels["rule"]: sample.value for sample in families["lorica_silo_refusals"].samples}
    assert {rule for rule, count in refusals.items() if count} == {"trusted_peers"} < set(RULES)
    assert "process_cpu_seconds" in families
    async with metrics_served(listen, tmp_path):
        pass  # the port was given back


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=rf"cannot listen on {listen} .*change \[metrics\] listen"):
            async with metrics_served(listen, tmp_path):
                pass


async def test_nothing_listens_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert Settings().metrics.listen == ""
    async with metrics_served("", tmp_path) as metrics:
        metrics.refused("one_model")


async def test_two_silos_in_one_process_count_each_for_itself(tmp_path: Path) -> None:
    async with metrics_served("", tmp_path) as one, metrics_served("", tmp_path) as other:
        one.refused("one_model")
        assert other.registry.get_sample_value("lorica_silo_refusals_total", {"rule": "one_model"}) == 0


@pytest.mark.parametrize("listen", ["9465", "127.0.0.1", "127.0.0.1:65536", "localhost:", "a b:1"])
def test_an_address_that_is_none_is_named(tmp_path: Path, listen: str) -> None:
    path = tmp_path / "silo.toml"
    path.write_text(f"[metrics]\nlisten = '{listen}'\n")
    with pytest.raises(ConfigurationError, match=r"metrics\.listen = .*use ADDRESS:PORT"):
        Settings.read(path)
