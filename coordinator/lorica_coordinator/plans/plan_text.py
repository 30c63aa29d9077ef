"""A plan as the commented TOML that an operator edits: plan_template.toml with the plan's own values in place."""

import json
import re
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from silo_wire.plans.plan import Plan
from silo_wire.plans.robust import MEAN, ROBUST_RULES
from silo_wire.plans.sections.model import ModelSection
from silo_wire.weightings.named import WEIGHTINGS

_KEY_LINE = re.compile(r"(?:# )?([a-z_0-9]+) = \S.*")
_HEADING = re.compile(r"\[([a-z_.]+)\]")
_WEIGHTINGS, _REDUCERS = "# WEIGHTINGS\n", "# REDUCERS\n"
_WIDTH = 118  # and "# " before each line


def plan_template() -> str:
    """Every key that an operator may set, each under a comment that gives its meaning and unit, with the plan's
    defaults."""
    template = files(__package__).joinpath("plan_template.toml").read_text(encoding="utf-8")
    return template.replace(_WEIGHTINGS, _weightings()).replace(_REDUCERS, _reducers())


def _weightings() -> str:
    """The comment of `weighting`: every one that there is."""
    *others, last = (f'"{weighting.name}" ({weighting.meaning})' for weighting in WEIGHTINGS)
    return _comment(f"What a silo's delta weighs: {', '.join(others)} or {last}.")


def _reducers() -> str:
    """The comment of `reducer`, the same."""
    *others, last = (f'"{rule.name}" ({rule.meaning})' for rule in ROBUST_RULES)
    return _comment(
        f'What deltas come to: "{MEAN}" (weighted), or a robust one, against hostile silos: {", ".join(others)} or '
        f'{last}. These need weighting "equal", and neither secure_aggregation nor privacy level "silo".'
    )


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, _WIDTH, break_long_words=False))


def plan_text(plan: Plan) -> str:
    """`plan.toml` for this plan: the template with its values, silo overrides, and the model section."""
    values = plan.model_dump(mode="json")
    section: Mapping[str, Any] = values
    lines = []
    for line in plan_template().splitlines():
        heading, key_line = _HEADING.fullmatch(line), _KEY_LINE.fullmatch(line)
        if heading:
            section = values[heading[1]]
        elif key_line and key_line[1] in section and section[key_line[1]] is not None:
            line = f"{key_line[1]} = {_toml_value(section[key_line[1]])}"
        lines.append(line)
    return "\n".join([*lines, "", *_overrides(plan), *_model(plan.model)])


def _overrides(plan: Plan) -> list[str]:
    lines = [
        "# What single silos do differently: any of learning_rate, epochs, batch_size, gradient_accumulation, for "
        "example",
        "# [training.overrides.hospital-a]",
        "# learning_rate = 0.0001",
        "",
    ]
    for silo, override in plan.training.overrides.items():
        changed = override.model_dump(mode="json", exclude_none=True)
        lines += [
            f"[training.overrides.{silo}]",
            *(f"{key} = {_toml_value(value)}" for key, value in changed.items()),
            "",
        ]
    return lines


def _model(model: ModelSection) -> list[str]:
    return [
        "# Written by `coordinator plan new`: the digests of the files in this folder. Not to be edited; for "
        "another model",
        "# make another plan.",
        "[model]",
        f"source = {_toml_value(model.source)}",
        *([f"revision = {_toml_value(model.revision)}"] if model.revision else []),
        f"parameters = {model.parameters}",
        f"layout = {_toml_value(model.layout)}",
        f"initial = {_toml_value(model.initial)}",
        *([f"initial_bfloat16 = {_toml_value(model.initial_bfloat16)}"] if model.initial_bfloat16 else []),
        *([f"base = {_toml_value(model.base)}"] if model.base else []),
        *([f"fixed = {_toml_value(model.fixed)}"] if model.fixed else []),
        "",
        *(
            ["# SHA-256 of each file of parameters at the source.", "[model.weights]", *_digests(model.weights), ""]
            if model.weights
            else []
        ),
        "[model.files]",
        *_digests(model.files),
        "",
    ]


def _digests(files: Mapping[str, str]) -> list[str]:
    return [f"{_toml_value(name)} = {_toml_value(digest)}" for name, digest in sorted(files.items())]


def _toml_value(value: bool | int | float | str | list[str]) -> str:
    """Booleans, numbers, strings and lists of these have one spelling in JSON and TOML, but for DEL, which no checked
    value holds."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
