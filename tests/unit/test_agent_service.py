"""The agent's loop with its real client, journal, cache and policy, against a hand-written coordinator.

Training alone is stood in for: it adds one to every byte, and waits where a test tells it to, so that a test decides
what happens while it runs.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from lorica_security.errors import Conflict, DataError, LoricaError, StateError, WrongTime
from lorica_security.on_disk.log_file import AuditLog
from silo_agent.commands.agent_commands import last_loss_reduction
from silo_agent.edges.accounts.audit_log import audit_log
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.edges.console.observer import SiloObserver
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import LastModel, RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.masks.model_checking import model_checks
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.states import Ready, Stopped
from silo_agent.service.agent import AgentService
from silo_agent.service.audited import AuditedCoordinator, AuditedGate, AuditedObserver, SiloAudit
from silo_agent.service.masking import Masking
from silo_agent.service.ports import Cancelled, DataSummary, Notice, Progress, RoundModel, TrainedUpdate, WorkCancelled
from silo_agent.service.privacy import SharingPort
from silo_agent.service.refusals import RULES
from silo_agent.service.work import progress_reports
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import (
    DeclineReason,
    Evaluate,
    Evaluation,
    Finished,
    Prepare,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
    TrainingSummary,
)
from silo_wire.plans.plan import PlanBundle
from tests.support.agent_parts import Notes
from tests.support.federation_peer import (
    FEDERATION,
    SILO,
    FederationPeer,
    OfferedModel,
    TestNet,
    small_bundle,
    vector_of,
)
from tests.support.release_groups import no_newer_groups

NET = TestNet.create()
BUNDLE = small_bundle()
PLAN = BUNDLE.plan.digest
DATA = vector_of(BUNDLE.layout, 1)
TRAINED = bytes((byte + 1) % 256 for byte in DATA)
KEY = RoundKey(federation=FEDERATION, plan=PLAN, round=1, attempt=1)
EVALUATION = Evaluation(
    split="dev", examples=4, exact_matches=2, executed=0, execution_matches=0, loss_per_token=0.5, seconds=1.0
)


class ByteTrainer:
    """Adds one to every byte. `hold` makes training wait until `go` or until it is cancelled."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.trained: list[RoundKey] = []
        self.told_before: list[float | None] = []
        self.cancelled: list[RoundKey] = []
        self.hold = False
        self.go = threading.Event()
        self.began = threading.Event()
        self.gave_up = threading.Event()
        self.loss_last = 1.0
        self.unusable_data: LoricaError | None = None
        self.failure: LoricaError | None = None

    def prepare(self, bundle: PlanBundle, base: RoundModel | None) -> DataSummary:
        if self.unusable_data:
            raise self.unusable_data
        self.prepared.append(bundle.plan.name)
        return DataSummary(train_examples=9, dev_examples=4, test_examples=0, bad_lines=0, problems=())

    def train(
        self,
        *,
        bundle: PlanBundle,
        key: RoundKey,
        model: RoundModel,
        update_file: Path,
        included_update: Digest | None,
        told_before: float | None,
        checkpoint_file: Path,
        progress: Progress,
        notice: Notice,
        cancelled: Cancelled,
    ) -> TrainedUpdate:
        self.began.set()
        while self.hold and not self.go.wait(0.005):
            if cancelled():
                self.cancelled.append(key)
                self.gave_up.set()
                raise WorkCancelled
        if self.failure:
            raise self.failure
        delta = bytes((byte + 1) % 256 for byte in model.file.read_bytes())
        update_file.write_bytes(delta)
        progress(1.0)
        self.trained.append(key)
        self.told_before.append(told_before)
        summary = TrainingSummary(
            examples=9,
            loss_max=3.0,
            loss_min=min(self.loss_last, 3.0),
            loss_first=3.0,
            loss_last=self.loss_last,
            optimizer_steps=7,
            seconds=2.0,
        )
        return TrainedUpdate(manifest=manifest_of(bundle.layout, [delta], 1024), summary=summary)

    def evaluate(
        self, *, bundle: PlanBundle, model: RoundModel, progress: Progress, cancelled: Cancelled
    ) -> Evaluation:
        assert model.manifest.layout_digest == bundle.layout.digest
        return EVALUATION


