"""The `coordinator` command. Commands that only look or invite start in a moment; torch is imported where it is needed."""

import asyncio
import json
import os
import sys
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from coordinator.commands.access_commands import access_app
from coordinator.commands.audit_commands import audit_app
from coordinator.commands.authority_commands import ca_app
from coordinator.commands.command_line import (
    AsJson,
    Dir,
    OnTheHost,
    enter_command,
    instant,
    load,
    own_folder,
    reach,
    say,
    whole_seconds,
)
from coordinator.commands.completion import plan_names, silo_names
from coordinator.commands.groups_commands import groups_app
from coordinator.commands.upkeep_commands import backup, gc, restore, upgrade
from coordinator.commands.watch_command import watch
from coordinator.composition import Coordinator, disks, load_keys, serve
from coordinator.edges.check.told_address import loopback_alone, own_hosts, warning
from coordinator.edges.keys.coordinator_folder import CoordinatorFolder, remember, undo_init
from coordinator.edges.keys.key_store import KeyStore, key_files
from coordinator.edges.operator_host.export_client import fetch_export
from coordinator.edges.status_page.entrance import is_loopback
from coordinator.edges.telemetry.logs import log_to_stderr
from coordinator.plans.forecast import forecast
from coordinator.rounds.which_plan import DEFAULT_PLAN
from coordinator.service.members.enrolment import MAX_VALID_SECONDS
from coordinator.settings import ENROLMENT_PORT, METRICS_PORT, SILOS_PORT, STATUS_PORT, settings_text
from lorica_security.console.terminal import Page, list_whole_summaries, terminal
from lorica_security.errors import ConfigurationError, LoricaError, StateError, exit_code
from lorica_security.host import ballast, files, key_file
from lorica_security.host.private_memory import keep_memory_private
from lorica_security.host.process_lock import ProcessLock
from lorica_security.host.program import begin_program
from lorica_security.host.software_version import software_version
from lorica_security.identifiers import Role, federation_name
from lorica_security.identity.enrolment_token import decode
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan
from silo_wire.transport import keep_chunks_in_memory
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

DEFAULT_SIZE = "mini"

PlanName = Annotated[str, typer.Argument(autocompletion=plan_names)]

app = typer.Typer(
    help="Run the coordinator of a federation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name [sections] of files
)
plan_app = typer.Typer(help="Make, look at, start and stop plans.", no_args_is_help=True)
app.add_typer(plan_app, name="plan")
app.add_typer(access_app, name="access")
app.add_typer(groups_app, name="groups")
app.add_typer(ca_app, name="ca")
app.add_typer(audit_app, name="audit")
keys_app = typer.Typer(help="The private keys on this disk.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


def _say_version(asked: bool) -> None:
    if asked:
        print(f"coordinator {software_version()}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run the coordinator of a federation."""


def main() -> None:
    """Entry point: an error of Lorica is one line on stderr and its exit code (ops/docs/exit-codes.md)."""
    begin_program()
    try:
        app()
    except LoricaError as error:
        terminal(stderr=True).print(f"error: {error}", soft_wrap=True)
        sys.exit(exit_code(error))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    federation: Annotated[str, typer.Option(help="Name of the federation; it stands in every certificate.")] = "",
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which silos reach this host; repeatable.")
    ] = None,
    silos_port: Annotated[int, typer.Option(help="Port for silos and operators.")] = SILOS_PORT,
    enrolment_port: Annotated[int, typer.Option(help="Port for enrolment.")] = ENROLMENT_PORT,
    metrics_host: Annotated[
        str, typer.Option(help="Address of /metrics: loopback, or one that your monitoring alone reaches.")
    ] = "127.0.0.1",
    metrics_port: Annotated[int, typer.Option(help="Port of /metrics.")] = METRICS_PORT,
    status_host: Annotated[
        str,
        typer.Option(help="Address of the status page; on any but loopback it asks for a certificate or the token."),
    ] = "127.0.0.1",
    status_port: Annotated[int, typer.Option(help="Port of the status page; 0 for none.")] = STATUS_PORT,
    status_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of the status page; not on loopback.", show_default=False),
    ] = None,
    plan: Annotated[bool, typer.Option(help="Also make the plan 'default', a small model from scratch.")] = True,
) -> None:
    """Make a coordinator: its authority, its keys, federation.toml, an empty state."""
    folder = CoordinatorFolder(directory.absolute())
    undo_init(folder)
    if folder.settings.exists():
        raise ConfigurationError(
            f"{folder.root} is not empty, it holds a coordinator: go on with it, or choose a new folder"
        )
    if folder.root.exists() and any(folder.root.iterdir()):
        raise ConfigurationError(f"{folder.root} is not empty: choose a new folder")
    if status_token_file is not None and is_loopback(status_host):
        raise ConfigurationError(
            f"--status-token-file {status_token_file} is for a page on another address than {status_host}, where nobody is asked for "
            "a token: give --status-host as well, or leave it out"
        )
    name = federation_name(federation or _name_from(folder.root.name))
    text = settings_text(
        name,
        host or own_hosts(),
        silos_port=silos_port,
        enrolment_port=enrolment_port,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        status_host=status_host,
        status_port=status_port,
        status_token_file=str(status_token_file.absolute()) if status_token_file else "",
    )
    files.make_private_folder(folder.root)
    files.mark(folder.begun)
    KeyStore.create(folder.keys, name, datetime.now(UTC))
    files.replace(folder.settings, text.encode())
    folder.begun.unlink()
    coordinator = Coordinator.load(folder)
    coordinator.keys.operator_pair(datetime.now(UTC))  # commands find it also while the coordinator starts
    coordinator.open_store().close()
    remember(folder.root)
    say(f"federation {name} is in {folder.root}; silos reach it at {coordinator.settings.public.hosts[0]}")
    if plan:
        say("making the plan 'default' (a small model from scratch) ...")
        _create_plan(coordinator, DEFAULT_PLAN, size=DEFAULT_SIZE)
    settings = coordinator.settings
    _warn_of(settings.public.hosts[0], settings.public_silos_port)
    say("next: coordinator invite SILO, for each; then coordinator serve")


