"""The newer ledger that is given with a newer log: nothing that was released is forgotten by it, whoever wrote the copy.

A ledger is signed by nobody. Its copy, or rows of it, may be edited and chained anew, cut, or gone on from; the log that
tells of each sum is the coordinator's own.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.sums.kept_releases import FolderReleases
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.upkeep.later_log import CaughtUp
from lorica_coordinator.edges.upkeep.restore import close_plans
from lorica_coordinator.edges.upkeep.taken_up import require_every_release, told_in
from lorica_coordinator.settings import Settings, settings_text
from lorica_security.audit.entry import Event
from lorica_security.errors import IntegrityError
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.privacy.ledger import Entry, head_of, next_entry
from silo_wire.canonical import Digest
from tests.support.coordinator_edges import round_key

PLANS = (Digest("a" * 64), Digest("b" * 64))


def chained(entries: Sequence[Entry]) -> list[Entry]:
    """The same, each after the one before: what whoever edits a ledger does last."""
    done: list[Entry] = []
    for entry in entries:
        head = head_of(done)
        done.append(replace(entry, sequence=head.sequence + 1, previous=head.digest))
    return done


def release(before: Sequence[Entry], plan: int, number: int) -> Entry:
    noise = GaussianRelease(noise_multiplier=4.0, sampling_rate=1.0, steps=1)
    key = round_key(PLANS[plan], number + 1)
    return next_entry(before, key, "delta", noise, at=1000 + number, subject=f"{plan}{number:063}")


@st.composite
def ledgers(draw: st.DrawFn) -> list[Entry]:
    made: list[Entry] = []
    for number, plan in enumerate(draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))):
        made.append(release(made, plan, number))
    return made


@st.composite
def forged(draw: st.DrawFn, true: Sequence[Entry]) -> list[Entry]:
    """Another ledger of the same kind."""
    entries = list(true)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(entries)))
        how = draw(st.sampled_from(["noise", "plan", "subject", "drop", "cut", "more", "swap", "time"]))
        if how == "more":
            entries.insert(at, release(entries, draw(st.integers(0, 1)), 50 + len(entries)))
        elif how == "cut":
            del entries[at:]
        elif at < len(entries):
            one = entries[at]
            if how == "drop":
                del entries[at]
            elif how == "swap":
                entries[at], entries[0] = entries[0], one
            elif how == "noise":
                entries[at] = replace(one, release=replace(one.release, noise_multiplier=1e9))
            elif how == "plan":
                entries[at] = replace(one, plan=PLANS[one.plan == PLANS[0]])
            elif how == "subject":
                entries[at] = replace(one, subject="e" * 64)
            else:
                entries[at] = replace(one, at=one.at + 1)
    return chained(entries)


Told = Set[tuple[int, Digest, str]]


def told_of(entries: Sequence[Entry]) -> Told:
    return {(entry.sequence, Digest(entry.plan), entry.digest) for entry in entries}


class Folder:
    """A coordinator's, with a ledger of an earlier instant."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        (folder / "federation.toml").write_text(settings_text("north", ["localhost"]))
        self.settings = Settings.read(folder / "federation.toml")
        self.releases = ReleaseLedger(self.settings.state_folder / "privacy")
        self.releases.noise_key(b"")
        kept = FolderReleases(self.releases.folder)
        if entries:
            kept.append(entries)
        self.copy = folder / "copy"

    def settle(
        self, newer: Sequence[Entry], told: Told, *, unsigned: Told = frozenset(), whole: bool = True
    ) -> set[str]:
        """The plans that are closed."""
        self.copy.write_bytes(b"".join(entry.line() for entry in newer))
        self.copy.chmod(0o600)
        since = CaughtUp(released={*told, *unsigned}, signed=set(told))
        return set(close_plans(self.releases, self.settings, since, self.copy, whole=whole))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), whole=st.booleans())
