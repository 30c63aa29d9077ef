"""The tokenizer of a folder that was looked at (model_folder.py), on both sides: read from its files, or made where it
has none, as ByT5's.

ByT5's tokens are the bytes of UTF-8. Its class is code of Python's own, which no tokenizer.json holds; as a byte-level
BPE without merges the same ids come of it, within what tokenizer_parts.py takes. A test compares the two.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Tokenizer

from silo_wire.model_folders.model_folder import ModelFolder
from silo_wire.model_folders.model_folder_read import sentinels_of_bytes
from silo_wire.model_folders.tokenizer_trial import without_panics
from silo_wire.plans.model_files import PIECES_FILE, TOKENIZER_FILE

_PAD, _END, _UNKNOWN = _SPECIAL = ("<pad>", "</s>", "<unk>")


def read_tokenizer(held: ModelFolder, folder: Path) -> Any:
    """Of `held`, laid out in `folder`; raises whatever the libraries raise for files that make none."""
    sentinels = sentinels_of_bytes(held.files)
    if sentinels is not None:
        return byte_tokenizer(sentinels)
    # Pieces alone are T5's, whatever class is named: the library's own table has none for umT5's, or for an older name.
    alone = PIECES_FILE in held.files and TOKENIZER_FILE not in held.files
    kind: Any = T5Tokenizer if alone else AutoTokenizer
    with without_panics():
        return kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def byte_tokenizer(sentinels: int) -> Any:
    """ByT5's: three special tokens, a token for each byte, and so many for text that was taken out."""
    vocabulary = {token: at for at, token in enumerate((*_SPECIAL, *_letters()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[(_END, vocabulary[_END])]
    )
    made.add_special_tokens(
        [AddedToken(it, lstrip=True, rstrip=True, normalized=False, special=True) for it in _SPECIAL]
    )
    made.add_special_tokens([AddedToken(f"<extra_id_{at}>", normalized=False, special=True) for at in range(sentinels)])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, pad_token=_PAD, eos_token=_END, unk_token=_UNKNOWN)


def _letters() -> list[str]:
    """What the library writes for each byte: those of Latin-1 that can be seen stand for themselves, the others for the
    characters after 255."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
