"""Opacus' DPOptimizer around a local optimizer, with noise that protects.

Clipping (clipping.py) has left the sum of clipped gradients in `summed_grad` of each parameter, float64, of any number
of chunks, or None where the sample was empty. A step adds noise to it once, divides by the plan's expected batch size,
which is public, and lets the optimizer do as it would: what it makes of a private gradient is post-processing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from opacus.optimizers import DPOptimizer

from lorica_security.noise.random_words import KEY_BYTES, RandomWords
from silo_agent.training.private.exact_noise import StepNoise
from silo_agent.training.private.once_among_ranks import part_of_noise, require_noise_once
from silo_agent.training.ranks.ranks import ALONE, Ranks


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]
    """`step` is one release. `step_hook`, if attached, is called after
    noise was added and before anything depends on it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        words: RandomWords,
        ranks: Ranks = ALONE,
    ) -> None:
        """`ranks` each leave the sum of their own examples, and take one step together; each adds the noise of its part
        of the elements, to the sum of all."""
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
        )
        self._words, self._ranks = words, ranks
        self._threads = ThreadPoolExecutor(max_workers=torch.get_num_threads())
        self._key: bytes | None = None
        self._noise: StepNoise | None = None

    @property
    def accumulated_iterations(self) -> int:
        """Chunks were added up, not averaged."""
        return 1

    def begin_step(self) -> None:
        """Draw the key of the next step's noise, before the step's examples whatever the device; and beside an
        accelerator, while it makes gradients, have the processor draw the noise: eight bytes a parameter of memory.
        """
        self._key = self._new_key()
        if any(parameter.device.type != "cpu" for parameter in self.params):
            self.begin_noise()

    @property
    def key(self) -> bytes:
        """Of the step that began: for ranks to compare, and for nobody else."""
        assert self._key is not None, "no step began"
        return self._key

    def begin_noise(self) -> None:
        """Have the processor draw the step's noise from now on."""
        self._noise = self._new_noise(ahead=sum(parameter.numel() for parameter in self.params))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        return True

    def add_noise(self) -> None:
        deviation = self.noise_multiplier * self.max_grad_norm
        noise, self._noise = self._noise or self._new_noise(ahead=2 * torch.get_num_threads()), None
        self._key = None
        if self._ranks.world > 1:
            self._sum_of_ranks()
        for parameter in self.params:
            total = parameter.summed_grad
            if total is None:
                total = torch.zeros_like(parameter, dtype=torch.float64)
            parameter.summed_grad = None
            if deviation > 0.0:
                noised = noise.add(total.detach().cpu().reshape(-1).numpy(), deviation=deviation)
                parameter.grad = torch.from_numpy(noised).view(parameter.shape).to(parameter.device, parameter.dtype)
            else:
                parameter.grad = total.to(parameter.dtype)
        if self._ranks.world > 1 and deviation > 0.0:
            require_noise_once(noise.added, self._ranks)
            # Each element is of one rank, and 0 of the others: the sum is exact.
            self._ranks.sum_gradients(self.params)

    def _sum_of_ranks(self) -> None:
        for parameter in self.params:
            if parameter.summed_grad is None:
                parameter.summed_grad = torch.zeros_like(parameter, dtype=torch.float64)
        self._ranks.sum_all([parameter.summed_grad for parameter in self.params])

    def _new_noise(self, *, ahead: int) -> StepNoise:
        elements = [parameter.numel() for parameter in self.params]
        part_of = partial(part_of_noise, ranks=self._ranks)
        return StepNoise(self._key or self._new_key(), elements, self._threads, ahead=ahead, part_of=part_of)

    def _new_key(self) -> bytes:
        return self._words.words32(KEY_BYTES // 4).tobytes()
