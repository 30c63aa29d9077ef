"""Who leads, for Prometheus: of coordinators whose state is in PostgreSQL, those that stand by included."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

LEADERSHIP: Final = {
    "lorica_leading": "1 while this coordinator leads, 0 while it stands by or cannot tell whether it leads.",
    "lorica_leadership_term": "The term that it leads in; 0 while it stands by.",
    "lorica_standby_coordinators": "Coordinators on other folders that stand by, as the one that leads sees them "
    "in the database.",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """`standbys`: None where this coordinator does not lead, and so cannot tell."""

    leads: bool
    term: int
    standbys: int | None


STANDS_BY: Final = Standing(leads=False, term=0, standbys=None)


class LeadershipCollector(Collector):
    """`of` is asked at each scrape."""

    def __init__(self, of: Callable[[], Standing]) -> None:
        self._of = of

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return (GaugeMetricFamily(name, meaning) for name, meaning in LEADERSHIP.items())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._of()
        values = (float(now.leads), now.term, now.standbys)
        for (name, meaning), value in zip(LEADERSHIP.items(), values, strict=True):
            if value is not None:
                yield GaugeMetricFamily(name, meaning, value=value)
