"""A random T5 in the form in which the Hugging Face Hub has T5-base: what runs with it, runs with the pretrained
weights.

Three things of that form are not those of a folder that transformers saves today: the tokenizer is `spiece.model`
alone, to which 100 `<extra_id_N>` are added; the embedding has 28 rows more than there are pieces; and the file of
parameters has one that no T5 has had for years. Like T5's, this vocabulary has no `<`, braces, `^`, `~`, backslash or
backquote.
"""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import sentencepiece
import torch
from safetensors.torch import save_file
from transformers import T5Config, T5ForConditionalGeneration

from silo_wire.model_folders.seeded_tokenizer import PRINTABLE_ASCII

T5_BASE: Final[Mapping[str, Any]] = {
    "architectures": ["T5WithLMHeadModel"],
    "d_ff": 3072,
    "d_kv": 64,
    "d_model": 768,
    "decoder_start_token_id": 0,  # nosec B105  # a number of a vocabulary
    "dropout_rate": 0.1,
    "eos_token_id": 1,  # nosec B105  # a number of a vocabulary
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 12,
    "num_layers": 12,
    "output_past": True,
    "pad_token_id": 0,  # nosec B105  # a number of a vocabulary
    "relative_attention_num_buckets": 32,
    "task_specific_params": {
        "summarization": {"early_stopping": True, "max_length": 200, "num_beams": 4, "prefix": "summarize: "},
        "translation_en_to_de": {"early_stopping": True, "max_length": 300, "num_beams": 4},
    },
    "vocab_size": 32128,
}
EXTRA_IDS, SPARE_ROWS = 100, 28
_NOT_IN_T5: Final = str.maketrans("", "", "<{}^~\\`")
_TIED: Final = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
_OLD: Final = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def write_checkpoint(folder: Path, text: Iterable[str], *, pieces: int = 32_000, seed: int = 0, **changes: Any) -> int:
    """Write T5-base, with `changes` of its configuration; the number of parameters.

    `text` is what the vocabulary of at most `pieces` pieces is learnt from. Without `vocab_size` among `changes` the
    embedding is T5-base's.
    """
    folder.mkdir(parents=True)
    _write_vocabulary(folder / "spiece.model", text, pieces)
    config = {**T5_BASE, **changes}
    generation = {key: config[key] for key in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"_from_model_config": True, **generation}),
        ("tokenizer_config.json", {"extra_ids": EXTRA_IDS, "model_max_length": 512}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = T5ForConditionalGeneration(T5Config.from_dict(config))
    tensors = {name: value for name, value in model.state_dict().items() if name not in _TIED}
    tensors[_OLD] = torch.zeros(config["relative_attention_num_buckets"], config["num_heads"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(parameter.numel() for parameter in model.parameters())


def _write_vocabulary(path: Path, text: Iterable[str], pieces: int) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line.translate(_NOT_IN_T5) for line in text if line.strip()),
        model_writer=written,
        vocab_size=pieces,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        character_coverage=1.0,
        required_chars=PRINTABLE_ASCII.translate(_NOT_IN_T5),
        num_threads=1,  # the order of sums, hence the scores, depends on it
        minloglevel=2,
    )
    path.write_bytes(written.getvalue())
