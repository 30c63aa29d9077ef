"""Differential privacy and secure aggregation together: a real coordinator, four agents with their own ledgers, one of
them slow."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.audit.chain import Head
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.ledger import head_of
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_agent.edges.wire import grpc_client
from silo_agent.edges.wire.calls import uploads
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.messages import RoundKey
from tests.support.coordinator import PLAN_VALUES, FederationTemplate
from tests.support.rogue_silos import (
    FEDERATION,
    ROGUE,
    SILOS,
    WEIGHT_CAP,
    Declared,
    PlayedSilo,
    make_rogue_template,
    played,
)
from tests.unit.test_what_leaves_a_private_silo import COVERED, Why, values_of

PRIVATE = "private-masked"
OF_A_ROUND = 2
VALUES: dict[str, object] = {
    **PLAN_VALUES,
    "schedule.min_silos": 3,
    "schedule.masking_deadline_s": 600.0,
    "evaluation.every": 0,
    "evaluation.last": False,
    "aggregation.server_optimizer": "sgd",
    "aggregation.momentum": 0.0,
    "aggregation.max_delta_norm": 0.0,
    "aggregation.secure_aggregation": True,
    "aggregation.max_weight": WEIGHT_CAP,
    "training.epochs": 1,
    "training.max_grad_norm": 1.0,
    "privacy.level": "record",
    "privacy.nominal_records": 64,
    "privacy.expected_batch_size": 64,
    "privacy.steps": 2,
    "privacy.loss_noise_multiplier": 30.0,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    made = make_rogue_template(tmp_path_factory.mktemp("rogue") / "coordinator")
    create_plan(
        Coordinator.load(CoordinatorFolder(made.folder)).shelf.plans,
        name=PRIVATE,
        federation=FEDERATION,
        source=SizedModel("micro"),
        overrides=VALUES,
    )
    return made


@pytest.fixture
def receipts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each silo had its ledger countersigned."""
    counted: Counter[str] = Counter()
    whole = GrpcCoordinator.countersign_ledger

    async def countersign(client: GrpcCoordinator, head: Head, *, after: Head) -> LedgerReceipt:
        receipt = await whole(client, head, after=after)
        counted[client._credentials.silo] += 1
        return receipt

    monkeypatch.setattr(GrpcCoordinator, "countersign_ledger", countersign)
    return counted


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every message of secure aggregation as it goes onto the wire."""
    sent: list[Any] = []
    for home, name in ((grpc_client, "mask_answer_to_wire"), (uploads, "masked_header_to_wire")):
        whole = getattr(home, name)

        def kept(*arguments: Any, whole: Any = whole) -> Any:
            sent.append(whole(*arguments))
            return sent[-1]

        monkeypatch.setattr(home, name, kept)
    return sent


async def test_an_attempt_that_is_given_up_while_silos_mask_costs_nobody_a_second_entry(
    template: FederationTemplate, tmp_path: Path, wired: list[Any], receipts: Counter[str]
) -> None:
    held, let_go = asyncio.Event(), asyncio.Event()

    async def slow(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        """In the first attempt its vector comes when the attempt is over."""
        if isinstance(message, MaskedInput) and key.attempt == 1:
            held.set()
            await let_go.wait()
        await silo.send(key, message)

    async with played(template, tmp_path, slow, plan=PRIVATE) as play:
        trained: list[tuple[str, RoundKey]] = []
        for silo in play.silos.values():
            whole = silo.trainer.train

            def counted(*, whole: Any = whole, name: str = silo.name, **named: Any) -> Any:
                trained.append((name, named["key"]))
                return whole(**named)

            silo.trainer.train = counted  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            await held.wait()
        await play.at.service.stop_plan()
        await play.at.service.start_plan(PRIVATE)
        let_go.set()
        row = await play.closed(1)
        assert row.attempt == 2
        play.check_made_by(row, *SILOS)
        in_round_1 = [(name, key.attempt) for name, key in trained if key.round == 1]
        assert sorted(in_round_1) == [(name, 1) for name in SILOS]
        store = play.at.coordinator.open_store()
        try:
            for silo in play.silos.values():
                entries = [e for e in PrivacyLedgerFile(silo.folder.privacy_ledger).entries() if e.round == 1]
                assert [(entry.attempt, entry.mechanism) for entry in entries] == [
                    (1, "gradients"),
                    (1, "loss_reduction"),
                ]
                known = store.countersign_ledger(silo.name, Head(), after=Head(), at=0.0)
                assert known.sequence >= head_of(entries).sequence == OF_A_ROUND
        finally:
            store.close()
        for silo in play.silos.values():  # a machine may be put back with a running agent in it
            steps = [message for _, message in silo.said if not isinstance(message, Declared)]
            assert receipts[silo.name] > len(steps) > 5
    assert ROGUE in play.counted(row)
    seen = {name for message in wired for name, _ in values_of(message)}
    assert {"MaskedInput.vector", "DealtLine.box", "Agreement.survivors", "RevealedShare.self_mask"} <= seen
    assert {COVERED[name] for name in seen} <= {Why.IDENTITY, Why.PUBLIC, Why.RELEASED, Why.CRYPTOGRAPHY}
