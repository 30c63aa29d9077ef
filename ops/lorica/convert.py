"""`lorica convert`: an exported model for CTranslate2, which answers faster on CPUs and in whole numbers.

The folder is looked at as a silo looks at one (model_folder.py), since it may come from anybody. The library converts
it; then it is asked beside PyTorch, as a converter that knows a model nearly is worse than none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

from lorica_security.errors import ConfigurationError, IntegrityError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from silo_wire.model_folders.folder_tokenizer import read_tokenizer
from silo_wire.model_folders.model_folder import ModelFolder, prepared
from silo_wire.model_folders.t5_config import NO_CONFIGURATION, model_class, scales_output, t5_config
from silo_wire.plans.model_files import CONFIG_FILE

MOST_APART: Final = 1e-3
"""Of two log-probabilities in nats, PyTorch's and CTranslate2's of one token in float32: rounding alone is 1e-5."""
TRIED_TOKENS: Final = 24
_TRIED: Final = (
    "how many patients were seen in march ?",
    "list the names of all clinics by city",
    "0123456789 ( ) , ; * = < >",
)


class Numbers(StrEnum):
    """What the parameters are kept in."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT16 = "int16"


@dataclass(frozen=True, slots=True)
class Converted:
    """`apart` as MOST_APART, in float32; `kept_apart` the same with parameters in `numbers`; `same` of `tried` tokens
    are PyTorch's own greedy choice then. `before` and `after` are bytes of parameters."""

    numbers: Numbers
    apart: float
    kept_apart: float
    same: int
    tried: int
    before: int
    after: int


def convert(exported: Path, target: Path, numbers: Numbers = Numbers.FLOAT32) -> Converted:
    """Write `exported`, a model's folder, to the new folder `target` as CTranslate2 and its tokenizer read it.

    Raises ConfigurationError where the folder is no T5 in the closed form, `target` holds anything, or the library is
    not installed; IntegrityError where the converted model does not answer as the exported one. `target` is made whole
    or not at all.
    """
    _require_library()
    held = prepared(exported)
    files.require_free(target)
    marks = _marks(held)
    with held.laid_out() as safe:
        model, tokenizer = _loaded(held, safe)
        asked = tuple(_asked(model, tokenizer))
        tokenizer.save_pretrained(safe)  # T5's pieces and ByT5's none, as tokenizer.json
        with files.new_folder(target) as work:
            _write(safe, work, model, Numbers.FLOAT32)
            apart, same = _compared(work, asked)
            if not apart <= MOST_APART:
                raise IntegrityError(
                    f"{exported} cannot be converted: CTranslate2 gives a token's log-probability {apart:.3g} nats "
                    f"away from PyTorch's, and rounding alone is below {MOST_APART:g}; nothing was written"
                )
            kept_apart = apart
            if numbers is not Numbers.FLOAT32:
                _write(safe, work, model, numbers)  # which reads the parameters again
                if _marks(held) != marks:
                    raise IntegrityError(f"{exported} was changed while it was converted; nothing was written")
                kept_apart, same = _compared(work, asked)
            tokenizer.save_pretrained(work)
            after = (work / "model.bin").stat().st_size
    return Converted(
        numbers=numbers,
        apart=apart,
        kept_apart=kept_apart,
        same=same,
        tried=sum(len(it.answer) for it in asked),
        before=sum(file.path.stat().st_size for file in held.weights),
        after=after,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question's tokens, PyTorch's greedy answer to it, and what PyTorch gives each token of `scored`, in nats, were
    that the answer."""

    question: Sequence[str]
    answer: Sequence[str]
    scored: Sequence[str]
    log_probabilities: Sequence[float]


def _marks(held: ModelFolder) -> list[FileMark]:
    """Of the files of parameters as they are now; raises ConfigurationError where one is gone."""
    marks = []
    for file in held.weights:
        try:
            with file.path.open("rb") as opened:
                marks.append(FileMark.of(opened.fileno()))
        except OSError as error:
            raise ConfigurationError(f"{file.path} cannot be read: {error.strerror or error}") from error
    return marks


def _require_library() -> None:
    try:
        import ctranslate2  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "CTranslate2 is not installed: install the extra `serving` (ops/docs/deployment.md)"
        ) from error


def _loaded(held: ModelFolder, safe: Path) -> tuple[Any, Any]:
    import torch

    config = t5_config(held.files[CONFIG_FILE])
    try:
        model = model_class(config).from_pretrained(safe, config=config, dtype=torch.float32, local_files_only=True)
        return model.eval(), read_tokenizer(held, safe)
    except (OSError, *NO_CONFIGURATION) as error:
        raise ConfigurationError(
            f"model {held.folder}: Transformers cannot load it: {' '.join(str(error).split())[:300]}"
        ) from error


def _asked(model: Any, tokenizer: Any) -> Iterator[_Asked]:
    import torch

    words = len(tokenizer)
    texts = [tokenizer(text, return_tensors="pt").input_ids for text in _TRIED]
    for ids, following in zip(texts, (*texts[1:], texts[0]), strict=True):
        scored = following[0, :-1]  # whatever the model answers, which may be nothing
        begun = torch.cat((torch.tensor([model.config.decoder_start_token_id]), scored[:-1]))
        with torch.inference_mode():
            answer = model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=TRIED_TOKENS)[0, 1:]
            logits = model(input_ids=ids, decoder_input_ids=begun[None]).logits[0]
        known = ((answer == tokenizer.eos_token_id) | (answer >= words)).cumsum(0).eq(0)
        yield _Asked(
            question=tokenizer.convert_ids_to_tokens(ids[0].tolist()),
            answer=tokenizer.convert_ids_to_tokens(answer[known].tolist()),
            scored=tokenizer.convert_ids_to_tokens(scored.tolist()),
            log_probabilities=torch.log_softmax(logits, -1).gather(1, scored[:, None])[:, 0].tolist(),
        )


def _write(safe: Path, folder: Path, model: Any, numbers: Numbers) -> None:
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]  # the library has no types
        """The library scales the output of every model whose embeddings are tied, and Transformers 5 calls all of them
        tied."""

        def _load(self) -> Any:
            spec = super()._load()
            spec.decoder.scale_outputs = model.config.d_model**-0.5 if scales_output(model.config) else 1.0
            return spec

    with _refusing():
        Converter(str(safe)).convert(str(folder), quantization=numbers.value, force=True)


def _compared(folder: Path, asked: Sequence[_Asked]) -> tuple[float, int]:
    """How far apart log-probabilities are at most, and how many tokens of the greedy answers are the same."""
    import ctranslate2

    with _refusing():
        translator = ctranslate2.Translator(str(folder), device="cpu")
        questions = [list(it.question) for it in asked]
        scored = translator.score_batch(questions, [list(it.scored) for it in asked])
        answered = translator.translate_batch(questions, beam_size=1, max_decoding_length=TRIED_TOKENS)
    apart, same = list[float](), 0
    for it, score, answer in zip(asked, scored, answered, strict=True):
        pairs = zip(it.log_probabilities, score.log_probs[: len(it.scored)], strict=True)
        apart += [abs(ours - theirs) for ours, theirs in pairs]
        same += sum(ours == theirs for ours, theirs in zip(it.answer, answer.hypotheses[0], strict=False))
    return (max(apart) if all(map(isfinite, apart)) else inf), same


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (OSError, *NO_CONFIGURATION) as error:
        raise ConfigurationError(
            f"CTranslate2 cannot convert this model: {' '.join(str(error).split())[:300]}"
        ) from error
