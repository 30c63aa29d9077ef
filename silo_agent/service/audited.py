"""What this silo's audit log tells of: each class stands before a port, and writes there before it hands on.

What leaves the silo is durable in the log before its first byte leaves: a crash may leave an entry for what was never
sent, and never the other way round. What is refused or declined is the coordinator's to bring about, so the log counts
a flood of it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from lorica_security.audit.chain import Head
from lorica_security.audit.entry import LOCAL, MOST_TEXT_CHARACTERS, Event, Particular
from lorica_security.audit.repeats import Repeats
from lorica_security.errors import LoricaError
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.messages import MaskedInput, SurvivorSet
from silo_agent.policy.rules import PolicyRules
from silo_agent.rounds.effects import JournalOutcome
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import CoordinatorPort, ObserverPort, PlanGatePort, Progress
from silo_agent.service.refusals import rule_of
from silo_wire.canonical import Digest
from silo_wire.checkable_round import Proof
from silo_wire.codecs.update_receipt import UpdateReceipt, coordinator_uri, silo_uri
from silo_wire.manifest import Manifest
from silo_wire.messages import DeclineReason, Evaluation, MaskAnswer, RoundKey
from silo_wire.plans.plan import Plan, PlanBundle

PLAIN: Final = "in the clear"
MASKED: Final = "masked"
MOST_KEYS: Final = 1000
"""Messages of secure aggregation of one kind that are written in an hour; of more only how many."""


class AuditPort(Protocol):
    """This silo's audit log. Safe to call from several threads; raises StorageError, IntegrityError naming the file."""

    def append(self, event: Event, *, who: str = ..., **details: Particular) -> Head:
        """Durable when this returns, as the head that is given."""

    def head(self) -> Head: ...


class SiloAudit:
    """What the three below share. `ledger_head` is that of this silo's privacy ledger, `clock` gives seconds since
    1970."""

    def __init__(
        self,
        log: AuditPort,
        *,
        federation: FederationName,
        silo: SiloName,
        ledger_head: Callable[[], Head],
        clock: Callable[[], float],
    ) -> None:
        self.log, self.ledger_head = log, ledger_head
        self.me, self.coordinator = silo_uri(federation, silo), coordinator_uri(federation)
        self.promises: dict[str, str] = {}
        """Of plans that were allowed in this process, by digest: what covers an update of theirs."""
        self._unmasked: tuple[RoundKey, SurvivorSet] | None = None
        self._clock = clock
        self._repeats = Repeats(each=100)

    def leaves(self, event: Event, key: RoundKey, **particulars: Particular) -> None:
        self.log.append(event, who=self.me, **_where(key), **particulars)

    def tell(self, event: Event, kind: str, *, each: int = 0, who: str = "", **particulars: Particular) -> None:
        """Of what may come in floods, by `kind`."""
        self.tell_counts()
        if self._repeats.is_news(f"{event.value}: {kind}", self._clock(), each=each):
            self.log.append(event, who=who or self.me, **particulars)

    def tell_counts(self, *, stopping: bool = False) -> None:
        for kind, count in self._repeats.ended(self._clock(), stopping=stopping):
            self.log.append(Event.REPEATED, who=self.me, what=kind, times=count)

    def unmasks(self, key: RoundKey, model: Digest, survivors: SurvivorSet, link: bytes) -> None:
        """Enter a sum that this silo helps to unmask; the same one, asked for again, once in a process."""
        if self._unmasked != (key, survivors):
            self.leaves(
                Event.SUM_UNMASKED,
                key,
                model=model,
                survivors=" ".join(sorted(survivors.silos)),
                silos=len(survivors.silos),
                groups=link.hex(),
                roster=survivors.roster.hex(),
            )
            self._unmasked = key, survivors

    def proves(self, proof: Proof, file: Path) -> None:
        """Enter that the coordinator handed out a false model, and which file proves it."""
        evidence = proof.checkable.evidence
        self.log.append(
            Event.FALSE_MODEL,
            who=self.coordinator,
            plan=evidence.attempt.plan.hex(),
            round=evidence.attempt.round,
            model=evidence.after.model.hex(),
            chunk=proof.chunk,
            evidence=evidence.digest.hex(),
            proof=file.name,
            proof_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        )

    def goes_back(self, plan: Digest, model: Digest, made: int, newest: int) -> None:
        """Enter that this silo is led back to `model` of the round `made`, though it accepted one of the round
        `newest`."""
        self.tell(
            Event.MODEL_WENT_BACK,
            "any model",
            who=self.coordinator,
            plan=plan,
            round=made,
            model=model,
            accepted_round=newest,
        )

    def covered_by(self, key: RoundKey, *, masked: bool) -> str:
        return self.promises.get(key.plan, MASKED if masked else PLAIN)


