"""The keys of a settings model: their values in words, their comments in a template, their order."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_KEY_LINE = re.compile(r"(?:# )?([a-z_0-9]+) = \S.*")
_HEADING = re.compile(r"\[([a-z_.]+)\]")
_LIMITS: Final = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))


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


def order_of(model: type[BaseModel]) -> Callable[[str], tuple[int, str]]:
    place = {key: index for index, (key, _) in enumerate(leaves(model))}
    return lambda key: (place.get(key, len(place)), key)


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def values_of(field: FieldInfo) -> str:
    """What the field takes, in words: choices, or the kind of value and its bounds."""
    return _described(field.annotation, field.metadata)


def _described(annotation: Any, metadata: Sequence[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _described(inner, [*metadata, *more])
    if origin is Literal:
        return ", ".join(as_toml(choice) for choice in get_args(annotation))
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


def as_toml(value: Any) -> str:
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
