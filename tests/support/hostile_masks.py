"""A coordinator that turns hostile in a masked round, over real gRPC and mutual TLS, against real agents.

`HostileCoordinator` drives the honest machine of secure aggregation (`play`) until a test says something else to one
silo (`ask`). The agents are whole but for training: a delta is drawn from the names of silo and model, so that a silo
trained twice from one model has one delta, which is the worst case for two sums. It is masked by the product's own
code.

Whatever a test plays, `attacked` looks at its end that no silo showed more than one sum of a round allows.
"""

import asyncio
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator import effects as protocol_effects
from lorica_security.secure_aggregation.coordinator import events as protocol_events
from lorica_security.secure_aggregation.coordinator import machine as protocol_machine
from lorica_security.secure_aggregation.coordinator import requests as protocol_requests
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.groups.release_groups import Link
from lorica_security.secure_aggregation.masked_vectors import fixed_point, mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from lorica_security.secure_aggregation.messages import MaskedInput, Reveal, SurvivorSet
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.edges.accounts.audit_log import audit_log
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.edges.console.observer import SiloObserver
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.masks.model_checking import model_checks
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.silo_record import record_of
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.agent import AgentService
from silo_agent.service.audited import AuditedCoordinator, AuditedGate, AuditedObserver, SiloAudit
from silo_agent.service.group_keeper import GroupKeeper
from silo_agent.service.masking import Masking
from silo_agent.service.model_checks import Mode
from silo_agent.service.ports import Cancelled, DataSummary, MaskedFile, Notice, Progress, RoundModel, TrainedUpdate
from silo_agent.service.refusals import RULES
from silo_agent.training.update.masked_vector import KeptDelta, own_weight, write_masked_vector
from silo_wire.canonical import Digest
from silo_wire.codecs import orders_codec
from silo_wire.codecs.groups_codec import GroupsOffer
from silo_wire.manifest import manifest_of
from silo_wire.messages import DeclineReason, Evaluation, Mask, RoundKey, Standby, StandbyReason, Train, TrainingSummary
from silo_wire.plans.masked_ranges import CLOSING_RANGES, ranges_of
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import federation_pb2
from tests.support.agent_parts import Notes
from tests.support.federation_peer import FEDERATION, FederationPeer, OfferedModel, TestNet, small_bundle, vector_of
from tests.support.release_groups import hold_groups
from tests.support.secagg_federation import entropy

BANK, CLINIC, HOSPITAL, INSURER = SILOS = tuple(map(SiloName, ("bank-b", "clinic-c", "hospital-a", "insurer-d")))
ELEMENTS = 600
M = TypeVar("M")


def masked_bundle(**sections: Any) -> PlanBundle:
    """A plan with masks: cohorts of three at least, of which the default threshold is all, and of four three."""
    aggregation = {
        "secure_aggregation": True,
        "weighting": "size",
        "max_weight": 100.0,
        **sections.pop("aggregation", {}),
    }
    schedule = {"rounds": 3, "min_silos": 3, **sections.pop("schedule", {})}
    return small_bundle(elements=ELEMENTS, aggregation=aggregation, schedule=schedule, **sections)


def weight_of(silo: SiloName) -> int:
    """Its number of examples."""
    return 5 + len(silo)


def delta_of(silo: SiloName, model: Digest) -> NDArray[np.float32]:
    seed = int.from_bytes(entropy("delta", silo, model)[:8], "little")
    return np.random.default_rng(seed).uniform(-0.5, 0.5, ELEMENTS).astype("<f4")


def weighted_sum(model: Digest, silos: Iterable[SiloName]) -> NDArray[np.float64]:
    return np.sum([weight_of(silo) * delta_of(silo, model).astype(np.float64) for silo in silos], axis=0)