class Silo:
    """One silo's folder; `running` runs an agent process's worth of parts on it."""

    def __init__(self, folder: Path, credentials: SiloCredentials) -> None:
        self.folder = SiloFolder(folder)
        self.folder.make()
        self.credentials = credentials
        self.trainer = ByteTrainer()
        self.notes = Notes()
        self.metrics = SiloMetrics(CollectorRegistry())
        self.rules = PolicyRules()
        self.sharing: SharingPort | None = None
        self.service: AgentService
        self.journal: RoundJournal
        self.log: AuditLog
        self.run: asyncio.Task[None]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AgentService]:
        self.journal = RoundJournal(self.folder.journal, updates=self.folder.updates, silo=SILO)
        self.log = audit_log(self.folder, self.credentials)
        audit = SiloAudit(
            self.log,
            federation=FEDERATION,
            silo=SILO,
            ledger_head=self.journal.ledger_head,
            clock=time.time,
        )
        observer = AuditedObserver(SiloObserver(journal=self.journal, metrics=self.metrics, display=self.notes), audit)
        async with mutual_channel(self.credentials) as channel:
            client = GrpcCoordinator(
                channel=channel,
                credentials=self.credentials,
                models=ModelCache(self.folder.models, kept=2),
                agent_version="test",
                unreachable=observer.unreachable,
                new_backoff=lambda: Backoff(first_s=0.01, most_s=0.05),
                log_head=self.log.head,
            )
            coordinator = AuditedCoordinator(client, audit)
            policy = SiloPolicy(rules=self.rules, silo=SILO)
            self.service = AgentService(
                federation=FEDERATION,
                coordinator=coordinator,
                journal=self.journal,
                plans=PlanStore(self.folder.plans),
                gate=AuditedGate(policy, audit, self.rules),
                trainer=self.trainer,
                masking=Masking(
                    journal=masking_journal(self.folder, self.credentials),
                    coordinator=coordinator,
                    party=party_of(self.folder, self.credentials, policy, self.log),
                    newer_groups=no_newer_groups,
                    unmasks=audit.unmasks,
                ),
                checks=model_checks(
                    self.folder,
                    self.credentials,
                    policy,
                    coordinator=client,
                    proves=audit.proves,
                    goes_back=audit.goes_back,
                ),
                privacy=guard_of(self.folder, self.credentials, policy, self.journal, sharing=self.sharing),
                display=self.notes,
                observer=observer,
            )
            self.run = asyncio.create_task(self.service.run())
            try:
                yield self.service
            finally:
                self.service.stop()
                async with asyncio.timeout(20):
                    await asyncio.wait([self.run])
                self.journal.close()
        if not self.run.cancelled() and self.run.exception() is None:
            assert self.service.agent.phase == Stopped()

    @asynccontextmanager
    async def killed(self) -> AsyncIterator[AgentService]:
        """As `running`, but the process goes without a word at the end."""
        async with self.running() as service:
            yield service
            self.trainer.go.set()
            self.run.cancel()
            await asyncio.wait([self.run])

    async def training_began(self) -> None:
        assert await asyncio.to_thread(self.trainer.began.wait, 20)

    def refusals(self) -> list[str]:
        """The rules of what it refused, as its journal and its metrics agree."""
        journal = RoundJournal(self.folder.journal, updates=self.folder.updates, silo=SILO)
        try:
            rules = [refusal.rule for refusal in journal.refusals(100)]
        finally:
            journal.close()
        for rule in RULES:
            value = self.metrics.registry.get_sample_value("lorica_silo_refusals_total", {"rule": rule})
            assert value == rules.count(rule), rule
        return rules

    def outcomes(self) -> list[tuple[int, str, str]]:
        journal = RoundJournal(self.folder.journal, updates=self.folder.updates, silo=SILO)
        try:
            return [(o.round, o.work, o.outcome) for o in journal.history(100)]
        finally:
            journal.close()


@pytest.fixture
async def peer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FederationPeer]:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with FederationPeer(NET) as listening:
        yield listening


@pytest.fixture
def silo(peer: FederationPeer, tmp_path: Path) -> Silo:
    return Silo(tmp_path / "silo", NET.credentials(peer.address))


def train_order(model: OfferedModel, *, round_number: int = 1, attempt: int = 1) -> Train:
    key = replace(KEY, round=round_number, attempt=attempt)
    return Train(key=key, model=model.digest, seconds_left=60.0)