@app.command()
def invite(
    silo: Annotated[
        str,
        typer.Argument(help="Name of the silo: a-z, 0-9 and '-'.", show_default=False, autocompletion=silo_names),
    ],
    hours: Annotated[
        float | None, typer.Option(help="How long the token can be used; default from federation.toml.")
    ] = None,
    directory: Dir = None,
) -> None:
    """Print a one-time enrolment token for a silo, on stdout alone."""
    seconds = whole_seconds(hours, unit_s=3600, most=MAX_VALID_SECONDS, of_what="an invitation")
    wanted = operator_pb2.InviteRequest(silo=silo, valid_seconds=seconds)
    reached = reach(directory)
    reply = reached.ask(lambda stub: stub.Invite(wanted))
    if not (isinstance(reached, OnTheHost) and loopback_alone(reached.coordinator.settings)):
        told = decode(reply.token)
        _warn_of(told.host, told.port)
    expires = datetime.fromtimestamp(reply.expires_unix_s, UTC).isoformat(timespec="minutes")
    terminal(stderr=True).print(f"for silo {silo}, once, until {expires}: silo-agent enroll TOKEN", soft_wrap=True)
    print(reply.token)


@app.command(name="serve")
def serve_command(
    directory: Dir = None,
    plan: Annotated[
        str,
        typer.Option(help="Plan that silos prepare as soon as they connect; '' for none.", autocompletion=plan_names),
    ] = DEFAULT_PLAN,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the coordinator until it is stopped."""
    keep_memory_private()
    keep_chunks_in_memory()
    where = log_to_stderr(log_level, libraries=True)
    coordinator = load(directory)
    if plan == DEFAULT_PLAN and plan not in coordinator.shelf.names():
        plan = ""
    for disk in disks(coordinator):
        ballast.keep(disk)
    with ProcessLock(coordinator.folder.lock, "coordinator"):
        asyncio.run(serve(coordinator, offer=plan, ready=_announce(coordinator), where=where))


@app.command()
def revoke(
    name: Annotated[
        str,
        typer.Argument(help="Of the silo, operator or viewer.", show_default=False, autocompletion=silo_names),
    ],
    role: Annotated[str, typer.Option(help="silo, operator or viewer.")] = Role.SILO.value,
    directory: Dir = None,
) -> None:
    """Shut somebody out at once: open calls are cut, certificates refused. A silo comes back by a new invitation."""
    reply = reach(directory).ask(lambda stub: stub.Revoke(operator_pb2.RevokeRequest(role=role, name=name)))
    say(reply.detail)


@app.command()
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
            f"release groups {proposed} are proposed and wait for {groups.needed} signatures of: {', '.join(groups.missing)} "
            "(coordinator groups show)"
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


app.command()(watch)


@app.command()
def check(
    directory: Dir = None,
    plan: Annotated[str, typer.Option(help="Plan to hold it to; default: the one under way, else 'default'.")] = "",
    as_json: AsJson = False,
) -> None:
    """Look at everything that could keep this federation from working; exit with 3 if something does."""
    from coordinator.edges.check.found import Ground
    from coordinator.edges.check.preflight import preflight
    from lorica_security.console.preflight import failures
    from lorica_security.console.preflight_page import check_json, check_page

    folder = own_folder(directory)
    checks = preflight(
        Ground(
            folder=folder, keys=lambda settings: load_keys(folder, settings), now=lambda: datetime.now(UTC), plan=plan
        )
    )
    if as_json:
        print(check_json(checks))
    else:
        check_page(checks, f"coordinator check of {folder.root}").show(terminal())
    if problem := failures(checks):
        raise problem


@keys_app.callback()
def keys() -> None:
    """The private keys on this disk."""


@keys_app.command(name="protect")
def keys_protect(
    directory: Dir = None,
    clear: Annotated[bool, typer.Option("--clear", help="Leave the keys in clear instead.")] = False,
) -> None:
    """Encrypt the private keys with the passphrase of LORICA_NEW_KEY_PASSPHRASE[_FILE], whatever they are encrypted with now."""
    folder = own_folder(directory)
    key_file.settle(folder.keys, folder.lock, "coordinator")
    with ProcessLock(folder.lock, "coordinator"):
        tell = partial(enter_command, folder, "keys protect", clear="yes" if clear else "no")
        print(key_file.protect_all(key_files(folder.keys), os.environ, clear=clear, tell=tell))


@app.command()
def rounds(
    directory: Dir = None,
    last: Annotated[int, typer.Option(min=0, help="Only the last ones; 0 for all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show each round: who took part, loss reduction, weight, share, scores."""
    reply = reach(directory).ask(lambda stub: stub.ListRounds(operator_pb2.ListRoundsRequest(last=last)))
    if as_json:
        print(json.dumps([_json(record) for record in reply.rounds], indent=2))
        return
    if not reply.rounds:
        say("no round has been opened yet")
        return
    left = ("round", "outcome", "silo", "update")
    right = ("examples", "loss reduction", "weight", "share", "exact match", "execution")
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
            f"{silo.dev_execution_matches / silo.dev_executed:.1%}" if silo.dev_executed else "",
        )
        for record in reply.rounds
        for silo in record.silos
    ]
    Page(columns=(*left, *right), rows=rows, numbers=("round", *right), groups=2).show(terminal())
    for record in reply.rounds:
        notes = [record.detail] if record.detail else []
        notes += [f"{silo.silo} {silo.outcome}: {silo.detail}" for silo in record.silos if silo.detail]
        if record.micro_exact_match >= 0:
            macro = f"MacroAvg {record.macro_exact_match:.1%}, " if record.macro_exact_match >= 0 else ""
            notes.append(f"exact match {macro}MicroAvg {record.micro_exact_match:.1%}")
        if record.HasField("masked"):
            totals = record.masked
            notes.append(
                f"masked sum of weights {totals.weight_sum:.2f}, {totals.saturated} of {totals.coordinates} coordinates beyond their range"
            )
        if record.weight_fallback:
            notes.append("all weights were zero, sizes stood in")
        if notes:
            say(f"{record.round}.{record.attempt}: {'; '.join(notes)}")


