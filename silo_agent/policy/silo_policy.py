"""What this silo refuses, whatever the coordinator says. Each refusal is a PolicyRefusal that names the rule.

The rules are the `[policy]` table of silo.toml: limits, approvals, what masks must promise, and whether the silo's
database may be queried. They are checked before a plan is answered and again before bytes leave; `demands` goes into
every roster of secure aggregation. A plan is held to its own worst case: the smallest cohort that it lets begin.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.privacy.accounting import Budget
from silo_agent.policy.mask_rules import mask_refusals
from silo_agent.policy.plan_limits import above, database_refusals, evaluation_refusals, task_refusals, tensor_refusals
from silo_agent.policy.privacy_rules import budget_of, privacy_refusals
from silo_agent.policy.rank_limits import LOOPBACK, rank_refusals
from silo_agent.policy.record import Lineage, Record, beginnings
from silo_agent.policy.rules import PolicyRules
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.work import epochs_begun

if TYPE_CHECKING:
    from lorica_security.secure_aggregation.silo.party import Demands

MADE_AGAIN = "size:"
"""How the source of a model begins that follows from the plan's size and seed."""


@dataclass(frozen=True, slots=True)
class SiloPolicy:
    """The rules as they bind one silo. `record` is asked anew each time; `processes` are those that it trains in, which
    meet on `rank_interface` and are `sharded` or not."""

    rules: PolicyRules
    silo: SiloName
    record: Callable[[], Record] = Record
    processes: int = 0
    rank_interface: str = LOOPBACK
    sharded: bool = False

    def check_plan(self, bundle: PlanBundle) -> None:
        """Raises PolicyRefusal unless every rule allows this plan."""
        for objection in self.objections(bundle):
            raise objection

    def check_epochs(self, plan: Plan, examples: int) -> None:
        """Raises PolicyRefusal where the plan's number of steps goes over `examples` examples too often; how many there
        are is nobody's to hear."""
        most = self.rules.max_epochs
        if epochs_begun(max(1, examples), plan.training.for_silo(self.silo)) > most:
            raise PolicyRefusal(
                "max_epochs",
                f"the plan's [training] steps = {plan.training.steps} go over this silo's examples more often in a "
                f"round than [policy] max_epochs = {most} of this silo allows: change one of them",
            )

    def objections(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        """Every refusal of this plan; that people have not approved it comes last, for what else is wrong they cannot
        approve."""
        rules, plan = self.rules, bundle.plan
        yield from above("max_parameters", "parameters of the model", bundle.parameters_in_memory, rules.max_parameters)
        yield from tensor_refusals(rules, bundle)
        yield from above("max_upload_bytes", "bytes of an update", bundle.update_bytes, rules.max_upload_bytes)
        yield from above("max_rounds", "rounds", plan.schedule.rounds, rules.max_rounds)
        yield from above("max_epochs", "epochs in a round", plan.training.for_silo(self.silo).epochs, rules.max_epochs)
        if plan.aggregation.secure_aggregation:
            yield from mask_refusals(rules, bundle)
        elif rules.require_secure_aggregation:
            yield PolicyRefusal(
                "require_secure_aggregation",
                f"plan {plan.name} would have the coordinator see this silo's update, [policy] "
                "require_secure_aggregation of this silo wants it masked: have the operator set [aggregation] "
                "secure_aggregation = true in the plan",
            )
        yield from task_refusals(rules, plan.task)
        yield from evaluation_refusals(rules, plan)
        yield from database_refusals(rules, self.silo, plan)
        yield from privacy_refusals(rules, self.silo, plan)
        yield from rank_refusals(self.silo, plan, self.processes, self.rank_interface, sharded=self.sharded)
        yield from self._approval(bundle)
        for _, refusal in self.kin(bundle):
            yield refusal

    def kin(self, bundle: PlanBundle) -> Iterator[tuple[Lineage, PolicyRefusal]]:
        """Each plan that this one needs people's approval beside: this silo masked under it, and its model, or the base
        of its adapters, has the same shape.

        Another digest shows that some number differs, and not that two deltas do: people's own copies may be all but
        one, too.
        """
        kin = list(self._kin(bundle))
        command = self._approve(bundle.plan, [other for other, _ in kin])
        for other, why in kin:
            yield other, _second_plan(bundle.plan.name, command, other, why)

    def approve_command(self, bundle: PlanBundle) -> str:
        """The whole command by which people allow this plan, DIR being their own copy of its initial model."""
        return self._approve(bundle.plan, [other for other, _ in self._kin(bundle)])

    def waits_for_command(self, bundle: PlanBundle) -> bool:
        """Whether it is that command that this plan lacks: not where silo.toml lists what is approved."""
        approved, digest = self.rules.approved_plans, bundle.plan.digest
        if isinstance(approved, list) and digest not in approved:
            return False
        return any(self._kin(bundle)) or (approved == "ask" and digest not in self.record().approved)

    def _approve(self, plan: Plan, others: Sequence[Lineage]) -> str:
        """`plan approve` with what this plan needs: a model to compare with, and each plan that it is approved
        beside."""
        words = [f"silo-agent plan approve {plan.digest}"]
        if self.wants_copy(plan):
            words.append("--model DIR")
        return " ".join([*words, *(f"--although {other.plan}" for other in others)])

    def wants_copy(self, plan: Plan) -> bool:
        """Whether `plan approve` wants people's own copy of the initial model: masks, none compared before, and not to
        be made again."""
        made_again = plan.model.source.startswith(MADE_AGAIN)
        return plan.aggregation.secure_aggregation and not made_again and plan.digest not in self.record().compared

    def _kin(self, bundle: PlanBundle) -> Iterator[tuple[Lineage, str]]:
        plan, record = bundle.plan, self.record()
        if not plan.aggregation.secure_aggregation:
            return
        own = beginnings(plan).union(*(it.models for it in record.lineages if it.plan == plan.digest))
        for other in record.lineages:
            pair = frozenset({plan.digest, other.plan})
            if other.plan == plan.digest or not other.round or pair in record.pairs:
                continue
            if other.led_to(plan.initial_model):
                why = (
                    "and it begins from a model that this silo had under that one, which is so of each plan that "
                    "goes on where another ended: the question is whether you know of that"
                )
            elif own & other.known:
                why = "and both have the same model, or one base of adapters"
            elif other.layout is None or other.begins is None or not other.models:
                why = "and this silo does not know of which models any more"
            elif other.layout == bundle.whole_layout.digest:
                why = "whose model has the same shape, and could be all but the same"
            else:
                continue
            yield other, why

    def check_model(self, bundle: PlanBundle, model: Digest, *, latest_round: int) -> None:
        """Raises PolicyRefusal for a model that this plan does not begin from, or that belongs to another plan with
        masks."""
        plan = bundle.plan
        if not plan.aggregation.secure_aggregation:
            return
        if latest_round == 0 and model != plan.initial_model:
            raise PolicyRefusal(
                "initial_model",
                f"plan {plan.name} begins from model {plan.initial_model}, the coordinator hands out {model}: have "
                "the operator restore the plan's own model, or offer a new plan with this one",
            )
        record = self.record()
        for other in record.lineages:
            beside = frozenset({plan.digest, other.plan})
            if other.plan != plan.digest and other.round and model in other.known and beside not in record.pairs:
                raise _second_plan(plan.name, self._approve(plan, [other]), other, f"and model {model} is of both")

    @property
    def budget(self) -> Budget:
        return budget_of(self.rules)

    def check_upload(self, manifest: Manifest, *, masked: bool = False) -> None:
        """Raises PolicyRefusal when an update must not leave: it has no mask, or is larger than may leave in one
        round."""
        if self.rules.require_secure_aggregation and not masked:
            raise PolicyRefusal(
                "require_secure_aggregation",
                "an update without masks was about to leave, [policy] require_secure_aggregation of this silo keeps "
                "it here: have the operator start a plan with [aggregation] secure_aggregation = true",
            )
        for objection in above(
            "max_upload_bytes", "bytes of an update", manifest.total_bytes, self.rules.max_upload_bytes
        ):
            raise objection

    @property
    def tells_scores(self) -> bool:
        return self.rules.tell_scores

    def check_evaluation(self, questions: int) -> None:
        """Raises PolicyRefusal where scores would be of so few questions; how many there are is nobody's to hear."""
        least = self.rules.smallest_evaluation
        if questions < least:
            raise PolicyRefusal(
                "smallest_evaluation",
                f"scores would be of fewer held-out questions than [policy] smallest_evaluation = {least} of this "
                "silo: have more in dev.jsonl, or a higher [evaluation] max_examples in the plan",
            )

    def check_private_model(self, bundle: PlanBundle, largest: float) -> None:
        """Raises PolicyRefusal where record-level privacy would train a model whose `largest` parameter no trained
        model has.

        What the promise of privacy needs holds for any model (private/clipping.py); this one is made for something else
        than to learn.
        """
        most = self.rules.max_model_value
        if bundle.plan.privacy.level == "record" and not largest <= most:
            raise PolicyRefusal(
                "max_model_value",
                f"a parameter of plan {bundle.plan.name}'s round model is {largest:g} in size, [policy] "
                f"max_model_value of this silo allows {most:g} under record-level privacy: have the operator offer a "
                f"plan with a model that was trained, or restore the model",
            )

    def check_execution(self) -> None:
        """Raises PolicyRefusal unless a model's SQL may run on this silo's database."""
        if not self.rules.allow_execution:
            raise PolicyRefusal(
                "allow_execution",
                "queries on this silo's database are not allowed: set [policy] allow_execution = true in silo.toml",
            )

    def demands(self) -> "Demands":
        """What every roster of secure aggregation is held to."""
        # Here, not above: numpy, which this brings, is for rounds with masks alone.
        from lorica_security.secure_aggregation.silo.party import Demands

        rules = self.rules
        return Demands(
            min_cohort=rules.min_cohort,
            min_threshold=rules.min_threshold,
            min_survivors=rules.min_survivors,
            colluders=rules.colluders,
            smallest_group=rules.smallest_group,
        )

    def _approval(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        approved, plan = self.rules.approved_plans, bundle.plan
        if approved == "any":
            return
        if approved == "ask":
            if plan.digest not in self.record().approved:
                own = ", DIR being their own copy of its initial model" if self.wants_copy(plan) else ""
                yield PolicyRefusal(
                    "approved_plans",
                    f"plan {plan.name} waits for approval by this silo's people: they look with `silo-agent plan "
                    f"show` and allow it with `{self.approve_command(bundle)}`{own}",
                )
        elif plan.digest not in approved:
            yield PolicyRefusal(
                "approved_plans",
                f"plan {plan.name} with digest {plan.digest} is not approved here: "
                "add the digest to [policy] approved_plans of silo.toml and restart the agent",
            )


def _second_plan(name: str, command: str, other: Lineage, why: str) -> PolicyRefusal:
    return PolicyRefusal(
        "one_lineage",
        f"this silo masked under plan {other.name or other.plan[:16]} up to round {other.round}, {why}: the sums of "
        f"the two may differ by one silo's update; its people allow plan {name} with `{command}`, which without "
        f"--although shows the difference and approves nothing",
    )
