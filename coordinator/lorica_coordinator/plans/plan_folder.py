"""A plan folder: `plan.toml` that the operator edits, beside the files whose digests it holds.

    plan.toml           coordinator/lorica_coordinator/plans/plan_text.py
    model.safetensors   the initial parameters, in canonical order
    layout.json         that order: names, shapes, type
    config.json, generation_config.json, tokenizer.json, tokenizer_config.json ...
    base.safetensors, base_layout.json   with [adapters]: the model itself, of which model.safetensors is the addition

`create_plan` makes one; `compile_plan` turns it into the bundle that silos are offered, and refuses a folder in which
any file is not the one that plan.toml names.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorica_coordinator.plans.forecast import require_worth
from lorica_coordinator.plans.plan_text import plan_text
from lorica_coordinator.plans.presets import preset as preset_named
from lorica_coordinator.plans.silo_level import lacking
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.model_file import BASE_FILE, MODEL_FILE
from lorica_security.console.strict_toml import checked
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StorageError
from lorica_security.host import files
from silo_wire.canonical import Digest, digest_of
from silo_wire.manifest import Layout, manifest_of
from silo_wire.model_folders.tokenizer_trial import require_family
from silo_wire.plans.adapters import AdaptersSection
from silo_wire.plans.model_files import TOKENIZER_FILE
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.privacy import calibrated_noise
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE, LAYOUT_FILE

if TYPE_CHECKING:
    from lorica_coordinator.plans.model_source import ModelSource

PLAN_FILE = "plan.toml"
_NOT_YET = "0" * 64
_NO_FILES = {"config.json": _NOT_YET, LAYOUT_FILE: _NOT_YET}
_NO_MODEL = {
    "source": "none",
    "parameters": 1,
    "layout": _NOT_YET,
    "initial": _NOT_YET,
    "initial_bfloat16": _NOT_YET,
    "files": _NO_FILES,
}


def create_plan(
    plans: Path,
    *,
    name: str,
    federation: str,
    source: "ModelSource",
    preset: str = "default",
    seed: int = 0,
    overrides: Mapping[str, object] | None = None,
) -> PlanBundle:
    """Make the folder `plans`/`name` and return what it compiles to; same arguments, same plan digest.

    `overrides` maps dotted keys, such as "schedule.rounds" or "training.overrides.bank-b.epochs", to values that
    replace the preset's. Values are checked before the model is made. Raises ConfigurationError naming the key or the
    file, and leaves nothing behind then.
    """
    values, draft = _drafted(name=name, federation=federation, preset=preset, seed=seed, overrides=overrides or {})
    if draft.privacy.level != "none" and not draft.privacy.noise_multiplier:
        noise = calibrated_noise(draft.privacy, rounds=draft.schedule.rounds, weighted=draft.weighted)
        values["privacy"] = {**values["privacy"], "noise_multiplier": noise}
    require_new(plans, name)
    # Here, not above: it imports torch and transformers, which takes seconds, and what is refused needs neither.
    from lorica_coordinator.plans.adapters import write_adapters
    from lorica_coordinator.plans.model_source import write_model

    target = plans / name
    with files.work_folder(plans, ".new-") as work:
        try:
            made = write_model(source, work, seed)
            adapters = write_adapters(work, made.layout, draft.adapters, seed) if draft.adapters.rank else None
            trained = adapters or made
            names = {*made.files, BASE_LAYOUT_FILE} if adapters else made.files
            model = {
                "source": source.described,
                "revision": made.revision,
                "weights": dict(made.weights),
                "parameters": trained.layout.parameters,
                "layout": trained.layout.digest,
                "initial": trained.initial.digest,
                "initial_bfloat16": _published_in_bfloat16(work / MODEL_FILE, trained.layout),
                "base": made.initial.digest if adapters else None,
                "fixed": adapters.fixed.digest if adapters and adapters.fixed else None,
                "files": {file: digest_of((work / file).read_bytes()) for file in sorted(names)},
            }
            plan = checked(Plan, {**values, "model": model}, f"plan {name}")
            require_worth(plan, f"plan {name}")
            files.replace(work / PLAN_FILE, plan_text(plan).encode())
            work.chmod(0o755)
            work.rename(target)
            files.sync_folder(plans)
        except OSError as error:
            raise StorageError(f"plan {name} cannot be written to {plans}: {error.strerror or error}") from error
    return compile_plan(target)


def require_new(plans: Path, name: str) -> None:
    """Raises ConfigurationError where there is a folder of this name."""
    if (plans / name).exists():
        raise ConfigurationError(f"plan {name!r} already exists in {plans}: choose another name, or delete its folder")


def require_valid(
    *,
    name: str,
    federation: str,
    preset: str = "default",
    seed: int = 0,
    overrides: Mapping[str, object],
    parameters: int = 0,
) -> None:
    """Raises the ConfigurationError that `create_plan` would raise for these values, whatever the model; at silo level
    with all that they take, for a model of at most so many `parameters` (0: that is not known)."""

    def drafted(more: Mapping[str, object]) -> Plan:
        chosen = {**overrides, **more}
        return _drafted(name=name, federation=federation, preset=preset, seed=seed, overrides=chosen)[1]

    try:
        drafted({})
    except ConfigurationError as error:
        values = _values(name=name, federation=federation, preset=preset, seed=seed, overrides=overrides)
        if wanted := lacking(values, drafted, parameters):
            raise ConfigurationError(f"{error}; all that it takes: {wanted}") from error
        raise


def compile_plan(folder: Path) -> PlanBundle:
    """The plan bundle that the folder stands for; raises ConfigurationError or IntegrityError naming the file at
    fault."""
    plan_file = folder / PLAN_FILE
    if not folder.is_dir():
        raise ConfigurationError(f"plan {folder.name!r} is not in {folder.parent}: make it with coordinator plan new")
    try:
        plan = Plan.from_toml(_read(plan_file).decode(), str(plan_file))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{plan_file} is not UTF-8 text: save it as such") from error
    if plan.name != folder.name:
        raise ConfigurationError(
            f"{plan_file}: name = {plan.name!r}, but its folder is called {folder.name!r}: make them agree"
        )
    _require_promise(plan, plan_file)
    require_worth(plan, str(plan_file))
    contents = {name: _read(folder / name) for name in plan.model.files}
    for name, content in contents.items():
        if digest_of(content) != plan.model.files[name]:
            raise _changed(folder / name)
    try:
        bundle = PlanBundle(plan, contents)
        if TOKENIZER_FILE in contents:
            require_family(contents[TOKENIZER_FILE], TOKENIZER_FILE)
        vectors = [(MODEL_FILE, bundle.layout, plan.model.initial)]
        if bundle.base_layout is not None:
            vectors.append((BASE_FILE, bundle.base_layout, str(plan.model.base)))
        for name, layout, digest in vectors:
            if model_file.manifest_of_file(folder / name, layout).digest != digest:
                raise _changed(folder / name)
    except MalformedMessage as error:
        raise ConfigurationError(f"{folder}: {error}; make a new plan with coordinator plan new") from error
    return bundle


def _published_in_bfloat16(model: Path, layout: Layout) -> Digest | None:
    """The digest of the manifest of `model` rounded; None where a number of it is too large for bfloat16."""
    try:
        return manifest_of(
            layout.as_type("bfloat16"),
            model_file.in_bfloat16(model_file.blocks(model, model_file.check(model, layout))),
        ).digest
    except ConfigurationError:
        return None


def _require_promise(plan: Plan, where: Path) -> None:
    """Raise ConfigurationError where the plan's noise does not keep what its `[privacy]` says."""
    privacy = plan.privacy
    if privacy.level == "none":
        return
    cost = privacy.epsilon(rounds=plan.schedule.rounds, weighted=plan.weighted)
    if cost > privacy.target_epsilon:
        needed = calibrated_noise(privacy, rounds=plan.schedule.rounds, weighted=plan.weighted)
        raise ConfigurationError(
            f"{where}: with noise_multiplier = {privacy.noise_multiplier:g} the {plan.schedule.rounds} rounds cost "
            f"epsilon {cost:.3g}, target_epsilon is {privacy.target_epsilon:g}: set noise_multiplier to at least "
            f"{needed:.4g}"
        )


