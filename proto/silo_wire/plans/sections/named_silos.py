"""Silos by name, or by how names begin."""

from collections.abc import Iterable
from typing import Final

ALL_THAT_BEGIN_SO: Final = "*"


def is_among(silo: str, named: Iterable[str]) -> bool:
    """Whether `named` has the silo's name, or one that ends in ALL_THAT_BEGIN_SO and begins as it does."""
    return any(silo.startswith(one[:-1]) if one.endswith(ALL_THAT_BEGIN_SO) else silo == one for one in named)
