"""What this silo refuses, whatever the coordinator says. Each refusal is a PolicyRefusal that names the rule.

The rules are the `[policy]` table of silo.toml: limits, approvals, what masks must promise, and whether the silo's database
may be queried. They are checked before a plan is answered and again before bytes leave; `demands` goes into every roster
of secure aggregation. A plan is held to its own worst case: the smallest cohort that it lets begin.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from lorica_security.console.strict_toml import Section
from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.privacy.accounting import Budget, GaussianRelease
from lorica_security.privacy.renyi_filter import favoured_order, filtered_epsilon
from silo_wire.canonical import Digest
from silo_wire.manifest import MAX_NAME_CHARACTERS, Manifest
from silo_wire.model_folders.tokenizer_parts import odd_parts
from silo_wire.plans.plan import DigestText, Plan, PlanBundle
from silo_wire.plans.work import MOST_SETTINGS, MOST_WORK_RATIO, widest_gap

if TYPE_CHECKING:
    from lorica_security.secure_aggregation.silo.party import Demands

LEAST_SILOS = 3
"""Of a cohort, a threshold or a sum: in a sum of two each sees the other."""
MOST_SILOS = 10_000
SHOWN = 3
MADE_AGAIN = "size:"
"""How the source of a model begins that follows from the plan's size and seed."""
MOST_TRUSTED_PEERS = 3
"""So many peers may all be taken for honest without a word of it in `silo-agent check`."""


def _tensor_pattern(text: str) -> str:
    if not text or len(text) > MAX_NAME_CHARACTERS or not text.isprintable() or "*" in text[:-1]:
        raise ValueError("use a parameter's name, or the beginning of names followed by one '*'")
    return text


TensorPattern = Annotated[str, AfterValidator(_tensor_pattern)]
"""A parameter's name, or the beginning of names and a `*`."""
Silos = Annotated[int, Field(ge=LEAST_SILOS, le=MOST_SILOS)]


class PolicyRules(Section):
    """`[policy]` of silo.toml. The defaults allow any plan of an ordinary size of this federation; where masks are required,
    those that people approved."""

    max_parameters: Annotated[int, Field(ge=1)] = 1_000_000_000
    allowed_tensors: Literal["any"] | Annotated[list[TensorPattern], Field(min_length=1)] = "any"
    max_upload_bytes: Annotated[int, Field(ge=1)] = 4 << 30  # of one update, hence of one round
    max_rounds: Annotated[int, Field(ge=1)] = 10_000
    max_epochs: Annotated[int, Field(ge=1)] = 1_000  # of local training in one round
    require_secure_aggregation: bool = False
    approved_plans: Literal["any", "ask"] | Annotated[list[DigestText], Field(min_length=1)] = Field(
        default_factory=lambda given: "ask" if given.get("require_secure_aggregation") else "any"
    )
    # of round models under masks, before this silo trains from them
    verify: Literal["joint", "spot", "off"] = Field(
        default_factory=lambda given: "joint" if given.get("require_secure_aggregation") else "spot"
    )
    min_cohort: Silos = LEAST_SILOS
    min_threshold: Silos = LEAST_SILOS
    min_survivors: Silos = LEAST_SILOS
    smallest_group: Silos = LEAST_SILOS  # of a release group: silos that are in a masked sum together or not at all
    colluders: Annotated[int, Field(ge=0, le=MOST_SILOS)] = 0  # among the peers, that a sum must withstand
    max_work_ratio: Annotated[float, Field(ge=1, le=MOST_WORK_RATIO, allow_inf_nan=False)] = (
        1.0  # between silos, under masks; 1: all work alike
    )
    require_privacy: Literal["none", "record", "silo"] = "none"
    unit_field: Annotated[str, Field(max_length=100)] = ""  # what a private plan must group lines by; "": anything
    max_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0  # of all private rounds ever, over all plans
    # the same towards all other silos of a sum, if they worked against this one; 0: no plan whose noise silos make together
    max_epsilon_alone: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # the dp_delta at which max_epsilon is counted
    # of one record's gradient under record-level privacy: far below what float32 resolves in trained parameters nothing is learnt
    min_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    max_model_value: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e5  # of a round model's parameters, in size
    shared_budget: Annotated[str, Field(max_length=4096)] = ""  # registry of folders that train on the same records
    trust_on_first_use: bool = False  # pin the key that a peer comes with first; does not stop invented silos
    allow_execution: bool = True  # a model's SQL on the database of [database], always in the sandbox
    tell_scores: bool = True  # how many held-out questions a model answers right; false: nothing of that leaves
    smallest_evaluation: Annotated[int, Field(ge=2)] = 2  # held-out questions: scores of fewer tell of single records


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A plan under which this silo has masks, what it begins from, and the models that this silo saw under it.

    `layout` is that of the whole model, adapters' base included; `begins` is its initial model in either wire type, and its base. Both are
    None where an earlier release noted the plan. `round` is the last that was joined, 0 where none was.
    """

    plan: Digest
    name: str
    layout: str | None
    begins: frozenset[str] | None
    round: int
    models: frozenset[str]

    @property
    def known(self) -> frozenset[str]:
        """Every model that this silo knows to be of the plan."""
        return self.models | (self.begins or frozenset())

    def led_to(self, model: str) -> bool:
        """Whether this silo saw `model` under the plan, and it is not what the plan begins from."""
        return self.begins is not None and model in self.models - self.begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What this silo's people decided by command, and what it has masked, as of now.

    `compared` are plans whose initial model people compared, `pairs` those that they approved beside each other.
    """

    approved: Collection[str] = ()
    compared: Collection[str] = ()
    pairs: Collection[frozenset[str]] = ()
    lineages: Sequence[Lineage] = ()