@app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    directory: Dir = None,
    latest: Annotated[bool, typer.Option("--latest", help="The last model instead of the best by MicroAvg.")] = False,
) -> None:
    """Write the plan's model as a Hugging Face folder that from_pretrained loads."""
    reached = reach(directory)
    if isinstance(reached, OnTheHost):
        coordinator = reached.coordinator
        reply = reached.ask(lambda stub: stub.GetStatus(operator_pb2.GetStatusRequest()))
        chosen = reply.model_digest if latest else reply.best_model_digest
        if not chosen:
            raise StateError("no plan has been started, so there is no model: run coordinator plan start")
        name, model = reply.plan_name, Digest(chosen.hex())
        enter_command(coordinator.folder, "export", plan=reply.plan_digest.hex(), model=model, folder=str(target))
        coordinator.export(Digest(reply.plan_digest.hex()), model, target)
    else:
        name, model = reached.ask(lambda stub: fetch_export(stub, target, latest=latest), timeout_s=None)
    say(f"model {model[:16]} of plan {name} is in {target}")


@plan_app.command(name="new")
def plan_new(
    name: Annotated[str, typer.Argument(help="Name of the plan: a-z, 0-9 and '-'.", show_default=False)],
    size: Annotated[str, typer.Option(help="Begin a model of this size from scratch.")] = "",
    model: Annotated[Path | None, typer.Option(help="Begin with a Hugging Face folder.")] = None,
    hub: Annotated[str, typer.Option(help="Begin with a model of the Hugging Face Hub: NAME or NAME@REVISION.")] = "",
    preset: Annotated[str, typer.Option(help="default, paper-text or paper-code.")] = "default",
    seed: Annotated[int, typer.Option(min=0, help="Seed of initialisation and data order.")] = 0,
    vocabulary: Annotated[int | None, typer.Option(help="Pieces of the tokenizer, with --size.")] = None,
    tokenizer_text: Annotated[Path | None, typer.Option(help="PUBLIC text for the tokenizer, with --size.")] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a value of the preset, such as schedule.rounds=40; repeatable."
        ),
    ] = None,
    directory: Dir = None,
) -> None:
    """Make a plan folder with plan.toml, to be looked through and edited before it is started."""
    coordinator = load(directory)
    plan = _create_plan(
        coordinator,
        name,
        size=size,
        model=model,
        hub=hub,
        preset=preset,
        seed=seed,
        vocabulary=vocabulary,
        tokenizer_text=tokenizer_text,
        overrides=dict(_assignment(item) for item in values or ()),
    )
    _print_forecast(plan)
    say(
        f"plan {name} ({plan.digest[:16]}) is in {coordinator.shelf.folder(name)}; start it with coordinator plan start {name}"
    )


