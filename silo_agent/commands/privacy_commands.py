"""`silo-agent privacy`: what this silo has released under differential privacy, whether its ledger is whole, and what a
plan will cost."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from silo_agent.commands.command_line import Config, Dir, Json, chosen, credentials_of, open_journal, policy_of
from silo_agent.edges.disk.silo_folder import silo_folder

if TYPE_CHECKING:
    from pathlib import Path

    from lorica_security.privacy.accounting import Budget, NeighbouringRelation
    from lorica_security.privacy.ledger import Entry
    from silo_agent.service.counted_releases import CountedReleases
    from silo_agent.service.privacy import PrivacyGuard
    from silo_wire.plans.plan import Plan
    from silo_wire.plans.privacy import Release

privacy_app = typer.Typer(
    help="What this silo has released of its records, and what more it would cost.", no_args_is_help=True
)


@privacy_app.command()
def show(config: Config = None, directory: Dir = None, as_json: Json = False) -> None:
    """Print every release in the ledger, and what they come to together."""
    with _guarded(directory, config) as (guard, _):
        counted = guard.counted()
        spent = _spent(counted, shared=guard.sharing.shown)
    if as_json:
        print(json.dumps({"spent": spent, "releases": [_facts(entry) for entry in counted.own]}, indent=1))
        return
    for entry in counted.own:
        release = entry.release
        when = datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="minutes")
        print(
            f"{entry.sequence:>5}  {when}  plan {entry.plan[:12]} round {entry.round} attempt {entry.attempt}  "
            f"{entry.mechanism}: noise multiplier {release.noise_multiplier:.4g}, sampling rate "
            f"{release.sampling_rate:.4g}, {release.steps} "
            f"steps" + (f", noise of {release.makers} silos together" if release.makers > 1 else "")
        )
    print(_spent_line(spent))
    if spent["plans"]:
        print(_schedule_line(spent))
    if spent["releases_of_others"]:
        print(
            f"{spent['releases_of_others']} releases of other silo folders are in it, which train on some of the "
            f"same records ({spent['shared_budget']})"
        )


@privacy_app.command()
def verify(config: Config = None, directory: Dir = None) -> None:
    """Check that the ledger is whole, as far as its entries, the journal and the coordinator's newest receipt tell;
    offline."""
    with _guarded(directory, config) as (guard, _):
        counted, receipt = guard.counted(), guard.receipt()
        spent = _spent(counted, shared=guard.sharing.shown)
    entries = counted.own
    print(f"the ledger is whole: {len(entries)} entries, head {entries[-1].digest if entries else 'none'}")
    if receipt is None:
        print("countersigned by the coordinator: nothing yet")
    else:
        newest = receipt.newest
        print(
            f"countersigned by the coordinator: entry {newest.sequence}, {newest.digest}; its signature is right "
            f"({receipt.signature.hex()})"
        )
    print(_spent_line(spent))


@privacy_app.command()
def forecast(config: Config = None, directory: Dir = None, as_json: Json = False) -> None:
    """Print what the newest plan that was offered costs, and how many of its rounds the budget allows; exit with 8 if
    none."""
    from lorica_security.errors import PolicyRefusal, StateError
    from silo_agent.edges.disk.plan_store import PlanStore

    with _guarded(directory, config) as (guard, budget):
        counted = guard.counted()  # a ledger that is not whole is told of before anything else
        bundles = [
            bundle for bundle in PlanStore(silo_folder(directory).plans).bundles() if bundle.plan.releases_of_round
        ]
        if not bundles:
            raise StateError(
                "no plan with differential privacy was offered yet: silo-agent start fetches the coordinator's"
            )
        facts = _forecast(bundles[-1].plan, counted)
    print(json.dumps(facts, indent=1) if as_json else _forecast_text(facts, budget))
    if not facts["rounds_left"]:
        or_alone = "" if facts["after_all_rounds_alone"] is None else f", and max_epsilon_alone {budget.alone:g}"
        raise PolicyRefusal(
            "max_epsilon",
            f"a round of plan {facts['plan']} would take this silo to epsilon {facts['after_one_round']:.3g}, "
            f"[policy] max_epsilon allows {budget.epsilon:g}{or_alone}: the privacy budget is spent, and no round of "
            f"it is taken",
        )


def _forecast_text(facts: "dict[str, Any]", budget: "Budget") -> str:
    return (
        f"plan {facts['plan']}: {facts['rounds']} rounds, which promise epsilon {facts['target_epsilon']:g} at "
        f"dp_delta {facts['dp_delta']:g} ({facts['neighbouring_relation']})\n"
        f"one round more: epsilon {facts['after_one_round']:.3g} in all; every round: {facts['after_all_rounds']:.3g}\n"
        + (
            ""
            if facts["after_all_rounds_alone"] is None
            else "if all others whose noise counts worked against this silo: "
            f"{facts['after_all_rounds_alone']:.3g}, of {budget.alone:g}\n"
        )
        + f"the budget (epsilon {budget.epsilon:g} at dp_delta {budget.dp_delta:g}) allows {facts['rounds_left']} "
        "of them"
    )


def _forecast(plan: "Plan", counted: "CountedReleases") -> dict[str, Any]:
    unit = plan.privacy.unit_field

    def of(rounds: int) -> "list[Release]":
        return [(what, replace(release, steps=release.steps * rounds)) for what, release in plan.releases_of_round]

    low, high = 0, plan.schedule.rounds + 1  # the cost rises with every round
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counted.affords(of(middle), unit) else (low, middle)
    return {
        "plan": plan.name,
        "digest": plan.digest,
        "rounds": plan.schedule.rounds,
        "target_epsilon": plan.privacy.target_epsilon,
        "dp_delta": plan.privacy.dp_delta,
        "neighbouring_relation": plan.privacy.neighbouring_relation,
        "after_one_round": counted.epsilon(of(1), unit),
        "after_all_rounds": counted.epsilon(of(plan.schedule.rounds), unit),
        "after_all_rounds_alone": counted.epsilon_alone(of(plan.schedule.rounds), unit)
        if counted.joint(of(1))
        else None,
        "rounds_left": low,
    }


@contextmanager
def _guarded(directory: "Path | None", config: "Path | None") -> "Iterator[tuple[PrivacyGuard, Budget]]":
    from silo_agent.edges.accounts.privacy_ledger import guard_of
    from silo_agent.edges.accounts.shared_budget import sharing_of

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    policy = policy_of(folder, credentials, chosen(folder, None, None, config).settings(folder))
    with open_journal(folder, credentials) as journal:
        sharing = sharing_of(folder, policy.rules.shared_budget)
        yield guard_of(folder, credentials, policy, journal, sharing=sharing), policy.budget


def _facts(entry: "Entry") -> dict[str, object]:
    return {
        "sequence": entry.sequence,
        "at": entry.at,
        "federation": entry.federation,
        "plan": entry.plan,
        "round": entry.round,
        "attempt": entry.attempt,
        "mechanism": entry.mechanism,
        "noise_multiplier": entry.release.noise_multiplier,
        "sampling_rate": entry.release.sampling_rate,
        "steps": entry.release.steps,
        "digest": entry.digest,
    }


def _spent(counted: "CountedReleases", *, shared: str) -> dict[str, Any]:
    budget, entries = counted.budget, counted.entries
    return {
        "epsilon": counted.epsilon(),
        "epsilon_alone": counted.epsilon_alone() if counted.joint() else None,
        "max_epsilon_alone": budget.alone,
        "dp_delta": budget.dp_delta,
        "unit": budget.unit or "record",
        "neighbouring_relation": counted.relation(),
        "max_epsilon": budget.epsilon,
        "favoured_order": counted.orders()[0] if entries else 0,
        "as_one_schedule": counted.as_one_schedule(),
        "plans": len({entry.plan for entry in entries}),
        "shared_budget": shared,
        "releases_of_others": len(counted.others),
    }


def spent_of_allowed(guard: "PrivacyGuard") -> str:
    """For `silo-agent status`; a ledger that is not whole says so itself."""
    from lorica_security.errors import LoricaError

    try:
        return f"epsilon {guard.spent():.3g} of {guard.budget.epsilon:g}"
    except LoricaError as error:
        return f"not to be spent: {error}"


_NEIGHBOURS: Final[dict["NeighbouringRelation | None", str]] = {
    "add_or_remove_one": "for one {} more or less",
    "replace_one": "for one {} more or less, which replaces what it is a part of",
    None: "since something was released that is not private for each {} as a whole",
}


def _spent_line(spent: "dict[str, Any]") -> str:
    return (
        f"epsilon {spent['epsilon']:.3g} of {spent['max_epsilon']:g} is spent, at dp_delta {spent['dp_delta']:g}, "
        f"{_NEIGHBOURS[spent['neighbouring_relation']].format(spent['unit'])}"
        + (
            ""
            if spent["epsilon_alone"] is None
            else f"; {spent['epsilon_alone']:.3g} of {spent['max_epsilon_alone']:g} towards all others together, "
            "whose noise counts in it"
        )
    )


def _schedule_line(spent: "dict[str, Any]") -> str:
    several = spent["plans"] > 1
    return (
        f"{'forecast' if several else 'exact'}, as one schedule that was fixed beforehand: epsilon "
        f"{spent['as_one_schedule']:.3g}"
        + (
            f"; {spent['plans']} plans are in it, and the budget counts what holds whatever later ones were chosen by"
            if several
            else ""
        )
    )