def _drafted(
    *, name: str, federation: str, preset: str, seed: int, overrides: Mapping[str, object]
) -> tuple[dict[str, Any], Plan]:
    values = _values(name=name, federation=federation, preset=preset, seed=seed, overrides=overrides)
    draft = checked(Plan, {**values, "model": _draft_model(values)}, f"plan {name}")
    draft.require_comparable_work(f"plan {name}")
    _require_adapters(draft.adapters, f"plan {name}")
    return values, draft


def _require_adapters(section: AdaptersSection, where: str) -> None:
    """Raise ConfigurationError for what says how adapters are made, of a plan that has none. Plans that were made with
    such keys stay what they are, and their digests with them."""
    usual = AdaptersSection()
    for key in () if section.rank else ("alpha", "layers"):
        value = getattr(section, key)
        if value != getattr(usual, key):
            raise ConfigurationError(
                f"{where}: [adapters] {key} = {json.dumps(value)} says how adapters are made, and with rank = 0 the "
                f"plan has none: set rank above 0, or leave {key} out"
            )


def _draft_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for the model while a plan's other values are checked."""
    adapters = values.get("adapters", {})
    if not adapters.get("rank"):
        return _NO_MODEL
    fixed = {"fixed": _NOT_YET} if adapters.get("train") == "b" else {}
    return {**_NO_MODEL, "base": _NOT_YET, **fixed, "files": {**_NO_FILES, BASE_LAYOUT_FILE: _NOT_YET}}


def _values(*, name: str, federation: str, preset: str, seed: int, overrides: Mapping[str, object]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "version": 1,
        **preset_named(preset),
        "name": name,
        "federation": federation,
        "seed": seed,
    }
    for dotted, value in overrides.items():
        *sections, key = dotted.split(".")
        if sections[:1] == ["model"] or dotted in ("version", "name", "federation", "seed"):
            raise ConfigurationError(f"plan key {dotted} cannot be set here: it follows from the plan's own arguments")
        at = values
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise ConfigurationError(f"unknown key {dotted}: {section} is not a section of a plan")
        at[key] = value
    return values


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(f"{path} is missing: make the plan with coordinator plan new") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _changed(path: Path) -> IntegrityError:
    return IntegrityError(
        f"{path} does not have the digest in [model] of {path.parent / PLAN_FILE}: it was changed; "
        "restore it, or make a new plan with coordinator plan new"
    )