async def test_one_round_from_prepare_to_the_finished_plan(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    next_model = peer.offer(BUNDLE, vector_of(BUNDLE.layout, 2), made_by=1)
    async with silo.running():
        await peer.order(Prepare(PLAN))
        await peer.until(lambda: peer.readiness == [(PLAN, True, "")])
        await peer.order(train_order(model))
        await peer.until(lambda: any(update.committed for update in peer.updates.values()))
        (update,) = peer.updates.values()
        assert update.data == TRAINED
        await peer.order(Evaluate(key=KEY, model=next_model.digest, seconds_left=60.0))
        await peer.until(lambda: peer.evaluations == [(KEY, EVALUATION)])
        best = model.digest
        await peer.order(Finished(plan=PLAN, rounds=1, final_model=next_model.digest, best_model=best))
        await silo.notes.until(lambda: silo.notes.activities[-1] == "finished")
        assert silo.journal.last_model() == LastModel(plan=PLAN, model=best)
    assert silo.outcomes() == [(1, "training", "uploaded"), (1, "evaluation", "evaluated")]
    assert {phase for _, phase, _ in peer.progress} <= {"fetching", "training", "uploading", "evaluating"}
    assert peer.declined == []


SILO_LEVEL = small_bundle(
    aggregation={"max_weight": 10.0},
    evaluation={"every": 0, "initial": False, "last": False},
    privacy={"level": "silo", "noise_multiplier": 10.0, "nominal_silos": 5},
)


@pytest.mark.parametrize(("bundle", "told"), [(BUNDLE, {1.0}), (SILO_LEVEL, {0.0})], ids=["open", "silo level"])
async def test_steps_of_training_are_told_where_a_number_of_records_may_be(
    peer: FederationPeer, silo: Silo, monkeypatch: pytest.MonkeyPatch, bundle: PlanBundle, told: set[float]
) -> None:
    monkeypatch.setattr(progress_reports, "PROGRESS_S", 0.0)
    model = peer.offer(bundle, DATA)
    key = replace(KEY, plan=bundle.plan.digest)
    # Held until fetching was told: of reports that come due while one is under way, only the newest is.
    silo.trainer.hold = True
    async with silo.running():
        await peer.order(Train(key=key, model=model.digest, seconds_left=60.0))
        await peer.until(lambda: (key, "fetching", 1.0) in peer.progress)
        silo.trainer.go.set()
        await peer.until(lambda: any(update.committed for update in peer.updates.values()))
    assert {fraction for _, phase, fraction in peer.progress if phase == "training"} == told


@pytest.mark.parametrize(("memory", "remembered"), [(0.5, [None, 2.0, 2.0, 2.5]), (0.0, [None] * 4)])
async def test_a_silo_remembers_what_it_told_in_the_round_before_also_when_it_was_killed(
    peer: FederationPeer, silo: Silo, memory: float, remembered: list[float | None]
) -> None:
    bundle = small_bundle(aggregation={"reduction_memory": memory})
    model = peer.offer(bundle, DATA)

    async def train(number: int, attempt: int) -> None:
        key = replace(KEY, plan=bundle.plan.digest, round=number, attempt=attempt)
        trained = len(silo.trainer.trained)
        await peer.order(Train(key=key, model=model.digest, seconds_left=60.0))
        await peer.until(lambda: len(silo.trainer.trained) > trained and silo.journal.saved_update() is not None)

    async with silo.killed():
        await train(1, 1)
        silo.trainer.loss_last = 0.5
        await train(2, 1)
    async with silo.running():
        await train(2, 2)
        await train(3, 1)
    assert silo.trainer.told_before == remembered


@pytest.mark.parametrize(
    ("weighting", "last", "told", "noted"),
    [
        ("lorar", 1.0, "2 in round 1", []),
        ("lorar", 4.0, "0 in round 1: the loss did not fall, so that this silo's update weighs nothing", [1]),
        ("size", 4.0, None, []),
    ],
)
async def test_a_silos_people_are_told_what_its_loss_fell_by_and_where_it_did_not(
    peer: FederationPeer, silo: Silo, weighting: str, last: float, told: str | None, noted: list[int]
) -> None:
    bundle = small_bundle(aggregation={"weighting": weighting})
    key, model = replace(KEY, plan=bundle.plan.digest), peer.offer(bundle, DATA)
    silo.trainer.loss_last = last
    async with silo.running():
        await peer.order(Train(key=key, model=model.digest, seconds_left=60.0))
        await peer.until(lambda: any(update.committed for update in peer.updates.values()))
        saved = silo.journal.saved_update()
    assert [note["round"] for note in silo.notes.of("no-loss-reduction")] == noted
    assert last_loss_reduction(bundle, saved) == told
    other = small_bundle(seed=1)
    assert last_loss_reduction(other, saved) is None, "of another plan it tells nothing"


async def test_the_same_order_after_a_reconnection_trains_once(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.hold = True
    async with silo.running():
        await peer.order(train_order(model))
        await silo.training_began()
        await peer.cut_streams()
        await peer.until(lambda: len(peer.instances) == 2)
        await peer.order(train_order(model))
        silo.trainer.go.set()
        await peer.until(lambda: any(update.committed for update in peer.updates.values()))
    assert silo.trainer.trained == [KEY]


async def test_a_round_that_closes_stops_the_training(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.hold = True
    async with silo.running():
        await peer.order(train_order(model))
        await silo.training_began()
        await peer.order(Standby(StandbyReason.NOT_IN_COHORT))
        assert await asyncio.to_thread(silo.trainer.gave_up.wait, 20)
        silo.trainer.hold = False
        await peer.order(train_order(model, attempt=2))
        await silo.notes.outcomes(2)
    assert silo.trainer.cancelled == [KEY]
    assert silo.trainer.trained == [replace(KEY, attempt=2)]
    assert silo.outcomes() == [(1, "training", "closed"), (1, "training", "uploaded")]


async def test_an_update_on_disk_is_uploaded_by_the_next_process_and_not_trained_again(
    peer: FederationPeer, silo: Silo
) -> None:
    model = peer.offer(BUNDLE, DATA)
    await peer.order(train_order(model))
    peer.cut_upload_after = 2
    peer.deaf = True
    async with silo.killed():
        await peer.until(lambda: not peer.cut_upload_after)
    (update,) = peer.updates.values()
    assert (len(update.chunks), update.committed) == (2, False)
    peer.deaf = False
    async with silo.running():
        await silo.notes.outcomes(1)
    assert silo.trainer.trained == [KEY], "not trained again"
    assert peer.updates == {update.header.manifest.digest: update}, "the same update"
    assert (update.data, update.header.first_chunk) == (TRAINED, 2)


async def test_a_killed_training_is_done_again_by_the_next_process(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.hold = True
    await peer.order(train_order(model))
    async with silo.killed():
        await silo.training_began()
        silo.trainer.failure = StateError("killed before anything was written")
    silo.trainer.failure, silo.trainer.hold = None, False
    async with silo.running():
        await peer.until(lambda: any(update.committed for update in peer.updates.values()))
    assert silo.trainer.trained == [KEY]
    assert peer.plan_fetches == 1, "the plan was on disk"


async def test_pause_of_another_process_takes_effect_on_reread_and_outlives_a_restart(
    peer: FederationPeer, silo: Silo
) -> None:
    model = peer.offer(BUNDLE, DATA)
    async with silo.running() as service:
        await peer.order(Prepare(PLAN))
        await peer.until(lambda: len(peer.readiness) == 1)
        silo.journal.set_paused(True)
        service.reread_journal()
        await peer.until(lambda: len(peer.readiness) == 2)
        assert peer.readiness[-1][1] is False
        await peer.order(train_order(model))
        await peer.until(lambda: bool(peer.declined))
        assert peer.declined[0][:2] == (KEY, DeclineReason.PAUSED)
    await peer.order(Prepare(PLAN))
    async with silo.running() as service:
        await peer.until(lambda: len(peer.readiness) == 3)
        assert peer.readiness[-1][1] is False
        silo.journal.set_paused(False)
        service.reread_journal()
        await peer.until(lambda: len(peer.readiness) == 4)
        assert peer.readiness[-1] == (PLAN, True, "")


async def test_stopping_declines_the_round_that_is_being_trained(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.hold = True
    async with silo.running():
        await peer.order(train_order(model))
        await silo.training_began()
    assert [(key, reason) for key, reason, _ in peer.declined] == [(KEY, DeclineReason.STOPPING)]
    assert silo.trainer.cancelled == [KEY]


async def test_stopping_does_not_wait_for_a_coordinator_that_is_gone(
    peer: FederationPeer, silo: Silo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo_agent.service.agent.STOP_S", 0.05)
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.hold = True
    async with silo.running():
        await peer.order(train_order(model))
        await silo.training_began()
        await peer.close()
    assert "coordinator-not-told" in [event for event, _ in silo.notes.notes]
    await peer.listen(0)


async def test_a_plan_that_is_not_approved_is_refused_and_its_rounds_are_declined(
    peer: FederationPeer, silo: Silo
) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.rules = PolicyRules(approved_plans=["00" * 32])
    async with silo.running():
        await peer.order(Prepare(PLAN))
        await peer.until(lambda: len(peer.readiness) == 1)
        _, ready, reason = peer.readiness[0]
        assert not ready
        assert "approved_plans" in reason
        await peer.order(train_order(model))
        await peer.until(lambda: bool(peer.declined))
        assert peer.declined[0][1] is DeclineReason.POLICY
    assert peer.first_chunks == []
    assert silo.refusals() == ["approved_plans"], "once, whatever is ordered under it"
    kept = PlanStore(silo.folder.plans).refused()
    assert kept is not None, "for its people to look at"
    assert kept.plan.digest == PLAN


async def test_a_plan_of_another_federation_is_refused(peer: FederationPeer, silo: Silo) -> None:
    foreign = small_bundle(federation="other-net")
    peer.bundles[foreign.plan.digest] = foreign
    async with silo.running():
        await peer.order(Prepare(foreign.plan.digest))
        await peer.until(lambda: len(peer.readiness) == 1)
    assert peer.readiness[0][1] is False
    assert "other-net" in peer.readiness[0][2]
    assert silo.refusals() == ["IntegrityError"]


async def test_data_that_cannot_be_used_is_told_without_a_word_of_it(peer: FederationPeer, silo: Silo) -> None:
    peer.offer(BUNDLE, DATA)
    silo.trainer.unusable_data = DataError("train.jsonl:3: patient Ada has no query")
    async with silo.running():
        await peer.order(Prepare(PLAN))
        await peer.until(lambda: len(peer.readiness) == 1)
    told = "this silo's data or database cannot be used; its own log says why"
    assert peer.readiness == [(PLAN, False, told)]
    assert ("work-failed", str(silo.trainer.unusable_data)) in [
        (event, fields.get("detail")) for event, fields in silo.notes.notes
    ]
    assert silo.refusals() == [], "trouble of its own"


async def test_a_model_with_a_wrong_signature_is_declined_and_never_trained_on(
    peer: FederationPeer, silo: Silo
) -> None:
    model = peer.offer(BUNDLE, DATA, key=TestNet.create().coordinator_key)
    async with silo.running():
        await peer.order(train_order(model))
        await peer.until(lambda: bool(peer.declined))
    assert peer.declined[0][:2] == (KEY, DeclineReason.INTEGRITY)
    assert silo.trainer.trained == []
    assert silo.refusals() == ["IntegrityError"]


async def test_training_that_fails_is_declined_and_readiness_ends_after_three(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.failure = DataError("loss is not finite")
    async with silo.running():
        for attempt in (1, 2, 3):
            await peer.order(train_order(model, attempt=attempt))
            await peer.until(lambda attempt=attempt: len(peer.declined) == attempt)  # type: ignore[misc]
            await peer.order(Prepare(PLAN))
            await peer.until(lambda attempt=attempt: len(peer.readiness) >= attempt)  # type: ignore[misc]
        await peer.until(lambda: peer.readiness[-1][1] is False)
    assert [ready for _, ready, _ in peer.readiness][:2] == [True, True]
    assert "3 pieces of work failed here in a row" in peer.readiness[-1][2]
    assert "loss is not finite" not in str(peer.readiness) + str(peer.declined)


async def test_an_update_for_a_closed_round_ends_without_a_decline(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    peer.refuse_upload = WrongTime("round 1 is closed")
    async with silo.running() as service:
        await peer.order(train_order(model))
        await silo.notes.outcomes(1)
        assert service.agent.phase == Ready(PLAN)
    assert peer.declined == []
    assert silo.outcomes() == [(1, "training", "closed")]
    assert silo.refusals() == [], "the coordinator refused, not the silo"


async def test_a_second_agent_ends_with_the_coordinators_conflict(peer: FederationPeer, silo: Silo) -> None:
    peer.refuse_attending = Conflict("another agent of hospital-a is connected")
    async with silo.running():
        with pytest.raises(Conflict, match="another agent"):
            await asyncio.shield(silo.run)


async def test_a_defect_in_training_ends_the_agent_with_its_own_error(peer: FederationPeer, silo: Silo) -> None:
    model = peer.offer(BUNDLE, DATA)
    silo.trainer.failure = ZeroDivisionError("a defect")  # type: ignore[assignment]
    async with silo.running():
        await peer.order(train_order(model))
        with pytest.raises(ZeroDivisionError):
            await asyncio.shield(silo.run)
