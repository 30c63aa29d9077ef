"""Target `conformity`: the real trainer, every noised step of it on a tape
(tape.py), and the tape beside what the silo's ledger says.

What is trained is in audited_trainings.py. Half of what is checked is exact; for the rest see checks.py.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lorica.privacy_audit.checks import Check, none
from lorica.privacy_audit.conformity.audited_trainings import LOSS_MULTIPLIER, Audited, Training, World, trained
from lorica.privacy_audit.conformity.contribution_checks import Apart, contribution_checks, parts_of
from lorica.privacy_audit.conformity.key_checks import key_checks
from lorica.privacy_audit.conformity.noise_checks import independence_checks, noise_checks
from lorica.privacy_audit.conformity.sample_checks import sample_checks
from lorica.privacy_audit.conformity.weight_checks import weight_checks
from lorica_security.privacy.accounting import GaussianRelease


def conformity(world: World, audited: Sequence[Audited], work: Path) -> list[Check]:
    """Train each plan, and hold what happened against what is promised; `work` is an empty folder."""
    checks: list[Check] = []
    made: list[Training] = []
    for number, plan in enumerate(audited):
        folder = work / str(number)
        folder.mkdir()
        of_plan = trained(world, plan, folder)
        checks += _of_plan(world, plan, of_plan)
        made += of_plan
    return [*checks, *independence_checks(made), *key_checks("all trainings", made)]


def _of_plan(world: World, audited: Audited, trainings: Sequence[Training]) -> Iterator[Check]:
    about = audited.name
    yield from _ledger(about, trainings)
    if any(len(training.tape.steps) == 0 for training in trainings):
        return
    yield from noise_checks(about, trainings)
    apart = Apart.of(trainings[0].oracle)
    parts = [parts_of(apart, training) for training in trainings]
    yield from contribution_checks(about, trainings, parts)
    present = [found.coefficients > 0.5 for found in parts]
    yield from sample_checks(about, trainings, present)
    yield from weight_checks(world, about, trainings)


def _ledger(about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    numbers, unit_field = trainings[0].numbers, trainings[0].unit_field
    expected = [("gradients", numbers, unit_field), ("loss_reduction", GaussianRelease(LOSS_MULTIPLIER), unit_field)]
    wrong = [
        training.name
        for training in trainings
        if [(entry.mechanism, entry.release, entry.unit) for entry in training.entries] != expected
    ]
    yield none(
        "ledger", about, wrong, "mechanisms, multipliers, rate, steps or unit in the ledger are not those of the plan"
    )
    taken = [training.name for training in trainings if len(training.tape.steps) != training.gradients.steps]
    yield none("number of steps", about, taken, "more or fewer noised steps were made than the ledger says")
