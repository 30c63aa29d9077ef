"""Population, ready silos, cohort: who is in a round, and when nobody is waited for any longer."""

from collections.abc import Iterable, Set

from lorica_security.identifiers import SiloName


def cohort_of(ready: Set[SiloName]) -> tuple[SiloName, ...]:
    """The silos of a round that opens now, in the order in which updates are summed."""
    return tuple(sorted(ready))


def everyone_is_ready(*, population: Set[SiloName], ready: Set[SiloName]) -> bool:
    """Whether nobody of the population is missing; an empty one is never ready."""
    return bool(population) and ready >= population


def outstanding(cohort: Iterable[SiloName], *settled: Iterable[SiloName]) -> tuple[SiloName, ...]:
    """Those of the cohort that none of `settled` holds: not yet committed, declined or reported."""
    done = {silo for group in settled for silo in group}
    return tuple(silo for silo in cohort if silo not in done)


def named(silos: Iterable[SiloName]) -> str:
    """Silos in a sentence."""
    return ", ".join(silos) or "none"
