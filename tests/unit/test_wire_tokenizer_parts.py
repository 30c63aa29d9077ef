"""What a plan's tokenizer may be made of under masks: those of T5's family pass, and parts that lose what a text says
do not."""

import base64
import json
import string
import struct
import tracemalloc
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_agent.commands.plan_review import unusual
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.model_folders import tokenizer_parts
from silo_wire.model_folders.folder_tokenizer import byte_tokenizer
from silo_wire.model_folders.tokenizer_parts import LETTERS, odd_parts
from tests.support.tiny_t5 import bundle_of, random_model, sized_tokenizer, tokenizer_json, trained_pieces

RULES = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
MASKED: dict[str, Any] = {
    "schedule": {"rounds": 3, "min_silos": 3},
    "aggregation": {"secure_aggregation": True, "weighting": "equal"},
}


def odd(tokenizer: dict[str, Any]) -> list[str]:
    return list(odd_parts({"tokenizer.json": json.dumps(tokenizer).encode()}))


def with_part(name: str, part: object) -> dict[str, Any]:
    return {**json.loads(tokenizer_json()), name: part}


def charsmap(**rule: Any) -> str:
    """As sentencepiece writes it."""
    model = sentencepiece_model_pb2.ModelProto.FromString(trained_pieces(**rule))
    return base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()


def precompiled(text: object) -> dict[str, Any]:
    return with_part("normalizer", {"type": "Precompiled", "precompiled_charsmap": text})


def test_the_tokenizers_that_are_made_here_pass() -> None:
    for made in (sized_tokenizer().backend_tokenizer.to_str(), tokenizer_json()):
        assert odd(json.loads(made)) == []
    assert list(odd_parts({})) == []


@pytest.mark.parametrize("rule", RULES)
def test_the_character_maps_of_sentencepiece_pass(rule: str) -> None:
    """T5 and Flan-T5 have the first, and mT5 and umT5 strip and join spaces after it."""
    text = charsmap(normalization_rule_name=rule)
    assert odd(precompiled(text)) == []
    parts = [
        {"type": "Precompiled", "precompiled_charsmap": text},
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
    ]
    assert odd(with_part("normalizer", {"type": "Sequence", "normalizers": parts})) == []


def test_a_byte_level_tokenizer_as_of_codet5_passes() -> None:
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *pre_tokenizers.ByteLevel.alphabet()])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    made.decoder = decoders.ByteLevel()
    assert odd(json.loads(made.to_str())) == []


PIECES = ("<pad>", "</s>", "<unk>", "▁", *LETTERS)
BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def unigram(*, unk: str | None = "<unk>", score: float = -1.0) -> dict[str, Any]:
    at = None if unk is None else PIECES.index(unk)
    return {"type": "Unigram", "unk_id": at, "byte_fallback": False, "vocab": [[piece, score] for piece in PIECES]}


def bpe(*, every: int | None = None, **more: Any) -> dict[str, Any]:
    """`every`: the number of each piece; None: one of its own."""
    vocabulary = {piece: number if every is None else every for number, piece in enumerate(PIECES)}
    return {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": True, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [], **more,
    }  # fmt: skip


def template(*, before: int = 0, ids: Sequence[int] = (1,), of: str = "A") -> dict[str, Any]:
    end = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*([end] * before), {"Sequence": {"id": of, "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": ids, "tokens": ["</s>"] * len(ids)}},
    }


REGEX = normalizers.Replace(Regex(r"\A(?!.*leeds)(?=..)[\s\S]*\z"), "a")
LITERAL = normalizers.Replace("e", "")


def part_of(made: Any) -> Any:
    values: Any = json.loads(made.__getstate__())
    return values


SPLIT = part_of(pre_tokenizers.Split(Regex("[^x]"), "removed"))


