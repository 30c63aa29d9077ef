"""Where a plan's model comes from: a size (begun from scratch), a Hugging Face folder, or a name on the Hub.

Whatever the source, the result is the same few files, all of them data: the parameters as one canonical safetensors
file, config.json, generation_config.json, the tokenizer's files, layout.json. Pickle is never opened, code that a
folder names is never run, and only the types of T5's family that t5_form.py names are taken. A folder is read by a
process of its own before any library sees it (silo_wire.model_folders.model_folder), and a repository's files are
fetched only where each is of a size that one can have.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers.utils.logging import disable_progress_bar

from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.model_file import MODEL_FILE
from lorica_security.errors import ConfigurationError, LoricaError, MalformedMessage, Unreachable
from silo_wire.manifest import Layout, Manifest, TensorSpec
from silo_wire.model_folders.folder_tokenizer import read_tokenizer
from silo_wire.model_folders.model_folder import ModelFolder, prepared
from silo_wire.model_folders.model_folder_read import WEIGHTS_NAME
from silo_wire.model_folders.seeded_model import seeded_t5, sized_config
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.model_folders.t5_config import model_class, t5_config
from silo_wire.model_folders.tokenizer_trial import require_family, without_panics
from silo_wire.plans.model_files import CONFIG_FILE, INDEX_FILE, MOST_BYTES
from silo_wire.plans.sections.model import BUNDLE_FILES, LAYOUT_FILE
from silo_wire.plans.sizes import size_named
from silo_wire.public_text import public_text

_EMBEDDINGS = frozenset(
    {"shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight"}
)
"""What files call the one parameter that a T5's embedding is; the last is another one in some."""
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

    `added_tokens` are made tokens of their own, each with the white space that it is written with. The model must have
    rows for them: T5's embeddings have 28 more than its tokenizer has pieces.
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
            return _write(model, tokenizer, folder, source.described)
        case FolderModel(folder=origin, added_tokens=added):
            held = prepared(origin)
            model, tokenizer = _from_folder(held, str(origin), added=added)
            return replace(_write(model, tokenizer, folder, str(origin)), weights=_weights(held))
        case HubModel():
            with TemporaryDirectory() as copy:
                revision = _download(source, Path(copy))
                held = prepared(Path(copy), source.described)
                model, tokenizer = _from_folder(held, source.described)
                written = _write(model, tokenizer, folder, source.described)
                return replace(written, weights=_weights(held), revision=revision)


def _weights(held: ModelFolder) -> dict[str, str]:
    """SHA-256 of the files that parameters are read from."""
    try:
        return {file.path.name: _sha256(file.path) for file in held.weights}
    except OSError as error:
        raise ConfigurationError(f"model {held.folder} cannot be read: {error}") from error


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


def _from_folder(held: ModelFolder, shown: str, *, added: Sequence[str] = ()) -> tuple[Any, Any]:
    model: Any
    report: Any
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of half a second, amid whatever else a terminal shows
    try:
        _require_loadable(held, shown)
        with held.laid_out() as folder, without_panics():
            kind = model_class(t5_config(held.files[CONFIG_FILE]))
            loaded: Any = kind.from_pretrained(  # a folder, never the Hub
                folder,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
            model, report = loaded
            tokenizer = read_tokenizer(held, folder)
    except LoricaError:
        raise
    except Exception as error:  # the libraries raise bare Exception, and TypeError for values of another type
        raise ConfigurationError(f"model {shown} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    _require_no_wrong_tensor(shown, {kind: report[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected")})
    pieces = len(tokenizer)
    tokenizer.add_tokens(list(added))
    if pieces <= model.config.vocab_size < len(tokenizer):
        raise ConfigurationError(
            f"model {shown}: its embedding has {model.config.vocab_size} rows for {pieces} pieces, and no room for "
            f"{len(added)} added tokens: add fewer, or save the model with more rows, with resize_token_embeddings "
            "of transformers"
        )
    if pieces > model.config.vocab_size:
        raise ConfigurationError(
            f"model {shown}: the tokenizer has {pieces} pieces, vocab_size in config.json is "
            f"{model.config.vocab_size}: they do not belong together"
        )
    try:
        require_family(tokenizer.backend_tokenizer.to_str().encode(), f"model {shown}: its tokenizer")
    except MalformedMessage as error:
        raise ConfigurationError(str(error)) from error
    return model, tokenizer


