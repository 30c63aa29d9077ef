"""Of target `conformity`: what the randomness of trainings comes from."""

from collections.abc import Iterator, Sequence

from lorica.privacy_audit.checks import Check, none
from lorica.privacy_audit.conformity.audited_trainings import Training


def key_checks(about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    without = [training.name for training in trainings if not training.tape.keys or training.tape.foreign]
    yield none("keys from the operating system", about, without, "randomness came from a key that is not from there")
    keys = [key for training in trainings for key in training.tape.keys]
    twice = ["a key"] * (len(keys) - len(set(keys)))
    yield none("keys are used once", about, twice, "two trainings drew from one key")
