"""The tables and pictures of ops/docs that follow from the code: `make docs` writes them, a test compares them.

A page holds its prose, and between `<!-- table: NAME -->` and `<!-- end of table -->` a table that is made here. What a
key means is said once, in the template that an operator edits; what values it takes comes from the pydantic model.
"""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordinator import settings as coordinator_settings
from coordinator.edges.check.misconfigurations import Mistake as CoordinatorMistake
from coordinator.edges.server.gate import OF_ALL_STRANGERS, OF_ONE_CALLER
from coordinator.edges.server.grpc_server import OPEN_FILES
from coordinator.edges.telemetry.metrics import POINTS, CoordinatorMetrics
from coordinator.plans.forecast import forecast, require_worth
from coordinator.plans.plan_text import plan_template
from coordinator.plans.presets import PRESETS, preset
from lorica.documentation import docs_commands, rooms
from lorica.privacy_utility.pages import cost_picture, cost_table, ideas_table, joint_table
from lorica_security.console.preflight import Misconfiguration
from lorica_security.daemon.host_metrics import BuildCollector, FolderCollector, GpuCollector
from lorica_security.daemon.http_server import MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ONE, MAX_HEAD_BYTES, REQUEST_S
from lorica_security.errors import ConfigurationError
from silo_agent.edges.check.misconfigurations import Mistake as SiloMistake
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.settings import Settings as SiloSettings
from silo_wire.algorithm import Algorithm, Number, Promise
from silo_wire.canonical import digest_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.privacy import calibrated_noise
from silo_wire.plans.sections.model import ModelSection
from silo_wire.transport import ENROLMENT_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS
from silo_wire.weightings.named import WEIGHTINGS
from silo_wire.wire_version import OURS

DOCS: Final = Path(__file__).parents[2] / "docs"

_TABLE = re.compile(r"(<!-- table: ([a-z-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_KEY_LINE = re.compile(r"(?:# )?([a-z_0-9]+) = \S.*")
_HEADING = re.compile(r"\[([a-z.]+)\]")
_LIMITS: Final = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))

PLAN_UNITS: Final[dict[str, str]] = {
    "schedule.rounds": "rounds",
    "schedule.min_silos": "silos",
    "schedule.gathering_deadline_s": "seconds",
    "schedule.training_deadline_s": "seconds",
    "schedule.masking_deadline_s": "seconds",
    "schedule.evaluation_deadline_s": "seconds",
    "aggregation.max_weight": "that of the weighting",
    "aggregation.max_weight_share": "share of the sum",
    "aggregation.max_delta_norm": "L2 norm",
    "aggregation.threshold": "silos",
    "aggregation.colluders": "silos",
    "aggregation.min_survivors": "silos",
    "training.variance_floor": "times the variance of the noise on a mean gradient",
    "training.weight_decay": "per step",
    "training.epochs": "passes",
    "training.batch_size": "examples",
    "training.gradient_accumulation": "batches",
    "training.max_grad_norm": "L2 norm",
    "training.loss_log_steps": "optimizer steps",
    "training.max_input_tokens": "tokens",
    "training.max_output_tokens": "tokens",
    "privacy.nominal_records": "records",
    "privacy.expected_batch_size": "records",
    "privacy.steps": "optimizer steps",
    "privacy.noise_multiplier": "times training.max_grad_norm or aggregation.max_delta_norm",
    "privacy.augmentations": "views",
    "privacy.loss_bound": "mean loss of a record's tokens",
    "privacy.loss_noise_multiplier": "times privacy.loss_bound",
    "privacy.nominal_silos": "silos",
    "evaluation.every": "rounds",
    "evaluation.max_examples": "examples",
    "evaluation.batch_size": "examples",
    "evaluation.beams": "beams",
}
"""Keys that are absent here are words, switches or plain numbers."""