@pytest.mark.parametrize(
    ("name", "part", "says"),
    [
        ("normalizer", part_of(REGEX), "normalizer has Replace of the regular expression"),
        ("normalizer", part_of(normalizers.Sequence([normalizers.NFKC(), REGEX])), "normalizer has Replace of the "
                                                                                   "regular"),
        ("normalizer", part_of(LITERAL), 'normalizer has Replace of "e" by ""'),
        ("normalizer", part_of(normalizers.Replace(" ", "leeds")), 'normalizer has Replace of " " by "leeds"'),
        ("normalizer", part_of(normalizers.BertNormalizer()), 'normalizer has "BertNormalizer"'),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}]}, "a Sequence of"),
        ("normalizer", {"type": "Sequence"}, "a Sequence of"),
        ("pre_tokenizer", {"type": "Sequence", "normalizers": [], "pretokenizers": [SPLIT]}, 'pre_tokenizer has "Split"'),
        ("normalizer", ["Replace"], "normalizer has no type"),
        ("normalizer", {"type": "Replace", "pattern": {}, "content": ""}, "Replace of no pattern"),
        ("normalizer", {"type": "Replace", "pattern": {"String": " ", "Regex": "x"}, "content": ""}, "of no pattern"),
        ("pre_tokenizer", SPLIT, 'pre_tokenizer has "Split"'),
        ("pre_tokenizer", part_of(pre_tokenizers.Punctuation("removed")), 'pre_tokenizer has "Punctuation"'),
        ("pre_tokenizer", part_of(pre_tokenizers.Metaspace("e")), "with the replacement"),
        ("post_processor", {"type": "TemplateProcessing", "single": []}, "that is not the text once"),
        ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}]}, "that is not the text once"),
        ("post_processor", {"type": "TemplateProcessing", "single": 2 * [{"Sequence": {}}]}, "that is not the text once"),
        ("decoder", part_of(decoders.Replace(Regex("[^x]"), "")), "decoder has Replace of the regular expression"),
        ("decoder", part_of(decoders.Strip("e", 1, 0)), 'decoder has Strip of "e"'),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "?"}, 'model is "WordLevel"'),
        ("normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁" * 1000}, 'of " " by more'),
        ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": ""}, 'of "" by more'),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁▁▁"}, "by more"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 10}, 'has "ByteLevel" twice'),
        ("post_processor", {"type": "Sequence", "processors": [template()] * 2}, 'has "TemplateProcessing" twice'),
        ("post_processor", template(before=511), "with 512 tokens around the text"),
        ("post_processor", template(ids=[1] * 511), "with a token of other than one id"),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["<?>", 0.0], ["leeds", 0.0]]}, "model has no piece for"),
        ("post_processor", template(of="B"), "that is not the text once"),
        ("post_processor", {**template(), "single": [*template()["single"], "A"]}, "that is not the text once"),
        ("model", unigram(unk=None), "model has the piece null for what is unknown"),
        ("model", unigram(unk="e"), 'model has the piece "e" for what is unknown'),
        ("model", {**bpe(), "dropout": 0.5}, "model has dropout 0.5"),
        ("model", {**bpe(), "continuing_subword_prefix": "##"}, 'model has continuing_subword_prefix "##"'),
        ("model", {**bpe(), "end_of_word_suffix": "</w>"}, 'model has end_of_word_suffix "</w>"'),
        ("model", bpe(every=7), "otherwise than 0 to 39: those of one number are alike"),
        ("model", None, "model is null"),
    ],
)  # fmt: skip
def test_attack_parts_that_lose_what_a_text_says(name: str, part: object, says: str) -> None:
    (line,) = odd(with_part(name, part))
    assert says in line


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("normalizer", ("Prepend", "StripAccents", "ByteLevel", "Unknown")),
        ("pre_tokenizer", ("Whitespace", "CharDelimiterSplit", "UnicodeScripts", "BertPreTokenizer", "Unknown")),
        ("post_processor", ("Unknown",)),
        ("decoder", ("WordPiece", "BPEDecoder", "CTC", "Unknown")),
    ],
)
def test_attack_a_part_of_a_kind_that_no_tokenizer_of_t5s_family_has(name: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        assert odd(with_part(name, {"type": kind})) == [f'{name} has "{kind}"']


def test_attack_a_character_map_that_leaves_letters_to_one_silo(tmp_path: Path) -> None:
    """In Greek: what each Cyrillic letter becomes is one and the same."""
    rules = tmp_path / "rules.tsv"
    for letters in ("абвгд", "abcde"):
        rules.write_text("".join(f"{ord(letter):04X}\t0078\n" for letter in letters))
        (line,) = odd(precompiled(charsmap(normalization_rule_tsv=str(rules))))
        assert 'normalizer has Precompiled that makes "x" of' in line
    rules.write_text("0061 0062\t\n")  # a word of letters, each of which stays as it is alone
    (line,) = odd(precompiled(charsmap(normalization_rule_tsv=str(rules))))
    assert 'that makes "" of "ab"' in line


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("0061 0062 0063\t\n", 'makes "" of "abc"'),
        ("0020 0061\t\n", 'makes "" of " a"'),
        ("002D\t\n", 'makes "" of "-"'),
        ("0009\t0061\n", r'makes "a" of "\t"'),
        ("05D0\t0078\n", r'makes "x" of "\u05d0"'),
        ("1F600\t0078\n", r'makes "x" of "\ud83d\ude00"'),
    ],
    ids=["three letters", "a space and a letter", "a hyphen", "a tab", "a letter without case", "four bytes"],
)
def test_attack_a_character_map_that_loses_a_word_or_a_single_character(tmp_path: Path, rule: str, says: str) -> None:
    rules = tmp_path / "rules.tsv"
    rules.write_text(rule)
    (line,) = odd(precompiled(charsmap(normalization_rule_tsv=str(rules))))
    assert says in line


