"""Tables of every key of plan.toml, federation.toml and silo.toml."""

from importlib.resources import files
from typing import Final

from lorica.documentation.markdown import markdown_table
from lorica.documentation.settings_fields import as_toml, flattened, leaves, order_of, template_comments, values_of
from lorica_coordinator import settings as coordinator_settings
from lorica_coordinator.plans.plan_text import plan_template
from lorica_coordinator.plans.presets import PRESETS, preset
from silo_agent.settings import Settings as SiloSettings
from silo_wire.model_folders.t5_form import MODEL_TYPES, NOT_TAKEN
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.model import ModelSection

PLAN_UNITS: Final[dict[str, str]] = {
    "schedule.rounds": "rounds",
    "schedule.min_silos": "silos",
    "schedule.cohort_size": "silos",
    "schedule.gathering_deadline_s": "seconds",
    "schedule.training_deadline_s": "seconds",
    "schedule.masking_deadline_s": "seconds",
    "schedule.evaluation_deadline_s": "seconds",
    "aggregation.trimmed_share": "share of the silos",
    "aggregation.hostile_silos": "silos",
    "aggregation.clipping_radius": "L2 norm",
    "aggregation.max_weight": "that of the weighting",
    "aggregation.max_weight_share": "share of the sum",
    "aggregation.max_delta_norm": "L2 norm",
    "aggregation.threshold": "silos",
    "aggregation.colluders": "silos",
    "aggregation.min_survivors": "silos",
    "training.variance_floor": "times the variance of the noise on a mean gradient",
    "training.weight_decay": "per step",
    "training.epochs": "passes",
    "training.steps": "optimizer steps",
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
    "weights": "SHA-256 of each file of parameters as it was at the source, for people who fetch a copy. The "
    "operator's word.",
    "initial": "Digest of the manifest of the initial parameters: what a silo compares its own copy with.",
    "initial_bfloat16": "The same of these parameters as bfloat16, which silos are handed where `wire.model` says so.",
    "base": "Digest of the manifest of the parameters that stay as they are, in a plan with `[adapters]`; else left "
    "out.",
    "fixed": 'The same of the halves of adapters that the seed makes and nobody trains, where `adapters.train = "b"`; '
    "else left out.",
    "files": "Digest of each file of the bundle: configuration, tokenizer, layout.",
}