class AuditedGate:
    """A PlanGatePort: a plan is in the log when it comes, and again when the rules have allowed it."""

    def __init__(self, gate: PlanGatePort, audit: SiloAudit, rules: PolicyRules) -> None:
        self._gate, self._audit, self._rules = gate, audit, rules
        self.silo, self.tells_scores = gate.silo, gate.tells_scores
        self._listed: set[str] = set()  # plans whose tensors stand in the log since this process began

    def check_plan(self, bundle: PlanBundle) -> None:
        plan, layout = bundle.plan, bundle.update_layout
        names = " ".join(tensor.name for tensor in layout.tensors)
        self._audit.tell(
            Event.PLAN_RECEIVED,
            "any plan",
            who=self._audit.coordinator,
            plan=plan.digest,
            name=plan.name,
            rounds=plan.schedule.rounds,
            update_bytes=layout.total_bytes,
            layout=layout.digest,
            tensors=len(layout.tensors),
            tensor_names=names if plan.digest not in self._listed and len(names) <= MOST_TEXT_CHARACTERS else "",
        )
        self._listed.add(plan.digest)
        self._gate.check_plan(bundle)  # what it refuses the observer tells
        self._audit.promises[plan.digest] = promise_of(plan)
        self._audit.tell(
            Event.PLAN_ALLOWED,
            "any plan",
            who=LOCAL,
            plan=plan.digest,
            promise=promise_of(plan),
            rules=self._rules.model_dump_json(),
        )

    def check_model(self, bundle: PlanBundle, model: Digest, *, latest_round: int) -> None:
        self._gate.check_model(bundle, model, latest_round=latest_round)

    def check_upload(self, manifest: Manifest, *, masked: bool = False) -> None:
        self._gate.check_upload(manifest, masked=masked)


class TroubleObserver(ObserverPort, Protocol):
    """An observer that hears of an unreachable coordinator as well."""

    def unreachable(self, problem: LoricaError, seconds: float, /) -> None: ...


class AuditedObserver:
    """An ObserverPort: refusals, and how this silo's rounds end."""

    def __init__(self, observer: TroubleObserver, audit: SiloAudit) -> None:
        self._observer, self._audit = observer, audit
        self.epsilon, self.epsilon_alone = observer.epsilon, observer.epsilon_alone
        self.activity = observer.activity

    def refused(self, rule: str, detail: str) -> None:
        self._audit.tell(Event.REFUSED, rule, rule=rule, detail=detail)
        self._observer.refused(rule, detail)

    def round_ended(self, outcome: JournalOutcome) -> None:
        self._audit.tell(
            Event.ROUND_ENDED,
            outcome.outcome.value,
            **_where(outcome.key),
            work="evaluation" if outcome.evaluation else "training",
            outcome=outcome.outcome.value,
            detail=outcome.detail,
        )
        self._observer.round_ended(outcome)

    def unreachable(self, problem: LoricaError, seconds: float) -> None:
        if (rule := rule_of(problem)) is not None:
            self._audit.tell(Event.REFUSED, rule, rule=rule, detail=str(problem))
        self._observer.unreachable(problem, seconds)