MODEL_MEANINGS: Final[dict[str, str]] = {
    "source": "Where the model came from, for people: `size:NAME`, `folder:NAME` or `hub:NAME`.",
    "parameters": "How many parameters are trained and sent; tied ones count once.",
    "layout": "Digest of their order, names and shapes.",
    "revision": "Of a model from the Hub: the commit that was fetched. The operator's word.",
    "weights": "SHA-256 of each file of parameters as it was at the source, for people who fetch a copy. The operator's word.",
    "initial": "Digest of the manifest of the initial parameters: what a silo compares its own copy with.",
    "initial_bfloat16": "The same of these parameters as bfloat16, which silos are handed where `wire.model` says so.",
    "base": "Digest of the manifest of the parameters that stay as they are, in a plan with `[adapters]`; else left out.",
    "files": "Digest of each file of the bundle: configuration, tokenizer, layout.",
}

SILO_MEANINGS: Final[dict[str, str]] = {
    "data.folder": "Folder with `train.jsonl`, `dev.jsonl` and `schema.json`; `--data` comes first.",
    "data.max_bad_lines_share": "Share of bad lines in a file above which the silo does not start.",
    "database.url": "`sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/DATABASE` of a role that only reads. "
    "Empty: `db.sqlite` beside the data, if it is there.",
    "database.max_unpacked_bytes": "Bytes that a `db.sqlite.gz` beside the data may unpack to.",
    "policy.approved_plans": '`"any"` plan may run here; `"ask"`, the default with `require_secure_aggregation`: those that '
    "`silo-agent plan approve` was given; or a list of the digests of those that may.",
    "policy.max_parameters": "Largest model, in parameters.",
    "policy.allowed_tensors": '`"any"`, or the names of the parameters that a plan may train; a name that ends in `*` '
    "stands for all that begin so.",
    "policy.max_upload_bytes": "Most bytes of one update, hence of one round, with or without a mask.",
    "policy.max_rounds": "Most rounds of a plan.",
    "policy.max_epochs": "Most epochs of local training in one round.",
    "policy.require_secure_aggregation": "Whether updates leave masked or not at all: a plan without secure aggregation "
    "is refused, and so is an upload without masks.",
    "policy.verify": 'How round models are checked under masks before this silo trains from them: `"joint"`, the default with '
    '`require_secure_aggregation`: every chunk, divided among the silos; `"spot"`: a few, by its own choice; `"off"`: not at all.',
    "policy.min_cohort": "Under secure aggregation: fewest silos of a cohort, this one among them.",
    "policy.min_threshold": "Under secure aggregation: fewest silos that have to help to open a secret.",
    "policy.min_survivors": "Under secure aggregation: fewest silos of a sum.",
    "policy.smallest_group": "Under secure aggregation: fewest silos of a release group, and of a set that sums can be subtracted down to; "
    "never below `colluders` + 2. Release groups that promise less are refused.",
    "policy.colluders": "Under secure aggregation: how many of a cohort may work together against this silo. Plans and release groups that hold "
    "against fewer are refused.",
    "policy.max_work_ratio": "Under secure aggregation: how far learning rate x optimizer steps of two silos may differ by "
    "`[training.overrides]`. 1: no override that changes work is taken.",
    "policy.require_privacy": 'The `[privacy] level` that a plan must have; `"none"`: any. With `"silo"` the noise may be the '
    "coordinator's, unless `require_secure_aggregation` is set as well.",
    "policy.unit_field": "The key of a training line, such as `patient`, that a private plan must group lines by. Empty: whatever the "
    "plan says, also each line by itself; `max_epsilon` then counts for a line, which costs more where the plan groups lines.",
    "policy.max_epsilon": "Most epsilon that this silo's records ever cost, over all private rounds of all plans, by a filter that "
    "costs somewhat more than one plan by itself; a plan that would take more, or a round, is refused.",
    "policy.max_epsilon_alone": "The same towards all other silos of a sum, if they worked against this one, where silos make noise together "
    '(`[privacy] noise = "joint"`). 0: no such plan is taken.',
    "policy.max_dp_delta": "The dp_delta at which that epsilon is counted.",
    "policy.min_grad_norm": "Least `[training] max_grad_norm` of a plan with record-level privacy.",
    "policy.max_model_value": "Largest parameter, in size, of a round model that is trained with record-level privacy. Trained models have "
    "none of a thousand.",
    "policy.shared_budget": "Folder of the registry by which silo folders of this machine find that they train on the same records, and "
    'count their epsilon together; `"none"`: count apart. Empty: `/var/lib/lorica/shared-budget` where that is there.',
    "policy.trust_on_first_use": "Whether the key that a silo comes with first is pinned unasked. It does not stop a "
    "coordinator that makes up silos.",
    "policy.allow_execution": "Whether SQL that the model wrote may run on the database, in the sandbox.",
    "policy.tell_scores": "Whether scores leave: how many held-out questions the model answers right, and the loss. false: under masks "
    "this silo adds zeros to their sum, in the clear it declines each evaluation.",
    "policy.smallest_evaluation": "Fewest held-out questions that scores may be of: a plan with fewer is refused, and with fewer in "
    "`dev.jsonl` no scores leave.",
    "training.device": "`auto` (the GPU where there is one), `cpu`, `cuda` or `cuda:N`.",
    "training.threads": "Threads of PyTorch. 0: its own choice.",
    "sql.seconds": "Time for one statement, in seconds.",
    "sql.rows": "Most rows of a result.",
    "sql.result_bytes": "Most bytes of a result.",
    "sql.memory_bytes": "Memory of the sandbox above what its own code takes, in bytes.",
    "sql.require_jail": "true: no SQL runs where a wall of [the sandbox's jail](hardening.md#the-jail-of-a-models-sql) is missing. "
    "false: the walls that the kernel has are used.",
    "storage.models_kept": "Round models kept on disk.",
    "metrics.listen": "`ADDRESS:PORT` where the running agent serves its [metrics](metrics.md#a-silos-own) to whoever asks: "
    "take loopback. Empty: nothing listens.",
}


