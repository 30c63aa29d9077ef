"""`[model]`: which model, by digest of everything that makes it, and the files that a bundle may hold."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from lorica_security.console.strict_toml import Section, ShownText
from silo_wire.plans.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    PIECES_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)

DigestText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
LAYOUT_FILE = "layout.json"
BASE_LAYOUT_FILE = "base_layout.json"
BUNDLE_FILES = frozenset(
    {
        BASE_LAYOUT_FILE,
        CONFIG_FILE,
        GENERATION_FILE,
        LAYOUT_FILE,
        SPECIAL_TOKENS_FILE,
        PIECES_FILE,
        TOKENIZER_FILE,
        TOKENIZER_CONFIG_FILE,
    }
)
"""The only files a bundle may hold. Each is data; those in JSON may not name code."""


class ModelSection(Section):
    """Which model, by digest of everything that makes it; written by `coordinator plan new`, not by hand.

    `source`, `revision` and `weights` are the operator's word, for people who fetch a copy of their own; `initial` and
    `base` are what that copy is compared with.
    """

    source: Annotated[
        ShownText, Field(min_length=1, max_length=300)
    ]  # for people: "size:small", "folder:NAME", "hub:NAME"
    revision: Annotated[ShownText, Field(max_length=100)] = ""  # of a model from the Hub: the commit that was fetched
    weights: Annotated[dict[FileName, DigestText], Field(max_length=1000)] = Field(default_factory=dict)
    """SHA-256 of each file of parameters, as it was at the source; of a model from a size there is none."""
    parameters: Annotated[int, Field(ge=1)]  # that are trained; tied ones counted once
    layout: DigestText
    initial: DigestText  # manifest digest of the initial parameters, as float32
    initial_bfloat16: DigestText | None = (
        None  # the same, as bfloat16: what silos are handed where [wire] model says so
    )
    base: DigestText | None = None  # manifest digest of the parameters that stay, where adapters are trained
    fixed: DigestText | None = None  # the same of the A that the seed makes and nobody trains, where B alone is trained
    files: dict[str, DigestText]

    @model_serializer(mode="wrap")
    def _as_before_anything_was_fixed(self, dump: SerializerFunctionWrapHandler) -> Mapping[str, Any]:
        """Without `fixed` where nothing is: plans without it are spelled as before there was one."""
        return {key: value for key, value in dump(self).items() if (key, value) != ("fixed", None)}

    @field_validator("files")
    @classmethod
    def _only_known_files(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in BUNDLE_FILES:
                raise ValueError(f"{name!r} is not a file that a plan bundle may hold")
        for name in ("config.json", LAYOUT_FILE):
            if name not in value:
                raise ValueError(f"{name} is missing")
        return value
