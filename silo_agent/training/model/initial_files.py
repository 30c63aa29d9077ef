"""What training reads beside the parameters, config.json and tokenizer.json, compared with what a silo has itself.

Parameters that are right are no help where the configuration makes nothing of them, or where the tokenizer leaves text
to one silo alone. Those of a size are made again from the public text; any other is compared with the files of a copy,
read as the coordinator reads a folder. Compared is what the files mean: the order of keys and the release that wrote
them do not matter.
"""

import json
from collections.abc import Iterator
from typing import Any

from lorica_security.errors import ConfigurationError, IntegrityError, LoricaError
from silo_wire.model_folders.folder_tokenizer import read_tokenizer
from silo_wire.model_folders.model_folder import ModelFolder
from silo_wire.model_folders.seeded_model import sized_config
from silo_wire.model_folders.seeded_tokenizer import VOCABULARY_LIMITS, train_tokenizer
from silo_wire.model_folders.t5_config import t5_config
from silo_wire.model_folders.t5_form import t5_values
from silo_wire.plans.model_files import CONFIG_FILE, MOST_BYTES, TOKENIZER_FILE, parsed
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sizes import size_named
from silo_wire.public_text import public_text

SIZE = "size:"
"""The beginning of the source of a model that a seed makes."""
_OF_NO_EFFECT = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"}
)
"""Keys of config.json by which no model trains differently here."""
_NOTHING = "Nothing was approved"


def compare_made(bundle: PlanBundle) -> None:
    """Raise IntegrityError unless the plan's files are those of its size; ConfigurationError for a size that is not
    known."""
    plan = bundle.plan
    size = size_named(plan.model.source.removeprefix(SIZE))
    theirs = _tokenizer_of(bundle.files)
    for vocabulary in (size.vocabulary, len(_pieces(theirs))):
        if not VOCABULARY_LIMITS[0] <= vocabulary <= VOCABULARY_LIMITS[1]:
            continue
        tokenizer = train_tokenizer(public_text(), vocabulary)
        if _parsed(tokenizer.backend_tokenizer.to_str()) == theirs:
            break
    else:
        raise IntegrityError(
            f"{TOKENIZER_FILE} of plan {plan.name} is not the tokenizer that the public text makes here: either the "
            "plan has another one, also one of a text of the operator's own, or it was made by another release of "
            f"sentencepiece or tokenizers; compare a copy of the model with --model DIR. {_NOTHING}"
        )
    _compare_configs(bundle, sized_config(size, tokenizer).to_dict(), f"a model of {plan.model.source}")


def compare_with_copy(bundle: PlanBundle, copy: ModelFolder) -> tuple[str, ...]:
    """The tokens that the plan adds to those of the copy, in order; IntegrityError where anything else differs.

    Raises ConfigurationError for a copy without a tokenizer that can be read.
    """
    _compare_configs(bundle, t5_values(copy.files[CONFIG_FILE]), f"{copy.folder / CONFIG_FILE}")
    theirs = _tokenizer_of(bundle.files)
    tokenizer = _read_tokenizer(copy)
    added = _added(theirs, _parsed(tokenizer.backend_tokenizer.to_str()))
    tokenizer.add_tokens(list(added))  # as the coordinator does for those that a study names
    if _parsed(tokenizer.backend_tokenizer.to_str()) != theirs:
        raise IntegrityError(
            f"the tokenizer of {copy.folder} is not that of plan {bundle.plan.name}: it differs in "
            f"{_difference(_parsed(tokenizer.backend_tokenizer.to_str()), theirs)}; fetch revision "
            f"{bundle.plan.model.revision or '(none is named)'} of {bundle.plan.model.source} again, or ask the "
            f"operator, also for the release of transformers that made the plan. {_NOTHING}"
        )
    return added


def _compare_configs(bundle: PlanBundle, own: dict[str, Any], what: str) -> None:
    """`own` are the keys that `what` has."""
    mine, theirs = (
        {key: value for key, value in t5_config(raw).to_dict().items() if key not in _OF_NO_EFFECT}
        for raw in (json.dumps(own).encode(), bundle.files[CONFIG_FILE])
    )
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            raise IntegrityError(
                f"{CONFIG_FILE} of plan {bundle.plan.name} has {key} {_shown(theirs.get(key))}, {what} has "
                f"{_shown(mine.get(key))}: the plan's model is another one; ask the operator. {_NOTHING}"
            )


def _read_tokenizer(copy: ModelFolder) -> Any:
    try:
        with copy.laid_out() as folder:
            return read_tokenizer(copy, folder)
    except LoricaError:
        raise
    except Exception as error:  # the library raises bare Exception for much that does not parse
        raise ConfigurationError(
            f"the tokenizer of {copy.folder} cannot be read: {' '.join(str(error).split())[:200]}; fetch the model "
            "again"
        ) from error


def _tokenizer_of(files: Any) -> dict[str, Any]:
    if TOKENIZER_FILE not in files:
        raise IntegrityError(f"the plan has no {TOKENIZER_FILE}: nobody can train under it. {_NOTHING}")
    return _parsed(files[TOKENIZER_FILE])


def _parsed(text: str | bytes) -> dict[str, Any]:
    """What a tokenizer.json says but for padding and truncation, which training turns off."""
    raw = text if isinstance(text, bytes) else text.encode()
    value = parsed(raw, TOKENIZER_FILE, MOST_BYTES[TOKENIZER_FILE])
    return {key: part for key, part in value.items() if key not in ("padding", "truncation")}


def _pieces(tokenizer: dict[str, Any]) -> Any:
    model = tokenizer.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    return pieces if isinstance(pieces, list | dict) else []


def _added(theirs: dict[str, Any], mine: dict[str, Any]) -> tuple[str, ...]:
    """What is in the plan's list of added tokens and not in this silo's."""
    own, named = (list(_contents(it.get("added_tokens"))) for it in (mine, theirs))
    return tuple(token for token in named if token not in own)


def _contents(tokens: Any) -> Iterator[str]:
    for token in tokens if isinstance(tokens, list) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if isinstance(content, str):
            yield content


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Which part of tokenizer.json."""
    return next(key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key))


def _shown(value: object) -> str:
    return "not set" if value is None else json.dumps(value)[:60]