def write_pages(folder: Path = DOCS) -> list[Path]:
    """Bring the tables of every page up to date; the pages that changed."""
    changed = []
    for page in sorted(folder.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (current := rendered(text)) != text:
            page.write_text(current, encoding="utf-8")
            changed.append(page)
    return changed


def write_pictures(folder: Path = DOCS) -> None:
    for name, drawn in PICTURES.items():
        (folder / name).write_text(drawn(), encoding="utf-8")


def rendered(page: str) -> str:
    """The page with every table as the code now has it; raises KeyError for a table that nobody makes."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[4]}", page)


def tables_of(page: str) -> list[str]:
    """The names of the tables that the page asks for."""
    return [match[2] for match in _TABLE.finditer(page)]


# --- settings and plans


def plan_table() -> str:
    described = template_comments(plan_template())
    rows = []
    for key, field in leaves(Plan, skip={"model", "training.overrides"}):
        default = (
            "required"
            if field.is_required()
            else _shown(field.get_default(call_default_factory=True, validated_data={}))
        )
        rows.append((f"`{key}`", _values(field), PLAN_UNITS.get(key, ""), default, described[key]))
    return _table(("key", "values", "unit", "default", "meaning"), rows)


def plan_model_table() -> str:
    return _table(("key", "meaning"), [(f"`model.{key}`", MODEL_MEANINGS[key]) for key in ModelSection.model_fields])


def algorithm_table() -> str:
    """What each weighting and each reducer says of itself."""
    # Here, not above: torch, which reducers bring, takes seconds to import.
    from coordinator.edges.sums.reducers.chosen import REDUCERS

    def row(name: str, it: Algorithm) -> tuple[str, ...]:
        promises = [promise for promise in get_args(Promise) if promise in it.promises]
        needs = [number for number in Number if number in it.needs]
        return (name, it.meaning, ", ".join(needs), it.masks or "no", ", ".join(promises) or "none", str(it.passes))

    header = ("algorithm", "what it is", "needs of a silo", "under masks", "with privacy", "passes over the deltas")
    weightings = [row(f'weighting `"{it.name}"`', it) for it in WEIGHTINGS]
    # The classes, not what they make: what an algorithm says of itself is the same for every plan.
    reducers = [row(f"reducer {it.name}", cast(Algorithm, it)) for it in REDUCERS]
    return _table(header, [*weightings, *reducers])


def preset_table() -> str:
    """Every key that a preset sets, and what stands there under each."""
    chosen = {name: _flat(preset(name)) for name in PRESETS}
    defaults = {key: field for key, field in leaves(Plan, skip={"model"}) if not field.is_required()}
    keys = sorted({key for values in chosen.values() for key in values}, key=_order_of(Plan))

    def cell(name: str, key: str) -> str:
        if key in chosen[name]:
            return _shown(chosen[name][key])
        if key.startswith("training.overrides."):
            return ""
        return f"_{_shown(defaults[key].get_default(call_default_factory=True, validated_data={}))}_"

    return _table(("key", *PRESETS), [(f"`{key}`", *(cell(name, key) for name in PRESETS)) for key in keys])


def federation_table() -> str:
    template = files("coordinator").joinpath("federation_template.toml").read_text(encoding="utf-8")
    described = template_comments(template)
    rows = []
    for key, field in leaves(coordinator_settings.Settings):
        default = (
            "required"
            if field.is_required()
            else _shown(field.get_default(call_default_factory=True, validated_data={}))
        )
        rows.append((f"`{key}`", _values(field), default, described[key]))
    return _table(("key", "values", "default", "meaning"), rows)


def silo_table() -> str:
    rows = []
    for key, field in leaves(SiloSettings):
        default = _shown(field.get_default(call_default_factory=True, validated_data={}))
        rows.append((f"`{key}`", _values(field), default, SILO_MEANINGS[key]))
    return _table(("key", "values", "default", "meaning"), rows)


def template_comments(template: str) -> dict[str, str]:
    """The comment above each key of a commented TOML, by dotted key; keys that share a comment have it both."""
    comments: dict[str, str] = {}
    section, lines, fresh = "", list[str](), True
    for line in template.splitlines():
        if heading := _HEADING.fullmatch(line):
            section, lines = f"{heading[1]}.", []
        elif key := _KEY_LINE.fullmatch(line):
            comments[section + key[1]] = " ".join(lines)
            fresh = True
        elif line.startswith("# "):
            lines = [line[2:]] if fresh else [*lines, line[2:]]
            fresh = False
        elif not line:
            fresh = True
    return comments


def leaves(model: type[BaseModel], prefix: str = "", skip: Collection[str] = ()) -> Iterator[tuple[str, FieldInfo]]:
    """The leaves of a settings model, by dotted key."""
    for name, field in model.model_fields.items():
        key = prefix + name
        if key in skip:
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{key}.", skip)
        else:
            yield key, field


def _order_of(model: type[BaseModel]) -> Callable[[str], tuple[int, str]]:
    place = {key: index for index, (key, _) in enumerate(leaves(model))}
    return lambda key: (place.get(key, len(place)), key)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _values(field: FieldInfo) -> str:
    """What the field takes, in words: choices, or the kind of value and its bounds."""
    return _described(field.annotation, field.metadata)


def _described(annotation: Any, metadata: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _described(inner, [*metadata, *more])
    if origin is Literal:
        return ", ".join(_shown(choice) for choice in get_args(annotation))
    if origin in (Union, UnionType):
        kinds = [_described(one, metadata) for one in get_args(annotation) if one is not type(None)]
        return " or ".join(kinds)
    if origin is list:
        (item,) = get_args(annotation)
        return f"list of {_described(item, [])}"
    kind = {str: "text", bool: "true, false", int: "whole number", float: "number"}[annotation]
    return f"{kind} {_bounds(metadata)}".rstrip()


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = []
    for item in _unpacked(metadata):
        for kind, attribute, sign in _LIMITS:
            if isinstance(item, kind):
                bounds.append(f"{sign} {_number(getattr(item, attribute))}")
    return ", ".join(bounds)


def _unpacked(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _shown(value: Any) -> str:
    """A value as TOML spells it, in code type; None is what the key's meaning says of leaving it out."""
    match value:
        case None:
            return "left out"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case list():
            return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
        case int() | float():
            return f"`{_number(value)}`"
    raise TypeError(f"{value!r} has no spelling in these tables")


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value}" if value < 1 << 40 else f"2^{value.bit_length() - 1}"
    return f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"


