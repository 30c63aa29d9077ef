"""Plans and data of an audit: a model from memory, a vocabulary of made-up words, lines made of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from transformers import T5Tokenizer

from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_agent.training.model.model import T5, bind, layout_of, vector_blocks
from silo_wire.canonical import digest_of
from silo_wire.manifest import manifest_of
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.training import TrainingSection

SILO = "audited"
SPECIAL = 3
"""Padding, end and unknown: T5's places."""
END = 1
_COLUMN = Column(name="WORD", sql_type="text", type=ColumnType.TEXT, primary_key=True, foreign_key=False)
_SCHEMA = Schema(SILO, "audit", (Table("CANARY", (_COLUMN,)),))


def word(number: int) -> str:
    """Whose token is SPECIAL + `number`."""
    return f"canary{number}"


LORAR: Final[Mapping[str, object]] = {"weighting": "lorar"}


def bundle_of(
    model: T5,
    training: TrainingSection,
    privacy: PrivacySection,
    rounds: int,
    *,
    aggregation: Mapping[str, object] = LORAR,
    silos: int = 1,
) -> PlanBundle:
    """A plan of at least `silos`, whose initial model is `model` and whose tokens are the words."""
    layout = layout_of(model)
    files = {
        "config.json": json.dumps(model.config.to_dict()).encode(),
        "layout.json": layout.to_json(),
        "tokenizer.json": _tokenizer(model.config.vocab_size - SPECIAL),
    }
    plan = Plan.model_validate(
        {
            "name": "privacy-audit",
            "federation": "privacy-audit",
            "model": {
                "source": "privacy-audit",
                "parameters": layout.parameters,
                "layout": layout.digest,
                "initial": manifest_of(layout, vector_blocks(bind(model, layout))).digest,
                "files": {name: digest_of(content) for name, content in files.items()},
            },
            "schedule": {"rounds": rounds, "min_silos": silos},
            "aggregation": aggregation,
            "training": training.model_dump(),
            "privacy": privacy.model_dump(),
            "evaluation": {"every": 0, "initial": False, "last": False},
        }
    )
    return PlanBundle(plan, files)


def data_of(train: Sequence[Example]) -> SiloData:
    return SiloData(train=tuple(train), dev=(), test=(), schema=_SCHEMA, database=None, bad_lines=())


def _tokenizer(words: int) -> bytes:
    """One piece for each word, and nothing else."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [*special, *((f"▁{word(number)}", -1.0) for number in range(words))]
    made: str = T5Tokenizer(vocab=pieces, extra_ids=0).backend_tokenizer.to_str()
    return made.encode()
