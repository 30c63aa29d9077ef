"""What a federation has come to: `coordinator status`, `rounds`, `privacy`, and `export` of a model."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from lorica_coordinator.commands.command_line import (
    AsJson,
    Dir,
    OnTheHost,
    enter_command,
    instant,
    load,
    reach,
    say,
)
from lorica_security.console.terminal import Page, terminal
from lorica_security.errors import ConfigurationError, LoricaError, StateError
from silo_wire.canonical import Digest
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

if TYPE_CHECKING:
    from lorica_coordinator.edges.operator_host.hub import Hub

EXACT_MATCH: Final = "exact match"
"""By what answers count where a coordinator does not say."""


def status(directory: Dir = None, as_json: AsJson = False) -> None:
    """Show where the plan and each silo stand."""
    reached = reach(directory)
    reply, groups = reached.ask(_status_and_groups)
    running = not isinstance(reached, OnTheHost) or reached.running
    proposed = groups.proposed_digest.hex()
    if as_json:
        print(json.dumps({"running": running, **_json(reply), "proposed_groups": proposed}, indent=2))
        return
    say(
        f"federation {reply.federation}: coordinator {reply.coordinator_version} (wire {reply.wire}) "
        f"{'running' if running else 'not running'}"
    )
    if reply.plan_digest:
        say(f"plan {reply.plan_name} ({reply.plan_digest.hex()[:16]}), round {reply.round} of {reply.rounds}")
    left = f", {reply.seconds_left:.0f} s left" if running and reply.seconds_left >= 0 else ""
    say(f"{reply.phase}{left}: {reply.detail}")
    if proposed:
        say(
            f"release groups {proposed} are proposed and wait for {groups.needed} signatures of: "
            f"{', '.join(groups.missing)} (coordinator groups show)"
        )
    rows = [
        (
            silo.silo,
            silo.state,
            f"{silo.fraction:.0%}" if silo.fraction and silo.state in ("training", "evaluating") else "",
            instant(silo.last_seen_unix_s),
            instant(silo.certificate_expires_unix_s),
            f"{silo.agent_version} (wire {silo.agent_wire})" if silo.agent_wire else "",
            silo.detail,
        )
        for silo in reply.silos
    ]
    if rows:
        columns = ("silo", "state", "progress", "last seen", "certificate expires", "agent", "detail")
        Page(columns=columns, rows=rows, remarks=True).show(terminal())


def rounds(
    directory: Dir = None,
    last: Annotated[int, typer.Option(min=0, help="Only the last ones; 0 for all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show each round: who took part, loss reduction, weight, share, scores."""
    reply = reach(directory).ask(lambda stub: stub.ListRounds(operator_pb2.ListRoundsRequest(last=last)))
    if as_json:
        print(json.dumps([{"score": reply.score or EXACT_MATCH, **_json(record)} for record in reply.rounds], indent=2))
        return
    if not reply.rounds:
        say("no round has been opened yet")
        return
    left = ("round", "outcome", "silo", "update")
    score = reply.score or EXACT_MATCH
    executed = any(silo.dev_executed for record in reply.rounds for silo in record.silos)
    right = ("examples", "loss reduction", "weight", "share", score, *(["execution"] if executed else []))
    rows = [
        (
            f"{record.round}.{record.attempt}",
            record.outcome,
            silo.silo,
            silo.outcome,
            str(silo.examples or ""),
            f"{silo.loss_reduction:.4f}" if silo.examples else "",
            f"{silo.weight:.2f}" if silo.weight else "",
            f"{silo.share:.1%}" if silo.weight else "",
            f"{silo.dev_exact_matches / silo.dev_examples:.1%}" if silo.dev_examples else "",
            *([f"{silo.dev_execution_matches / silo.dev_executed:.1%}" if silo.dev_executed else ""] * executed),
        )
        for record in reply.rounds
        for silo in record.silos
    ]
    Page(columns=(*left, *right), rows=rows, numbers=("round", *right), groups=2).show(terminal())
    for record in reply.rounds:
        if notes := notes_of(record, score=score):
            say(f"{record.round}.{record.attempt}: {'; '.join(notes)}")


def notes_of(record: operator_pb2.RoundRecord, *, score: str = EXACT_MATCH) -> list[str]:
    """What there is to say of an attempt beside its table; `score` is by what answers count."""
    notes = [record.detail] if record.detail else []
    notes += [f"{silo.silo} {silo.outcome}: {silo.detail}" for silo in record.silos if silo.detail]
    if record.micro_exact_match >= 0:
        macro = f"MacroAvg {record.macro_exact_match:.1%}, " if record.macro_exact_match >= 0 else ""
        notes.append(f"{score} {macro}MicroAvg {record.micro_exact_match:.1%}")
    if record.HasField("masked"):
        totals = record.masked
        notes.append(
            f"masked sum of weights {totals.weight_sum:.2f}, {totals.saturated} of {totals.coordinates} "
            "coordinates beyond their range"
        )
    notes += [f"{silo} weighs nothing: its loss did not fall" for silo in _without_weight(record)]
    if record.weight_fallback:
        notes.append("all weights were zero, sizes stood in")
    return notes


