"""The small files that a model is told by, and how large each may be: none is parsed before that is known.

JSON from outside is parsed here alone. What it takes in memory is counted first, a key that stands twice is refused,
since two parsers may take two values of it, and so are numbers that JSON does not have.
"""

import json
from collections import Counter
from typing import Any, Final

from lorica_security.errors import MalformedMessage

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
ADDED_TOKENS_FILE: Final = "added_tokens.json"
PIECES_FILE: Final = "spiece.model"
VOCABULARY_FILE: Final = "vocab.json"
MERGES_FILE: Final = "merges.txt"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

CODE_KEYS: Final = frozenset({"auto_map", "custom_pipelines", "trust_remote_code"})
"""No file in JSON may have one: each names code to run."""

_MIB: Final = 1 << 20
MOST_BYTES: Final = {
    CONFIG_FILE: _MIB // 4,
    GENERATION_FILE: _MIB // 4,
    TOKENIZER_FILE: 32 * _MIB,
    TOKENIZER_CONFIG_FILE: _MIB,
    SPECIAL_TOKENS_FILE: _MIB,
    ADDED_TOKENS_FILE: _MIB,
    PIECES_FILE: 16 * _MIB,
    VOCABULARY_FILE: 16 * _MIB,
    MERGES_FILE: 16 * _MIB,
}
"""mT5 has the largest: a tokenizer.json of 16 million bytes and a spiece.model of 4 million."""
_MOST_LISTS: Final = 1 << 19
"""Lists and objects in one file; mT5's vocabulary has 250,000. Memory is for these and values, not for bytes."""
_MOST_VALUES: Final = 1 << 20


def too_large(raw: bytes, most_bytes: int) -> str:
    """What there is too much of in JSON that nobody has parsed yet; "" for nothing."""
    for count, most, what in (
        (len(raw), most_bytes, "bytes"),
        (raw.count(b"[") + raw.count(b"{"), _MOST_LISTS, "lists and objects"),
        (raw.count(b","), _MOST_VALUES, "values"),
    ):
        if count > most:
            return f"has {count:,} {what}: more than {most:,}"
    return ""


def parsed(raw: bytes, where: str, most_bytes: int) -> dict[str, Any]:
    """The object that `raw` is; raises MalformedMessage naming `where`."""
    if problem := too_large(raw, most_bytes):
        raise MalformedMessage(f"{where} {problem}")
    try:
        value = json.loads(raw, object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"{where} is not JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise MalformedMessage(f"{where} is not a JSON object")
    return value


def parsed_file(name: str, raw: bytes) -> dict[str, Any]:
    """The same of a file of this name, in which no code may be named either."""
    value = parsed(raw, name, MOST_BYTES[name])
    refuse_code(name, value)
    return value


def refuse_code(where: str, value: object) -> None:
    """Raises MalformedMessage for a key of CODE_KEYS, however deep it lies."""
    pending = [value]
    while pending:
        it = pending.pop()
        if isinstance(it, dict):
            if named := CODE_KEYS.intersection(it):
                raise MalformedMessage(
                    f"{where} has {min(named)}, which names code to run: only plain T5 models are taken"
                )
            pending.extend(it.values())
        elif isinstance(it, list):
            pending.extend(it)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice[:60]!r} stands twice")
    return value


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number in JSON")
