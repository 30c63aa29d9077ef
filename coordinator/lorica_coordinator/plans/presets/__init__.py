"""Presets: starting values of a plan, as TOML beside this file. What a preset leaves out has the plan's own default."""

import tomllib
from importlib.resources import files
from typing import Any

from lorica_security.errors import ConfigurationError

PRESETS = ("default", "paper-text", "paper-code")


def preset(name: str) -> dict[str, Any]:
    """The sections of a preset; raises ConfigurationError for an unknown name."""
    if name not in PRESETS:
        raise ConfigurationError(f"preset {name!r} is unknown: use one of {', '.join(PRESETS)}")
    return tomllib.loads(files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
