"""A silo that lies about its loss reduction and size: minus its own delta, and numbers that make it weigh most."""

from typing import Final

from lorica.hostile.attack import Attack, Claims
from lorica.hostile.sign_and_scale import flipped

BOASTING: Final = Attack(
    name="boasting",
    meaning="minus its own delta, with a hundred times the examples and ten times the losses that it has",
    source="no paper's; ours, against weights that silos tell themselves",
    delta=flipped,
    claims=Claims(examples=100.0, losses=10.0),
)