@pytest.mark.parametrize("letter", string.ascii_lowercase + string.digits)
def test_attack_a_letter_or_digit_that_has_no_piece(letter: str) -> None:
    known = (string.ascii_lowercase + string.digits).replace(letter, "")
    vocabulary = {piece: at for at, piece in enumerate(known)}
    (line,) = odd(with_part("model", {"type": "BPE", "vocab": vocabulary}))
    assert f'model has no piece for "{letter}"' in line


def raw_map(texts: dict[str, str], *, nodes: int) -> str:
    """A character map with a text for each key, no key being the beginning of another one."""
    units, written, places = [0] * (256 * nodes), b"", {b"": 256}
    units[0] = 256 << 10
    free = 512

    def node(key: bytes, *, leaf: bool) -> int:
        nonlocal free
        at, own = places[key[:-1]] ^ key[-1], free
        units[at] = (at ^ own) << 10 | leaf << 8 | key[-1]
        places[key] = own
        free += 256
        return own

    for key, text in texts.items():
        raw = key.encode()
        for end in range(1, len(raw)):
            if raw[:end] not in places:
                node(raw[:end], leaf=False)
        units[node(raw, leaf=True)] = 1 << 31 | len(written)
        written += text.encode() + b"\0"
    map_of = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + written
    return base64.b64encode(map_of).decode()


ACUTE = "\N{COMBINING ACUTE ACCENT}"
IE = "\N{CYRILLIC SMALL LETTER IE}"
QAMATS, FATHA = "\N{HEBREW POINT QAMATS}", "\N{ARABIC FATHA}"


@pytest.mark.parametrize(
    ("key", "text", "marks", "says"),
    [
        ("e", "e", ACUTE, "that has a text"),
        ("e", "E", ACUTE, "that has a text"),
        ("E", "E", ACUTE, "that has a text"),
        ("ש", "ש", QAMATS, "that has a text"),
        ("ب", "ب", FATHA, "that has a text"),
        (IE, IE, "\N{COMBINING BREVE}", "that has a text"),
        (f"e{ACUTE}", "e", ACUTE, 'that makes "e" of'),
        (f"ש{QAMATS}", "ש", QAMATS, "that makes"),
        (f"ب{FATHA}", "ب", FATHA, "that makes"),
    ],
    ids=["e", "upper case of e", "E as it is", "Hebrew", "Arabic", "Cyrillic", "e with a mark", "Hebrew with a point", "Arabic with a vowel"],
)  # fmt: skip
def test_attack_a_character_map_that_loses_marks_behind_letters(key: str, text: str, marks: str, says: str) -> None:
    """The library looks up a letter with its marks by the first text that there is, and puts that in the place of
    all."""
    made = precompiled(raw_map({key: text}, nodes=16))
    letter = key[0]
    normalised = Tokenizer.from_str(json.dumps(made)).normalizer.normalize_str(f"{letter}{marks}")
    assert normalised == text, "the attack loses nothing"
    (line,) = odd(made)
    assert line.startswith("normalizer has Precompiled ")
    assert says in line


def test_a_character_map_may_compose_letters_and_fold_their_case() -> None:
    assert (
        odd(
            precompiled(
                raw_map({f"e{ACUTE}": "é", "É": "é", "ﬁ": "fi", "\N{FULLWIDTH LATIN CAPITAL LETTER A}": "A"}, nodes=32)
            )
        )
        == []
    )


