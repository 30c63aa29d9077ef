"""A real coordinator and four silos of which one is malicious, in masked rounds over real gRPC and mutual TLS.

All four are agents, whole but for training: a delta is drawn from the names of silo and round. The rogue's differs in
what it sends: a test gives it an `Attack`, which is handed each answer that an honest agent would send now, and sends
what it likes.

A test waits for the round machine's state (`until`), never for time: where a deadline must pass, it lets it
(`deadline`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from lorica_coordinator.edges.telemetry.metrics import DROPPING_PHASES
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_coordinator.rounds.events import DeadlinePassed
from lorica_coordinator.rounds.states import Finished, Masking, State, course_of, deadline_of, round_of
from lorica_coordinator.service.records import RoundRow, SiloRow
from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.coordinator.requests import is_awaited
from lorica_security.secure_aggregation.groups.release_groups import signature_of
from lorica_security.secure_aggregation.keys import share_box
from lorica_security.secure_aggregation.keys.key_agreement import (
    Encapsulation,
    KeyPair,
    box_key,
    box_secret,
    encapsulated,
)
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.share_box import KeyShares
from lorica_security.secure_aggregation.messages import MaskedInput, Reveal, SealedShare, SharedKeys, signed
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.edges.console.observer import SiloObserver
from silo_agent.edges.disk.instance import next_instance
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.masks.model_checking import model_checks
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.agent import AgentService
from silo_agent.service.masking import Masking as SiloMasking
from silo_agent.service.model_checks import Mode
from silo_agent.service.ports import Cancelled, DataSummary, Notice, Progress, RoundModel, TrainedUpdate
from silo_agent.service.privacy import PrivacyGuard
from silo_wire.canonical import Digest
from silo_wire.manifest import CHUNK_BYTES as MASKED_CHUNK_BYTES
from silo_wire.manifest import Manifest, manifest_of, masked_layout
from silo_wire.messages import Evaluation, RoundKey, TrainingSummary
from silo_wire.plans.plan import PlanBundle
from silo_wire.transport import answer_to, error_of
from silo_wire.v1 import common_pb2, federation_pb2
from tests.support.agent_parts import Notes
from tests.support.coordinator import (
    CHUNK_BYTES,
    FEDERATION,
    PATIENCE_S,
    PLAN_VALUES,
    FederationTemplate,
    RunningCoordinator,
    initialise,
    running,
)
from tests.support.coordinator_edges import stored_vector
from tests.support.release_groups import hold_groups, no_newer_groups
from tests.support.secagg_federation import entropy

BANK, CLINIC, HOSPITAL, ROGUE = SILOS = tuple(map(SiloName, ("bank-b", "clinic-c", "hospital-a", "rogue-d")))
HONEST = SILOS[:3]
MASKED, PLAIN, NOISED, ADAPTED, LONGER = "masked", "plain", "noised", "adapted", "longer"
WEIGHT_CAP = 100.0
LARGEST_DELTA = 0.25
CLIPPING_NORM = 0.5
NOMINAL_SILOS = 8
LONG_S = 60.0

Vector = NDArray[np.float32]
Wide = NDArray[np.float64]


def summary_of(silo: SiloName) -> TrainingSummary:
    """Ten examples, and a loss reduction that tells silos apart."""
    reduction = 1.0 + SILOS.index(silo)
    return TrainingSummary(
        examples=10,
        loss_max=reduction,
        loss_min=0.0,
        loss_first=reduction,
        loss_last=0.0,
        optimizer_steps=7,
        seconds=2.0,
    )


def weight_of(silo: SiloName) -> float:
    told = summary_of(silo)
    return told.examples * told.loss_reduction


def delta_of(silo: SiloName, round_number: int, elements: int) -> Vector:
    seed = int.from_bytes(entropy("delta", silo, round_number)[:8], "little")
    return np.random.default_rng(seed).uniform(-LARGEST_DELTA, LARGEST_DELTA, elements).astype("<f4")


class DrawingTrainer:
    """Draws a delta, and masks it with the product's own code. `summary` is what it says of its training."""

    def __init__(self, silo: SiloName) -> None:
        self._silo = silo
        self.summary = summary_of(silo)

    def prepare(self, bundle: PlanBundle, base: RoundModel | None) -> DataSummary:
        return DataSummary(train_examples=10, dev_examples=1, test_examples=0, bad_lines=0, problems=())

    def drawn(self, bundle: PlanBundle, key: RoundKey) -> Vector:
        return delta_of(self._silo, key.round, bundle.layout.parameters)

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
        delta = self.drawn(bundle, key).tobytes()
        update_file.write_bytes(delta)
        return TrainedUpdate(manifest=manifest_of(bundle.layout, [delta], CHUNK_BYTES), summary=self.summary)

    no_training = Workshop.no_training
    mask = Workshop.mask

    def evaluate(
        self, *, bundle: PlanBundle, model: RoundModel, progress: Progress, cancelled: Cancelled
    ) -> Evaluation:
        raise AssertionError("the plan has no evaluation")


