"""The losses that a round's loss reduction is made of: max minus min of them (DESIGN section 3)."""

from dataclasses import dataclass


@dataclass(slots=True)
class LossLog:
    """Token-mean losses over windows of `every` optimizer steps; `open_*` is the window that is not full yet."""

    every: int
    losses: list[float]
    open_sum: float = 0.0
    open_tokens: int = 0
    open_steps: int = 0

    @classmethod
    def empty(cls, every: int) -> "LossLog":
        return cls(every, [])

    def add(self, loss_sum: float, tokens: int) -> None:
        """One optimizer step's summed loss over its target tokens."""
        self.open_sum += loss_sum
        self.open_tokens += tokens
        self.open_steps += 1
        if self.open_steps == self.every:
            self.close()

    def close(self) -> None:
        """Log the window that is open, if it has a step."""
        if self.open_steps:
            self.losses.append(self.open_sum / self.open_tokens)
            self.open_sum, self.open_tokens, self.open_steps = 0.0, 0, 0
