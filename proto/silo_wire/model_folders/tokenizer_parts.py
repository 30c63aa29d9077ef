"""What a plan's tokenizer.json may be made of: parts that cost little, and that keep what a text says, whatever it
says.

A normalizer with a pattern of the plan's own can turn every text but one silo's into the same few tokens. All other
silos then make the same update, which the coordinator can make too, and their sum is that one's. So can parts that make
a text longer than a plan's `max_input_tokens`, of which all but the first words are cut off. Taken is what the
tokenizers of T5's family have (T5, Flan-T5, mT5, umT5, CodeT5) and what this project makes: by its parameters no part
makes two texts alike but in white space, case and compatible forms of characters, or longer than a few tokens for each
of its bytes. So they also bound what a text costs: nested replacements make gigabytes of one word, and a regular
expression that backtracks ends the process.

`foreign_parts` is asked of every tokenizer, before a library sees it; `odd_parts`, which asks for letters as well, of
those under masks.
"""

import base64
import binascii
import json
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from lorica_security.errors import MalformedMessage
from silo_wire.plans.model_files import MOST_BYTES, TOKENIZER_FILE, parsed, too_large

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
"""Each has to have a piece of its own, or whole words are unknown and alike."""
_SPACES: Final = frozenset(" \t\n\r\N{NO-BREAK SPACE}▁")
_RUN_OF_SPACES: Final = " {2,}"
"""The one regular expression that is taken: mT5 and umT5 have it."""
_BLANK: Final = frozenset("▁\N{REPLACEMENT CHARACTER}")
"""What sentencepiece makes a space of beside white space and control characters."""
_MOST_AROUND: Final = 2
"""Special tokens that a template has beside the text: one before it and one after."""
_MOST_ADDED: Final = 10_000
"""Tokens beside the vocabulary; umT5 has 303."""
_WITHIN: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""Where a Sequence of each has its parts; others the library does not look at."""
_KEYS: Final = frozenset(
    (
        "version",
        "truncation",
        "padding",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    )
)
_MOST_MAP_BYTES: Final = 1 << 19
"""Of a character map; those of sentencepiece have 247,165."""
_MOST_STEPS: Final = 1 << 19
"""Through a character map; those of sentencepiece take 264,227."""
_LONGEST_KEY: Final = 24
"""Bytes that a character map may have one text for; those of sentencepiece have 12 at most."""
_LONGEST_TEXT: Final = 72
"""Bytes of what becomes of these: 18 characters is the most that NFKC makes of one, and those of sentencepiece have 33
bytes."""

Part = Mapping[str, Any]


def odd_parts(files: Mapping[str, bytes]) -> Iterator[str]:
    """A line for each part of the tokenizer that no tokenizer of T5's family has; none where the plan has no
    tokenizer."""
    if TOKENIZER_FILE in files:
        foreign, lost = _parts(files[TOKENIZER_FILE])
        yield from (*foreign, *lost)


def foreign_parts(raw: bytes) -> tuple[str, ...]:
    """The same of a tokenizer.json alone, but for what makes texts alike by the pieces that its vocabulary has."""
    return _parts(raw)[0]


@lru_cache(maxsize=2)
def _parts(raw: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is foreign, and what is lost. Agents ask again and again, and a character map takes half a second."""
    if problem := too_large(raw, MOST_BYTES[TOKENIZER_FILE]):
        return (f"it {problem}",), ()  # found out before it is parsed: nobody has approved the plan yet
    try:
        value = parsed(raw, "it", MOST_BYTES[TOKENIZER_FILE])
    except MalformedMessage as error:
        return (str(error),), ()
    model = value.get("model")
    return tuple(_foreign(value)), tuple(_lost(model)) if isinstance(model, dict) and model.get(
        "type"
    ) in _MODELS else ()


def _foreign(value: Part) -> Iterator[str]:
    if unknown := sorted(value.keys() - _KEYS):
        yield f"it has {_shown(unknown[0])}, which no tokenizer has"
    for name, known in _PARTS.items():
        yield from _walk(name, value.get(name), known)
    if len(_listed(value.get("added_tokens"))) > _MOST_ADDED:
        yield f"added_tokens has more than {_MOST_ADDED:,}"
    if "" in (it.get("content") for it in _listed(value.get("added_tokens")) if isinstance(it, dict)):
        yield "added_tokens has the empty text"
    yield from _model(value.get("model"))


