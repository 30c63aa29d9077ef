"""What a plan's tokenizer may be made of under masks: those of T5's family pass, and parts that lose what a text says do not."""

import base64
import io
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from security.errors import PolicyRefusal
from security.identifiers import SiloName
from silo_agent.plan_review import unusual
from silo_agent.policy import PolicyRules, SiloPolicy
from silo_agent.tokenizer_parts import LETTERS, odd_parts
from tests.support.tiny_t5 import CORPUS, bundle_of, random_model, sized_tokenizer, tokenizer_json

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
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=160,
        hard_vocab_limit=False,
        minloglevel=2,
        **rule,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
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


REGEX = normalizers.Replace(Regex(r"\A(?!.*leeds)(?=..)[\s\S]*\z"), "a")
LITERAL = normalizers.Replace("e", "")


def part_of(made: Any) -> Any:
    values: Any = json.loads(made.__getstate__())
    return values


@pytest.mark.parametrize(
    ("name", "part", "says"),
    [
        ("normalizer", part_of(REGEX), "normalizer has Replace of the regular expression"),
        ("normalizer", part_of(normalizers.Sequence([normalizers.NFKC(), REGEX])), "normalizer has Replace of the regular"),
        ("normalizer", part_of(LITERAL), 'normalizer has Replace of "e" by ""'),
        ("normalizer", part_of(normalizers.Replace(" ", "leeds")), 'normalizer has Replace of " " by "leeds"'),
        ("normalizer", part_of(normalizers.BertNormalizer()), 'normalizer has "BertNormalizer"'),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}]}, "a Sequence of"),
        ("normalizer", {"type": "Sequence"}, "a Sequence of"),
        ("normalizer", ["Replace"], "normalizer has no type"),
        ("normalizer", {"type": "Replace", "pattern": {}, "content": ""}, "Replace of no pattern"),
        ("normalizer", {"type": "Replace", "pattern": {"String": " ", "Regex": "x"}, "content": ""}, "of no pattern"),
        ("pre_tokenizer", part_of(pre_tokenizers.Split(Regex("[^x]"), "removed")), 'pre_tokenizer has "Split"'),
        ("pre_tokenizer", part_of(pre_tokenizers.Punctuation("removed")), 'pre_tokenizer has "Punctuation"'),
        ("pre_tokenizer", part_of(pre_tokenizers.Metaspace("e")), "with the replacement"),
        ("post_processor", {"type": "TemplateProcessing", "single": []}, "that is not the text once"),
        ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}]}, "that is not the text once"),
        ("post_processor", {"type": "TemplateProcessing", "single": 2 * [{"Sequence": {}}]}, "that is not the text once"),
        ("decoder", part_of(decoders.Replace(Regex("[^x]"), "")), "decoder has Replace of the regular expression"),
        ("decoder", part_of(decoders.Strip("e", 1, 0)), 'decoder has Strip of "e"'),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "?"}, 'model is "WordLevel"'),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["leeds", 0.0]]}, "model has no piece for"),
        ("model", {"type": "BPE", "dropout": 0.5, "vocab": dict.fromkeys(LETTERS, 0)}, "model has dropout 0.5"),
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
    vocabulary = dict.fromkeys((string.ascii_lowercase + string.digits).replace(letter, ""), 0)
    (line,) = odd(with_part("model", {"type": "BPE", "vocab": vocabulary}))
    assert f'model has no piece for "{letter}"' in line


@pytest.mark.parametrize("text", ["no base64!", "AAAA", base64.b64encode(b"\xff" * 64).decode(), 3, ["x"]])
def test_a_character_map_that_is_none_is_named(text: object) -> None:
    (line,) = odd(precompiled(text))
    assert "that is no character map" in line


def test_a_character_map_without_end_is_not_walked_for_ever() -> None:
    units = [number << 10 | number for number in range(256)]  # what is below each byte is the whole map again
    raw = (4 * len(units)).to_bytes(4, "little") + b"".join(it.to_bytes(4, "little") for it in units)
    (line,) = odd(precompiled(base64.b64encode(raw).decode()))
    assert "that is no character map" in line


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