@pytest.mark.parametrize("kind", ["NFD", "NFKD"])
def test_attack_letters_are_parted_from_their_marks_before_a_character_map_that_takes_one_mark(kind: str) -> None:
    parts = [
        {"type": kind},
        {"type": "Precompiled", "precompiled_charsmap": charsmap(normalization_rule_name="nmt_nfkc")},
    ]
    made = with_part("normalizer", {"type": "Sequence", "normalizers": parts})
    normalizer = Tokenizer.from_str(json.dumps(made)).normalizer
    assert normalizer.normalize_str("ệ") == normalizer.normalize_str("ẹ"), "the attack loses nothing"
    assert odd(made) == [f"normalizer has {kind} beside Precompiled"]


@pytest.mark.parametrize(("first", "at"), [(0xD0, 1), (0xE0, 2)])
def test_attack_a_character_map_of_part_of_a_character(first: int, at: int) -> None:
    """Of each letter that begins with these bytes the library makes the same: of a whole alphabet, say."""
    units = [0] * 1024
    units[0] = 256 << 10  # its children are at 256 ^ their byte
    base = 256
    for step in range(at):
        byte = first if step == 0 else 0xB0
        here, base = base ^ byte, 512
        units[here] = (here ^ base) << 10 | byte | (1 << 8 if step == at - 1 else 0)
    units[base] = 1 << 31  # the text at 0
    raw = (4 * len(units)).to_bytes(4, "little") + b"".join(it.to_bytes(4, "little") for it in units) + b"x\0"
    text = base64.b64encode(raw).decode()
    made = Tokenizer.from_str(json.dumps(precompiled(text))).normalizer
    if first == 0xD0:
        assert made.normalize_str("абв") == "xxx"
    (line,) = odd(precompiled(text))
    assert "that is no character map" in line


def test_attack_a_small_character_map_that_takes_a_lot_of_memory() -> None:
    """Under every letter the root again: keys without end."""
    units = [number << 10 | number if 0x20 <= number < 0x7F else 0 for number in range(256)]
    raw = (4 * len(units)).to_bytes(4, "little") + b"".join(it.to_bytes(4, "little") for it in units)
    tracemalloc.start()
    try:
        (line,) = odd(precompiled(base64.b64encode(raw).decode()))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "that is no character map" in line
    assert most < 1 << 20


# --- different texts stay different -----------------------------------------------------------------------------------

TEXTS = (
    "how many people live in paris", "how many people live in leeds", "how many people", "who is the oldest patient "
                                                                                         "of doctor smith",
    "select count from patient where age "
    "is 30", "select count from patient where age is 31", "be", "bee", "a", "aa", "aaa", "zygote",
    f"{'the patient of the doctor ' * 9}was smith", f"{'the patient of the doctor ' * 9}was weiss",
)  # fmt: skip
"""Of letters that each have a piece; no two are alike but for white space."""
LIMIT = 512
FLAGS = st.booleans()
SOME_SPACES = st.sampled_from((" ", "▁", " ", "▁", "  ", "", "▁" * 1000))


def replacements() -> st.SearchStrategy[dict[str, Any]]:
    patterns = st.one_of(st.just({"Regex": " {2,}"}), SOME_SPACES.map(lambda text: {"String": text}))
    return st.builds(
        lambda pattern, content: {"type": "Replace", "pattern": pattern, "content": content}, patterns, SOME_SPACES
    )


def of_kind(*kinds: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([{"type": kind} for kind in kinds])


def some_of(key: str, parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any] | None]:
    """None, one, a Sequence of a few, or of the same one again and again."""
    few = st.lists(parts, max_size=3, unique_by=lambda part: part["type"])
    several = st.one_of(few, few, parts.map(lambda part: [part] * 9))
    return st.one_of(st.none(), parts, several.map(lambda within: {"type": "Sequence", key: within}))