# --- what a private plan is worth


def forecast_examples() -> str:
    """What `coordinator plan new` prints for plans of a T5-small-like size, and for an adapter's."""
    examples = (
        ("a T5-small, noise at the coordinator, 20 rounds", "silo", 60_506_624, False, 20_000),
        ("100,000 parameters, noise at 200 silos, 20 rounds", "silo", 100_000, True, 200),
        ("records, weights by loss reduction, 20 rounds", "record", 60_506_624, False, 100),
    )
    blocks = []
    for title, level, parameters, masked, silos in examples:
        plan = _example(level, parameters, masked, silos)
        blocks.append("\n".join((f"# {title}", *forecast(plan), *_refusal(plan))))
    return "```text\n" + "\n\n".join(blocks) + "\n```\n"


def _example(level: str, parameters: int, masked: bool, silos: int) -> Plan:
    digest = digest_of(b"example")
    values: dict[str, Any] = {
        "name": "example",
        "federation": "example",
        "model": {
            "source": "example",
            "parameters": parameters,
            "layout": digest,
            "initial": digest,
            "files": {"config.json": digest, "layout.json": digest},
        },
        "schedule": {"rounds": 20, "min_silos": 100},
        "aggregation": {"max_weight": 500.0, "max_delta_norm": 1.0, "secure_aggregation": masked},
        "training": {"dropout": 0.0},
        "evaluation": {"every": 0, "initial": False, "last": False},
        "privacy": {"level": level, "nominal_silos": silos, "nominal_records": 400, "expected_batch_size": 40},
    }
    draft = Plan.model_validate(values)
    noise = calibrated_noise(draft.privacy, rounds=draft.schedule.rounds, weighted=draft.weighted)
    values["privacy"]["noise_multiplier"] = round(noise * 1.001, 3)
    return Plan.model_validate(values)


