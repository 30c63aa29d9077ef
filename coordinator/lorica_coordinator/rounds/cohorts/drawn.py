"""Client sampling (Algorithm 1 of Zhang et al., ACL 2023): which K of the ready silos are in a round.

The draw is public. A silo's place is a digest of plan, round, attempt and name, and the K smallest places are in the
round. So anybody who has the plan can draw again, and a restart does not draw anew. Another attempt does: a silo that
stays silent, or sends what cannot be used, holds up those attempts alone that it is drawn for. Whoever writes the plan
can try many plans, and whoever runs the rounds can abandon attempts; a draw that favours nobody whatever they do would
need entropy of the silos.

Under masks whole release groups are drawn, by the digest of all their names, until the round has K silos or more.
"""

from lorica_coordinator.rounds.cohorts.whole_groups import wanting
from lorica_coordinator.rounds.states import Course
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest, canonical_json, digest_of

_DOMAIN = "lorica/v1/cohort"


def place(plan: Digest, round_number: int, attempt: int, silos: tuple[SiloName, ...]) -> Digest:
    """Of one silo, or of a release group by the names of its silos."""
    return digest_of(canonical_json([_DOMAIN, plan, round_number, attempt, list(silos)]))


def drawn(course: Course, round_number: int, attempt: int, ready: frozenset[SiloName]) -> frozenset[SiloName]:
    """The silos of a training round among those that are `ready`: all of them where the plan draws none, or where K or
    fewer are there, in the closing round, in which nobody trains, and where silos with labels train in turn.
    """
    size = course.terms.cohort_size
    of_all = course.terms.takes_turns and course.terms.who_trains.labelled_round(round_number)
    if not size or len(ready) <= size or round_number > course.terms.rounds or of_all:
        return ready
    masked = course.terms.secure_aggregation and course.groups is not None
    units = course.groups.groups if masked and course.groups is not None else [(silo,) for silo in sorted(ready)]
    chosen: frozenset[SiloName] = frozenset()
    for unit in sorted(
        (tuple(unit) for unit in units if ready.issuperset(unit)),
        key=lambda unit: place(course.terms.plan, round_number, attempt, unit),
    ):
        chosen |= frozenset(unit)
        if len(chosen) >= size and wanting(course, chosen, round_number) is None:
            return chosen
    return ready