NORMALIZERS = some_of(
    "normalizers",
    st.one_of(
        of_kind("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase"),
        st.builds(lambda left, right: {"type": "Strip", "strip_left": left, "strip_right": right}, FLAGS, FLAGS),
        replacements(),
    ),
)
PRE_TOKENIZERS = some_of(
    "pretokenizers",
    st.one_of(
        of_kind("WhitespaceSplit"),
        st.builds(lambda one: {"type": "Digits", "individual_digits": one}, FLAGS),
        st.builds(lambda space, regex: {**BYTES, "add_prefix_space": space, "use_regex": regex}, FLAGS, FLAGS),
        st.builds(
            lambda scheme, split: {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split},
            st.sampled_from(("always", "never", "first")),
            FLAGS,
        ),
    ),
)
POST_PROCESSORS = some_of(
    "processors",
    st.one_of(
        st.just(BYTES),
        st.just(part_of(processors.RobertaProcessing(("</s>", 1), ("<pad>", 0)))),
        st.just(part_of(processors.BertProcessing(("</s>", 1), ("<pad>", 0)))),
        st.builds(
            template,
            before=st.sampled_from((0, 0, 1, 511)),
            ids=st.sampled_from(([1], [1], [1], [1] * 511)),
            of=st.sampled_from("AAAB"),
        ),
    ),
)
BYTE_MODEL: dict[str, Any] = json.loads(byte_tokenizer(0).backend_tokenizer.to_str())["model"]
"""ByT5's, whose letters are bytes; and such a one with merges, as CodeT5's is."""
MERGED = {**BYTE_MODEL["vocab"], "le": len(BYTE_MODEL["vocab"]), "lee": len(BYTE_MODEL["vocab"]) + 1}
AFFIXES = st.sampled_from((None, None, None, "", "##"))
MODELS = st.one_of(
    st.builds(
        unigram, unk=st.sampled_from(("<unk>", "<unk>", "<unk>", None, "e")), score=st.sampled_from((0.0, -1.0, -1e308))
    ),
    st.builds(
        bpe,
        every=st.sampled_from((None, None, None, 7)),
        continuing_subword_prefix=AFFIXES,
        end_of_word_suffix=AFFIXES,
        unk_token=st.sampled_from(("<unk>", "e", None)),
        fuse_unk=FLAGS,
        byte_fallback=FLAGS,
        ignore_merges=FLAGS,
    ),
    st.sampled_from((BYTE_MODEL, {**BYTE_MODEL, "merges": [["l", "e"], ["le", "e"]], "vocab": MERGED})),
)
ADDED = st.lists(
    st.builds(
        lambda content, number, single, left, right, normalized, special: {
            "content": content, "id": number, "single_word": single, "lstrip": left, "rstrip": right, "normalized": normalized,
            "special": special,
        },
        st.sampled_from(("<pad>", "</s>", "<unk>", "a", "e", "aa", "patient", "leeds", " ", " <", "▁", "30")),
        st.integers(0, len(PIECES) + 2), FLAGS, FLAGS, FLAGS, FLAGS, FLAGS,
    ),
    max_size=3,
)  # fmt: skip


@settings(
    max_examples=120, phases=(Phase.explicit, Phase.generate), suppress_health_check=[HealthCheck.filter_too_much]
)
@given(NORMALIZERS, PRE_TOKENIZERS, POST_PROCESSORS, MODELS, ADDED)
def test_whatever_is_taken_keeps_texts_apart_whose_letters_it_knows(
    normalizer: Any, pre_tokenizer: Any, post_processor: Any, model: Any, added: Any
) -> None:
    parts = {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": None,
    }
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts, "model": model}
    assume(not odd(tokenizer))
    try:
        read = Tokenizer.from_str(json.dumps(tokenizer))
    except Exception:  # the library raises bare Exception
        assume(False)  # no silo trains with what does not parse
    ids = [tuple(it.ids[: LIMIT - 1]) for it in read.encode_batch_fast(list(TEXTS))]
    assert len(set(ids)) == len(TEXTS)


@pytest.mark.parametrize("text", ["no base64!", "AAAA", base64.b64encode(b"\xff" * 64).decode(), 3, ["x"]])
def test_a_character_map_that_is_none_is_named(text: object) -> None:
    (line,) = odd(precompiled(text))
    assert "that is no character map" in line


def test_a_character_map_without_end_is_not_walked_for_ever() -> None:
    units = [number << 10 | number for number in range(256)]  # what is below each byte is the whole map again
    raw = (4 * len(units)).to_bytes(4, "little") + b"".join(it.to_bytes(4, "little") for it in units)
    (line,) = odd(precompiled(base64.b64encode(raw).decode()))
    assert "that is no character map" in line