def _refusal(plan: Plan) -> Iterator[str]:
    try:
        require_worth(plan, "plan example")
    except ConfigurationError as error:
        yield f"error: {error}"


# --- metrics


def metrics_table() -> str:
    registry = CollectorRegistry()
    return _instruments(CoordinatorMetrics(registry), registry)


def silo_metrics_table() -> str:
    registry = CollectorRegistry()
    return _instruments(SiloMetrics(registry), registry)


def host_metrics_table() -> str:
    versions = ", ".join(
        f"`{label}`" for family in BuildCollector(str(OURS)).collect() for label in family.samples[0].labels
    )
    rows = [
        (f"`{family.name}`", family.type, labels, family.documentation)
        for collector, labels in (
            (BuildCollector(str(OURS)), versions),
            (FolderCollector(DOCS), ""),
            (GpuCollector(), "`device`: 0, 1, ... as torch counts them"),
        )
        for family in collector.describe()
    ]
    return _table(("metric", "type", "labels", "meaning"), rows)


OPEN_LABELS: Final = {"silo": ("enrolled silos",), "point": POINTS}
"""Of series that are there only while a plan lets them be."""


def _instruments(metrics: object, registry: CollectorRegistry) -> str:
    """One row a metric, as Prometheus names it, with the closed set of each label's values."""
    values: dict[str, dict[str, list[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                known = values.setdefault(family.name, {}).setdefault(label, [])
                if label != "le" and value not in known:
                    known.append(value)
    rows = []
    for instrument in vars(metrics).values():
        if not isinstance(instrument, MetricWrapperBase):
            continue
        (family,) = instrument.describe()
        labels = []
        for label in instrument._labelnames:  # the library tells them nowhere else before there is a series
            closed = values.get(family.name, {}).get(label)
            labels.append(f"`{label}`: {', '.join(closed or OPEN_LABELS[label])}")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{name}`", family.type, "; ".join(labels), family.documentation))
    return _table(("metric", "type", "labels", "meaning"), rows)


# --- limits


def limits_table() -> str:
    server, strangers = dict(SERVER_OPTIONS), dict(ENROLMENT_OPTIONS)
    seconds = {name: value // 1000 for name, value in server.items() if name.endswith("_ms")}
    rows = (
        ("one message", _size(MAX_MESSAGE_BYTES), "memory filled by one request; a model travels in chunks"),
        (
            "the handshake of TLS, to its end",
            f"{seconds['grpc.server_handshake_timeout_ms']} s",
            "connections that never speak, or never present a certificate",
        ),
        (
            "a connection without a call",
            f"{seconds['grpc.max_connection_idle_ms']} s",
            "connections that authenticate and do nothing",
        ),
        (
            "from the beginning of a call to its first request",
            f"{OF_ONE_CALLER.first_request_s:.0f} s",
            "calls that begin and say nothing",
        ),
        ("streams of one connection", f"{server['grpc.max_concurrent_streams']}", "streams without number"),
        (
            "open calls of one caller, over all its connections",
            f"{OF_ONE_CALLER.calls}",
            "a silo that fills the server",
        ),
        (
            "requests of one caller on their way in",
            f"{OF_ONE_CALLER.requests}",
            "beginnings of messages, which gRPC keeps until the rest has come",
        ),
        ("open calls of all strangers together (enrolment)", f"{OF_ALL_STRANGERS.calls}", "the same, by anybody"),
        ("requests of all strangers on their way in", f"{OF_ALL_STRANGERS.requests}", "the same, by anybody"),
        (
            "what a peer may send ahead on a stream",
            f"{_size(server['grpc.http2.lookahead_bytes'])}, of a stranger {_size(strangers['grpc.http2.lookahead_bytes'])}",
            "floods that nobody reads",
        ),
        (
            "a ping without data, at most every",
            f"{seconds['grpc.http2.min_ping_interval_without_data_ms']} s, "
            f"{server['grpc.http2.max_ping_strikes']} strikes",
            "floods of pings",
        ),
        (
            "keepalive",
            f"{seconds['grpc.keepalive_time_ms']} s, answered in {seconds['grpc.keepalive_timeout_ms']} s",
            "connections whose other end has gone",
        ),
        (
            "connections to the status page, to metrics",
            f"{MAX_CONNECTIONS} each, {MAX_CONNECTIONS_OF_ONE} of one address",
            "strangers who hold descriptors; none holds a thread",
        ),
        (
            "the head of a request there, from the end of the one before",
            f"{REQUEST_S:.0f} s, {_size(MAX_HEAD_BYTES)}; a body is refused",
            "connections that say nothing, or a letter at a time",
        ),
        ("open files of the coordinator", f"{OPEN_FILES:,}, or what the system allows", "strangers who keep silos out"),
    )
    return _table(("of what", "limit", "what it stops"), rows)


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"


# --- what the checks find


def coordinator_mistakes() -> str:
    return _mistakes(mistake.value for mistake in CoordinatorMistake)


def silo_mistakes() -> str:
    return _mistakes(mistake.value for mistake in SiloMistake)


def _mistakes(found: Iterable[Misconfiguration]) -> str:
    rows = [(f"`{it.name}`", it.found_by, it.meaning, it.remedy) for it in found]
    return _table(("name", "check", "what it is", "remedy"), rows)


# --- commands


def commands_table(program: str) -> str:
    return _table(("command", "what it does", "options"), list(docs_commands.rows(program)))


# --- rooms


def rooms_table(package: str) -> str:
    return _table(("room", "what it is for"), list(rooms.rows(package)))


# --- all of them


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "plan": plan_table,
    "plan-model": plan_model_table,
    "algorithms": algorithm_table,
    "presets": preset_table,
    "federation": federation_table,
    "silo": silo_table,
    "privacy-forecast": forecast_examples,
    "metrics": metrics_table,
    "silo-metrics": silo_metrics_table,
    "host-metrics": host_metrics_table,
    "limits": limits_table,
    "coordinator-mistakes": coordinator_mistakes,
    "silo-mistakes": silo_mistakes,
    "help": docs_commands.help_block,
    "utility-cost": cost_table,
    "utility-ideas": ideas_table,
    "utility-joint": joint_table,
    **{f"commands-{program}": partial(commands_table, program) for program in docs_commands.PROGRAMS},
    **{f"rooms-{package.replace('_', '-')}": partial(rooms_table, package) for package in rooms.PACKAGES},
}

PICTURES: Final[dict[str, Callable[[], str]]] = {"pictures/privacy-utility.svg": cost_picture}


if __name__ == "__main__":
    write_pictures()
    for page in write_pages():
        sys.stdout.write(f"{page.relative_to(DOCS.parent.parent)} brought up to date\n")