class Client(GrpcCoordinator):
    """The agent's own client. Answers of secure aggregation pass through the silo's attack, uploads in the clear do,
    too."""

    silo: "PlayedSilo"

    async def answer_mask(self, key: RoundKey, answer: Any) -> None:
        await self.silo.say(key, answer)

    async def upload_masked(
        self,
        key: RoundKey,
        masked: MaskedInput,
        manifest: Manifest,
        file: Path,
        *,
        mark: Any,
        progress: Progress,
    ) -> None:
        self.silo.vector = self.silo.vectors[masked.vector] = Vectors(manifest=manifest, file=file)
        await self.silo.say(key, masked)

    async def declare_trained(self, key: RoundKey, model: Digest) -> None:
        await self.silo.say(key, Declared(model))

    async def upload(self, update: SavedUpdate, file: Path, *, mark: Any = None, progress: Progress) -> None:
        await self.silo.say(update.key, InTheClear(update, file))

    # --- what really leaves

    async def send(self, key: RoundKey, message: Any) -> None:
        match message:
            case Declared(model):
                await super().declare_trained(key, model)
            case InTheClear(update, file):
                await super().upload(update, file, progress=lambda fraction: None)
            case MaskedInput():
                vector = self.silo.vector
                await super().upload_masked(
                    key, message, vector.manifest, vector.file, mark=None, progress=lambda fraction: None
                )
            case _:
                await super().answer_mask(key, message)


@dataclass(frozen=True)
class Declared:
    """That this silo has trained from `model`."""

    model: Digest


@dataclass(frozen=True)
class InTheClear:
    update: SavedUpdate
    file: Path


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """What is uploaded under a MaskedInput."""

    manifest: Manifest
    file: Path
    chunk_bytes: int = MASKED_CHUNK_BYTES

    def replaced(self, words: NDArray[Any]) -> "Vectors":
        content = words.astype("<u4").tobytes()
        self.file.write_bytes(content)
        return Vectors(manifest=manifest_of(masked_layout(len(words)), [content], self.chunk_bytes), file=self.file)

    @property
    def words(self) -> NDArray[np.uint32]:
        return np.fromfile(self.file, dtype="<u4")


Attack = Callable[["PlayedSilo", RoundKey, Any], Awaitable[None]]
"""Given what an honest agent would send now: an answer of secure aggregation, Declared, or InTheClear."""


async def honestly(silo: "PlayedSilo", key: RoundKey, message: Any) -> None:
    await silo.send(key, message)