class AuditedCoordinator:
    """A CoordinatorPort: everything that leaves this silo passes here. Progress, readiness and ledger heads alone are
    not entered."""

    def __init__(self, coordinator: CoordinatorPort, audit: SiloAudit) -> None:
        self._coordinator, self._audit = coordinator, audit
        self.orders, self.fetch_plan = coordinator.orders, coordinator.fetch_plan
        self.fetch_base, self.fetch_model = coordinator.fetch_base, coordinator.fetch_model
        self.declare_readiness = coordinator.declare_readiness
        self.report_progress = coordinator.report_progress
        self.countersign_ledger = coordinator.countersign_ledger

    async def upload(
        self, update: SavedUpdate, file: Path, *, mark: FileMark | None = None, progress: Progress
    ) -> UpdateReceipt:
        told = update.summary
        self._audit.leaves(
            Event.UPDATE_LEAVES,
            update.key,
            model=update.model,
            update=update.manifest.digest,
            bytes=update.manifest.total_bytes,
            layout=update.manifest.layout_digest,
            covered_by=self._audit.covered_by(update.key, masked=False),
            examples=told.examples,
            optimizer_steps=told.optimizer_steps,
            losses=f"max {told.loss_max!r} min {told.loss_min!r} first {told.loss_first!r} last {told.loss_last!r}",
            **self._ledger(private=update.private),
        )
        return self._received(await self._coordinator.upload(update, file, mark=mark, progress=progress))

    async def upload_masked(
        self,
        key: RoundKey,
        masked: MaskedInput,
        manifest: Manifest,
        file: Path,
        *,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        covered_by = self._audit.covered_by(key, masked=True)
        self._audit.leaves(
            Event.MASKED_UPDATE_LEAVES,
            key,
            update=manifest.digest,
            bytes=manifest.total_bytes,
            roster=masked.roster.hex(),
            covered_by=covered_by,
            **self._ledger(private=covered_by not in (PLAIN, MASKED)),
        )
        sent = await self._coordinator.upload_masked(key, masked, manifest, file, mark=mark, progress=progress)
        return self._received(sent)

    async def answer_mask(self, key: RoundKey, answer: MaskAnswer) -> None:
        message = type(answer).__name__
        self._audit.tell(Event.KEYS_LEAVE, message, each=MOST_KEYS, **_where(key), message=message)
        await self._coordinator.answer_mask(key, answer)

    async def declare_trained(self, key: RoundKey, model: Digest) -> None:
        self._audit.tell(Event.TRAINED, "under masks", **_where(key), model=model)
        await self._coordinator.declare_trained(key, model)

    async def decline(self, key: RoundKey, reason: DeclineReason, detail: str) -> None:
        self._audit.tell(Event.DECLINED, reason.value, **_where(key), reason=reason.value, told=detail)
        await self._coordinator.decline(key, reason, detail)

    async def report_evaluation(self, key: RoundKey, model: Digest, evaluation: Evaluation) -> None:
        self._audit.leaves(
            Event.SCORES_LEAVE,
            key,
            model=model,
            split=evaluation.split,
            examples=evaluation.examples,
            exact_matches=evaluation.exact_matches,
            executed=evaluation.executed,
            execution_matches=evaluation.execution_matches,
            loss_per_token=repr(evaluation.loss_per_token),
        )
        await self._coordinator.report_evaluation(key, model, evaluation)

    def _received(self, receipt: UpdateReceipt) -> UpdateReceipt:
        self._audit.log.append(Event.RECEIPT, who=self._audit.coordinator, **receipt.particulars())
        return receipt

    def _ledger(self, *, private: bool) -> dict[str, Any]:
        """The newest entry of this silo's privacy ledger, which counts a private update already."""
        if not private:
            return {}
        head = self._audit.ledger_head()
        return {"ledger_entry": head.sequence, "ledger_digest": head.digest}


def promise_of(plan: Plan) -> str:
    """What covers an update of this plan, in words that a report can show."""
    said = [MASKED if plan.aggregation.secure_aggregation else PLAIN]
    privacy = plan.privacy
    if privacy.level != "none":
        unit = "silo" if privacy.level == "silo" else privacy.unit_field or "record"
        where = " by the coordinator" if plan.noise_at == "coordinator" else ""
        if plan.joint:
            where = f" by {plan.noise_makers} silos together, towards who sees sums alone"
        said.append(f"noised{where}: epsilon {privacy.target_epsilon:g} for a {unit} at dp_delta {privacy.dp_delta:g}")
    return ", ".join(said)


def _where(key: RoundKey) -> dict[str, Any]:
    return {"plan": key.plan, "round": key.round, "attempt": key.attempt}
