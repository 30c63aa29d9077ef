"""A small random model of each member of T5's family, in a folder as Hugging Face has it: with its own type, shape and
kind of tokenizer, trained here on a few lines."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import T5Tokenizer

from silo_wire.model_folders.t5_config import model_class, t5_config
from tests.support.tiny_t5 import CORPUS, pieces_model, tiny_tokenizer, trained_pieces

GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def _sentencepiece(folder: Path) -> int:
    tiny_tokenizer().save_pretrained(folder)
    return len(tiny_tokenizer())


@cache
def _many_languages() -> Any:
    """As mT5's and umT5's: a character map, then ends of lines stripped and runs of spaces joined."""
    made = T5Tokenizer(vocab=_scored(), extra_ids=3)
    made.backend_tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(_charsmap()),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    return made


def _scored() -> list[tuple[str, float]]:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=pieces_model())
    return [(pieces.id_to_piece(at), pieces.get_score(at)) for at in range(len(pieces))]


def _charsmap() -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    made = trained_pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name="nmt_nfkc")
    map_: bytes = sentencepiece_model_pb2.ModelProto.FromString(made).normalizer_spec.precompiled_charsmap
    return map_


def _of_many_languages(folder: Path) -> int:
    tokenizer = _many_languages()
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _of_bytes(folder: Path) -> int:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer", "extra_ids": 3}))
    return 3 + 256 + 3


def _of_code(folder: Path) -> int:
    """As CodeT5's: bytes, merged as RoBERTa's are, in two files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    return tokenizer.get_vocab_size()


@dataclass(frozen=True)
class Member:
    """`model_type` and `values` of its config.json; `write_tokenizer` writes its files, and gives how many tokens it
    has."""

    name: str
    model_type: str
    write_tokenizer: Callable[[Path], int]
    values: dict[str, Any] = field(default_factory=dict)
    untied: bool = False

    @property
    def layers(self) -> list[str]:
        return ["q", "v", "wi_0" if "feed_forward_proj" in self.values else "wi"]

    def write(self, folder: Path) -> None:
        """A Hugging Face folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tokens = self.write_tokenizer(folder)
        self.model(tokens).save_pretrained(folder)

    def model(self, tokens: int = 160) -> Any:
        values = {
            "model_type": self.model_type, "vocab_size": tokens, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
            "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
            **self.values,
        }  # fmt: skip
        config = t5_config(json.dumps(values).encode())
        torch.manual_seed(3)
        model = model_class(config)(config)
        if self.untied:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
        return model.eval()


MEMBERS = (
    Member("T5", "t5", _sentencepiece),
    Member("T5 v1.1", "t5", _sentencepiece, GATED, untied=True),
    Member("Flan-T5", "t5", _sentencepiece, {**GATED, "num_decoder_layers": 1}, untied=True),
    Member("mT5", "mt5", _of_many_languages, GATED, untied=True),
    Member("umT5", "umt5", _of_many_languages, GATED, untied=True),
    Member("ByT5", "t5", _of_bytes, {**GATED, "num_decoder_layers": 1}),
    Member("CodeT5", "t5", _of_code, {"eos_token_id": 2, "bos_token_id": 1}),
)