def _require_loadable(held: ModelFolder, shown: str) -> None:
    """Raise ConfigurationError where config.json makes another model than the files hold, or a larger one than this
    machine does.

    That is found out from their headers, before memory is taken.
    """
    memory, needed = psutil.virtual_memory().total, 4 * held.parameters
    if needed > memory:
        raise ConfigurationError(
            f"model {shown}: its parameters take {needed >> 20:,} MiB in float32, this machine has {memory >> 20:,} "
            "MiB of memory: make the plan on a larger one"
        )
    try:
        config, shapes = t5_config(held.files[CONFIG_FILE]), held.shapes
    except MalformedMessage as error:
        raise ConfigurationError(f"model {shown}: {error}") from error
    if (layers := config.num_layers + (config.num_decoder_layers or 0)) > len(shapes):
        raise ConfigurationError(
            f"model {shown}: config.json has {layers} layers, more than the {len(shapes)} tensors that there are: "
            "they do not belong together"
        )
    with torch.device("meta"):
        model: Any = model_class(config)(config)
    expected = {str(name): tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    if shapes.keys() & _EMBEDDINGS:
        expected = {name: shape for name, shape in expected.items() if name not in _EMBEDDINGS or name in shapes}
    _require_no_wrong_tensor(
        shown,
        {
            "missing": expected.keys() - shapes.keys(),
            "mismatched": [name for name, shape in expected.items() if shapes.get(name, shape) != shape],
        },
    )


def _require_no_wrong_tensor(shown: str, wrong: Mapping[str, Iterable[object]]) -> None:
    for kind, them in wrong.items():
        if names := sorted(map(str, them)):
            raise ConfigurationError(
                f"model {shown}: {MODEL_FILE} does not fit config.json: {kind} tensor {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            )


def _download(source: HubModel, folder: Path) -> str:
    """Only data files of the repository; no pickle and no code is even fetched. Returns the commit that was fetched."""
    try:
        told = HfApi().model_info(source.name, revision=source.revision, files_metadata=True)
        names = _wanted({it.rfilename: it.size for it in told.siblings or ()}, source.described, folder)
        snapshot_download(source.name, revision=told.sha, local_dir=folder, allow_patterns=names)
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
    return told.sha or ""


def _wanted(sizes: Mapping[str, int | None], shown: str, folder: Path) -> list[str]:
    """The files to fetch; raises ConfigurationError where one is larger than it can be, or all of them than what is
    free."""
    names = [name for name in sizes if name in MOST_BYTES or name == INDEX_FILE or WEIGHTS_NAME.fullmatch(name)]
    for name in names:
        size = sizes[name]
        if size is None or size > MOST_BYTES.get(name, size):
            raise ConfigurationError(
                f"{shown}: {name} has {size} bytes on the Hub, allowed are {MOST_BYTES.get(name, 'any')}"
            )
    needed, free = sum(sizes[name] or 0 for name in names), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigurationError(
            f"{shown} has {needed >> 20:,} MiB, {folder.parent} has {free >> 20:,} MiB free: make room, or set "
            "TMPDIR to another disk"
        )
    return names


def _write_small(model: Any, tokenizer: Any, folder: Path) -> None:
    """All but the parameters and their layout."""
    tokenizer.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    generation = model.generation_config
    generation._from_model_config = False  # it is a file of its own from here on
    if generation.max_new_tokens is None:
        generation.max_new_tokens = _CAN_GENERATE_TOKENS
    generation.save_pretrained(folder)


def _write(model: Any, tokenizer: Any, folder: Path, shown: str) -> WrittenModel:
    try:
        _write_small(model, tokenizer, folder)
    except OSError:
        raise
    except (
        Exception
    ) as error:  # values that the library reads and does not write, a temperature without sampling among them
        raise ConfigurationError(
            f"model {shown} has values that cannot be written again, correct them or leave them out: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
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