@dataclass
class FirstVectorHangs:
    """An Attack: its first masked vector of round 1 never gets there. `digests` has those of all that it sends in that
    round."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    digests: list[bytes] = field(default_factory=list)

    async def __call__(self, silo: "PlayedSilo", key: RoundKey, message: Any) -> None:
        if isinstance(message, MaskedInput) and key.round == 1:
            self.digests.append(message.vector)
            if not self.reached.is_set():
                self.reached.set()
                await asyncio.Event().wait()
        await honestly(silo, key, message)


class PlayedSilo:
    """One silo's folder and its agent. `said` is everything that it sent, with the key that it was sent for."""

    def __init__(
        self,
        folder: Path,
        credentials: SiloCredentials,
        pins: Mapping[SiloName, SiloCredentials],
        *,
        verify: Mode = "spot",
        rules: Mapping[str, object] | None = None,
    ) -> None:
        self.rules = PolicyRules.model_validate({"verify": verify, **(rules or {})})
        self.folder = SiloFolder(folder)
        self.folder.make()
        self.credentials = credentials
        self.trainer = DrawingTrainer(credentials.silo)
        self.notes = Notes()
        self.said: list[tuple[RoundKey, Any]] = []
        self.attack: Attack = honestly
        self.vector: Vectors
        self.vectors: dict[bytes, Vectors] = {}  # by the digest that is announced
        self.play: Play
        self.may_end_with: tuple[type[BaseException], ...] = ()
        """Without `ended` having been asked for it."""
        self._parts = AsyncExitStack()
        self._run: asyncio.Task[None]
        self.journal: RoundJournal
        self.client: Client
        self.masking: SiloMasking
        self.privacy: PrivacyGuard
        self.service: AgentService
        trust_store(self.folder, credentials).add_all(
            {name: peer.identity_key.public_key() for name, peer in pins.items() if name != self.name}
        )

    @property
    def name(self) -> SiloName:
        return self.credentials.silo

    async def say(self, key: RoundKey, message: Any) -> None:
        await self.attack(self, key, message)

    async def send(self, key: RoundKey, message: Any) -> None:
        """Raises what the coordinator answers."""
        self.said.append((key, message))
        await self.client.send(key, message)

    def said_in(self, round_number: int, kind: type) -> Any:
        """What it said of this kind; None: nothing."""
        return next((it for key, it in self.said if key.round == round_number and isinstance(it, kind)), None)

    def signed(self, message: Any, **changes: Any) -> Any:
        """With other fields, and a signature that fits them."""
        changed = replace(message, **changes)
        if isinstance(message, SharedKeys):
            return replace(changed, dealing=signed(changed.dealing, self.credentials.identity_key))
        return signed(changed, self.credentials.identity_key)

    async def tell(self, message: federation_pb2.MaskAnswer) -> None:
        """One message as it is; raises what the coordinator answers."""
        try:
            await self.client._wire.stub.AnswerMask(message)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def upload(self, header: federation_pb2.MaskedHeader, vector: "Vectors | None" = None) -> None:
        """As the agent's client uploads, but it checks nothing that it sends. None: the header alone."""

        async def outgoing() -> AsyncIterator[bytes]:
            yield federation_pb2.UpdatePiece(masked=header).SerializeToString()
            if vector is not None:
                content, size = vector.file.read_bytes(), vector.manifest.chunk_bytes
                for index in range(vector.manifest.chunks):
                    chunk = common_pb2.Chunk(index=index, data=content[index * size : (index + 1) * size])
                    yield federation_pb2.UpdatePiece(chunk=chunk).SerializeToString()

        try:
            await answer_to(self.client._wire.upload_update(), outgoing())
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    @property
    def at(self) -> Any:
        """Where its half of the protocol stands; it has all secrets of the attempt."""
        return self.masking._state

    def key_of_box(self, dealer: SiloName) -> Secret:
        """Of the box from `dealer` to this silo."""
        at = self.at
        assert isinstance(at, silo_states.WithDelivery)
        share = next(share for share in at.delivery.boxes if share.dealer == dealer)
        keys = KeyPair(box_secret(at.opening.root, at.attempt))
        kem = Encapsulation(keys.decapsulated(share.ciphertext), share.ciphertext)
        key = box_key(keys, at.roster.box_link(dealer, self.name), own=self.name, kem=kem)
        for secret in (keys, kem.secret):
            secret.erase()
        return key

    def resealed(self, share: SealedShare, alter: Callable[[KeyShares], None]) -> SealedShare:
        """What this silo has for the holder of `share`, altered, in another box that opens."""
        at, holder = self.at, share.holder
        assert isinstance(at, silo_states.WithDealing)
        keys = KeyPair(box_secret(at.opening.root, at.attempt))
        kem = encapsulated(at.roster.member(holder).box_key)
        key = box_key(keys, at.roster.box_link(self.name, holder), own=self.name, kem=kem)
        dealt = silo_own_dealing.dealt_shares(at, self.name)
        shares = dealt[at.roster.place(holder) - 1]
        alter(shares)
        box = share_box.sealed(shares, key, roster=at.roster.digest, dealer=self.name, holder=holder)
        for secret in (keys, kem.secret, key, shares, *dealt):
            secret.erase()
        return replace(share, ciphertext=kem.ciphertext, box=box)

    async def start(self) -> None:
        """A process of the agent's begins."""
        self.journal = RoundJournal(self.folder.journal, updates=self.folder.updates, silo=self.name)
        self._parts.callback(self.journal.close)
        observer = SiloObserver(journal=self.journal, metrics=SiloMetrics(CollectorRegistry()), display=self.notes)
        policy = SiloPolicy(rules=self.rules, silo=self.name)
        self.client = Client(
            channel=await self._parts.enter_async_context(mutual_channel(self.credentials)),
            credentials=self.credentials,
            models=ModelCache(self.folder.models, kept=2),
            agent_version="test",
            unreachable=observer.unreachable,
            new_backoff=lambda: Backoff(first_s=0.01, most_s=0.05),
            instance=next_instance(self.journal, self.folder.root),
        )
        self.client.silo = self
        self.masking = SiloMasking(
            journal=masking_journal(self.folder, self.credentials),
            coordinator=self.client,
            party=party_of(self.folder, self.credentials, policy),
            newer_groups=no_newer_groups,
            unmasks=lambda *_told: None,
        )
        self.privacy = guard_of(self.folder, self.credentials, policy, self.journal)
        self.service = AgentService(
            federation=FEDERATION,
            coordinator=self.client,
            journal=self.journal,
            plans=PlanStore(self.folder.plans),
            gate=policy,
            trainer=self.trainer,
            masking=self.masking,
            checks=model_checks(
                self.folder,
                self.credentials,
                policy,
                coordinator=self.client,
                proves=lambda *_told: None,
                goes_back=lambda *_told: None,
            ),
            privacy=self.privacy,
            display=self.notes,
            observer=observer,
        )
        self._run = asyncio.create_task(self.service.run())

    async def stop(self) -> None:
        self.service.stop()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([self._run])
        await self._parts.aclose()
        error = self._run.exception()
        if error is not None and not isinstance(error, self.may_end_with):
            raise error

    async def ended(self) -> BaseException | None:
        """What this agent ended with; `stop` does not raise it any more."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([self._run])
        error = self._run.exception()
        self._run = asyncio.create_task(asyncio.sleep(0))
        return error

    async def restart(self) -> None:
        """The process goes without a word, the next one begins."""
        self._run.cancel()
        await asyncio.wait([self._run])
        await self._parts.aclose()
        await self.start()


@dataclass(frozen=True, kw_only=True)
class Play:
    """The plan runs, every silo has said that it is ready or will."""

    at: RunningCoordinator
    bundle: PlanBundle
    silos: Mapping[SiloName, PlayedSilo]
    made: dict[Digest, Wide]
    """Every model of the plan, also those that the coordinator needs no more."""

    @property
    def rogue(self) -> PlayedSilo:
        return self.silos[ROGUE]

    @property
    def state(self) -> State:
        return self.at.service._loop.state

    @property
    def secure(self) -> protocol_states.State:
        """Where secure aggregation stands; Idle where it is not open."""
        state = self.state
        return state.secure.state if isinstance(state, Masking) and state.secure is not None else protocol_states.Idle()

    @property
    def phase(self) -> str:
        """Of secure aggregation."""
        return self.secure.phase

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when it holds, which is looked at whenever the round machine has moved."""
        loop, changed = self.at.service._loop, asyncio.Event()
        loop.on_change.append(changed.set)
        try:
            async with asyncio.timeout(LONG_S):
                while not holds():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise AssertionError(f"not reached; the state is {self.state}, {self.rows()}") from None
        finally:
            loop.on_change.remove(changed.set)

    async def deadline(self, phase: str, *, of: SiloName = ROGUE) -> None:
        """All but one do what this phase of secure aggregation asks of them; then its deadline passes."""
        await self.until(lambda: self.phase == phase and [it for it in SILOS if is_awaited(self.secure, it)] == [of])
        await self.pass_deadline()

    def rogue_reveals_first(self) -> None:
        """The honest silos' shares are enough without the rogue's: for these to be looked at, they must come before."""

        async def later(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
            if isinstance(message, Reveal) and key.round == 1:
                await self.until(lambda: self.phase == "unmasking" and not is_awaited(self.secure, ROGUE))
            await silo.send(key, message)

        for name in HONEST:
            self.silos[name].attack = later

    async def pass_deadline(self) -> None:
        deadline = deadline_of(self.state)
        assert deadline is not None
        await self.at.service._loop.post(DeadlinePassed(now=deadline, deadline=deadline))

    # --- what came of it

    def rows(self) -> tuple[RoundRow, ...]:
        return self.at.saved()[1]  # type: ignore[return-value]

    async def closed(self, round_number: int) -> RoundRow:
        """The last attempt at this round, once it is over for good."""
        await self.until(lambda: isinstance(self.state, Finished) or round_of(self.state)[0] > round_number)
        return [row for row in self.rows() if row.round == round_number][-1]

    def row(self, round_number: int, attempt: int) -> RoundRow:
        (row,) = [row for row in self.rows() if (row.round, row.attempt) == (round_number, attempt)]
        return row

    def of(self, row: RoundRow, silo: SiloName = ROGUE) -> SiloRow:
        (found,) = [item for item in row.silos if item.silo == silo]
        return found

    def dropped(self, outcome: str) -> float:
        """lorica_dropped_silos_total, of all phases."""
        registry = self.at.metrics.registry
        return sum(
            registry.get_sample_value("lorica_dropped_silos_total", {"phase": phase, "outcome": outcome}) or 0.0
            for phase in DROPPING_PHASES
        )

    def keep_model(self) -> None:
        course = course_of(self.state)
        if course is not None and course.model not in self.made:
            models = self.at.coordinator.models(self.bundle)
            self.made[course.model] = stored_vector(models, course.model).astype(np.float64)

    def base_of(self, row: RoundRow) -> Digest:
        """What the round began from."""
        before = [it.model for it in self.rows() if it.round < row.round and it.outcome == "applied"]
        return before[-1] if before else next(iter(self.made))

    def step_of(self, row: RoundRow) -> Wide:
        """What the round added to the model."""
        return self.made[row.model] - self.made[self.base_of(row)]

    def mean_of(self, row: RoundRow, *silos: SiloName, weights: Mapping[SiloName, float] | None = None) -> Wide:
        """The weighted mean of these silos' own deltas."""
        weighs = {silo: (weights or {}).get(silo, weight_of(silo)) for silo in silos}
        deltas = {silo: delta_of(silo, row.round, self.bundle.layout.parameters) for silo in silos}
        total: Wide = np.sum([weighs[silo] * deltas[silo].astype(np.float64) for silo in silos], axis=0)
        return total / sum(weighs.values())

    def check_made_by(self, row: RoundRow, *silos: SiloName) -> None:
        """The round was applied, and the model is what these silos' deltas give, within the encoding's error."""
        assert row.outcome == "applied", row
        assert self.counted(row) == list(silos)
        assert row.masked is not None
        assert row.masked.saturated == 0
        assert abs(row.masked.weight_sum - sum(map(weight_of, silos))) < 1e-4
        np.testing.assert_allclose(self.step_of(row), self.mean_of(row, *silos), rtol=0, atol=1e-6)

    @asynccontextmanager
    async def refused(self, error: type[LoricaError]) -> AsyncIterator[None]:
        """What is sent within is refused with this error, and counted."""
        counted = self.at.errors(error.__name__)
        with pytest.raises(error):
            yield
        assert self.at.errors(error.__name__) > counted

    def counted(self, row: RoundRow) -> list[SiloName]:
        """Whose vectors are in the sum."""
        return [item.silo for item in row.silos if item.outcome == "committed"]

    def check_without_the_rogue(self, row: RoundRow) -> None:
        """It was not even asked to train."""
        assert [item.silo for item in row.silos] == list(HONEST)

    def check_nobody_else_was_named(self) -> None:
        """But the rogue."""
        for row in self.rows():
            named = {item.silo for item in row.silos if item.outcome in ("declined", "late", "refused") or item.detail}
            assert named <= {ROGUE}, row


# --- the federation -----------------------------------------------------------------------------------------------


def make_rogue_template(root: Path) -> FederationTemplate:
    """Four enrolled silos and plans of two rounds of a micro T5: a masked one, a plain one, one that is masked and
    noised, which step by the mean delta, a masked one of adapters that are handed out in bfloat16 and step with
    momentum, and such a one of three rounds in which halves take turns.
    """
    folder = initialise(root)
    values = {
        **PLAN_VALUES,
        "schedule.min_silos": 3,
        "schedule.start_when_ready": True,
        "schedule.masking_deadline_s": 600.0,
        "evaluation.every": 0,
        "evaluation.last": False,
        "aggregation.server_optimizer": "sgd",
        "aggregation.momentum": 0.0,
        "aggregation.max_delta_norm": 0.0,
    }
    masked = {
        **values,
        "aggregation.secure_aggregation": True,
        "aggregation.max_weight": WEIGHT_CAP,
    }
    noised = {
        **masked,
        "aggregation.max_delta_norm": CLIPPING_NORM,
        "evaluation.initial": False,
        "privacy.level": "silo",
        "privacy.target_epsilon": 2.0,
        "privacy.nominal_silos": NOMINAL_SILOS,
        "privacy.max_noise_to_signal": 1e6,
    }
    adapted = {
        **masked,
        "adapters.rank": 2,
        "training.epochs": 2,
        "wire.model": "bfloat16",
        "aggregation.momentum": 0.9,
    }
    longer = {**adapted, "schedule.rounds": 3, "adapters.train": "alternate", "training.epochs": 1}
    plans = ((MASKED, masked), (PLAIN, values), (NOISED, noised), (ADAPTED, adapted), (LONGER, longer))
    for name, settings in plans:
        create_plan(
            Coordinator.load(folder).shelf.plans,
            name=name,
            federation=FEDERATION,
            source=SizedModel("micro"),
            overrides=settings,
        )

    async def enrol() -> dict[SiloName, SiloCredentials]:
        async with running(folder) as coordinator:
            silos = {silo: await coordinator.enrolled(silo) for silo in SILOS}
            groups = coordinator.service.groups
            link = (
                await groups.propose([[silo] for silo in SILOS], smallest_group=1)
            ).link  # their people approve: `played`
            for silo, credentials in silos.items():
                await groups.sign(silo, link.digest, signature_of(link, credentials.identity_key))
            return silos

    return FederationTemplate(root, asyncio.run(enrol()))


@asynccontextmanager
async def played(
    template: FederationTemplate,
    folder: Path,
    attack: Attack,
    *,
    plan: str = MASKED,
    verify: Mode = "spot",
    before: Callable[[RunningCoordinator], None] = lambda at: None,
    rules: Mapping[str, object] | None = None,
    prepared: "Callable[[Play], None]" = lambda play: None,
) -> AsyncIterator[Play]:
    """The federation at work, its rogue with this attack. An attack that fails by itself fails the test.

    `before` is done to the coordinator before any agent begins, `prepared` to the silos; agents check round models as
    `verify` says, and have `rules` for their policy.
    """
    failures: list[BaseException] = []

    async def watched(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        try:
            await attack(silo, key, message)
        except (LoricaError, asyncio.CancelledError):
            raise
        except BaseException as error:
            failures.append(error)
            raise

    async with running(template.copy(folder / "coordinator"), offer=plan) as at:
        silos = {
            name: PlayedSilo(
                folder / name,
                replace(credentials, address=at.address),
                template.silos,
                verify=verify,
                rules=rules,
            )
            for name, credentials in template.silos.items()
        }
        hold_groups([(silo.folder, silo.credentials) for silo in silos.values()])
        silos[ROGUE].attack = watched
        play = Play(at=at, bundle=at.coordinator.shelf.compile(plan), silos=silos, made={})
        for silo in silos.values():
            silo.play = play
        before(at)
        prepared(play)
        play.keep_model()
        at.service._loop.on_change.append(play.keep_model)
        async with AsyncExitStack() as stack:
            for silo in silos.values():
                await silo.start()
                stack.push_async_callback(silo.stop)
            try:
                yield play
            finally:
                if failures:
                    raise failures[0]
