"""A tokenizer made from public text alone, for models that begin from scratch; a silo makes it again to compare.

A SentencePiece unigram model, read into T5's tokenizer. Text survives encoding and decoding exactly, but for T5's own
habit of turning every run of white space into one space: nothing is normalised, every printable ASCII character and
those of EXTRA_CHARACTERS have a piece, and `</s>` in somebody's text is five characters, not the end of the text.
"""

import io
from collections.abc import Iterable
from typing import Any

import sentencepiece
from transformers import T5Tokenizer

from lorica_security.errors import ConfigurationError

PRINTABLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))
EXTRA_CHARACTERS = "␤␉§°²³€£¥±\N{MULTIPLICATION SIGN}÷≤≥≠\N{EN DASH}—\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}“”„…ÄÖÜßäöüàáâãåæçèéêëìíîïñòóôõøùúûýÀÁÂÃÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕØÙÚÛÝ"  # noqa: E501
"""The stand-ins for line break and tab, and what names and notes of European institutions use most."""
VOCABULARY_LIMITS = (256, 64_000)
_SPECIAL_PIECES = 3  # <pad> 0, </s> 1, <unk> 2: T5's places
_NEVER = -1e4  # score of a special piece: as text it is spelled with other pieces


def train_tokenizer(lines: Iterable[str], vocabulary: int) -> Any:
    """A T5Tokenizer of at most `vocabulary` pieces; the same lines give the same tokenizer.

    Raises ConfigurationError for a size outside VOCABULARY_LIMITS or text that nothing can be learnt from.
    """
    low, high = VOCABULARY_LIMITS
    if not low <= vocabulary <= high:
        raise ConfigurationError(f"vocabulary size {vocabulary} is not allowed: use {low} to {high}")
    text = [line.strip() for line in lines if line.strip()]
    if not text:
        raise ConfigurationError("the tokenizer's text is empty: give a file with one sentence or query a line")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocabulary,
            hard_vocab_limit=False,  # little text gives fewer pieces, not an error
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            character_coverage=1.0,
            required_chars=PRINTABLE_ASCII + EXTRA_CHARACTERS,
            normalization_rule_name="identity",
            split_digits=True,  # numbers are copied digit by digit, whatever their length
            max_sentence_length=1 << 16,
            shuffle_input_sentence=False,
            num_threads=1,  # the order of sums, hence the scores, depends on it
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"no tokenizer of {vocabulary} pieces can be made of this text: raise the vocabulary size ({reason})"
        ) from error
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    scored = [
        (pieces.id_to_piece(i), _NEVER if i < _SPECIAL_PIECES else pieces.get_score(i))
        for i in range(pieces.vocab_size())
    ]
    return T5Tokenizer(vocab=scored, extra_ids=0, split_special_tokens=True, clean_up_tokenization_spaces=False)