def test_no_copy_of_a_ledger_has_less_released_than_the_log_tells_of(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, whole: bool
) -> None:
    true = data.draw(ledgers())
    before = data.draw(st.integers(0, len(true)))
    newer = data.draw(st.one_of(st.just(true), forged(true)))
    folder = Folder(tmp_path_factory.mktemp("settled"), true[:before])
    try:
        closed = folder.settle(newer, told_of(true), whole=whole)
    except IntegrityError:
        assert newer != true, "the true one is taken"
        return
    after = folder.releases.kept.entries()
    for plan in PLANS:
        if plan not in closed:
            assert [one for one in after if one.plan == plan] == [one for one in true if one.plan == plan]
    if whole and newer == true:
        assert not closed


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_that_were_edited_and_chained_anew_are_refused_beside_the_log(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """By each start, whoever settled by them."""
    true = data.draw(ledgers())
    other = data.draw(forged(true))
    folder = tmp_path_factory.mktemp("rows")
    log = AuditLog(folder / "log", writer="lorica:test", key=new_identity_key(), clock=lambda: 2000.0)
    for entry in true:
        log.append(
            Event.SUM_RELEASED, plan=entry.plan, round=entry.round, attempt=entry.attempt,
            ledger_entry=entry.sequence, ledger_digest=entry.digest, ledger_subject=entry.subject,
        )  # fmt: skip
        log.append(Event.ROUND_CLOSED, plan=entry.plan, round=entry.round, attempt=entry.attempt)
    releases = Folder(folder, other).releases
    try:
        require_every_release(told_in(log.place), releases.kept.entries(), releases.closed())
    except IntegrityError:
        return
    assert other[: len(true)] == true


def test_a_sum_that_was_told_twice_under_one_number_is_the_later_one(tmp_path: Path) -> None:
    """The first try was lost between log and ledger, and its round went on with another sum."""
    first = release([], 0, 1)
    lost, kept = release([first], 0, 2), release([first], 0, 3)
    last = release([first, kept], 0, 4)
    told = told_of([first, lost, kept, last])
    assert Folder(tmp_path, [first]).settle([first, kept, last], told) == set()


def test_entries_that_a_whole_log_does_not_tell_of_are_refused_and_counted_where_the_rest_of_it_is_lost(
    tmp_path: Path,
) -> None:
    """They spend epsilon."""
    first = release([], 0, 1)
    more = release([first], 1, 2)
    folder = Folder(tmp_path, [])
    with pytest.raises(IntegrityError, match="the audit log tells of none after entry 1"):
        folder.settle([first, more], told_of([first]))
    assert folder.settle([first, more], told_of([first]), whole=False) == set(PLANS)
    assert folder.releases.kept.entries() == (first, more)


def test_what_nobody_signed_vouches_for_no_other_ledger_than_what_was_signed(tmp_path: Path) -> None:
    """Whoever has both copies goes on from the log with the digest of a ledger of their own."""
    first = release([], 0, 1)
    second = release([first], 0, 2)
    third = release([first, second], 0, 3)
    less = replace(second, release=replace(second.release, noise_multiplier=1e9))
    forged = chained([first, less, third])
    folder = Folder(tmp_path, [first])
    with pytest.raises(IntegrityError, match="has another entry 2 than the audit log tells of"):
        folder.settle(forged, told_of([first, second]), unsigned=told_of(forged[2:]))
    assert folder.settle([first, second, third], told_of([first, second]), unsigned=told_of([third])) == set()


def test_a_sum_that_nobody_signed_vouches_for_no_ledger_either_once_it_is_in_the_log(tmp_path: Path) -> None:
    """A settling took it over, and says that nobody signed it; what else says so, and was not signed, says nothing."""
    true: list[Entry] = []
    for number in (1, 2, 3):
        true.append(release(true, 0, number))
    forged = chained([true[0], replace(true[1], release=replace(true[1].release, noise_multiplier=1e9)), true[2]])
    log = AuditLog(tmp_path, writer="lorica:test", key=new_identity_key(), clock=lambda: 2000.0)
    said = {"command": "settle", "newer_log": "yes", "newer_ledger": "yes"}
    for entry in (*true, forged[2]):
        log.append(
            Event.SUM_RELEASED, plan=entry.plan, round=entry.round, attempt=entry.attempt,
            ledger_entry=entry.sequence, ledger_digest=entry.digest, ledger_subject=entry.subject,
        )  # fmt: skip
    log.append(Event.OPERATOR_COMMAND, **said, unsigned_from="1", unsigned_to="999")
    log.append(Event.OPERATOR_COMMAND, **said, unsigned_from="4", unsigned_to="6")
    told = told_in(log.place)
    require_every_release(told, true, frozenset())
    with pytest.raises(IntegrityError, match="epsilon that was spent would be forgotten"):
        require_every_release(told, forged, frozenset())


def test_a_sum_that_was_told_last_and_is_not_in_the_copy_closes_its_plan(tmp_path: Path) -> None:
    first = release([], 0, 1)
    assert Folder(tmp_path, []).settle([first], told_of([first, release([first], 1, 2)])) == {PLANS[1]}
