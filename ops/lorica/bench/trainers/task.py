"""What is measured of one trainer, and what is found."""

from dataclasses import dataclass
from typing import Literal

Way = Literal["lorica", "transformers"]
WAYS: tuple[Way, ...] = ("lorica", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A step is `accumulation` batches of `batch` examples; `steps` count, after one that does not."""

    way: Way
    size: str
    batch: int
    accumulation: int
    steps: int
    precision: Literal["float32", "bfloat16"]
    device: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`step_s` and `cpu_s` are medians over the steps that count. `before_s` is from the call to the end of the first
    step, and `after_s` from the end of the last one to the call's.

    The peak is of the device: beyond the imports on a CPU. `examples` is the digest of what was trained on, `loss` that
    of some of them afterwards.
    """

    parameters: int
    step_s: float
    cpu_s: float
    before_s: float
    after_s: float
    peak_bytes: int
    examples: str
    loss: float
