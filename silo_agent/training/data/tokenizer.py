"""Text to token ids and back, with the tokenizer.json of a plan bundle: data alone, read in memory, no class looked up.

It is tried in a process of its own before it is built in this one (silo_wire.model_folders.tokenizer_trial).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from lorica_security.errors import MalformedMessage
from silo_wire.model_folders.tokenizer_trial import try_tokenizer
from silo_wire.plans.model_files import TOKENIZER_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids that the model's configuration gives a meaning."""

    pad: int
    end: int
    start: int


class TextTokenizer:
    """The bundle's tokenizer; every encoding ends with the end token, also where it was cut."""

    def __init__(self, files: Mapping[str, bytes], *, special: SpecialTokens, vocabulary: int) -> None:
        """Raises MalformedMessage where tokenizer.json is missing, does not parse, or does not fit the model."""
        if TOKENIZER_FILE not in files:
            raise MalformedMessage(
                f"plan bundle has no {TOKENIZER_FILE}: make the plan anew with 'coordinator plan new'"
            )
        _try(files[TOKENIZER_FILE])
        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER_FILE].decode())
            ids = self._tokenizer.encode("a").ids
        except Exception as error:  # the library raises bare Exception for all that does not parse
            raise MalformedMessage(f"{TOKENIZER_FILE} of the plan bundle does not parse: {error}") from error
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if size > vocabulary:
            raise MalformedMessage(f"{TOKENIZER_FILE} has {size} tokens, the model's vocabulary has {vocabulary}")
        # Not by their number: one word with an id of its own would end the work of those silos that have the word.
        largest = max((*self._tokenizer.get_vocab(with_added_tokens=True).values(), *ids), default=0)
        if largest >= vocabulary:
            raise MalformedMessage(f"{TOKENIZER_FILE} has token id {largest}, the model's vocabulary has {vocabulary}")
        if ids[-1:] != [special.end]:
            raise MalformedMessage(
                f"{TOKENIZER_FILE} does not end a text with eos_token_id {special.end} of config.json"
            )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.end = special.end
        self.unknown = self._unknown()

    @classmethod
    def of_model(cls, files: Mapping[str, bytes], config: Any) -> "TextTokenizer":
        """Of a plan's files and the T5Config of its model (silo_wire.model_folders.t5_config); raises
        MalformedMessage."""
        special = SpecialTokens(pad=config.pad_token_id, end=config.eos_token_id, start=config.decoder_start_token_id)
        return cls(files, special=special, vocabulary=config.vocab_size)

    def _unknown(self) -> int | None:
        """The piece for whatever is in no vocabulary, as characters for private use are; None where bytes have pieces,
        of which the last of two such characters differ."""
        one, other = (self._tokenizer.encode(text).ids for text in ("\U0010fffd", "\U0010fffc"))
        return one[-2] if one == other and len(one) > 1 else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, uncut."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def places(self, text: str) -> list[tuple[int, int]]:
        """Where in `text` each token but the end begins and ends, in characters."""
        return list(self._tokenizer.encode(text).offsets[:-1])

    def cut(self, ids: list[int], limit: int) -> list[int]:
        """`ids` with at most `limit` entries, the last of them the end token."""
        return ids if len(ids) <= limit else [*ids[: limit - 1], self.end]

    def sentinels(self, most: int) -> list[int]:
        """What stands for text that was taken out, in order: T5's own tokens for it, or for as many as that the piece
        for the unknown; nothing where there is neither."""
        known = list[int]()
        while len(known) < most and (own := self._tokenizer.token_to_id(f"<extra_id_{len(known)}>")) is not None:
            known.append(own)
        if known:
            return known
        return [] if self.unknown is None else [self.unknown] * most

    def decode(self, sequences: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence, special tokens left out, spaces as they are."""
        texts: list[str] = self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=True)
        return texts


@lru_cache(maxsize=2)
def _try(raw: bytes) -> None:
    """Once for a process, which may have many silos' work in turn."""
    try_tokenizer(raw)