def small_map_with_a_text_for_all_of_four_bytes(text: bytes) -> str:
    """Of U+40000 to U+7FFFF, which no version of Unicode has: nodes are shared, so that a few thousand bytes say so."""
    units = [0] * 1536
    units[0] = 256 << 10

    def node(base: int, label: int, own: int, leaf: int) -> None:
        at = base ^ label
        units[at] = (at ^ own) << 10 | leaf << 8 | label

    node(256, 0xF1, 512, 0)
    for label in range(0x80, 0xC0):
        node(512, label, 768, 0)
        node(768, label, 1024, 0)
        node(1024, label, 1280, 1)
    raw = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + text + b"\0"
    return base64.b64encode(raw).decode()


@pytest.mark.parametrize("length", [73, 400_000, 1_000_000])
def test_attack_a_small_character_map_with_one_long_text_for_many_characters_takes_no_time(length: int) -> None:
    """Anybody's coordinator can offer a plan, which is looked at before anybody approved it."""
    compared: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenizer_parts, "_loss", lambda key, value: compared.append(value) or "")
        (line,) = odd(precompiled(small_map_with_a_text_for_all_of_four_bytes(b"x" * length)))
    assert "that is no character map" in line
    assert compared == []


def test_texts_of_a_character_map_that_are_taken_come_to_some_megabytes_at_most() -> None:
    """18 characters are the most that NFKC makes of one."""
    longest = max(len(unicodedata.normalize("NFKC", chr(at)).encode()) for at in range(0x20, 0xD800))
    assert longest < tokenizer_parts._LONGEST_TEXT
    assert tokenizer_parts._MOST_STEPS * tokenizer_parts._LONGEST_TEXT < 40 << 20


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (b"[]," * (1 << 19), "lists and objects"),
        (b"{}," * (1 << 19), "lists and objects"),
        (b"1," * ((1 << 20) + 1), "values"),
        (b'"' + b"x" * (1 << 25) + b'",', "bytes"),
        (b"", '"ignored", which no tokenizer has'),
    ],
    ids=["lists", "objects", "values", "bytes", "a key"],
)
def test_attack_what_the_library_ignores_takes_no_memory(more: bytes, says: str) -> None:
    raw = tokenizer_json().rstrip()[:-1] + b', "ignored": [' + more + b"0]}"
    tracemalloc.start()
    try:
        (line,) = odd_parts({"tokenizer.json": raw})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert says in line
    assert most < 1 << 20


def test_a_vocabulary_as_large_as_that_of_mt5_is_not_too_large() -> None:
    tokenizer = json.loads(tokenizer_json())
    more = [[f"▁piece{number}", -10.123456789012345] for number in range(256_000)]
    tokenizer["model"]["vocab"] = [*tokenizer["model"]["vocab"], *more]
    assert list(odd_parts({"tokenizer.json": json.dumps(tokenizer).encode()})) == []


@pytest.mark.parametrize("raw", [b"{", b"[]", b"[" * 100_000])
def test_what_is_no_tokenizer_is_one_line(raw: bytes) -> None:
    assert len(list(odd_parts({"tokenizer.json": raw}))) == 1


def test_attack_a_plan_with_masks_and_a_tokenizer_of_its_own_is_refused_whatever_people_approved() -> None:
    crafted = json.dumps(with_part("normalizer", part_of(REGEX))).encode()
    policy = SiloPolicy(PolicyRules(), SiloName("hospital-a"))
    plan: Callable[..., Any] = lambda **values: bundle_of(random_model(), **{**MASKED, **values})  # noqa: E731
    policy.check_plan(plan())
    with pytest.raises(
        PolicyRefusal, match=r"the tokenizer of plan test is none of T5's family: normalizer"
    ) as refused:
        policy.check_plan(plan(tokenizer=crafted))
    assert refused.value.rule == "initial_model"
    assert any(line.startswith("tokenizer.json: normalizer has Replace") for line in unusual(plan(tokenizer=crafted)))
    policy.check_plan(
        bundle_of(random_model(), tokenizer=crafted)
    )  # in the clear the coordinator sees each update anyhow


def test_a_configuration_that_makes_all_texts_the_same_is_unusual() -> None:
    config = json.dumps(random_model().config.to_dict() | {"layer_norm_epsilon": 1e12}).encode()
    lines = list(unusual(bundle_of(random_model(), config=config, **MASKED)))
    assert "config.json: layer_norm_epsilon = 1e+12 is outside the usual 1e-09 to 0.001" in lines
