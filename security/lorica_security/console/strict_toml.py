"""Files that people edit: TOML into frozen values, strictly, and every mistake as one line that names key, value and
remedy."""

import tomllib
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import NAME_RULE, federation_name


class Section(BaseModel):
    """A table of such a file: frozen, an unknown key is refused, no value is converted to another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _name(text: str) -> str:
    try:
        return federation_name(text)  # one rule for every name; pydantic wants a ValueError
    except ConfigurationError as error:
        raise ValueError(f"use {NAME_RULE}") from error


NameText = Annotated[str, AfterValidator(_name)]
"""A federation's, plan's or silo's name."""

_LOOKS_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Printable by their category, and nothing is seen of them."""


def _shown(text: str) -> str:
    if not text.isprintable() or _LOOKS_BLANK.intersection(text) or text.strip(" ") != text or "  " in text:
        raise ValueError("use printable characters, with single spaces between words")
    return text


ShownText = Annotated[str, AfterValidator(_shown)]
"""Free text that people read in a terminal and in reports: one line, which cannot be made to look like several."""

Model = TypeVar("Model", bound=BaseModel)


def parse_toml(kind: type[Model], text: str, where: str) -> Model:
    """`text` as a `kind`; raises ConfigurationError naming `where`."""
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is not TOML: {error}") from error
    return checked(kind, value, where)


def checked(kind: type[Model], value: object, where: str) -> Model:
    """`value` as a `kind`; raises ConfigurationError naming `where`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise ConfigurationError(f"{where}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """A pydantic error as one line: every key at fault, its value and what it must be."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key}: remove it or correct its spelling")
        elif item["type"] == "missing":
            lines.append(f"key {key} is missing: add it")
        elif not key or item["msg"].startswith("Value error, ["):  # it names the key itself
            lines.append(item["msg"].removeprefix("Value error, "))
        else:
            shown = repr(item["input"])
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            says = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key} = {shown}: {says[0].lower()}{says[1:]}")
    return "; ".join(lines)