def _without_weight(record: operator_pb2.RoundRecord) -> list[str]:
    """Silos whose loss did not fall, so that their updates are in the round's model with a share of 0; where single
    silos are not shown, none. What a reducer left out has no weight either, and is none of these."""
    if record.outcome != "applied":
        return []
    weighed = [it for it in record.silos if it.examples and it.outcome != "refused"]
    return [it.silo for it in weighed if not it.weight and not it.loss_reduction > 0.0]


def privacy(directory: Dir = None, as_json: AsJson = False) -> None:
    """Show what was released under silo-level privacy with noise of the coordinator's, and what it comes to."""
    coordinator = load(directory)
    released = [
        (digest, plan, len(entries), None if plan is None else coordinator.releases.spent(plan))
        for digest, plan, entries in coordinator.released()
    ]
    if as_json:
        keys = ("target_epsilon", "dp_delta", "neighbouring_relation")
        rows = [
            {
                "plan": None if plan is None else plan.name,
                "digest": digest,
                "releases": count,
                "epsilon": epsilon,
                **{key: None if plan is None else getattr(plan.privacy, key) for key in keys},
            }
            for digest, plan, count, epsilon in released
        ]
        print(json.dumps(rows, indent=2))
        return
    for digest, plan, count, epsilon in released:
        if plan is None:
            print(f"plan {digest[:16]}: {count} sums of deltas; the release that made it tells what they come to")
            continue
        section = plan.privacy
        print(
            f"plan {plan.name} ({plan.digest[:16]}): {count} sums of deltas, epsilon {epsilon:.3g} of "
            f"{section.target_epsilon:g} at dp_delta {section.dp_delta:g}, unit: a silo "
            f"({section.neighbouring_relation})"
        )
    if not released:
        print("no sum was released with noise of the coordinator's")


def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    directory: Dir = None,
    latest: Annotated[bool, typer.Option("--latest", help="The last model instead of the best by MicroAvg.")] = False,
    push: Annotated[
        str, typer.Option(metavar="OWNER/NAME", help="Also to this repository of the Hugging Face Hub, private if new.")
    ] = "",
    public: Annotated[bool, typer.Option("--public", help="Push where everybody can read it.")] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File of mode 0600 with the Hub's token; else HF_TOKEN.", show_default=False)
    ] = None,
) -> None:
    """Write the plan's model as a Hugging Face folder that from_pretrained loads."""
    from lorica_coordinator.edges.operator_host.export_client import fetch_export, require_exported
    from lorica_security.on_disk.provenance import PROVENANCE_FILE

    if (public or token_file) and not push:
        raise ConfigurationError("--public and --token-file are for --push OWNER/NAME")
    hub = _hub(push, token_file, public=public) if push else None
    reached, again = reach(directory), hub is not None and (target / PROVENANCE_FILE).is_file()
    if again or isinstance(reached, OnTheHost):
        reply = reached.ask(lambda stub: stub.GetStatus(operator_pb2.GetStatusRequest()))
        chosen = reply.model_digest if latest else reply.best_model_digest
        if not chosen:
            raise StateError("no plan has been started, so there is no model: run coordinator plan start")
        name, plan, model = reply.plan_name, Digest(reply.plan_digest.hex()), Digest(chosen.hex())
        if again:
            require_exported(target, reached.coordinator_key, plan, model)
    if isinstance(reached, OnTheHost):
        to = {"pushed_to": hub.where} if hub else {}
        enter_command(reached.coordinator.folder, "export", plan=plan, model=model, folder=str(target), **to)
        if not again:
            reached.coordinator.export(plan, model, target)
    elif not again:
        name, model = reached.ask(lambda stub: fetch_export(stub, target, latest=latest), timeout_s=None)
    say(f"model {model[:16]} of plan {name} is in {target}")
    if hub is not None:
        from lorica_coordinator.edges.operator_host.hub import push as push_to

        try:
            commit = push_to(target, hub, message=f"Model {model[:16]} of plan {name}")
        except LoricaError:
            say(f"it was not pushed: {target} stays, and the same command, typed again, pushes it")
            raise
        say(f"and in {hub.where}, commit {commit}")


def _hub(repository: str, token_file: Path | None, *, public: bool) -> "Hub":
    """Before anything is exported: what is wrong with it is told at once."""
    from lorica_coordinator.edges.operator_host.hub import hub_of

    return hub_of(repository, token_file=token_file, public=public, environment=os.environ)


async def _status_and_groups(
    stub: "operator_pb2_grpc.OperatorAsyncStub",
) -> tuple[operator_pb2.StatusReply, operator_pb2.GroupsStanding]:
    reply = await stub.GetStatus(operator_pb2.GetStatusRequest())
    return reply, await stub.GetGroups(operator_pb2.GetGroupsRequest())


def _json(message: operator_pb2.StatusReply | operator_pb2.RoundRecord) -> dict[str, object]:
    from google.protobuf.json_format import MessageToDict

    value = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for key in ("plan_digest", "model_digest", "best_model_digest"):
        if key in value:
            value[key] = getattr(message, key).hex()
    return dict(value)
