"""Where a plan's model comes from: a size (begun from scratch), a Hugging Face folder, or a name on the Hub.

Whatever the source, the result is the same few files, all of them data: the parameters as one canonical safetensors
file, config.json, generation_config.json, the tokenizer's files, layout.json. Pickle is never opened, code that a folder
names is never run, and only `model_type = "t5"` is taken.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoTokenizer, T5ForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from coordinator import model_file
from coordinator.model_file import MODEL_FILE
from security.errors import ConfigurationError, Unreachable
from silo_wire.manifest import Layout, Manifest, TensorSpec
from silo_wire.plan import BUNDLE_FILES, CODE_KEYS, LAYOUT_FILE
from silo_wire.public_text import public_text
from silo_wire.seeded_model import seeded_t5, sized_config
from silo_wire.seeded_tokenizer import train_tokenizer
from silo_wire.sizes import size_named

_DATA_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
)
_CAN_GENERATE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model from scratch: random under the plan's seed, with a tokenizer from public text.

    `vocabulary` None takes the size's own; `tokenizer_text` is a file of the operator's own PUBLIC text, one line each.
    """

    size: str
    vocabulary: int | None = None
    tokenizer_text: Path | None = None

    @property
    def described(self) -> str:
        return f"size:{self.size}"


@dataclass(frozen=True, slots=True)
class FolderModel:
    """A Hugging Face folder with config.json, model.safetensors and a tokenizer.

    `added_tokens` are made tokens of their own, each with the white space that it is written with. The model must have rows
    for them: T5's embeddings have 28 more than its tokenizer has pieces.
    """

    folder: Path
    added_tokens: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        return f"folder:{self.folder.resolve().name}"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the Hugging Face Hub, at `revision` (a branch, tag or commit)."""

    name: str
    revision: str | None = None

    @property
    def described(self) -> str:
        return f"hub:{self.name}" + (f"@{self.revision}" if self.revision else "")


ModelSource = SizedModel | FolderModel | HubModel


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """What `write_model` wrote: the layout, the manifest of the parameters, the names of the bundle's files.

    `weights` is the SHA-256 of each file of parameters that was read, `revision` the commit of a repository on the Hub.
    """

    layout: Layout
    initial: Manifest
    files: tuple[str, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""


def write_model(source: ModelSource, folder: Path, seed: int) -> WrittenModel:
    """Write the model files of `source` into the empty `folder`.

    Raises ConfigurationError naming what is wrong with the source, Unreachable when the Hub does not answer.
    """
    match source:
        case SizedModel():
            model, tokenizer = _from_scratch(source, seed)
            return _write(model, tokenizer, folder)
        case FolderModel(folder=origin, added_tokens=added):
            model, tokenizer = _from_folder(origin, added=added)
            return replace(_write(model, tokenizer, folder), weights=_weights(origin))
        case HubModel():
            with TemporaryDirectory() as copy:
                revision = _download(source, Path(copy))
                model, tokenizer = _from_folder(Path(copy), shown=source.described)
                return replace(_write(model, tokenizer, folder), weights=_weights(Path(copy)), revision=revision)


def _weights(folder: Path) -> dict[str, str]:
    """SHA-256 of the files that `_from_folder` reads parameters from."""
    try:
        index = folder / f"{MODEL_FILE}.index.json"
        whole = folder / MODEL_FILE
        names = [MODEL_FILE] if whole.exists() else sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return {name: _sha256(folder / name) for name in names}
    except OSError as error:
        raise ConfigurationError(f"model {folder} cannot be read: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_scratch(source: SizedModel, seed: int) -> tuple[Any, Any]:
    size = size_named(source.size)
    tokenizer = train_tokenizer(_text_of(source.tokenizer_text), source.vocabulary or size.vocabulary)
    return seeded_t5(sized_config(size, tokenizer), seed), tokenizer


def _text_of(path: Path | None) -> list[str]:
    if path is None:
        return public_text()
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"tokenizer text {path} cannot be read: {error}; give a UTF-8 text file") from error


def _from_folder(folder: Path, shown: str = "", *, added: Sequence[str] = ()) -> tuple[Any, Any]:
    shown = shown or str(folder)
    config = _read_config(folder / "config.json", shown)
    _refuse_code("config.json", config, shown)
    if (folder / "tokenizer_config.json").exists():
        _refuse_code("tokenizer_config.json", _read_config(folder / "tokenizer_config.json", shown), shown)
    if config.get("model_type") != "t5":
        raise ConfigurationError(
            f"model {shown} has model_type {config.get('model_type')!r}: only t5 is taken (T5, T5 v1.1, Flan-T5)"
        )
    if not any((folder / name).exists() for name in (MODEL_FILE, f"{MODEL_FILE}.index.json")):
        pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        held = f"only {pickled[0]}, which is pickle and could run code" if pickled else "no parameters"
        raise ConfigurationError(
            f"model {shown} has {held}: give a folder with {MODEL_FILE}; "
            "convert it where you trust it, with save_pretrained(DIR) of transformers"
        )
    model: Any
    report: Any
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of half a second, amid whatever else a terminal shows
    try:
        loaded: Any = T5ForConditionalGeneration.from_pretrained(  # nosec B615  # a folder, never the Hub
            folder,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(  # nosec B615
            folder, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigurationError(f"model {shown} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    wrong = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys")}
    for kind, names in wrong.items():
        if names:
            raise ConfigurationError(
                f"model {shown}: {MODEL_FILE} does not fit config.json: {kind.replace('_keys', '')} tensor {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )
    pieces = len(tokenizer)
    tokenizer.add_tokens(list(added))
    if pieces <= model.config.vocab_size < len(tokenizer):
        raise ConfigurationError(
            f"model {shown}: its embedding has {model.config.vocab_size} rows for {pieces} pieces, and no room for "
            f"{len(added)} added tokens: add fewer, or save the model with more rows, with resize_token_embeddings of transformers"
        )
    if pieces > model.config.vocab_size:
        raise ConfigurationError(
            f"model {shown}: the tokenizer has {pieces} pieces, vocab_size in config.json is "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return model, tokenizer


def _download(source: HubModel, folder: Path) -> str:
    """Only data files of the repository; no pickle and no code is even fetched. Returns the commit that was fetched."""
    try:
        revision = HfApi().model_info(source.name, revision=source.revision).sha
        snapshot_download(source.name, revision=revision, local_dir=folder, allow_patterns=list(_DATA_FILES))
    except HFValidationError as error:
        raise ConfigurationError(
            f"{source.name!r} is not a Hub name: use OWNER/NAME, or --model for a folder"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(f"{source.described} is not on the Hub, or is private: check its spelling") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise Unreachable(
            f"the Hugging Face Hub did not give {source.described}: check the network and HTTPS_PROXY, "
            "or copy the model here by other means and use --model DIR"
        ) from error
    return revision or ""


def _read_config(path: Path, shown: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigurationError(f"model {shown} has no {path.name}: give a Hugging Face folder") from error
    except OSError as error:
        raise ConfigurationError(f"model {shown}: {path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"model {shown}: {path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"model {shown}: {path.name} is not a JSON object")
    return value


def _refuse_code(name: str, config: dict[str, Any], shown: str) -> None:
    named = CODE_KEYS.intersection(config)
    if named:
        raise ConfigurationError(
            f"model {shown}: {name} has {min(named)}, which names code to run: only plain T5 models are taken"
        )


def _write(model: Any, tokenizer: Any, folder: Path) -> WrittenModel:
    tokenizer.save_pretrained(folder)
    model.config.architectures = [T5ForConditionalGeneration.__name__]
    model.config.save_pretrained(folder)
    generation = model.generation_config
    generation._from_model_config = False  # it is a file of its own from here on
    if generation.max_new_tokens is None:
        generation.max_new_tokens = _CAN_GENERATE_TOKENS
    generation.save_pretrained(folder)
    parameters = _canonical_parameters(model)
    layout = Layout("float32", tuple(TensorSpec(name, tuple(value.shape)) for name, value in parameters.items()))

    def vector() -> Iterator[memoryview]:
        for name, value in parameters.items():
            values = value.detach().to(torch.float32).contiguous()
            if not bool(torch.isfinite(values).all()):
                raise ConfigurationError(
                    f"the model's tensor {name} holds NaN or infinite values: it cannot be trained"
                )
            yield values.reshape(-1).numpy().data.cast("B")

    initial = model_file.write(folder / MODEL_FILE, layout, vector())
    (folder / LAYOUT_FILE).write_bytes(layout.to_json())
    for path in folder.iterdir():
        if path.name != MODEL_FILE and path.name not in BUNDLE_FILES:
            path.unlink()
    names = sorted(path.name for path in folder.iterdir() if path.name != MODEL_FILE)
    return WrittenModel(layout, initial, tuple(names))


def _canonical_parameters(model: Any) -> dict[str, torch.Tensor]:
    """The parameters sorted by name, a tied one once, under the first of its names (silo_wire.manifest)."""
    parameters: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in sorted(model.named_parameters(remove_duplicate=False), key=lambda item: str(item[0])):
        if id(value) not in seen:
            seen.add(id(value))
            parameters[name] = value
    return parameters
