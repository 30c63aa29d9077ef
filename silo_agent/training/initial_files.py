"""What training reads beside the parameters, config.json and tokenizer.json, compared with what a silo has itself.

Parameters that are right are no help where the configuration makes nothing of them, or where the tokenizer leaves text to one silo
alone. Those of a size are made again from the public text; any other is compared with the files of a copy, read as the
coordinator reads a folder. Compared is what the files mean: the order of keys and the release that wrote them do not matter.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from security.errors import ConfigurationError, IntegrityError
from silo_agent.training.model import CONFIG_FILE, t5_config
from silo_wire.plan import CODE_KEYS, TOKENIZER_FILE, PlanBundle
from silo_wire.public_text import public_text
from silo_wire.seeded_model import sized_config
from silo_wire.seeded_tokenizer import VOCABULARY_LIMITS, train_tokenizer
from silo_wire.sizes import size_named

SIZE = "size:"
"""The beginning of the source of a model that a seed makes."""
_OF_NO_EFFECT = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"}
)
"""Keys of config.json by which no model trains differently here."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_NOTHING = "Nothing was approved"


def compare_made(bundle: PlanBundle) -> None:
    """Raise IntegrityError unless the plan's files are those of its size; ConfigurationError for a size that is not known."""
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
            f"{TOKENIZER_FILE} of plan {plan.name} is not the tokenizer that the public text makes here: either the plan has another "
            "one, also one of a text of the operator's own, or it was made by another release of sentencepiece or tokenizers; compare a "
            f"copy of the model with --model DIR. {_NOTHING}"
        )
    _compare_configs(bundle, sized_config(size, tokenizer).to_dict(), f"a model of {plan.model.source}")


def compare_with_copy(bundle: PlanBundle, folder: Path) -> tuple[str, ...]:
    """The tokens that the plan adds to those of the copy in `folder`, in order; IntegrityError where anything else differs.

    Raises ConfigurationError for a folder without a configuration and a tokenizer that can be read.
    """
    for name in (CONFIG_FILE, _TOKENIZER_CONFIG):
        _refuse_code(folder, name)
    _compare_configs(bundle, _config_of(folder), f"{folder / CONFIG_FILE}")
    theirs = _tokenizer_of(bundle.files)
    tokenizer = _read_tokenizer(folder)
    added = _added(theirs, _parsed(tokenizer.backend_tokenizer.to_str()))
    tokenizer.add_tokens(list(added))  # as the coordinator does for those that a study names
    if _parsed(tokenizer.backend_tokenizer.to_str()) != theirs:
        raise IntegrityError(
            f"the tokenizer of {folder} is not that of plan {bundle.plan.name}: it differs in "
            f"{_difference(_parsed(tokenizer.backend_tokenizer.to_str()), theirs)}; fetch revision "
            f"{bundle.plan.model.revision or '(none is named)'} of {bundle.plan.model.source} again, or ask the operator, also for the "
            f"release of transformers that made the plan. {_NOTHING}"
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
                f"{CONFIG_FILE} of plan {bundle.plan.name} has {key} {_shown(theirs.get(key))}, {what} has {_shown(mine.get(key))}: the "
                f"plan's model is another one; ask the operator. {_NOTHING}"
            )


def _config_of(folder: Path) -> dict[str, Any]:
    value = _json_of(folder / CONFIG_FILE)
    if value is None:
        raise ConfigurationError(f"{folder} has no {CONFIG_FILE}: fetch the whole model, its tokenizer too")
    return value


def _refuse_code(folder: Path, name: str) -> None:
    named = CODE_KEYS.intersection(_json_of(folder / name) or {})
    if named:
        raise ConfigurationError(
            f"{folder / name} has {min(named)}, which names code to run: only plain T5 models are taken"
        )


def _json_of(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} is not a JSON object: fetch the model again")
    return value


def _read_tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in (TOKENIZER_FILE, "spiece.model")):
        raise ConfigurationError(
            f"{folder} has no {TOKENIZER_FILE} and no spiece.model: fetch the model's tokenizer too"
        )
    try:
        return AutoTokenizer.from_pretrained(  # nosec B615  # a folder, never the Hub
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the library raises bare Exception for much that does not parse
        raise ConfigurationError(
            f"the tokenizer of {folder} cannot be read: {' '.join(str(error).split())[:200]}; fetch the model again"
        ) from error


def _tokenizer_of(files: Any) -> dict[str, Any]:
    if TOKENIZER_FILE not in files:
        raise IntegrityError(f"the plan has no {TOKENIZER_FILE}: nobody can train under it. {_NOTHING}")
    return _parsed(files[TOKENIZER_FILE])


def _parsed(text: str | bytes) -> dict[str, Any]:
    """What a tokenizer.json says but for padding and truncation, which training turns off."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise IntegrityError(f"{TOKENIZER_FILE} of the plan is not a JSON object. {_NOTHING}")
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
