"""Who goes on with a correction of drift: all silos of the round before together, or nobody.

The corrections of silos sum to zero over those who made them, and over no part of them (silo_wire/drift_correction.py).
So a round goes on where its cohort is just those whose updates the round before summed, and the next one may where its
sum has them all again. In any other round every silo begins anew with a correction of zero, which sums to zero whoever
is lost on the way. Another attempt at a round begins anew too: a silo that has lost its own correction declines, and
holds a round up once.
"""

from collections.abc import Collection
from dataclasses import replace

from lorica_coordinator.rounds.states import Course
from lorica_coordinator.rounds.updates import CommittedUpdate, IncludedUpdate
from lorica_security.identifiers import SiloName


def opened_with(course: Course, cohort: Collection[SiloName], attempt: int) -> Course:
    """The course of an attempt that opens: what silos are to go on with is in `included`, or nothing is."""
    if not course.terms.corrects_drift:
        return course
    goes_on = attempt == 1 and {one.silo for one in course.included} == set(cohort)
    return course if goes_on else replace(course, included=())


def included_by(course: Course, updates: Collection[CommittedUpdate]) -> tuple[IncludedUpdate, ...]:
    """What a model of these updates includes, in order of silo name, which the next round may go on with."""
    newest = {one.silo: one for one in course.included}
    summed = {update.silo: IncludedUpdate(silo=update.silo, digest=update.digest) for update in updates}
    if not course.terms.corrects_drift:
        summed = {**newest, **summed}
    elif newest and summed.keys() != newest.keys():  # of those who went on somebody is missing
        summed = {}
    return tuple(summed[silo] for silo in sorted(summed))