SILO_MEANINGS: Final[dict[str, str]] = {
    "data.folder": "Folder with `train.jsonl`, `dev.jsonl` and `schema.json`; `--data` comes first.",
    "data.max_bad_lines_share": "Share of bad lines in a file above which the silo does not start.",
    "database.url": "`sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/DATABASE` of a role that only reads. "
    "Empty: `db.sqlite` beside the data, if it is there.",
    "database.max_unpacked_bytes": "Bytes that a `db.sqlite.gz` beside the data may unpack to.",
    "policy.approved_plans": '`"any"` plan may run here; `"ask"`, the default with `require_secure_aggregation`: '
    "those that `silo-agent plan approve` was given; or a list of the digests of those that may.",
    "policy.max_parameters": "Largest model, in parameters.",
    "policy.allowed_tensors": '`"any"`, or the names of the parameters that a plan may train; a name that ends in `*` '
    "stands for all that begin so.",
    "policy.max_upload_bytes": "Most bytes of one update, hence of one round, with or without a mask.",
    "policy.max_rounds": "Most rounds of a plan.",
    "policy.max_epochs": "Most epochs of local training in one round.",
    "policy.require_secure_aggregation": "Whether updates leave masked or not at all: a plan without secure "
    "aggregation is refused, and so is an upload without masks.",
    "policy.verify": 'How round models are checked under masks before this silo trains from them: `"joint"`, the '
    "default with "
    '`require_secure_aggregation`: every chunk, divided among the silos; `"spot"`: a few, by its own choice; '
    '`"off"`: not at all.',
    "policy.min_cohort": "Under secure aggregation: fewest silos of a cohort, this one among them.",
    "policy.min_threshold": "Under secure aggregation: fewest silos that have to help to open a secret.",
    "policy.min_survivors": "Under secure aggregation: fewest silos of a sum.",
    "policy.smallest_group": "Under secure aggregation: fewest silos of a release group, and of a set that sums can "
    "be subtracted down to; never below `colluders` + 2. Release groups that promise less are refused.",
    "policy.colluders": "Under secure aggregation: how many of a cohort may work together against this silo. Plans "
    "and release groups that hold against fewer are refused.",
    "policy.max_work_ratio": "Under secure aggregation: how far learning rate x optimizer steps of two silos may "
    "differ by `[training.overrides]`. 1: no override that changes work is taken.",
    "policy.require_privacy": 'The `[privacy] level` that a plan must have; `"none"`: any. With `"silo"` the noise '
    "may be the coordinator's, unless `require_secure_aggregation` is set as well.",
    "policy.unit_field": "The key of a training line, such as `patient`, that a private plan must group lines by. "
    "Empty: whatever the plan says, also each line by itself; `max_epsilon` then counts for a line, which costs more "
    "where the plan groups lines.",
    "policy.max_epsilon": "Most epsilon that this silo's records ever cost, over all private rounds of all plans, "
    "by a filter that costs somewhat more than one plan by itself; a plan that would take more, or a round, is "
    "refused.",
    "policy.max_epsilon_alone": "The same towards all other silos of a sum, if they worked against this one, where "
    "silos make noise together "
    '(`[privacy] noise = "joint"`). 0: no such plan is taken.',
    "policy.max_dp_delta": "The dp_delta at which that epsilon is counted.",
    "policy.min_grad_norm": "Least `[training] max_grad_norm` of a plan with record-level privacy.",
    "policy.max_model_value": "Largest parameter, in size, of a round model that is trained with record-level "
    "privacy. Trained models have none of a thousand.",
    "policy.shared_budget": "Folder of the registry by which silo folders of this machine find that they train on "
    "the same records, and "
    'count their epsilon together; `"none"`: count apart. Empty: `/var/lib/lorica/shared-budget` where that is there.',
    "policy.trust_on_first_use": "Whether the key that a silo comes with first is pinned unasked. It does not stop a "
    "coordinator that makes up silos.",
    "policy.allow_execution": "Whether SQL that the model wrote may run on the database, in the sandbox.",
    "policy.database_in_training": "Whether a plan may have this silo, where it trains without labels, drop a model's "
    "answers by what its database says of them. Whoever chooses the model then sees in updates which statements ran or "
    "gave rows: not for a coordinator that must not know what the database holds. Needs `allow_execution`.",
    "policy.tasks": "Tasks of packages that this silo's people installed and let plans train for, by name; those that "
    "Lorica brings are always allowed.",
    "policy.tell_scores": "Whether scores leave: how many held-out questions the model answers right, and the loss. "
    "false: under masks this silo adds zeros to their sum, in the clear it declines each evaluation.",
    "policy.smallest_evaluation": "Fewest held-out questions that scores may be of: a plan with fewer is refused, "
    "and with fewer in `dev.jsonl` no scores leave.",
    "training.device": "`auto` (the GPU where there is one), `cpu`, `cuda` or `cuda:N`. Each rank has, with `auto` and "
    "`cuda`, the GPU of its number on its machine; more ranks than GPUs, and `cuda:N` for several ranks, are refused.",
    "training.threads": "Threads of PyTorch. 0: its own choice; of a rank, its share of the machine's cores.",
    "training.processes": "[Ranks](#training-in-several-processes): processes that train together. 0: the agent's own "
    "alone.",
    "training.sharded": "Each rank holds a part of the model, its gradients and AdamW's state in place of all of it "
    "([how](#sharded)). Wants two processes or more.",
    "training.launch": "Program and arguments that start the ranks, `{processes}` being their number, such as "
    '`["srun", "--ntasks={processes}"]`. A program with a `/` in it is taken from the folder of silo.toml. Empty: the '
    "agent starts them on its own machine.",
    "training.rank_interface": "Network interface that ranks listen on. What they say there has neither TLS nor "
    "authentication: `lo` is heard on this machine alone.",
    "training.rank_timeout_s": "Seconds without a step after which ranks are ended and started again.",
    "sql.seconds": "Time for one statement, in seconds.",
    "sql.rows": "Most rows of a result.",
    "sql.result_bytes": "Most bytes of a result.",
    "sql.memory_bytes": "Memory of the sandbox above what its own code takes, in bytes.",
    "sql.question_seconds": "Where a plan has answers tried on the database in training "
    "(`policy.database_in_training`): seconds for those of one question, after which it is passed over.",
    "sql.round_seconds": "The same for all questions of a round: once they are spent, no more SQL runs in it, and what "
    "was not tried is passed over.",
    "sql.require_jail": "true: no SQL runs where a wall of [the sandbox's "
    "jail](hardening.md#the-jail-of-a-models-sql) is missing. false: the walls that the kernel has are used.",
    "storage.models_kept": "Round models kept on disk.",
    "metrics.listen": "`ADDRESS:PORT` where the running agent serves its [metrics](metrics.md#a-silos-own) to "
    "whoever asks: take loopback. Empty: nothing listens.",
    "personal.method": 'How this silo makes a [model of its own](personal.md): `"finetune"` trains on from the global '
    'model, `"heads"` trains on its output layer alone, `"adapters"` a low-rank change of it, `"ditto"` keeps one over '
    'the rounds and pulls it towards the global model; `"none"`: no such model.',
    "personal.epochs": "Epochs of the personal model, from each global model on.",
    "personal.learning_rate": 'Of the personal and the local model, with `"adapters"` of the personal one '
    "alone. 0: the plan's.",
    "personal.ditto_lambda": "Ditto's lambda: how strongly it pulls towards the global model.",
    "personal.adapter_rank": 'Rank of the changes that `"adapters"` trains.',
}


