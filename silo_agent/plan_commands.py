"""`silo-agent plan`: what the coordinator offers, what this silo's policy says to it, and its people's approval."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silo_agent.command_line import (
    Config,
    Dir,
    Json,
    chosen,
    credentials_of,
    one_line,
    policy_of,
    tell_agent,
)
from silo_agent.edges.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from pathlib import Path

    from silo_agent.policy import SiloPolicy
    from silo_wire.canonical import Digest
    from silo_wire.plan import PlanBundle

plan_app = typer.Typer(help="Look at the plans that the coordinator offers, and approve them.", no_args_is_help=True)

Plan = Annotated[str, typer.Argument(metavar="DIGEST", help="All 64 characters.", show_default=False)]


@plan_app.command()
def show(plan: Plan = "", config: Config = None, directory: Dir = None, as_json: Json = False) -> None:
    """Print the plans that were offered to this silo, the newest last, and what its policy says to each."""
    from security.errors import StateError
    from silo_agent.edges.plan_store import PlanStore

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
def approve(plan: Plan = "", config: Config = None, directory: Dir = None) -> None:
    """Let a plan run here where [policy] approved_plans = "ask"; without DIGEST, the one that waits now."""
    from security.audit.entry import Event
    from security.errors import ConfigurationError
    from silo_agent.edges.audit_log import audited
    from silo_agent.edges.plan_approvals import PlanApprovals
    from silo_agent.edges.plan_store import PlanStore

    folder, policy = _policy(directory, config)
    store = PlanStore(folder.plans)
    digest = _digest(plan) if plan else _waiting(store.refused(), policy)
    if isinstance(policy.rules.approved_plans, list):
        raise ConfigurationError(
            f"[policy] approved_plans of silo.toml lists the plans that may run here: add {digest} there and restart the "
            'agent, or set it to "ask"'
        )
    bundle = store.load(digest)
    with audited(folder, credentials_of(folder)) as log:
        log.append(Event.PLAN_APPROVED, plan=digest, name=bundle.plan.name if bundle else "")
    PlanApprovals(folder.approvals).approve(digest, name=bundle.plan.name if bundle else None)
    print(f"plan {bundle.plan.name if bundle else '(not offered here yet)'} {digest} is approved; {tell_agent(folder)}")
    if policy.rules.approved_plans == "any":
        print('[policy] approved_plans is "any": plans run here without approval, unless another rule refuses them')
    for objection in policy.objections(bundle) if bundle else ():
        print(f"it is still refused by {objection.rule}: {objection}")


def _policy(directory: "Path | None", config: "Path | None") -> "tuple[SiloFolder, SiloPolicy]":
    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    settings = chosen(folder, None, None, config).settings(folder)
    return folder, policy_of(folder, credentials, settings)


def _waiting(bundle: "PlanBundle | None", policy: "SiloPolicy") -> "Digest":
    """The plan that is offered now and that nothing keeps from running but approval, or this and other rules."""
    from security.errors import StateError

    rules = [] if bundle is None else [objection.rule for objection in policy.objections(bundle)]
    if bundle is None or not rules:
        raise StateError("no plan waits for approval here: `silo-agent plan show` prints those that were offered")
    if "approved_plans" not in rules:
        raise StateError(
            f"plan {bundle.plan.name} does not wait for approval: it is refused by {', '.join(rules)} of [policy]"
        )
    return bundle.plan.digest


def _digest(text: str) -> "Digest":
    from security.errors import ConfigurationError, MalformedMessage
    from silo_wire.canonical import digest_from_wire

    try:
        return digest_from_wire(bytes.fromhex(text), "plan digest")
    except (ValueError, MalformedMessage):
        raise ConfigurationError(
            f"{text[:80]!r} is not the digest of a plan, 64 of 0-9 and a-f: copy it from `silo-agent plan show`, or "
            "from the operator's `coordinator plan show`"
        ) from None


def _facts(bundle: "PlanBundle", policy: "SiloPolicy") -> dict[str, Any]:
    from silo_agent import plan_review as review

    plan = bundle.plan
    wanted = plan.aggregation
    masks = {
        "min_cohort": plan.schedule.min_silos,
        "threshold": wanted.threshold,
        "colluders": wanted.colluders,
        "min_survivors": wanted.min_survivors,
    }
    return {
        "name": plan.name,
        "digest": plan.digest,
        "model": one_line(plan.model.source),
        "parameters": plan.model.parameters,
        "base_parameters": bundle.base_layout.parameters if bundle.base_layout else 0,
        "update_bytes": bundle.update_bytes,
        "rounds": plan.schedule.rounds,
        "min_silos": plan.schedule.min_silos,
        "epochs": plan.training.for_silo(policy.silo).epochs,
        "training": review.common_settings(plan),
        "overrides": [
            {"silo": it.silo, "changes": dict(it.changes), "work": [float(it.least), float(it.most)]}
            for it in review.overrides(plan)
        ],
        "server": review.server_settings(plan),
        "scores": review.score_settings(plan),
        "unusual": list(review.unusual(plan)),
        "weighting": wanted.weighting,
        "secure_aggregation": masks if wanted.secure_aggregation else None,
        "refused_by": [{"rule": objection.rule, "detail": str(objection)} for objection in policy.objections(bundle)],
        "tensors": {tensor.name: tensor.elements for tensor in bundle.layout.tensors},
    }


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
    frozen = f", adapters of {facts['base_parameters']:,} that stay as they are" if facts["base_parameters"] else ""
    rows = {
        "digest": facts["digest"],
        "model": f"{facts['model']}, {facts['parameters']:,} parameters in {len(facts['tensors'])} tensors{frozen}",
        "rounds": f"{facts['rounds']}, of at least {facts['min_silos']} silos",
        "training here": f"{facts['epochs']} epochs in a round",
        "leaves this silo": f"{facts['update_bytes']:,} bytes of an update in a round",
        "weighting": facts["weighting"],
        "secure aggregation": aggregation,
    }
    lines = [f"plan {facts['name']}", *(f"{name:<20} {value}" for name, value in rows.items())]
    for name in ("training", "server", "scores"):
        lines += [f"{name:<20} {key} = {json.dumps(value)}" for key, value in facts[name].items()]
    lines += [f"{'override':<20} {_override(one)}" for one in facts["overrides"]]
    lines += [f"{'! unusual':<20} {line}" for line in facts["unusual"]]
    refusals = [f"refused by {refusal['rule']}: {refusal['detail']}" for refusal in facts["refused_by"]]
    lines += [f"{'policy':<20} {verdict}" for verdict in refusals or ["allowed"]]
    return "\n".join(lines)


def _override(one: dict[str, Any]) -> str:
    """Of one silo, also of another one: what it does differently, and how much it works beside the common values."""
    least, most = one["work"]
    times = f"{most:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
    changes = ", ".join(f"{key} = {json.dumps(value)}" for key, value in one["changes"].items()) or "nothing changed"
    return f"{one['silo']}: {changes}; {times} times the common learning rate x optimizer steps"
