"""`silo-agent plan`: what the coordinator offers, what this silo's policy says to it, and its people's approval."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silo_agent.commands.command_line import (
    Config,
    Dir,
    Json,
    chosen,
    one_line,
    policy_of,
    settled_credentials_of,
    tell_agent,
)
from silo_agent.edges.disk.plan_approvals import Comparison
from silo_agent.edges.disk.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from silo_agent.edges.disk.plan_store import PlanStore
    from silo_agent.policy.record import Lineage
    from silo_agent.policy.silo_policy import SiloPolicy
    from silo_wire.canonical import Digest
    from silo_wire.plans.plan import PlanBundle

plan_app = typer.Typer(help="Look at the plans that the coordinator offers, and approve them.", no_args_is_help=True)

Plan = Annotated[
    str,
    typer.Argument(metavar="DIGEST", help="All 64 characters, as `plan show` prints them.", show_default=False),
]

SECTIONS = (
    *("schedule", "task", "training", "semi_supervised"),
    *("adapters", "wire", "privacy", "aggregation", "evaluation"),
)
"""Of a plan, as `show` prints them: keys that touch training or what leaves."""


@plan_app.command()
def show(plan: Plan = "", config: Config = None, directory: Dir = None, as_json: Json = False) -> None:
    """Print the plans that were offered to this silo, the newest last, and what its policy says to each."""
    from lorica_security.errors import StateError
    from silo_agent.edges.disk.plan_store import PlanStore

    folder, policy = _policy(directory, config)
    store = PlanStore(folder.plans)
    if plan:
        digest = _digest(plan)
        bundle = store.load(digest)
        if bundle is None:
            raise StateError(f"plan {digest} is not here: `silo-agent plan show` prints those that were offered")
        bundles = [bundle]
    else:
        bundles = list(store.bundles())
    facts = [_facts(bundle, policy) for bundle in bundles]
    if as_json:
        print(json.dumps(facts, indent=1))
    elif not facts:
        print("no plan was offered yet: silo-agent start fetches the one that the coordinator has")
    else:
        print("\n\n".join(_described(one) for one in facts))


@plan_app.command()
def approve(
    plan: Plan,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A copy of the plan's initial model that this silo's people fetched themselves."),
    ] = None,
    without: Annotated[
        bool,
        typer.Option(
            "--without-comparing-the-model",
            help="Take the operator's word for the initial model; the audit log says so.",
        ),
    ] = False,
    although: Annotated[
        list[str] | None,
        typer.Option(
            "--although",
            metavar="OTHER",
            help="Also beside this plan, under which this silo has masked; more than once.",
        ),
    ] = None,
    config: Config = None,
    directory: Dir = None,
) -> None:
    """Let the plan of this digest run here where [policy] approved_plans = "ask".

    The initial model of a plan with masks is compared first, its parameters bit for bit, its configuration and its
    tokenizer: with --model, or, where the plan's size and seed make it, by making it again.
    """
    from lorica_security.audit.entry import Event
    from lorica_security.identity.seal import Seal
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.edges.disk.plan_approvals import PlanApprovals
    from silo_agent.edges.disk.plan_store import PlanStore

    folder, policy = _policy(directory, config)
    store = PlanStore(folder.plans)
    digest = _digest(plan)
    others = [_digest(other) for other in although or ()]
    bundle = store.load(digest)
    listed = isinstance(policy.rules.approved_plans, list)
    _require_pairs_that_are(others, digest, policy)
    if listed and not others:
        _refuse_listed(bundle, digest, policy)
    comparison, added = _compared(bundle, digest, policy, model, without=without)
    if bundle is not None:
        _require_pairs_approved(bundle, policy, store, others)
    name = bundle.plan.name if bundle else ""
    credentials = settled_credentials_of(folder)
    with audited(folder, credentials) as log:
        log.append(
            Event.PLAN_APPROVED,
            plan=digest,
            name=name,
            model=comparison.value,
            initial=bundle.plan.initial_model if bundle else "",
            although=" ".join(others),
        )
    PlanApprovals(folder.approvals, Seal(credentials.identity_key)).approve(
        digest, name=name or None, model=comparison, although=others, of_pair_alone=listed
    )
    print(f"plan {name or '(not offered here yet)'} {digest} is approved; {tell_agent(folder)}")
    if comparison is not Comparison.NONE:
        print(f"its initial model was {comparison.value}, and so were its configuration and its tokenizer")
        if added:
            print(
                f"beside the copy's its tokenizer has {len(added)} tokens: "
                f"{one_line(json.dumps(added, ensure_ascii=False))}"
            )
    elif bundle is None or bundle.plan.aggregation.secure_aggregation:
        print(_UNCOMPARED)
    if policy.rules.approved_plans == "any":
        print('[policy] approved_plans is "any": plans run here without approval, unless another rule refuses them')
    for objection in policy.objections(bundle) if bundle else ():
        print(f"it is still refused by {objection.rule}: {objection}")


_UNCOMPARED = "its initial model was not compared: one that was made for it can single out one silo in a sum"


def _compared(
    bundle: "PlanBundle | None", digest: "Digest", policy: "SiloPolicy", model: Path | None, *, without: bool
) -> tuple[Comparison, Sequence[str]]:
    """How the initial model was compared, now or at an earlier approval, and what the plan's tokenizer has beside the
    copy's.

    Raises where it was not, and `without` does not say so.
    """
    from lorica_security.errors import ConfigurationError, StateError

    if without:
        if model is not None:
            raise ConfigurationError("--model and --without-comparing-the-model exclude each other: give one of them")
        return Comparison.NONE, ()
    if bundle is None:
        raise StateError(
            f"plan {digest} is not here, and its initial model cannot be compared: start silo-agent, and approve "
            "the plan when it is offered, or give --without-comparing-the-model"
        )
    if model is None and not bundle.plan.aggregation.secure_aggregation:
        return Comparison.NONE, ()  # the coordinator sees each update anyhow
    from silo_agent.training.model.initial_model import compare, is_from_seed

    if model is not None:
        return Comparison.COPY, compare(bundle, model.absolute())
    if digest in policy.record().compared:
        return Comparison.EARLIER, ()
    if is_from_seed(bundle):
        return Comparison.SEED, compare(bundle, None)
    source, plan = bundle.plan.model.source, bundle.plan
    before = next((it.name for it in policy.record().lineages if it.round and it.led_to(plan.initial_model)), None)
    had = "" if before is None else f" Its parameters are those of a model that this silo had under plan {before}."
    raise ConfigurationError(
        f"plan {plan.name} begins from {source}, which was not compared.{had} Fetch a copy of it by a way of your "
        f"own and give its folder, with `{policy.approve_command(bundle)}`; or give --without-comparing-the-model in "
        f"place of it, which the audit log tells of"
    )


def _refuse_listed(bundle: "PlanBundle | None", digest: "Digest", policy: "SiloPolicy") -> None:
    from lorica_security.errors import ConfigurationError

    pair = next(policy.kin(bundle), None) if bundle else None
    if pair is not None and digest in policy.rules.approved_plans:
        return  # the list does not speak of pairs: what follows shows which one waits
    raise ConfigurationError(
        f"[policy] approved_plans of silo.toml lists the plans that may run here: add {digest} there and restart the "
        'agent, or set it to "ask"'
    )


def _require_pairs_that_are(others: "list[Digest]", digest: "Digest", policy: "SiloPolicy") -> None:
    from lorica_security.errors import StateError

    masked = {it.plan for it in policy.record().lineages if it.round and it.plan != digest}
    for other in others:
        if other not in masked:
            raise StateError(
                f"--although {other} names no other plan that this silo has masked under: nothing was approved"
            )


def _require_pairs_approved(
    bundle: "PlanBundle", policy: "SiloPolicy", store: "PlanStore", others: "list[Digest]"
) -> None:
    """Show what each plan that this one must be approved beside differs in; raises PolicyRefusal for one that `others`
    lacks."""
    refused = None
    for other, refusal in policy.kin(bundle):
        print(_pair(bundle, other, store.load(other.plan)))
        if other.plan not in others:
            refused = refused or refusal
    if refused is not None:
        raise refused


def _pair(bundle: "PlanBundle", other: "Lineage", before: "PlanBundle | None") -> str:
    """Two plans whose sums may be of updates from one model, in words and as a difference of their settings."""
    lines = [
        f"this silo masked under plan {other.name} ({other.plan}) up to round {other.round}; plan {bundle.plan.name} "
        + (
            "begins from a model that this silo had under it, as a plan does that goes on where another ended."
            if other.led_to(bundle.plan.initial_model)
            else "may begin from the same model."
        ),
        "What may be learnt: the difference of two sums. If all but one silo do the same work under both, it is "
        "that one's update.",
    ]
    if before is None:
        return "\n".join([*lines, f"what {other.name or 'that plan'} says is not here any more"])
    old, new = (dict(_settings(it.plan.model_dump(mode="json"))) for it in (before, bundle))
    changed = [
        f"  {key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return "\n".join([*lines, *changed])


def _settings(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, object]]:
    """Every setting of a plan under its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def _shown(value: object) -> str:
    return "not set" if value is None else one_line(json.dumps(value, ensure_ascii=False))


