"""What was secret in a masked round is overwritten in memory when it is over: of a real coordinator and four real
agents.

On disk: tests/crash/test_kill_masked.py. Of the protocol's machines alone: tests/unit/test_secagg_secrets.py.
"""

import asyncio
import gc
import traceback
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import Advertisement, Agreement, MaskedInput, Reveal, SharedKeys
from silo_wire.messages import RoundKey
from tests.integration.test_attacks_on_masked_rounds import in_its_place, instead, rogue_template, with_false_shares
from tests.support.coordinator import FederationTemplate
from tests.support.rogue_silos import HOSPITAL, SILOS, Attack, Play, PlayedSilo, honestly, played

__all__ = ["rogue_template"]

Playing = Callable[[Attack], AbstractAsyncContextManager[Play]]


@dataclass(frozen=True)
class Owned:
    """The buffer of every secret that was made during a test, kept alive beyond the secret itself, and by whom it was
    made.

    `earlier`: secrets that other tests left in this process.
    """

    earlier: tuple[Secret, ...]
    buffers: list[tuple[bytearray, str]] = field(default_factory=list)


def alive() -> tuple[Secret, ...]:
    gc.collect()
    return tuple(it for it in gc.get_objects() if type(it) is Secret and not it.erased)


@pytest.fixture
def playing(rogue_template: FederationTemplate, tmp_path: Path) -> Playing:
    return lambda attack: played(rogue_template, tmp_path, attack)


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Owned:
    owned = Owned(alive())
    make, take = Secret.__init__, Secret.taking.__func__  # type: ignore[attr-defined]

    def keep(buffer: bytearray) -> None:
        frames = reversed(traceback.extract_stack(limit=7)[:-2])
        owned.buffers.append((buffer, " < ".join(f"{frame.name}:{frame.lineno}" for frame in frames)))

    def made(self: Secret, data: Any) -> None:
        make(self, data)
        keep(self._buffer)

    def taken(cls: type[Secret], buffer: bytearray) -> Secret:
        secret: Secret = take(cls, buffer)
        keep(buffer)
        return secret

    monkeypatch.setattr(Secret, "__init__", made)
    monkeypatch.setattr(Secret, "taking", classmethod(taken))
    return owned


def check_overwritten(owned: Owned) -> None:
    assert len(owned.buffers) > 200
    left = [maker for buffer, maker in owned.buffers if any(buffer)]
    assert left == [], f"{len(left)} of {len(owned.buffers)} secrets were not overwritten"
    assert [it for it in alive() if all(it is not earlier for earlier in owned.earlier)] == []


async def test_of_rounds_that_are_applied(playing: Playing, owned: Owned) -> None:
    async with playing(honestly) as play:
        for number in (1, 2):
            assert (await play.closed(number)).outcome == "applied"
    check_overwritten(owned)


async def test_of_an_attempt_that_is_abandoned(playing: Playing, owned: Owned) -> None:
    async with playing(instead(SharedKeys, with_false_shares)) as play:
        assert (await play.closed(1)).attempt == 2
    check_overwritten(owned)


async def test_of_a_silo_that_is_not_waited_for(playing: Playing, owned: Owned) -> None:
    async with playing(instead(Agreement, lambda silo, it: None)) as play:
        await play.deadline("consistency check")
        assert (await play.closed(2)).outcome == "applied"
    check_overwritten(owned)


async def hangs(silo: PlayedSilo, kind: type) -> None:
    """Until `silo` is about to send its first message of this kind, which it never does; after that it is honest."""
    reached = asyncio.Event()

    async def hang(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        silo.attack = honestly
        reached.set()
        await asyncio.Event().wait()

    silo.attack = in_its_place(kind, hang)
    await reached.wait()


@pytest.mark.parametrize(
    "kind", [Advertisement, SharedKeys, MaskedInput, Reveal], ids=["keys", "boxes", "vector", "shares"]
)
async def test_of_a_silo_that_was_restarted_in_the_middle(playing: Playing, owned: Owned, kind: type) -> None:
    """The root that the killed process had goes with its memory, which is the test's; the next one reads its own."""
    async with playing(honestly) as play:
        hospital = play.silos[HOSPITAL]
        await hangs(hospital, kind)
        root: Secret = hospital.at.opening.root
        await hospital.restart()
        for number in (1, 2):
            play.check_made_by(await play.closed(number), *SILOS)
    assert not root.erased
    root.erase()
    check_overwritten(owned)


async def test_of_an_attempt_whose_journal_was_damaged(playing: Playing, owned: Owned) -> None:
    """The silo forfeits it, and erases what is left of it; the others' sum comes out, and the next round is
    everybody's."""
    async with playing(honestly) as play:
        hospital = play.silos[HOSPITAL]
        await hangs(hospital, SharedKeys)
        root: Secret = hospital.at.opening.root
        journal = hospital.folder.masking / "attempt"
        damaged = bytearray(journal.read_bytes())
        damaged[60] ^= 1
        journal.write_bytes(damaged)
        await hospital.restart()
        await play.deadline("share keys", of=HOSPITAL)
        others = [silo for silo in SILOS if silo != HOSPITAL]
        play.check_made_by(await play.closed(1), *others)
        play.check_made_by(await play.closed(2), *SILOS)
    assert not journal.exists()
    root.erase()
    check_overwritten(owned)
