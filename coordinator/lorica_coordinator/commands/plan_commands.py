"""`coordinator plan`: make, look at, start and stop plans."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lorica_coordinator.commands.command_line import (
    AsJson,
    Dir,
    OnTheHost,
    load,
    reach,
    say,
)
from lorica_coordinator.commands.completion import plan_names
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.forecast import forecast
from lorica_coordinator.rounds.which_plan import DEFAULT_PLAN
from lorica_security.errors import ConfigurationError
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan
from silo_wire.v1 import operator_pb2

plan_app = typer.Typer(help="Make, look at, start and stop plans.", no_args_is_help=True)
DEFAULT_SIZE = "mini"
PlanName = Annotated[str, typer.Argument(autocompletion=plan_names)]


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
    plan = new_plan(
        coordinator,
        name,
        size=size,
        model=model,
        hub=hub,
        preset=preset,
        seed=seed,
        vocabulary=vocabulary,
        tokenizer_text=tokenizer_text,
        overrides=assignments(values or ()),
    )
    _print_forecast(plan)
    say(
        f"plan {name} ({plan.digest[:16]}) is in {coordinator.shelf.folder(name)}; start it with coordinator plan "
        f"start {name}"
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


def new_plan(
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
    from lorica_coordinator.plans.plan_folder import create_plan, require_new, require_valid
    from lorica_coordinator.plans.silo_level import most_parameters
    from silo_wire.plans.sizes import size_named

    overrides = overrides or {}
    if sum(bool(item) for item in (size, model, hub)) > 1:
        raise ConfigurationError("give one of --size, --model and --hub, not several")
    if (model or hub) and (vocabulary or tokenizer_text):
        raise ConfigurationError("--vocabulary and --tokenizer-text go with --size: a given model brings its tokenizer")
    require_new(coordinator.shelf.plans, name)
    parameters = 0 if model or hub else most_parameters(size_named(size or DEFAULT_SIZE), vocabulary)
    require_valid(
        name=name,
        federation=coordinator.federation,
        preset=preset,
        seed=seed,
        overrides=overrides,
        parameters=parameters,
    )

    # Here, not above: it imports torch and transformers, which takes seconds, and what is refused needs neither.
    from lorica_coordinator.plans.model_source import FolderModel, HubModel, ModelSource, SizedModel

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


def assignments(values: Sequence[str]) -> dict[str, object]:
    """Of `--set KEY=VALUE`, by key; the last one of a key counts. Raises ConfigurationError for anything else."""
    return dict(map(_assignment, values))


def _assignment(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigurationError(f"--set {text!r} is not KEY=VALUE: write for example --set schedule.rounds=40")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # a bare word
