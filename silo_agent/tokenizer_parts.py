"""What a plan's tokenizer.json may be made of under masks: parts that keep what a text says, whatever it says.

A normalizer with a pattern of the plan's own can turn every text but one silo's into the same few tokens. All other silos then make the
same update, which the coordinator can make too, and their sum is that one's. So can parts that make a text longer than a plan's
`max_input_tokens`, of which all but the first words are cut off. Taken is what the tokenizers of T5's family
have (T5, Flan-T5, mT5, umT5, CodeT5) and what this project makes: by its parameters no part makes two texts alike but in white space,
case and compatible forms of characters, or longer than a few tokens for each of its bytes.
"""

import base64
import binascii
import json
import struct
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from silo_wire.plan import TOKENIZER_FILE

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
"""Each has to have a piece of its own, or whole words are unknown and alike."""
_SPACES: Final = frozenset(" \t\n\r\N{NO-BREAK SPACE}▁")
_RUN_OF_SPACES: Final = " {2,}"
"""The one regular expression that is taken: mT5 and umT5 have it."""
_BLANK: Final = frozenset("▁\N{REPLACEMENT CHARACTER}")
"""What sentencepiece makes a space of beside white space and control characters."""
_MOST_AROUND: Final = 2
"""Special tokens that a template has beside the text: one before it and one after."""
_MOST_STEPS: Final = 1 << 20
"""Through a character map; those of sentencepiece take some ten thousand."""
_LONGEST_WORD: Final = 16
"""Letters of ASCII that a character map may have one text for; those of sentencepiece have none longer than three."""

Part = Mapping[str, Any]


def odd_parts(files: Mapping[str, bytes]) -> Iterator[str]:
    """A line for each part of the tokenizer that no tokenizer of T5's family has; none where the plan has no tokenizer."""
    if TOKENIZER_FILE not in files:
        return
    try:
        value = json.loads(files[TOKENIZER_FILE])
    except (ValueError, RecursionError):
        yield "it is not JSON"
        return
    if not isinstance(value, dict):
        yield "it is not a JSON object"
        return
    for name, known in _PARTS.items():
        yield from _walk(name, value.get(name), known)
    yield from _model(value.get("model"))


def _walk(where: str, part: object, known: "Mapping[str, Callable[[Part], str]]") -> Iterator[str]:
    """Of one part, and of all those that it is a sequence of."""
    if part is None:
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        yield f"{where} has no type"
    elif kind == "Sequence":
        within = next(
            (part[key] for key in ("normalizers", "pretokenizers", "processors", "decoders") if key in part), None
        )
        if not isinstance(within, list) or any(isinstance(it, dict) and it.get("type") == "Sequence" for it in within):
            yield f"{where} is a Sequence of something else than parts"
            return
        kinds = [it.get("type") for it in within if isinstance(it, dict)]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            yield f"{where} has {_shown(twice)} twice"  # each time a text could grow
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
    """A replacement is of spaces by no more spaces: of letters, enough of them would leave nothing of a text; more spaces push it away."""
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
        raw = base64.b64decode(text, validate=True)
        for key, value in _of_one_character(raw):
            if not _says_the_same(key, value):
                return f"that makes {_shown(value)} of {_shown(key)}"
    except (binascii.Error, TypeError, ValueError, IndexError, struct.error):
        return "that is no character map"
    return ""


def _says_the_same(key: str, value: str) -> bool:
    """Whether a map of Unicode's compatibility forms may have this, with or without case; later ones know more characters."""
    before, after = (unicodedata.normalize("NFKC", it).casefold() for it in (key, value))
    kinds = {unicodedata.category(it) for it in key}
    blank = value in ("", " ") and (key in _BLANK or all(kind[0] in "CZ" for kind in kinds))
    return before == after or unicodedata.normalize("NFKC", before) == after or blank or "Cn" in kinds


def _of_one_character(raw: bytes) -> Iterator[tuple[str, str]]:
    """What a character map (a Darts double array, then texts that end with 0) makes of single characters and of words of ASCII.

    Raises ValueError, IndexError or struct.error for what is none.
    """
    (size,) = struct.unpack_from("<I", raw)
    units = struct.unpack_from(f"<{size // 4}I", raw, 4)
    texts = raw[4 + size :]
    steps = 0

    def below(base: int, labels: range) -> Iterator[tuple[int, int, str | None]]:
        """Each child by its byte: where its own children are, and the text that ends here."""
        nonlocal steps
        for label in labels:
            at = base ^ label
            if at < len(units) and units[at] & (1 << 31 | 0xFF) == label:
                steps += 1
                if steps > _MOST_STEPS:
                    raise ValueError("a map without end")
                unit = units[at]
                own = at ^ _offset(unit)
                text = None
                if unit >> 8 & 1:
                    begin = units[own] & (1 << 31) - 1
                    text = texts[begin : texts.index(0, begin)].decode()
                yield label, own, text

    ascii_alone, lead, following = range(0x20, 0x7F), range(0xC2, 0xF5), range(0x80, 0xC0)
    pending: list[tuple[bytes, int]] = []
    for label, base, text in below(_offset(units[0]), range(1, 0x80)):
        if text is not None:
            yield chr(label), text
        if label in ascii_alone:
            pending.append((bytes([label]), base))
    for label, base, text in below(_offset(units[0]), lead):
        if text is not None:
            raise ValueError("a text of part of a character: of all that begin so the library makes it")
        pending.append((bytes([label]), base))
    while pending:
        key, base = pending.pop()
        is_ascii = key[0] < 0x80
        for label, own, text in below(base, ascii_alone if is_ascii else following):
            longer = key + bytes([label])
            whole = is_ascii or len(longer) == _length(key[0])
            if whole and text is not None:
                yield longer.decode(), text
            elif text is not None:
                raise ValueError("a text of part of a character")
            if is_ascii and len(longer) == _LONGEST_WORD:
                raise ValueError("a text of many letters")
            if is_ascii or not whole:
                pending.append((longer, own))


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)


def _length(lead: int) -> int:
    """Bytes of a character in UTF-8."""
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _model(model: object) -> Iterator[str]:
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in ("Unigram", "BPE"):
        yield f"model is {_shown(kind)}"
        return
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):  # by an affix no letter is its own piece
        if model.get(key):
            yield f"model has {key} {_shown(model[key])}"
    vocabulary = model.get("vocab")
    pieces: Sequence[object] = ()
    if isinstance(vocabulary, list):
        pieces = [it[0] if isinstance(it, list) and it else None for it in vocabulary]
        at = model.get("unk_id")
        known = pieces[at] if isinstance(at, int) and 0 <= at < len(pieces) else None
        if not (isinstance(known, str) and known[:1] == "<" and known[-1:] == ">"):
            yield f"model has the piece {_shown(known)} for what is unknown: a row of them is one"
    elif isinstance(vocabulary, dict):
        pieces = list(vocabulary)
        ids = vocabulary.values()
        if not all(isinstance(it, int) for it in ids) or sorted(ids) != list(range(len(pieces))):
            yield f"model numbers its {len(pieces)} pieces otherwise than 0 to {len(pieces) - 1}: those of one number are alike"
    unknown = [letter for letter in LETTERS if letter not in pieces]
    if unknown:
        yield f"model has no piece for {_shown(''.join(unknown))}: texts of such letters are alike"


def _shown(value: object) -> str:
    text = json.dumps(value)  # of ASCII alone
    return text if len(text) <= 60 else f"{text[:57]}..."


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
