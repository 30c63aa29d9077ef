"""Bytes between the coordinator and one silo, or all of them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`down` to the silo, `up` from it."""

    down: int = 0
    up: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(down=self.down + other.down, up=self.up + other.up)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(down=self.down * times, up=self.up * times)