@plan_app.command(name="show")
def plan_show(name: PlanName = DEFAULT_PLAN, directory: Dir = None, as_json: AsJson = False) -> None:
    """Check a plan folder and show what silos will be asked to approve."""
    coordinator = load(directory)
    bundle = coordinator.shelf.compile(name)
    value = {"digest": bundle.plan.digest, **bundle.plan.model_dump(mode="json")}
    if as_json:
        print(json.dumps(value, indent=2))
        return
    # In lines of their own, however wide the terminal: people copy digests from here.
    say(f"plan {name}: {bundle.plan.model.source}, {bundle.plan.model.parameters:,} parameters")
    say(f"{'digest':<20} {bundle.plan.digest}")
    for section, content in bundle.plan.model_dump(mode="json").items():
        if not isinstance(content, dict):
            say(f"{section:<20} {json.dumps(content)}")
            continue
        for key, item in content.items():
            say(f"{section:<20} {key} = {json.dumps(item)}")


@plan_app.command(name="list")
def plan_list(directory: Dir = None) -> None:
    """Name the plans that have a folder."""
    for name in load(directory).shelf.names():
        print(name)


@plan_app.command(name="start")
def plan_start(
    name: Annotated[
        str,
        typer.Argument(
            autocompletion=plan_names,
            help="Default: the plan that runs, is stopped or is offered; 'default' where none ever was.",
            show_default=False,
        ),
    ] = "",
    leave: Annotated[
        str,
        typer.Option(
            "--leave",
            metavar="OTHER",
            help="Leave this plan, which is stopped before its end, for good.",
            autocompletion=plan_names,
            show_default=False,
        ),
    ] = "",
    directory: Dir = None,
) -> None:
    """Start a plan, or go on with it after a stop."""
    reached = reach(directory)
    reply = reached.ask(lambda stub: stub.StartPlan(operator_pb2.StartPlanRequest(plan=name, leave=leave)))
    if isinstance(reached, OnTheHost):
        _print_forecast(reached.coordinator.shelf.bundle(Digest(reply.plan_digest.hex())).plan)
    say(f"plan {reply.plan_name or name} ({reply.plan_digest.hex()[:16]}) is started: {reply.detail}")


@plan_app.command(name="stop")
def plan_stop(directory: Dir = None) -> None:
    """Stop the plan under way; what was committed is kept, and plan start goes on with it."""
    reply = reach(directory).ask(lambda stub: stub.StopPlan(operator_pb2.StopPlanRequest()))
    say(reply.detail)


@plan_app.command(name="pause")
def plan_pause(directory: Dir = None) -> None:
    """Let the round under way end and open no other, until plan resume."""
    reply = reach(directory).ask(lambda stub: stub.PausePlan(operator_pb2.PausePlanRequest()))
    say(reply.detail)


@plan_app.command(name="resume")
def plan_resume(directory: Dir = None) -> None:
    """Go on with a plan that was paused."""
    reply = reach(directory).ask(lambda stub: stub.ResumePlan(operator_pb2.ResumePlanRequest()))
    say(reply.detail)


