"""Whether a masked sum can come out of some silos: it is over whole release groups, of silos enough."""

from dataclasses import dataclass

from lorica_coordinator.rounds.cohorts.cohort import named
from lorica_coordinator.rounds.states import Course, Gathering, State, Task
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import Group
from lorica_security.secure_aggregation.parameters import threshold_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanting:
    """Why no sum can come out of `there` silos: `broken` are the groups that lack some, with those; a sum takes
    `needed` silos at least.

    `gone` are silos of these that are not enrolled, `barred` those that are left out for what they did.
    """

    there: int
    broken: tuple[tuple[Group, tuple[SiloName, ...]], ...]
    needed: int
    gone: tuple[SiloName, ...]
    barred: tuple[SiloName, ...]

    @property
    def absent(self) -> tuple[SiloName, ...]:
        return tuple(sorted(silo for _, lacks in self.broken for silo in lacks))

    @property
    def in_words(self) -> str:
        """With what can be done."""
        if not self.broken:
            return (
                f"no masked sum can come out: the plan asks for {self.needed} silos at least, and release groups have "
                f"{self.there}; "
                "`coordinator groups propose` with more silos, or a plan that asks for fewer"
            )
        lacking = "; ".join(f"{','.join(group)} lacks {named(lacks)}" for group, lacks in self.broken)
        says = (
            f"no masked sum can come out yet: it takes whole release groups, {self.needed} silos at least, and "
            f"{lacking}"
        )
        if self.gone:
            says += f"; {named(self.gone)} not being enrolled, `coordinator groups propose` says who is summed without"
        if self.barred:
            says += f"; {named(self.barred)} being left out, `coordinator plan start` lets all in again"
        return says


def wanting(
    course: Course, silos: frozenset[SiloName], round_number: int, *, barred: frozenset[SiloName] = frozenset()
) -> Wanting | None:
    """None: a sum can come out of `silos`, or nothing is masked, or no release groups are known."""
    terms, groups = course.terms, course.groups
    quorum = terms.quorum(round_number)
    if not terms.secure_aggregation or groups is None:
        return None
    there = silos & groups.members
    threshold = threshold_for(len(there), colluders=terms.colluders, asked=terms.threshold)
    if len(there) >= quorum and (
        groups.least_sum(there, threshold=threshold, min_survivors=terms.min_survivors) is not None
    ):
        return None
    broken = tuple(
        (group, tuple(silo for silo in group if silo not in there))
        for group in groups.groups
        if not there.issuperset(group) and terms.taking_part(frozenset(group), round_number, training=True)
    )
    absent = {silo for _, lacks in broken for silo in lacks}
    return Wanting(
        there=len(there),
        broken=broken,
        needed=terms.min_survivors if broken else max(terms.min_survivors, quorum, threshold),
        gone=tuple(sorted(absent - course.population)),
        barred=tuple(sorted(absent & barred)),
    )


def awaited_groups(state: State) -> Wanting | None:
    """What a plan under way waits for, that has the quorum and lacks release groups; None: nothing of that kind."""
    if not isinstance(state, Gathering) or not state.started or state.course.paused:
        return None
    course, opening = state.course, state.opening
    if opening.task is not Task.TRAINING:
        return None
    barred = course.barred_in(opening.round)
    present = course.terms.taking_part(course.ready, opening.round, training=True) - barred
    if len(present) < course.terms.quorum(opening.round):
        return None
    return wanting(course, present, opening.round, barred=barred)
