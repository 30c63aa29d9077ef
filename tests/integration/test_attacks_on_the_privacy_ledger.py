"""A silo's disk that goes back, played against a real coordinator by a real agent: the ledger is what the attacks are
after."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from lorica_coordinator.opened import Coordinator
from lorica_security.audit.chain import Head
from lorica_security.errors import AuthorisationError, MalformedMessage
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.ledger import head_of
from silo_agent.service.ports import TrainedUpdate
from silo_agent.service.told import NOT_INTACT
from silo_wire.canonical import Digest
from silo_wire.codecs import ledger_receipt
from silo_wire.codecs.common_codec import call_key
from silo_wire.manifest import manifest_of
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2
from tests.support.coordinator import (
    BANK,
    CHUNK_BYTES,
    FEDERATION,
    HOSPITAL,
    PLAN_VALUES,
    FederationTemplate,
    RunningCoordinator,
    running,
    vector,
)
from tests.support.coordinator import Silo as Caller
from tests.support.coordinator import federation_template as federation_template
from tests.unit.test_agent_service import ByteTrainer, Silo

PRIVATE = "private"
PER_ROUND = 2  # entries: gradients and loss reduction
PRIVACY: dict[str, object] = {
    **PLAN_VALUES,
    "schedule.rounds": 6,
    "schedule.gathering_deadline_s": 0.2,  # the other silo does not come
    "evaluation.initial": False,
    "evaluation.every": 0,
    "evaluation.last": False,
    "training.epochs": 1,
    "training.max_grad_norm": 1.0,
    "aggregation.weighting": "lorar",
    "privacy.level": "record",
    "privacy.target_epsilon": 8.0,
    "privacy.nominal_records": 64,
    "privacy.expected_batch_size": 64,
    "privacy.steps": 2,
    "privacy.loss_noise_multiplier": 30.0,
}


class SmallSteps(ByteTrainer):
    """A delta of a hundredth everywhere, and the summary of a private round."""

    def train(self, *, bundle: Any, key: Any, update_file: Path, **_: Any) -> TrainedUpdate:
        self.trained.append(key)
        content = vector(bundle.update_layout, 0.01)
        update_file.write_bytes(content)
        return TrainedUpdate(
            manifest=manifest_of(bundle.update_layout, [content], CHUNK_BYTES),
            summary=bundle.plan.privacy.summary(40.0),
        )


@dataclass
class Play:
    at: RunningCoordinator
    silo: Silo
    plan: Digest

    @property
    def ledger(self) -> PrivacyLedgerFile:
        return PrivacyLedgerFile(self.silo.folder.privacy_ledger)

    @property
    def rounds(self) -> list[tuple[int, str]]:
        return [(row.round, row.outcome) for row in self.at.saved()[1]]  # type: ignore[attr-defined]

    @property
    def uploaded(self) -> int:
        """How many updates the agent has delivered."""
        return sum(note["outcome"] == "uploaded" for note in self.silo.notes.of("round"))

    async def rounds_go_on(self, count: int) -> None:
        """The agent runs until so many updates more have been delivered, and stops."""
        enough = self.uploaded + count
        async with self.silo.running():
            await self.silo.notes.until(lambda: self.uploaded >= enough)

    def known_head(self) -> Head:
        store = self.at.coordinator.open_store()
        try:
            return store.countersign_ledger(HOSPITAL, Head(), after=Head(), at=0.0)
        finally:
            store.close()


@asynccontextmanager
async def played(template: FederationTemplate, root: Path, silo: Silo | None = None) -> AsyncIterator[Play]:
    folder = template.copy(root)
    from lorica_coordinator.plans.model_source import SizedModel
    from lorica_coordinator.plans.plan_folder import create_plan

    await asyncio.to_thread(
        create_plan,
        Coordinator.load(folder).shelf.plans,
        name=PRIVATE,
        federation=FEDERATION,
        source=SizedModel("micro"),
        overrides=PRIVACY,
    )
    async with running(folder, offer=PRIVATE) as at:
        credentials = replace(template.silos[HOSPITAL], address=at.address)
        if silo is None:
            silo = Silo(root.parent / "silo", credentials)
            silo.trainer = SmallSteps()
        silo.credentials = credentials
        yield Play(at, silo, at.coordinator.shelf.compile(PRIVATE).plan.digest)


@pytest.fixture
async def play(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Play]:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with played(federation_template, tmp_path / "coordinator") as play:
        yield play


async def test_an_honest_silo_is_followed_round_by_round(play: Play) -> None:
    await play.rounds_go_on(2)
    assert play.known_head() == head_of(play.ledger.entries())
    assert play.rounds[0] == (1, "applied")
    assert play.at.errors("Conflict") == 0


async def test_a_virtual_machine_is_put_back_from_a_snapshot(play: Play, tmp_path: Path) -> None:
    """Ledger, journal, receipt and saved update go back together; nothing on the disk shows it."""
    await play.rounds_go_on(1)
    shutil.copytree(play.silo.folder.root, tmp_path / "snapshot")
    await play.rounds_go_on(2)
    real = play.ledger.entries()
    shutil.move(play.silo.folder.root, tmp_path / "went-on")
    shutil.copytree(tmp_path / "snapshot", play.silo.folder.root)
    back, trained, uploaded = play.ledger.entries(), list(play.silo.trainer.trained), play.uploaded
    assert len(back) < len(real)
    notes = len(play.silo.notes.of("readiness"))
    conflicts = play.at.errors("Conflict")
    async with play.silo.running():
        await play.silo.notes.until(lambda: len(play.silo.notes.of("readiness")) > notes)
        assert play.silo.notes.of("readiness")[notes] == {"ready": False, "reason": NOT_INTACT}
    (found,) = {note["detail"] for note in play.silo.notes.of("work-failed")}
    assert f"ends with entry {len(back)}, but the coordinator knows entry {len(real)}" in found
    assert "Put the newest ledger back" in found
    assert (play.silo.trainer.trained, play.ledger.entries()) == (trained, back)
    assert play.at.errors("Conflict") > conflicts
    assert play.uploaded == uploaded

    shutil.rmtree(play.silo.folder.root)  # the remedy: the disk that went on
    shutil.move(tmp_path / "went-on", play.silo.folder.root)
    await play.rounds_go_on(1)
    assert play.ledger.entries()[: len(real)] == real
    assert len(play.ledger.entries()) > len(real)


async def test_a_coordinator_that_begins_anew_takes_the_ledger_as_it_is(
    play: Play, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """The first round of the same plan begins with the same model: its update was paid for, and is sent again."""
    await play.rounds_go_on(1)
    before, trained = play.ledger.entries(), list(play.silo.trainer.trained)
    async with played(federation_template, tmp_path / "anew", play.silo) as anew:
        await anew.rounds_go_on(1)
        entries = play.ledger.entries()
        assert anew.known_head() == head_of(entries)
        assert entries[: len(before)] == before
        assert len(entries) == len(before) + PER_ROUND * (len(play.silo.trainer.trained) - len(trained))


async def test_a_silo_speaks_for_its_own_ledger_alone(play: Play, federation_template: FederationTemplate) -> None:
    """Else one silo could stop another by a head that the other never had."""
    await play.rounds_go_on(1)
    known = play.known_head()
    async with Caller(play.at, federation_template.silos[BANK]) as bank:
        report = ledger_receipt.report_to_wire(
            federation=FEDERATION, silo=HOSPITAL, head=Head(99, "ab" * 32), after=known
        )
        with pytest.raises(grpc.aio.AioRpcError, match="only your own is served") as refused:
            await bank.stub.CountersignLedger(report)
        assert isinstance(error_of(refused.value), AuthorisationError)
        broken = federation_pb2.LedgerReport(key=call_key(federation=FEDERATION, silo=BANK))
        with pytest.raises(grpc.aio.AioRpcError, match="a digest has 32") as refused:
            await bank.stub.CountersignLedger(broken)
        assert isinstance(error_of(refused.value), MalformedMessage)
    assert play.known_head() == known
    assert (play.at.errors("AuthorisationError"), play.at.errors("MalformedMessage")) == (1, 1)