def _policy(directory: Path | None, config: Path | None) -> "tuple[SiloFolder, SiloPolicy]":
    folder = silo_folder(directory)
    credentials = settled_credentials_of(folder)
    settings = chosen(folder, None, None, config).settings(folder)
    return folder, policy_of(folder, credentials, settings)


def _digest(text: str) -> "Digest":
    from lorica_security.errors import ConfigurationError, MalformedMessage
    from silo_wire.canonical import digest_from_wire

    try:
        return digest_from_wire(bytes.fromhex(text), "plan digest")
    except (ValueError, MalformedMessage):
        raise ConfigurationError(
            f"{text[:80]!r} is not the digest of a plan, 64 of 0-9 and a-f: copy it from `silo-agent plan show`, or "
            "from the operator's `coordinator plan show`"
        ) from None


def _facts(bundle: "PlanBundle", policy: "SiloPolicy") -> dict[str, Any]:
    from silo_agent.commands import plan_review as review

    plan = bundle.plan
    wanted = plan.aggregation
    masks = {
        "min_cohort": plan.smallest_cohort,
        "threshold": wanted.threshold,
        "colluders": wanted.colluders,
        "min_survivors": wanted.min_survivors,
    }
    return {
        "name": plan.name,
        "digest": plan.digest,
        "model": one_line(plan.model.source),
        "revision": one_line(plan.model.revision),
        "initial": plan.initial_model,
        "base": plan.model.base,
        "weights": plan.model.weights,
        "files": plan.model.files,
        "compared": plan.digest in policy.record().compared,
        "to_allow": policy.approve_command(bundle) if policy.waits_for_command(bundle) else None,
        "parameters": plan.model.parameters,
        "base_parameters": bundle.base_layout.parameters if bundle.base_layout else 0,
        "update_bytes": bundle.update_bytes,
        "rounds": plan.schedule.rounds,
        "min_silos": plan.schedule.min_silos,
        "epochs": plan.training.for_silo(policy.silo).epochs,
        "steps": plan.privacy.steps if plan.privacy.level == "record" else plan.training.steps,
        **review.settings(plan),
        "overrides": [
            {"silo": it.silo, "changes": dict(it.changes), "work": [float(it.least), float(it.most)]}
            for it in review.overrides(plan)
        ],
        "scores_leave": review.scores_leave(plan, tells_scores=policy.tells_scores, silo=policy.silo),
        "part": review.part(bundle, policy.silo),
        "unusual": list(review.unusual(bundle)),
        "weighting": wanted.weighting,
        "secure_aggregation": masks if wanted.secure_aggregation else None,
        "refused_by": [{"rule": objection.rule, "detail": str(objection)} for objection in policy.objections(bundle)],
        "tensors": {tensor.name: tensor.elements for tensor in bundle.layout.tensors},
    }