def _walk(where: str, part: object, known: "Mapping[str, Callable[[Part], str]]") -> Iterator[str]:
    """Of one part, and of all those that it is a sequence of."""
    if part is None:
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        yield f"{where} has no type"
    elif kind == "Sequence":
        within = part.get(_WITHIN[where])
        if not isinstance(within, list) or any(isinstance(it, dict) and it.get("type") == "Sequence" for it in within):
            yield f"{where} is a Sequence of something else than parts"
            return
        kinds = [it.get("type") for it in within if isinstance(it, dict)]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            yield f"{where} has {_shown(twice)} twice"  # each time a text could grow
            return
        if "Precompiled" in kinds and (parting := next((kind for kind in kinds if kind in ("NFD", "NFKD")), None)):
            # The library looks up the first text of a letter and its marks: of two marks the second would be lost.
            yield f"{where} has {parting} beside Precompiled"
            return
        for each in within:
            yield from _walk(where, each, known)
    elif kind not in known:
        yield f"{where} has {_shown(kind)}"
    elif problem := known[kind](part):
        yield f"{where} has {kind} {problem}"


def _anything(_part: Part) -> str:
    return ""


def _of_spaces(part: Part) -> str:
    """A replacement is of spaces by no more spaces: of letters, enough of them would leave nothing of a text; more
    spaces push it away."""
    pattern, content = part.get("pattern"), part.get("content")
    if not isinstance(pattern, dict) or len(pattern) != 1 or not isinstance(content, str):
        return "of no pattern"
    ((kind, text),) = pattern.items()
    if kind == "Regex" and text != _RUN_OF_SPACES:
        return f"of the regular expression {_shown(text)}"
    if kind not in ("Regex", "String") or (kind == "String" and not _is_spaces(text)) or not _is_spaces(content):
        return f"of {_shown(text)} by {_shown(content)}"
    shortest = 2 if kind == "Regex" else len(text)
    if not text or len(content) > shortest:
        return f"of {_shown(text)} by more, {_shown(content)}"
    return ""


def _is_spaces(text: object) -> bool:
    return isinstance(text, str) and _SPACES.issuperset(text)


def _by_underscore(part: Part) -> str:
    return "" if part.get("replacement") == "▁" else f"with the replacement {_shown(part.get('replacement'))}"


def _of_spaces_at_the_ends(part: Part) -> str:
    """As a decoder Strip takes any character."""
    return "" if _is_spaces(part.get("content", " ")) else f"of {_shown(part.get('content'))}"


def _with_the_text(part: Part) -> str:
    single = part.get("single")
    pieces = [next(iter(it.items()), ("", None)) if isinstance(it, dict) else ("", None) for it in _listed(single)]
    kinds = [kind for kind, _ in pieces]
    texts = [value.get("id") if isinstance(value, dict) else None for kind, value in pieces if kind == "Sequence"]
    if texts != ["A"] or not {"Sequence", "SpecialToken"}.issuperset(kinds):
        return "that is not the text once and tokens around it"
    if len(kinds) > 1 + _MOST_AROUND:
        return f"with {len(kinds) - 1} tokens around the text: more than {_MOST_AROUND} push it away"
    special = part.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list) or len(ids) != 1:
            return f"with a token of other than one id, {_shown(token)}"
    return ""


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _charsmap(part: Part) -> str:
    text = part.get("precompiled_charsmap")
    if not text:
        return ""  # of a model that normalises nothing
    try:
        return map_problem(base64.b64decode(text, validate=True))
    except (binascii.Error, TypeError, ValueError):
        return "that is no character map"


def map_problem(raw: bytes) -> str:
    """What is wrong with a character map of sentencepiece; "" if nothing is."""
    try:
        for key, value in _texts(raw):
            if problem := _loss(key, value):
                return problem
    except (ValueError, IndexError, struct.error):
        return "that is no character map"
    return ""


def _loss(key: str, value: str) -> str:
    """What is wrong with one text of a map, which may be of Unicode's compatibility forms, with or without case; "" if
    nothing is.

    The library puts the first text that it finds for a letter and its marks in the place of all of them, if they are
    less than 6 bytes. So what would stay as it is has no text: the marks behind it would be lost.
    """
    normal = unicodedata.normalize("NFKC", key)
    if value == normal != key:
        return ""  # nearly all are such
    kinds = {unicodedata.category(it) for it in key}
    if "Cn" in kinds:  # later versions of Unicode know more characters
        return ""
    if value in ("", " ") and (key in _BLANK or all(kind[0] in "CZ" for kind in kinds)):
        return ""
    before, after = normal.casefold(), unicodedata.normalize("NFKC", value).casefold()
    if after not in (before, unicodedata.normalize("NFKC", before)):
        return f"that makes {_shown(value)} of {_shown(key)}"
    if key == value or key == normal == before:
        return f"that has a text, {_shown(value)}, for {_shown(key)}: marks behind it are lost"
    return ""


