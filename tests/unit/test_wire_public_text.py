import io
import string
from importlib.resources import files

import pytest
import sentencepiece

from lorica.demo.silos.silos import SILOS, questions
from lorica_security.errors import ConfigurationError
from silo_wire.public_text import expand, public_text


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(public_text()),
        model_writer=model,
        model_type="unigram",
        vocab_size=2000,
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_patterns_take_the_words_of_their_lists_in_turn() -> None:
    source = "# a remark\n@city: york, bath\n@n: 1, 2, 3\n\n{city} {n} {{x}}\n{CITY}\n"
    lines = expand(source)
    assert len(lines) == 5
    assert {line.split()[0] for line in lines[:3]} == {"york", "bath"}
    assert {line.split()[1] for line in lines[:3]} == {"1", "2", "3"}
    assert all(line.endswith(" {x}") for line in lines[:3])
    assert sorted(lines[3:]) == ["BATH", "YORK"]


def test_a_pattern_without_its_list_is_refused_by_line() -> None:
    with pytest.raises(ConfigurationError, match="line 2: no list 'town'"):
        expand("@city: york\nfrom {town}\n")


def test_the_text_is_short_plain_lines_and_always_the_same() -> None:
    lines = public_text()
    assert lines == public_text()
    assert 2000 < len(lines) < 20_000
    assert max(map(len, lines)) < 1000
    assert all(line.isascii() and line.isprintable() for line in lines)
    assert set("".join(lines)) >= set(string.printable) - set("\t\n\r\x0b\x0c")


def test_every_list_is_used_and_none_repeats_a_word() -> None:
    source = files("silo_wire.public_text").joinpath("public_text.txt").read_text(encoding="utf-8")
    lists = {
        line[1 : line.index(":")]: line.split(":", 1)[1].split(",") for line in source.splitlines() if line[:1] == "@"
    }
    for name, words in lists.items():
        stripped = [word.strip() for word in words]
        assert len(set(stripped)) == len(stripped), name
        assert f"{{{name}}}" in source or f"{{{name.upper()}}}" in source, name


def test_nothing_that_a_demo_silo_can_ask_or_answer_is_in_the_text() -> None:
    lines = set(public_text())
    for silo in SILOS:
        for shape in silo.shapes:
            for values in silo.fillings(shape):
                for text in (shape.sql, *shape.questions):
                    assert text.format(**values) not in lines


def test_demo_words_take_few_pieces_and_every_ascii_character_survives(
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:
    for silo in SILOS:
        texts = [text for _, records in questions(silo, seed=0) for r in records for text in (r.question, r.query)]
        encoded = [pieces.encode(text) for text in texts]
        assert [pieces.decode(ids) for ids in encoded] == texts
        assert sum(map(len, encoded)) / sum(len(text.split()) for text in texts) <= 1.6
    printable = "".join(chr(code) for code in range(33, 127))
    assert pieces.decode(pieces.encode(printable)) == printable
    assert pieces.unk_id() not in pieces.encode(printable)
