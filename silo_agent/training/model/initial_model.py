"""A plan's initial model, made or read by the silo itself and compared bit for bit with what the plan names.

A model of a size is made again from the plan's seed, and so are adapters. Any other is compared with a copy that the
silo's people fetched by a way of their own: a Hugging Face folder, its parameters in one safetensors file or in
several, with its configuration and its tokenizer (initial_files.py).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from lorica_security.errors import ConfigurationError, IntegrityError
from silo_agent.training.model.initial_files import SIZE, compare_made, compare_with_copy
from silo_agent.training.model.model import bind, vector_blocks
from silo_wire.manifest import Layout, Manifest, manifest_of
from silo_wire.model_folders.model_folder import ModelFolder, prepared
from silo_wire.model_folders.seeded_model import seeded_adapters, seeded_t5
from silo_wire.model_folders.t5_config import t5_config
from silo_wire.plans.model_files import CONFIG_FILE
from silo_wire.plans.plan import PlanBundle

_EMBEDDINGS = ("shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
"""What files call the one parameter that a T5's embedding is."""
_TIED = dict.fromkeys(_EMBEDDINGS, _EMBEDDINGS)


def is_from_seed(bundle: PlanBundle) -> bool:
    """Whether everything of the initial model follows from the plan's seed."""
    return bundle.plan.model.source.startswith(SIZE)


def seeded_vector(bundle: PlanBundle) -> Iterator[bytes | memoryview]:
    """The initial model that the plan's seed makes here, as silos are handed it; for a plan that `is_from_seed`."""
    yield from _handed(bundle, _seeded(bundle))


def compare(bundle: PlanBundle, folder: Path | None) -> tuple[str, ...]:
    """Raise unless the plan's initial model is that in `folder`; None: the one that the plan's size and seed make.

    Gives the tokens that the plan's tokenizer has beside those of `folder`. IntegrityError for another model,
    configuration or tokenizer, ConfigurationError for a folder that holds none of this shape. Takes the model's memory
    where it is made, a few tensors' where it is read.
    """
    model = bundle.plan.model
    named = model.base or model.initial
    copy = None if folder is None else prepared(folder)
    if copy is None:
        compare_made(bundle)
        found = _made(bundle)
        problem = (
            f"the seed of plan {bundle.plan.name} makes model {found.digest} here, the plan names {named}: either "
            "the plan has another model, or it was made by another release of torch or on a processor whose vector "
            f"instructions differ; compare a copy of the model with --model DIR, on this machine or on one like the "
            f"operator's. {_NOTHING}"
        )
    else:
        found = manifest_of(bundle.whole_layout, _read(copy, bundle.whole_layout))
        problem = (
            f"{folder} holds model {found.digest}, plan {bundle.plan.name} names {named}: it is not the plan's "
            f"initial model; fetch revision {model.revision or '(none is named)'} of {model.source} again, or ask the "
            f"operator. {_NOTHING}"
        )
    if found.digest != named:
        raise IntegrityError(problem)
    _compare_what_follows(bundle, copy)
    return () if copy is None else compare_with_copy(bundle, copy)


_NOTHING = "Nothing was approved"


def _compare_what_follows(bundle: PlanBundle, copy: ModelFolder | None) -> None:
    """Adapters, which the seed makes, and the model as silos are handed it."""
    plan = bundle.plan

    def vector() -> Iterable[bytes | memoryview]:
        if bundle.base_layout is not None or copy is None:
            return _seeded(bundle)
        return _read(copy, bundle.layout)

    seeded = [] if bundle.base_layout is None else [(bundle.layout, plan.model.initial)]
    if bundle.fixed_layout is not None:
        seeded.append((bundle.fixed_layout, str(plan.model.fixed)))
    if any(manifest_of(layout, seeded_adapters(layout, plan.seed)).digest != named for layout, named in seeded):
        raise IntegrityError(f"the adapters of plan {plan.name} are not those that its seed makes. {_NOTHING}")
    if plan.wire.model == "bfloat16":
        handed = manifest_of(bundle.model_layout, _handed(bundle, vector()))
        if handed.digest != plan.initial_model:
            raise IntegrityError(
                f"plan {plan.name} names {plan.initial_model} for its initial model in bfloat16, which is "
                f"{handed.digest}. {_NOTHING}"
            )


def _handed(bundle: PlanBundle, vector: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """A float32 vector in the type that the plan's round models travel in."""
    return map(_in_bfloat16, vector) if bundle.plan.wire.model == "bfloat16" else vector


def _seeded(bundle: PlanBundle) -> Iterable[bytes | memoryview]:
    """What is trained, as float32: adapters where the plan has them, else the whole model."""
    if bundle.base_layout is not None:
        return seeded_adapters(bundle.layout, bundle.plan.seed)
    return _made_vector(bundle)


def _made(bundle: PlanBundle) -> Manifest:
    return manifest_of(bundle.whole_layout, _made_vector(bundle))


def _made_vector(bundle: PlanBundle) -> Iterator[bytes]:
    model = seeded_t5(t5_config(bundle.files[CONFIG_FILE]), bundle.plan.seed)
    return vector_blocks(bind(model, bundle.whole_layout))


def _read(copy: ModelFolder, layout: Layout) -> Iterator[memoryview]:
    """The parameters of `layout` from the files of `copy`, as float32, in order. What the files hold beside them is not
    used."""
    files = {name: file for file in copy.weights for name in file.tensors}
    for tensor in layout.tensors:
        name = next((it for it in _TIED.get(tensor.name, (tensor.name,)) if it in files), None)
        if name is None:
            raise ConfigurationError(
                f"{copy.folder} has no tensor {tensor.name}: it is not a copy of the plan's initial model"
            )
        file = files[name]
        if file.tensors[name] != tensor.shape:
            raise ConfigurationError(
                f"{file.path}: tensor {name} is {file.tensors[name]}, the plan's is {tensor.shape}: it is not a "
                "copy of the plan's initial model"
            )
        try:
            with safe_open(file.path, framework="pt") as opened:
                values = opened.get_tensor(name)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ConfigurationError(f"{file.path} cannot be read: {' '.join(str(error).split())[:200]}") from error
        yield values.to(torch.float32).contiguous().reshape(-1).numpy().data.cast("B")


def _in_bfloat16(block: bytes | memoryview) -> memoryview:
    values = torch.from_numpy(np.frombuffer(block, dtype="<f4").copy())
    return values.to(torch.bfloat16).view(torch.uint8).numpy().data
