"""The ledger's chain: what was written is read back, and nothing else is taken for it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.audit.chain import Head
from lorica_security.errors import IntegrityError
from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.privacy.ledger import Entry, check_head, head_of, read_ledger, releases_of

WHERE = "privacy/ledger"


def ledger(*releases: GaussianRelease) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for number, release in enumerate(releases, 1):
        head = head_of(entries)
        entries.append(
            Entry(
                sequence=head.sequence + 1,
                previous=head.digest,
                federation="hospitals",
                plan="ab" * 32,
                round=number,
                attempt=1,
                mechanism="gradients",
                release=release,
                at=1_800_000_000 + number,
            )
        )
    return tuple(entries)


def raw(entries: tuple[Entry, ...]) -> bytes:
    return b"".join(entry.line() for entry in entries)


FOUR = ledger(*(GaussianRelease(1.0 + number / 10, 0.01, 50) for number in range(4)))
RELEASES = st.builds(
    GaussianRelease,
    st.floats(min_value=0, max_value=1e6),
    st.floats(min_value=0, max_value=1, exclude_min=True),
    st.integers(min_value=0, max_value=1 << 40),
)


@given(st.lists(RELEASES, max_size=6))
def test_what_was_written_is_read_back(releases: list[GaussianRelease]) -> None:
    entries = ledger(*releases)
    assert read_ledger(raw(entries), WHERE) == (entries, len(raw(entries)))
    assert releases_of(entries) == releases


def test_an_entry_that_a_crash_left_unfinished_is_not_there() -> None:
    whole = raw(FOUR[:3])
    for cut in range(1, len(FOUR[3].line())):
        assert read_ledger(whole + FOUR[3].line()[:cut], WHERE) == (FOUR[:3], len(whole))


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_byte_can_be_changed(position: int, difference: int) -> None:
    data = bytearray(raw(FOUR))
    data[position % len(data)] ^= difference
    if position % len(data) == len(data) - 1:  # without its end the last line counts as unfinished
        assert read_ledger(bytes(data), WHERE) == (FOUR[:3], len(raw(FOUR[:3])))
        return
    with pytest.raises(IntegrityError, match=WHERE):
        read_ledger(bytes(data), WHERE)


@pytest.mark.parametrize(
    "entries",
    [
        FOUR[1:],
        (FOUR[0], *FOUR[2:]),
        (*FOUR, FOUR[3]),
        (FOUR[1], FOUR[0], *FOUR[2:]),
        (*FOUR[:2], *ledger(GaussianRelease(9.0), GaussianRelease(9.0), GaussianRelease(9.0))[2:]),
    ],
    ids=["beginning-gone", "one-gone", "repeated", "order", "of-another-ledger"],
)
def test_entries_that_do_not_follow_each_other(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(IntegrityError, match="does not follow entry"):
        read_ledger(raw(entries), WHERE)


def test_an_entry_that_was_edited() -> None:
    cheaper = replace(FOUR[1], release=replace(FOUR[1].release, noise_multiplier=50.0))
    with pytest.raises(IntegrityError, match="does not follow"):
        read_ledger(raw((FOUR[0], cheaper, *FOUR[2:])), WHERE)
    line = json.loads(FOUR[1].line()) | {"noise_multiplier": (50.0).hex()}
    edited = json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    with pytest.raises(IntegrityError, match="does not have the digest"):
        read_ledger(FOUR[0].line() + edited, WHERE)


def test_the_order_of_the_filter_is_read_back_and_cannot_be_taken_out() -> None:
    first = replace(FOUR[0], order=12)
    assert read_ledger(first.line(), WHERE) == ((first,), len(first.line()))
    assert b'"order"' not in FOUR[0].line(), "ledgers of earlier releases stay as they are"
    for edited in (first.line().replace(b'"order":12,', b""), first.line().replace(b'"order":12', b'"order":64')):
        with pytest.raises(IntegrityError, match="it was edited"):
            read_ledger(edited, WHERE)
    with pytest.raises(IntegrityError, match=f"{WHERE} line 1 is no entry"):
        read_ledger(replace(FOUR[0], order=7).line(), WHERE)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 5000,
        b'{"sequence":1}',
        FOUR[0].line()[:-1] + b" ",
        FOUR[0].line().replace(b"gradients", b"nothing")[:-1],
        FOUR[0].line().replace(b'"steps":50', b'"steps":-1')[:-1],
        FOUR[0].line().replace(b'"steps":50', b'"steps":true')[:-1],
        FOUR[0].line().replace(b'"steps":50', b'"steps":1e2')[:-1],
        FOUR[0].line().replace((1.0).hex().encode(), b"nan")[:-1],
        FOUR[0].line().replace((0.01).hex().encode(), (2.0).hex().encode())[:-1],
    ],
)
def test_lines_that_are_no_entries(line: bytes) -> None:
    with pytest.raises(IntegrityError, match=f"{WHERE} line 1"):
        read_ledger(line + b"\n", WHERE)


def test_a_ledger_that_was_cut_is_behind_what_is_known_of_it() -> None:
    check_head((), Head(), where=WHERE, by="the journal")
    for known in range(1, 5):
        check_head(FOUR, head_of(FOUR[:known]), where=WHERE, by="the journal")
    with pytest.raises(IntegrityError, match="ends with entry 3, but the journal knows entry 4"):
        check_head(FOUR[:3], head_of(FOUR), where=WHERE, by="the journal")


def test_another_ledger_of_the_same_length_is_not_the_one_that_is_known() -> None:
    other = ledger(*(GaussianRelease(5.0) for _ in range(4)))
    with pytest.raises(IntegrityError, match="another entry 4 than the coordinator"):
        check_head(other, head_of(FOUR), where=WHERE, by="the coordinator")
