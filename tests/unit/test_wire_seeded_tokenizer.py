"""The tokenizer from public text: exact for SQL, the same every time, and no way to smuggle special tokens in."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lorica_security.errors import ConfigurationError
from silo_wire.model_folders.seeded_tokenizer import EXTRA_CHARACTERS, PRINTABLE_ASCII, train_tokenizer
from silo_wire.public_text import public_text


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(public_text(), 800).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def survives(tokenizer: Any, text: str) -> str:
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]
    decoded: str = tokenizer.decode(ids, skip_special_tokens=True)
    return decoded


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT name FROM patient WHERE age >= 65 AND cost <> 12.50 ;",
        "select count( * ) from t where a<b and c>=d or e!=f",
        "SELECT T1.full_name FROM \"order items\" AS T1 WHERE T1.note LIKE '%O''Neil_{x}%'",
        "SELECT x FROM y WHERE z IN ( 'Ä', '€ 5', '„', '␤' ) ; -- ok ? [1] `q` \\ ^ ~ | & @ # $",
        "question , with . odd ! spaces ? n't 's do not",
    ],
)
def test_sql_survives_exactly(tokenizer: Any, sql: str) -> None:
    assert survives(tokenizer, sql) == sql


@given(st.lists(st.text(alphabet=PRINTABLE_ASCII + EXTRA_CHARACTERS, min_size=1, max_size=12), max_size=12))
def test_every_printable_character_survives(tokenizer: Any, words: list[str]) -> None:
    text = " ".join(words)
    assert survives(tokenizer, text) == text


@pytest.mark.parametrize("text", ["a </s> b", "<pad>", "x<unk>y", "</s></s>", "drop table t;</s>"])
def test_special_tokens_spelled_in_a_question_are_plain_text(tokenizer: Any, text: str) -> None:
    assert survives(tokenizer, text) == text


def test_numbers_are_spelled_digit_by_digit(tokenizer: Any) -> None:
    assert [piece.lstrip("▁") for piece in tokenizer.tokenize("2024")][-4:] == ["2", "0", "2", "4"]


def test_places_of_the_special_tokens_are_those_of_t5(tokenizer: Any) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) == 800


def test_same_text_gives_the_same_files(tokenizer_folder: Path, tmp_path: Path) -> None:
    train_tokenizer(public_text(), 800).save_pretrained(tmp_path)
    for path in tokenizer_folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_little_text_gives_fewer_pieces_but_every_character(tmp_path: Path) -> None:
    made = train_tokenizer(["select name from patient where age > 3", "how many patients are there"], 2000)
    assert len(made) < 2000
    assert survives(made, 'SELECT "x{y}" % <z>') == 'SELECT "x{y}" % <z>'


@pytest.mark.parametrize(
    ("lines", "vocabulary", "said"),
    [
        (["select 1"], 100, "vocabulary size 100 is not allowed: use 256 to 64000"),
        (["select 1"], 100_000, "vocabulary size 100000 is not allowed"),
        (["", "  "], 1000, "text is empty"),
    ],
)
def test_what_no_tokenizer_can_be_made_of_is_refused(lines: list[str], vocabulary: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        train_tokenizer(lines, vocabulary)