@dataclass(frozen=True, slots=True)
class SiloPolicy:
    """The rules as they bind one silo. `record` is asked anew each time."""

    rules: PolicyRules
    silo: SiloName
    record: Callable[[], Record] = Record

    def check_plan(self, bundle: PlanBundle) -> None:
        """Raises PolicyRefusal unless every rule allows this plan."""
        for objection in self.objections(bundle):
            raise objection

    def objections(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        """Every refusal of this plan; that people have not approved it comes last, for what else is wrong they cannot approve."""
        rules, plan = self.rules, bundle.plan
        yield from _above(
            "max_parameters", "parameters of the model", bundle.parameters_in_memory, rules.max_parameters
        )
        yield from self._tensors(bundle)
        yield from _above("max_upload_bytes", "bytes of an update", bundle.update_bytes, rules.max_upload_bytes)
        yield from _above("max_rounds", "rounds", plan.schedule.rounds, rules.max_rounds)
        yield from _above("max_epochs", "epochs in a round", plan.training.for_silo(self.silo).epochs, rules.max_epochs)
        if plan.aggregation.secure_aggregation:
            yield from self._masks(bundle)
        elif rules.require_secure_aggregation:
            yield PolicyRefusal(
                "require_secure_aggregation",
                f"plan {plan.name} would have the coordinator see this silo's update, [policy] "
                "require_secure_aggregation of this silo wants it masked: have the operator set [aggregation] "
                "secure_aggregation = true in the plan",
            )
        yield from self._evaluation(bundle)
        yield from self._privacy(bundle)
        yield from self._approval(bundle)
        for _, refusal in self.kin(bundle):
            yield refusal

    def kin(self, bundle: PlanBundle) -> Iterator[tuple[Lineage, PolicyRefusal]]:
        """Each plan that this one needs people's approval beside: this silo masked under it, and its model, or the base of its adapters,
        has the same shape.

        Another digest shows that some number differs, and not that two deltas do: people's own copies may be all but one, too.
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
        """`plan approve` with what this plan needs: a model to compare with, and each plan that it is approved beside."""
        words = [f"silo-agent plan approve {plan.digest}"]
        if self.wants_copy(plan):
            words.append("--model DIR")
        return " ".join([*words, *(f"--although {other.plan}" for other in others)])

    def wants_copy(self, plan: Plan) -> bool:
        """Whether `plan approve` wants people's own copy of the initial model: masks, none compared before, and not to be made again."""
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
                    "and it begins from a model that this silo had under that one, which is so of each plan that goes on where another "
                    "ended: the question is whether you know of that"
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
        """Raises PolicyRefusal for a model that this plan does not begin from, or that belongs to another plan with masks."""
        plan = bundle.plan
        if not plan.aggregation.secure_aggregation:
            return
        if latest_round == 0 and model != plan.initial_model:
            raise PolicyRefusal(
                "initial_model",
                f"plan {plan.name} begins from model {plan.initial_model}, the coordinator hands out {model}: have the operator "
                "restore the plan's own model, or offer a new plan with this one",
            )
        record = self.record()
        for other in record.lineages:
            beside = frozenset({plan.digest, other.plan})
            if other.plan != plan.digest and other.round and model in other.known and beside not in record.pairs:
                raise _second_plan(plan.name, self._approve(plan, [other]), other, f"and model {model} is of both")

    @property
    def budget(self) -> Budget:
        rules = self.rules
        return Budget(
            epsilon=rules.max_epsilon,
            dp_delta=rules.max_dp_delta,
            alone=rules.max_epsilon_alone,
            unit=rules.unit_field,
        )

    def check_upload(self, manifest: Manifest, *, masked: bool = False) -> None:
        """Raises PolicyRefusal when an update must not leave: it has no mask, or is larger than may leave in one round."""
        if self.rules.require_secure_aggregation and not masked:
            raise PolicyRefusal(
                "require_secure_aggregation",
                "an update without masks was about to leave, [policy] require_secure_aggregation of this silo keeps "
                "it here: have the operator start a plan with [aggregation] secure_aggregation = true",
            )
        for objection in _above(
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
                f"scores would be of fewer held-out questions than [policy] smallest_evaluation = {least} of this silo: "
                "have more in dev.jsonl, or a higher [evaluation] max_examples in the plan",
            )

    def check_private_model(self, bundle: PlanBundle, largest: float) -> None:
        """Raises PolicyRefusal where record-level privacy would train a model whose `largest` parameter no trained model has.

        What the promise of privacy needs holds for any model (private/clipping.py); this one is made for something else than to learn.
        """
        most = self.rules.max_model_value
        if bundle.plan.privacy.level == "record" and not largest <= most:
            raise PolicyRefusal(
                "max_model_value",
                f"a parameter of plan {bundle.plan.name}'s round model is {largest:g} in size, [policy] max_model_value of this silo "
                f"allows {most:g} under record-level privacy: have the operator offer a plan with a model that was trained, or restore "
                "the model",
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

    def _tensors(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        allowed = self.rules.allowed_tensors
        if allowed == "any":
            return
        names = frozenset(pattern for pattern in allowed if not pattern.endswith("*"))
        beginnings = tuple(pattern[:-1] for pattern in allowed if pattern.endswith("*"))
        others = [
            tensor.name
            for tensor in bundle.layout.tensors
            if tensor.name not in names and not tensor.name.startswith(beginnings)
        ]
        if others:
            yield PolicyRefusal(
                "allowed_tensors",
                f"plan {bundle.plan.name} trains {_some(others)}, which [policy] "
                "allowed_tensors of this silo does not name: change one of them",
            )

    def _evaluation(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        rules, plan = self.rules, bundle.plan
        most = plan.evaluation.max_examples
        if rules.tell_scores and plan.timetable.has_scores and 0 < most < rules.smallest_evaluation:
            yield PolicyRefusal(
                "smallest_evaluation",
                f"plan {plan.name} has scores of {most} held-out questions, [policy] smallest_evaluation of this silo wants "
                f"at least {rules.smallest_evaluation}: have the operator raise [evaluation] max_examples in the plan",
            )

    def _privacy(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        rules, plan = self.rules, bundle.plan
        if rules.require_privacy not in ("none", plan.privacy.level):
            yield PolicyRefusal(
                "require_privacy",
                f"plan {plan.name} has [privacy] level {plan.privacy.level!r}, [policy] require_privacy of this silo wants "
                f"{rules.require_privacy!r}: have the operator set [privacy] level in the plan",
            )
        if plan.privacy.level == "none":
            return
        if plan.privacy.level == "record" and rules.unit_field not in ("", plan.privacy.unit_field):
            yield PolicyRefusal(
                "unit_field",
                f"plan {plan.name} promises privacy for each {plan.privacy.unit_field or 'line'!r}, [policy] unit_field of this "
                f"silo wants it for each {rules.unit_field!r}: have the operator set [privacy] unit_field in the plan",
            )
        norm = plan.training.for_silo(self.silo).max_grad_norm
        if plan.privacy.level == "record" and norm < rules.min_grad_norm:
            yield PolicyRefusal(
                "min_grad_norm",
                f"plan {plan.name} clips gradients to max_grad_norm = {norm:g}, [policy] min_grad_norm of this silo wants at least "
                f"{rules.min_grad_norm:g}: have the operator raise [training] max_grad_norm in the plan",
            )
        yield from self._joint_noise(plan)
        of_round = [release for _, release in plan.releases_of_round]
        unit = plan.privacy.unit_field
        of_rounds = [replace(release, steps=release.steps * plan.schedule.rounds) for release in of_round]
        epsilon = self._cost(of_rounds, of_round, plan)
        if epsilon > rules.max_epsilon:
            yield PolicyRefusal(
                "max_epsilon",
                f"the {plan.schedule.rounds} rounds of plan {plan.name} cost epsilon {epsilon:.3g} at dp_delta "
                f"{rules.max_dp_delta:g} by the filter that holds over all plans, [policy] max_epsilon of this silo is "
                f"{rules.max_epsilon:g}: change one of them"
                + (
                    f", or set [policy] unit_field = {unit!r} where epsilon is meant for each {unit!r} and not for each line"
                    if unit and not rules.unit_field
                    else ""
                ),
            )

    def _cost(self, of_rounds: Sequence[GaussianRelease], of_round: Sequence[GaussianRelease], plan: Plan) -> float:
        """What a plan's rounds come to by the filter that its first round would open."""
        budget, unit = self.budget, plan.privacy.unit_field
        relation = budget.relation_or_own((mechanism, unit) for mechanism, _ in plan.releases_of_round)
        return filtered_epsilon(
            of_rounds,
            favoured=favoured_order(of_round, epsilon=budget.epsilon, dp_delta=budget.dp_delta, relation=relation),
            dp_delta=budget.dp_delta,
            relation=relation,
        )

    def _joint_noise(self, plan: Plan) -> Iterator[PolicyRefusal]:
        rules = self.rules
        if not plan.joint:
            return
        if rules.trust_on_first_use:
            yield PolicyRefusal(
                "trust_on_first_use",
                f"plan {plan.name} counts on noise of {plan.noise_makers} silos, and [policy] trust_on_first_use of this silo would take "
                "silos that the coordinator invented for some of them: set it to false and pin the others' keys, or have the operator set "
                '[privacy] noise = "own"',
            )
        of_rounds = [
            replace(release.alone, steps=release.steps * plan.schedule.rounds) for _, release in plan.releases_of_round
        ]
        alone = self._cost(of_rounds, [release for _, release in plan.releases_of_round], plan)
        # At a large max_dp_delta it may cost nothing.
        if not rules.max_epsilon_alone or alone > rules.max_epsilon_alone:
            yield PolicyRefusal(
                "max_epsilon_alone",
                f"the noise of plan {plan.name} is made by {plan.noise_makers} silos together: if all others worked against this one, its "
                f"{plan.schedule.rounds} rounds would cost epsilon {alone:.3g} at dp_delta {rules.max_dp_delta:g}, [policy] "
                f"max_epsilon_alone of this silo is {rules.max_epsilon_alone:g}: change it, or have the operator set [privacy] noise = "
                '"own"',
            )

    def _masks(self, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
        from lorica_security.secure_aggregation.parameters import default_threshold

        rules, wanted, silos = self.rules, bundle.plan.aggregation, bundle.plan.schedule.min_silos
        for rule, key, offered, demanded in (
            ("min_cohort", "[schedule] min_silos", silos, rules.min_cohort),
            # The default grows with the cohort: that of the smallest is the least there can be.
            (
                "min_threshold",
                "[aggregation] threshold",
                wanted.threshold or default_threshold(silos),
                rules.min_threshold,
            ),
            ("min_survivors", "[aggregation] min_survivors", wanted.min_survivors, rules.min_survivors),
            ("colluders", "[aggregation] colluders", wanted.colluders, rules.colluders),
        ):
            if offered < demanded:
                yield PolicyRefusal(
                    rule,
                    f"{key} of plan {bundle.plan.name} comes to {offered} in its smallest cohort, [policy] {rule} of this "
                    f"silo wants at least {demanded}: change one of them",
                )
        yield from self._work(bundle.plan)
        odd = list(odd_parts(bundle.files))
        if odd:
            yield PolicyRefusal(
                "initial_model",
                f"the tokenizer of plan {bundle.plan.name} is none of T5's family: {_some(odd)}; this silo takes none of another make "
                "under secure_aggregation, since a tokenizer can leave text to one silo alone, whose delta the sum then is: have the "
                "operator offer a plan with the model's own tokenizer",
            )

    def _work(self, plan: Plan) -> Iterator[PolicyRefusal]:
        """Whoever trains far more than all others is alone in the sum; so is the only one that trains less, in two sums."""
        allowed = self.rules.max_work_ratio
        gap = widest_gap(plan.training.works)
        if gap is None:
            yield PolicyRefusal(
                "max_work_ratio",
                f"plan {plan.name} has more than {MOST_SETTINGS} different settings in [training.overrides], which this silo does "
                "not compare: have the operator give silos the same ones",
            )
        elif gap.ratio > Fraction(repr(allowed)):
            remedy = "have the operator bring the overrides together"
            if gap.ratio <= MOST_WORK_RATIO:
                remedy += f", or set [policy] max_work_ratio = {_rounded_up(gap.ratio):g}"
            yield PolicyRefusal(
                "max_work_ratio",
                f"{gap.first} and {gap.second} of plan {plan.name} differ {float(gap.ratio):.4g}-fold in learning rate x optimizer "
                f"steps, [policy] max_work_ratio of this silo allows {allowed:g} under secure_aggregation, since a sum of one silo that "
                f"trains and others that hardly do is that silo's delta: {remedy}",
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
                    f"plan {plan.name} waits for approval by this silo's people: they look with `silo-agent plan show` and allow it "
                    f"with `{self.approve_command(bundle)}`{own}",
                )
        elif plan.digest not in approved:
            yield PolicyRefusal(
                "approved_plans",
                f"plan {plan.name} with digest {plan.digest} is not approved here: "
                "add the digest to [policy] approved_plans of silo.toml and restart the agent",
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def beginnings(plan: Plan) -> frozenset[str]:
    """What a plan begins from, by digest: the very numbers may come in another wire type, or below adapters of another seed or rank."""
    model = plan.model
    return frozenset(it for it in (model.initial, model.initial_bfloat16, model.base) if it is not None)


def _rounded_up(ratio: Fraction) -> float:
    """To hundredths, as somebody would write it; at most MOST_WORK_RATIO where `ratio` is."""
    return math.ceil(ratio * 100) / 100


def _second_plan(name: str, command: str, other: Lineage, why: str) -> PolicyRefusal:
    return PolicyRefusal(
        "one_lineage",
        f"this silo masked under plan {other.name or other.plan[:16]} up to round {other.round}, {why}: the sums of the two may "
        f"differ by one silo's update; its people allow plan {name} with `{command}`, which without --although shows the difference "
        "and approves nothing",
    )


def loosened(rules: PolicyRules, *, pinned: int, on_first_use: int, record: Record) -> Iterator[tuple[str, str]]:
    """What this silo's people gave up of what required masks promise by themselves: the key, and what it costs.

    `pinned` counts the silos that are pinned here, `on_first_use` those of them that nobody compared.
    """
    if not rules.require_secure_aggregation:
        masked = [it.plan for it in record.lineages if it.round]
        if masked and "require_secure_aggregation" in rules.model_fields_set:
            yield (
                "require_secure_aggregation",
                f"it is false, and this silo masked under {len(masked)} plans: of the next one the coordinator may see its update alone",
            )
        return
    if rules.approved_plans == "any":
        yield (
            "approved_plans",
            'it is "any": the coordinator chooses model and settings, and a model made for it can single out one silo in a sum',
        )
    elif rules.approved_plans != "ask":
        yield (
            "approved_plans",
            'it lists plans: nobody here compared their initial models, as "ask" would have people do',
        )
    if rules.verify != "joint":
        yield (
            "verify",
            'it is "off": nobody here finds out whether a round model is one that was made to single out a silo'
            if rules.verify == "off"
            else 'it is "spot": a round model that is wrong in one place, to single out a silo, is mostly not found out',
        )
    if rules.trust_on_first_use:
        yield (
            "trust_on_first_use",
            "it is true: a coordinator can make up silos, and a sum be of this one and made-up ones",
        )
    elif on_first_use:
        yield (
            "trust_on_first_use",
            f"{on_first_use} silos are pinned by the key that they came with first, and count for nothing now: compare each by "
            "telephone, then `silo-agent trust add`",
        )
    if rules.colluders == 0 and pinned > MOST_TRUSTED_PEERS:
        yield (
            "colluders",
            f"it is 0 of {pinned} peers: one of them that works with the coordinator may uncover what masks hide",
        )
    if rules.max_work_ratio > PolicyRules.model_fields["max_work_ratio"].default:
        yield (
            "max_work_ratio",
            f"it is {rules.max_work_ratio:g}: a silo may train so many times more than another, and the sum be mostly its delta",
        )
    if rules.shared_budget == "none":
        yield (
            "shared_budget",
            'it is "none": a second folder with the same records, or a copy of this one, spends max_epsilon once more',
        )
    for key, cost in _LIMITS.items():
        value, usual = getattr(rules, key), PolicyRules.model_fields[key].default
        if value > usual:
            yield key, f"it is {value:,}, where {usual:,} is the default: {cost}"
    if rules.min_grad_norm < (usual := PolicyRules.model_fields["min_grad_norm"].default):
        yield (
            "min_grad_norm",
            f"it is {rules.min_grad_norm:g}, where {usual:g} is the default: a plan may learn nothing, and spend epsilon",
        )
    for plan in sorted(set(record.approved) - set(record.compared)):
        yield (
            "--without-comparing-the-model",
            f"plan {plan[:16]} was approved so: its model may be made to single out one silo",
        )
    for pair in sorted(sorted(pair) for pair in record.pairs):
        both = " and ".join(plan[:16] for plan in pair)
        yield "--although", f"plans {both} were approved beside each other: their sums may differ by one silo's update"


_LIMITS = {
    "max_parameters": "the more of them, the more of its records a model can hold",
    "max_upload_bytes": "the more of them leave in a round, the more they can tell",
    "max_rounds": "each further sum tells more of the same records",
    "max_epochs": "the longer it trains in a round, the more a delta tells of single records",
    "max_epsilon": "the promise to each record is weaker",
    "max_epsilon_alone": "silos that work together against this one learn more of each record",
    "max_model_value": "a model may be made for something else than to learn",
    "max_dp_delta": "the promise to each record is weaker",
}
"""Rules whose default is a limit, and what a higher one costs."""


def _above(rule: str, what: str, asked: int, most: int) -> Iterator[PolicyRefusal]:
    if asked > most:
        yield PolicyRefusal(
            rule, f"the plan asks for {asked} {what}, [policy] {rule} of this silo allows {most}: change one of them"
        )
