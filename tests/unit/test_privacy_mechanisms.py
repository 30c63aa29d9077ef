"""Mechanisms of the privacy ledger are values: their names stand on disk for good, and one more is one line more."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lorica_security.errors import ConfigurationError, IntegrityError
from lorica_security.privacy.accounting import Budget, GaussianRelease
from lorica_security.privacy.ledger import Entry, next_entry, read_ledger
from lorica_security.privacy.mechanisms import named
from lorica_security.privacy.mechanisms.mechanism import Mechanism
from lorica_security.privacy.mechanisms.named import MECHANISMS, mechanism_named

ATTEMPT = SimpleNamespace(federation="hospitals", plan="ab" * 32, round=1, attempt=1)
TOTALS = Mechanism(name="totals", meaning="noised totals of a table")


def entry(mechanism: str, *, makers: int = 1) -> Entry:
    return next_entry([], ATTEMPT, mechanism, GaussianRelease(2.0, makers=makers), at=1_800_000_000)


# As ledgers of earlier releases have them: (name, of any unit, makers, digest of an entry).
ON_DISK = [
    ("gradients", False, 1, "8312040e5319773be3a47b01308f8547fd5ca4497704122490742632984ef0f7"),
    ("loss_reduction", False, 1, "1e54cd6966c12bad852f4182188ad5adf3e36a7197d899a61f75434c2f7ca8fd"),
    ("delta", True, 1, "5af53dc1f501268cd48b29f97611f5203ff1cb4815edbc32269f860577074592"),
    ("joint_gradients", False, 3, "6f334ae29941cd291b86c5c43db95543352570355012e5221818dc0e0b1ce6ac"),
]


@pytest.mark.parametrize(("name", "of_any_unit", "makers", "digest"), ON_DISK)
def test_entries_on_disk_keep_their_words_and_digests(name: str, of_any_unit: bool, makers: int, digest: str) -> None:
    written = entry(name, makers=makers)
    assert written.digest == digest
    assert read_ledger(written.line(), "ledger") == ((written,), len(written.line()))
    assert (mechanism_named(name).of_any_unit, mechanism_named(name).joint) == (of_any_unit, makers > 1)


def test_each_is_in_the_table_above_once() -> None:
    assert [mechanism.name for mechanism in MECHANISMS] == [name for name, *_ in ON_DISK]


@pytest.mark.parametrize(("name", "makers"), [("gradients", 2), ("delta", 2), ("joint_gradients", 1)])
def test_an_entry_whose_makers_do_not_go_with_its_mechanism_is_refused(name: str, makers: int) -> None:
    with pytest.raises(IntegrityError, match="ledger line 1 is no entry of a privacy ledger"):
        read_ledger(entry(name, makers=makers).line(), "ledger")


def test_one_more_is_written_read_and_counted_once_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    written = entry(TOTALS.name)
    patients = Budget(epsilon=1.0, dp_delta=1e-6, unit="patient")
    with pytest.raises(IntegrityError, match="ledger line 1 is no entry"):
        read_ledger(written.line(), "ledger")
    with pytest.raises(ConfigurationError, match=r"'totals' is no mechanism .* gradients, loss_reduction, delta"):
        patients.relation_over([(TOTALS.name, "")])

    monkeypatch.setitem(named._BY_NAME, TOTALS.name, TOTALS)
    assert read_ledger(written.line(), "ledger")[0] == (written,)
    assert patients.relation_over([(TOTALS.name, "")]) is None, "it was private for each line alone"
    assert patients.relation_over([(TOTALS.name, "patient"), ("delta", "")]) == "add_or_remove_one"

    monkeypatch.setitem(named._BY_NAME, TOTALS.name, replace(TOTALS, of_any_unit=True))
    assert patients.relation_over([(TOTALS.name, "")]) == "add_or_remove_one"
