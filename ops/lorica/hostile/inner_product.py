"""Inner product manipulation: so much of minus the honest mean that the plain mean goes backwards."""

from typing import Final

from lorica.hostile.attack import Attack, Exact, Known

BACKWARDS: Final = 0.5
"""How far the plain mean goes backwards, of how far honest silos would go forwards."""


def against(known: Known) -> Exact:
    """-epsilon x mean, with epsilon such that n - f honest means and f of these have the mean -BACKWARDS x mean."""
    honest, hostile = len(known.honest), known.hostile
    return -(honest + BACKWARDS * known.silos) / hostile * known.mean


INNER_PRODUCT: Final = Attack(
    name="inner_product",
    meaning="minus the honest mean, so long that the plain mean is minus half of it",
    source="Xie, Koyejo and Gupta, Fall of Empires, UAI 2019",
    delta=against,
)
