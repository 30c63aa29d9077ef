"""Where training runs: device, threads and arithmetic, from the silo's own settings and the plan's precision."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lorica_security.errors import ConfigurationError

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """`device`: auto (a GPU where there is one), cpu, cuda or cuda:N. `threads`: of PyTorch on the CPU; 0 leaves its
    default."""

    device: str = "auto"
    threads: int = 0


def chosen_device(settings: DeviceSettings) -> torch.device:
    """The device, with the thread count set for the process; raises ConfigurationError for one that is not there."""
    if settings.threads < 0:
        raise ConfigurationError(f"threads = {settings.threads}: give 1 or more, or 0 for PyTorch's default")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError as error:
        raise ConfigurationError(f"device = {settings.device!r}: give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device = {settings.device!r}: give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device = {settings.device!r} is not there: {torch.cuda.device_count()} GPUs were found"
        )
    return device


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """bfloat16 arithmetic over float32 parameters where `precision` asks for it; auto: where a GPU has it."""
    if precision == "auto":
        wanted = device.type == "cuda" and torch.cuda.is_bf16_supported()
    else:
        wanted = precision == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else nullcontext()


@contextmanager
def computed_again(model: Any, *, wanted: bool) -> Iterator[None]:
    """While this is open and `wanted`, each layer of `model` in training keeps what entered it alone, and is computed
    again on the way back (Chen et al. 2016, arXiv 1604.06174). Dropout draws the same again."""
    if not wanted:
        yield
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