@app.command()
def privacy(directory: Dir = None, as_json: AsJson = False) -> None:
    """Show what was released under silo-level privacy with noise of the coordinator's, and what it comes to."""
    coordinator = load(directory)
    released = [(plan, len(entries), coordinator.releases.spent(plan)) for plan, entries in coordinator.released()]
    if as_json:
        keys = ("target_epsilon", "dp_delta", "neighbouring_relation")
        rows = [
            {
                "plan": plan.name,
                "digest": plan.digest,
                "releases": count,
                "epsilon": epsilon,
                **{key: getattr(plan.privacy, key) for key in keys},
            }
            for plan, count, epsilon in released
        ]
        print(json.dumps(rows, indent=2))
        return
    for plan, count, epsilon in released:
        section = plan.privacy
        print(
            f"plan {plan.name} ({plan.digest[:16]}): {count} sums of deltas, epsilon {epsilon:.3g} of {section.target_epsilon:g} "
            f"at dp_delta {section.dp_delta:g}, unit: a silo ({section.neighbouring_relation})"
        )
    if not released:
        print("no sum was released with noise of the coordinator's")


for upkeep in (backup, restore, upgrade, gc):
    app.command()(upkeep)


# --- plans


def _create_plan(
    coordinator: Coordinator,
    name: str,
    *,
    size: str = "",
    model: Path | None = None,
    hub: str = "",
    preset: str = "default",
    seed: int = 0,
    vocabulary: int | None = None,
    tokenizer_text: Path | None = None,
    overrides: dict[str, object] | None = None,
) -> Plan:
    from coordinator.plans.plan_folder import create_plan, require_new, require_valid

    overrides = overrides or {}
    if sum(bool(item) for item in (size, model, hub)) > 1:
        raise ConfigurationError("give one of --size, --model and --hub, not several")
    if (model or hub) and (vocabulary or tokenizer_text):
        raise ConfigurationError("--vocabulary and --tokenizer-text go with --size: a given model brings its tokenizer")
    require_new(coordinator.shelf.plans, name)
    require_valid(name=name, federation=coordinator.federation, preset=preset, seed=seed, overrides=overrides)

    # Here, not above: it imports torch and transformers, which takes seconds, and what is refused needs neither.
    from coordinator.plans.model_source import FolderModel, HubModel, ModelSource, SizedModel

    source: ModelSource
    if model:
        source = FolderModel(model)
    elif hub:
        repository, _, revision = hub.partition("@")
        source = HubModel(repository, revision or None)
    else:
        source = SizedModel(size or DEFAULT_SIZE, vocabulary, tokenizer_text)
    bundle = create_plan(
        coordinator.shelf.plans,
        name=name,
        federation=coordinator.federation,
        source=source,
        preset=preset,
        seed=seed,
        overrides=overrides,
    )
    return bundle.plan


def _print_forecast(plan: Plan) -> None:
    for line in forecast(plan):
        say(line)


def _assignment(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigurationError(f"--set {text!r} is not KEY=VALUE: write for example --set schedule.rounds=40")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # a bare word


# --- small things


def _name_from(folder: str) -> str:
    kept = "".join(character if character.isalnum() else "-" for character in folder.lower()).strip("-")
    return kept[:63].strip("-") or "federation"


def _warn_of(host: str, port: int) -> None:
    """On stderr: a token goes to stdout alone."""
    if told := warning(host, port):
        terminal(stderr=True).print(f"warning: {told}", soft_wrap=True)


async def _status_and_groups(
    stub: "operator_pb2_grpc.OperatorAsyncStub",
) -> tuple[operator_pb2.StatusReply, operator_pb2.GroupsStanding]:
    reply = await stub.GetStatus(operator_pb2.GetStatusRequest())
    return reply, await stub.GetGroups(operator_pb2.GetGroupsRequest())


def _json(message: operator_pb2.StatusReply | operator_pb2.RoundRecord) -> dict[str, object]:
    value = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for key in ("plan_digest", "model_digest", "best_model_digest"):
        if key in value:
            value[key] = getattr(message, key).hex()
    return dict(value)


def _announce(coordinator: Coordinator) -> Callable[[], None]:
    def announce() -> None:
        if sys.stderr.isatty():
            terminal(stderr=True).print(
                f"coordinator of federation {coordinator.federation} serves silos on "
                f"{coordinator.settings.listen.silos}; Ctrl-C stops it",
                soft_wrap=True,
            )

    return announce


list_whole_summaries(app)

if __name__ == "__main__":
    main()