# --- settings and plans


def plan_table() -> str:
    described = template_comments(plan_template())
    rows = []
    for key, field in leaves(Plan, skip={"model", "training.overrides"}):
        default = (
            "required"
            if field.is_required()
            else as_toml(field.get_default(call_default_factory=True, validated_data={}))
        )
        rows.append((f"`{key}`", values_of(field), PLAN_UNITS.get(key, ""), default, described[key]))
    return markdown_table(("key", "values", "unit", "default", "meaning"), rows)


def plan_model_table() -> str:
    return markdown_table(
        ("key", "meaning"), [(f"`model.{key}`", MODEL_MEANINGS[key]) for key in ModelSection.model_fields]
    )


def family_table() -> str:
    """The types of T5's family, with their models; those that are not taken, and why."""
    # Here, not above: transformers takes seconds to import.
    from silo_wire.model_folders.t5_config import FAMILY

    taken = [(names, f"`{kind}`", f"`{FAMILY[kind][1].__name__}`") for kind, names in MODEL_TYPES.items()]
    others = [("—", f"`{kind}`", f"refused: {why}") for kind, why in NOT_TAKEN.items()]
    return markdown_table(("models", "`model_type` of config.json", "class of transformers"), [*taken, *others])


def preset_table() -> str:
    """Every key that a preset sets, and what stands there under each."""
    chosen = {name: flattened(preset(name)) for name in PRESETS}
    defaults = {key: field for key, field in leaves(Plan, skip={"model"}) if not field.is_required()}
    keys = sorted({key for values in chosen.values() for key in values}, key=order_of(Plan))

    def cell(name: str, key: str) -> str:
        if key in chosen[name]:
            return as_toml(chosen[name][key])
        if key.startswith("training.overrides."):
            return ""
        return f"_{as_toml(defaults[key].get_default(call_default_factory=True, validated_data={}))}_"

    return markdown_table(("key", *PRESETS), [(f"`{key}`", *(cell(name, key) for name in PRESETS)) for key in keys])


def federation_table() -> str:
    template = files("lorica_coordinator").joinpath("federation_template.toml").read_text(encoding="utf-8")
    described = template_comments(template)
    rows = []
    for key, field in leaves(coordinator_settings.Settings):
        default = (
            "required"
            if field.is_required()
            else as_toml(field.get_default(call_default_factory=True, validated_data={}))
        )
        rows.append((f"`{key}`", values_of(field), default, described[key]))
    return markdown_table(("key", "values", "default", "meaning"), rows)


def silo_table() -> str:
    rows = []
    for key, field in leaves(SiloSettings):
        default = as_toml(field.get_default(call_default_factory=True, validated_data={}))
        rows.append((f"`{key}`", values_of(field), default, SILO_MEANINGS[key]))
    return markdown_table(("key", "values", "default", "meaning"), rows)
