"""What rests in a round comes out of its step as it went in: parameters, and what the optimizer remembers of them.

A mean delta of zero is not enough: momentum would still move the model, and every moment would fade.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def at_rest(slabs: Iterable[Tensor], stretches: Sequence[slice]) -> Iterator[None]:
    """Around a step on flat `slabs` of one length: afterwards `stretches` of each hold what they held before.

    After an error the slabs are as the step left them.
    """
    kept = [(part, part.clone()) for slab in slabs for part in (slab[stretch] for stretch in stretches)]
    yield
    for part, before in kept:
        part.copy_(before)