def _vouched(facts: dict[str, Any]) -> str:
    """Who can say that the initial model is what the plan calls it."""
    kind = facts["model"].partition(":")[0]
    revision = f"revision {facts['revision']}" if facts["revision"] else "no revision is named"
    said = {
        "size": "random under the plan's seed: plan approve makes it again",
        "hub": f"{revision}, as the operator says: fetch your own copy for plan approve --model",
    }.get(kind, "from a folder of the operator's: nobody else can vouch for it")
    return f"{said}; {'was compared here' if facts['compared'] else 'was not compared here so far'}"


def _described(facts: dict[str, Any]) -> str:
    masks = facts["secure_aggregation"]
    if masks is None:
        aggregation = "no: the coordinator sees this silo's update"
    else:
        threshold = masks["threshold"] or "more than two thirds"
        aggregation = (
            f"yes: cohorts of at least {masks['min_cohort']} silos, threshold {threshold}, "
            f"{masks['colluders']} colluders, sums of at least {masks['min_survivors']}"
        )
    steps = f"{facts['steps']} optimizer steps in a round, over however few examples"
    frozen = f", adapters of {facts['base_parameters']:,} that stay as they are" if facts["base_parameters"] else ""
    rows = {
        "digest": facts["digest"],
        "model": f"{facts['model']}, {facts['parameters']:,} parameters in {len(facts['tensors'])} tensors{frozen}",
        "initial model": f"{facts['base'] or facts['initial']}, {_vouched(facts)}",
        **{f"SHA-256 of {name}": digest for name, digest in facts["weights"].items()},
        **{f"digest of {name}": digest for name, digest in facts["files"].items()},
        "rounds": f"{facts['rounds']}, of at least {facts['min_silos']} silos",
        "training here": steps if facts["steps"] else f"{facts['epochs']} epochs in a round",
        **({"part of this silo": facts["part"]} if facts["part"] else {}),
        "leaves this silo": f"{facts['update_bytes']:,} bytes of an update in a round; {facts['scores_leave']}",
        "weighting": facts["weighting"],
        "secure aggregation": aggregation,
    }
    lines = [f"plan {facts['name']}", *(f"{name:<20} {value}" for name, value in rows.items())]
    for name in SECTIONS:
        lines += [f"{name:<20} {key} = {json.dumps(value)}" for key, value in facts[name].items()]
    lines += [f"{'override':<20} {_override(one)}" for one in facts["overrides"]]
    lines += [f"{'! unusual':<20} {line}" for line in facts["unusual"]]
    refusals = [f"refused by {refusal['rule']}: {refusal['detail']}" for refusal in facts["refused_by"]]
    lines += [f"{'policy':<20} {verdict}" for verdict in refusals or ["allowed"]]
    if facts["to_allow"] is not None:
        lines.append(f"{'to allow it':<20} {facts['to_allow']}")
    return "\n".join(lines)


def _override(one: dict[str, Any]) -> str:
    """Of one silo, also of another one: what it does differently, and how much it works beside the common values."""
    least, most = one["work"]
    times = f"{most:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
    changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in one["changes"].items()) or "nothing changed"
    return f"{one['silo']}: {changes}; {times} times the common learning rate x optimizer steps"
