"""The coordinator's memory of privacy ledgers: what it stores, what it refuses, and that it outlives everything else of
a silo."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_security.audit.chain import Head
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import public_key_from_bytes
from tests.support.coordinator_service import FEDERATION, Running, load_keys, make_coordinator_folder, running

FIRST, SECOND, OTHER, THIRD = Head(2, "a1" * 32), Head(4, "b2" * 32), Head(4, "c3" * 32), Head(9, "d4" * 32)
SILO = SiloName("hospital-a")


@pytest.fixture
async def at_work(tmp_path: Path) -> AsyncIterator[Running]:
    make_coordinator_folder(tmp_path / "c")
    async with running(tmp_path / "c") as coordinator:
        yield coordinator


async def shown(at: Running, head: Head, after: Head, silo: SiloName = SILO) -> Head:
    """What the receipt names, once its signature is found right."""
    receipt = await at.service.countersign_ledger(silo, head, after=after)
    key = public_key_from_bytes(load_keys(at.folder).identity_public_key)
    receipt.check(key, federation=FEDERATION, silo=silo)
    return receipt.newest


async def test_a_ledger_that_grows_is_followed_and_the_same_again_is_signed_again(at_work: Running) -> None:
    assert await shown(at_work, Head(), Head()) == Head()
    assert await shown(at_work, FIRST, Head()) == FIRST
    assert await shown(at_work, FIRST, Head()) == FIRST  # the answer was lost
    assert await shown(at_work, SECOND, FIRST) == SECOND
    assert await shown(at_work, SECOND, SECOND) == SECOND
    assert at_work.metric("lorica_errors_total", kind="Conflict") == 0


@pytest.mark.parametrize("after", [Head(), FIRST, SECOND, OTHER])
@pytest.mark.parametrize("head", [Head(), FIRST, OTHER])
async def test_a_lower_head_or_another_of_the_same_number_is_a_conflict_and_forgotten(
    at_work: Running, head: Head, after: Head
) -> None:
    await shown(at_work, SECOND, Head())
    assert await shown(at_work, head, after) == SECOND
    assert await shown(at_work, SECOND, SECOND) == SECOND
    assert at_work.metric("lorica_errors_total", kind="Conflict") == 1


async def test_a_longer_ledger_that_is_not_said_to_hold_the_known_entry_is_not_stored(at_work: Running) -> None:
    await shown(at_work, SECOND, Head())
    for after in (Head(), FIRST, OTHER, THIRD):
        assert await shown(at_work, THIRD, after) == SECOND
    assert await shown(at_work, THIRD, SECOND) == THIRD


async def test_silos_have_ledgers_of_their_own(at_work: Running) -> None:
    await shown(at_work, SECOND, Head())
    assert await shown(at_work, FIRST, Head(), silo=SiloName("bank-b")) == FIRST
    assert await shown(at_work, SECOND, SECOND) == SECOND


async def test_the_head_outlives_a_restart_and_an_enrolment_under_other_keys(tmp_path: Path) -> None:
    make_coordinator_folder(tmp_path / "c")
    async with running(tmp_path / "c") as at:
        await at.enrolled(SILO)
        await shown(at, SECOND, Head())
    async with running(tmp_path / "c") as at:
        assert await shown(at, FIRST, Head()) == SECOND
        await at.enrolled(SILO)
        assert await shown(at, FIRST, FIRST) == SECOND


HEADS = st.builds(Head, st.integers(min_value=1, max_value=6), st.sampled_from(["0a" * 32, "0b" * 32]))


@given(shown_in_order=st.lists(st.tuples(HEADS, HEADS), max_size=12))
def test_whatever_is_shown_the_known_head_never_goes_back(
    tmp_path_factory: pytest.TempPathFactory, shown_in_order: list[tuple[Head, Head]]
) -> None:
    store = SqlRoundStore(tmp_path_factory.mktemp("heads") / "state.sqlite", FEDERATION)
    known: Head | None = None
    for head, after in shown_in_order:
        newest = store.countersign_ledger(SILO, head, after=after, at=1.0)
        if known is not None and newest != known:
            assert (newest, known) == (head, after)
            assert newest.sequence > known.sequence
        known = newest
    store.close()
