"""Hypothesis strategies that spoil what is valid: raw bytes, protobuf messages by their fields, JSON by its values.

Raw noise dies in the first length check; what has been valid and is a little wrong gets further in.
"""

import copy
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

EXTREMES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_DOUBLE: [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 3, (1 << 31) - 1, 1 << 31, (1 << 32) - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 4, 1 << 31, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1],
    FieldDescriptor.TYPE_ENUM: [-1, 0, 1, 2, 99, (1 << 31) - 1],
    FieldDescriptor.TYPE_BOOL: [False, True],
}
STRINGS = st.sampled_from(
    ["", "a", "\0", "x" * 501, "x" * 5000, "../../etc/passwd", "\x1b[2J", "å\n\r", "\u202e", "dev"]
)
BYTES = st.one_of(st.sampled_from([b"", b"\0" * 31, b"\0" * 32, b"\xff" * 33, b"\0" * 5000]), st.binary(max_size=64))


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return STRINGS
        case FieldDescriptor.TYPE_BYTES:
            return BYTES
        case _:
            return st.sampled_from(EXTREMES[field.type])


@st.composite
def spoilt_message(draw: st.DrawFn, valid: st.SearchStrategy[M]) -> M:
    """A message of which one to four fields, at any depth, were set, cleared, multiplied or emptied."""
    message = draw(valid)
    changed: M = type(message)()
    changed.CopyFrom(message)
    for _ in range(draw(st.integers(1, 4))):
        _spoil(draw, changed)
    return changed


def _spoil(draw: st.DrawFn, message: Any) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if field.is_repeated:
        values = getattr(message, field.name)
        match draw(st.sampled_from(["cut", "double", "add", "empty"])):
            case "cut" if values:
                del values[draw(st.integers(0, len(values) - 1))]
            case "double":
                values.extend(list(values))
            case "add" if field.type != FieldDescriptor.TYPE_MESSAGE:
                values.append(draw(_value(field)))
            case _:
                del values[:]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if draw(st.integers(0, 4)) == 0:
            message.ClearField(field.name)
        else:
            _spoil(draw, getattr(message, field.name))
            getattr(message, field.name).SetInParent()
    elif draw(st.booleans()):
        setattr(message, field.name, draw(_value(field)))
    else:
        message.ClearField(field.name)


@st.composite
def spoilt_bytes(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with bits flipped, and parts cut out, repeated, moved or replaced."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        size = draw(st.integers(1, 40))
        match draw(st.sampled_from(["flip", "set", "cut", "repeat", "insert", "truncate", "length"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set":
                data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "cut":
                del data[at : at + size]
            case "repeat":
                data[at:at] = data[at : at + size]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=40))
            case "truncate":
                del data[at:]
            case _:
                data[at : at + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\x84\xff\xff\xff", b"\0\0\0\0"]))
    return bytes(data)


ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 40,
    1 << 63,
    10**300,
    0.5,
    math.nan,
    math.inf,
    "",
    "\ud800",
    "\0",
    "x" * 5000,
    "ab" * 32,
    [],
    {},
    [[]],
    [1, 2, 3],
    [1 << 40] * 40,
    {"": None},
]


@st.composite
def spoilt_json(draw: st.DrawFn, valid: Any, spell: Callable[[Any], bytes]) -> bytes:
    """`valid` (of dicts, lists and plain values) with one to four of its parts replaced, removed or added, as `spell`
    writes it."""
    value = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 4))):
        value = _spoil_json(draw, value)
    try:
        return spell(value)
    except (ValueError, TypeError):  # what canonical JSON cannot say, another spelling can
        return json.dumps(value).encode()


def _spoil_json(draw: st.DrawFn, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 3)) == 0:
        return copy.deepcopy(draw(st.sampled_from(ODD_VALUES)))
    if isinstance(value, list):
        at = draw(st.integers(0, min(len(value) - 1, 20)))
        match draw(st.sampled_from(["into", "into", "cut", "repeat"])):
            case "into":
                value[at] = _spoil_json(draw, value[at])
            case "cut":
                del value[at]
            case _:
                value.insert(at, copy.deepcopy(value[at]))
        return value
    key = draw(st.sampled_from(sorted(value)))
    match draw(st.sampled_from(["into", "into", "into", "cut", "rename"])):
        case "into":
            value[key] = _spoil_json(draw, value[key])
        case "cut":
            del value[key]
        case _:
            value[draw(st.sampled_from(["", "more", "\ud800", key.upper()]))] = copy.deepcopy(value[key])
    return value
