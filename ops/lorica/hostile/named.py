"""The attacks by name, and which silos make one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lorica.hostile.adapted import ADAPTED
from lorica.hostile.alie import ALIE
from lorica.hostile.attack import Attack
from lorica.hostile.backdoor import BACKDOOR
from lorica.hostile.boasting import BOASTING
from lorica.hostile.inner_product import INNER_PRODUCT
from lorica.hostile.label_flip import LABEL_FLIP
from lorica.hostile.mimic import MIMIC
from lorica.hostile.min_max import MIN_MAX
from lorica.hostile.sign_and_scale import SCALING, SIGN_FLIP
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName

ATTACKS: Final[Mapping[str, Attack]] = {
    attack.name: attack
    for attack in (
        SIGN_FLIP,
        SCALING,
        LABEL_FLIP,
        ALIE,
        INNER_PRODUCT,
        MIN_MAX,
        MIMIC,
        ADAPTED,
        BOASTING,
        BACKDOOR,
    )
}
NOBODY: Final = "none"
"""In a study's place for the name of an attack."""


@dataclass(frozen=True, slots=True)
class Hostility:
    """Which silos make which attack, all together."""

    attack: Attack
    silos: tuple[SiloName, ...]


def attack_named(name: str) -> Attack:
    """Raises ConfigurationError for a name that is none."""
    if name not in ATTACKS:
        raise ConfigurationError(f"attack {name!r} is unknown: use {', '.join((NOBODY, *ATTACKS))}")
    return ATTACKS[name]