def _texts(raw: bytes) -> Iterator[tuple[str, str]]:
    """All that a character map (a Darts double array, then texts that end with 0) has texts for, and these.

    Raises ValueError, IndexError or struct.error for what is none, or is larger than any.
    """
    if len(raw) > _MOST_MAP_BYTES:
        raise ValueError("more than any map has")
    (size,) = struct.unpack_from("<I", raw)
    units = struct.unpack_from(f"<{size // 4}I", raw, 4)
    texts = raw[4 + size :]
    children: dict[int, list[int]] = {}
    """By what their places are counted from: a child's place is that, xor its byte, which its unit tells."""
    for at, unit in enumerate(units):
        if unit & 0xFF and not unit >> 31:
            children.setdefault(at ^ unit & 0xFF, []).append(at)
    steps = 0
    pending = [(b"", _offset(units[0]))]
    while pending:
        key, base = pending.pop()
        if len(key) == _LONGEST_KEY and base in children:
            raise ValueError("a text for more letters than any map has")
        for at in children.get(base, ()):
            steps += 1
            if steps > _MOST_STEPS:
                raise ValueError("a map without end")
            longer, own = key + bytes([base ^ at]), at ^ _offset(units[at])
            if units[at] >> 8 & 1:
                begin = units[own] & (1 << 31) - 1
                text = texts[begin : texts.index(0, begin, begin + _LONGEST_TEXT + 1)]
                # Of part of a character it is no UTF-8: of all that begin so the library would make that text.
                yield longer.decode(), text.decode()
            pending.append((longer, own))


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


def _model(model: object) -> Iterator[str]:
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in _MODELS:
        yield f"model is {_shown(kind)}"
        return
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):  # by an affix no letter is its own piece
        if model.get(key):
            yield f"model has {key} {_shown(model[key])}"
    if "" in _pieces(model):
        yield "model has the empty text for a piece"


def _pieces(model: Part) -> Sequence[object]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        return [it[0] if isinstance(it, list) and it else None for it in vocabulary]
    return list(vocabulary) if isinstance(vocabulary, dict) else []


def _lost(model: Part) -> Iterator[str]:
    """What is alike by its pieces."""
    vocabulary, pieces = model.get("vocab"), _pieces(model)
    if isinstance(vocabulary, list):
        at = model.get("unk_id")
        known = pieces[at] if isinstance(at, int) and 0 <= at < len(pieces) else None
        if not (isinstance(known, str) and known[:1] == "<" and known[-1:] == ">"):
            yield f"model has the piece {_shown(known)} for what is unknown: a row of them is one"
    elif isinstance(vocabulary, dict):
        ids = vocabulary.values()
        if not all(isinstance(it, int) for it in ids) or sorted(ids) != list(range(len(pieces))):
            yield (
                f"model numbers its {len(pieces)} pieces otherwise than 0 to {len(pieces) - 1}: those of one number "
                "are alike"
            )
    unknown = [letter for letter in LETTERS if letter not in pieces]
    if unknown:
        yield f"model has no piece for {_shown(''.join(unknown))}: texts of such letters are alike"


def _shown(value: object) -> str:
    text = json.dumps(value)  # of ASCII alone
    return text if len(text) <= 60 else f"{text[:57]}..."


_MODELS: Final = ("Unigram", "BPE")
_PARTS: Final[Mapping[str, Mapping[str, Callable[[Part], str]]]] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip"), _anything),
        "Precompiled": _charsmap,
        "Replace": _of_spaces,
    },
    "pre_tokenizer": {
        **dict.fromkeys(("WhitespaceSplit", "ByteLevel", "Digits"), _anything),
        "Metaspace": _by_underscore,
    },
    "post_processor": {
        **dict.fromkeys(("ByteLevel", "RobertaProcessing", "BertProcessing"), _anything),
        "TemplateProcessing": _with_the_text,
    },
    "decoder": {
        **dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse"), _anything),
        "Metaspace": _by_underscore,
        "Replace": _of_spaces,
        "Strip": _of_spaces_at_the_ends,
    },
}
"""Each part, the kinds that are taken of it, and what is wrong with one of such a kind."""
