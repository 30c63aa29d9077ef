"""Tiny T5s and plan bundles, made on the spot: what the training tests run on."""

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_agent.training.model.model import bind, layout_of, vector_blocks
from silo_wire.canonical import digest_of
from silo_wire.manifest import Manifest, manifest_of
from silo_wire.model_folders.seeded_model import seeded_t5, sized_config
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sizes import SIZES
from silo_wire.public_text import public_text

CORPUS = (
    "how many people live in paris ?",
    "which rivers are longer than 300 miles ?",
    "who is the oldest patient of doctor smith ?",
    'SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = "paris" ;',
    "SELECT NAME FROM RIVER WHERE LENGTH > 300 ;",
    "SELECT NAME FROM PATIENT WHERE DOCTOR = 'smith' ORDER BY AGE DESC LIMIT 1 ;",
    "; structured knowledge: | people : name , city | river : name , length",
    "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 < > = { } ( ) * ' \" . , ; : | ? _",
)

SCHEMA = Schema(
    "places",
    "test",
    (
        Table(
            "PEOPLE",
            (
                Column(name="NAME", sql_type="text", type=ColumnType.TEXT, primary_key=True, foreign_key=False),
                Column(name="CITY", sql_type="text", type=ColumnType.TEXT, primary_key=False, foreign_key=False),
            ),
        ),
    ),
)


def trained_pieces(**options: Any) -> bytes:
    """A SentencePiece model over CORPUS."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=160,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


@cache
def pieces_model() -> bytes:
    """One with T5's special pieces, as spiece.model has it."""
    return trained_pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@cache
def tiny_tokenizer(sentinels: int = 0) -> Any:
    """A T5Tokenizer of these pieces, with so many sentinels behind them."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=pieces_model())
    vocabulary = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
    return T5Tokenizer(vocab=vocabulary, extra_ids=sentinels)


@cache
def tokenizer_json() -> bytes:
    written: str = tiny_tokenizer().backend_tokenizer.to_str()
    return written.encode()


def vocabulary_size() -> int:
    return len(json.loads(tokenizer_json())["model"]["vocab"])


def config_json(**changes: Any) -> bytes:
    settings = {
        "vocab_size": vocabulary_size(),
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.1,
        "decoder_start_token_id": 0,
        **changes,
    }
    return json.dumps({"model_type": "t5", **settings}).encode()


def random_model(seed: int = 0, *, untied: bool = False, **changes: Any) -> T5ForConditionalGeneration:
    """A randomly initialised T5; `untied` gives its output layer weights of its own, as v1.1 checkpoints have."""
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config.from_dict(json.loads(config_json(**changes))))
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model.eval()


def v1_1(seed: int = 0) -> T5ForConditionalGeneration:
    return random_model(seed, untied=True, feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def bundle_of(
    model: T5ForConditionalGeneration,
    *,
    config: bytes | None = None,
    tokenizer: bytes | None = None,
    source: str = "size:test",
    **sections: Any,
) -> PlanBundle:
    """A plan bundle around `model`; `sections` are the plan's, as dicts."""
    layout = layout_of(model)
    files = {
        "config.json": config or json.dumps(model.config.to_dict()).encode(),
        "layout.json": layout.to_json(),
        "tokenizer.json": tokenizer or tokenizer_json(),
    }
    plan = Plan.model_validate(
        {
            "name": "test",
            "federation": "test-net",
            "model": {
                "source": source,
                "parameters": layout.parameters,
                "layout": layout.digest,
                "initial": manifest_of(layout, vector_blocks(bind(model, layout))).digest,
                "initial_bfloat16": digest_of(b"nobody compares it here"),
                "files": {name: digest_of(content) for name, content in files.items()},
            },
            "schedule": {"rounds": 3, "min_silos": 1},
            **sections,
        }
    )
    return PlanBundle(plan, files)


@cache
def sized_tokenizer() -> Any:
    """Of the smallest size, from the public text."""
    return train_tokenizer(public_text(), SIZES["micro"].vocabulary)


def sized_model(seed: int) -> T5ForConditionalGeneration:
    """What a plan of the smallest size begins from."""
    return seeded_t5(sized_config(SIZES["micro"], sized_tokenizer()), seed)


def sized_bundle(seed: int, model: T5ForConditionalGeneration | None = None, **changes: Any) -> PlanBundle:
    """A plan of the smallest size, as `coordinator plan new` makes it but for `model` and `changes`."""
    tokenizer = sized_tokenizer().backend_tokenizer.to_str().encode()
    values = {"tokenizer": tokenizer, "source": "size:micro", "seed": seed, **changes}
    return bundle_of(model or sized_model(seed), **values)


def save_copy(model: T5ForConditionalGeneration, folder: Path, **options: Any) -> None:
    """As people of a silo fetch a model: parameters, configuration and tokenizer."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)


def write_model(model: T5ForConditionalGeneration, path: Path, *, chunk_bytes: int = 4096) -> Manifest:
    """The model's flat vector in `path`."""
    layout = layout_of(model)
    blocks = list(vector_blocks(bind(model, layout)))
    path.write_bytes(b"".join(blocks))
    return manifest_of(layout, blocks, chunk_bytes)


def silo_data(train: Sequence[tuple[str, str]], dev: Sequence[tuple[str, str]] = ()) -> SiloData:
    def examples(split: str, pairs: Sequence[tuple[str, str]]) -> tuple[Example, ...]:
        return tuple(Example(f"{split}-{i}", question, query, "places") for i, (question, query) in enumerate(pairs))

    return SiloData(
        train=examples("train", train),
        dev=examples("dev", dev),
        test=(),
        schema=SCHEMA,
        database=None,
        bad_lines=(),
    )
