"""What the silo agent holds for a plan: one model in memory, its data tokenised once, and three verbs: train, evaluate, answer.

Not for use by several threads at once. A round model is a file that holds its flat vector; it is checked against its
manifest chunk by chunk each time it is read. An update is written to a file the same way.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from blake3 import blake3

from security.errors import DataError, StorageError
from silo_agent.task.update import FloatBlock, LocalUpdate, delta_norm, encode_update
from silo_agent.training.batches import EncodedExamples, encode_examples
from silo_agent.training.checkpoint import CheckpointFile, Notice, training_identity
from silo_agent.training.device import DeviceSettings, chosen_device
from silo_agent.training.evaluation import SameResult, evaluate
from silo_agent.training.generation import generated
from silo_agent.training.local_trainer import Progress, train_locally
from silo_agent.training.model import T5, bind, build_model, delta_blocks, load_vector
from silo_agent.training.schema import serialise
from silo_agent.training.serialisation import model_input
from silo_agent.training.text_to_sql_data import SiloData, Split
from silo_agent.training.tokenizer import SpecialTokens, TextTokenizer
from silo_wire.canonical import Digest, canonical_json
from silo_wire.manifest import Manifest, manifest_of
from silo_wire.messages import Evaluation
from silo_wire.plan import PlanBundle


class SiloTrainer:
    """A plan's model at one silo."""

    def __init__(
        self,
        bundle: PlanBundle,
        data: SiloData,
        silo: str,
        settings: DeviceSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises MalformedMessage where the bundle does not make a T5 of its own layout, ConfigurationError for the device."""
        self._plan = bundle.plan
        self._layout = bundle.layout
        self._section = bundle.plan.training.for_silo(silo)
        self._data = data
        self._silo = silo
        self._clock = clock
        self._device = chosen_device(settings)
        self._model: T5 = build_model(bundle.files, bundle.layout, device=self._device, dropout=self._section.dropout)
        self._parameters = bind(self._model, bundle.layout)
        config = self._model.config
        self._tokenizer = TextTokenizer(
            bundle.files,
            special=SpecialTokens(
                pad=config.pad_token_id, end=config.eos_token_id, start=config.decoder_start_token_id
            ),
            vocabulary=config.vocab_size,
        )
        self._schema = serialise(data.schema) if self._section.schema_in_input else None
        self._encoded: dict[Split, EncodedExamples] = {}
        self._loaded: Digest | None = None

    def encoded(self, split: Split) -> EncodedExamples:
        """The split's token ids and what the plan's limits cut from them; tokenised on first use."""
        if split not in self._encoded:
            self._encoded[split] = encode_examples(
                self._tokenizer,
                self._data.split(split),
                schema=self._schema,
                max_input_tokens=self._section.max_input_tokens,
                max_output_tokens=self._section.max_output_tokens,
            )
        return self._encoded[split]

    def train(
        self,
        *,
        round_number: int,
        model_path: Path,
        model: Manifest,
        update_path: Path,
        checkpoint_path: Path | None = None,
        on_progress: Progress = lambda fraction, loss: None,
        on_notice: Notice = lambda event, detail: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> LocalUpdate:
        """Train from the round model in `model_path` and write the delta (float32, layout order) to `update_path`.

        Each epoch but the last leaves a checkpoint in `checkpoint_path`, if one is given; one of this very training that is
        there already is gone on from. It is the caller's to delete once the update counts.

        The same plan, round, silo, data and thread count give the same bytes on a CPU; on a GPU the order of some sums is free.
        Raises IntegrityError for a damaged
        round model, TrainingDiverged, TrainingStopped, StorageError where the update cannot be written.
        """
        self._load(model_path, model)
        self._loaded = None  # from here on the parameters are no round model
        summary = train_locally(
            self._model,
            self._parameters.tensors,
            self.encoded("train"),
            self._section,
            seed=self._seed("train", round_number),
            round_parameters=self._round_parameters(model_path) if self._section.fedprox_mu else None,
            checkpoint=self._checkpoint(checkpoint_path, round_number, model, on_notice) if checkpoint_path else None,
            on_progress=on_progress,
            should_stop=should_stop,
            clock=self._clock,
        )

        def delta() -> Iterator[FloatBlock]:
            return delta_blocks(self._parameters, _verified_blocks(model_path, model))

        norm = delta_norm(delta())
        manifest = manifest_of(self._layout, _written(update_path, encode_update(delta, norm=norm)))
        return LocalUpdate(summary=summary, manifest=manifest, delta_norm=norm)

    def evaluate(
        self,
        *,
        model_path: Path,
        model: Manifest,
        split: Literal["dev", "test"] = "dev",
        same_result: SameResult | None = None,
        on_progress: Callable[[float], None] = lambda fraction: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """Score the model in `model_path` on a held-out split, on at most the plan's `max_examples` of it.

        Which examples those are depends on plan and silo alone, so that scores of different rounds compare. Execution is
        counted where `same_result` is given (see evaluation.in_sandbox). Raises DataError for an empty split.
        """
        examples = self._data.split(split)
        if not examples:
            raise DataError(f"silo {self._silo} has no {split} examples: add {split}.jsonl to its data folder")
        self._load(model_path, model)
        section = self._plan.evaluation
        return evaluate(
            self._model,
            self._tokenizer,
            examples,
            self.encoded(split),
            self._chosen(split, section.max_examples),
            split=split,
            batch_size=section.batch_size,
            beams=section.beams,
            max_output_tokens=self._section.max_output_tokens,
            same_result=same_result if section.execution else None,
            on_progress=on_progress,
            should_stop=should_stop,
            clock=self._clock,
        )

    @torch.inference_mode()
    def answer(self, question: str, *, model_path: Path, model: Manifest) -> str:
        """The SQL that the model in `model_path` answers `question` with; hostile until the sandbox has run it."""
        self._load(model_path, model)
        self._model.eval()
        section = self._section
        (ids,) = self._tokenizer.encode([model_input(question, self._schema)])
        input_ids = torch.tensor([self._tokenizer.cut(ids, section.max_input_tokens)], device=self._device)
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        hidden = self._model.get_encoder()(input_ids=input_ids, attention_mask=mask)[0]
        answers = generated(
            self._model,
            hidden,
            mask,
            beams=self._plan.evaluation.beams,
            max_new_tokens=section.max_output_tokens,
        )
        return self._tokenizer.decode(answers)[0]

    def _load(self, path: Path, model: Manifest) -> None:
        if self._loaded == model.digest:
            return
        self._loaded = None
        model.check_layout(self._layout)
        load_vector(self._parameters, _verified_blocks(path, model))
        self._loaded = model.digest

    def _round_parameters(self, path: Path) -> list[torch.Tensor]:
        """The round model as tensors; on the CPU a private mapping of its file, whose pages the system shares and drops."""
        vector = torch.from_numpy(np.memmap(path, dtype="<f4", mode="c"))
        return [
            vector[start : start + spec.elements].view(spec.shape).to(self._device)
            for spec, start in self._layout.placed()
        ]

    def _checkpoint(self, path: Path, round_number: int, model: Manifest, notice: Notice) -> CheckpointFile:
        training = training_identity(
            plan=self._plan.digest,
            round_number=round_number,
            silo=self._silo,
            model=model.digest,
            examples=self.encoded("train"),
            device=self._device,
        )
        return CheckpointFile(path, training, update_bytes=self._layout.total_bytes, notice=notice)

    def _chosen(self, split: Split, most: int) -> list[int]:
        count = len(self._data.split(split))
        if not 0 < most < count:
            return list(range(count))
        generator = torch.Generator().manual_seed(self._seed(split, 0))
        chosen: list[int] = torch.randperm(count, generator=generator)[:most].tolist()
        return chosen

    def _seed(self, purpose: str, round_number: int) -> int:
        """63 bits of BLAKE3 over what the draws may depend on; the plan's digest covers its seed."""
        source = canonical_json([self._plan.digest, self._plan.seed, purpose, round_number, self._silo])
        return int.from_bytes(blake3(source).digest(length=8), "little") >> 1


def _verified_blocks(path: Path, manifest: Manifest) -> Iterator[bytes]:
    """The file's chunks, each checked against `manifest`; raises IntegrityError, StorageError."""
    try:
        with path.open("rb", buffering=0) as file:
            for index in range(manifest.chunks):
                chunk = _read_exactly(file.fileno(), manifest.chunk_size(index))
                manifest.check_chunk(index, chunk)
                yield chunk
    except OSError as error:
        raise StorageError(f"round model {path} cannot be read ({error.strerror}): fetch it again") from error


def _read_exactly(descriptor: int, size: int) -> bytes:
    chunk = os.read(descriptor, size)
    while len(chunk) < size and (more := os.read(descriptor, size - len(chunk))):
        chunk += more
    return chunk


def _written(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Pass the blocks on while they are written to `path`, which is on disk once the last was taken."""
    try:
        with path.open("wb") as file:
            for block in blocks:
                file.write(block)
                yield block
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"update {path} cannot be written ({error.strerror}): make room or correct permissions"
        ) from error