def evaluation_of(silo: SiloName, model: Digest) -> Evaluation:
    drawn = entropy("evaluation", silo, model)
    questions = 40 + drawn[0] % 20
    return Evaluation(
        split="dev",
        examples=questions,
        exact_matches=drawn[1] % questions,
        executed=questions // 2,
        execution_matches=drawn[2] % (questions // 2),
        loss_per_token=drawn[3] / 64,
        seconds=1.0,
    )


class DeltaTrainer:
    """Draws a delta and masks it; the files are real."""

    def __init__(self, silo: SiloName) -> None:
        self._silo = silo
        self.trained: list[RoundKey] = []
        self.scored: list[Digest] = []

    def prepare(self, bundle: PlanBundle, base: RoundModel | None) -> DataSummary:
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
        delta = delta_of(self._silo, model.manifest.digest).tobytes()
        update_file.write_bytes(delta)
        self.trained.append(key)
        summary = TrainingSummary(
            examples=weight_of(self._silo),
            loss_max=3.0,
            loss_min=1.0,
            loss_first=3.0,
            loss_last=1.0,
            optimizer_steps=7,
            seconds=2.0,
        )
        return TrainedUpdate(manifest=manifest_of(bundle.layout, [delta], 1024), summary=summary)

    no_training = Workshop.no_training

    def mask(
        self,
        *,
        bundle: PlanBundle,
        update: SavedUpdate,
        update_file: Path,
        mark: Any,
        out: Path,
        work: MaskVector,
        progress: Progress,
        cancelled: Cancelled,
    ) -> MaskedFile:
        section = bundle.plan.aggregation
        written = write_masked_vector(
            out,
            work,
            KeptDelta(file=update_file, manifest=update.manifest, mark=mark),
            weight=own_weight(section, update.summary),
            scores=update.scores,
            clipping_norm=section.max_delta_norm,
            threads=1,
            progress=progress,
            should_stop=cancelled,
        )
        return MaskedFile(manifest=written.manifest, mark=written.mark)

    def evaluate(
        self, *, bundle: PlanBundle, model: RoundModel, progress: Progress, cancelled: Cancelled
    ) -> Evaluation:
        self.scored.append(model.manifest.digest)
        return evaluation_of(self._silo, model.manifest.digest)


class AttackedSilo:
    """One silo's folder, and the agent process's worth of parts that runs on it."""

    def __init__(
        self,
        folder: Path,
        credentials: SiloCredentials,
        *,
        pins: Mapping[SiloName, Ed25519PublicKey],
        rules: PolicyRules,
    ) -> None:
        self.folder = SiloFolder(folder)
        self.folder.make()
        self.credentials = credentials
        self.rules = rules
        self.trainer = DeltaTrainer(credentials.silo)
        self.notes = Notes()
        self.metrics: SiloMetrics
        self.journal: RoundJournal
        self.service: AgentService
        self.groups: GroupKeeper
        self._parts = AsyncExitStack()
        self._run: asyncio.Task[None]
        self._keeping: asyncio.Task[None]
        self._noted_before = 0  # refusals, by the processes before
        self._recorded_before = 0
        self.seen = 0  # refusals that the test has looked at
        store = trust_store(self.folder, credentials)
        for peer, key in pins.items():
            store.add(peer, key)

    @property
    def name(self) -> SiloName:
        return self.credentials.silo

    async def start(self) -> None:
        """A process of the agent's begins."""
        self.journal = RoundJournal(self.folder.journal, updates=self.folder.updates, silo=self.name)
        self._parts.callback(self.journal.close)
        self._noted_before, self._recorded_before = len(self.refusals), len(self.journal.refusals(1000))
        self.metrics = SiloMetrics(CollectorRegistry())
        log = audit_log(self.folder, self.credentials)
        audit = SiloAudit(
            log, federation=FEDERATION, silo=self.name, ledger_head=self.journal.ledger_head, clock=time.time
        )
        observer = AuditedObserver(SiloObserver(journal=self.journal, metrics=self.metrics, display=self.notes), audit)
        client = GrpcCoordinator(
            channel=await self._parts.enter_async_context(mutual_channel(self.credentials)),
            credentials=self.credentials,
            models=ModelCache(self.folder.models, kept=2),
            agent_version="test",
            unreachable=observer.unreachable,
            new_backoff=lambda: Backoff(first_s=0.01, most_s=0.05),
            log_head=log.head,
        )
        coordinator = AuditedCoordinator(client, audit)
        policy = SiloPolicy(rules=self.rules, silo=self.name, record=record_of(self.folder, self.credentials))
        self.groups = GroupKeeper(
            ReleaseGroups(
                group_chain(self.folder, self.credentials, policy),
                trust_store(self.folder, self.credentials, first_use=self.rules.trust_on_first_use),
                self.credentials,
                client=client,
                log=log,
                first_use=self.rules.trust_on_first_use,
            ),
            backoff=Backoff(first_s=0.01, most_s=0.05),
            told=self.notes.note,
            refused=observer.refused,
        )
        client.on_groups = self.groups.heard
        self._keeping = asyncio.create_task(self.groups.run())
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
                party=party_of(self.folder, self.credentials, policy, log),
                newer_groups=self.groups.sync,
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
            privacy=guard_of(self.folder, self.credentials, policy, self.journal),
            display=self.notes,
            observer=observer,
        )
        self._run = asyncio.create_task(self.service.run())

    async def stop(self) -> None:
        self.service.stop()
        async with asyncio.timeout(20):
            await asyncio.wait([self._run])
        self._keeping.cancel()
        await self._parts.aclose()
        self._run.result()

    async def kill(self) -> None:
        """The process goes without a word."""
        self._run.cancel()
        self._keeping.cancel()
        await asyncio.wait([self._run, self._keeping])
        await self._parts.aclose()

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    def snapshot(self, at: Path) -> None:
        """Of the disk, while no process runs."""
        shutil.copytree(self.folder.root, at)

    def restore(self, snapshot: Path) -> None:
        shutil.rmtree(self.folder.root)
        shutil.copytree(snapshot, self.folder.root)

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """(rule, what was refused) of every line of the log that says so."""
        return [(fields["rule"], fields["detail"]) for fields in self.notes.of("refused")]

    def counted(self, metric: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(metric, labels)
        assert value is not None, (metric, labels)
        return value

    def require_recorded(self) -> None:
        """What the log says this process refused stands in the journal, too, and was counted."""
        refused = self.refusals[self._noted_before :]
        recorded = self.journal.refusals(1000)[self._recorded_before :]
        assert [(item.rule, item.detail) for item in recorded] == refused
        counted = {rule: self.counted("lorica_silo_refusals_total", rule=rule) for rule in RULES}
        assert {rule: count for rule, count in counted.items() if count} == Counter(rule for rule, _ in refused)
        assert {rule for rule, _ in refused} <= set(RULES)


class HostileCoordinator:
    """Honest where no test makes it say something else. `state` is the machine's, for the attempt that `open` began."""

    def __init__(
        self, peer: FederationPeer, bundle: PlanBundle, silos: Mapping[SiloName, AttackedSilo], link: Link | None
    ) -> None:
        self.peer = peer
        self.link = link
        self.with_phantoms = link
        """Of a partition that the phantoms are in."""
        self.bundle = bundle
        self.silos = silos
        self.identities = {name: silo.credentials.identity_key.public_key() for name, silo in silos.items()}
        self.model = self.offer(0)
        self.key = RoundKey(federation=FEDERATION, plan=bundle.plan.digest, round=1, attempt=1)
        self.attempt: Attempt
        self.state: protocol_states.State = protocol_states.Idle()
        self.unmask: protocol_effects.Unmask | None = None
        self.rounds: dict[bytes, int] = {}  # by the digest of each roster that was sent
        self._trained_from: dict[SiloName, Digest] = {}
        self._heard: Counter[SiloName] = Counter()
        self._declines: Counter[SiloName] = Counter()

    # ---- an honest coordinator --------------------------------------------------------------------------------------

    def offer(self, number: int) -> OfferedModel:
        return self.peer.offer(self.bundle, vector_of(self.bundle.layout, number))

    async def train(self, *silos: SiloName, model: OfferedModel | None = None) -> None:
        """These silos (all) train from `model` (the round's), and keep their deltas."""
        digest = (model or self.model).digest
        named = silos or tuple(self.silos)
        for silo in named:
            self._trained_from[silo] = digest
            await self.peer.order(Train(key=self.key, model=digest, seconds_left=60.0), silo)
        declared = {(silo, self.key, digest) for silo in named}
        await self.peer.until(lambda: declared <= set(self.peer.trained))
        await self.peer.order(Standby(StandbyReason.TRAINED), *named)

    def open(self, *invited: SiloName, number: int = 1, id: bytes = b"", **terms: Any) -> None:
        """An attempt begins; nobody was told yet."""
        self.attempt = Attempt(
            federation=FEDERATION,
            plan=bytes.fromhex(self.key.plan),
            round=self.key.round,
            number=number,
            id=id or entropy("attempt", self.key.round, number),
        )
        closing = self.bundle.plan.timetable.is_closing(self.key.round)
        ranges = CLOSING_RANGES if closing else ranges_of(self.bundle)
        opening = protocol_events.OpenAttempt(
            attempt=self.attempt,
            terms=Terms(**{"model": bytes.fromhex(self.model.digest), "ranges": ranges, "link": self.link, **terms}),
            invited=tuple(sorted(invited or self.silos)),
        )
        self.state, self.unmask = protocol_states.Idle(), None
        self.step(opening)

    async def play(self, until: str) -> None:
        """Honestly, until the protocol is in this phase, of which nobody was told yet."""
        asked: dict[SiloName, str] = {}
        while self.state.phase != until:
            assert self.state.phase not in ("abandoned", "unmasked"), self.state
            for silo in self.awaited:
                if asked.get(silo) != self.state.phase:
                    asked[silo] = self.state.phase
                    await self.ask(silo, self.request(silo))
            await self.peer.until(lambda: any(self._unheard(silo) for silo in self.awaited))
            for silo in self.awaited:
                if self._unheard(silo):
                    del asked[silo]
                    self.step(await self.answer_of(silo))
        for silo in asked:  # shares beyond the threshold
            self.step(await self.answer_of(silo))

    @property
    def awaited(self) -> tuple[SiloName, ...]:
        return tuple(silo for silo in self.silos if protocol_requests.is_awaited(self.state, silo))

    def request(self, silo: SiloName) -> Any:
        """What an honest coordinator asks of it now."""
        return protocol_requests.request_to(self.state, silo)

    def requested(self, kind: type[M], silo: SiloName) -> M:
        """The same, of a kind that the caller knows."""
        message = self.request(silo)
        assert isinstance(message, kind)
        return message

    def drop(self, *silos: SiloName) -> None:
        """These are waited for no longer, whatever they have sent."""
        for silo in silos:
            self.step(protocol_events.SiloDropped(silo, "gone"))

    def step(self, event: protocol_events.Event) -> None:
        self.state, effects = protocol_machine.step(self.state, event, self.identities)
        for effect in effects:
            assert (
                not isinstance(effect, protocol_effects.Blame) or effect.offence is protocol_effects.Offence.SILENCE
            ), effect
            if isinstance(effect, protocol_effects.Unmask):
                self.unmask = effect

    def words(self) -> NDArray[np.uint32]:
        """What comes out, as it is."""
        assert isinstance(self.state, protocol_states.Unmasked)
        assert self.unmask is not None
        roster, survivors, encoding = self.state.roster.digest, self.unmask.survivors, self.unmask.fixed_point
        total = np.zeros(encoding.words, dtype="<u4")
        for silo in survivors:
            total += np.frombuffer(self.vector(silo, roster), dtype="<u4")
        self.unmask.masks.apply(total, 0, mask_stream.Workspace())
        return total

    def tail(self) -> fixed_point.SumTail:
        assert self.unmask is not None
        return fixed_point.decode_tail(self.unmask.fixed_point, self.words()[-EXTRA_WORDS:])

    def sum(self) -> NDArray[np.float64]:
        """What comes out: weight times delta of each survivor, added up."""
        assert self.unmask is not None
        survivors, encoding, total = self.unmask.survivors, self.unmask.fixed_point, self.words()
        tail = fixed_point.decode_tail(encoding, total[-EXTRA_WORDS:])
        assert abs(tail.weight_sum - sum(map(weight_of, survivors))) < 1e-3
        assert tail.saturated == 0
        out = np.zeros(ELEMENTS)
        fixed_point.decode(encoding, total[:-EXTRA_WORDS], 0, out)
        return out

    def vector(self, silo: SiloName, roster: bytes) -> bytes:
        (held,) = (
            it.data
            for it in self.peer.masked.values()
            if it.committed and (it.header.masked.silo, it.header.masked.roster) == (silo, roster)
        )
        return held

    def require_sum_of(self, *silos: SiloName) -> None:
        """The attempt came out as the sum over these, and as nothing else."""
        assert isinstance(self.state, protocol_states.Unmasked)
        assert self.state.survivors.silos == tuple(sorted(silos))
        np.testing.assert_allclose(self.sum(), weighted_sum(self.model.digest, silos), atol=1e-5)

    # ---- a hostile one ----------------------------------------------------------------------------------------------

    async def ask(self, silo: SiloName, message: Any, **changes: Any) -> None:
        """One silo is ordered this step of secure aggregation; `changes` are of the order around it."""
        if isinstance(message, Roster):
            self.rounds[message.digest] = message.attempt.round
        order = Mask(
            key=self.key,
            model=self._trained_from[silo],
            seconds_left=60.0,
            attempt=self.attempt,
            message=message,
            identities=tuple(self.identities.items()) if isinstance(message, Roster) else (),
        )
        await self.peer.order(replace(order, **changes), silo)

    async def ask_unsayable(self, silo: SiloName, message: Any, change: Callable[[federation_pb2.Mask], None]) -> None:
        """As `ask`, but altered on the wire into what no value of ours can say; only once, then it is told to wait."""
        wait = orders_codec.order_to_wire(Standby(StandbyReason.UPDATE_RECEIVED), silo)
        left = [change]

        def alter(to: SiloName, notice: federation_pb2.Notice) -> federation_pb2.Notice:
            if to != silo:
                return notice
            if not left:
                return wait
            left.pop()(notice.mask)
            return notice

        self.peer.change_notice = alter
        await self.ask(silo, message)

    async def answer_of(self, silo: SiloName) -> Any:
        """Its next answer; from then on it is told to wait."""
        await self.peer.until(lambda: bool(self._unheard(silo)))
        answer = self._unheard(silo)[0]
        self._heard[silo] += 1
        await self.peer.order(Standby(StandbyReason.UPDATE_RECEIVED), silo)
        return answer

    async def answer_to(self, silo: SiloName, message: Any, **changes: Any) -> Any:
        await self.ask(silo, message, **changes)
        return await self.answer_of(silo)

    def announced(self, silo: SiloName) -> MaskedInput:
        """What it sent last of its vector."""
        return [it for name, it in self.peer.answers if name == silo and isinstance(it, MaskedInput)][-1]

    def survivors_of(self, roster: bytes, like: SiloName, *silos: SiloName) -> SurvivorSet:
        """For the dealings that `like` masked for, with the vectors that these silos sent."""
        inputs = tuple(self.announced(silo).vector for silo in silos)
        return SurvivorSet(roster=roster, dealings=self.announced(like).dealings, silos=silos, inputs=inputs)

    async def deny(self, silo: SiloName) -> None:
        """Its vector comes, and it is declared dropped all the same."""
        assert self.state.phase == "masked input"
        assert isinstance(await self.answer_to(silo, self.request(silo)), MaskedInput)
        self.drop(silo)

    def _unheard(self, silo: SiloName) -> Sequence[Any]:
        return [answer for name, answer in self.peer.answers if name == silo][self._heard[silo] :]

    # ---- what must come of it ---------------------------------------------------------------------------------------

    async def refused(self, silo: SiloName, rule: str, says: str, *, declined: DeclineReason | None = None) -> None:
        """The silo refused once: by this rule, in its log, its journal and its metrics; and did not answer.

        `declined` is what it told the coordinator, None where it stays as it was and tells nobody.
        """
        at = self.silos[silo]
        await at.notes.until(lambda: len(at.refusals) > at.seen)
        ((by, detail),) = at.refusals[at.seen :]
        at.seen += 1
        assert by == rule, (by, detail)
        assert re.search(says, detail), detail
        at.require_recorded()
        assert not self._unheard(silo), "a refusal, and an answer all the same"
        if declined is None:
            assert len(self.peer.declined_by[silo]) == self._declines[silo]
        else:
            await self.declined(silo, declined, says)
            assert at.counted("lorica_silo_rounds_total", work="training", outcome="declined") > 0

    async def declined(self, silo: SiloName, why: DeclineReason, says: str) -> None:
        """The silo told the coordinator that it takes no part in this attempt at the round."""
        await self.peer.until(lambda: len(self.peer.declined_by[silo]) > self._declines[silo])
        key, reason, told = self.peer.declined_by[silo][self._declines[silo]]
        self._declines[silo] += 1
        assert (key, reason) == (self.key, why)
        assert re.search(says, told), told

    def declines_seen(self, silo: SiloName, count: int) -> None:
        """A test has looked at so many of them."""
        self._declines[silo] += count

    def reveals(self, silo: SiloName) -> list[Reveal]:
        return [answer for name, answer in self.peer.answers if name == silo and isinstance(answer, Reveal)]

    def require_nothing_but_sums(self) -> None:
        """That is what the rounds came to, whatever was asked."""
        assert self.peer.updates == {}, "a delta without masks came"
        kinds: dict[tuple[bytes, SiloName], set[type]] = {}
        for silo in self.silos:
            of_round: dict[int, set[Reveal]] = {}
            for reveal in self.reveals(silo):
                of_round.setdefault(self.rounds[reveal.roster], set()).add(reveal)
                for share in reveal.shares:
                    kinds.setdefault((reveal.roster, share.dealer), set()).add(type(share))
            assert all(len(different) == 1 for different in of_round.values()), f"{silo} revealed twice in a round"
        assert all(len(different) == 1 for different in kinds.values()), "both shares of one silo came"

    def require_quiet(self) -> None:
        """Nobody refused or declined anything that the test did not look at."""
        for name, silo in self.silos.items():
            assert len(silo.refusals) == silo.seen, silo.refusals
            assert len(self.peer.declined_by[name]) == self._declines[name], self.peer.declined_by[name]


@asynccontextmanager
async def attacked(
    folder: Path,
    net: TestNet,
    *,
    bundle: PlanBundle | None = None,
    silos: Sequence[SiloName] = SILOS,
    phantoms: Sequence[SiloName] = (),
    rules: Mapping[SiloName, PolicyRules] | None = None,
    groups: Sequence[Sequence[SiloName]] | None = None,
    verify: Mode = "off",
) -> AsyncIterator[HostileCoordinator]:
    """Agents that run, with nothing ordered yet. Silos pin each other's keys, and phantoms everybody's: nobody pins
    theirs.

    Under a plan with masks they hold `groups`, by default each silo for itself, as their people may allow. The models
    of later rounds come of no sum, so that agents that `verify` them refuse them.
    """
    async with FederationPeer(net) as peer:
        credentials = {name: net.credentials(peer.address, name) for name in (*silos, *phantoms)}
        keys = {name: it.identity_key.public_key() for name, it in credentials.items()}
        agents = {}
        for name in credentials:
            known = silos if name in silos else tuple(credentials)
            agents[name] = AttackedSilo(
                folder / name,
                credentials[name],
                pins={peer_name: keys[peer_name] for peer_name in known if peer_name != name},
                rules=(rules or {}).get(name, PolicyRules()).model_copy(update={"verify": verify}),
            )
        held = [(agents[name].folder, credentials[name]) for name in silos]
        offered = bundle or masked_bundle()
        link: Link | None = None
        if offered.plan.aggregation.secure_aggregation:
            standing = hold_groups(held, groups, colluders=offered.plan.aggregation.colluders)
            peer.groups_offer = GroupsOffer(links=(standing,), proposed=None, identities=())
            link = standing.link
        pretended = [(agents[name].folder, credentials[name]) for name in phantoms]
        async with AsyncExitStack() as running:
            for agent in agents.values():
                await agent.start()
                running.push_async_callback(agent.stop)
            coordinator = HostileCoordinator(peer, offered, agents, link)
            if phantoms:
                real = [credentials[name] for name in silos]
                coordinator.with_phantoms = hold_groups(pretended, others=real).link
            yield coordinator
        coordinator.require_nothing_but_sums()
        coordinator.require_quiet()
